"""Casting a matrix to a scaling format: the kernels shared by quantization and epilogues.

The values to cast are computed in the casting kernel: a :class:`Source` says how, be it the tensor
itself, an activation of it, a gradient or a normalized row. A kernel reads a tile, casts it along
its rows, and also along its columns if the transposed tensor is wanted, and writes both. A scale
that depends on all values takes a pass over them beforehand, in which each program writes one
partial amax, and a program that computes the scale from these.

If columns are summed as well, or a gradient has two halves, a program takes several tiles below
each other: it writes one sum for each column, and reads the inputs of both halves once.

If a tile is also written transposed, each thread handles two or four rows at a time, so that values
that are adjacent in the transposed tensor move as one number. A tile has only a few bytes of scales
for each row and column, but memory is written in sectors of 32 bytes: the scales of a large tensor
are first written to buffers in which a tile's scales are contiguous, and another launch reorders
them.
"""

# mypy: disable-error-code="assignment,misc,no-any-return,unreachable"
# Kernels build tuples step by step, which a type checker takes for changes of type.

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_engine_fl.backends._recipes import Quantized, Recipe, outputs_of
from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import (
    INTEGERS,
    WIDEST_UNIT,
    add_to_cache,
    block_of,
    check_fresh,
    check_size,
    launch_of,
    plain,
    rows_of_tile,
)
from transformer_engine_fl.backends.flagos._dependent import (
    dependent_launch,
    has_dependent_launches,
    release_dependents,
    wait_for_predecessor,
)
from transformer_engine_fl.backends.flagos._fetch import fetch
from transformer_engine_fl.backends.flagos._moments import gain_of
from transformer_engine_fl.backends.flagos._narrow import (
    LARGEST_FLOAT32,
    amax_of,
    constants_of,
    encoded,
    encoded_pair,
    encoded_quad,
    inverse_of,
    microscale,
    narrowed,
    nibble_pair,
    nibble_word,
    scale_of,
    size_of,
)
from transformer_engine_fl.backends.flagos._sums import SumOfPrograms
from transformer_engine_fl.backends.flagos._tiles import (
    MOST_ELEMENTS,
    Block,
    Tile,
    block_choice,
    bounded,
    tile_choice,
)
from transformer_engine_fl.backends.flagos.activation import results
from transformer_engine_fl.backends.flagos.tuning import Choice
from transformer_engine_fl.core.errors import NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Source",
    "amax_of_all",
    "cast",
    "cast_with_sums",
    "dense_scale",
    "in_bytes",
    "shared_scale",
    "store_rows",
    "transpose_tile",
    "write_largest",
]

# ------------------------------------------------------------------------------ the source
#
# ``columns`` and the row strides count units of UNIT elements; if a gradient has two halves,
# ``columns`` is that of one half. SPLIT says how tiles lie in the halves: "tiles", each in one
# half; "columns", perhaps in both; "both", the same columns of both halves, so that values are two
# tensors. Within a tile indices are int32, up to its ``height`` and ``width``.


@triton.jit  # type: ignore[untyped-decorator]
def _values(
    x_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    mu_ptr: tl.tensor,
    rsigma_ptr: tl.tensor,
    first_row: tl.tensor,
    row: tl.tensor,
    exists: tl.tensor,
    first_column: tl.tensor,
    column: tl.tensor,
    width: tl.tensor,
    columns: tl.tensor,
    x_stride: tl.tensor,
    grad_stride: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    SOURCE: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    OFFSET: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:
    """The values of these rows and columns in float32; 0 outside."""
    inside = column < width
    mask = exists[:, None] & inside[None, :]
    part = columns
    if SPLIT == "tiles":
        part = columns // 2
        of_gate = first_column >= part
        first_column -= tl.where(of_gate, part, 0)
    elif SPLIT == "columns":
        part = columns // 2
        of_gate = (first_column + column >= part)[None, :]
        column = tl.where(first_column + column >= part, column - part, column)
    row = row.to(tl.int64)
    x_ptr += first_row * x_stride + first_column
    x_ptr += (row * x_stride)[:, None] + column[None, :]
    if SOURCE == "identity":
        return fetch(x_ptr, mask).to(tl.float32)
    elif SOURCE == "norm":
        x = fetch(x_ptr, mask).to(tl.float32)
        if mu_ptr is not None:
            x -= fetch(mu_ptr + first_row + row, exists)[:, None]
        x *= fetch(rsigma_ptr + first_row + row, exists)[:, None]
        weight = fetch(weight_ptr + first_column + column, inside)
        x *= gain_of(weight, tl.float32, OFFSET)[None, :]
        if bias_ptr is not None:
            bias = fetch(bias_ptr + first_column + column, inside)
            x += bias.to(tl.float32)[None, :]
        return tl.where(mask, x, 0)
    else:
        if grad_ptr is not None:
            grad_ptr += first_row * grad_stride + first_column
            grad_ptr += (row * grad_stride)[:, None] + column[None, :]
        first, second = results(
            grad_ptr, x_ptr, part, mask, limit, alpha, SOURCE, PTX, GATED, tl.float32
        )
        if SPLIT == "both":
            return first, second
        elif SPLIT == "":
            return first
        else:
            return tl.where(of_gate, second, first)


# -------------------------------------------------------------------------------- the cast

_HALF = tl.constexpr(8)  # elements of half a block of e2m1


@triton.jit  # type: ignore[untyped-decorator]
def _block_scales(
    amax: tl.tensor,
    shared: tl.tensor,
    epsilon: tl.tensor,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALES: tl.constexpr,
    POW2: tl.constexpr,
    CAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The scales of blocks, and the stored encodings of their inverses.

    Args:
        amax: the blocks' amaxes.
        shared: for nvfp4, S of each block.
        epsilon: the least amax.
        KIND: the kind of the data.
        LARGEST: the largest value of that kind.
        SCALES: "float32", "e8m0" or "e4m3".
        POW2: only powers of two.
        CAST: the device has an instruction for the cast.
    """
    if SCALES == "float32":
        scale = scale_of(amax, LARGEST, epsilon, POW2, CAST)
        return scale, inverse_of(scale, CAST)
    elif SCALES == "e8m0":
        return microscale(amax, KIND)
    else:
        sixth = tl.full((), 1 / 6, tl.float32)
        amax = amax * (shared * sixth)
        code, factor = narrowed(amax, CAST)
        factor *= inverse_of(shared, CAST)
        return tl.minimum(inverse_of(factor, CAST), LARGEST_FLOAT32), code.to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def shared_scale(
    scale_ptr: tl.tensor,
    writes: tl.tensor,
    scale_inv_ptr: tl.tensor,
    scale_inv_t_ptr: tl.tensor,
    global_scale_inv_ptr: tl.tensor,
    ALONE: tl.constexpr,
) -> tl.tensor:
    """The scale that all values share, or 1.

    One program ``writes`` its inverse; if the scale is ALONE, that is the only inverse scale.
    """
    scale = tl.full((), 1.0, tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
        if writes:
            inverse = tl.div_rn(1.0, scale)
            if global_scale_inv_ptr is not None:
                tl.store(global_scale_inv_ptr, inverse)
            elif ALONE:
                tl.store(scale_inv_ptr, inverse)
                if scale_inv_t_ptr is not None:
                    tl.store(scale_inv_t_ptr, inverse)
    return scale


@triton.jit  # type: ignore[untyped-decorator]
def store_rows(
    values: tl.tensor,
    first_row: tl.tensor,
    row: tl.tensor,
    height: tl.tensor,
    first_column: tl.tensor,
    width: tl.tensor,
    columns: tl.tensor,
    shared: tl.tensor,
    epsilon: tl.tensor,
    data_ptr: tl.tensor,
    scale_inv_ptr: tl.tensor,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALES: tl.constexpr,
    POW2: tl.constexpr,
    CAST: tl.constexpr,
    LEAVES_NAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Cast and write ``[ROWS, COLUMNS]``, in blocks of WIDTH columns or with ``shared``.

    Returns the numbers that :func:`_order_scales` turns into scales, if ``scale_inv`` is None.
    """
    exists = (row < height)[:, None]
    row = row.to(tl.int64)
    scales = tl.zeros((1, 1), tl.uint8)
    if WIDTH:
        blocks = tl.reshape(values, (ROWS, COLUMNS // WIDTH, WIDTH))
        amax = amax_of(tl.max(size_of(blocks, LEAVES_NAN), axis=2), LEAVES_NAN)
        scale, inverse = _block_scales(amax, shared, epsilon, KIND, LARGEST, SCALES, POW2, CAST)
        y = tl.reshape(blocks * scale[:, :, None], (ROWS, COLUMNS))
        if scale_inv_ptr is not None:
            across = tl.cdiv(columns, WIDTH)
            block = tl.arange(0, COLUMNS // WIDTH)
            scale_inv_ptr += first_row * across + first_column // WIDTH
            where = scale_inv_ptr + (row * across)[:, None] + block[None, :]
            tl.store(where, inverse, mask=exists & (block * WIDTH < width)[None, :])
        scales = scale if SCALES == "float32" else inverse
    else:
        y = values * shared
    if KIND == "e2m1":
        low, high = tl.split(tl.reshape(y, (ROWS, COLUMNS // 2, 2)))
        code = nibble_pair(low, high, LEAVES_NAN).to(tl.uint8)
        column = tl.arange(0, COLUMNS // 2)
        first_column = first_column // 2
        columns = columns // 2
        width = width // 2
    else:
        code = encoded(y, KIND, CAST)
        column = tl.arange(0, COLUMNS)
    data_ptr += first_row * columns + first_column
    where = data_ptr + (row * columns)[:, None] + column[None, :]
    tl.store(where, code, mask=exists & (column < width)[None, :])
    return scales


@triton.jit  # type: ignore[untyped-decorator]
def _store_halves(
    values: tl.tuple,
    first_row: tl.tensor,
    height: tl.tensor,
    first_column: tl.tensor,
    width: tl.tensor,
    columns: tl.tensor,
    shared: tl.tensor,
    epsilon: tl.tensor,
    data_ptr: tl.tensor,
    scale_inv_ptr: tl.tensor,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALES: tl.constexpr,
    POW2: tl.constexpr,
    CAST: tl.constexpr,
    LEAVES_NAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Cast and write blocks of 16 to e2m1; the values are the blocks' first and second halves.

    A half is one load of a thread, and one number of ``data``: so each thread has whole blocks,
    finds their amaxes alone, and no two threads compute the same scale.
    """
    BLOCKS: tl.constexpr = COLUMNS // WIDTH
    row = tl.arange(0, ROWS)
    exists = (row < height)[:, None]
    row = row.to(tl.int64)
    sizes = tl.maximum(size_of(values[0], LEAVES_NAN), size_of(values[1], LEAVES_NAN))
    amax = amax_of(tl.max(tl.reshape(sizes, (ROWS, BLOCKS, _HALF)), axis=2), LEAVES_NAN)
    scale, inverse = _block_scales(amax, shared, epsilon, KIND, LARGEST, SCALES, POW2, CAST)
    across = columns // WIDTH
    block = tl.arange(0, BLOCKS)
    scale_inv_ptr += first_row * across + first_column // WIDTH
    where = scale_inv_ptr + (row * across)[:, None] + block[None, :]
    tl.store(where, inverse, mask=exists & (block * WIDTH < width)[None, :])
    words = ()
    for half in tl.static_range(2):
        y = tl.reshape(values[half], (ROWS, BLOCKS, _HALF)) * scale[:, :, None]
        words += (nibble_word(y, LEAVES_NAN),)
    codes = tl.reshape(tl.join(words[0], words[1]), (ROWS, 2 * BLOCKS))
    word = tl.arange(0, 2 * BLOCKS)
    data_ptr += first_row * (columns // _HALF) + first_column // _HALF
    where = data_ptr + (row * (columns // _HALF))[:, None] + word[None, :]
    tl.store(where, codes, mask=exists & (word * _HALF < width)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _store_columns(
    values: tl.tuple,
    first_unit: tl.tensor,
    high: tl.tensor,
    first_column: tl.tensor,
    width: tl.tensor,
    units: tl.tensor,
    shared: tl.tuple,
    epsilon: tl.tensor,
    data_ptr: tl.tensor,
    scale_inv_ptr: tl.tensor,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALES: tl.constexpr,
    POW2: tl.constexpr,
    CAST: tl.constexpr,
    LEAVES_NAN: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Cast and write the transpose of PARTS times ``[ROWS, COLUMNS]``.

    A unit is PARTS rows, one from each of the values, and one number of ``data``; the tile has
    ``high`` units. Returns the numbers that :func:`_order_scales` turns into scales, if
    ``scale_inv`` is None.
    """
    column = tl.arange(0, COLUMNS)
    inside = column < width
    scaled = ()
    scales = tl.zeros((1, 1), tl.uint8)
    if WIDTH:
        HEIGHT: tl.constexpr = WIDTH // PARTS
        SHAPE: tl.constexpr = (ROWS // HEIGHT, HEIGHT, COLUMNS)
        sizes = size_of(values[0], LEAVES_NAN)
        for part in tl.static_range(1, PARTS):
            sizes = tl.maximum(sizes, size_of(values[part], LEAVES_NAN))
        amax = amax_of(tl.max(tl.reshape(sizes, SHAPE), axis=1), LEAVES_NAN)
        scale, inverse = _block_scales(amax, shared[0], epsilon, KIND, LARGEST, SCALES, POW2, CAST)
        for part in tl.static_range(PARTS):
            y = tl.reshape(values[part], SHAPE) * scale[:, None, :]
            scaled += (tl.reshape(y, (ROWS, COLUMNS)),)
        if scale_inv_ptr is not None:
            down = tl.cdiv(units, HEIGHT)
            block = tl.arange(0, ROWS // HEIGHT)
            scale_inv_ptr += first_column * down + first_unit // HEIGHT
            where = scale_inv_ptr + (column.to(tl.int64) * down)[None, :] + block[:, None]
            tl.store(where, inverse, mask=(block * HEIGHT < high)[:, None] & inside[None, :])
        scales = scale if SCALES == "float32" else inverse
    else:
        for part in tl.static_range(PARTS):
            scaled += (values[part] * shared[part],)
    if PARTS == 4:
        code = encoded_quad(scaled[0], scaled[1], scaled[2], scaled[3], KIND, CAST)
    elif PARTS == 2:
        code = encoded_pair(scaled[0], scaled[1], KIND, CAST)
    else:
        code = encoded(scaled[0], KIND, CAST)
    unit = tl.arange(0, ROWS)
    data_ptr += first_column * units + first_unit
    where = data_ptr + (column.to(tl.int64) * units)[:, None] + unit[None, :]
    tl.store(where, tl.trans(code), mask=inside[:, None] & (unit < high)[None, :])
    return scales


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "rows", "units", "columns", "x_stride", "grad_stride", "groups", "inner",
        "limit", "alpha", "epsilon",
    ]
)  # fmt: skip
def _cast_tiles(
    x_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    mu_ptr: tl.tensor,
    rsigma_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    owner_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    data_ptr: tl.tensor,
    scale_inv_ptr: tl.tensor,
    global_scale_inv_ptr: tl.tensor,
    data_t_ptr: tl.tensor,
    scale_inv_t_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    rows: tl.int32,
    units: tl.int32,
    columns: tl.int64,
    x_stride: tl.int64,
    grad_stride: tl.int64,
    groups: tl.int32,
    inner: tl.int32,
    limit: tl.float64,
    alpha: tl.float64,
    epsilon: tl.float64,
    SOURCE: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    OFFSET: tl.constexpr,
    PTX: tl.constexpr,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    SQUARE: tl.constexpr,
    SCALES: tl.constexpr,
    POW2: tl.constexpr,
    CAST: tl.constexpr,
    LEAVES_NAN: tl.constexpr,
    GROUPS: tl.constexpr,
    BACKWARDS: tl.constexpr,
    HALVED: tl.constexpr,
    UNIT: tl.constexpr,
    UNIT_T: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One tile of PARTS times ROWS rows.

    ``scale`` is one number, or one for each group. Rows are assigned to groups by ``owner``, or end
    at the sum of ``sizes``. ``partial`` receives the amax of the tile, ``sums`` the sums of its
    columns. BACKWARDS: the last tiles first. HALVED: see :func:`_store_halves`.
    """
    x_stride = x_stride * UNIT
    grad_stride = grad_stride * UNIT
    columns = columns * UNIT
    units = units * UNIT_T
    if SPLIT != "":
        columns = columns * 2
    # Fits in an int32: at most the number of tiles, if there are any.
    across = tl.minimum(tl.maximum(tl.cdiv(columns, COLUMNS), 1), 0x7FFFFFFF).to(tl.int32)
    tile = tl.program_id(0)
    if BACKWARDS:
        # What was read last is most likely still in the cache.
        tile = tl.num_programs(0) - 1 - tile
    above = tile // across
    before = tile - above * across
    first_unit = above.to(tl.int64) * ROWS
    first_row = first_unit * PARTS
    first_column = before.to(tl.int64) * COLUMNS
    height = tl.minimum(rows - first_row, ROWS * PARTS).to(tl.int32)
    width = tl.minimum(columns - first_column, COLUMNS).to(tl.int32)
    end = height
    if sizes_ptr is not None:
        group = tl.arange(0, GROUPS)
        taken = tl.load(sizes_ptr + group, mask=group < groups, other=0).to(tl.int64)
        taken = tl.sum(taken, axis=0) * inner - first_row
        end = tl.maximum(tl.minimum(taken, height), 0).to(tl.int32)
    values = ()
    shared = ()
    for part in tl.static_range(2 if HALVED else PARTS):
        if HALVED:
            row = tl.arange(0, ROWS)
            column = tl.arange(0, COLUMNS // 2)
            column = column // _HALF * WIDTH + column % _HALF + part * _HALF
        else:
            row = tl.arange(0, ROWS) * PARTS + part
            column = tl.arange(0, COLUMNS)
        filled = row < end
        if owner_ptr is not None:
            owner = tl.load(owner_ptr + first_row + row, mask=filled, other=-1)
            filled = filled & (owner >= 0) & (owner < groups)
            shared += (tl.load(scale_ptr + owner, mask=filled, other=1)[:, None],)
        values += (
            _values(
                x_ptr, grad_ptr, weight_ptr, bias_ptr, mu_ptr, rsigma_ptr, first_row, row, filled,
                first_column, column, width, columns, x_stride, grad_stride, limit, alpha, SOURCE,
                GATED, SPLIT, OFFSET, PTX,
            ),
        )  # fmt: skip
    least = tl.full((), epsilon, tl.float32)
    largest = tl.zeros((), tl.float32)
    if SQUARE or partial_ptr is not None:
        sizes = size_of(values[0], LEAVES_NAN)
        for part in tl.static_range(1, 2 if HALVED else PARTS):
            sizes = tl.maximum(sizes, size_of(values[part], LEAVES_NAN))
        largest = amax_of(tl.max(tl.max(sizes, axis=1), axis=0), LEAVES_NAN)
    if partial_ptr is not None:
        tl.store(partial_ptr + tile, largest)
    if sums_ptr is not None:
        total = values[0]
        for part in tl.static_range(1, PARTS):
            total += values[part]
        column = tl.arange(0, COLUMNS)
        where = sums_ptr + above.to(tl.int64) * columns + first_column + column
        tl.store(where, tl.sum(total, axis=0), mask=(column < width) & (height > 0))
    if owner_ptr is None:
        if SQUARE:
            scale, inverse = _block_scales(largest, 1.0, least, KIND, LARGEST, SCALES, POW2, CAST)
            tl.store(scale_inv_ptr + tile, inverse)
            if scale_inv_t_ptr is not None:
                down = tl.cdiv(rows, ROWS * PARTS)
                tl.store(scale_inv_t_ptr + before.to(tl.int64) * down + above, inverse)
        else:
            scale = shared_scale(
                scale_ptr, tile == 0, scale_inv_ptr, scale_inv_t_ptr, global_scale_inv_ptr,
                WIDTH == 0,
            )  # fmt: skip
        for _ in tl.static_range(PARTS):
            shared += (scale,)
    if HALVED:
        _store_halves(
            values, first_row, height, first_column, width, columns, shared[0], least, data_ptr,
            scale_inv_ptr, KIND, LARGEST, WIDTH, SCALES, POW2, CAST, LEAVES_NAN, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        for part in tl.static_range(PARTS):
            row = tl.arange(0, ROWS) * PARTS + part
            store_rows(
                values[part], first_row, row, height, first_column, width, columns, shared[part],
                least, data_ptr, scale_inv_ptr, KIND, LARGEST, WIDTH, SCALES, POW2, CAST,
                LEAVES_NAN, ROWS, COLUMNS,
            )  # fmt: skip
    if data_t_ptr is not None:
        if WIDTH and owner_ptr is not None:
            # The owner of a block's first row decides.
            row = tl.arange(0, ROWS * PARTS // WIDTH) * WIDTH
            owner = tl.load(owner_ptr + first_row + row, mask=row < height, other=-1)
            filled = (owner >= 0) & (owner < groups)
            shared = (tl.load(scale_ptr + owner, mask=filled, other=1)[:, None],)
        high = tl.minimum(units - first_unit, ROWS).to(tl.int32)
        _store_columns(
            values, first_unit, high, first_column, width, units, shared, least,
            data_t_ptr, scale_inv_t_ptr, KIND, LARGEST, WIDTH, SCALES, POW2, CAST, LEAVES_NAN,
            PARTS, ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["units", "columns", "x_stride", "epsilon"]
)
def _cast_staged(
    x_ptr: tl.tensor,
    data_ptr: tl.tensor,
    staged_ptr: tl.tensor,
    data_t_ptr: tl.tensor,
    staged_t_ptr: tl.tensor,
    units: tl.int32,
    columns: tl.int64,
    x_stride: tl.int64,
    epsilon: tl.float64,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALES: tl.constexpr,
    POW2: tl.constexpr,
    CAST: tl.constexpr,
    LEAVES_NAN: tl.constexpr,
    UNIT: tl.constexpr,
    UNIT_T: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Cast a whole tile both ways; its scales go to buffers in which they are contiguous.

    A unit is four rows. ``staged`` [blocks of a row, rows], with the bytes of four rows in one
    number, and ``staged_t`` [blocks of a column, columns] hold inverse scales, or float32 scales to
    be inverted.
    """
    release_dependents(DEPENDENT)
    HEIGHT: tl.constexpr = WIDTH // 4
    x_stride = x_stride * UNIT
    columns = columns * UNIT
    units = units * UNIT_T
    across = (columns // COLUMNS).to(tl.int32)
    above = tl.program_id(0) // across
    first_column = (tl.program_id(0) - above * across).to(tl.int64) * COLUMNS
    first_unit = above.to(tl.int64) * ROWS
    first_row = first_unit * 4
    column = tl.arange(0, COLUMNS)
    unit = tl.arange(0, ROWS)
    one = tl.full((), 1.0, tl.float32)
    least = tl.full((), epsilon, tl.float32)
    values = ()
    for part in tl.static_range(4):
        where = x_ptr + first_row * x_stride + first_column
        where += ((unit * 4 + part).to(tl.int64) * x_stride)[:, None] + column[None, :]
        values += (fetch(where).to(tl.float32),)
    scales = ()
    for part in tl.static_range(4):
        scales += (
            store_rows(
                values[part], first_row, unit * 4 + part, ROWS * 4, first_column, COLUMNS,
                columns, one, least, data_ptr, None, KIND, LARGEST, WIDTH, SCALES, POW2, CAST,
                LEAVES_NAN, ROWS, COLUMNS,
            ),
        )  # fmt: skip
    block = first_column // WIDTH + tl.arange(0, COLUMNS // WIDTH)
    if SCALES == "float32":
        pairs = tl.join(tl.join(scales[0], scales[2]), tl.join(scales[1], scales[3]))
        of_row = tl.reshape(tl.permute(pairs, (1, 0, 2, 3)), (COLUMNS // WIDTH, ROWS * 4))
        row = first_row + tl.arange(0, ROWS * 4)
        tl.store(staged_ptr + row[None, :] + (block * units * 4)[:, None], of_row)
    else:
        of_unit = scales[0].to(tl.int32)
        for part in tl.static_range(1, 4):
            of_unit |= scales[part].to(tl.int32) << (8 * part)
        tl.store(staged_ptr + first_unit + unit[:, None] + (block * units)[None, :], of_unit)
    below = _store_columns(
        values, first_unit, ROWS, first_column, COLUMNS, units, (one,), least, data_t_ptr,
        None, KIND, LARGEST, WIDTH, SCALES, POW2, CAST, LEAVES_NAN, 4, ROWS, COLUMNS,
    )  # fmt: skip
    block = first_unit // HEIGHT + tl.arange(0, ROWS // HEIGHT)
    tl.store(staged_t_ptr + first_column + column[None, :] + (block * columns)[:, None], below)


@triton.jit  # type: ignore[untyped-decorator]
def transpose_tile(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    tile: tl.tensor,
    units: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INVERTS: tl.constexpr = False,
    PTX: tl.constexpr = False,
) -> None:
    """Transpose PARTS times ROWS rows of integers; a unit is PARTS rows, one number of ``y``.

    INVERTS: the numbers are float32 and are inverted as well.
    """
    across = tl.cdiv(columns, COLUMNS)
    unit = (tile // across) * ROWS + tl.arange(0, ROWS)
    column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (unit < units)[:, None] & (column < columns)[None, :]
    x_ptr += (unit * PARTS)[:, None] * stride + column[None, :]
    packed = fetch(x_ptr, mask)
    tl.static_assert(not INVERTS or PARTS == 1)
    if INVERTS:
        packed = inverse_of(packed, PTX)
    if PARTS > 1:
        BITS: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
        packed = packed.to(tl.int32) & ((1 << BITS) - 1)
        for part in tl.static_range(1, PARTS):
            x = fetch(x_ptr + part * stride, mask)
            packed |= (x.to(tl.int32) & ((1 << BITS) - 1)) << (part * BITS)
    transposed = tl.trans(packed.to(y_ptr.dtype.element_ty))
    y_ptr += column[:, None] * units + unit[None, :]
    tl.store(y_ptr, transposed, mask=(column < columns)[:, None] & (unit < units)[None, :])


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["units", "columns", "units_t", "columns_t", "programs"]
)
def _order_scales(
    staged_ptr: tl.tensor,
    scale_inv_ptr: tl.tensor,
    staged_t_ptr: tl.tensor,
    scale_inv_t_ptr: tl.tensor,
    units: tl.int32,
    columns: tl.int64,
    units_t: tl.int32,
    columns_t: tl.int64,
    programs: tl.int32,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Transpose a tile of ``_cast_staged``'s buffers; the first ``programs`` are for rows' scales.

    PARTS: 4 for bytes, 1 for float32, which are also inverted.
    """
    wait_for_predecessor(DEPENDENT)
    tile = tl.program_id(0).to(tl.int64)
    columns = columns * UNIT
    columns_t = columns_t * UNIT
    if tile < programs:
        transpose_tile(
            staged_ptr, scale_inv_ptr, tile, units, columns, columns, PARTS, ROWS, COLUMNS,
            PARTS == 1, CAST,
        )  # fmt: skip
    else:
        tile -= programs
        transpose_tile(
            staged_t_ptr, scale_inv_t_ptr, tile, units_t, columns_t, columns_t, PARTS, ROWS,
            COLUMNS, PARTS == 1, CAST,
        )  # fmt: skip


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "rows", "columns", "x_stride", "grad_stride", "limit", "alpha", "epsilon"
    ]
)  # fmt: skip
def _cast_strips(
    x_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    data_ptr: tl.tensor,
    scale_inv_ptr: tl.tensor,
    global_scale_inv_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int64,
    x_stride: tl.int64,
    grad_stride: tl.int64,
    limit: tl.float64,
    alpha: tl.float64,
    epsilon: tl.float64,
    SOURCE: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    PTX: tl.constexpr,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALES: tl.constexpr,
    POW2: tl.constexpr,
    CAST: tl.constexpr,
    LEAVES_NAN: tl.constexpr,
    BACKWARDS: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Tiles below each other, cast along their rows: of one half, or the same columns of both.

    Column sums and the largest value stay in registers until the program's last tile; SPLIT is
    "both" or empty.
    """
    release_dependents(DEPENDENT)
    x_stride = x_stride * UNIT
    grad_stride = grad_stride * UNIT
    part = columns * UNIT
    columns = part
    if SPLIT == "both":
        columns = part * 2
    across = tl.minimum(tl.maximum(tl.cdiv(part, COLUMNS), 1), 0x7FFFFFFF).to(tl.int32)
    program = tl.program_id(0)
    if BACKWARDS:
        # What was read last is most likely still in the cache.
        program = tl.num_programs(0) - 1 - program
    share = program // across
    shares = tl.maximum(tl.num_programs(0) // across, 1)
    first_column = (program - share * across).to(tl.int64) * COLUMNS
    width = tl.minimum(part - first_column, COLUMNS).to(tl.int32)
    least = tl.full((), epsilon, tl.float32)
    scale = shared_scale(
        scale_ptr, program == 0, scale_inv_ptr, None, global_scale_inv_ptr, WIDTH == 0
    )  # fmt: skip
    row = tl.arange(0, ROWS)
    largest = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(share, tl.cdiv(rows, ROWS), shares, num_stages=STAGES):
        first_row = tl.full((), tile, tl.int64) * ROWS
        height = tl.minimum(rows - first_row, ROWS).to(tl.int32)
        values = _values(
            x_ptr, grad_ptr, None, None, None, None, first_row, row, row < height,
            first_column, tl.arange(0, COLUMNS), width, part, x_stride, grad_stride, limit,
            alpha, SOURCE, GATED, SPLIT, 0, PTX,
        )  # fmt: skip
        if SPLIT == "both":
            values, second = values
            if partial_ptr is not None:
                largest = tl.maximum(largest, size_of(second, LEAVES_NAN))
            store_rows(
                second, first_row, row, height, first_column + part, width, columns, scale,
                least, data_ptr, scale_inv_ptr, KIND, LARGEST, WIDTH, SCALES, POW2, CAST,
                LEAVES_NAN, ROWS, COLUMNS,
            )  # fmt: skip
        if partial_ptr is not None:
            largest = tl.maximum(largest, size_of(values, LEAVES_NAN))
        if sums_ptr is not None:
            total += values
        store_rows(
            values, first_row, row, height, first_column, width, columns, scale,
            least, data_ptr, scale_inv_ptr, KIND, LARGEST, WIDTH, SCALES, POW2, CAST,
            LEAVES_NAN, ROWS, COLUMNS,
        )  # fmt: skip
    if partial_ptr is not None:
        amax = amax_of(tl.max(tl.max(largest, axis=1), axis=0), LEAVES_NAN)
        tl.store(partial_ptr + program, amax)
    if sums_ptr is not None:
        column = tl.arange(0, COLUMNS)
        where = sums_ptr + share.to(tl.int64) * columns + first_column + column
        tl.store(where, tl.sum(total, axis=0), mask=(column < width) & (rows > 0))


# ---------------------------------------------------------------------------- amaxes


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["rows", "columns", "x_stride", "grad_stride", "limit", "alpha"]
)
def _amax_tiles(
    x_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    mu_ptr: tl.tensor,
    rsigma_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int64,
    x_stride: tl.int64,
    grad_stride: tl.int64,
    limit: tl.float64,
    alpha: tl.float64,
    SOURCE: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    OFFSET: tl.constexpr,
    PTX: tl.constexpr,
    LEAVES_NAN: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """The amax of many tiles; a thread loads TOGETHER elements as one number."""
    release_dependents(DEPENDENT)
    x_stride = x_stride * UNIT
    grad_stride = grad_stride * UNIT
    columns = columns * UNIT
    across = tl.minimum(tl.cdiv(columns, COLUMNS), 0x7FFFFFFF).to(tl.int32)
    tiles = tl.cdiv(rows, ROWS) * across
    READS: tl.constexpr = COLUMNS // TOGETHER
    largest = tl.zeros((ROWS, READS), tl.float32)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        above = index // across
        first_row = above.to(tl.int64) * ROWS
        first_column = (index - above * across).to(tl.int64) * COLUMNS
        width = tl.minimum(columns - first_column, COLUMNS).to(tl.int32)
        row = tl.arange(0, ROWS)
        exists = row < tl.minimum(rows - first_row, ROWS).to(tl.int32)
        values = _values(
            x_ptr, grad_ptr, weight_ptr, bias_ptr, mu_ptr, rsigma_ptr, first_row, row, exists,
            first_column, tl.arange(0, COLUMNS), width, columns, x_stride, grad_stride, limit,
            alpha, SOURCE, GATED, SPLIT, OFFSET, PTX,
        )  # fmt: skip
        if SPLIT == "both":
            values, second = values
            sizes = tl.reshape(size_of(second, LEAVES_NAN), (ROWS, READS, TOGETHER))
            largest = tl.maximum(largest, tl.max(sizes, axis=2))
        # The maxima take few registers, which leaves many for loads in flight.
        sizes = tl.reshape(size_of(values, LEAVES_NAN), (ROWS, READS, TOGETHER))
        largest = tl.maximum(largest, tl.max(sizes, axis=2))
    amax = amax_of(tl.max(tl.max(largest, axis=1), axis=0), LEAVES_NAN)
    tl.store(partial_ptr + tl.program_id(0), amax)


@triton.jit(do_not_specialize=["amaxes", "epsilon"])  # type: ignore[untyped-decorator]
def _largest(
    amaxes_ptr: tl.tensor,
    amax_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    amaxes: tl.int32,
    epsilon: tl.float64,
    SHARED_LARGEST: tl.constexpr,
    POW2: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """The largest of all amaxes and, if wanted, its scale. DEPENDENT: see ``_dependent``."""
    wait_for_predecessor(DEPENDENT)
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, amaxes, BLOCK):
        place = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(amaxes_ptr + place, mask=place < amaxes, other=0))
    amax = tl.max(largest, axis=0)
    tl.store(amax_ptr, amax)
    if scale_ptr is not None:
        least = tl.full((), epsilon, tl.float32)
        tl.store(scale_ptr, scale_of(amax, SHARED_LARGEST, least, POW2, False))


@triton.jit(do_not_specialize=["rows", "columns", "stride"])  # type: ignore[untyped-decorator]
def _amax_rows(
    x_ptr: tl.tensor,
    amaxes_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int64,
    stride: tl.int64,
    LEAVES_NAN: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """The amax of each of ROWS rows."""
    columns = columns * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    x_ptr += row[:, None] * (stride * UNIT)
    largest = tl.zeros((ROWS, COLUMNS), tl.float32)
    for chunk in tl.range(0, tl.cdiv(columns, COLUMNS)):
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        x = fetch(x_ptr + column[None, :], mask).to(tl.float32)
        largest = tl.maximum(largest, size_of(x, LEAVES_NAN))
    tl.store(amaxes_ptr + row, amax_of(tl.max(largest, axis=1), LEAVES_NAN), mask=row < rows)


@triton.jit(do_not_specialize=["rows", "groups", "inner", "epsilon"])  # type: ignore[untyped-decorator]
def _scale_groups(
    amaxes_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    given_ptr: tl.tensor,
    amax_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    scale_inv_ptr: tl.tensor,
    scale_inv_t_ptr: tl.tensor,
    owner_ptr: tl.tensor,
    rows: tl.int32,
    groups: tl.int32,
    inner: tl.int32,
    epsilon: tl.float64,
    SHARED_LARGEST: tl.constexpr,
    POW2: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A group's amax, scale and inverse scale; and mark the group as the owner of its rows.

    Rows after the last group have no owner (-1). Whatever the sizes are, no other memory is
    touched; rows that the sizes leave out have no defined owner.
    """
    group = tl.program_id(0)
    other = tl.arange(0, GROUPS)
    sizes = tl.load(sizes_ptr + other, mask=other < groups, other=0).to(tl.int64) * inner
    zero = tl.zeros((), tl.int64)
    last = tl.full((), rows, tl.int64)
    start = tl.sum(tl.where(other < group, sizes, 0), axis=0)
    end = start + tl.sum(tl.where(other == group, sizes, 0), axis=0)
    start = tl.minimum(tl.maximum(start, zero), last)
    end = tl.minimum(tl.maximum(end, start), last)
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, tl.cdiv(end - start, BLOCK)):
        row = start + first * BLOCK + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(amaxes_ptr + row, mask=row < end, other=0))
        tl.store(owner_ptr + row, tl.full((BLOCK,), group, tl.int32), mask=row < end)
    if group == groups - 1:
        for first in tl.range(0, tl.cdiv(last - end, BLOCK)):
            row = end + first * BLOCK + tl.arange(0, BLOCK)
            tl.store(owner_ptr + row, tl.full((BLOCK,), -1, tl.int32), mask=row < last)
    amax = tl.max(largest, axis=0)
    tl.store(amax_ptr + group, amax)
    if given_ptr is None:
        least = tl.full((), epsilon, tl.float32)
        scale = scale_of(amax, SHARED_LARGEST, least, POW2, False)
    else:
        scale = tl.load(given_ptr + group)
    inverse = tl.div_rn(1.0, scale)
    tl.store(scale_ptr + group, scale)
    tl.store(scale_inv_ptr + group, inverse)
    if scale_inv_t_ptr is not None:
        tl.store(scale_inv_t_ptr + group, inverse)


# ---------------------------------------------------------------------------------- plans

_ROW_TILE = Tile(128, 8192)  # cast along its rows alone
_WIDEST_ROW = 1024  # columns of a tile of several rows
# Tiles below each other: tiles of a program, and its pipeline stages. A program that does not also
# load a gradient's second half has room for more, if its tiles have at most so many bytes.
_STRIP_STEPS, _STRIP_STAGES = 16, 3
_SMALL_STRIP, _SMALL_STRIP_STAGES = 4096, 5
# With fewer programs per multiprocessor than this, each program gets fewer tiles.
_STRIP_PROGRAMS = 4
_LARGEST_THREADS, _LARGEST_BLOCK = 1024, 16384
_GROUP_THREADS, _GROUP_BLOCK = 256, 2048
_MOST_GROUPS = 4096
# By a block's width, the least elements of a tensor, cast both ways, whose scales are reordered by
# a launch of their own: for smaller tensors that launch costs too much.
_STAGED_FROM = {32: 20 * 2**20, 128: 2**23}
_ORDER = Block(256, 128, 128)


class Source(NamedTuple):
    """What is cast: a matrix that kernels calculate.

    Attributes:
        kind: ``"identity"``, the kind of an activation, or ``"norm"``.
        shape: the shape of the output.
        x: the tensor, by rows.
        x_stride: its row stride.
        grad: for a backward, the gradient of the output.
        grad_stride: its row stride.
        gated: whether a row of x has two halves.
        weight, bias, mu, rsigma: the arguments of a norm.
        offset: added to the weight.
        limit, alpha: parameters of a clamped activation.
        amaxes: partial amaxes that together cover all values, if known already.
    """

    kind: str
    shape: tuple[int, ...]
    x: Tensor
    x_stride: int
    grad: Tensor | None = None
    grad_stride: int = 0
    gated: bool = False
    weight: Tensor | None = None
    bias: Tensor | None = None
    mu: Tensor | None = None
    rsigma: Tensor | None = None
    offset: int = 0
    limit: float = 0.0
    alpha: float = 0.0
    amaxes: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors in the order of the kernels' parameters."""
        return (self.x, self.grad, self.weight, self.bias, self.mu, self.rsigma)

    @property
    def halves(self) -> int:
        """The number of gradients side by side in a row."""
        return 2 if self.gated and self.grad is not None else 1

    def matrix(self, width: int, whole: bool) -> _Matrix:
        """Its rows, columns and strides as the kernels count them.

        Args:
            width: columns of a block, 0 without blocks.
            whole: whether rows must stay rows.
        """
        columns = self.shape[-1]
        rows = math.prod(self.shape[:-1])
        x_stride, grad_stride = self.x_stride, self.grad_stride
        dense = x_stride == columns and (self.grad is None or grad_stride == columns)
        one_row = dense and not whole and self.kind != "norm" and not self.gated
        if one_row and not (width and columns % width):
            rows, columns = 1, rows * columns
            x_stride = grad_stride = columns
        part = columns // self.halves
        unit = math.gcd(part, x_stride, grad_stride, WIDEST_UNIT)
        return _Matrix(rows, columns, unit, part // unit, x_stride // unit, grad_stride // unit)

    def constants(self, columns: int, both: bool = False) -> dict[str, Any]:
        """Constants for kernels with tiles of ``columns`` columns, perhaps of ``both`` halves."""
        split = ""
        if self.halves == 2 and both:
            split = "both"
        elif self.halves == 2:
            split = "columns" if self.shape[-1] // 2 % columns else "tiles"
        return {
            "SOURCE": self.kind,
            "GATED": self.gated,
            "SPLIT": split,
            "OFFSET": self.offset,
            "PTX": _launch.has_ptx(),
        }

    @property
    def key(self) -> tuple[object, ...]:
        """What kernels depend on, besides sizes."""
        dtypes = [None if it is None else it.dtype for it in self.tensors]
        return (self.kind, self.gated, self.offset, self.x.device, *dtypes)


class _Matrix(NamedTuple):
    """Numbers of rows and columns, for the kernels.

    Attributes:
        rows, columns: of the whole matrix.
        unit: see the kernels.
        part, x_stride, grad_stride: in units.
    """

    rows: int
    columns: int
    unit: int
    part: int
    x_stride: int
    grad_stride: int


class _Plan(NamedTuple):
    """How to cast.

    Attributes:
        launch: the kernel.
        parts, rows, columns: see the kernel.
        unit_t: the kernel's UNIT_T.
        halved: see the kernel.
    """

    launch: _launch.Launch
    parts: int
    rows: int
    columns: int
    unit_t: int
    halved: bool


class _AmaxPlan(NamedTuple):
    """How to find the partial amaxes.

    Attributes:
        launch: the kernel.
        rows, columns: size of a tile.
        most: most programs of a launch.
    """

    launch: _launch.Launch
    rows: int
    columns: int
    most: int


_PLANS: dict[object, _Plan] = {}
_AMAX_PLANS: dict[object, _AmaxPlan] = {}

_ROWS = tile_choice("cast_rows", _PLANS, _ROW_TILE)
_HALVED_ROWS = tile_choice("cast_rows_e2m1", _PLANS, Tile(128, 8192))
_CALCULATED_ROWS = tile_choice("cast_rows_calculated", _PLANS, Tile(256, 4096))


class _AmaxTile(NamedTuple):
    """How to cut a tensor to find its amax.

    Attributes:
        threads: threads of a program.
        elements: elements of a tile.
        programs: programs per multiprocessor.
    """

    threads: int
    elements: int
    programs: int


_AMAX_RESIDENT = 1024  # most threads per multiprocessor among candidates


def _amax_candidates(itemsize: int) -> Iterator[_AmaxTile]:
    for made in itertools.product((128, 256, 512), (8192, 16384, 32768), (2, 4, 8)):
        if made[0] * made[2] <= _AMAX_RESIDENT:
            yield _AmaxTile(*made)


_AMAX = Choice(
    "amax",
    _AmaxTile,
    key=("itemsize",),
    candidates=_amax_candidates,
    heuristic=lambda device, itemsize: _AmaxTile(128, 16384, 8),
    wrong=bounded(threads=(32, 1024), elements=(128, MOST_ELEMENTS), programs=range(1, 33)),
    plans=(_AMAX_PLANS,),
)

_INTERPRETED = Block(128, 32, 256)  # a program costs the interpreter as much as many elements


def _halved(recipe: Recipe) -> bool:
    """Whether half a block is one number of the data."""
    return recipe.width == 16 and recipe.form.values_per_byte == 2


def _square_rule(height: int, itemsize: int) -> Block:
    if _launch.INTERPRETED:
        return _INTERPRETED
    return Block(128, 128, 128 if height == 128 else 64)


def _calculated_square_rule(height: int, itemsize: int) -> Block:
    rule = _square_rule(height, itemsize)
    if height == 128:
        return rule._replace(threads=256)  # calculating takes registers
    return rule if height == 32 else rule._replace(rows=min(rule.rows, 64))


def _square_candidates(height: int, itemsize: int) -> Iterator[Block]:
    if height == 128:
        yield from (Block(threads, 128, 128) for threads in (128, 256, 512))
        return
    sizes = ((128, 64), (64, 128), (64, 64), (128, 128))
    for threads, size in itertools.product((128, 256), sizes):
        yield Block(threads, *size)


def _strip_rule(halves: int, itemsize: int) -> Block:
    if _launch.INTERPRETED:
        return _INTERPRETED
    return Block(128, 16, 256 // itemsize) if halves == 1 else Block(256, 8, 256)


def _strip_candidates(halves: int, itemsize: int) -> Iterator[Block]:
    narrow, wide = ((16, 64), (16, 128), (32, 64)), ((8, 128), (8, 256), (16, 128))
    sizes = narrow if halves == 1 else wide
    for threads, size in itertools.product((128, 256), sizes):
        yield Block(threads, *size)


# Tiles that are also written transposed, or whose blocks are square, by the rows of a block.
_SQUARES = block_choice("cast_squares", _PLANS, "height", _square_rule, _square_candidates)
_CALCULATED_SQUARES = block_choice(
    "cast_squares_calculated", _PLANS, "height", _calculated_square_rule, _square_candidates
)
# Tiles below each other, which are cast along their rows alone and have column sums or halves.
_STRIPS = block_choice(
    "cast_strips", _PLANS, "halves", _strip_rule, _strip_candidates, least_rows=8
)


def _row_tile(elements: int, matrix: _Matrix, width: int = 0) -> tuple[int, int]:
    """Rows and columns of a tile of about ``elements`` elements."""
    most = elements if matrix.rows == 1 else _WIDEST_ROW
    columns = max(min(block_of(matrix.columns), most, elements), width)
    return rows_of_tile(elements, columns), columns


def _square_tile(source: Source, height: int) -> Block:
    """The tile of a tensor whose blocks have ``height`` rows or columns: whole blocks."""
    choice = _SQUARES if source.kind == "identity" else _CALCULATED_SQUARES
    threads, rows, columns = choice(source.x.device, height, source.x.itemsize)
    return Block(threads, max(rows, height), max(columns, height))


def _plan(
    source: Source,
    recipe: Recipe,
    matrix: _Matrix,
    square: bool,
    groups: int,
    backwards: bool,
) -> _Plan:
    device = source.x.device
    parts = unit_t = 1
    halved = not square and _halved(recipe) and matrix.unit == WIDEST_UNIT
    if square:
        height = 128 if recipe.square else recipe.width or 1
        threads, rows, columns = _square_tile(source, height)
        if recipe.square:  # a tile is a block
            rows, columns = height, height
    else:
        choice = _ROWS if source.kind == "identity" else _CALCULATED_ROWS
        choice = _HALVED_ROWS if halved else choice
        threads, elements = choice(device, source.x.itemsize)
        rows, columns = _row_tile(elements, matrix, recipe.width)
    if recipe.columnwise:
        parts = math.gcd(matrix.rows, 4)
        unit_t = math.gcd(matrix.rows // parts, 4)
    rows //= parts
    launch = _launch.Launch(
        _cast_tiles,
        device,
        threads=threads,
        **source.constants(columns),
        **recipe.constants(),
        **constants_of(device),
        SQUARE=recipe.square,
        GROUPS=groups,
        BACKWARDS=backwards,
        HALVED=halved,
        UNIT=matrix.unit,
        UNIT_T=unit_t,
        PARTS=parts,
        ROWS=rows,
        COLUMNS=columns,
    )
    return _Plan(launch, parts, rows, columns, unit_t, halved)


def _staged_plan(source: Source, recipe: Recipe, matrix: _Matrix) -> _Plan:
    device = source.x.device
    threads, rows, columns = _square_tile(source, recipe.width)
    unit_t = math.gcd(matrix.rows // 4, 4)
    launch = _launch.Launch(
        _cast_staged,
        device,
        threads=threads,
        **recipe.constants(),
        **constants_of(device),
        UNIT=matrix.unit,
        UNIT_T=unit_t,
        ROWS=rows // 4,
        COLUMNS=columns,
        DEPENDENT=has_dependent_launches(device),
    )
    return _Plan(launch, 4, rows // 4, columns, unit_t, False)


def _strips_plan(source: Source, recipe: Recipe, matrix: _Matrix, backwards: bool) -> _Plan:
    device = source.x.device
    threads, rows, columns = _STRIPS(device, source.halves, source.x.itemsize)
    columns = max(columns, recipe.width)
    small = source.halves == 1 and rows * columns * source.x.itemsize <= _SMALL_STRIP
    launch = _launch.Launch(
        _cast_strips,
        device,
        threads=threads,
        **source.constants(columns, both=True),
        **recipe.constants(),
        **constants_of(device),
        BACKWARDS=backwards,
        UNIT=matrix.unit,
        ROWS=rows,
        COLUMNS=columns,
        STAGES=_SMALL_STRIP_STAGES if small else _STRIP_STAGES,
        DEPENDENT=has_dependent_launches(device),
    )
    return _Plan(launch, 1, rows, columns, 1, False)


def _amax_plan(source: Source, matrix: _Matrix) -> _AmaxPlan:
    device = source.x.device
    threads, elements, programs = _AMAX(device, source.x.itemsize)
    rows, columns = _row_tile(elements, matrix)
    launch = _launch.Launch(
        _amax_tiles,
        device,
        threads=threads,
        **source.constants(columns, both=True),
        LEAVES_NAN=constants_of(device)["LEAVES_NAN"],
        UNIT=matrix.unit,
        ROWS=rows,
        COLUMNS=columns,
        TOGETHER=min(matrix.unit, 16 // source.x.itemsize),
        DEPENDENT=has_dependent_launches(device),
    )
    return _AmaxPlan(launch, rows, columns, programs * _launch.limits(device).multiprocessors)


# ------------------------------------------------------------------------------------ runs


def _tiles(op: str, matrix: _Matrix, rows: int, columns: int) -> int:
    check_size(op, "rows", matrix.rows)
    tiles = -(-matrix.rows // rows) * -(-matrix.columns // columns)
    check_size(op, "tiles", tiles)
    return tiles


def _empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=like.device)


def _amaxes(op: str, source: Source) -> Tensor:
    """Partial amaxes that together cover all values."""
    matrix = source.matrix(0, whole=False)
    key = (*source.key, matrix.rows == 1, min(matrix.columns, MOST_ELEMENTS), matrix.unit)
    if source.halves == 2:
        key += (matrix.columns,)
    plan = _AMAX_PLANS.get(key) or add_to_cache(_AMAX_PLANS, key, _amax_plan(source, matrix))
    tiles = _tiles(op, matrix, plan.rows, plan.columns)
    programs = max(1, min(tiles, plan.most))
    amaxes = _empty(source.x, (programs,))
    plan.launch(
        (programs, 1),
        (*source.tensors, amaxes),
        (matrix.rows, *matrix[3:], source.limit, source.alpha),
    )
    return amaxes


def write_largest(
    amaxes: Tensor, amax: Tensor, scale: Tensor | None = None, recipe: Recipe | None = None
) -> None:
    """Write the largest of all amaxes and, with a recipe, the scale that follows from it."""
    largest, power, epsilon = (
        (1.0, False, 0.0)
        if recipe is None
        else (recipe.shared_largest, recipe.force_pow_2_scales, recipe.amax_epsilon)
    )
    launch = launch_of(
        _largest,
        amaxes.device,
        (scale is None,),
        threads=_LARGEST_THREADS,
        SHARED_LARGEST=largest,
        POW2=power,
        BLOCK=_LARGEST_BLOCK,
        **dependent_launch(has_dependent_launches(amaxes.device)),
    )
    launch((1, 1), (amaxes, amax, scale), (amaxes.numel(), epsilon))


def amax_of_all(op: str, source: Source) -> Tensor:
    """The amax, ``[1]``."""
    amax = _empty(source.x, (1,))
    check_fresh(op, amax)
    write_largest(_amaxes(op, source), amax)
    return amax


class _Groups(NamedTuple):
    """The groups of rows.

    Attributes:
        sizes: of each group, in the first dimension.
        owner: the group of each row; None if only the sum of the sizes matters.
        inner: rows for each index of the first dimension.
    """

    sizes: Tensor
    owner: Tensor | None
    inner: int

    @property
    def block(self) -> int:
        """The block size in which kernels read the sizes."""
        return block_of(self.sizes.numel())


def _scale_each_group(
    recipe: Recipe,
    source: Source,
    groups: _Groups,
    scale: Tensor | None,
    amax: Tensor,
    inverses: tuple[Tensor, Tensor | None],
) -> Tensor:
    """The scales of groups; writes their amaxes, inverse scales and the owners of rows."""
    matrix = source.matrix(0, whole=True)
    device = source.x.device
    amaxes = _empty(source.x, (matrix.rows,))
    threads, elements = _ROW_TILE
    rows, columns = _row_tile(elements, matrix)
    launch = launch_of(
        _amax_rows,
        device,
        (source.x.dtype,),
        threads=threads,
        LEAVES_NAN=constants_of(device)["LEAVES_NAN"],
        UNIT=matrix.unit,
        ROWS=rows,
        COLUMNS=columns,
    )
    if matrix.rows:
        launch(
            (-(-matrix.rows // rows), 1),
            (source.x, amaxes),
            (matrix.rows, matrix.part, matrix.x_stride),
        )
    count = groups.sizes.numel()
    scales = _empty(source.x, (count,))
    launch = launch_of(
        _scale_groups,
        device,
        (groups.sizes.dtype, scale is None, inverses[1] is None),
        threads=_GROUP_THREADS,
        SHARED_LARGEST=recipe.shared_largest,
        POW2=recipe.force_pow_2_scales,
        GROUPS=groups.block,
        BLOCK=_GROUP_BLOCK,
    )
    launch(
        (count, 1),
        (amaxes, groups.sizes, scale, amax, scales, *inverses, groups.owner),
        (matrix.rows, count, groups.inner, recipe.amax_epsilon),
    )
    return scales


def in_bytes(tensor: Tensor) -> Tensor:
    """A tensor with one-byte elements as bytes, others unchanged."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _run_strips(
    recipe: Recipe,
    source: Source,
    matrix: _Matrix,
    scale: Tensor | None,
    outputs: Quantized,
    with_sums: bool,
    backwards: bool,
) -> Tensor | None:
    """Write the outputs, cast along rows alone; returns the programs' partial column sums."""
    data, scale_inv, amax, global_scale_inv = outputs[:4]
    key = ("strips", *source.key, *recipe[1:5], matrix.unit, scale is None, with_sums, backwards)
    plan = _PLANS.get(key) or add_to_cache(
        _PLANS, key, _strips_plan(source, recipe, matrix, backwards)
    )
    down = -(-matrix.rows // plan.rows)
    across = -(-(matrix.columns // source.halves) // plan.columns)
    wanted = _STRIP_PROGRAMS * _launch.limits(source.x.device).multiprocessors
    shares = max(-(-down // _STRIP_STEPS), min(down, -(-wanted // max(across, 1))))
    programs = max(1, shares * across)
    check_size(recipe.op, "programs", programs)
    sums = _empty(source.x, (shares, matrix.columns)) if with_sums else None
    partial = None
    if amax is not None and not backwards:
        partial = _empty(source.x, (programs,))
    if shares * across or recipe.form.by_tensor:
        plan.launch(
            (programs, 1),
            (
                source.x, source.grad, scale, in_bytes(data), in_bytes(scale_inv),
                global_scale_inv, partial, sums,
            ),
            (
                matrix.rows, *matrix[3:], source.limit, source.alpha, recipe.amax_epsilon,
            ),
        )  # fmt: skip
    if partial is not None:
        assert amax is not None
        write_largest(partial, amax)
    return sums


def _stages_scales(recipe: Recipe, source: Source, matrix: _Matrix) -> bool:
    """Whether blocks' scales are reordered by a launch of their own: many, and in whole tiles."""
    rows, columns = matrix.rows, matrix.columns
    least = _STAGED_FROM.get(recipe.width)
    if not recipe.columnwise or least is None or source.kind != "identity":
        return False
    if rows * columns < least or math.gcd(rows, columns) % 128:
        return False
    _, tall, wide = _square_tile(source, recipe.width)
    return not (rows % tall or columns % wide)


def _run_staged(recipe: Recipe, source: Source, matrix: _Matrix, outputs: Quantized) -> None:
    """Cast both ways, and reorder the scales afterwards."""
    data, scale_inv, _, _, data_t, scale_inv_t = outputs
    assert data_t is not None
    assert scale_inv_t is not None
    device, rows, columns = source.x.device, matrix.rows, matrix.columns
    key = ("staged", *source.key, *recipe[1:5], matrix.unit, math.gcd(rows // 4, 4))
    plan = _PLANS.get(key) or add_to_cache(_PLANS, key, _staged_plan(source, recipe, matrix))
    programs = rows // (plan.rows * plan.parts) * (columns // plan.columns)
    check_size(recipe.op, "programs", programs)
    # Bytes are packed by four rows.
    of_bytes = scale_inv.element_size() == 1
    dtype, parts = (torch.uint8, 4) if of_bytes else (torch.float32, 1)
    staged = _empty(source.x, (columns // recipe.width, rows), dtype)
    staged_t = _empty(source.x, (rows // recipe.width, columns), dtype)

    def words(scales: Tensor) -> Tensor:
        return scales.view(torch.int32) if of_bytes else scales

    plan.launch(
        (programs, 1),
        (source.x, in_bytes(data), words(staged), data_t.view(torch.int32), staged_t),
        (
            rows // plan.parts // plan.unit_t, *matrix[3:5], recipe.amax_epsilon,
        ),
    )  # fmt: skip
    threads, tall, wide = _ORDER
    unit = math.gcd(rows, columns, WIDEST_UNIT)
    launch = launch_of(
        _order_scales,
        device,
        (),
        threads=threads,
        UNIT=unit,
        PARTS=parts,
        ROWS=tall // 4,
        COLUMNS=wide,
        CAST=constants_of(device)["CAST"],
        **dependent_launch(has_dependent_launches(device)),
    )
    tall = tall // 4 * parts
    tiles = [-(-it.shape[0] // tall) * -(-it.shape[1] // wide) for it in (staged, staged_t)]
    launch(
        (sum(tiles), 1),
        (staged, words(in_bytes(scale_inv)), staged_t, words(in_bytes(scale_inv_t))),
        (
            staged.shape[0] // parts, rows // unit, staged_t.shape[0] // parts, columns // unit,
            tiles[0],
        ),
    )  # fmt: skip


def _run(
    recipe: Recipe,
    source: Source,
    scale: Tensor | None,
    group_sizes: Tensor | None,
    with_sums: bool,
) -> tuple[Quantized, Tensor | None]:
    form = recipe.form
    given = scale
    groups = 1 if group_sizes is None else group_sizes.numel()
    square = recipe.columnwise or recipe.square or with_sums
    matrix = source.matrix(recipe.width, whole=square or group_sizes is not None)
    check_size(recipe.op, "rows", matrix.rows)
    outputs = outputs_of(recipe, source.x, source.shape, groups)
    data, scale_inv, amax, global_scale_inv, data_t, scale_inv_t = outputs
    owners = partial = None
    if group_sizes is not None:
        inner = math.prod(source.shape[1:-1])
        owner = _empty(source.x, (matrix.rows,), torch.int32) if form.by_tensor else None
        owners = _Groups(group_sizes, owner, inner)
        if amax is not None:
            inverses = (scale_inv, scale_inv_t) if form.block is None else (global_scale_inv, None)
            assert inverses[0] is not None
            scale = _scale_each_group(
                recipe, source, owners, scale, amax, (inverses[0], inverses[1])
            )
    elif amax is not None and scale is None:
        scale = _empty(source.x, (1,))
        amaxes = source.amaxes if source.amaxes is not None else _amaxes(recipe.op, source)
        write_largest(amaxes, amax, scale, recipe)
    if not (recipe.columnwise or recipe.square) and group_sizes is None:
        part = matrix.columns // source.halves
        if with_sums if source.halves == 1 else not (recipe.width and part % recipe.width):
            return outputs, _run_strips(
                recipe, source, matrix, scale, outputs, with_sums, given is None
            )
    if owners is None and not with_sums and _stages_scales(recipe, source, matrix):
        _run_staged(recipe, source, matrix, outputs)
        return outputs, None
    counted = 0 if owners is None or owners.owner is not None else owners.block
    key = (
        *source.key, *recipe[1:5], recipe.columnwise and math.gcd(matrix.rows, 16), square,
        matrix.rows == 1, min(matrix.columns, MOST_ELEMENTS), matrix.unit, counted,
        given is None, with_sums, None if group_sizes is None else group_sizes.dtype,
    )  # fmt: skip
    if source.halves == 2:
        key += (matrix.columns,)
    plan = _PLANS.get(key) or add_to_cache(
        _PLANS,
        key,
        _plan(source, recipe, matrix, square, counted, given is None or source.kind == "norm"),
    )
    tiles = _tiles(recipe.op, matrix, plan.rows * plan.parts, plan.columns)
    sums = None
    if with_sums:
        programs = -(-matrix.rows // (plan.rows * plan.parts))
        sums = _empty(source.x, (programs, matrix.columns))
    if owners is None and amax is not None and given is not None:
        partial = _empty(source.x, (max(1, tiles),))
    if not tiles and not (form.by_tensor and owners is None):
        return outputs, sums
    if data_t is not None:
        size = plan.parts if form.values_per_byte == 1 else plan.parts // 2
        # An empty tensor's strides do not tell what dtypes it can be viewed as.
        data_t = data_t.view(INTEGERS[size]) if tiles else _empty(data, (0,), INTEGERS[size])
    sizes = owner = None
    if owners is not None:
        sizes, owner = (owners.sizes, None) if owners.owner is None else (None, owners.owner)
    bytes_of_data = in_bytes(data)
    if plan.halved and tiles:
        bytes_of_data = bytes_of_data.view(torch.int32)
    plan.launch(
        (max(1, tiles), 1),
        (
            *source.tensors, scale, owner, sizes, bytes_of_data, in_bytes(scale_inv),
            None if owner is not None else global_scale_inv,
            data_t, None if scale_inv_t is None else in_bytes(scale_inv_t), partial, sums,
        ),
        (
            matrix.rows, matrix.rows // plan.parts // plan.unit_t, *matrix[3:], groups,
            1 if owners is None else owners.inner, source.limit, source.alpha,
            recipe.amax_epsilon,
        ),
    )  # fmt: skip
    if partial is not None:
        assert amax is not None
        write_largest(partial, amax)
    return outputs, sums


def dense_scale(op: str, scale: Tensor | None) -> Tensor | None:
    """The given scale, as kernels take it."""
    return None if scale is None else plain(op, "scale", scale).contiguous()


def cast(
    recipe: Recipe,
    source: Source,
    scale: Tensor | None = None,
    group_sizes: Tensor | None = None,
) -> Quantized:
    """The outputs of ``quantize``, or with ``group_sizes`` those of ``group_quantize``."""
    if group_sizes is not None:
        group_sizes = plain(recipe.op, "group_sizes", group_sizes).contiguous()
        if group_sizes.numel() > _MOST_GROUPS:
            raise NotSupportedError(
                f"{recipe.op}: {group_sizes.numel()} groups exceed the limit of {_MOST_GROUPS}"
            )
    return _run(recipe, source, dense_scale(recipe.op, scale), group_sizes, False)[0]


def cast_with_sums(
    recipe: Recipe, source: Source, dtype: torch.dtype, scale: Tensor | None = None
) -> tuple[Tensor, Quantized]:
    """The sums over the rows in ``dtype``, and the outputs of ``quantize``."""
    columns = source.shape[-1]
    check_size(recipe.op, "columns", columns)
    outputs, sums = _run(recipe, source, dense_scale(recipe.op, scale), None, True)
    assert sums is not None
    if not sums.numel():
        return torch.zeros((columns,), dtype=dtype, device=source.x.device), outputs
    total = _empty(source.x, (columns,), dtype)
    unit = math.gcd(columns, WIDEST_UNIT)
    key = ("sums", columns, dtype, source.x.device)
    adding = _TOTALS.get(key) or add_to_cache(
        _TOTALS, key, SumOfPrograms(columns, unit, source.x.device)
    )
    adding(sums, total, None, sums.shape[0])
    return total, outputs


_TOTALS: dict[object, SumOfPrograms] = {}
