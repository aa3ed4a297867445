"""Cross entropy over a vocabulary."""

from __future__ import annotations

import math

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
from transformer_engine_fl.ops._dtypes import math_dtype

__all__ = ["CALLS"]

# For each power of two from 4,096 to 262,144 a vocabulary in use, or the shard of one.
_SHAPES: tuple[Shape, ...] = (
    (32768, 4096),
    (16384, 8192),
    (8192, 16032),
    (8192, 32000),
    (8192, 50304),
    (8192, 128256),
    (4096, 151936),
)


def _targets(shape: Shape, device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(2)
    return torch.randint(shape[1], shape[:1], generator=generator, device=device)


def _forward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(normal(shape, dtype, device, 1), _targets(shape, device))


def _backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    rows, columns = shape
    logits, target = _forward(shape, dtype, device).args
    wide = math_dtype(dtype)
    grad = torch.full((rows,), 1 / rows, dtype=wide, device=device)
    # The expected value for many normal logits.
    lse = torch.full((rows,), math.log(columns) + 0.5, dtype=wide, device=device)
    return call(grad, logits, target, lse)


CALLS = tuple(
    Calls(
        op=op,
        choices=(op,),
        make=make,
        shapes=_SHAPES,
        axes="rows x vocabulary",
        check_shape=fewer_rows,
    )
    for op, make in (("cross_entropy_fwd", _forward), ("cross_entropy_bwd", _backward))
)
