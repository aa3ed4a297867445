"""A small GPT on ``functional``, with a KV cache and an optimizer.

The device is an argument, so that what the GPU tests do can also be tested on a CPU.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transformer_engine_fl import functional, ops

__all__ = [
    "GPT",
    "IDS",
    "LARGE",
    "SETS",
    "TIMES",
    "TINY",
    "Cache",
    "Shape",
    "Trainer",
    "batches",
    "check_same",
    "error",
    "exact",
    "gradients",
    "leave_no_gradients",
    "suited",
]


_SEEDED = threading.Lock()
"""Held while parameters are drawn: all threads share torch's default generator."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of its batches."""

    width: int = 512
    layers: int = 2
    heads: int = 8
    kv_heads: int = 2
    hidden: int = 1024
    words: int = 1024
    context: int = 128
    batch: int = 4
    experts: int = 0
    """Experts of the last layer; 0: it is an ordinary layer."""
    topk: int = 4
    dropout: float = 0.1
    fused_gelu: bool = True

    @property
    def head(self) -> int:
        """Features of an attention head."""
        return self.width // self.heads


def suited(shape: Shape, prefer: str) -> Shape:
    """The shape for a set of implementations: vendor.cuda declines a GELU fused into a GEMM.

    Declining is an error under a strict policy, in compiled code and in a CUDA graph.
    """
    return dataclasses.replace(shape, fused_gelu=not prefer.startswith("vendor"))


IDS = {"flagos": "default.flagos", "vendor:nvidia": "vendor.cuda"}
"""The sets with kernels, by the preference that selects them."""
SETS = tuple(IDS)
TIMES = 3
"""A set's error may be this many times that of the definitions in bfloat16."""
LARGE = Shape()
TINY = Shape(32, 2, 4, 2, 32, 48, context=16, batch=2)
"""Sizes for a CPU, and for Triton's interpreter."""


class Linear(nn.Module):
    """``functional.linear``; if ``native``, torch's own, which autocast casts."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.main_grad: Tensor | None = None
        self.native = False

    def forward(self, x: Tensor, *, gelu: bool = False) -> Tensor:
        if self.native:
            x = F.linear(x, self.weight, self.bias)
            return functional.gelu(x) if gelu else x
        return functional.linear(x, self.weight, self.bias, gelu=gelu, main_grad=self.main_grad)


class Experts(nn.Module):
    """A mixture of experts: a router, and a SwiGLU layer for each expert."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, count = shape, shape.experts
        self.router = Linear(shape.width, count)
        sizes = (2 * shape.hidden, shape.width), (shape.width, shape.hidden)
        self.up, self.down = (
            nn.ParameterList(torch.randn(size) * size[1] ** -0.5 for _ in range(count))
            for size in sizes
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and the auxiliary loss that balances the experts' loads."""
        rows, topk, count = x.flatten(0, -2), self.shape.topk, self.shape.experts
        tokens = rows.shape[0]
        logits = self.router(rows).float()
        probs, chosen = functional.topk_router(logits, topk, score_function="sigmoid")
        scores, _ = functional.score_for_moe_aux_loss(logits, topk, score_function="sigmoid")
        loads = chosen.sum(0)
        splits = [tokens] * count if topk == count else loads.tolist()  # synchronises
        permuted, places = functional.moe_permute(rows, chosen, tokens * topk)
        hidden = functional.swiglu(functional.grouped_linear(permuted, list(self.up), splits))
        output = functional.grouped_linear(hidden, list(self.down), splits)
        together = functional.moe_unpermute(output, places, probs.to(x.dtype))
        aux = functional.moe_aux_loss(scores, loads.int(), tokens, topk, 1e-2)
        return together.view_as(x), aux


class Block(nn.Module):
    """Attention and a feed-forward layer; x, in and out, is the residual stream.

    Blocks of even and of odd numbers use different operators: one for q, k and v or one for each
    in the rotary embedding, SwiGLU or GELU in the feed-forward layer.
    """

    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        self.shape, self.number = shape, number
        width, group = shape.width, shape.heads // shape.kv_heads
        self.split = [group * shape.head, shape.head, shape.head]
        self.norm, self.second_norm = (nn.Parameter(torch.ones(width)) for _ in range(2))
        self.qkv = Linear(width, shape.kv_heads * sum(self.split), bias=True)
        self.projection = Linear(width, width)
        self.experts = None
        if shape.experts and number == shape.layers - 1:
            self.experts = Experts(shape)
        else:
            gated = number % 2 == 0
            self.up = Linear(width, shape.hidden * (1 + gated), bias=True)
            self.down = Linear(shape.hidden, width, bias=True)

    def rotated(self, packed: Tensor, freqs: Tensor, start: Tensor | None) -> tuple[Tensor, ...]:
        """Queries and keys after the rotary embedding, and values, all ``bshd``."""
        packed = packed.unflatten(-1, (self.shape.kv_heads, -1))
        options: Any = {"qkv_format": "bshd", "start_positions": start}
        if self.number % 2 == 0:
            return functional.qkv_rope(packed, freqs, freqs, qkv_split=self.split, **options)
        q, k, v = packed.split(self.split, -1)
        q = q.unflatten(-1, (-1, self.shape.head)).flatten(2, 3)
        return functional.rope(q, freqs, **options), functional.rope(k, freqs, **options), v

    def feed_forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.experts is not None:
            return self.experts(x)
        if self.number % 2 == 0:
            return self.down(functional.swiglu(self.up(x))), None
        if self.shape.fused_gelu:
            return self.down(self.up(x, gelu=True)), None
        return self.down(functional.gelu(self.up(x))), None

    def dropout(self, x: Tensor, step: int, place: int) -> Tensor:
        if not (self.training and self.shape.dropout):
            return x
        seed = 10 * self.number + place
        return functional.dropout(x, self.shape.dropout, seed=seed, offset=step << 32)

    def forward(
        self, x: Tensor, freqs: Tensor, step: int = 0, cache: tuple[Any, ...] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The next block's x, and the experts' auxiliary loss or None."""
        packed = self.qkv(functional.rms_norm(x, self.norm))
        q, k, v = self.rotated(packed, freqs, None if cache is None else cache[-1])
        if cache is None:
            mixed = functional.attention(q, k, v, attn_mask_type="causal")
        else:
            mixed = _of_the_cached(q, k, v, *cache[:-1])
        mixed = self.dropout(self.projection(mixed.flatten(2)), step, 0)
        # Under autocast, ``mixed`` is bfloat16 and x float32.
        normed, x = functional.rms_norm_add(mixed.to(x.dtype), x, self.second_norm)
        output, aux = self.feed_forward(normed)
        return x + self.dropout(output, step, 1), aux


def _of_the_cached(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, new: Tensor, all_: Tensor
) -> Tensor:
    """Append the new keys and values to the cache, then attend to all that are cached."""
    ops.copy_to_kv_cache(k, v, keys, values, new, all_, qkv_format="bshd")
    rows = q.shape[0]
    return functional.attention(
        q,
        keys[:rows],
        values[:rows],
        attn_mask_type="padding_causal_bottom_right",
        cu_seqlens_q=new,
        cu_seqlens_kv=all_,
    )


class Cache:
    """Keys and values of each layer and row, and how many each row has; unused places are NaN."""

    def __init__(self, model: GPT, rows: int) -> None:
        shape, like = model.shape, model.tokens
        size = (rows, shape.context, shape.kv_heads, shape.head)
        made = [
            torch.full(size, torch.nan, dtype=like.dtype, device=like.device)
            for _ in range(2 * shape.layers)
        ]
        self.keys, self.values = made[::2], made[1::2]
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=like.device)

    def keep(self, rows: Tensor) -> None:
        """Move these rows (int32) of the cache to the first rows, in this order."""
        count = len(rows)
        lengths = torch.zeros_like(self.lengths)
        lengths[:count] = self.lengths[rows.long()]
        none = torch.zeros(count + 1, dtype=torch.int32, device=rows.device)
        for keys, values in zip(self.keys, self.values, strict=True):
            nothing = keys[:count, :0]
            ops.copy_to_kv_cache(
                nothing, nothing, keys, values, none, _sums(lengths[:count]),
                batch_indices=rows, qkv_format="bshd",
            )  # fmt: skip
        self.lengths.copy_(lengths)


def _sums(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


class GPT(nn.Module):
    """Returns the loss of predicting the next words.

    The parameters depend on the shape alone, up to rounding to the dtype.
    """

    def __init__(self, shape: Shape, device: Any = "cpu", dtype: Any = torch.float32) -> None:
        super().__init__()
        self.shape, self.checkpointed = shape, False
        with _SEEDED, torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.tokens = nn.Parameter(torch.randn(shape.words, shape.width))
            self.blocks = nn.ModuleList(Block(shape, it) for it in range(shape.layers))
            self.norm = nn.Parameter(torch.ones(shape.width))
            self.norm_bias = nn.Parameter(torch.zeros(shape.width))
            self.head = Linear(shape.width, shape.words)
        self.to(device, dtype)
        places = torch.arange(shape.context, dtype=torch.float64)[:, None]
        speeds = 10_000 ** -torch.linspace(0, 1, shape.head // 2, dtype=torch.float64)
        angles = (places * speeds).float().repeat(1, 2)
        self.register_buffer("freqs", angles[:, None, None].to(device))

    def hidden(self, tokens: Tensor, step: int = 0) -> tuple[Tensor, Tensor | None]:
        """The input of the head, and the experts' auxiliary loss or None."""
        x, aux = F.embedding(tokens, self.tokens), None
        for block in self.blocks:
            x = x.to(block.norm.device)  # a pipeline may have its blocks on several devices
            freqs = self.freqs.to(x.device)
            if self.checkpointed:
                x, more = checkpoint(block, x, freqs, step, use_reentrant=False)
            else:
                x, more = block(x, freqs, step)
            aux = aux if more is None else more
        return functional.layer_norm(x, self.norm.to(x.device), self.norm_bias.to(x.device)), aux

    def forward(self, tokens: Tensor, following: Tensor, step: int = 0, way: str = "fused") -> Any:
        """The loss. ``way``: "fused" into the head, with its gradients in the forward ("at once"),
        or from "logits".
        """
        hidden, aux = self.hidden(tokens, step)
        following = following.to(hidden.device)
        if way == "logits" or self.head.native:
            loss = functional.cross_entropy(self.head(hidden), following, z_loss=1e-4)
        else:
            loss = functional.fused_linear_cross_entropy(
                hidden,
                self.head.weight.to(hidden.device),
                following,
                z_loss=1e-4,
                gradient_in_forward=way == "at once",
            )
        return loss if aux is None else loss + aux

    def serve(self, tokens: Tensor, new: Tensor, cache: Cache) -> Tensor:
        """The logits after the last new word of each row, which has ``new`` (int32) new words."""
        rows = tokens.shape[0]
        before = cache.lengths[:rows].clone()
        sums = _sums(new), _sums(before + new)
        x = F.embedding(tokens, self.tokens)
        for block, keys, values in zip(self.blocks, cache.keys, cache.values, strict=True):
            x, _ = block(x, self.freqs, 0, (keys, values, *sums, before))
        cache.lengths[:rows] += new
        last = x[torch.arange(rows, device=x.device), new.long() - 1]
        return self.head(functional.layer_norm(last, self.norm, self.norm_bias))

    def logits(self, tokens: Tensor) -> Tensor:
        """The logits after every word, without a cache."""
        return self.head(self.hidden(tokens)[0])


class Trainer:
    """A model, and Adam on clipped gradients, whose learning rate and state are on the device.

    A small eps would make the first steps depend on the signs of gradients, which rounding decides
    where these are tiny; hence a large one.
    """

    def __init__(self, model: GPT, lr: float = 3e-3, largest: float = 1.0) -> None:
        self.model, self.largest = model, largest
        self.params = list(model.parameters())
        like, low = self.params[0], self.params[0].dtype == torch.bfloat16
        self.masters = [it.detach().float().clone() for it in self.params] if low else None
        self.moments = [
            [torch.zeros_like(it, dtype=torch.float32) for it in self.params] for _ in range(2)
        ]
        self.step = torch.zeros(1, dtype=torch.int32, device=like.device)
        self.noop = torch.zeros_like(self.step)
        self.lr = torch.full((1,), lr, device=like.device)

    def state(self) -> list[Tensor]:
        """Every tensor that a step changes."""
        return [*self.params, *(self.masters or ()), *self.moments[0], *self.moments[1], self.step]

    @torch.no_grad()
    def update(self) -> Tensor:
        """A step of Adam with the current gradients; returns their norm before clipping."""
        grads = [it.grad for it in self.params]
        norm, _ = ops.multi_tensor_l2norm(grads, noop_flag=self.noop)
        factor = (self.largest / (norm + 1e-6)).clamp(max=1.0)
        ops.multi_tensor_scale_tensor(grads, grads, factor)
        self.step += 1
        params = [it.detach() for it in self.params]
        numbers: Any = {"eps": 1e-3, "weight_decay": 0.01, "noop_flag": self.noop}
        if self.masters is None:
            ops.multi_tensor_adam_capturable(
                grads, params, *self.moments, self.lr, self.step, **numbers
            )
        else:
            ops.multi_tensor_adam_capturable_master(
                grads, params, *self.moments, self.masters, self.lr, self.step, **numbers
            )
        return norm

    def one(self, batch: Sequence[Tensor], **options: Any) -> Tensor:
        """A step that leaves the gradients in place; returns its loss."""
        loss = self.model(*batch, **options)
        loss.backward()
        self.update()
        return loss.detach()

    def train(self, given: Iterable[Sequence[Tensor]], **options: Any) -> list[Tensor]:
        """A step for each of the batches; returns the losses, on the device."""
        losses = []
        for number, batch in enumerate(given):
            losses.append(self.one(batch, step=number, **options))
            leave_no_gradients(self.model)
        return losses

    def train_in_a_graph(self, given: Sequence[Sequence[Tensor]], **options: Any) -> list[Tensor]:
        """``train`` by replays of one captured step: dropout uses the masks of step 0 each time."""
        state = [it.detach().clone() for it in self.state()]
        place = [it.clone() for it in given[0]]
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(2):
                self.one(place, **options)
                leave_no_gradients(self.model)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph's default stream stays on the device on which it was first created.
        with torch.cuda.graph(graph, stream=side):
            loss = self.one(place, **options)
        with torch.no_grad():
            torch._foreach_copy_(self.state(), state)
        losses = []
        for batch in given:
            torch._foreach_copy_(place, list(batch))
            graph.replay()
            losses.append(loss.clone())
        torch.cuda.synchronize()
        leave_no_gradients(self.model)
        return losses


def leave_no_gradients(model: nn.Module) -> None:
    """Free the gradients, as optimizers do."""
    for parameter in model.parameters():
        parameter.grad = None


@functools.cache
def _on_the_host(shape: Shape, count: int, seed: int) -> tuple[Tensor, ...]:
    """Words that each determine the next one, but for 20 % noise: the model can learn the rule."""
    generator = torch.Generator().manual_seed(seed)
    size = (count, shape.batch, shape.context + 1)
    noise = torch.randint(shape.words, size, generator=generator)
    keep = torch.rand(size, generator=generator) < 0.8
    words = noise.clone()
    for place in range(1, size[-1]):
        follows = (5 * words[..., place - 1] + 1) % 16
        words[..., place] = torch.where(keep[..., place], follows, noise[..., place])
    return words[..., :-1], words[..., 1:]


def batches(shape: Shape, count: int, device: Any, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Batches of words and the words that follow them, the same on every device."""
    words, following = (it.to(device) for it in _on_the_host(shape, count, seed))
    return list(zip(words.unbind(), following.unbind(), strict=True))


def exact(model: GPT, dtype: torch.dtype = torch.float32) -> GPT:
    """A copy of the model in ``dtype``, for more exact results."""
    return copy.deepcopy(model).to(dtype)


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """The gradients of all parameters, by ``backward()``."""
    leave_no_gradients(model)
    loss.backward()
    found = [it.grad for it in model.parameters()]
    leave_no_gradients(model)
    assert all(it is not None for it in found)
    return found  # type: ignore[return-value]


def check_same(found: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Check that the tensors are equal, one by one."""
    assert len(found) == len(right)
    different = [n for n, (a, b) in enumerate(zip(found, right, strict=True)) if not a.equal(b)]
    assert not different


def error(found: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """The norm of the error relative to that of the expected values, over all tensors."""
    errors, norms = 0.0, 0.0
    for one, two in zip(found, right, strict=True):
        errors += float((one.double() - two.double().to(one.device)).square().sum())
        norms += float(two.double().square().sum())
    return (errors / norms if norms else errors and torch.inf) ** 0.5
