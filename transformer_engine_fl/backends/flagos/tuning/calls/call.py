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
    """The calls of an operator by which its choices are measured.

    Attributes:
        op: the operator.
        choices: the names of its choices, measured one after the other.
        make: ``make(shape, dtype, device)``, a call, the same on every run.
        shapes: the shapes that are measured by default.
        axes: the meaning of a shape's numbers.
        check_shape: maps a shape to one on which values are checked: as wide, so that the same
            kernels run, and small enough for float64.
        dtypes: the dtypes that are measured by default.
        odd_shapes: further shapes that are measured by default in dtypes of 2 bytes.
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
        """The shapes that are measured in a dtype by default."""
        kind: torch.dtype = getattr(torch, dtype)
        return self.shapes + (self.odd_shapes if kind.itemsize == 2 else ())


def call(*args: object, **kwargs: object) -> Sample:
    """The call with these arguments."""
    return Sample("tuning", args, kwargs)


def fewer_rows(shape: Shape) -> Shape:
    """The shape with at most 64 rows."""
    return (min(shape[0], 64), *shape[1:])


def normal(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """A sample of the standard normal distribution, made on the device because it may be large."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)
