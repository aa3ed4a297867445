"""Quantisation in plain PyTorch: the arithmetic of ``ops/quantization.py``, step by step.

Nothing is read on the host: scales stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends.reference._values import as_written, over_rows
from transformer_engine_fl.ops._formats import FORMATS, LARGEST, Format
from transformer_engine_fl.ops.quantization import GLOBAL_LARGEST, blocks_of, matrix_shape, parts_of

__all__ = [
    "Quantized",
    "Recipe",
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

Quantized = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
Lists = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]

_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


# ------------------------------------------------------------------------------- values


def _magnitudes(x: Tensor) -> Tensor:
    return x.abs().nan_to_num(0.0, posinf=torch.inf)


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast float32 values to a data dtype; uint8 is e2m1, with two values in a byte."""
    name = str(dtype).removeprefix("torch.")
    value = value.contiguous().clamp(-LARGEST[name], LARGEST[name])
    if dtype != torch.uint8:
        return value.to(dtype)
    # A value's code is the number of midpoints below it; ties go to the even code.
    size = value.abs().nan_to_num(6.0)
    code = torch.zeros_like(size, dtype=torch.uint8)
    for even, midpoint in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += size > midpoint if even % 2 == 0 else size >= midpoint
    code += 8 * (value.signbit() & ~value.isnan()).to(torch.uint8)
    return code[..., ::2] | code[..., 1::2] << 4


def _values(data: Tensor) -> Tensor:
    """The values of data, in float32."""
    if data.dtype != torch.uint8:
        return data.float()
    code = torch.stack([data & 15, data >> 4], -1).flatten(-2)
    sizes = data.new_tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32)
    size = sizes[(code & 7).long()]
    return torch.where(code >= 8, -size, size)


def _scale_of(
    amax: Tensor, largest: float, epsilon: float = 0.0, power_of_2: bool = False
) -> Tensor:
    """The float32 scale of an amax."""
    a = amax.clamp_min(epsilon)
    scale = _quotient(largest, a)
    scale = torch.where((a == 0) | a.isinf(), 1.0, scale)
    if power_of_2:
        return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def _quotient(largest: float, amax: Tensor) -> Tensor:
    """``largest / amax`` rounded once: torch divides a number by a tensor by the reciprocal."""
    return (torch.full_like(amax, largest) / amax).clamp_max(_LARGEST_FLOAT32)


def _microscale(amax: Tensor, largest: float) -> Tensor:
    """The byte ``e + 127`` for the least e with ``amax <= largest * 2**e``, as int32."""
    of_largest = torch.full_like(amax, largest).view(torch.int32)
    bits = amax.contiguous().view(torch.int32)
    exponent = (bits >> 23) - (of_largest >> 23) + 127
    byte = exponent + ((bits & 0x7FFFFF) > (of_largest & 0x7FFFFF)).int()
    return torch.where(amax.isinf(), 254, byte.clamp(0, 254))


def _as_e8m0(byte: Tensor) -> Tensor:
    return byte.to(torch.uint8).view(torch.float8_e8m0fnu)


# ------------------------------------------------------------------------------- blocks


def _block_amax(x: Tensor, form: Format) -> Tensor:
    """The amax of each block of a float32 matrix."""
    assert form.block is not None  # invariant
    (rows, columns), (height, width) = x.shape, form.block
    down, across = form.grid(rows, columns)
    padded = F.pad(_magnitudes(x), (0, across * width - columns, 0, down * height - rows))
    return padded.view(down, height, across, width).amax((1, 3))


def _over_blocks(per_block: Tensor, form: Format, rows: int, columns: int) -> Tensor:
    """The values of blocks, expanded to their elements."""
    assert form.block is not None  # invariant
    height, width = form.block
    row = torch.arange(rows, device=per_block.device) // height
    column = torch.arange(columns, device=per_block.device) // width
    return per_block[row[:, None], column]


def _cast_blocks(
    x: Tensor, form: Format, dtype: torch.dtype, recipe: Recipe, shared: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(data, scale_inv) of a float32 matrix in blocks; ``shared`` is S of each block."""
    name = str(dtype).removeprefix("torch.")
    amax = _block_amax(x, form)
    if form.scale_dtype == "float32":
        options = (recipe.amax_epsilon, recipe.force_pow_2_scales)
        scale = _scale_of(amax, LARGEST[name], *options)
        scale_inv = scale.reciprocal()
    elif form.scale_dtype == "float8_e8m0fnu":
        byte = _microscale(amax, LARGEST[name])
        scale, scale_inv = _as_e8m0(254 - byte).float(), _as_e8m0(byte)
    else:
        assert shared is not None  # invariant
        scale_inv = _cast(amax * (shared * (1 / 6)), torch.float8_e4m3fn)
        scale = (scale_inv.float() * shared.reciprocal()).reciprocal().clamp_max(_LARGEST_FLOAT32)
    return _cast(x * _over_blocks(scale, form, *x.shape), dtype), scale_inv


def _largest_of(magnitudes: Tensor, owner: Tensor, count: int) -> Tensor:
    """The largest magnitude that each of ``count`` owners has, 0 for an owner without elements."""
    return magnitudes.new_zeros(count).scatter_reduce(0, owner, magnitudes, "amax")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to quantise: the options that the operators share."""

    format: str
    dtype: torch.dtype | None
    columnwise: bool
    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        """The options as keywords of the operators."""
        return {
            "format": self.format,
            "dtype": self.dtype,
            "columnwise": self.columnwise,
            "force_pow_2_scales": self.force_pow_2_scales,
            "amax_epsilon": self.amax_epsilon,
        }

    def cast(
        self,
        input: Tensor,
        scale: Tensor | None = None,
        group: Tensor | None = None,
        groups: int = 1,
    ) -> Quantized:
        """The outputs of quantize. (Not ``__call__``: Dynamo of torch 2.11 cannot trace calling an
        object that it has created.)

        Args:
            input: converted to float32 for the arithmetic.
            scale: of the tensor or of each group; computed unless given.
            group: the group of each row, if there are several.
            groups: the number of groups.
        """
        form = FORMATS[self.format]
        dtype = self.dtype or getattr(torch, form.dtypes[0])
        rows, columns = matrix_shape(input.shape)
        x = input.reshape(rows, columns).float()
        shape = (*input.shape[:-1], columns // form.values_per_byte)
        if group is None:
            group = torch.zeros(rows, dtype=torch.int64, device=x.device)
        amax, shared = None, scale
        if form.by_tensor:
            amax = _largest_of(F.pad(_magnitudes(x), (0, 1)).amax(1), group, groups)
            if scale is None:
                shared = self._shared_scale(amax, form, dtype)
        if form.block is None:
            assert shared is not None  # invariant
            data, scale_inv = _cast(x * shared[group, None], dtype), shared.reciprocal()
            transposed = (_transposed(data), scale_inv.clone()) if self.columnwise else (None, None)
            return data.view(shape), scale_inv, amax, None, *transposed
        height, width = form.block
        down = None if shared is None else shared[group[::height], None]
        data, scale_inv = _cast_blocks(x, form, dtype, self, down)
        transposed = (None, None)
        if self.columnwise:
            across = None if shared is None else shared[None, group[::width]]
            transposed = _cast_blocks(x.t(), form, dtype, self, across)
        global_scale_inv = None if shared is None else shared.reciprocal()
        return data.view(shape), scale_inv, amax, global_scale_inv, *transposed

    def each(self, inputs: Sequence[Tensor], scales: Sequence[Tensor] | None) -> Lists:
        """The outputs for several tensors: a list for each output."""
        found = [
            self.cast(it, scales[place] if scales else None) for place, it in enumerate(inputs)
        ]
        data, scale_inv, amax, global_scale_inv, data_t, scale_inv_t = (
            [it for it in outputs if it is not None] for outputs in zip(*found, strict=True)
        )
        return data, scale_inv, amax, global_scale_inv, data_t, scale_inv_t

    def _shared_scale(self, amax: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
        if form.global_scale:
            return _scale_of(amax, GLOBAL_LARGEST)
        largest = LARGEST[str(dtype).removeprefix("torch.")]
        return _scale_of(amax, largest, self.amax_epsilon, self.force_pow_2_scales)


def _transposed(matrix: Tensor) -> Tensor:
    return matrix.t().clone(memory_format=torch.contiguous_format)


# ---------------------------------------------------------------------------- operators


@as_written
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
    """Casts a tensor to a scaling format."""
    recipe = Recipe(format, dtype, columnwise, force_pow_2_scales, amax_epsilon)
    ops.quantize.check(input, scale, **recipe.options)
    return recipe.cast(input, scale)


@as_written
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
    """Casts a gradient, and sums it over the rows."""
    recipe = Recipe(format, dtype, columnwise, force_pow_2_scales, amax_epsilon)
    ops.bgrad_quantize.check(input, scale, **recipe.options)
    return over_rows(input.float()).to(input.dtype), *recipe.cast(input, scale)


@as_written
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
    """Casts each part of a tensor."""
    recipe = Recipe(format, dtype, columnwise, force_pow_2_scales, amax_epsilon)
    ops.split_quantize.check(input, split_sections, scales, **recipe.options)
    return recipe.each(parts_of(input, split_sections), scales)


@as_written
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
    """Casts groups of rows."""
    recipe = Recipe(format, dtype, columnwise, force_pow_2_scales, amax_epsilon)
    ops.group_quantize.check(input, group_sizes, scale, **recipe.options)
    groups = group_sizes.shape[0]
    ends = group_sizes.long().cumsum(0)
    place = torch.arange(input.shape[0], device=input.device)
    inside = (place < ends[-1]).view(-1, *[1] * (input.ndim - 1))
    owner = torch.searchsorted(ends, place, right=True).clamp_max(groups - 1)
    rows = matrix_shape(input.shape[1:])[0]  # for each index of the first dimension
    return recipe.cast(torch.where(inside, input, 0), scale, owner.repeat_interleave(rows), groups)


@as_written
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
    """Casts each of several tensors."""
    recipe = Recipe(format, dtype, columnwise, force_pow_2_scales, amax_epsilon)
    ops.multi_tensor_quantize.check(inputs, scales, **recipe.options)
    return recipe.each(inputs, scales)


@as_written
def dequantize(
    data: Tensor,
    scale_inv: Tensor,
    global_scale_inv: Tensor | None = None,
    *,
    format: str = "per_tensor",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The values of quantised data."""
    ops.dequantize.check(data, scale_inv, global_scale_inv, format=format, out_dtype=out_dtype)
    form = FORMATS[format]
    values = _values(data)
    shape = values.shape
    rows, columns = matrix_shape(shape)
    factor = scale_inv.float()
    if form.block is not None:
        factor = _over_blocks(factor, form, rows, columns)
    values = values.reshape(rows, columns).contiguous() * factor
    if global_scale_inv is not None:
        values = values * global_scale_inv
    return values.view(shape).to(out_dtype or torch.float32)


@as_written
def compute_amax(input: Tensor) -> Tensor:
    """The largest magnitude."""
    ops.compute_amax.check(input)
    return F.pad(_magnitudes(input).flatten(), (0, 1)).amax().float().view(1)


@as_written
def fp8_transpose(data: Tensor) -> Tensor:
    """The transposed matrix."""
    ops.fp8_transpose.check(data)
    return _transposed(data.reshape(matrix_shape(data.shape)))


@as_written
def swap_first_dims(input: Tensor) -> Tensor:
    """The first two dimensions swapped."""
    ops.swap_first_dims.check(input)
    return input.transpose(0, 1).clone(memory_format=torch.contiguous_format)


@as_written
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    *,
    amax_compute_algo: str = "max",
    dtype: torch.dtype | None = None,
    margin: float = 0.0,
) -> None:
    """The update of delayed scaling, one history after another."""
    ops.fused_amax_and_scale_update_after_reduction.check(
        amax_reduction_buffer,
        amax_histories,
        scales,
        amax_compute_algo=amax_compute_algo,
        dtype=dtype,
        margin=margin,
    )
    name = str(dtype or torch.float8_e4m3fn).removeprefix("torch.")
    buffers = parts_of(amax_reduction_buffer, [it.shape[0] for it in scales])
    for reduced, history, scale in zip(buffers, amax_histories, scales, strict=True):
        newest = torch.where(reduced == 0, history[0], reduced)
        rolled = torch.cat([history[1:], newest[None]])
        amax = newest
        if amax_compute_algo == "max":
            amax = rolled.masked_fill(rolled.isnan(), 0).amax(0)
        usable = amax.isfinite() & (amax > 0)
        largest = LARGEST[name] * 2.0**-margin
        scale.copy_(torch.where(usable, _quotient(largest, amax), scale))
        rolled[0] = 0
        history.copy_(rolled)


def _block_of_each(
    count: int, w: int, start_offset: int, block_len: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Row and column of the block of each element of a flat part of a matrix."""
    place = torch.arange(start_offset, start_offset + count, device=device)
    return place // w // block_len, place % w // block_len


@as_written
def fp8_block_scaling_compute_partial_amax(
    input: Tensor, h: int, w: int, start_offset: int, block_len: int = 128
) -> Tensor:
    """The amax of each block, over a flat part of a matrix."""
    ops.fp8_block_scaling_compute_partial_amax.check(input, h, w, start_offset, block_len)
    down, across = blocks_of(h, w, block_len)
    row, column = _block_of_each(input.shape[0], w, start_offset, block_len, input.device)
    amax = _largest_of(_magnitudes(input.float()), row * across + column, down * across)
    return amax.view(down, across)


@as_written
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
    """The cast of a flat part of a matrix."""
    ops.fp8_block_scaling_partial_cast.check(
        input, scale, h, w, start_offset, block_len, dtype=dtype
    )
    row, column = _block_of_each(input.shape[0], w, start_offset, block_len, input.device)
    return _cast(input.float() * scale[row, column], dtype or torch.float8_e4m3fn)
