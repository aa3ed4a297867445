"""Padding of blocks of rows in CUDA C++ (``padding.cu``): one launch moves the rows of all blocks.

The host knows where blocks begin, and passes it in the kernel's arguments. Every device accepts
4 KB of these; more blocks than fit take further launches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from transformer_engine_fl.backends._arguments import address_of
from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends.vendor.cuda import _launch
from transformer_engine_fl.backends.vendor.cuda._arguments import (
    Plans,
    check_integers,
    check_size,
    dense_rows,
    fresh,
    plain,
)
from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.ops import padding as contracts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from transformer_engine_fl.core.contract import Contract

__all__ = ["fused_multi_row_padding", "fused_multi_row_unpadding"]

THREADS: Final = 128
VECTORS: Final = 4
"""The most vectors that a thread has in flight at once."""
COUNTS: Final = (32, 128, 480)
"""Blocks of rows that a launch may have, a kernel for each."""
MOST: Final = 2**30
"""The kernel counts rows, and the vectors of a row, in 32 bits."""


class Key(NamedTuple):
    """What a kernel depends on, besides the device.

    Attributes:
        unit: bytes of a vector.
        lanes: threads that share a row.
        vectors: vectors that a thread has in flight at once.
        room: the most blocks of rows.
    """

    unit: int
    lanes: int
    vectors: int
    room: int


def row_key(width: int, unit: int, blocks: int) -> Key:
    """The key for rows of ``width`` bytes in vectors of ``unit``, and for ``blocks`` blocks."""
    vectors = width // unit
    lanes = min(THREADS, 1 << (vectors - 1).bit_length())
    each = min(VECTORS, 1 << (-(-vectors // lanes) - 1).bit_length())
    room = next((it for it in COUNTS if it >= blocks), COUNTS[-1])
    return Key(unit, lanes, each, room)


def source(key: Key) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel for a key."""
    defines: dict[str, str | int] = {
        "UNIT": key.unit,
        "LANES": key.lanes,
        "ROWS": THREADS // key.lanes,
        "VECS": key.vectors,
        "COUNT": key.room,
    }
    # The last parameter is a struct of two lists of numbers.
    geometry = _launch.Geometry(THREADS, "PPiiqi" + "i" * (2 * (key.room + 1)))
    return Specialisation("padding", "move_blocks", tuple(defines.items())), geometry


def representative_sources(
    device: _launch.Limits,
) -> Iterator[tuple[Specialisation, _launch.Geometry]]:
    """Kernels of every alignment and width, for any device."""
    for unit in (1, 2, 4, 8, 16):
        for vectors in (1, 5, 200, 4096):
            yield source(row_key(vectors * unit, unit, 64))
    for blocks in COUNTS:
        yield source(row_key(8192, 16, blocks))


_kernels: Plans[_launch.Kernel] = Plans()


def _begins(rows: Sequence[int], room: int) -> list[int]:
    """Where each block begins and the last one ends; repeats the end up to ``room`` + 1 numbers."""
    found = [0, *accumulate(rows)]
    return found + [found[-1]] * (room + 1 - len(found))


def _moved(op: Contract[..., Any], input: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
    """The blocks of ``input``, padded with zeros or cut from ``old`` to ``new`` numbers of rows."""
    check_integers(op.name, *old, *new)
    input = plain(op.name, "input", input)
    output = fresh(op.name, input, (sum(new), input.shape[1]))
    if not output.numel():
        return output
    x, step = dense_rows(input)
    size, device = x.itemsize, x.get_device()
    width, step = x.shape[1] * size, step * size
    from_address, to_address = address_of(op.name, x), output.data_ptr()
    unit = math.gcd(16, width, step, from_address)
    key = row_key(width, unit, len(new))
    for name, number in (
        ("rows", max(x.shape[0], output.shape[0])),
        ("columns", width // unit),
    ):
        check_size(op.name, name, number, MOST)
    kernel = _kernels.get((device, *key)) or _kernels.get_or_create(
        (device, *key), lambda: _launch.load(*source(key), device)
    )
    for first in range(0, len(new), key.room):
        had, get = old[first : first + key.room], new[first : first + key.room]
        rows = sum(get)
        if rows:
            kernel.launch(
                -(-rows * key.lanes // THREADS),
                1,
                from_address,
                to_address,
                rows,
                width // unit,
                step // unit,
                len(get),
                *_begins(get, key.room),
                *_begins(had, key.room),
            )
        from_address += sum(had) * step
        to_address += rows * width
    return output


# ---------------------------------------------------------------------------- operators


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
