"""A small byte-level decoder-only transformer; all its normalizations are dispatched."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transformer_engine_fl.cli.demo.corpus import VOCABULARY
from transformer_engine_fl.functional import layer_norm, rms_norm

__all__ = ["Decoder", "Shape"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model, of its batches, and of the held-out text (in rows)."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    held_out: int

    @property
    def tokens(self) -> int:
        """Tokens in a batch."""
        return self.batch * self.context


class RMSNorm(nn.Module):
    """``functional.rms_norm`` with its parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)


class LayerNorm(nn.Module):
    """``functional.layer_norm`` with its parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias)


class Block(nn.Module):
    """Pre-norm attention and feed-forward layer, each with a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        added: Tensor = self.down(F.gelu(self.up(self.feed_forward_norm(x))))
        return x + added

    def _attend(self, x: Tensor) -> Tensor:
        rows, context, width = x.shape
        heads = self.qkv(x).view(rows, context, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.projection(mixed.transpose(1, 2).reshape(rows, context, width))
        return output


class Decoder(nn.Module):
    """Bytes in, the next byte's logits out; RMS norm in the blocks, layer norm at the end."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.final_norm = LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self._initialize(shape)

    def _initialize(self, shape: Shape) -> None:
        stds = {"tokens": 0.3, "positions": 0.3, "head": 0.02}
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = stds.get(name.partition(".")[0], 0.7 * shape.width**-0.5)
                # The deeper the model, the smaller each addition to the residual stream.
                added = name.endswith(("projection.weight", "down.weight"))
                nn.init.normal_(parameter, std=std * (2 * shape.layers) ** (-0.5 * added))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        logits: Tensor = self.head(self.final_norm(self.blocks(x)))
        return logits

    def loss(self, tokens: Tensor, following: Tensor) -> Tensor:
        """Mean cross entropy of the next byte, in nats."""
        logits = self(tokens)
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())
