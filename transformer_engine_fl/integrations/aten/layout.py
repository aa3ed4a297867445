"""How what ATen returns lies in memory, for contracts whose outputs lie row by row.

ATen's elementwise operators keep the order of the dimensions in memory that their arguments
have: of a transposed matrix comes a transposed one, of channels_last images such images. Here
a contract's operator is shown the tensors as they lie, and what it returns is turned back:
views on both sides, and no copy where there was one. Which operators are elementwise is said
in bridges.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["as_they_lie", "laid_out", "order"]

Order = tuple[int, ...]
"""The dimensions, from the one with the largest steps to the one with the smallest."""


def order(*tensors: Tensor) -> Order | None:
    """The order of the dimensions in memory; None where that is the one they are numbered in.

    Tensors of one shape that disagree are compared as ATen's TensorIterator does: the first of
    them in which two dimensions have steps, and different ones, decides.
    """
    if all(tensor.is_contiguous() for tensor in tensors):
        return None
    shape = tensors[0].shape
    steps = [tensor.stride() for tensor in tensors]
    inwards = list(range(len(shape)))[::-1]
    # An insertion sort, because what cannot be told apart makes this no total order.
    for start in range(1, len(shape)):
        place = start
        for other in range(start - 1, -1, -1):
            larger = _compared(shape, steps, inwards[other], inwards[place])
            if larger < 0:
                break
            if larger > 0:
                inwards[other], inwards[place] = inwards[place], inwards[other]
                place = other
    found = tuple(reversed(inwards))
    return None if found == tuple(range(len(shape))) else found


def _compared(shape: Order, steps: list[Order], inner: int, outer: int) -> int:
    """1 where ``inner`` belongs outside of ``outer``, -1 where it does not, 0 if nothing tells."""
    for strides in steps:
        if strides[inner] == 0 or strides[outer] == 0:  # expanded
            continue
        if strides[inner] != strides[outer]:
            return 1 if strides[inner] > strides[outer] else -1
        if shape[inner] > shape[outer]:
            return 1
    return 0


def as_they_lie(run: Callable[..., Tensor], *tensors: Tensor, by: Order | None) -> Tensor:
    """Run an elementwise operator over tensors whose dimensions lie in that order."""
    if by is None:
        return run(*tensors)
    return _turned_back(run(*(tensor.permute(by) for tensor in tensors)), by)


def laid_out(tensor: Tensor, by: Order | None) -> Tensor:
    """The tensor with its dimensions in that order in memory: itself if they are, else a copy."""
    if by is None:
        return tensor.contiguous()
    return _turned_back(tensor.permute(by).contiguous(), by)


def _turned_back(tensor: Tensor, by: Order) -> Tensor:
    return tensor.permute([by.index(dimension) for dimension in range(len(by))])
