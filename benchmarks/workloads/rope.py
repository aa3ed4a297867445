"""Rotary embedding of one tensor, and of packed queries, keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from workloads.workload import Random, Sample, Shape, Workload, call

_QUERIES_PER_KEY = 4


def _freqs(length: int, width: int, device: str) -> Tensor:
    """Angles as ``[length, 1, 1, width]``; the two features of a pair have the same angle."""
    steps = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), 10000.0**-steps)
    return torch.cat([angles, angles], -1)[:, None, None]


def _one(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(Random(dtype, device).normal(*shape), _freqs(shape[0], shape[-1], device))


def _split(width: int) -> list[int]:
    return [_QUERIES_PER_KEY * width, width, width]


def _packed_forward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    length, batch, groups, width = shape
    freqs = _freqs(length, width, device)
    packed = Random(dtype, device).normal(length, batch, groups, sum(_split(width)))
    return call(packed, freqs, freqs.clone(), qkv_split=_split(width))


def _packed_backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    length, batch, groups, width = shape
    random, freqs = Random(dtype, device), _freqs(length, width, device)
    heads = (_QUERIES_PER_KEY * groups, groups, groups)
    grads = (random.normal(length, batch, count, width) for count in heads)
    return call(*grads, freqs, freqs.clone(), qkv_split=_split(width))


_ONE = "tokens x batch x heads x features"
_PACKED = "tokens x batch x key heads x features, 4 query heads for each key head"
_LONG: tuple[Shape, ...] = ((4096, 2, 32, 128), (8192, 1, 64, 128))

WORKLOADS = tuple(
    Workload(name=name, make=make, shapes=shapes, tiny=(6, 2, 2, 8), axes=axes)
    for name, make, shapes, axes in (
        ("fused_rope_forward", _one, _LONG, _ONE),
        ("fused_rope_backward", _one, _LONG[:1], _ONE),
        ("fused_qkv_rope_forward", _packed_forward, ((4096, 2, 8, 128),), _PACKED),
        ("fused_qkv_rope_backward", _packed_backward, ((4096, 2, 8, 128),), _PACKED),
    )
)
