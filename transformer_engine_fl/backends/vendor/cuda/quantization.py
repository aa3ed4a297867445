"""Quantisation in CUDA C++: casts to every scaling format and back, and related operators.

The arithmetic follows the head of ``ops/quantization.py`` to the bit. The casts are in
``_casting``, which epilogues share; here are the operators, and the other kernels
(``quantization.cu``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
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
from transformer_engine_fl.backends.vendor.cuda import _casting, _launch
from transformer_engine_fl.backends.vendor.cuda._arguments import (
    NAMES,
    Plans,
    by_rows,
    check_fresh,
    check_numbers,
    check_size,
    fresh,
    in_place,
    is_plain,
    plain,
    pointer,
)
from transformer_engine_fl.backends.vendor.cuda._casting import (
    MOST,
    Source,
    amax_of_all,
    cast,
    cast_with_sums,
)
from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
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

THREADS: Final = 256
TURNED: Final = (256, 128)
"""Rows and columns of a tile of bytes that is transposed."""
VECTORS: Final = 2
"""Vectors of a thread, in kernels that count vectors across rows."""
MOST_VECTORS: Final = 2**32 - 2**20
WORDS: Final = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "uint2", 16: "uint4"}

_kernels: Plans[_launch.Kernel] = Plans()


# -------------------------------------------------------------------------------- kernels


def _source(kernel: str, **defines: str | int) -> Specialisation:
    return Specialisation("quantization", kernel, tuple(defines.items()))


def dequantize_source(
    format: str, data: torch.dtype, output: torch.dtype, vec: int, access: int, flat: bool
) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel that dequantises; ``access`` is in bytes of codes."""
    form = FORMATS[format]
    height, width = form.block or (1, 0)
    made = _source(
        "dequantize",
        KIND=KINDS[data],
        SCALES=SCALES[form.scale_dtype],
        WIDTH=width,
        HEIGHT=height,
        TY=NAMES[output],
        VEC=vec,
        ACCESS=access,
        FLAT=int(flat),
        VECS=VECTORS,
    )
    return made, _launch.Geometry(THREADS, "PPPPIIq")


def transpose_source(access: int, aligned: bool) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel that transposes bytes.

    Args:
        access: bytes of one access to the input.
        aligned: whether rows of the output begin at multiples of 16 bytes.
    """
    made = _source("transpose", ACCESS=access, ALIGNED=int(aligned))
    return made, _launch.Geometry(2 * TURNED[0], "PPqii")


def transpose_words_source(size: int) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel that transposes units of ``size`` bytes."""
    return _source("transpose_words", WORD=WORDS[size]), _launch.Geometry(THREADS, "PPqii")


def swap_source(size: int) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel that swaps the first two dimensions, in words of ``size`` bytes."""
    made = _source("swap_rows", WORD=WORDS[size], VECS=VECTORS)
    return made, _launch.Geometry(THREADS, "PPIIIqq")


def shard_source(
    dtype: torch.dtype, vec: int, kind: str, casts: bool
) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel that finds the amax of a block of a matrix in a shard, or casts it."""
    made = _source("shard", TX=NAMES[dtype], VEC=vec, KIND=kind, CASTS=int(casts))
    return made, _launch.Geometry(THREADS, "PPPPqqqiii")


def update_source(of_all: bool) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel that updates an amax history and its scale."""
    return _source("update", OF_ALL=int(of_all)), _launch.Geometry(THREADS, "PPPiqqqf")


def _kernel(
    make: Callable[..., tuple[Specialisation, _launch.Geometry]], device: int, *how: Any
) -> _launch.Kernel:
    key = (make, device, *how)
    return _kernels.get(key) or _kernels.get_or_create(
        key, lambda: _launch.load(*make(*how), device)
    )


def representative_sources(
    device: _launch.Limits,
) -> Iterator[tuple[Specialisation, _launch.Geometry]]:
    """A selection of the operators' kernels for a device: every kind, type and shape."""
    yield from _casting.representative_sources(device)
    low, full, half = torch.bfloat16, torch.float32, torch.float16
    for form in FORMATS.values():
        for name in form.dtypes:
            for output, vec in ((low, 8), (full, 4), (half, 2)):
                size = vec // form.values_per_byte
                code, flat = getattr(torch, name), output is low
                yield dequantize_source(form.name, code, output, vec, size, flat)
    for access in (1, 4, 16):
        yield transpose_source(access, access == 16)
    for size in WORDS:
        yield swap_source(size)
        if size in (2, 4, 8):
            yield transpose_words_source(size)
    for dtype, vec in ((low, 8), (full, 4), (half, 1)):
        for casts in (False, True):
            yield shard_source(dtype, vec, "e4m3", casts)
    for of_all in (False, True):
        yield update_source(of_all)


# ------------------------------------------------------------------------------ operators


def _of(op: str, input: Tensor) -> Source:
    """The source for a cast of the tensor itself."""
    x, stride = by_rows(plain(op, "input", input))
    return Source("identity", tuple(input.shape), x, stride)


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
    return cast(Recipe.of("quantize", **options), _of("quantize", input), scale)


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
    recipe = Recipe.of(op, **options)
    bias_grad, outputs = cast_with_sums(recipe, _of(op, input), input.dtype, scale)
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
    if _is_wrapped(input):  # before the check, which would slice it
        plain(op, "input", input)
    contracts.split_quantize.check(input, split_sections, scales, **options)
    check_numbers(op, *split_sections)
    parts = parts_of(plain(op, "input", input), split_sections)
    return _each(Recipe.of(op, **options), parts, scales)


def _is_wrapped(value: object) -> bool:
    return isinstance(value, Tensor) and not is_plain(value)


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
    return cast(Recipe.of(op, **options), _of(op, input), scale, group_sizes)


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
    return in_lists(
        [
            cast(recipe, _of(recipe.op, it), scales[place] if scales else None)
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
    packed = form.values_per_byte
    data, stride = by_rows(plain(op, "data", data))
    factors = plain(op, "scale_inv", scale_inv).contiguous()
    if global_scale_inv is not None:
        global_scale_inv = plain(op, "global_scale_inv", global_scale_inv)
    rows, across = matrix_shape(data.shape)
    dtype = out_dtype or torch.float32
    output = fresh(op, data, (*data.shape[:-1], across * packed), dtype)
    if not output.numel():
        return output
    height, width = form.block or (1, 1)
    flat = stride == across and height == 1 and across * packed % width == 0
    # As one row, all values are counted in 32 bits; row by row, only those of a row.
    if flat and rows * across * packed <= MOST_VECTORS:
        rows, across, stride = 1, rows * across, rows * across
    flat = rows == 1
    columns = across * packed
    vec = math.gcd(16 // dtype.itemsize, columns)
    access = math.gcd(vec // packed, data.data_ptr(), stride)
    check_size(op, "columns", columns, MOST_VECTORS)
    vectors = rows * (columns // vec)
    check_size(op, "vectors", vectors, MOST_VECTORS)
    how = (format, data.dtype, dtype, vec, access, flat)
    _kernel(dequantize_source, data.get_device(), *how).launch(
        -(-vectors // (THREADS * VECTORS)),
        1,
        *map(pointer, (data, factors, global_scale_inv, output)),
        vectors,
        columns // vec,
        stride,
    )
    return output


@repeating
def compute_amax(input: Tensor) -> Tensor:
    """``compute_amax`` of the contract."""
    op = "compute_amax"
    contracts.compute_amax.check(input)
    input = plain(op, "input", input)
    return amax_of_all(op, _of(op, input if input.dim() else input.view(1)))


@repeating
def fp8_transpose(data: Tensor) -> Tensor:
    """``fp8_transpose`` of the contract."""
    op = "fp8_transpose"
    contracts.fp8_transpose.check(data)
    x, stride = by_rows(plain(op, "data", data))
    rows, columns = matrix_shape(x.shape)
    output = fresh(op, x, (columns, rows))
    _run_transpose(op, x, stride, output, rows, columns, 1)
    return output


def _run_transpose(
    op: str, x: Tensor, stride: int, y: Tensor, rows: int, columns: int, size: int
) -> None:
    """Write the transpose of ``x``: elements of ``size`` bytes, rows ``stride`` elements apart."""
    if not rows * columns:
        return
    check_size(op, "rows", rows, MOST)
    check_size(op, "columns", columns, MOST)
    device = x.get_device()
    if size == 1:
        access = math.gcd(16, x.data_ptr(), stride)
        kernel = _kernel(transpose_source, device, access, rows % 16 == 0)
        high, wide = TURNED
    else:
        kernel = _kernel(transpose_words_source, device, size)
        high = wide = 64
    tiles = -(-rows // high) * -(-columns // wide)
    check_size(op, "tiles", tiles, MOST)
    kernel.launch(tiles, 1, x.data_ptr(), y.data_ptr(), stride, rows, columns)


@repeating
def swap_first_dims(input: Tensor) -> Tensor:
    """``swap_first_dims`` of the contract."""
    op = "swap_first_dims"
    contracts.swap_first_dims.check(input)
    x = plain(op, "input", input)
    first, second, *rest = x.shape
    output = fresh(op, x, (second, first, *rest))
    if not output.numel():
        return output
    inner = math.prod(rest)
    try:
        x = x.view(first, second, inner)
    except RuntimeError:  # the other dimensions cannot be viewed as one
        x = x.contiguous().view(first, second, inner)
    if x.stride(2) != 1 and inner > 1:
        x = x.contiguous()
    size = x.element_size()
    # Sizes in bytes; the stride of a dimension of size 1 does not matter.
    row = inner * size
    by_first = x.stride(0) * size if first > 1 else row
    by_second = x.stride(1) * size if second > 1 else row
    word = math.gcd(row, by_first, by_second, x.data_ptr(), 16)
    if row == word and row < 16 and by_second == row:
        _run_transpose(op, x, by_first // row, output, first, second, row)
        return output
    words = output.numel() * size // word
    check_size(op, "words", words, MOST_VECTORS)
    _kernel(swap_source, x.get_device(), word).launch(
        -(-words // (THREADS * VECTORS)),
        1,
        x.data_ptr(),
        output.data_ptr(),
        words,
        row // word,
        first,
        by_first // word,
        by_second // word,
    )
    return output


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
    of_all = amax_compute_algo == "max"
    for history in histories:  # before any is written
        check_size(op, "rows", history.shape[0], MOST)
    for buffer, history, scale in zip(buffers, histories, factors, strict=True):
        length, columns = history.shape
        if not columns:
            continue
        _kernel(update_source, history.get_device(), of_all).launch(
            columns,
            1,
            *map(pointer, (buffer, history, scale)),
            length,
            *history.stride(),
            scale.stride(0),
            numerator,
        )
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
    amax = fresh(op, x, blocks_of(h, w, block_len), torch.float32)
    _each_block(op, x, None, amax, None, "e4m3", h, w, start_offset, block_len)
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
        _each_block(op, x, scale, None, data, KINDS[kind], h, w, start_offset, block_len)
    return data


def _each_block(
    op: str,
    x: Tensor,
    scale: Tensor | None,
    amax: Tensor | None,
    data: Tensor | None,
    kind: str,
    h: int,
    w: int,
    start: int,
    length: int,
) -> None:
    """Launch a block of threads for each block of the matrix; ``x`` is a flat part of it."""
    down, across = blocks_of(h, w, length)
    check_size(op, "blocks", down * across, MOST)
    check_size(op, "columns of a block", length, MOST)
    size = x.element_size()
    vec = math.gcd(16 // size, w, start, x.numel(), length)
    vec = math.gcd(vec * size, x.data_ptr()) // size if x.numel() else vec
    how = (x.dtype, vec, kind, scale is not None)
    _kernel(shard_source, x.get_device(), *how).launch(
        down * across,
        1,
        *map(pointer, (x, scale, amax, data)),
        w // vec,
        start // vec,
        x.numel() // vec,
        across,
        length,
        length // vec,
    )
