"""Padding of blocks of rows in plain PyTorch: slices, and zeros."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends.reference._values import as_written

__all__ = ["fused_multi_row_padding", "fused_multi_row_unpadding"]


@as_written
def fused_multi_row_padding(
    input: Tensor, *, row_list: Sequence[int], padded_row_list: Sequence[int]
) -> Tensor:
    """Adds rows of zeros after each block of rows."""
    ops.fused_multi_row_padding.check(input, row_list=row_list, padded_row_list=padded_row_list)
    parts = [input[:0]]
    for block, padded in zip(torch.split(input, list(row_list)), padded_row_list, strict=True):
        parts += [block, input.new_zeros((padded - block.shape[0], input.shape[1]))]
    return torch.cat(parts)


@as_written
def fused_multi_row_unpadding(
    input: Tensor, *, row_list: Sequence[int], padded_row_list: Sequence[int]
) -> Tensor:
    """Removes the padding."""
    ops.fused_multi_row_unpadding.check(input, row_list=row_list, padded_row_list=padded_row_list)
    blocks = zip(torch.split(input, list(padded_row_list)), row_list, strict=True)
    return torch.cat([input[:0], *(block[:rows] for block, rows in blocks)])
