"""Prepares the operands of FlagGems' matrix product for Hopper, which has requirements of its own.

It makes TMA descriptors of its operands whenever the rows of both, and of the result, are
multiples of 16 bytes. It does not check where an operand starts, nor the strides of a transposed
or expanded one; an operand that a descriptor cannot express raises an AssertionError. Such
operands are copied here, and empty operands are declined.

A product with one column has its own kernel, which multiplies and adds in the operands' dtype; it
is declined where that is not float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from transformer_engine_fl import NotSupportedError

__all__ = ["bridged", "is_for_hopper"]

ALIGNMENT = 16
"""The alignment in bytes of an operand's start and of the strides between rows."""


def is_for_hopper(function: Callable[..., object]) -> bool:
    """Whether a function is ``mm`` of FlagGems' folder for Hopper."""
    return getattr(function, "__module__", "").endswith("hopper.ops.mm")


def bridged(mm: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The product, for any two matrices; declines what FlagGems computes wrongly."""

    @functools.wraps(mm)
    def product(a: Tensor, b: Tensor) -> Tensor:
        if not (a.numel() and b.numel()):
            raise NotSupportedError("FlagGems' product does not support empty tensors")
        if b.shape[1] == 1 and b.dtype is not torch.float32:
            raise NotSupportedError(
                f"FlagGems' product of one column multiplies and adds in {b.dtype}"
            )
        return mm(_describable(a), _describable(b))

    return product


def _describable(matrix: Tensor) -> Tensor:
    """The matrix, or a contiguous copy if TMA can describe only the copy."""
    size = matrix.element_size()
    if matrix.shape[1] * size % ALIGNMENT:
        return matrix  # a copy would not help: FlagGems does not use TMA for such products
    rows = matrix if matrix.stride(1) == 1 else matrix.t()
    if (
        rows.stride(1) == 1
        and rows.stride(0) >= rows.shape[1]
        and rows.stride(0) * size % ALIGNMENT == 0
        and matrix.data_ptr() % ALIGNMENT == 0
    ):
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)
