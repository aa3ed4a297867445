"""Dropout with a mask of one bit for each element."""

from __future__ import annotations

import math

import torch

from transformer_engine_fl.backends.flagos.tuning.calls.call import (
    Calls,
    Sample,
    Shape,
    call,
    fewer_rows,
    normal,
)
from transformer_engine_fl.ops.dropout import mask_bytes

__all__ = ["CALLS"]

_PROBABILITY = 0.1


def _forward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(normal(shape, dtype, device, 1), _PROBABILITY, seed=1234)


def _backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    generator = torch.Generator(device).manual_seed(2)
    size = (mask_bytes(math.prod(shape)),)
    mask = torch.randint(256, size, generator=generator, device=device, dtype=torch.uint8)
    return call(normal(shape, dtype, device, 1), mask, _PROBABILITY)


CALLS = tuple(
    Calls(
        op=op,
        choices=(op,),
        make=make,
        shapes=((16384, 8192),),
        axes="rows x columns",
        check_shape=fewer_rows,
    )
    for op, make in (("dropout_fwd", _forward), ("dropout_bwd", _backward))
)
