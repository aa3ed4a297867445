"""The second stage of a sum over rows: adding up what each program summed.

No atomics and a fixed order, so that the same bits come each time on the same device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import block_of, listed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["SumOfPrograms"]

# Tiles of so many programs by so many columns, by width: narrow ones give enough programs
# where there are few columns.
_TILES = {8192: (128, 32), 2**31: (32, 128)}
_THREADS = 256


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
) -> None:
    """The sums of ``partial`` over the programs.

    Of several, the second grid axis says which: they are the rows of one result, or two.
    """
    ACC: tl.constexpr = partial_ptr.dtype.element_ty
    columns = columns * UNIT
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    partial_ptr += tl.program_id(1).to(tl.int64) * programs * columns
    total = tl.zeros((ROWS, BLOCK), ACC)
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

    Args:
        columns: of each sum.
        unit: divides the columns.
        device: where it runs.
    """

    __slots__ = ("_blocks", "_launch", "_units")

    def __init__(self, columns: int, unit: int, device: torch.device) -> None:
        rows, block = listed(_TILES, block_of(columns))
        self._launch = _launch.Launch(
            _sum_programs, device, threads=_THREADS, UNIT=unit, ROWS=rows, BLOCK=block
        )
        self._blocks = -(-columns // block)
        self._units = columns // unit

    def __call__(
        self, partial: Tensor, first: Tensor, second: Tensor | None, programs: int
    ) -> None:
        """Write the sums: ``first [columns]`` and a second one, or ``first [results, columns]``."""
        results = 2 if second is not None else first.shape[0] if first.dim() > 1 else 1
        grid = (self._blocks, results)
        self._launch(grid, (partial, first, second), (programs, self._units))
