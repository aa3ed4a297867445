"""Sequences of different lengths in one tensor: finding a row's token, and moving tokens.

A program of these kernels takes TOKENS rows of a tensor, and of each a piece of HEADS heads by
BLOCK columns. A token whose heads are contiguous is treated as one head as wide as all of them, so
that its row is read contiguously. Strides and offsets count units of UNIT elements.

``cu_seqlens`` and other indices come from users. Every row computed from them is checked against
the number of rows before it is read or written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import (
    INTEGERS,
    WIDEST_UNIT,
    check_across,
    check_size,
    launch_of,
)
from transformer_engine_fl.backends.flagos._fetch import fetch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Tile",
    "highest_power",
    "joined",
    "launch_of_rows",
    "launch_rows",
    "move",
    "piece",
    "place",
    "raw",
    "steps",
    "tile_of",
    "token_at",
]

# ------------------------------------------------------------------------------ kernels


@triton.jit  # type: ignore[untyped-decorator]
def token_at(
    offsets_ptr: tl.tensor,
    row: tl.tensor,
    sequences: tl.tensor,
    highest: tl.tensor,
    divisor: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The token in each row of a tensor in which sequences follow one another.

    Sequence i has the rows from ``offsets[i] // divisor`` up to that of i + 1. ``highest``
    is the highest power of two not above ``sequences``.

    Returns:
        Its sequence (always an existing one), its place in that, the length of the sequence, and
        whether there is such a token; if not, place and length are meaningless.
    """
    beyond = (row.to(tl.int64) + 1) * divisor
    found = row.to(tl.int32) * 0
    while highest > 0:
        next_one = found + highest
        begin = tl.load(offsets_ptr + next_one, mask=next_one <= sequences, other=0)
        found = tl.where((next_one <= sequences) & (begin < beyond), next_one, found)
        highest = highest // 2
    sequence = tl.minimum(found, sequences - 1)
    begin = (tl.load(offsets_ptr + sequence) // divisor).to(tl.int64)
    length = (tl.load(offsets_ptr + sequence + 1) // divisor).to(tl.int64) - begin
    place = row - begin
    return sequence, place, length, (place >= 0) & (place < length)


@triton.jit  # type: ignore[untyped-decorator]
def piece(
    heads: tl.tensor,
    width: tl.tensor,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The heads and columns of this program, ``[HEADS]`` and ``[BLOCK]``.

    Last, ``[1, HEADS, BLOCK]``: which of them exist.
    """
    columns = width * UNIT
    blocks = tl.cdiv(columns, BLOCK)
    head = (tl.program_id(1) // blocks) * HEADS + tl.arange(0, HEADS)
    column = (tl.program_id(1) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = (head < heads)[None, :, None] & (column < columns)[None, None, :]
    return head.to(tl.int64), column, inside


@triton.jit  # type: ignore[untyped-decorator]
def place(row: tl.tensor, head: tl.tensor, column: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    """The offsets of elements, ``[TOKENS, HEADS, BLOCK]``, from those of rows and heads."""
    return (row[:, None, None] + head[None, :, None]) * UNIT + column[None, None, :]


@triton.jit  # type: ignore[untyped-decorator]
def move(
    x_ptr: tl.tensor,
    x_row: tl.tensor,
    x_head: tl.tensor,
    y_ptr: tl.tensor,
    y_row: tl.tensor,
    y_head: tl.tensor,
    known: tl.tensor,
    exists: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy this program's piece of rows.

    ``x_row`` and ``y_row`` are the offsets of rows, in units. Rows that are not ``known`` are
    written as zeros; rows that do not exist are not written.
    """
    head, column, inside = piece(heads, width, UNIT, HEADS, BLOCK)
    source = x_ptr + place(x_row, head * x_head, column, UNIT)
    target = y_ptr + place(y_row, head * y_head, column, UNIT)
    x = fetch(source, (known & exists)[:, None, None] & inside)
    tl.store(target, x, mask=exists[:, None, None] & inside)


# ---------------------------------------------------------------------------- launching

_NARROW_BYTES = 1024  # no row is cut into pieces narrower than this
_MOST_WASTE = 9 / 8  # most columns of tiles per column of a row


class Tile(NamedTuple):
    """What a program processes at once; powers of two."""

    tokens: int
    heads: int
    columns: int


def tile_of(heads: int, width: int, itemsize: int, tile_bytes: int) -> Tile:
    """The tile, of about ``tile_bytes``, for tokens of so many heads."""
    room = tile_bytes // itemsize
    columns = min(triton.next_power_of_2(width), room)
    while columns * itemsize > _NARROW_BYTES and -(-width // columns) * columns > (
        _MOST_WASTE * width
    ):
        columns //= 2
    beside = min(triton.next_power_of_2(heads), max(1, room // columns))
    return Tile(max(1, room // (columns * beside)), beside, columns)


def highest_power(sequences: int) -> int:
    """The highest power of two not above ``sequences``, for :func:`token_at`."""
    return 1 << (sequences.bit_length() - 1)


def raw(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same size, for kernels that only move values."""
    return tensor.view(INTEGERS[tensor.itemsize])


def joined(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of ``[..., h, d]`` as ``[..., 1, h * d]``, if all of them have dense rows."""
    if all(it.shape[-2] == 1 or it.stride(-2) == it.shape[-1] for it in tensors):
        return tuple(it.flatten(-2).unsqueeze(-2) for it in tensors)
    return tensors


def steps(tensor: Tensor) -> tuple[int, ...]:
    """All strides but the last dimension's; 0 for dimensions of size 1."""
    pairs = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return tuple(stride if size > 1 else 0 for size, stride in pairs)


def launch_of_rows(
    op: str,
    kernel: Any,
    tensors: Sequence[Tensor | None],
    numbers: tuple[int, ...],
    widths: tuple[int, ...],
    *,
    rows: int,
    heads: int,
    threads: int,
    tile_bytes: int,
    **constants: Any,
) -> tuple[_launch.Launch, tuple[int, int], tuple[Tensor | None, ...], tuple[int, ...]]:
    """The launch of a kernel on tiles of rows, with its grid, tensors and numbers.

    The kernel's parameters are the tensors, ``rows``, the numbers, ``heads``, the widths and
    strides in units, and its constants, the last four of which are UNIT, TOKENS, HEADS and BLOCK.

    Args:
        op: the operator.
        kernel: the jitted function.
        tensors: the first one's item size decides the tile.
        numbers: in the order of the kernel's parameters.
        widths: columns of a head, and of the widest if there are several kinds, then all
            strides.
        rows: the number of rows.
        heads: heads of each row.
        threads: threads of a program.
        tile_bytes: bytes that a program processes at once.
        constants: the kernel's constants, besides the four.
    """
    check_size(op, "rows", rows)
    check_size(op, "columns", max(widths[0], heads))
    first = tensors[0]
    assert first is not None
    unit = math.gcd(*widths, WIDEST_UNIT)
    tile = tile_of(heads, widths[0], first.itemsize, tile_bytes)
    kinds = tuple([None if it is None else it.dtype for it in tensors])
    launch = launch_of(
        kernel,
        first.device,
        kinds,
        threads=threads,
        **constants,
        UNIT=unit,
        TOKENS=tile.tokens,
        HEADS=tile.heads,
        BLOCK=tile.columns,
    )
    pieces = -(-heads // tile.heads) * -(-widths[0] // tile.columns)
    check_across(op, pieces)
    grid = (-(-rows // tile.tokens), pieces)
    return launch, grid, tuple(tensors), (rows, *numbers, heads, *(it // unit for it in widths))


def launch_rows(*arguments: Any, **options: Any) -> None:
    """Launch a kernel on tiles of rows; the arguments are those of :func:`launch_of_rows`."""
    launch, grid, tensors, numbers = launch_of_rows(*arguments, **options)
    launch(grid, tensors, numbers)
