"""Gives results the memory layout that ATen's would have, though contracts return row-major ones.

ATen's elementwise operators preserve the order of their arguments' dimensions in memory: a
transposed matrix yields a transposed result, and channels_last images yield channels_last ones.
Here the arguments are permuted to their order in memory for the contract's operator, and its
result is permuted back. Both are views, so nothing is copied. ``bridges.py`` says which operators
are elementwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["in_memory_order", "laid_out", "order"]

Order = tuple[int, ...]
"""The dimensions, from the largest stride to the smallest."""


def order(*tensors: Tensor) -> Order | None:
    """The order of the dimensions in memory; None if it is row-major.

    The tensors have one shape. If their orders differ, the rule is that of ATen's TensorIterator:
    for two dimensions, the first tensor in which both strides are non-zero and different decides.
    """
    if all(tensor.is_contiguous() for tensor in tensors):
        return None
    shape = tensors[0].shape
    steps = [tensor.stride() for tensor in tensors]
    inwards = list(range(len(shape)))[::-1]
    # An insertion sort: as dimensions may be indistinguishable, this is not a total order.
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
    """1 if ``inner`` belongs outside ``outer``, -1 if not, 0 if strides and sizes are no help."""
    for strides in steps:
        if strides[inner] == 0 or strides[outer] == 0:  # expanded
            continue
        if strides[inner] != strides[outer]:
            return 1 if strides[inner] > strides[outer] else -1
        if shape[inner] > shape[outer]:
            return 1
    return 0


def in_memory_order(run: Callable[..., Tensor], *tensors: Tensor, by: Order | None) -> Tensor:
    """Run an elementwise operator on tensors whose dimensions have that order in memory."""
    if by is None:
        return run(*tensors)
    return _permuted_back(run(*(tensor.permute(by) for tensor in tensors)), by)


def laid_out(tensor: Tensor, by: Order | None) -> Tensor:
    """The tensor with its dimensions in that order in memory; a copy unless it has it already."""
    if by is None:
        return tensor.contiguous()
    return _permuted_back(tensor.permute(by).contiguous(), by)


def _permuted_back(tensor: Tensor, by: Order) -> Tensor:
    return tensor.permute([by.index(dimension) for dimension in range(len(by))])
