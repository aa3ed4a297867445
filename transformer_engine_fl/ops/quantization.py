"""Quantisation to float8 and float4, with plain tensors for data and scales.

A quantised tensor consists of ``data`` and ``scale_inv``; their product gives the values, and
``scale`` is the inverse of ``scale_inv``. ``ops/_formats.py`` defines the scaling formats, with
the dtypes, blocks and shapes of each. The input ``[..., H]`` is treated as N rows.

The arithmetic is specified here to the bit, so that every implementation gives the same result.
All of it is float32, each operation rounded to nearest even, subnormal numbers kept.

**amax** is the largest magnitude, ignoring NaN; 0 if there are no other values.

**The scale of an amax.** With M the largest value of the data dtype (448 for float8_e4m3fn,
57344 for float8_e5m2) and ``a = max(amax, amax_epsilon)``: ``scale = M / a``; 1 where a is 0 or
infinite; the largest float32 where the quotient overflows. ``force_pow_2_scales`` rounds it
down to a power of two. ``scale_inv = 1 / scale``.

**mxfp8** (OCP Microscaling Formats Specification 1.0). ``scale_inv`` is 2**e with the least
e from -127 to 127 for which ``amax <= M * 2**e``, or 127 if there is none; it is stored as the
byte e + 127. ``scale`` is 2**-e. So no value is clamped; the specification's own rule rounds the
scale down, and so allows clamping.

**nvfp4**. Values are e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), two in a byte, the
first in the low half. The whole tensor has the scale S of its amax with M = 2688 (6 * 448), and
``global_scale_inv = 1 / S``. The ``scale_inv`` of a block is its ``amax * (S * c)`` cast to
float8_e4m3fn, with c the float32 nearest to 1 / 6, and its ``scale`` is
``1 / (scale_inv * global_scale_inv)``, at most the largest float32. A value is data times
``scale_inv`` times ``global_scale_inv``.

**The cast** multiplies by ``scale``, clamps to -M and M, infinities included, and rounds to
nearest even; zero keeps its sign. NaN becomes a NaN in float8 (which one is not specified), and 6
in e2m1, which has no NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.core.contract import Between, Sample, Tolerance, contract
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.ops import _checks as check
from transformer_engine_fl.ops._formats import FLOAT8, FORMATS, LARGEST, Format
from transformer_engine_fl.ops._rounding import (
    E2M1,
    LARGEST_FLOAT32,
    NARROW,
    float32,
    largest_of,
    microscaling_exponent,
    nearest,
    power_of_two,
    scale_of,
    single,
    unpacked,
)
from transformer_engine_fl.ops._samples import layouts, normal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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

DTYPES = ("float32", "bfloat16", "float16")

EXACT = Tolerance(rtol=0.0, atol=0.0)
EXACTLY = dict.fromkeys(DTYPES, EXACT)
# For the narrow dtypes: half a unit in the last place, plus the error of float32 arithmetic.
BIAS_TOLERANCE = {
    "float32": Tolerance(rtol=1e-5, atol=1e-5),
    "bfloat16": Tolerance(rtol=2**-8 + 2**-15, atol=2**-14),
    "float16": Tolerance(rtol=2**-11 + 2**-16, atol=2**-12),
}

GLOBAL_LARGEST = 6.0 * 448.0


def parts_of(input: Tensor, split_sections: Sequence[int]) -> Sequence[Tensor]:
    """The parts of a tensor along its first dimension."""
    import torch

    return torch.split(input, list(split_sections))


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """``[..., H]`` as N rows of H columns."""
    return math.prod(shape[:-1]), shape[-1]


# ------------------------------------------------------------------------------ checks


def check_options(
    op: str,
    format: Any,
    dtype: Any,
    columnwise: Any,
    force_pow_2_scales: Any,
    amax_epsilon: Any,
) -> Format:
    """Check the options that say how to quantise."""
    check.is_choice(op, "format", format, tuple(FORMATS))
    form = FORMATS[format]
    check.is_dtype(op, "dtype", dtype, dtypes=form.dtypes)
    check.is_flag(op, "columnwise", columnwise)
    check.is_flag(op, "force_pow_2_scales", force_pow_2_scales)
    check.is_number(op, "amax_epsilon", amax_epsilon, at_least=0, at_most=LARGEST_FLOAT32)
    if form.scale_dtype != "float32":
        for name, value in (
            ("force_pow_2_scales", force_pow_2_scales),
            ("amax_epsilon", amax_epsilon),
        ):
            if value:
                expected = f"its default: the scales of {format} are not float32"
                raise ArgumentError(op, name, check.describe(value), expected)
    return form


def _check_input(op: str, name: str, value: Any, form: Format, columnwise: bool) -> Tensor:
    """Check a tensor that is quantised."""
    tensor = check.is_tensor(op, name, value, dtypes=DTYPES, min_ndim=1)
    check_shape(op, name, tensor, tensor.shape, form, columnwise)
    return tensor


def check_shape(
    op: str, name: str, value: Tensor, shape: Sequence[int], form: Format, columnwise: bool
) -> None:
    """Check the shape of a quantised tensor that is computed from the argument ``value``."""
    rows, columns = matrix_shape(shape)
    together = form.values_per_byte
    if columns % together or (columnwise and rows % together):
        which = "rows and columns" if columnwise else "columns"
        expected = f"a multiple of {together} {which}, which share a byte in {form.name}"
        raise ArgumentError(op, name, check.describe(value), expected)


def check_scale(op: str, name: str, value: Any, form: Format, count: int = 1) -> None:
    """Check a scale that is given, or None."""
    if value is None:
        return
    if not form.by_tensor:
        expected = f"None: the scales of {form.name} are computed for each block"
        raise ArgumentError(op, name, check.describe(value), expected)
    tensor = check.is_tensor(op, name, value, dtypes=("float32",))
    check.has_shape(op, name, tensor, (count,), "one scale for all values that share it")


def _check_quantize(op: str, input: Any, scale: Any, **options: Any) -> None:
    form = check_options(op, **options)
    tensor = _check_input(op, "input", input, form, options["columnwise"])
    check_scale(op, "scale", scale, form)
    check.same_device(op, "input", {"input": tensor, "scale": scale})


def _check_scales(op: str, scales: Any, count: int, anchor: Tensor, form: Format) -> None:
    """Check the list of scales beside ``count`` tensors on the anchor's device, or None."""
    if scales is None:
        return
    check.is_list(op, "scales", scales, length=count, why="one for each tensor that is quantised")
    check.are_tensors(op, "scales", scales, dtypes=("float32",))
    for place, scale in enumerate(scales):
        name = f"scales[{place}]"
        check_scale(op, name, scale, form)
        check.same_device(op, "the data", {"the data": anchor, name: scale})


def _check_split_quantize(
    op: str, input: Any, split_sections: Any, scales: Any, **options: Any
) -> None:
    form = check_options(op, **options)
    tensor = check.is_tensor(op, "input", input, dtypes=DTYPES, min_ndim=2)
    expected = f"integers of at least 0 whose sum is {tensor.shape[0]}, the first size of 'input'"
    check.is_list(op, "split_sections", split_sections)
    for place, section in enumerate(split_sections):
        check.is_integer(op, f"split_sections[{place}]", section)
        part = tensor[:section]
        _check_input(op, f"section {place} of 'input'", part, form, options["columnwise"])
    if sum(split_sections) != tensor.shape[0]:
        raise ArgumentError(op, "split_sections", check.describe(split_sections), expected)
    _check_scales(op, scales, len(split_sections), tensor, form)


def _check_group_quantize(
    op: str, input: Any, group_sizes: Any, scale: Any, **options: Any
) -> None:
    form = check_options(op, **options)
    tensor = check.is_tensor(op, "input", input, dtypes=DTYPES, min_ndim=2)
    _check_input(op, "input", tensor, form, options["columnwise"])
    sizes = check.is_tensor(op, "group_sizes", group_sizes, dtypes=("int64", "int32"))
    if sizes.ndim != 1 or not sizes.shape[0]:
        expected = "one dimension, of at least one group"
        raise ArgumentError(op, "group_sizes", check.describe(sizes), expected)
    check_scale(op, "scale", scale, form, sizes.shape[0])
    given = {"input": tensor, "group_sizes": sizes, "scale": scale}
    check.same_device(op, "input", given)


def _check_multi_tensor_quantize(op: str, inputs: Any, scales: Any, **options: Any) -> None:
    form = check_options(op, **options)
    check.is_list(op, "inputs", inputs)
    check.are_tensors(op, "inputs", inputs, dtypes=DTYPES)
    first = check.dtype_name(inputs[0].dtype)
    for place, value in enumerate(inputs):
        name = f"inputs[{place}]"
        check.is_tensor(op, name, value, dtypes=(first,))
        _check_input(op, name, value, form, options["columnwise"])
    _check_scales(op, scales, len(inputs), inputs[0], form)


def _check_dequantize(
    op: str, data: Any, scale_inv: Any, global_scale_inv: Any, format: Any, out_dtype: Any
) -> None:
    check.is_choice(op, "format", format, tuple(FORMATS))
    form = FORMATS[format]
    tensor = check.is_tensor(op, "data", data, dtypes=form.dtypes, min_ndim=1)
    rows, columns = matrix_shape(tensor.shape)
    shape = form.scale_shape(rows, columns * form.values_per_byte)
    scales = check.is_tensor(op, "scale_inv", scale_inv, dtypes=(form.scale_dtype,))
    check.has_shape(op, "scale_inv", scales, shape, f"the blocks of 'data' in {format}")
    if form.global_scale:
        factor = check.is_tensor(op, "global_scale_inv", global_scale_inv, dtypes=("float32",))
        check.has_shape(op, "global_scale_inv", factor, (1,), "one for the whole tensor")
    elif global_scale_inv is not None:
        found = check.describe(global_scale_inv)
        raise ArgumentError(op, "global_scale_inv", found, f"None: {format} has no such factor")
    check.is_dtype(op, "out_dtype", out_dtype, dtypes=DTYPES)
    given = {"data": tensor, "scale_inv": scales, "global_scale_inv": global_scale_inv}
    check.same_device(op, "data", given)


def _check_compute_amax(op: str, input: Any) -> None:
    check.is_tensor(op, "input", input, dtypes=DTYPES)


BYTES = ("uint8", *FLOAT8, "float8_e8m0fnu")


def _check_fp8_transpose(op: str, data: Any) -> None:
    check.is_tensor(op, "data", data, dtypes=BYTES, min_ndim=1)


def _check_swap_first_dims(op: str, input: Any) -> None:
    check.is_tensor(op, "input", input, dtypes=(*DTYPES, *BYTES), min_ndim=2)


def _check_update(
    op: str,
    amax_reduction_buffer: Any,
    amax_histories: Any,
    scales: Any,
    amax_compute_algo: Any,
    dtype: Any,
    margin: Any,
) -> None:
    buffer = check.is_tensor(
        op, "amax_reduction_buffer", amax_reduction_buffer, dtypes=("float32",)
    )
    check.are_tensors(op, "amax_histories", amax_histories, dtypes=("float32",))
    check.are_tensors(op, "scales", scales, dtypes=("float32",))
    count = len(amax_histories)
    check.is_list(op, "scales", scales, length=count, why="one for each of 'amax_histories'")
    total = 0
    for place, (history, scale) in enumerate(zip(amax_histories, scales, strict=True)):
        name = f"amax_histories[{place}]"
        if history.ndim != 2 or not history.shape[0]:
            expected = "[length, n], of a length of at least 1"
            raise ArgumentError(op, name, check.describe(history), expected)
        total += history.shape[1]
        other = f"scales[{place}]"
        check.has_shape(op, other, scale, history.shape[1:], f"a scale per column of {name!r}")
        check.is_writable(op, name, history)
        check.is_writable(op, other, scale)
        anchor = "amax_reduction_buffer"
        check.same_device(op, anchor, {anchor: buffer, name: history, other: scale})
    check.has_shape(op, "amax_reduction_buffer", buffer, (total,), "an amax for each scale")
    check.is_choice(op, "amax_compute_algo", amax_compute_algo, ("max", "most_recent"))
    check.is_dtype(op, "dtype", dtype, dtypes=FLOAT8)
    check.is_number(op, "margin", margin, at_least=-100, at_most=100)


def _check_shard(op: str, input: Any, h: Any, w: Any, start_offset: Any, block_len: Any) -> None:
    """Check a flat part of a matrix."""
    tensor = check.is_tensor(op, "input", input, dtypes=DTYPES)
    if tensor.ndim != 1:
        raise ArgumentError(op, "input", check.describe(tensor), "one dimension: a flat part")
    for name, value in (("h", h), ("w", w), ("block_len", block_len)):
        check.is_integer(op, name, value, at_least=1)
    check.is_integer(op, "start_offset", start_offset)
    if start_offset + tensor.shape[0] > h * w:
        expected = f"an offset from which 'input' lies within the {h} x {w} matrix"
        raise ArgumentError(op, "start_offset", check.describe(start_offset), expected)


def _check_partial_cast(
    op: str, input: Any, scale: Any, h: Any, w: Any, start_offset: Any, block_len: Any, dtype: Any
) -> None:
    _check_shard(op, input, h, w, start_offset, block_len)
    scales = check.is_tensor(op, "scale", scale, dtypes=("float32",))
    check.has_shape(op, "scale", scales, blocks_of(h, w, block_len), "a scale for each block")
    check.is_dtype(op, "dtype", dtype, dtypes=FLOAT8)
    check.same_device(op, "input", {"input": input, "scale": scales})


def blocks_of(h: int, w: int, block_len: int) -> tuple[int, int]:
    """How many blocks a matrix has."""
    return -(-h // block_len), -(-w // block_len)


# ----------------------------------------------------------------------------- oracles
#


def _packed(value: Tensor) -> Tensor:
    """Values of e2m1, as float64, two in a byte."""
    import torch

    size = value.abs().nan_to_num(6.0).contiguous()
    code = torch.searchsorted(value.new_tensor(E2M1), size)
    code = code + 8 * (value.signbit() & ~value.isnan())
    return (code[:, ::2] + 16 * code[:, 1::2]).double()


def _quantized(
    x: Tensor,
    group: Tensor,
    groups: int,
    scale: Tensor | None,
    form: Format,
    dtype: str,
    epsilon: float,
    power_of_2: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(data, scale_inv, amax, global_scale_inv) of a float64 matrix.

    Args:
        group: the group of each element; a group has its own scale where a tensor would have one.
    """
    import torch

    magnitude = x.abs().nan_to_num(0.0, posinf=torch.inf)
    whole = largest_of(magnitude, group, groups)
    down, across = form.grid(*x.shape)
    if form.block is None:
        s = scale_of(whole, LARGEST[dtype], epsilon, power_of_2)
        s = s if scale is None else scale.double()
        data = nearest(float32(x * s[group]), dtype)
        return data, float32(1 / s), whole, None
    row = torch.arange(x.shape[0], device=x.device)[:, None] // form.block[0]
    column = torch.arange(x.shape[1], device=x.device) // form.block[1]
    block = row * across + column
    amax = largest_of(magnitude, block, down * across)
    if form.scale_dtype == "float32":
        s = scale_of(amax, LARGEST[dtype], epsilon, power_of_2)
        data = nearest(float32(x * s[block]), dtype)
        return data, float32(1 / s).view(down, across), None, None
    if form.scale_dtype == "float8_e8m0fnu":
        e = microscaling_exponent(amax, LARGEST[dtype])
        data = nearest(float32(x * power_of_two(-e)[block]), dtype)
        return data, power_of_two(e).view(down, across), None, None
    s = scale.double() if scale is not None else scale_of(whole, GLOBAL_LARGEST)
    global_inv = float32(1 / s)
    owner = group[:: form.block[0], :: form.block[1]].flatten()
    sixth = float32(s.new_tensor(1 / 6))
    inverse = nearest(float32(amax * float32(s * sixth)[owner]), "float8_e4m3fn")
    factor = float32(1 / float32(inverse * global_inv[owner]))
    factor = factor.clamp_max(LARGEST_FLOAT32)
    data = _packed(nearest(float32(x * factor[block]), dtype))
    return data, inverse.view(down, across), whole, global_inv


def _quantize_oracle(
    input: Tensor,
    scale: Tensor | None = None,
    *,
    format: str = "per_tensor",
    dtype: torch.dtype | None = None,
    columnwise: bool = False,
    force_pow_2_scales: bool = False,
    amax_epsilon: float = 0.0,
    group_sizes: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    import torch

    form = FORMATS[format]
    kind = form.dtypes[0] if dtype is None else check.dtype_name(dtype)
    rows, columns = matrix_shape(input.shape)
    x = input.double().reshape(rows, columns)
    group = torch.zeros((rows, 1), dtype=torch.int64, device=input.device)
    groups = 1
    if group_sizes is not None:
        groups = group_sizes.shape[0]
        sizes = [size * math.prod(input.shape[1:-1]) for size in group_sizes.tolist()]
        owners = [owner for owner, size in enumerate(sizes) for _ in range(size)]
        owners += [groups - 1] * (rows - len(owners))
        group = torch.tensor(owners, dtype=torch.int64, device=input.device)[:, None]
        x = x.clone()
        x[sum(sizes) :] = 0.0
    group = group.expand(rows, columns)
    how = (groups, scale, form, kind, amax_epsilon, force_pow_2_scales)
    data, scale_inv, amax, global_inv = _quantized(x, group, *how)
    data = data.view(*input.shape[:-1], columns // form.values_per_byte)
    turned = _quantized(x.t(), group.t(), *how)[:2] if columnwise else (None, None)
    return data, scale_inv, amax, global_inv, *turned


def _bgrad_quantize_oracle(
    input: Tensor, scale: Tensor | None = None, **options: Any
) -> tuple[Any, ...]:
    outputs = _quantize_oracle(input, scale, **options)
    rows, columns = matrix_shape(input.shape)
    bias_grad = input.double().reshape(rows, columns).sum(0)
    return bias_grad, *(it if it is None else Between(it, it) for it in outputs)


def _lists_oracle(
    inputs: Sequence[Tensor], scales: Sequence[Tensor] | None, options: dict[str, Any]
) -> tuple[list[Tensor], ...]:
    each = [
        _quantize_oracle(it, scales[place] if scales else None, **options)
        for place, it in enumerate(inputs)
    ]
    return tuple([it for it in outputs if it is not None] for outputs in zip(*each, strict=True))


def _split_quantize_oracle(
    input: Tensor,
    split_sections: Sequence[int],
    scales: list[Tensor] | None = None,
    **options: Any,
) -> tuple[list[Tensor], ...]:
    return _lists_oracle(parts_of(input, split_sections), scales, options)


def _group_quantize_oracle(
    input: Tensor, group_sizes: Tensor, scale: Tensor | None = None, **options: Any
) -> tuple[Tensor | None, ...]:
    return _quantize_oracle(input, scale, group_sizes=group_sizes, **options)


def _multi_tensor_quantize_oracle(
    inputs: list[Tensor], scales: list[Tensor] | None = None, **options: Any
) -> tuple[list[Tensor], ...]:
    return _lists_oracle(inputs, scales, options)


def _dequantize_oracle(
    data: Tensor,
    scale_inv: Tensor,
    global_scale_inv: Tensor | None = None,
    *,
    format: str = "per_tensor",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    import torch

    form = FORMATS[format]
    value = unpacked(data) if form.values_per_byte == 2 else data.double()
    rows, columns = matrix_shape(value.shape)
    factor = scale_inv.double()
    if form.block is not None:
        row = torch.arange(rows, device=data.device)[:, None] // form.block[0]
        column = torch.arange(columns, device=data.device) // form.block[1]
        factor = factor[row, column]
    value = value.reshape(rows, columns) * factor
    if global_scale_inv is not None:
        value = value * global_scale_inv.double()
    return value.float().to(out_dtype or torch.float32).double().view(*data.shape[:-1], columns)


def _amax_oracle(input: Tensor) -> Tensor:
    import torch

    magnitude = input.double().abs().nan_to_num(0.0, posinf=torch.inf)
    return largest_of(magnitude, torch.zeros_like(magnitude, dtype=torch.int64), 1)


def _transpose_oracle(data: Tensor) -> Tensor:
    rows, columns = matrix_shape(data.shape)
    return data.double().reshape(rows, columns).t()


def _swap_oracle(input: Tensor) -> Tensor:
    return input.double().transpose(0, 1)


def _update_oracle(
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    *,
    amax_compute_algo: str = "max",
    dtype: torch.dtype | None = None,
    margin: float = 0.0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Computes with Python numbers, one scale after another."""
    kind = "float8_e4m3fn" if dtype is None else check.dtype_name(dtype)
    largest = single(LARGEST[kind] * 2.0**-margin)
    reduced = iter(amax_reduction_buffer.tolist())
    new_histories, new_scales = [], []
    for history, scale in zip(amax_histories, scales, strict=True):
        columns = history.t().tolist()
        factors = scale.tolist()
        for place, column in enumerate(columns):
            amax = next(reduced)
            newest = column[0] if amax == 0 else amax
            rolled = [*column[1:], newest]
            used = newest
            if amax_compute_algo == "max":
                used = max((it for it in rolled if not math.isnan(it)), default=math.nan)
            if math.isfinite(used) and used > 0:
                quotient = largest / used
                factors[place] = single(quotient) if quotient < LARGEST_FLOAT32 else LARGEST_FLOAT32
            columns[place] = [0.0, *rolled[1:]]
        new_histories.append(history.new_tensor(columns).double().t().reshape(history.shape))
        new_scales.append(scale.new_tensor(factors).double())
    return new_histories, new_scales


def _places(count: int, w: int, start_offset: int, block_len: int) -> Iterator[tuple[int, int]]:
    """The block of each element of a flat part of a matrix."""
    for place in range(start_offset, start_offset + count):
        yield place // w // block_len, place % w // block_len


def _partial_amax_oracle(
    input: Tensor, h: int, w: int, start_offset: int, block_len: int = 128
) -> Tensor:
    import torch

    down, across = blocks_of(h, w, block_len)
    amax = [[0.0] * across for _ in range(down)]
    values = input.double().tolist()
    for value, (i, j) in zip(values, _places(len(values), w, start_offset, block_len), strict=True):
        if abs(value) > amax[i][j]:  # false for NaN
            amax[i][j] = abs(value)
    return torch.tensor(amax, dtype=torch.float64, device=input.device)


def _partial_cast_oracle(
    input: Tensor,
    scale: Tensor,
    h: int,
    w: int,
    start_offset: int,
    block_len: int = 128,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    kind = FLOAT8[0] if dtype is None else check.dtype_name(dtype)
    scales = scale.double().tolist()
    factors = [scales[i][j] for i, j in _places(input.numel(), w, start_offset, block_len)]
    return nearest(float32(input.double() * scale.new_tensor(factors).double()), kind)


# ----------------------------------------------------------------------------- samples

_SHAPES: dict[str, tuple[int, ...]] = {
    "typical": (16, 256),
    "three dimensions": (2, 4, 96),
    "one dimension": (48,),
    "one row": (1, 640),
    "blocks cut off": (138, 204),
    "odd width": (5, 129),
    "two columns": (34, 2),
    "no rows": (0, 64),
    "no columns": (4, 0),
    "no columns of many rows": (128, 0),
}


def _two(shape: Sequence[int]) -> bool:
    rows, columns = matrix_shape(shape)
    return rows % 2 == 0 and columns % 2 == 0


def _ties(dtype: torch.dtype, device: str) -> Tensor:
    """Midpoints between two values of a data dtype, and their neighbours, in blocks of amax M."""
    import torch

    rows: list[list[float]] = [[-0.0] * 16]
    for name, (mantissa, least) in NARROW.items():
        codes = [k + 0.5 for k in range(2**mantissa)]
        ties = [it * 2.0 ** (least - mantissa) for it in codes]
        ties += [(1 + it * 2.0**-mantissa) * 2.0**e for it in codes for e in (least, 0, 1)]
        ties = [sign * it for it in ties for sign in (1, -1)]
        values = ties + [it * (1 + side * 2.0**-6) for it in ties for side in (-1, 1)]
        parts = [values[start : start + 15] for start in range(0, len(values), 15)]
        rows += [[LARGEST[name], *part, *[0.0] * (15 - len(part))] for part in parts]
    rows += rows[-1:] * (len(rows) % 2)
    return torch.tensor(rows, dtype=torch.float64).to(device, dtype)


def _amaxes(dtype: torch.dtype, device: str) -> Tensor:
    """Rows whose amax is below, at or above a power of two times M."""
    import torch

    generator = torch.Generator().manual_seed(60)
    values = torch.rand((24, 128), generator=generator, dtype=torch.float64) * 2 - 1
    largest = [M * 2.0**e for M in (448.0, 57344.0, 6.0) for e in (-9, 0)]
    for row, m in enumerate(largest):
        for place, factor in enumerate((1 - 2.0**-8, 1.0, 1 + 2.0**-7, 4 / 3)):
            values[4 * row + place] *= m * factor
            values[4 * row + place, 7] = m * factor
    return values.to(device, dtype)


def _special(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Tensor]]:
    import torch

    info = torch.finfo(dtype)
    usual = normal((10, 136), torch.float64, "cpu", seed=61)
    zeros = usual.clone()
    zeros[2:] = 0.0
    zeros[3, 4] = -0.0
    missing = usual.clone()
    missing[::3, ::5] = torch.nan
    missing[4] = torch.nan
    infinite = usual.clone()
    infinite[1, 3], infinite[5, 100] = torch.inf, -torch.inf
    yield "zeros", torch.zeros((6, 32), dtype=dtype, device=device)
    for label, values in (
        ("blocks of zeros", zeros),
        ("missing values", missing),
        ("infinite values", infinite),
        ("large values", usual.clamp(-2, 2) / 2 * info.max),
        ("small values", usual * info.tiny * 16),
        ("subnormal values", usual.clamp(-2, 2) * info.smallest_normal / 4),
        ("values of many magnitudes", usual * torch.exp2(usual.flip(0) * 6)),
    ):
        yield label, values.to(device, dtype)
    yield "ties", _ties(dtype, device)
    yield "amax around a power of two", _amaxes(dtype, device)


def _inputs(dtype: str, device: str) -> Iterator[tuple[str, Tensor]]:
    import torch

    yield from layouts(_SHAPES, 16, 72, dtype, device)
    yield from _special(getattr(torch, dtype), device)


def _factor(value: float, device: str) -> Tensor:
    import torch

    return torch.tensor([value], device=device)


def option_samples(input: Tensor, form: Format) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each option with a value other than its default, some together with ``columnwise``."""
    import torch

    columnwise = {"columnwise": True}
    yield "columnwise", columnwise
    if len(form.dtypes) > 1:
        yield "e5m2", {"dtype": torch.float8_e5m2}
        yield "e5m2, columnwise", {"dtype": torch.float8_e5m2, **columnwise}
    if form.scale_dtype == "float32":
        yield "powers of two", {"force_pow_2_scales": True, **columnwise}
        yield "epsilon", {"amax_epsilon": 3.6}
    if form.by_tensor:
        for value in (1.0, 37.25, 1e-3):
            yield f"scale {value}", {"scale": _factor(value, str(input.device)), **columnwise}


def _quantize_samples(dtype: str, device: str) -> Iterator[Sample]:
    for form in FORMATS.values():
        plain = {} if form.name == "per_tensor" else {"format": form.name}
        for label, input in _inputs(dtype, device):
            if form.values_per_byte == 2 and not _two(input.shape):
                continue
            name = f"{label}, {form.name}"
            yield Sample(name, (input,), plain)
            with_options = ("typical", "blocks cut off", "ties", "missing values", "no rows")
            if label in with_options:
                for option, given in option_samples(input, form):
                    yield Sample(f"{name}, {option}", (input,), {**plain, **given})
            elif label in (
                *("transposed", "three dimensions", "infinite values", "zeros"),
                "no columns of many rows",
            ):
                yield Sample(f"{name}, columnwise", (input,), {**plain, "columnwise": True})


_FEW = ("typical", "three dimensions", "one dimension", "no rows", "transposed", "missing values")


def _bgrad_quantize_samples(dtype: str, device: str) -> Iterator[Sample]:
    for sample in _quantize_samples(dtype, device):
        if sample.label.split(",")[0] in _FEW:
            yield sample


def _split_quantize_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    typical = normal((40, 160), kind, device, seed=62)
    for form in FORMATS.values():
        plain = {} if form.name == "per_tensor" else {"format": form.name}
        for label, input, sections in (
            ("typical", typical, [16, 24]),
            ("an empty section", typical, [16, 0, 24]),
            ("one section", typical, [40]),
            ("three dimensions", typical.view(10, 4, 160), [3, 7]),
            ("transposed", typical.t(), [100, 60]),
            ("no rows", typical[:0], [0, 0]),
        ):
            yield Sample(f"{label}, {form.name}", (input, sections), plain)
        for option, given in option_samples(typical, form):
            given = dict(given)
            scale = given.pop("scale", None)
            if scale is not None:
                given["scales"] = [scale, scale * 3]
            yield Sample(f"typical, {form.name}, {option}", (typical, [16, 24]), {**plain, **given})


def _group_quantize_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    typical = normal((40, 160), kind, device, seed=63)
    typical[30:] *= 8
    for form in FORMATS.values():
        plain = {} if form.name == "per_tensor" else {"format": form.name}
        for label, input, sizes in (
            ("typical", typical, [16, 24]),
            ("empty groups", typical, [0, 16, 0, 24, 0]),
            ("one group", typical, [40]),
            ("rows of no group", typical, [10, 9]),
            ("nothing in a group", typical, [0, 0]),
            ("three dimensions", typical.view(10, 4, 160), [3, 7]),
            ("transposed", typical.t(), [100, 60]),
            ("no rows", typical[:0], [0, 0]),
        ):
            for integers in (torch.int64, torch.int32):
                groups = torch.tensor(sizes, dtype=integers, device=device)
                name = f"{label}, {form.name}, {check.dtype_name(integers)}"
                if integers == torch.int64 or label == "typical":
                    yield Sample(name, (input, groups), plain)
                    yield Sample(
                        f"{name}, columnwise", (input, groups), {**plain, "columnwise": True}
                    )
        groups = torch.tensor([16, 13, 8], device=device)
        for option, given in option_samples(typical, form):
            given = dict(given)
            if "scale" in given:
                given["scale"] = given["scale"] * torch.tensor([1.0, 3.0, 0.2], device=device)
            yield Sample(f"typical, {form.name}, {option}", (typical, groups), {**plain, **given})


def _multi_tensor_quantize_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    tensors = [
        normal(shape, kind, device, seed=sum(shape) + 64)
        for shape in ((16, 160), (4, 2, 34), (0, 64), (128,))
    ]
    strided = normal((96, 12), kind, device, seed=65).t()
    for form in FORMATS.values():
        plain = {} if form.name == "per_tensor" else {"format": form.name}
        yield Sample(f"typical, {form.name}", ([tensors[0], tensors[1]],), plain)
        yield Sample(f"one tensor, {form.name}", ([tensors[0]],), plain)
        even = [it for it in tensors if form.values_per_byte == 1 or _two(it.shape)]
        yield Sample(f"several, {form.name}", ([*even, strided],), plain)
        for option, given in option_samples(tensors[0], form):
            given = dict(given)
            scale = given.pop("scale", None)
            if scale is not None:
                given["scales"] = [scale, scale * 3]
            yield Sample(f"two, {form.name}, {option}", (tensors[:2],), {**plain, **given})


def _codes(shape: tuple[int, ...], dtype: str, device: str, seed: int) -> Tensor:
    """Random bit patterns of a one-byte dtype."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return codes.view(getattr(torch, dtype)).to(device)


def _scales_for(shape: tuple[int, ...], form: Format, device: str) -> Tensor:
    import torch

    generator = torch.Generator().manual_seed(67)
    if form.scale_dtype == "float8_e8m0fnu":
        codes = torch.randint(97, 157, shape, generator=generator, dtype=torch.uint8)
        codes.view(-1)[:2] = torch.tensor([0, 247], dtype=torch.uint8)[: codes.numel()]
        return codes.view(torch.float8_e8m0fnu).to(device)
    scales = torch.rand(shape, generator=generator) * 3 + 0.1
    return scales.to(device, getattr(torch, form.scale_dtype))


def _dequantize_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    def call(label: str, form: Format, data: Tensor, **options: Any) -> Sample:
        rows, columns = matrix_shape(data.shape)
        shape = form.scale_shape(rows, columns * form.values_per_byte)
        tensors = [data, _scales_for(shape, form, device)]
        if form.global_scale:
            tensors.append(_factor(0.0371, device))
        given = {} if form.name == "per_tensor" else {"format": form.name}
        return Sample(f"{label}, {form.name}", tuple(tensors), {**given, **options})

    for form in FORMATS.values():
        if dtype not in form.dtypes:
            continue
        for label, shape in _SHAPES.items():
            yield call(label, form, _codes(shape, dtype, device, seed=68))
            if label == "typical":
                data = _codes(shape, dtype, device, seed=69)
                for name in DTYPES:
                    kind = getattr(torch, name)
                    yield call(f"to {name}", form, data, out_dtype=kind)
        for label, data in _byte_layouts(dtype, device):
            yield call(label, form, data)


def _byte_layouts(dtype: str, device: str) -> Iterator[tuple[str, Tensor]]:
    yield "transposed", _codes((40, 16), dtype, device, seed=70).t()
    yield "strided columns", _codes((8, 144), dtype, device, seed=71)[:, ::2]
    yield "padded rows", _codes((8, 80), dtype, device, seed=72)[:, :72]
    yield "unaligned start", _codes((8 * 24 + 1,), dtype, device, seed=73)[1:].view(8, 24)
    yield "expanded", _codes((1, 72), dtype, device, seed=74).expand(6, 72)


def _amax_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    for label, input in _inputs(dtype, device):
        yield Sample(label, (input,))
    kind: torch.dtype = getattr(torch, dtype)
    yield Sample("no dimensions", (torch.tensor(-2.5, device=device, dtype=kind),))
    nothing = torch.full((3, 4), torch.nan, device=device, dtype=kind)
    yield Sample("nothing but missing values", (nothing,))


def _transpose_samples(dtype: str, device: str) -> Iterator[Sample]:
    for label, shape in _SHAPES.items():
        yield Sample(label, (_codes(shape, dtype, device, seed=75),))
    for label, data in _byte_layouts(dtype, device):
        yield Sample(label, (data,))


def _swap_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    def values(*shape: int) -> Tensor:
        if dtype in BYTES:
            return _codes(shape, dtype, device, seed=76)
        return normal(shape, getattr(torch, dtype), device, seed=77)

    yield Sample("typical", (values(6, 16, 32),))
    yield Sample("two dimensions", (values(5, 7),))
    yield Sample("four dimensions", (values(3, 2, 4, 5),))
    yield Sample("one of the first", (values(1, 9, 8),))
    yield Sample("wide", (values(3, 5, 1031),))
    yield Sample("nothing", (values(0, 4, 8),))
    yield Sample("no columns", (values(3, 4, 0),))
    yield Sample("already swapped", (values(4, 6, 8).transpose(0, 1),))
    yield Sample("strided columns", (values(4, 6, 16)[..., ::2],))
    yield Sample("unaligned start", (values(4 * 6 * 8 + 1)[1:].view(4, 6, 8),))
    yield Sample("expanded", (values(1, 6, 8).expand(4, 6, 8),))


def _update_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    def call(lengths: Sequence[int], columns: Sequence[int]) -> tuple[Any, ...]:
        shapes = list(zip(lengths, columns, strict=True))
        histories = [
            normal(shape, torch.float32, device, seed=80 + place).abs()
            for place, shape in enumerate(shapes)
        ]
        scales = [
            normal((count,), torch.float32, device, seed=90 + place).abs() + 0.5
            for place, count in enumerate(columns)
        ]
        buffer = normal((sum(columns),), torch.float32, device, seed=95).abs() * 3
        return buffer, histories, scales

    typical = call((16, 16), (3, 5))
    yield Sample("typical", typical)
    for name, options in (
        ("most recent", {"amax_compute_algo": "most_recent"}),
        ("e5m2", {"dtype": torch.float8_e5m2}),
        ("a margin", {"margin": 2}),
        ("a broken margin", {"margin": 0.7}),
        ("a negative margin", {"margin": -1.0}),
    ):
        yield Sample(name, call((16, 16), (3, 5)), dict(options))
    yield Sample("one tensor", call((4,), (6,)))
    yield Sample("a history of one", call((1, 1), (3, 2)))
    yield Sample("lengths that differ", call((2, 1, 300), (1, 4, 2)))
    yield Sample("no columns", call((4, 4), (0, 3)))
    special = [0.0, torch.inf, torch.nan, 1e-45, 1e38, 3e-38, 0.0, 5.0]
    for algorithm in ("max", "most_recent"):
        _, histories, scales = call((4,), (8,))
        histories[0][1:, 3] = 0.0
        histories[0][:, 5:7] = 0.0
        histories[0][2, 7] = torch.nan
        buffer = torch.tensor(special, device=device)
        options = {"amax_compute_algo": algorithm}
        yield Sample(f"special values, {algorithm}", (buffer, histories, scales), options)
    buffer, histories, scales = call((4, 6), (3, 5))
    wide = [it.repeat_interleave(2, -1)[:, ::2] for it in histories]
    yield Sample("strided histories", (buffer, wide, scales))


_SHARDS: dict[str, tuple[int, int, int, int, int]] = {
    # label: h, w, start, number of elements, block length
    "typical": (160, 144, 1000, 9000, 128),
    "all of it": (30, 40, 0, 1200, 128),
    "within a row": (16, 300, 310, 250, 128),
    "blocks of 16": (50, 37, 400, 1100, 16),
    "one element": (3, 5, 14, 1, 128),
    "nothing": (3, 5, 7, 0, 128),
    "one column": (270, 1, 100, 150, 128),
}


def _shards(dtype: str, device: str) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    for label, (h, w, start, count, block_len) in _SHARDS.items():
        yield label, normal((count,), kind, device, seed=100), (h, w, start, block_len)
    strided = normal((600,), kind, device, seed=101)[::2]
    yield "strided", strided, (16, 40, 200, 128)
    yield "unaligned start", normal((301,), kind, device, seed=102)[1:], (16, 40, 200, 128)
    for label, values in _special(kind, device):
        if label in ("missing values", "infinite values", "large values", "ties"):
            yield label, values.flatten(), (30, 136, 17, 128)


def _partial_amax_samples(dtype: str, device: str) -> Iterator[Sample]:
    for label, input, (h, w, start, block_len) in _shards(dtype, device):
        options = {} if block_len == 128 else {"block_len": block_len}
        yield Sample(label, (input, h, w, start), options)


def _partial_cast_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    for label, input, (h, w, start, block_len) in _shards(dtype, device):
        options = {} if block_len == 128 else {"block_len": block_len}
        shape = blocks_of(h, w, block_len)
        scale = normal(shape, torch.float32, device, seed=103).abs() * 100 + 0.5
        if label == "ties":
            scale = torch.ones_like(scale)
        args = (input, scale, h, w, start)
        yield Sample(label, args, options)
        if label in ("typical", "ties"):
            yield Sample(f"{label}, e5m2", args, {**options, "dtype": torch.float8_e5m2})


# --------------------------------------------------------------------------- contracts


def quantized_shapes(
    input: Tensor,
    groups: int,
    format: str,
    dtype: torch.dtype | None,
    columnwise: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The six outputs; values that a tensor has one of, such as amax, have ``groups`` elements."""
    import torch

    form = FORMATS[format]
    kind = dtype or getattr(torch, form.dtypes[0])
    scale_dtype: torch.dtype = getattr(torch, form.scale_dtype)
    packed = form.values_per_byte

    def scales(rows: int, columns: int) -> Tensor:
        shape = (groups,) if form.block is None else form.scale_shape(rows, columns)
        return input.new_empty(shape, dtype=scale_dtype)

    rows, columns = matrix_shape(input.shape)
    one = (groups,)
    return (
        input.new_empty((*input.shape[:-1], columns // packed), dtype=kind),
        scales(rows, columns),
        input.new_empty(one, dtype=torch.float32) if form.by_tensor else None,
        input.new_empty(one, dtype=torch.float32) if form.global_scale else None,
        input.new_empty((columns, rows // packed), dtype=kind) if columnwise else None,
        scales(columns, rows) if columnwise else None,
    )


def _quantized_lists(
    inputs: Sequence[Tensor], format: str, dtype: torch.dtype | None, columnwise: bool
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    each = [quantized_shapes(it, 1, format, dtype, columnwise) for it in inputs]
    data, scale_inv, amax, global_inv, data_t, scale_inv_t = (
        [it for it in outputs if it is not None] for outputs in zip(*each, strict=True)
    )
    return data, scale_inv, amax, global_inv, data_t, scale_inv_t


@contract(
    family="quantization",
    check=_check_quantize,
    samples=_quantize_samples,
    tolerance=EXACTLY,
    oracle=_quantize_oracle,
)
def quantize(
    input: Tensor,
    scale: Tensor | None = None,
    *,
    format: str = "per_tensor",
    dtype: torch.dtype | None = None,
    columnwise: bool = False,
    force_pow_2_scales: bool = False,
    amax_epsilon: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Casts a tensor to a scaling format; the arithmetic is at the head of this module.

    Without ``scale`` the scale is computed from the values (current scaling, Micikevicius et al.,
    2022, arXiv:2209.05433). With ``scale``, computed from earlier amaxes (delayed scaling), the
    returned amax is for later scales.

    Args:
        input: ``[..., H]``, treated as N rows; float32, bfloat16 or float16.
        scale: ``[1]``, float32, positive; only for ``per_tensor`` and, as S, for ``nvfp4``.
        format: ``"per_tensor"``, ``"block_1x128"``, ``"block_128x128"``, ``"mxfp8"`` or
            ``"nvfp4"``. For nvfp4 H is even.
        dtype: of the data, float8_e4m3fn (unless given) or float8_e5m2; uint8 for nvfp4.
        columnwise: return the transposed tensor as well, with its own scales. For nvfp4
            N is even too.
        force_pow_2_scales: scales are powers of two; only for float32 scales that are computed.
        amax_epsilon: the least amax that a scale is computed from, in the range of float32;
            only for float32 scales that are computed.

    Returns:
        data: ``[..., H]``, or ``[..., H / 2]`` for nvfp4.
        scale_inv: float32 ``[1]`` per tensor, float32 ``[N, ceil(H / 128)]`` in blocks of
            1x128, float32 ``[ceil(N / 128), ceil(H / 128)]`` of 128x128, float8_e8m0fnu
            ``[N, ceil(H / 32)]`` for mxfp8, float8_e4m3fn ``[N, ceil(H / 16)]`` for nvfp4.
        amax: ``[1]``, float32, of the input, per tensor and for nvfp4; else None.
        global_scale_inv: ``[1]``, float32, for nvfp4; else None.
        data_t: with ``columnwise``, the data of the transposed matrix ``[H, N]``; else None.
        scale_inv_t: with ``columnwise``, the scale_inv of that matrix; else None.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    return quantized_shapes(input, 1, format, dtype, columnwise)


@contract(
    family="quantization",
    check=_check_quantize,
    samples=_bgrad_quantize_samples,
    tolerance=BIAS_TOLERANCE,
    oracle=_bgrad_quantize_oracle,
)
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
    """:func:`quantize` of a gradient, fused with the gradient of a bias.

    Args:
        input: as in :func:`quantize`.
        scale: as in :func:`quantize`.
        format: as in :func:`quantize`.
        dtype: as in :func:`quantize`.
        columnwise: as in :func:`quantize`.
        force_pow_2_scales: as in :func:`quantize`.
        amax_epsilon: as in :func:`quantize`.

    Returns:
        bias_grad: ``[H]``, dtype of ``input``; the sum of ``input`` over the rows, in float32.
        data, scale_inv, amax, global_scale_inv, data_t, scale_inv_t: as of :func:`quantize`.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    outputs = quantized_shapes(input, 1, format, dtype, columnwise)
    return input.new_empty(input.shape[-1:]), *outputs


@contract(
    family="quantization",
    check=_check_split_quantize,
    samples=_split_quantize_samples,
    tolerance=EXACTLY,
    oracle=_split_quantize_oracle,
)
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
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """:func:`quantize` of each part of a tensor that is split along its first dimension.

    Args:
        input: ``[M, ..., H]``; float32, bfloat16 or float16.
        split_sections: the size of each part along the first dimension; the sum is M.
        scales: a scale for each part, as in :func:`quantize`.
        format: as in :func:`quantize`.
        dtype: as in :func:`quantize`.
        columnwise: as in :func:`quantize`.
        force_pow_2_scales: as in :func:`quantize`.
        amax_epsilon: as in :func:`quantize`.

    Returns:
        data, scale_inv, amax, global_scale_inv, data_t, scale_inv_t: as of :func:`quantize`,
            each a list of what that returns for the parts; empty where it returns None.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    return _quantized_lists(parts_of(input, split_sections), format, dtype, columnwise)


@contract(
    family="quantization",
    check=_check_group_quantize,
    samples=_group_quantize_samples,
    tolerance=EXACTLY,
    oracle=_group_quantize_oracle,
)
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
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """:func:`quantize` of rows in groups whose sizes only the device knows.

    The outputs are those of the whole tensor, with the same blocks, but each group has its own
    value where a tensor has one: the scale of ``per_tensor``, the global scale of
    ``nvfp4``, the amax. A block that spans groups belongs to the group of its first row. Rows
    after the last group are treated as zeros. No size is read by the host.

    Args:
        input: ``[M, ..., H]``; float32, bfloat16 or float16.
        group_sizes: ``[G]``, G at least 1, int64 or int32: the size of each group along the
            first dimension, in order; not negative, the sum at most M.
        scale: ``[G]``, otherwise as in :func:`quantize`.
        format: as in :func:`quantize`.
        dtype: as in :func:`quantize`.
        columnwise: as in :func:`quantize`.
        force_pow_2_scales: as in :func:`quantize`.
        amax_epsilon: as in :func:`quantize`.

    Returns:
        data: as of :func:`quantize`.
        scale_inv: as of :func:`quantize`, but ``[G]`` per tensor.
        amax: ``[G]``, float32, per tensor and for nvfp4; else None.
        global_scale_inv: ``[G]``, float32, for nvfp4; else None.
        data_t: as of :func:`quantize`.
        scale_inv_t: as of :func:`quantize`, but ``[G]`` per tensor.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    return quantized_shapes(input, group_sizes.shape[0], format, dtype, columnwise)


@contract(
    family="quantization",
    check=_check_multi_tensor_quantize,
    samples=_multi_tensor_quantize_samples,
    tolerance=EXACTLY,
    oracle=_multi_tensor_quantize_oracle,
)
def multi_tensor_quantize(
    inputs: list[Tensor],
    scales: list[Tensor] | None = None,
    *,
    format: str = "per_tensor",
    dtype: torch.dtype | None = None,
    columnwise: bool = False,
    force_pow_2_scales: bool = False,
    amax_epsilon: float = 0.0,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """:func:`quantize` of each of several tensors.

    Args:
        inputs: at least one, each as in :func:`quantize`, all of one dtype on one device.
        scales: a scale for each tensor, as in :func:`quantize`.
        format: as in :func:`quantize`.
        dtype: as in :func:`quantize`.
        columnwise: as in :func:`quantize`.
        force_pow_2_scales: as in :func:`quantize`.
        amax_epsilon: as in :func:`quantize`.

    Returns:
        data, scale_inv, amax, global_scale_inv, data_t, scale_inv_t: as of :func:`quantize`,
            each a list of what that returns for the tensors; empty where it returns None.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    return _quantized_lists(inputs, format, dtype, columnwise)


@contract(
    family="quantization",
    check=_check_dequantize,
    samples=_dequantize_samples,
    tolerance=dict.fromkeys(("uint8", *FLOAT8), EXACT),
    oracle=_dequantize_oracle,
)
def dequantize(
    data: Tensor,
    scale_inv: Tensor,
    global_scale_inv: Tensor | None = None,
    *,
    format: str = "per_tensor",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The values of a tensor that :func:`quantize` returned.

    ``output = data * scale_inv`` in float32, times ``global_scale_inv`` for nvfp4, where the first
    product is exact; rounded to ``out_dtype``.

    Args:
        data: as of :func:`quantize`; ``data_t`` for a transposed tensor.
        scale_inv: as of :func:`quantize`; ``scale_inv_t`` for a transposed tensor.
        global_scale_inv: as of :func:`quantize`.
        format: as in :func:`quantize`.
        out_dtype: float32 (unless given), bfloat16 or float16.

    Returns:
        output: ``[..., H]``, ``out_dtype``, contiguous.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    import torch

    columns = data.shape[-1] * FORMATS[format].values_per_byte
    return data.new_empty((*data.shape[:-1], columns), dtype=out_dtype or torch.float32)


@contract(
    family="quantization",
    check=_check_compute_amax,
    samples=_amax_samples,
    tolerance=EXACTLY,
    oracle=_amax_oracle,
)
def compute_amax(input: Tensor) -> Tensor:
    """The largest magnitude of a tensor, ignoring NaN; 0 if there are no other values.

    Args:
        input: any shape; float32, bfloat16 or float16.

    Returns:
        amax: ``[1]``, float32.

    Raises:
        ArgumentError: the dtype is not one of these.
    """
    import torch

    return input.new_empty((1,), dtype=torch.float32)


@contract(
    family="quantization",
    check=_check_fp8_transpose,
    samples=_transpose_samples,
    tolerance=dict.fromkeys(BYTES, EXACT),
    oracle=_transpose_oracle,
)
def fp8_transpose(data: Tensor) -> Tensor:
    """The transposed matrix, copied to contiguous memory.

    Args:
        data: ``[..., H]``, treated as N rows; a one-byte dtype: float8_e4m3fn, float8_e5m2,
            float8_e8m0fnu or uint8.

    Returns:
        data_t: ``[H, N]``, contiguous, dtype of ``data``, bit for bit.

    Raises:
        ArgumentError: the dtype is not one of these, or there is no dimension.
    """
    rows, columns = matrix_shape(data.shape)
    return data.new_empty((columns, rows))


@contract(
    family="quantization",
    check=_check_swap_first_dims,
    samples=_swap_samples,
    tolerance=dict.fromkeys((*DTYPES, *BYTES), EXACT),
    oracle=_swap_oracle,
)
def swap_first_dims(input: Tensor) -> Tensor:
    """``[a, b, ...]`` as ``[b, a, ...]``, copied to contiguous memory.

    Args:
        input: at least two dimensions; float32, bfloat16, float16, uint8 or a float8 type.

    Returns:
        output: ``[b, a, ...]``, contiguous, dtype of ``input``, bit for bit.

    Raises:
        ArgumentError: the dtype is not one of these, or there are fewer dimensions.
    """
    first, second, *rest = input.shape
    return input.new_empty((second, first, *rest))


@contract(
    family="quantization",
    check=_check_update,
    samples=_update_samples,
    tolerance={"float32": EXACT},
    oracle=_update_oracle,
    mutates=("amax_histories", "scales"),
)
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    *,
    amax_compute_algo: str = "max",
    dtype: torch.dtype | None = None,
    margin: float = 0.0,
) -> None:
    """The update of delayed scaling, in place, as Transformer Engine defines it.

    The history of each scale is a column. The newest amax is the buffer's, or if
    the buffer has 0, row 0 of the history. The history's rows are rotated by one, so that row 0
    becomes the last, and the newest amax replaces it there. The amax used is the largest in the
    history, ignoring NaN, or the newest, as ``amax_compute_algo`` says.
    ``scale = M * 2**-margin / amax`` in float32, with the numerator rounded from float64; the
    largest float32 where that overflows; unchanged where the amax is 0, infinite or NaN.
    Finally, row 0 is set to 0 for the next amax.

    Args:
        amax_reduction_buffer: ``[sum of n]``, float32: the reduced amaxes of all tensors.
        amax_histories: each ``[length, n]``, float32, length at least 1; written.
        scales: each ``[n]``, float32; written.
        amax_compute_algo: ``"max"`` or ``"most_recent"``.
        dtype: of the data, which determines M; float8_e4m3fn (unless given) or
            float8_e5m2.
        margin: powers of two to leave as headroom, from -100 to 100.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """


@contract(
    family="quantization",
    check=_check_shard,
    samples=_partial_amax_samples,
    tolerance=EXACTLY,
    oracle=_partial_amax_oracle,
)
def fp8_block_scaling_compute_partial_amax(
    input: Tensor, h: int, w: int, start_offset: int, block_len: int = 128
) -> Tensor:
    """The amax of each block of a matrix, over the elements of a flat part of the matrix.

    Args:
        input: ``[n]``, elements ``start_offset`` to ``start_offset + n`` of the matrix in
            row-major order; float32, bfloat16 or float16.
        h: rows of the matrix.
        w: columns of the matrix.
        start_offset: where the part begins.
        block_len: rows, and columns, of a block.

    Returns:
        amax: ``[ceil(h / block_len), ceil(w / block_len)]``, float32; NaN is ignored, and a
            block without elements in the part has 0.

    Raises:
        ArgumentError: a shape, dtype or size does not agree.
    """
    import torch

    return input.new_empty(blocks_of(h, w, block_len), dtype=torch.float32)


@contract(
    family="quantization",
    check=_check_partial_cast,
    samples=_partial_cast_samples,
    tolerance=EXACTLY,
    oracle=_partial_cast_oracle,
)
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
    """The cast of a flat part of a matrix, with a given scale for each block of the matrix.

    Args:
        input: as in :func:`fp8_block_scaling_compute_partial_amax`.
        scale: ``[ceil(h / block_len), ceil(w / block_len)]``, float32.
        h: rows of the matrix.
        w: columns of the matrix.
        start_offset: where the part begins.
        block_len: rows, and columns, of a block.
        dtype: of the data, float8_e4m3fn (unless given) or float8_e5m2.

    Returns:
        data: ``[n]``; the cast is defined at the head of this module.

    Raises:
        ArgumentError: a shape, dtype, size or device does not agree.
    """
    import torch

    return input.new_empty(input.shape, dtype=dtype or torch.float8_e4m3fn)
