"""How rows are cut: into tiles of whole rows, or into pieces that several programs share.

A program that has one piece of a row holds it in registers, leaves its share of the row's
sums where the others find it, waits for theirs, and goes on: each number is read once,
however wide the row. That needs every program of the grid to be running, so the grid is
what the device holds at once and the launch is a cooperative one, which gives just that or
fails. Where there is no such launch, the same kernel runs twice: for the sums, and then,
reading the row again, for the rest.

Shares are added up in the order of the pieces, so a row's result depends on its width and
dtype alone. What is summed, and what becomes of it, is the kernel's own business.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import MOST, block_of, listed, rows_of_tile

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Cut", "Pieces", "SharedRows", "Tiles", "WholeRows", "cut", "heard", "tell"]


class Tiles(NamedTuple):
    """Whole rows.

    Attributes:
        threads: of a program.
        width: of a tile; narrower rows share one.
        programs: that a multiprocessor holds at once, each with many tiles; 0 for a
            program per tile.
        stages: tiles under way in a program that has many.
    """

    threads: int
    width: int
    programs: int = 0
    stages: int = 1


class Pieces(NamedTuple):
    """Rows in pieces.

    Attributes:
        threads: of a program.
        width: of a piece.
        programs: that a multiprocessor holds at once.
    """

    threads: int
    width: int
    programs: int


Cut = Mapping[int, "Tiles | Pieces"]
"""How rows are cut, by width: columns rounded up to a power of two, float64 counting double."""


# --------------------------------------------------------------------------- in a kernel
#
# STEP is "together", or "sums" and then "rest". ``shares`` is [rows, SUMS, PIECES]: numbers,
# or for "together" words of which the upper half says whether the lower one, a float32, is
# there yet. A word is written and read whole, so nothing else needs an order.


@triton.jit  # type: ignore[untyped-decorator]
def tell(shares_ptr: tl.tensor, value: tl.tensor, STEP: tl.constexpr) -> None:
    """Leave a share of a sum at ``shares_ptr``."""
    if STEP == "together":
        bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        tl.atomic_xchg(shares_ptr, bits | 0x100000000, sem="relaxed")
    else:
        tl.store(shares_ptr, value)


@triton.jit  # type: ignore[untyped-decorator]
def heard(
    shares_ptr: tl.tensor,
    other: tl.tensor,
    PIECES: tl.constexpr,
    SUMS: tl.constexpr,
    STEP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Every piece's shares of a row's one or two sums, and beyond them ``other``.

    Of one sum, the second is the first once more.
    """
    piece = tl.arange(0, triton.next_power_of_2(PIECES))
    exists = piece < PIECES
    there: tl.constexpr = 0x100000000 if STEP == "together" else 0
    first = tl.load(shares_ptr + piece, mask=exists, other=there, volatile=True)
    second = first
    if SUMS == 2:
        second = tl.load(shares_ptr + PIECES + piece, mask=exists, other=there, volatile=True)
    if STEP == "together":
        while tl.min(((first & second) >> 32).to(tl.int32), axis=0) == 0:
            first = tl.load(shares_ptr + piece, mask=exists, other=there, volatile=True)
            second = first
            if SUMS == 2:
                second_ptr = shares_ptr + PIECES
                second = tl.load(second_ptr + piece, mask=exists, other=there, volatile=True)
        first = first.to(tl.int32).to(tl.float32, bitcast=True)
        second = second.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(exists, first, other), tl.where(exists, second, 0)


# ---------------------------------------------------------------------------- on the host


class WholeRows:
    """A kernel of whole rows, in tiles; its grid is one-dimensional.

    Args:
        kernel: the jitted function.
        device: where it runs.
        tiles: how rows are cut, for numbers of 4 bytes.
        columns: of a row.
        dtype: of the sums.
        column_bytes: that are read of a row, per column.
        constants: for the kernel, beside ROWS, BLOCK and STAGES.
    """

    __slots__ = ("_launch", "_most", "_rows")

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        tiles: Tiles,
        columns: int,
        dtype: torch.dtype,
        column_bytes: int,
        **constants: Any,
    ) -> None:
        block = block_of(columns)
        self._rows = rows_of_tile(tiles.width, block * (2 if dtype == torch.float64 else 1))
        offered = _launch.limits(device)
        self._most = tiles.programs * offered.multiprocessors or MOST
        # As many tiles under way as wanted, or as shared memory has room for.
        tile_bytes = self._rows * block * column_bytes
        room = offered.shared_bytes // (tile_bytes * max(1, tiles.programs))
        self._launch = _launch.Launch(
            kernel,
            device,
            threads=tiles.threads,
            resident=tiles.programs,
            ROWS=self._rows,
            BLOCK=block,
            STAGES=max(1, min(tiles.stages, 1 + room)),
            **constants,
        )

    def groups(self, rows: int) -> int:
        """How many programs there are for so many rows."""
        return min(-(-rows // self._rows), self._most)

    def __call__(
        self, rows: int, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]
    ) -> None:
        """Start the kernel."""
        self._launch((self.groups(rows), 1), tensors, numbers)


class SharedRows:
    """A kernel of rows in pieces.

    Its last pointer is that of the shares; its grid is pieces by groups of programs that
    share a row, each group with rows of its own.

    Args:
        kernel: the jitted function.
        device: where it runs.
        pieces: how rows are cut, for numbers of 4 bytes.
        columns: of a row.
        sums: that a row has.
        dtype: of the sums.
        constants: for the kernel, beside PIECES, BLOCK and STEP.
    """

    __slots__ = ("_device", "_dtype", "_launches", "_most", "_sums", "pieces")

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        pieces: Pieces,
        columns: int,
        sums: int,
        dtype: torch.dtype,
        **constants: Any,
    ) -> None:
        double = dtype == torch.float64
        width = pieces.width // (2 if double else 1)
        self.pieces = -(-columns // width)
        running = pieces.programs * _launch.limits(device).multiprocessors
        self._most = max(1, running // self.pieces)
        self._device, self._sums, self._dtype = device, sums, dtype
        make = functools.partial(
            _launch.Launch,
            kernel,
            device,
            threads=pieces.threads,
            resident=pieces.programs,
            PIECES=self.pieces,
            BLOCK=width,
            **constants,
        )
        if _launch.has_ptx() and not double and self.pieces <= running:
            self._launches: tuple[_launch.Launch, ...] = (
                make(STEP="together", options={"launch_cooperative_grid": True}),
            )
        else:
            self._launches = (make(STEP="sums"), make(STEP="rest"))

    def groups(self, rows: int) -> int:
        """How many groups of programs there are for so many rows."""
        return min(rows, self._most)

    def __call__(
        self, rows: int, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]
    ) -> None:
        """Start the kernel: ``tensors`` is all but the shares."""
        size, grid = rows * self._sums * self.pieces, (self.pieces, self.groups(rows))
        if len(self._launches) == 1:
            shares = torch.zeros(size, dtype=torch.int64, device=self._device)
        else:
            shares = torch.empty(size, dtype=self._dtype, device=self._device)
        for launch in self._launches:
            launch(grid, (*tensors, shares), numbers)


def cut(
    by_width: Cut,
    kernels: tuple[Any, Any],
    device: torch.device,
    columns: int,
    sums: int,
    dtype: torch.dtype,
    column_bytes: int,
    **constants: Any,
) -> WholeRows | SharedRows:
    """The kernel of whole rows or that of rows in pieces, as the table wants it."""
    width = block_of(columns) * (2 if dtype == torch.float64 else 1)
    way = listed(by_width, width)
    if isinstance(way, Tiles):
        return WholeRows(kernels[0], device, way, columns, dtype, column_bytes, **constants)
    return SharedRows(kernels[1], device, way, columns, sums, dtype, **constants)
