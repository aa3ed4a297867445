"""Dropout in plain PyTorch: Philox4x32-10 in integer arithmetic, the mask bit by bit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends.reference._values import as_written
from transformer_engine_fl.ops.dropout import scale_of_kept

__all__ = ["dropout_bwd", "dropout_fwd", "philox", "words_of_blocks"]

_WORD = 0xFFFFFFFF


def _product(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """(high, low) word of a product."""
    # int64 wraps around, so all 64 bits of the product are right, whatever its sign. Longer code
    # would take inductor minutes for ten rounds, as it expands each use of a value.
    product = factor * word
    return product >> 32 & _WORD, product & _WORD


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four words for each counter; all words in int64, none negative."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _product(0xD2511F53, c0)
        high1, low1 = _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def words_of_blocks(block: Tensor, seed: int, offset: int) -> Tensor:
    """``[..., 4]``: the words of the blocks with the numbers ``block`` (int64, not negative)."""
    counter = (
        block & _WORD,
        block >> 32,
        torch.full_like(block, offset % 2**32),
        torch.full_like(block, offset // 2**32),
    )
    return torch.stack(philox(counter, (seed % 2**32, seed // 2**32)), -1)


def _pack(kept: Tensor) -> Tensor:
    bits = F.pad(kept.to(torch.uint8), (0, -kept.numel() % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=kept.device)).sum(-1).to(torch.uint8)


def _unpack(mask: Tensor, count: int) -> Tensor:
    bits = mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (bits & 1).flatten()[:count].bool()


def _scaled(tensor: Tensor, kept: Tensor, probability: float) -> Tensor:
    """The kept elements divided by 1 - p, zero elsewhere; contiguous."""
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    scaled = wide.contiguous() * scale_of_kept(probability)
    scaled = torch.where(kept.view(tensor.shape), scaled, 0.0)
    return scaled.to(tensor.dtype)


@as_written
def dropout_fwd(
    input: Tensor, dropout_probability: float, *, seed: int, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Dropout with a bit-packed mask."""
    ops.dropout_fwd.check(input, dropout_probability, seed=seed, offset=offset)
    block = torch.arange((input.numel() + 7) // 8, device=input.device)
    words = words_of_blocks(block, seed, offset)
    numbers = torch.stack([words & 0xFFFF, words >> 16], -1).flatten()[: input.numel()]
    kept = numbers >= int(dropout_probability * 2**16)
    return _scaled(input, kept, dropout_probability), _pack(kept)


@as_written
def dropout_bwd(grad_output: Tensor, mask: Tensor, dropout_probability: float) -> Tensor:
    """Gradient of dropout."""
    ops.dropout_bwd.check(grad_output, mask, dropout_probability)
    kept = _unpack(mask, grad_output.numel())
    return _scaled(grad_output, kept, dropout_probability)
