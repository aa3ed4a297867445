"""The second stage of a sum over rows: adds up the partial sums of all programs.

Without atomics and in a fixed order, so the same device gives the same bits each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import listed
from transformer_engine_fl.backends.flagos._dependent import (
    dependent_launch,
    has_dependent_launches,
    wait_for_predecessor,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["SumOfPrograms"]

# Rows and columns of a tile, and threads, by the most partial sums that it is for. A thread adds up
# about eight 16-byte vectors, all in flight at once. The rows of a column are spread over a warp's
# lanes before they are spread over warps: a reduction across warps goes through shared memory one
# word at a time.
_TILES = {
    8: (8, 512, 128),
    16: (16, 64, 32),
    32: (32, 32, 32),
    64: (64, 16, 32),
    128: (128, 16, 64),
    256: (256, 16, 128),
    2**31: (512, 16, 128),
}


@triton.jit(do_not_specialize=["programs", "columns"])  # type: ignore[untyped-decorator]
def _sum_programs(
    partial_ptr: tl.tensor,
    first_ptr: tl.tensor,
    second_ptr: tl.tensor,
    programs: tl.int32,
    columns: tl.int32,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """The sums of ``partial`` over the programs.

    The second grid axis is the sum's number: the row of one result, or which of two results.
    """
    ACC: tl.constexpr = partial_ptr.dtype.element_ty
    columns = columns * UNIT
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    partial_ptr += tl.program_id(1).to(tl.int64) * programs * columns
    total = tl.zeros((ROWS, BLOCK), ACC)
    wait_for_predecessor(DEPENDENT)
    for first in tl.range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)
        total += tl.load(
            partial_ptr + row.to(tl.int64)[:, None] * columns + column[None, :],
            mask=(row < programs)[:, None] & inside[None, :],
            other=0,
        )
    result = tl.sum(total, axis=0).to(first_ptr.dtype.element_ty)
    if second_ptr is None:
        row = tl.program_id(1).to(tl.int64) * columns
        tl.store(first_ptr + row + column, result, mask=inside)
    elif tl.program_id(1) == 0:
        tl.store(first_ptr + column, result, mask=inside)
    else:
        tl.store(second_ptr + column, result, mask=inside)


class SumOfPrograms:
    """Adds up ``partial``, ``[results, programs, columns]``, over the programs.

    Where the device has dependent launches it may start before the kernel launched just before it
    has ended, and waits for that one. So it must not be an operator's first kernel.

    Args:
        columns: columns of each sum.
        unit: a divisor of the columns.
        device: where it runs.
    """

    __slots__ = ("_columns", "_device", "_launches", "_unit")

    def __init__(self, columns: int, unit: int, device: torch.device) -> None:
        self._columns, self._unit, self._device = columns, unit, device
        self._launches: dict[int, _launch.Launch] = {}  # by the rows of a tile

    def __call__(
        self, partial: Tensor, first: Tensor, second: Tensor | None, programs: int
    ) -> None:
        """Write the sums: ``first [columns]`` and a second one, or ``first [results, columns]``."""
        results = 2 if second is not None else first.shape[0] if first.dim() > 1 else 1
        rows, block, threads = listed(_TILES, programs)
        launch = self._launches.get(rows)
        if launch is None:
            launch = self._launches[rows] = _launch.Launch(
                _sum_programs,
                self._device,
                threads=max(threads, _launch.limits(self._device).warp_size),
                UNIT=self._unit,
                ROWS=rows,
                BLOCK=block,
                **dependent_launch(has_dependent_launches(self._device)),
            )
        grid = (-(-self._columns // block), results)
        launch(grid, (partial, first, second), (programs, self._columns // self._unit))
