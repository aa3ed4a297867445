"""Activations: a plain and a gated one, measured for all of their kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer_engine_fl.backends.flagos.tuning.calls.call import (
    Calls,
    Sample,
    Shape,
    call,
    fewer_rows,
    normal,
)

if TYPE_CHECKING:
    import torch

__all__ = ["CALLS"]

_SHAPES: tuple[Shape, ...] = ((8192, 14336),)


def _forward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(normal(shape, dtype, device, 1))


def _gated(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(normal((shape[0], 2 * shape[1]), dtype, device, 1))


def _backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(normal(shape, dtype, device, 1), normal(shape, dtype, device, 2))


def _gated_backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    (fwd_input,) = _gated(shape, dtype, device).args
    return call(normal(shape, dtype, device, 2), fwd_input)


CALLS = tuple(
    Calls(
        op=op,
        choices=(choice,),
        make=make,
        shapes=_SHAPES,
        axes="rows x width of the product",
        check_shape=fewer_rows,
    )
    for op, choice, make in (
        ("gelu", "activation_fwd", _forward),
        ("dgelu", "activation_bwd", _backward),
        ("swiglu", "gated_activation_fwd", _gated),
        ("dswiglu", "gated_activation_bwd", _gated_backward),
        ("dbias_dgelu", "activation_bwd_with_bias", _backward),
    )
)
