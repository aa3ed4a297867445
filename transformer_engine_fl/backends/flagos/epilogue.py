"""Quantised epilogues in Triton: an operator and the cast of its output, in one pass.

The kernels in ``_casting`` compute what they cast: for activations only the operators' arguments
are added here. A norm needs whole rows. One kernel normalizes rows and casts along them, from
registers, or for wide rows in chunks that are read twice. If the cast needs more than a row (a
transposed tensor, square blocks or a scale that depends on all values), the kernel only writes the
statistics, and the partial amaxes of what it has normalized; the casting kernel normalizes again
what it reads. Nothing else is written between the two.
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
    WIDEST_UNIT,
    add_to_cache,
    by_rows,
    check_numbers,
    check_size,
    fresh,
    listed,
    plain,
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
from transformer_engine_fl.backends.flagos._moments import (
    gain_of,
    moments_of_parts,
    moments_of_wide_row,
    read_input,
)
from transformer_engine_fl.backends.flagos._narrow import amax_of, constants_of, rounded, size_of
from transformer_engine_fl.backends.flagos._rows import (
    Cut,
    WholeRows,
    as_stored,
    by_lane,
    columns_before,
    existing,
    part_of_row,
    per_row,
    rows_of,
)
from transformer_engine_fl.backends.flagos.activation import ACTIVATIONS
from transformer_engine_fl.ops.epilogue import EPILOGUES, Epilogue

# -------------------------------------------------------------------------------- kernels

_CODES = tl.constexpr(16)  # one-byte codes per access: elements that a thread reads at a time

# ``columns`` and the row strides count units of UNIT elements. If ``residual`` is given, the
# kernels normalize ``sum``, as it has been rounded. ``data`` is given if rows are cast here;
# ``partial`` receives the amax of what a program has normalized.


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
    PARTS: tl.constexpr,
    EXACT: tl.constexpr,
    NARROW: tl.constexpr,
    LANES: tl.constexpr,
    LOOPED: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Rows that fit in registers, ROWS at a time, in PARTS; see ``_rows``.

    LOOPED: a program has several tiles, and keeps the parameters in registers.
    """
    AHEAD: tl.constexpr = LOOPED and (data_ptr is not None or partial_ptr is not None)
    VECTOR: tl.constexpr = 128 // SUM.primitive_bitwidth if data_ptr is None else _CODES
    columns = columns * UNIT
    gamma = ()
    beta = ()
    if AHEAD:
        for part in tl.static_range(len(PARTS)):
            column, inside = part_of_row(PARTS, part, columns, EXACT)
            gamma += (_parameter(weight_ptr, column, inside, ROWS),)  # type: ignore[assignment]
            if bias_ptr is not None:
                beta += (_parameter(bias_ptr, column, inside, ROWS),)  # type: ignore[assignment]
    least = tl.full((), epsilon, tl.float32)
    shared = shared_scale(
        scale_ptr, tl.program_id(0) == 0, scale_inv_ptr, None, global_scale_inv_ptr, WIDTH == 0
    )  # fmt: skip
    largest = tl.zeros((LANES,) if ROWS == 1 else (ROWS,), tl.float32)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES
    ):
        row = rows_of(tile, ROWS)
        exists = existing(row, rows, ROWS)
        start = row.to(tl.int64)
        from_ptr = x_ptr + per_row(start * (x_stride * UNIT), ROWS)
        other_ptr = None
        total_ptr = None
        if residual_ptr is not None:
            other_ptr = residual_ptr + per_row(start * (residual_stride * UNIT), ROWS)
            total_ptr = sum_ptr + per_row(start * columns, ROWS)
        x = ()
        for part in tl.static_range(len(PARTS)):
            column, inside = part_of_row(PARTS, part, columns, EXACT)
            place, mask = column[None, :], per_row(exists, ROWS) & inside[None, :]
            one = read_input(from_ptr, other_ptr, total_ptr, place, place, mask, SUM)
            x += (one,)  # type: ignore[assignment]
        mu, rsigma = moments_of_parts(
            x, from_ptr, row, columns, eps, tl.float32, mu_ptr is not None, False, ROWS, PARTS,
            EXACT, NARROW, LANES, VECTOR,
        )  # fmt: skip
        if data_ptr is not None or partial_ptr is not None:
            first = tl.full((), tile, tl.int64) * ROWS
            height = tl.minimum(rows - tile * ROWS, ROWS)
            for part in tl.static_range(len(PARTS)):
                column, inside = part_of_row(PARTS, part, columns, EXACT)
                y = as_stored(x[part], NARROW).to(tl.float32)
                if mu_ptr is not None:
                    y -= per_row(mu, ROWS)
                    if not EXACT and part + 1 == len(PARTS):
                        y = tl.where(inside[None, :], y, 0)
                # Beyond the columns there is a NaN if rsigma is infinite; an amax ignores it.
                y *= per_row(rsigma, ROWS)
                weight = gamma[part] if AHEAD else _parameter(weight_ptr, column, inside, ROWS)
                y *= gain_of(weight, tl.float32, OFFSET)
                if bias_ptr is not None:
                    bias = beta[part] if AHEAD else _parameter(bias_ptr, column, inside, ROWS)
                    y += bias.to(tl.float32)
                if partial_ptr is not None:
                    sizes = size_of(y, LEAVES_NAN)
                    if ROWS == 1:
                        lanes = by_lane(sizes, LANES, VECTOR)
                        largest = tl.maximum(largest, tl.max(tl.max(lanes, axis=2), axis=0))
                    else:
                        most = tl.max(sizes, axis=1)
                        largest = tl.maximum(largest, tl.where(exists, most, 0))
                if data_ptr is not None:
                    before = columns_before(PARTS, part)
                    store_rows(
                        y, first, tl.arange(0, ROWS), height, before,
                        tl.minimum(columns - before, PARTS[part]), columns, shared, least,
                        data_ptr, scale_inv_ptr, KIND, LARGEST, WIDTH, SCALES, POW2, CAST,
                        LEAVES_NAN, ROWS, PARTS[part],
                    )  # fmt: skip
        # Stored last, as in ``normalization``.
        tl.store(rsigma_ptr + row, rsigma, mask=exists)
        if mu_ptr is not None:
            tl.store(mu_ptr + row, mu, mask=exists)
    if partial_ptr is not None:
        tl.store(partial_ptr + tl.program_id(0), amax_of(tl.max(largest, axis=0), LEAVES_NAN))


@triton.jit  # type: ignore[untyped-decorator]
def _parameter(
    pointer: tl.tensor, column: tl.tensor, inside: tl.tensor, ROWS: tl.constexpr
) -> tl.tensor:
    """A norm's parameter, with the layout of a tile.

    For a tile of one row it is loaded in that tile's layout, and no layout conversion is needed;
    with several rows each row would load it.
    """
    if ROWS == 1:
        return fetch(pointer + column[None, :], inside[None, :])
    else:
        return fetch(pointer + column, inside)[None, :]


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
            # Backwards: what was read last is most likely still in the cache.
            for done in tl.range(0, chunks, loop_unroll_factor=UNROLL):
                first = (chunks - 1 - done) * BLOCK
                column = first + lane
                inside = column < columns
                x = fetch(read_ptr + column, inside).to(tl.float32)
                weight = fetch(weight_ptr + column, inside)
                y = (x - mu) * rsigma * gain_of(weight, tl.float32, OFFSET)
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


# By the widest row that a cut is for, as measured with 2-byte numbers, or 4-byte ones where the
# name says so. The widest listed row is the widest that is kept in registers; wider rows use
# (threads, columns) of a chunk, and programs as below. Where formats disagree, or norms with and
# without a mean share a table, the least sum of one scale and mxfp8 decided:
# ``docs/measured/flagos.md``.
_CAST_CUTS = {
    512: Cut(threads=128, width=4096),
    896: Cut(threads=32, width=512, programs=16, stages=3),
    1024: Cut(threads=32, width=1024),
    1536: Cut(threads=32, width=512),
    2560: Cut(threads=64, width=2048, resident=16),
    3072: Cut(threads=64, width=1024),
    3584: Cut(threads=128, width=2048, programs=4, stages=3),
    6144: Cut(threads=128, width=4096, resident=8),
    7680: Cut(threads=256, width=4096, programs=2, stages=3),
    8192: Cut(threads=256, width=8192, programs=2, stages=3),
    12288: Cut(threads=256, width=4096, programs=2, stages=3),
    16384: Cut(threads=512, width=16384, programs=1, stages=4),
    24576: Cut(threads=512, width=16384, programs=1, stages=3),
    32768: Cut(threads=1024, width=32768),
}
_CAST_CENTRED_CUTS = {
    896: Cut(threads=32, width=512, programs=16, stages=3),
    1024: Cut(threads=32, width=1024, programs=12, stages=3),
    1536: Cut(threads=32, width=512, programs=12, stages=3),
    2560: Cut(threads=64, width=1024, programs=8, stages=3),
    3072: Cut(threads=64, width=1024, resident=12),
    3584: Cut(threads=128, width=2048, programs=4, stages=3),
    5120: Cut(threads=128, width=4096, programs=4, stages=3),
    6144: Cut(threads=256, width=4096, programs=2, stages=3),
    7680: Cut(threads=256, width=4096, programs=2, stages=4),
    8192: Cut(threads=256, width=8192, programs=2, stages=4),
    12288: Cut(threads=256, width=8192, resident=3),
    14336: Cut(threads=512, width=8192, programs=1, stages=3),
    16384: Cut(threads=512, width=16384, programs=1, stages=4),
    20480: Cut(threads=512, width=16384, programs=1, stages=3),
    24576: Cut(threads=512, width=8192, resident=2),
    28672: Cut(threads=1024, width=16384, resident=1),
    32768: Cut(threads=1024, width=32768, resident=1),
}
_CAST_CUTS_OF_4_BYTES = {
    512: Cut(threads=32, width=256, resident=32),
    1024: Cut(threads=64, width=512, programs=8, stages=3),
    1280: Cut(threads=128, width=1024, programs=8, stages=3),
    2048: Cut(threads=128, width=1024, programs=4, stages=3),
    3072: Cut(threads=256, width=2048, programs=4, stages=3),
    3584: Cut(threads=128, width=2048, programs=4, stages=3),
    4096: Cut(threads=256, width=2048, programs=2, stages=3),
    5120: Cut(threads=512, width=4096, programs=2, stages=3),
    7168: Cut(threads=256, width=4096, programs=2, stages=3),
    8192: Cut(threads=512, width=4096, programs=1, stages=3),
    16384: Cut(threads=1024, width=8192, programs=1, stages=3),
    24576: Cut(threads=1024, width=16384, programs=1, stages=3),
    32768: Cut(threads=1024, width=32768),
}
# For rows to which a residual is added, whether they are cast here or not.
_ADDED_CUTS = {
    512: Cut(threads=128, width=4096),
    1024: Cut(threads=32, width=1024, resident=16),
    1536: Cut(threads=64, width=2048, resident=16),
    2048: Cut(threads=128, width=2048, resident=6),
    2560: Cut(threads=64, width=2048, resident=12),
    3072: Cut(threads=64, width=4096, resident=8),
    4096: Cut(threads=128, width=4096, resident=4),
    5120: Cut(threads=128, width=4096, resident=6),
    7168: Cut(threads=128, width=8192, resident=4),
    10240: Cut(threads=256, width=8192, resident=3),
    11264: Cut(threads=256, width=16384, resident=2),
    12288: Cut(threads=256, width=8192, resident=3),
    16384: Cut(threads=256, width=16384, resident=2),
    24576: Cut(threads=512, width=16384, programs=1, stages=3),
    32768: Cut(threads=1024, width=32768),
}
_ADDED_CUTS_OF_4_BYTES = {
    1024: Cut(threads=128, width=1024, resident=6),
    2048: Cut(threads=128, width=2048, resident=6),
    4096: Cut(threads=256, width=4096, resident=4),
    8192: Cut(threads=256, width=8192),
    16384: Cut(threads=512, width=8192, resident=2),
    32768: Cut(threads=512, width=16384),
}
# For other rows that are not cast here, also with 4-byte numbers up to 16,384 columns. Each program
# writes an amax, and all of these are read later.
_STATISTICS_CUTS = {
    512: Cut(threads=32, width=512, programs=32, stages=3),
    1280: Cut(threads=32, width=512, programs=16, stages=3),
    2048: Cut(threads=64, width=1024, programs=8, stages=3),
    2560: Cut(threads=64, width=2048, programs=8, stages=3),
    3072: Cut(threads=128, width=1024, programs=4, stages=3),
    5120: Cut(threads=128, width=2048, programs=4, stages=3),
    8192: Cut(threads=256, width=4096, programs=2, stages=3),
    11264: Cut(threads=256, width=8192, programs=2, stages=3),
    16384: Cut(threads=512, width=8192, programs=1, stages=3),
    24576: Cut(threads=1024, width=8192, programs=1, stages=3),
    32768: Cut(threads=1024, width=32768),
}
_WIDEST_STATISTICS_OF_4_BYTES = 16384
_CHUNK, _CHUNK_PROGRAMS, _UNROLL = (512, 4096), 4, 4


class _WideRows(NamedTuple):
    """Rows that do not fit in registers; used like :class:`WholeRows`.

    Attributes:
        launch: the kernel.
        most: most programs.
    """

    launch: _launch.Launch
    most: int

    def groups(self, rows: int) -> int:
        """The number of programs for ``rows`` rows."""
        return min(rows, self.most)

    def __call__(
        self, rows: int, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]
    ) -> None:
        """Launch the kernel."""
        self.launch((self.groups(rows), 1), tensors, numbers)


class _Norm(NamedTuple):
    """The arguments of a norm, by rows.

    Attributes:
        shape: the input's shape.
        x, x_stride: the input and its row stride.
        residual, residual_stride: added to the input.
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
        """The arguments of the operator ``base``, already checked."""
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
        """The number of rows."""
        return self.rsigma.shape[0]

    @property
    def statistics(self) -> tuple[Tensor, ...]:
        """What the operator returns after its output."""
        return tuple(it for it in (self.sum, self.mu, self.rsigma) if it is not None)

    def source(self, amaxes: Tensor | None = None) -> Source:
        """The source of the cast, once each row's statistics are known."""
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


def _cuts(half: bool, added: bool, centred: bool, cast_here: bool) -> dict[int, Cut]:
    """The table of cuts; half: numbers have 2 bytes."""
    if added:
        return _ADDED_CUTS if half else _ADDED_CUTS_OF_4_BYTES
    if not cast_here:
        most = max(_STATISTICS_CUTS) if half else _WIDEST_STATISTICS_OF_4_BYTES
        return {widest: cut for widest, cut in _STATISTICS_CUTS.items() if widest <= most}
    if not half:
        return _CAST_CUTS_OF_4_BYTES
    return _CAST_CENTRED_CUTS if centred else _CAST_CUTS


def _cut(norm: _Norm, cast_here: bool) -> Cut | None:
    """How to cut rows; None if they do not fit in registers."""
    half, added = norm.x.element_size() == 2, norm.residual is not None
    cuts = _cuts(half, added, norm.mu is not None, cast_here)
    found: Cut | None = listed(cuts, norm.shape[-1])
    return found


_PLANS: dict[object, WholeRows | _WideRows] = {}


def _plan(norm: _Norm, recipe: Recipe, unit: int, cast_here: bool) -> WholeRows | _WideRows:
    device, columns = norm.x.device, norm.shape[-1]
    constants: dict[str, Any] = {
        "OFFSET": norm.offset,
        "SUM": getattr(tl, str(norm.x.dtype).removeprefix("torch.")),
        **recipe.constants(),
        **constants_of(device),
        "UNIT": unit,
    }
    way = _cut(norm, cast_here)
    if way is None:
        threads, block = _CHUNK
        launch = _launch.Launch(
            _norm_wide, device, threads=threads, **constants, BLOCK=block, UNROLL=_UNROLL
        )
        return _WideRows(launch, _CHUNK_PROGRAMS * _launch.limits(device).multiprocessors)
    return WholeRows(
        _norm_rows,
        device,
        way,
        columns,
        torch.float32,
        norm.x.element_size() * (1 + (norm.residual is not None)),
        least=recipe.width,
        LOOPED=way.programs > 0,
        **constants,
    )


# ------------------------------------------------------------------------------ operators


def _activation(
    epilogue: Epilogue, recipe: Recipe, given: Mapping[str, Any], scale: Tensor | None
) -> tuple[Any, ...]:
    """An activation or its gradient, quantised; preceded by the gradient of a bias, if any."""
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
    """Write the statistics, and the outputs if given; returns the programs' partial amaxes."""
    columns = norm.shape[-1]
    unit = math.gcd(columns, norm.x_stride, norm.residual_stride, WIDEST_UNIT)
    tensors = (
        norm.x, norm.residual, norm.weight, norm.bias, scale, norm.sum, norm.mu, norm.rsigma,
        *((None,) * 3 if outputs is None else _in_bytes(outputs[0], outputs[1], outputs[3])),
    )  # fmt: skip
    dtypes = [None if it is None else it.dtype for it in tensors]
    key = (*dtypes, *recipe[1:5], norm.offset, columns, unit, with_amaxes, norm.x.device)
    plan = _PLANS.get(key) or add_to_cache(
        _PLANS, key, _plan(norm, recipe, unit, outputs is not None)
    )
    rows = max(1, norm.rows)  # without rows a program writes that their amax is 0
    amaxes = fresh(recipe.op, norm.x, (plan.groups(rows),), torch.float32) if with_amaxes else None
    if norm.rows or with_amaxes:
        plan(
            rows,
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
    """A norm, quantised, followed by its statistics."""
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
