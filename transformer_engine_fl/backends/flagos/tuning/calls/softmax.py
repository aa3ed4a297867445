"""Softmax of rows and its gradient; masked variants share these choices."""

from __future__ import annotations

import torch

from transformer_engine_fl.backends.flagos.tuning.calls.call import (
    Calls,
    Sample,
    Shape,
    call,
    fewer_rows,
    normal,
)
from transformer_engine_fl.backends.flagos.tuning.calls.normalization import ODD_WIDTHS, WIDTHS

__all__ = ["CALLS"]


def _forward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(normal(shape, dtype, device, 1))


def _backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    output = torch.softmax(normal(shape, dtype, device, 1), -1)
    return call(normal(shape, dtype, device, 2), output)


CALLS = tuple(
    Calls(
        op=f"scaled_softmax_{way}",
        choices=(choice,),
        make=make,
        shapes=WIDTHS,
        odd_shapes=ODD_WIDTHS,
        axes="rows x columns",
        check_shape=fewer_rows,
    )
    for way, choice, make in (
        ("forward", "softmax_fwd", _forward),
        ("backward", "softmax_bwd", _backward),
    )
)
