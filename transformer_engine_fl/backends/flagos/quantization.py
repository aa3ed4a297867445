"""Quantisation in Triton.

The casting kernels are in ``_casting``. Here are the operators on top of them, and those that move
bytes, dequantise, handle flat parts of a matrix, or keep the histories of delayed scaling.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_engine_fl.backends._recipes import (
    KINDS,
    SCALES,
    Lists,
    Quantized,
    Recipe,
    in_lists,
    options_of,
)
from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import (
    INTEGERS,
    WIDEST_UNIT,
    add_to_cache,
    address_of,
    block_of,
    by_rows,
    check_fresh,
    check_numbers,
    check_size,
    in_place,
    launch_for,
    loaded_launch,
    plain,
    rows_of_tile,
)
from transformer_engine_fl.backends.flagos._casting import (
    Source,
    amax_of_all,
    cast,
    cast_with_sums,
    transpose_tile,
)
from transformer_engine_fl.backends.flagos._fetch import fetch
from transformer_engine_fl.backends.flagos._narrow import (
    amax_of,
    constants_of,
    encoded,
    power_of_byte,
    quotient,
    size_of,
    value_of,
)
from transformer_engine_fl.backends.flagos._tiles import (
    MOST_ELEMENTS,
    Block,
    Tile,
    bounded,
    tile_choice,
)
from transformer_engine_fl.backends.flagos.tuning import Choice
from transformer_engine_fl.ops import quantization as contracts
from transformer_engine_fl.ops._formats import FORMATS, LARGEST
from transformer_engine_fl.ops.quantization import blocks_of, matrix_shape, parts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "bgrad_quantize",
    "compute_amax",
    "dequantize",
    "fp8_block_scaling_compute_partial_amax",
    "fp8_block_scaling_partial_cast",
    "fp8_transpose",
    "fused_amax_and_scale_update_after_reduction",
    "group_quantize",
    "multi_tensor_quantize",
    "quantize",
    "split_quantize",
    "swap_first_dims",
]

# -------------------------------------------------------------------------------- kernels
#
# ``columns`` and strides count units of UNIT elements.


@triton.jit(do_not_specialize=["rows", "columns", "stride"])  # type: ignore[untyped-decorator]
def _dequantize(
    data_ptr: tl.tensor,
    scale_inv_ptr: tl.tensor,
    global_scale_inv_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int64,
    stride: tl.int64,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    SCALES: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """The values of one tile; blocks are WIDTH elements of data wide, 0 for a single scale."""
    columns = columns * UNIT
    across = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0).to(tl.int64)
    row = (tile // across) * ROWS + tl.arange(0, ROWS)
    first_column = (tile % across) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    code = fetch(data_ptr + row[:, None] * (stride * UNIT) + column[None, :], mask)
    if WIDTH:
        blocks = tl.cdiv(columns, WIDTH)
        block = first_column // WIDTH + tl.arange(0, COLUMNS // WIDTH)
        where = scale_inv_ptr + (row // HEIGHT)[:, None] * blocks + block[None, :]
        known = (row < rows)[:, None] & (block < blocks)[None, :]
        factor = fetch(where, known)
        if SCALES == "e8m0":
            factor = power_of_byte(factor)
        elif SCALES == "e4m3":
            factor = value_of(factor, "e4m3")
        factor = tl.reshape(
            tl.broadcast_to(factor[:, :, None], (ROWS, COLUMNS // WIDTH, WIDTH)), (ROWS, COLUMNS)
        )
    else:
        factor = tl.load(scale_inv_ptr)
    if KIND == "e2m1":
        low = value_of(code & 15, KIND) * factor
        high = value_of(code >> 4, KIND) * factor
        if global_scale_inv_ptr is not None:
            whole = tl.load(global_scale_inv_ptr)
            low *= whole
            high *= whole
        values = tl.reshape(tl.join(low, high), (ROWS, 2 * COLUMNS))
        columns = columns * 2
        column = 2 * first_column + tl.arange(0, 2 * COLUMNS)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
    else:
        values = value_of(code, KIND) * factor
    out = out_ptr + row[:, None] * columns + column[None, :]
    tl.store(out, values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["units", "columns", "stride"])  # type: ignore[untyped-decorator]
def _transpose(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    units: tl.int32,
    columns: tl.int32,
    stride: tl.int64,
    UNIT: tl.constexpr,
    UNIT_T: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    tile = tl.program_id(0).to(tl.int64)
    columns = columns * UNIT
    stride = stride * UNIT
    transpose_tile(x_ptr, y_ptr, tile, units * UNIT_T, columns, stride, PARTS, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["rows", "columns", "first", "x_first", "x_second"])  # type: ignore[untyped-decorator]
def _swap_rows(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    first: tl.int32,
    x_first: tl.int64,
    x_second: tl.int64,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One tile of rows in their new order: ``first`` rows, then as many of the next."""
    columns = columns * UNIT
    across = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0)
    row = (tile // across) * ROWS + tl.arange(0, ROWS)
    column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    start = (row % first).to(tl.int64) * (x_first * UNIT)
    start += (row // first).to(tl.int64) * (x_second * UNIT)
    x = fetch(x_ptr + start[:, None] + column[None, :], mask)
    tl.store(y_ptr + row.to(tl.int64)[:, None] * columns + column[None, :], x, mask=mask)


@triton.jit(do_not_specialize=["w", "start", "count", "across"])  # type: ignore[untyped-decorator]
def _shard(
    x_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    w: tl.int64,
    start: tl.int64,
    count: tl.int64,
    across: tl.int32,
    LENGTH: tl.constexpr,
    KIND: tl.constexpr,
    CAST: tl.constexpr,
    LEAVES_NAN: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One block of LENGTH rows and columns: its amax, or with ``scale`` its cast values."""
    w = tl.full((), w, tl.int64) * UNIT
    start = tl.full((), start, tl.int64) * UNIT
    count = tl.full((), count, tl.int64) * UNIT
    block = tl.program_id(0)
    first_row = (block // across).to(tl.int64) * LENGTH
    first_column = (block % across).to(tl.int64) * LENGTH
    largest = tl.zeros((ROWS, COLUMNS), tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + block)
    for above in tl.range(0, LENGTH, ROWS):
        for before in tl.range(0, LENGTH, COLUMNS):
            down = above + tl.arange(0, ROWS)
            along = before + tl.arange(0, COLUMNS)
            column = first_column + along
            place = (first_row + down)[:, None] * w + column[None, :] - start
            mask = (down < LENGTH)[:, None] & ((along < LENGTH) & (column < w))[None, :]
            mask = mask & (place >= 0) & (place < count)
            x = fetch(x_ptr + place, mask).to(tl.float32)
            if scale_ptr is None:
                largest = tl.maximum(largest, size_of(x, LEAVES_NAN))
            else:
                tl.store(out_ptr + place, encoded(x * scale, KIND, CAST), mask=mask)
    if scale_ptr is None:
        amax = amax_of(tl.max(tl.max(largest, axis=1), axis=0), LEAVES_NAN)
        tl.store(out_ptr + block, amax)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "length", "columns", "row_stride", "column_stride", "scale_stride", "numerator"
    ]
)  # fmt: skip
def _update(
    reduced_ptr: tl.tensor,
    history_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    length: tl.int32,
    columns: tl.int32,
    row_stride: tl.int64,
    column_stride: tl.int64,
    scale_stride: tl.int64,
    numerator: tl.float64,
    OF_ALL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Update some columns of a history, and their scales."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    history_ptr += column.to(tl.int64) * column_stride
    scale_ptr += column.to(tl.int64) * scale_stride
    reduced = tl.load(reduced_ptr + column, mask=inside, other=0)
    oldest = tl.load(history_ptr, mask=inside, other=0)
    newest = tl.where(reduced == 0, oldest, reduced)
    largest = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, length, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < length) & inside[None, :]
        where = history_ptr[None, :] + row * row_stride
        moved = tl.load(where + row_stride, mask=mask & (row + 1 < length), other=0)
        moved = tl.where(row == length - 1, newest[None, :], moved)
        # Other threads write what a thread has read here or in the iterations before.
        tl.debug_barrier()
        tl.store(where, tl.where(row == 0, 0, moved), mask=mask)
        largest = tl.maximum(largest, tl.where(mask & (moved == moved), moved, 0))
    amax = newest
    if OF_ALL:
        amax = tl.max(largest, axis=0)
    usable = (amax > 0) & (amax < float("inf"))
    scale = quotient(tl.full((), numerator, tl.float32), amax)
    tl.store(scale_ptr, scale, mask=inside & usable)


# ---------------------------------------------------------------------------------- plans

_WIDEST_ROW = 1024  # columns of a tile of several rows
_SHARD_THREADS, _SHARD_ROWS, _SHARD_COLUMNS = 256, 32, 128
_UPDATE_THREADS, _UPDATE_TILE, _UPDATE_COLUMNS = 256, 2048, 8


class _Plan(NamedTuple):
    """How to move a matrix.

    Attributes:
        launch: the kernel.
        rows, columns: size of a tile.
    """

    launch: _launch.Launch
    rows: int
    columns: int

    def start(
        self,
        op: str,
        rows: int,
        columns: int,
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[int, ...],
    ) -> None:
        """Launch a program for each tile."""
        programs = -(-rows // self.rows) * -(-columns // self.columns)
        check_size(op, "tiles", programs)
        self.launch((programs, 1), tensors, numbers)


_PLANS: dict[object, _Plan] = {}

_DEQUANTIZE = tile_choice("dequantize", _PLANS, Tile(128, 8192))
_DEQUANTIZE_HALVES = tile_choice("dequantize_e2m1", _PLANS, Tile(128, 4096))
_SWAP = tile_choice("swap_first_dims", _PLANS, Tile(128, 4096), in_bytes=True)
_TURN = Choice(  # of a tile whose rows and columns are in bytes
    "fp8_transpose",
    Block,
    key=("itemsize",),
    candidates=lambda itemsize: itertools.starmap(
        Block, itertools.product((256, 512), (128, 256), (64, 128))
    ),
    heuristic=lambda device, itemsize: Block(512, 256, 128),
    wrong=bounded(threads=(32, 1024), rows=(16, 512), columns=(32, 512)),
    plans=(_PLANS,),
)


def _source(op: str, input: Tensor) -> Source:
    """The tensor itself, as the source of a cast."""
    x, stride = by_rows(plain(op, "input", input))
    return Source("identity", tuple(input.shape), x, stride)


# ------------------------------------------------------------------------------ operators


@repeating
def quantize(
    input: Tensor,
    scale: Tensor | None = None,
    *,
    format: str = "per_tensor",
    dtype: torch.dtype | None = None,
    columnwise: bool = False,
    force_pow_2_scales: bool = False,
    amax_epsilon: float = 0.0,
) -> Quantized:
    """``quantize`` of the contract."""
    options = options_of(format, dtype, columnwise, force_pow_2_scales, amax_epsilon)
    contracts.quantize.check(input, scale, **options)
    return cast(Recipe.of("quantize", **options), _source("quantize", input), scale)


@repeating
def bgrad_quantize(
    input: Tensor,
    scale: Tensor | None = None,
    *,
    format: str = "per_tensor",
    dtype: torch.dtype | None = None,
    columnwise: bool = False,
    force_pow_2_scales: bool = False,
    amax_epsilon: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """``bgrad_quantize`` of the contract."""
    op = "bgrad_quantize"
    options = options_of(format, dtype, columnwise, force_pow_2_scales, amax_epsilon)
    contracts.bgrad_quantize.check(input, scale, **options)
    bias_grad, outputs = cast_with_sums(
        Recipe.of(op, **options), _source(op, input), input.dtype, scale
    )
    return bias_grad, *outputs


@repeating
def split_quantize(
    input: Tensor,
    split_sections: Sequence[int],
    scales: list[Tensor] | None = None,
    *,
    format: str = "per_tensor",
    dtype: torch.dtype | None = None,
    columnwise: bool = False,
    force_pow_2_scales: bool = False,
    amax_epsilon: float = 0.0,
) -> Lists:
    """``split_quantize`` of the contract."""
    op = "split_quantize"
    options = options_of(format, dtype, columnwise, force_pow_2_scales, amax_epsilon)
    contracts.split_quantize.check(input, split_sections, scales, **options)
    check_numbers(op, *split_sections)
    parts = parts_of(plain(op, "input", input), split_sections)
    return _each(Recipe.of(op, **options), parts, scales)


@repeating
def group_quantize(
    input: Tensor,
    group_sizes: Tensor,
    scale: Tensor | None = None,
    *,
    format: str = "per_tensor",
    dtype: torch.dtype | None = None,
    columnwise: bool = False,
    force_pow_2_scales: bool = False,
    amax_epsilon: float = 0.0,
) -> Quantized:
    """``group_quantize`` of the contract."""
    op = "group_quantize"
    options = options_of(format, dtype, columnwise, force_pow_2_scales, amax_epsilon)
    contracts.group_quantize.check(input, group_sizes, scale, **options)
    return cast(Recipe.of(op, **options), _source(op, input), scale, group_sizes)


def multi_tensor_quantize(
    inputs: list[Tensor],
    scales: list[Tensor] | None = None,
    *,
    format: str = "per_tensor",
    dtype: torch.dtype | None = None,
    columnwise: bool = False,
    force_pow_2_scales: bool = False,
    amax_epsilon: float = 0.0,
) -> Lists:
    """``multi_tensor_quantize`` of the contract."""
    op = "multi_tensor_quantize"
    options = options_of(format, dtype, columnwise, force_pow_2_scales, amax_epsilon)
    contracts.multi_tensor_quantize.check(inputs, scales, **options)
    return _each(Recipe.of(op, **options), inputs, scales)


def _each(recipe: Recipe, inputs: Sequence[Tensor], scales: Sequence[Tensor] | None) -> Lists:
    """The outputs for several tensors: a list in place of each output."""
    return in_lists(
        [
            cast(recipe, _source(recipe.op, it), scales[place] if scales else None)
            for place, it in enumerate(inputs)
        ]
    )


@repeating
def dequantize(
    data: Tensor,
    scale_inv: Tensor,
    global_scale_inv: Tensor | None = None,
    *,
    format: str = "per_tensor",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``dequantize`` of the contract."""
    op = "dequantize"
    contracts.dequantize.check(
        data, scale_inv, global_scale_inv, format=format, out_dtype=out_dtype
    )
    form = FORMATS[format]
    data, stride = by_rows(plain(op, "data", data))
    factors = plain(op, "scale_inv", scale_inv).contiguous()
    if global_scale_inv is not None:
        global_scale_inv = plain(op, "global_scale_inv", global_scale_inv)
    rows, columns = matrix_shape(data.shape)
    shape = (*data.shape[:-1], columns * form.values_per_byte)
    output = torch.empty(shape, dtype=out_dtype or torch.float32, device=data.device)
    check_fresh(op, output)
    if not output.numel():
        return output
    height, width = form.block or (1, 0)
    width //= form.values_per_byte
    if stride == columns and height == 1 and not (width and columns % width):
        rows, columns, stride = 1, rows * columns, rows * columns
    unit = math.gcd(columns, stride, WIDEST_UNIT)
    check_size(op, "rows", rows)
    if factors.element_size() == 1:
        factors = factors.view(torch.uint8)
    tensors = (data.view(torch.uint8), factors, global_scale_inv, output)
    key = (
        op, form, data.dtype, output.dtype, factors.dtype, unit, rows == 1,
        min(columns, MOST_ELEMENTS), global_scale_inv is None, data.device,
    )  # fmt: skip
    plan = _PLANS.get(key)
    if plan is None:
        choice = _DEQUANTIZE if form.values_per_byte == 1 else _DEQUANTIZE_HALVES
        threads, elements = choice(data.device, output.element_size())
        most = elements if rows == 1 else min(elements, _WIDEST_ROW)
        tile = max(width, min(block_of(columns), most))
        at_once = rows_of_tile(elements, tile)
        launch = _launch.Launch(
            _dequantize,
            data.device,
            threads=threads,
            KIND=KINDS[data.dtype],
            WIDTH=width,
            HEIGHT=height,
            SCALES=SCALES[form.scale_dtype],
            UNIT=unit,
            ROWS=at_once,
            COLUMNS=tile,
        )
        plan = add_to_cache(_PLANS, key, _Plan(launch, at_once, tile))
    plan.start(op, rows, columns, tensors, (rows, columns // unit, stride // unit))
    return output


@repeating
def compute_amax(input: Tensor) -> Tensor:
    """``compute_amax`` of the contract."""
    op = "compute_amax"
    contracts.compute_amax.check(input)
    input = plain(op, "input", input)
    return amax_of_all(op, _source(op, input if input.dim() else input.view(1)))


@repeating
def fp8_transpose(data: Tensor) -> Tensor:
    """``fp8_transpose`` of the contract."""
    op = "fp8_transpose"
    contracts.fp8_transpose.check(data)
    x, stride = by_rows(plain(op, "data", data))
    rows, columns = matrix_shape(x.shape)
    output = torch.empty((columns, rows), dtype=x.dtype, device=x.device)
    check_fresh(op, output)
    _run_transpose(op, x.view(torch.uint8), stride, output.view(torch.uint8))
    return output


def _run_transpose(op: str, x: Tensor, stride: int, y: Tensor) -> None:
    """Write ``y``, the transpose of the integers ``x`` with that row stride."""
    if not y.numel():
        return
    columns, rows = y.shape
    check_size(op, "rows", rows)
    check_size(op, "columns", columns)
    size = x.element_size()
    parts = math.gcd(rows, max(1, 4 // size))
    unit, unit_t = math.gcd(columns, stride, WIDEST_UNIT), math.gcd(rows // parts, WIDEST_UNIT)
    key = ("transpose", x.dtype, parts, unit, unit_t, x.device)
    plan = _PLANS.get(key)
    if plan is None:
        threads, tall, wide = _TURN(x.device, size)
        tall, wide = tall // max(size, parts), wide // size
        launch = _launch.Launch(
            _transpose,
            x.device,
            threads=threads,
            UNIT=unit,
            UNIT_T=unit_t,
            PARTS=parts,
            ROWS=tall,
            COLUMNS=wide,
        )
        plan = add_to_cache(_PLANS, key, _Plan(launch, tall, wide))
    tensors = (x, y.view(INTEGERS[size * parts]))
    numbers = (rows // parts // unit_t, columns // unit, stride // unit)
    plan.start(op, rows // parts, columns, tensors, numbers)


@repeating
def swap_first_dims(input: Tensor) -> Tensor:
    """``swap_first_dims`` of the contract."""
    op = "swap_first_dims"
    contracts.swap_first_dims.check(input)
    x = plain(op, "input", input)
    first, second, *rest = x.shape
    output = torch.empty((second, first, *rest), dtype=x.dtype, device=x.device)
    check_fresh(op, output)
    if not output.numel():
        return output
    size = x.element_size()
    inner = math.prod(rest)
    try:
        x = x.view(first, second, inner)
    except RuntimeError:  # the other dimensions cannot be viewed as one
        x = x.contiguous().view(first, second, inner)
    if x.stride(2) != 1 and inner > 1:
        x = x.contiguous()
    number = _as_numbers(x)
    if number is not None:
        _run_transpose(op, number, number.stride(0), output.view(second, -1).view(number.dtype))
        return output
    x = x.view(INTEGERS[size])
    check_size(op, "rows", first * second)
    check_size(op, "columns", inner)
    unit = math.gcd(inner, x.stride(0), x.stride(1), WIDEST_UNIT)
    key = (op, x.dtype, unit, min(inner, MOST_ELEMENTS), x.device)
    plan = _PLANS.get(key)
    if plan is None:
        threads, elements = _SWAP(x.device, size)
        columns = min(block_of(inner), elements)
        rows = rows_of_tile(elements, columns)
        launch = _launch.Launch(
            _swap_rows, x.device, threads=threads, UNIT=unit, ROWS=rows, COLUMNS=columns
        )
        plan = add_to_cache(_PLANS, key, _Plan(launch, rows, columns))
    numbers = (first * second, inner // unit, first, x.stride(0) // unit, x.stride(1) // unit)
    plan.start(op, first * second, inner, (x, output.view(INTEGERS[size])), numbers)
    return output


def _as_numbers(x: Tensor) -> Tensor | None:
    """``[a, b, n]`` as a matrix of integers of n elements each, if its memory allows that."""
    first, second, inner = x.shape
    dtype = INTEGERS.get(inner * x.element_size())
    strides = (x.stride(1), x.stride(0), x.storage_offset())
    if dtype is None or (x.stride(1) != inner and second > 1) or any(it % inner for it in strides):
        return None
    if address_of("swap_first_dims", x) % (inner * x.element_size()):
        return None
    matrix = x.as_strided((first, second * inner), (x.stride(0), 1))
    return matrix.view(dtype)


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    *,
    amax_compute_algo: str = "max",
    dtype: torch.dtype | None = None,
    margin: float = 0.0,
) -> None:
    """``fused_amax_and_scale_update_after_reduction`` of the contract."""
    op = "fused_amax_and_scale_update_after_reduction"
    contracts.fused_amax_and_scale_update_after_reduction.check(
        amax_reduction_buffer,
        amax_histories,
        scales,
        amax_compute_algo=amax_compute_algo,
        dtype=dtype,
        margin=margin,
    )
    check_numbers(op, margin)
    name = str(dtype or torch.float8_e4m3fn).removeprefix("torch.")
    numerator = LARGEST[name] * 2.0**-margin
    reduced = plain(op, "amax_reduction_buffer", amax_reduction_buffer).contiguous()
    histories = [in_place(op, f"amax_histories[{i}]", it) for i, it in enumerate(amax_histories)]
    factors = [in_place(op, f"scales[{i}]", it) for i, it in enumerate(scales)]
    buffers = parts_of(reduced, [it.shape[0] for it in factors])
    launches = []
    for buffer, history, scale in zip(buffers, histories, factors, strict=True):
        length, columns = history.shape
        check_size(op, "rows", length)
        check_size(op, "columns", columns)
        if not columns:
            continue
        rows = min(block_of(length), _UPDATE_TILE // _UPDATE_COLUMNS)
        launch = loaded_launch(
            _update,
            scale.device,
            _UPDATE_THREADS,
            -(-columns // _UPDATE_COLUMNS),
            (buffer, history, scale),
            (length, columns, *history.stride(), scale.stride(0), numerator),
            OF_ALL=amax_compute_algo == "max",
            ROWS=rows,
            COLUMNS=_UPDATE_COLUMNS,
        )
        launches.append(launch)
    for launch in launches:
        launch()
    torch.autograd.graph.increment_version((*histories, *factors))


@repeating
def fp8_block_scaling_compute_partial_amax(
    input: Tensor, h: int, w: int, start_offset: int, block_len: int = 128
) -> Tensor:
    """``fp8_block_scaling_compute_partial_amax`` of the contract."""
    op = "fp8_block_scaling_compute_partial_amax"
    contracts.fp8_block_scaling_compute_partial_amax.check(input, h, w, start_offset, block_len)
    check_numbers(op, h, w, start_offset, block_len)
    x = plain(op, "input", input).contiguous()
    amax = torch.empty(blocks_of(h, w, block_len), dtype=torch.float32, device=x.device)
    check_fresh(op, amax)
    _each_block(op, x, None, amax, "e4m3", h, w, start_offset, block_len)
    return amax


@repeating
def fp8_block_scaling_partial_cast(
    input: Tensor,
    scale: Tensor,
    h: int,
    w: int,
    start_offset: int,
    block_len: int = 128,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``fp8_block_scaling_partial_cast`` of the contract."""
    op = "fp8_block_scaling_partial_cast"
    contracts.fp8_block_scaling_partial_cast.check(
        input, scale, h, w, start_offset, block_len, dtype=dtype
    )
    check_numbers(op, h, w, start_offset, block_len)
    kind = dtype or torch.float8_e4m3fn
    x = plain(op, "input", input).contiguous()
    scale = plain(op, "scale", scale).contiguous()
    data = torch.empty(x.shape, dtype=kind, device=x.device)
    check_fresh(op, data)
    if x.numel():
        _each_block(
            op, x, scale, data.view(torch.uint8), KINDS[kind], h, w, start_offset, block_len
        )
    return data


def _each_block(
    op: str,
    x: Tensor,
    scale: Tensor | None,
    out: Tensor,
    kind: str,
    h: int,
    w: int,
    start: int,
    block_len: int,
) -> None:
    """Launch a program for each block of the matrix; ``x`` is a flat part of that matrix."""
    down, across = blocks_of(h, w, block_len)
    check_size(op, "blocks", down * across)
    check_size(op, "columns of a block", block_len)
    unit = math.gcd(w, start, x.numel(), block_len, WIDEST_UNIT)
    constants = {
        "LENGTH": block_len,
        "KIND": kind,
        **constants_of(x.device),
        "UNIT": unit,
        "ROWS": min(block_of(block_len), _SHARD_ROWS),
        "COLUMNS": min(block_of(block_len), _SHARD_COLUMNS),
    }
    numbers = (w // unit, start // unit, x.numel() // unit, across)
    tensors = (x, scale, out)
    launch = launch_for(_shard, x.device, _SHARD_THREADS, tensors, **constants)
    launch((down * across, 1), tensors, numbers)
