"""What FlagGems' matrix product for Hopper needs of its operands, which other devices' do not.

It describes them to the GPU's tensor copies (TMA) wherever a row of both and a row of the
result are whole accesses of 16 bytes. Nothing there looks at where an operand starts, or at
the strides of one that is transposed or expanded; what cannot be described raises an
AssertionError. Those operands are copied here, and empty ones declined.

A product of one column has a kernel of its own, which multiplies and adds in the operands'
dtype, and is declined where that is not float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from transformer_engine_fl import NotSupportedError

__all__ = ["bridged", "is_for_hopper"]

ALIGNMENT = 16
"""Bytes: of a start, and of the strides between rows."""


def is_for_hopper(function: Callable[..., object]) -> bool:
    """Whether a function is ``mm`` of FlagGems' folder for Hopper."""
    return getattr(function, "__module__", "").endswith("hopper.ops.mm")


def bridged(mm: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The product, of any two matrices that it multiplies right."""

    @functools.wraps(mm)
    def product(a: Tensor, b: Tensor) -> Tensor:
        if not (a.numel() and b.numel()):
            raise NotSupportedError("FlagGems' product takes no empty tensors")
        if b.shape[1] == 1 and b.dtype is not torch.float32:
            raise NotSupportedError(
                f"FlagGems' product of one column multiplies and adds in {b.dtype}"
            )
        return mm(_describable(a), _describable(b))

    return product


def _describable(matrix: Tensor) -> Tensor:
    """The matrix, or a dense copy if that can be described and the matrix cannot."""
    size = matrix.element_size()
    if matrix.shape[1] * size % ALIGNMENT:
        return matrix  # nor could the copy: such products take another way
    rows = matrix if matrix.stride(1) == 1 else matrix.t()
    if (
        rows.stride(1) == 1
        and rows.stride(0) >= rows.shape[1]
        and rows.stride(0) * size % ALIGNMENT == 0
        and matrix.data_ptr() % ALIGNMENT == 0
    ):
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)
