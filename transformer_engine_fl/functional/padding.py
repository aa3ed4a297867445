"""Padding of blocks of rows, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformer_engine_fl.functional._differentiable import apply

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "multi_row_padding",
    "multi_row_unpadding",
]


def multi_row_padding(
    input: Tensor, *, row_list: Sequence[int], padded_row_list: Sequence[int]
) -> Tensor:
    """Adds rows of zeros after each block of rows, differentiable.

    See :func:`transformer_engine_fl.ops.fused_multi_row_padding`.

    Returns:
        ``[sum of padded_row_list, C]``, dtype of ``input``.
    """
    options = {"row_list": row_list, "padded_row_list": padded_row_list}
    return apply("fused_multi_row_padding", options, input)[0]


def multi_row_unpadding(
    input: Tensor, *, row_list: Sequence[int], padded_row_list: Sequence[int]
) -> Tensor:
    """Removes the rows that :func:`multi_row_padding` added, differentiable.

    See :func:`transformer_engine_fl.ops.fused_multi_row_unpadding`.

    Returns:
        ``[sum of row_list, C]``, dtype of ``input``.
    """
    options = {"row_list": row_list, "padded_row_list": padded_row_list}
    return apply("fused_multi_row_unpadding", options, input)[0]
