"""Quantised epilogues in Triton: an operator and the cast of its output, in one pass.

What casts is in ``_casting``, which calculates what it casts: for activations there is
nothing to add but the operators' arguments. A norm comes from whole rows. One kernel
normalizes them and casts along them, out of registers, or of wide rows in chunks that are
read twice. Where the cast needs more than a row, a transposed tensor, square blocks or a
scale that follows from all values, the kernel leaves the statistics, and the amaxes that it
has seen, and the cast normalizes what it reads. Nothing between the two is written but those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_engine_fl.backends._recipes import Quantized, Recipe, outputs_of, quantizing
from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import (
    MOST,
    WIDEST_UNIT,
    block_of,
    by_rows,
    check_numbers,
    check_size,
    fresh,
    keep,
    listed,
    plain,
    rows_of_tile,
    rows_to_sum,
)
from transformer_engine_fl.backends.flagos._casting import (
    Source,
    cast,
    cast_with_sums,
    dense_scale,
    in_bytes,
    shared_scale,
    store_rows,
    write_largest,
)
from transformer_engine_fl.backends.flagos._fetch import fetch
from transformer_engine_fl.backends.flagos._moments import moments_of_rows, moments_of_wide_row
from transformer_engine_fl.backends.flagos._narrow import amax_of, constants_of, rounded, size_of
from transformer_engine_fl.backends.flagos._rows import Cut
from transformer_engine_fl.backends.flagos.activation import ACTIVATIONS
from transformer_engine_fl.ops.epilogue import EPILOGUES, Epilogue

# -------------------------------------------------------------------------------- kernels
#
# ``columns`` and the row strides count units of UNIT elements. Where ``residual`` is given,
# what is normalized is ``sum``, as it has been rounded. ``data`` is given where rows are cast
# here; ``partial`` takes the amax of what a program has normalized.


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["rows", "columns", "x_stride", "residual_stride", "eps", "epsilon"]
)
def _norm_rows(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    mu_ptr: tl.tensor,
    rsigma_ptr: tl.tensor,
    data_ptr: tl.tensor,
    scale_inv_ptr: tl.tensor,
    global_scale_inv_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    x_stride: tl.int64,
    residual_stride: tl.int64,
    eps: tl.float64,
    epsilon: tl.float64,
    OFFSET: tl.constexpr,
    SUM: tl.constexpr,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALES: tl.constexpr,
    POW2: tl.constexpr,
    CAST: tl.constexpr,
    LEAVES_NAN: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Rows that fit into registers, ROWS at a time."""
    columns = columns * UNIT
    column = tl.arange(0, BLOCK)
    inside = column < columns
    row = tl.arange(0, ROWS)
    if data_ptr is not None or partial_ptr is not None:
        weight = fetch(weight_ptr + column, inside)
        if bias_ptr is not None:
            bias = fetch(bias_ptr + column, inside)
    least = tl.full((), epsilon, tl.float32)
    shared = shared_scale(
        scale_ptr, tl.program_id(0) == 0, scale_inv_ptr, None, global_scale_inv_ptr, WIDTH == 0
    )  # fmt: skip
    largest = tl.zeros((), tl.float32)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES
    ):
        first = tl.full((), tile, tl.int64) * ROWS
        height = tl.minimum(rows - tile * ROWS, ROWS)
        exists = row < height
        mask = exists[:, None] & inside[None, :]
        start = first + row
        where = (start * (x_stride * UNIT))[:, None] + column[None, :]
        x = fetch(x_ptr + where, mask).to(tl.float32)
        if residual_ptr is not None:
            where = (start * (residual_stride * UNIT))[:, None] + column[None, :]
            x += fetch(residual_ptr + where, mask).to(tl.float32)
            total = rounded(x, SUM)
            tl.store(sum_ptr + (start * columns)[:, None] + column[None, :], total, mask=mask)
            x = total.to(tl.float32)
        x, mu, rsigma = moments_of_rows(x, inside, columns, eps, mu_ptr is not None)
        if mu_ptr is not None:
            tl.store(mu_ptr + start, mu, mask=exists)
        tl.store(rsigma_ptr + start, rsigma, mask=exists)
        if data_ptr is not None or partial_ptr is not None:
            # Beyond the columns there is a NaN where rsigma is infinite, which no amax heeds.
            y = x * rsigma[:, None] * (weight.to(tl.float32) + OFFSET)[None, :]
            if bias_ptr is not None:
                y += bias.to(tl.float32)[None, :]
        if partial_ptr is not None:
            most = amax_of(tl.max(size_of(y, LEAVES_NAN), axis=1), LEAVES_NAN)
            largest = tl.maximum(largest, tl.max(tl.where(exists, most, 0), axis=0))
        if data_ptr is not None:
            store_rows(
                y, first, row, height, 0, columns, columns, shared, least, data_ptr,
                scale_inv_ptr, KIND, LARGEST, WIDTH, SCALES, POW2, CAST, LEAVES_NAN, ROWS, BLOCK,
            )  # fmt: skip
    if partial_ptr is not None:
        tl.store(partial_ptr + tl.program_id(0), largest)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["rows", "columns", "x_stride", "residual_stride", "eps", "epsilon"]
)
def _norm_wide(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    mu_ptr: tl.tensor,
    rsigma_ptr: tl.tensor,
    data_ptr: tl.tensor,
    scale_inv_ptr: tl.tensor,
    global_scale_inv_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    x_stride: tl.int64,
    residual_stride: tl.int64,
    eps: tl.float64,
    epsilon: tl.float64,
    OFFSET: tl.constexpr,
    SUM: tl.constexpr,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALES: tl.constexpr,
    POW2: tl.constexpr,
    CAST: tl.constexpr,
    LEAVES_NAN: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """One row at a time in chunks of BLOCK columns, read twice."""
    columns = columns * UNIT
    chunks = tl.cdiv(columns, BLOCK)
    lane = tl.arange(0, BLOCK)
    least = tl.full((), epsilon, tl.float32)
    shared = shared_scale(
        scale_ptr, tl.program_id(0) == 0, scale_inv_ptr, None, global_scale_inv_ptr, WIDTH == 0
    )  # fmt: skip
    largest = tl.zeros((BLOCK,), tl.float32)
    for index in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.full((), index, tl.int64)
        read_ptr = x_ptr + row * (x_stride * UNIT)
        if residual_ptr is not None:
            other_ptr = residual_ptr + row * (residual_stride * UNIT)
            total_ptr = sum_ptr + row * columns
            for chunk in tl.range(0, chunks, loop_unroll_factor=UNROLL):
                column = chunk * BLOCK + lane
                inside = column < columns
                x = fetch(read_ptr + column, inside).to(tl.float32)
                x += fetch(other_ptr + column, inside).to(tl.float32)
                tl.store(total_ptr + column, rounded(x, SUM), mask=inside)
            tl.debug_barrier()
            read_ptr = total_ptr
        mu, rsigma = moments_of_wide_row(
            read_ptr, columns, eps, tl.float32, mu_ptr is not None, BLOCK, UNROLL
        )
        if mu_ptr is not None:
            tl.store(mu_ptr + row, mu)
        tl.store(rsigma_ptr + row, rsigma)
        if data_ptr is not None or partial_ptr is not None:
            # From the end: what was read last is the likeliest to be in the cache still.
            for done in tl.range(0, chunks, loop_unroll_factor=UNROLL):
                first = (chunks - 1 - done) * BLOCK
                column = first + lane
                inside = column < columns
                x = fetch(read_ptr + column, inside).to(tl.float32)
                weight = fetch(weight_ptr + column, inside).to(tl.float32)
                y = (x - mu) * rsigma * (weight + OFFSET)
                if bias_ptr is not None:
                    y += fetch(bias_ptr + column, inside).to(tl.float32)
                y = tl.where(inside, y, 0)
                if partial_ptr is not None:
                    largest = tl.maximum(largest, size_of(y, LEAVES_NAN))
                if data_ptr is not None:
                    width = tl.minimum(columns - first, BLOCK)
                    store_rows(
                        y[None, :], row, tl.arange(0, 1), 1, first, width, columns, shared, least,
                        data_ptr, scale_inv_ptr, KIND, LARGEST, WIDTH, SCALES, POW2, CAST,
                        LEAVES_NAN, 1, BLOCK,
                    )  # fmt: skip
    if partial_ptr is not None:
        tl.store(partial_ptr + tl.program_id(0), amax_of(tl.max(largest, axis=0), LEAVES_NAN))


# ---------------------------------------------------------------------------------- plans


# By width: columns rounded up to a power of two. The widest listed is the widest that is kept
# in registers; wider rows take (threads, columns) of a chunk, and programs as above.
_CAST_TILES = {
    4096: Cut(threads=128, width=4096),
    8192: Cut(threads=256, width=8192, programs=2, stages=3),
    16384: Cut(threads=512, width=16384, programs=1, stages=2),
}
# Of rows that are not cast here. Each program leaves an amax, of which all are read later.
_STATISTICS_TILES = {
    2048: Cut(threads=128, width=2048, programs=8),
    8192: Cut(threads=256, width=8192, programs=4),
    16384: Cut(threads=512, width=16384, programs=2),
}
_CHUNK, _CHUNK_PROGRAMS, _UNROLL = (512, 4096), 4, 4


class _Plan(NamedTuple):
    """How to normalize rows.

    Attributes:
        launch: the kernel.
        rows: of a tile.
        most: programs at most.
    """

    launch: _launch.Launch
    rows: int
    most: int


class _Norm(NamedTuple):
    """What is normalized, by rows.

    Attributes:
        shape: of the input.
        x, x_stride: the input, from row to row.
        residual, residual_stride: what is added to it.
        weight, bias, offset: parameters; the offset is added to the weight.
        eps: added to the mean of squares.
        sum, mu, rsigma: what is written.
    """

    shape: tuple[int, ...]
    x: Tensor
    x_stride: int
    residual: Tensor | None
    residual_stride: int
    weight: Tensor
    bias: Tensor | None
    offset: int
    eps: float
    sum: Tensor | None
    mu: Tensor | None
    rsigma: Tensor

    @classmethod
    def of(cls, op: str, base: str, given: Mapping[str, Any]) -> _Norm:
        """The arguments of the operator ``base``, as its check has passed them."""
        check_numbers(op, given["eps"])
        x, x_stride = rows_to_sum(op, plain(op, "input", given["input"]))
        shape = tuple(given["input"].shape)
        rows = (math.prod(shape[:-1]),)
        check_size(op, "rows", rows[0])
        check_size(op, "columns", shape[-1])
        residual, residual_stride, total = None, 0, None
        if "residual" in given:
            residual, residual_stride = rows_to_sum(op, plain(op, "residual", given["residual"]))
            total = fresh(op, x, shape)
        bias = given.get("bias")
        return cls(
            shape,
            x,
            x_stride,
            residual,
            residual_stride,
            plain(op, "weight", given["weight"]).contiguous(),
            None if bias is None else plain(op, "bias", bias).contiguous(),
            int(given["zero_centered_gamma"]),
            float(given["eps"]),
            total,
            fresh(op, x, rows, torch.float32) if base == "layernorm_fwd" else None,
            fresh(op, x, rows, torch.float32),
        )

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.rsigma.shape[0]

    @property
    def statistics(self) -> tuple[Tensor, ...]:
        """What the operator returns behind its output."""
        return tuple(it for it in (self.sum, self.mu, self.rsigma) if it is not None)

    def source(self, amaxes: Tensor | None = None) -> Source:
        """What is cast, once it is known of each row how to normalize it."""
        x, x_stride = (self.x, self.x_stride) if self.sum is None else (self.sum, self.shape[-1])
        return Source(
            "norm",
            self.shape,
            x,
            x_stride,
            weight=self.weight,
            bias=self.bias,
            mu=self.mu,
            rsigma=self.rsigma,
            offset=self.offset,
            amaxes=amaxes,
        )


_PLANS: dict[object, _Plan] = {}


def _plan(norm: _Norm, recipe: Recipe, unit: int, cast_here: bool) -> _Plan:
    device = norm.x.device
    width = block_of(norm.shape[-1])
    constants: dict[str, Any] = {
        "OFFSET": norm.offset,
        "SUM": getattr(tl, str(norm.x.dtype).removeprefix("torch.")),
        **recipe.constants(),
        **constants_of(device),
        "UNIT": unit,
    }
    processors = _launch.limits(device).multiprocessors
    tile: Cut | None = listed(_CAST_TILES if cast_here else _STATISTICS_TILES, width)
    if tile is None:
        threads, block = _CHUNK
        launch = _launch.Launch(
            _norm_wide, device, threads=threads, **constants, BLOCK=block, UNROLL=_UNROLL
        )
        return _Plan(launch, 1, _CHUNK_PROGRAMS * processors)
    rows = rows_of_tile(tile.width, width)
    launch = _launch.Launch(
        _norm_rows,
        device,
        threads=tile.threads,
        **constants,
        ROWS=rows,
        BLOCK=max(width, recipe.width),
        STAGES=tile.stages,
    )
    return _Plan(launch, rows, tile.programs * processors or MOST)


# ------------------------------------------------------------------------------ operators


def _activation(
    epilogue: Epilogue, recipe: Recipe, given: Mapping[str, Any], scale: Tensor | None
) -> tuple[Any, ...]:
    """An activation or its gradient, quantised; before it the gradient of a bias."""
    base = epilogue.base
    of = ACTIVATIONS[base.name]
    limit, alpha = given.get("limit", 0.0), given.get("alpha", 0.0)
    check_numbers(recipe.op, limit, alpha)
    x, x_stride = by_rows(plain(recipe.op, base.dispatch_on, given[base.dispatch_on]))
    grad, grad_stride = None, 0
    if of.backward:
        grad, grad_stride = by_rows(plain(recipe.op, "grad", given["grad"]))
    source = Source(
        of.kind,
        tuple(epilogue.shape(given)),
        x,
        x_stride,
        grad,
        grad_stride,
        of.gated,
        limit=float(limit),
        alpha=float(alpha),
    )
    if not epilogue.place:
        return cast(recipe, source, scale)
    assert grad is not None
    dbias, quantized = cast_with_sums(recipe, source, grad.dtype, scale)
    return dbias, *quantized


def _normalize(
    norm: _Norm,
    recipe: Recipe,
    scale: Tensor | None,
    outputs: Quantized | None,
    with_amaxes: bool,
) -> Tensor | None:
    """Write the statistics, and the outputs if there are any; returns the amaxes of programs."""
    columns = norm.shape[-1]
    unit = math.gcd(columns, norm.x_stride, norm.residual_stride, WIDEST_UNIT)
    tensors = (
        norm.x, norm.residual, norm.weight, norm.bias, scale, norm.sum, norm.mu, norm.rsigma,
        *((None,) * 3 if outputs is None else _in_bytes(outputs[0], outputs[1], outputs[3])),
    )  # fmt: skip
    dtypes = [None if it is None else it.dtype for it in tensors]
    key = (*dtypes, *recipe[1:5], norm.offset, columns, unit, with_amaxes, norm.x.device)
    plan = _PLANS.get(key) or keep(_PLANS, key, _plan(norm, recipe, unit, outputs is not None))
    programs = max(1, min(-(-norm.rows // plan.rows), plan.most))
    amaxes = fresh(recipe.op, norm.x, (programs,), torch.float32) if with_amaxes else None
    if norm.rows or with_amaxes:
        plan.launch(
            (programs, 1),
            (*tensors, amaxes),
            (
                norm.rows, columns // unit, norm.x_stride // unit, norm.residual_stride // unit,
                norm.eps, recipe.amax_epsilon,
            ),
        )  # fmt: skip
    return amaxes


def _in_bytes(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if it is None else in_bytes(it) for it in tensors)


def _norm(
    epilogue: Epilogue, recipe: Recipe, given: Mapping[str, Any], scale: Tensor | None
) -> tuple[Any, ...]:
    """A norm, quantised; behind it the statistics."""
    norm = _Norm.of(recipe.op, epilogue.base.name, given)
    scale = dense_scale(recipe.op, scale)
    by_tensor = recipe.form.by_tensor
    if recipe.columnwise or recipe.square or (by_tensor and scale is None):
        amaxes = _normalize(norm, recipe, None, None, by_tensor and scale is None)
        quantized = cast(recipe, norm.source(amaxes), scale)
    else:
        quantized = outputs_of(recipe, norm.x, norm.shape, 1)
        amaxes = _normalize(norm, recipe, scale, quantized, by_tensor)
        if amaxes is not None:
            amax = quantized[2]
            assert amax is not None
            write_largest(amaxes, amax)
    return *quantized, *norm.statistics


_CALCULATE = {"activation": _activation, "normalization": _norm}

globals().update(
    (name, quantizing(epilogue, _CALCULATE[epilogue.base.family]))
    for name, epilogue in EPILOGUES.items()
)
