"""Rotary embedding of one tensor, and of packed queries, keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_engine_fl.backends.flagos.tuning.calls.call import (
    Calls,
    Sample,
    Shape,
    call,
    fewer_rows,
    normal,
)

__all__ = ["CALLS"]

_QUERIES_PER_KEY = 4


def _freqs(length: int, width: int, device: str) -> Tensor:
    """Angles; the two features of a pair have the same."""
    steps = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), 10000.0**-steps)
    return torch.cat([angles, angles], -1)[:, None, None]


def _one(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(normal(shape, dtype, device, 1), _freqs(shape[0], shape[-1], device))


def _packed(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    length, width = shape[0], shape[-1]
    split = [_QUERIES_PER_KEY * width, width, width]
    freqs = _freqs(length, width, device)
    packed = normal((*shape[:-1], sum(split)), dtype, device, 1)
    return call(packed, freqs, freqs.clone(), qkv_split=split)


# The backward operators use the same kernels, with the same choice.
CALLS = tuple(
    Calls(
        op=op,
        choices=("fused_rope",),
        make=make,
        shapes=(shape,),
        axes=axes,
        check_shape=fewer_rows,
    )
    for op, make, shape, axes in (
        ("fused_rope_forward", _one, (4096, 2, 32, 128), "tokens x batch x heads x features"),
        (
            "fused_qkv_rope_forward",
            _packed,
            (4096, 2, 8, 128),
            "tokens x batch x key heads x features, 4 query heads for each key head",
        ),
    )
)
