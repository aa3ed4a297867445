"""Fused attention, in the layout batch x tokens x heads x features.

A shape is batch x heads x tokens x features, as is usual for attention.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workloads.workload import Random, Sample, Shape, Workload, call

_SHAPES: tuple[Shape, ...] = ((4, 32, 4096, 128), (1, 32, 16384, 128))


def _tensors(
    shape: Shape, dtype: torch.dtype, device: str, queries_per_key: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, width = shape
    random = Random(dtype, device)
    keys = (batch, tokens, heads // queries_per_key, width)
    return random.normal(batch, tokens, heads, width), random.normal(*keys), random.normal(*keys)


def _forward(mask: str, queries_per_key: int = 1) -> Callable[..., Sample]:
    def make(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
        return call(*_tensors(shape, dtype, device, queries_per_key), attn_mask_type=mask)

    return make


def _backward(mask: str, queries_per_key: int = 1) -> Callable[..., Sample]:
    def make(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
        q, k, v = _tensors(shape, dtype, device, queries_per_key)
        out, lse = _saved(q, k, v, mask == "causal")
        return call(q.flip(1).contiguous(), q, k, v, out, lse, attn_mask_type=mask)

    return make


def _saved(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and lse, one head at a time because the scores of all heads may not fit."""
    batch, tokens, heads, width = q.shape
    out, lse = torch.empty_like(q), q.new_empty(batch, heads, tokens, dtype=torch.float32)
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    for place in range(batch):
        for head in range(heads):
            key_head = head * k.shape[2] // heads
            scores = q[place, :, head].float() @ k[place, :, key_head].float().t() * width**-0.5
            if causal:
                scores.masked_fill_(future, -torch.inf)
            lse[place, head] = scores.logsumexp(-1)
            out[place, :, head] = scores.softmax(-1).to(v.dtype) @ v[place, :, key_head]
    return out, lse


def _flops(products: int, mask: str) -> Callable[[Shape], float]:
    def flops(shape: Shape) -> float:
        batch, heads, tokens, width = shape
        half = 0.5 if mask == "causal" else 1.0
        return 2.0 * products * half * batch * heads * tokens**2 * width

    return flops


def _smaller(shape: Shape) -> Shape:
    batch, heads, tokens, width = shape
    return min(batch, 2), min(heads, 4), min(tokens, 1024), width


_COUNTED = {
    2: "the 2 products of the forward, 2 operations for each multiplication",
    5: "5 products, 2 operations for each multiplication: the recomputed scores and the four "
    "products of the gradients",
}

WORKLOADS = tuple(
    Workload(
        name=f"{op} {variant}",
        ops=(op,),
        make=maker(mask, queries_per_key),
        shapes=_SHAPES,
        tiny=(1, 4, 8, 16),
        axes="batch x heads x tokens x features",
        flops=_flops(products, mask),
        roof="matmul",
        counted=_COUNTED[products]
        + ("; half of these operations, for the scores below the diagonal" if half else ""),
        check_shape=_smaller,
        standard=standard,
    )
    for variant, mask, queries_per_key, half, standard in (
        ("causal", "causal", 1, True, True),
        ("causal, 4 query heads for each key head", "causal", 4, True, False),
        ("without a mask", "no_mask", 1, False, False),
    )
    for op, maker, products in (("fused_attn_fwd", _forward, 2), ("fused_attn_bwd", _backward, 5))
)
