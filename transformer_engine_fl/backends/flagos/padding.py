"""Padding of blocks of rows in Triton: one launch moves the rows of all blocks.

The host knows where blocks begin, and sends that to the device as a table. Each row of the output
finds its block there by binary search, and then its row of the input.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends.flagos._arguments import by_rows, check_integers, fresh, plain
from transformer_engine_fl.backends.flagos._dependent import (
    dependent_launch,
    has_dependent_launches,
    wait_for_predecessor,
)
from transformer_engine_fl.backends.flagos._numbers import numbers_on_device
from transformer_engine_fl.backends.flagos._sequences import (
    highest_power,
    launch_rows,
    move,
    raw,
    token_at,
)
from transformer_engine_fl.ops import padding as contracts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from transformer_engine_fl.core.contract import Contract

__all__ = ["fused_multi_row_padding", "fused_multi_row_unpadding"]


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["rows", "blocks", "highest", "heads", "width", "x_row", "y_row"]
)
def _move_blocks(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    begins_ptr: tl.tensor,
    rows: tl.int32,
    blocks: tl.int32,
    highest: tl.int32,
    heads: tl.int32,
    width: tl.int32,
    x_row: tl.int64,
    y_row: tl.int64,
    DEPENDENT: tl.constexpr,
    UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy rows of ``x`` to ``y``; ``begins`` has the blocks' starts in ``y``, then those in ``x``.

    A row beyond the end of its block in ``x`` is zero.
    """
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = row < rows
    wait_for_predecessor(DEPENDENT)
    block, within, _, known = token_at(begins_ptr, row, blocks, highest, 1)
    begin = tl.load(begins_ptr + (blocks + 1) + block)
    source = begin + within
    known = known & (source < tl.load(begins_ptr + (blocks + 2) + block))
    move(
        x_ptr, source * x_row, 0, y_ptr, row.to(tl.int64) * y_row, 0,
        known, exists, heads, width, UNIT, HEADS, BLOCK,
    )  # fmt: skip


_THREADS = 256
_TILE_BYTES = 8192


def _moved(
    op: Contract[..., Tensor], input: Tensor, old: Sequence[int], new: Sequence[int]
) -> Tensor:
    """The blocks with new numbers of rows."""
    check_integers(op.name, *old, *new)
    input = plain(op.name, "input", input)
    output = fresh(op.name, input, (sum(new), input.shape[1]))
    if not output.numel():
        return output
    begins = [0, *accumulate(new), 0, *accumulate(old)]
    x, step = by_rows(raw(input))
    launch_rows(
        op.name,
        _move_blocks,
        (x, raw(output), numbers_on_device(begins, input.device)),
        (len(new), highest_power(len(new))),
        (input.shape[1], step, input.shape[1]),
        rows=output.shape[0],
        heads=1,
        threads=_THREADS,
        tile_bytes=_TILE_BYTES,
        **dependent_launch(has_dependent_launches(input.device)),
    )
    return output


@repeating
def fused_multi_row_padding(
    input: Tensor, *, row_list: Sequence[int], padded_row_list: Sequence[int]
) -> Tensor:
    """``fused_multi_row_padding`` of the contract."""
    op = contracts.fused_multi_row_padding
    op.check(input, row_list=row_list, padded_row_list=padded_row_list)
    return _moved(op, input, row_list, padded_row_list)


@repeating
def fused_multi_row_unpadding(
    input: Tensor, *, row_list: Sequence[int], padded_row_list: Sequence[int]
) -> Tensor:
    """``fused_multi_row_unpadding`` of the contract."""
    op = contracts.fused_multi_row_unpadding
    op.check(input, row_list=row_list, padded_row_list=padded_row_list)
    return _moved(op, input, padded_row_list, row_list)
