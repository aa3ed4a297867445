"""Calls of one operator, on random tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_engine_fl.core.contract import Sample

__all__ = ["Calls", "Sample", "Shape", "call", "fewer_rows", "normal"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The calls of an operator that its choices are measured with.

    Attributes:
        op: the operator.
        choices: the names of what it chooses, measured one after the other.
        make: ``make(shape, dtype, device)``, a call, the same on every run.
        shapes: those that are measured if no others are asked for.
        axes: what the numbers of a shape are.
        check_shape: for a shape, one on which values are checked: as wide, so that the same
            kernels run, and small enough for float64.
        dtypes: those that are measured if no others are asked for.
        odd_shapes: those that are measured besides in dtypes of 2 bytes.
    """

    op: str
    choices: tuple[str, ...]
    make: Callable[[Shape, torch.dtype, str], Sample]
    shapes: tuple[Shape, ...]
    axes: str
    check_shape: Callable[[Shape], Shape]
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    odd_shapes: tuple[Shape, ...] = ()

    def shapes_of(self, dtype: str) -> tuple[Shape, ...]:
        """The shapes that are measured in a dtype if no others are asked for."""
        kind: torch.dtype = getattr(torch, dtype)
        return self.shapes + (self.odd_shapes if kind.itemsize == 2 else ())


def call(*args: object, **kwargs: object) -> Sample:
    """The call with these arguments."""
    return Sample("tuning", args, kwargs)


def fewer_rows(shape: Shape) -> Shape:
    """The shape with at most 64 rows."""
    return (min(shape[0], 64), *shape[1:])


def normal(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Of the standard normal distribution; made on the device, for it may be large."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)
