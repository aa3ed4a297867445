"""Root mean square and layer normalization in Triton.

Both are one family of kernels: a row has a mean only where the pointer for it is given.
Rows that fit into registers are read once; a program takes several of them, one tile
after the other, so that parameters are loaded once and the next tile is under way while
one is computed. Wider rows are read in chunks, twice, the second time out of the cache.

The order in which a row is summed depends on its width and dtype alone, so a row's
result is the same whichever rows come with it. Gradients of the parameters are summed
per program, and then over the programs in a fixed order: no atomics, and the same bits
each time on the same device.

What an argument may be is said by the contracts in ``ops``; how a kernel is started is
``_launch``'s business; who runs at all is decided by the manager.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_engine_fl.backends._allocation import allocator
from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import (
    FORWARD_TILES,
    MOST,
    NOT_A_TENSOR,
    PLAIN,
    WIDEST_UNIT,
    block_of,
    by_rows,
    check_fresh,
    check_size,
    is_vector,
    keep,
    listed,
    plain,
    rows_of_tile,
)
from transformer_engine_fl.backends.flagos._sums import SumOfPrograms
from transformer_engine_fl.core.errors import ArgumentError, NotSupportedError
from transformer_engine_fl.ops import normalization as contracts

if TYPE_CHECKING:
    from transformer_engine_fl.core.contract import Contract

__all__ = ["layernorm_bwd", "layernorm_fwd", "rmsnorm_bwd", "rmsnorm_fwd"]


# ---------------------------------------------------------------------- forward kernels
#
# ``columns`` and the row strides count units of UNIT elements, so that the compiler knows
# their divisor and can use wide accesses. The dtype of the statistics is that of all sums.


@triton.jit(do_not_specialize=["rows", "columns", "stride", "eps"])  # type: ignore[untyped-decorator]
def _forward_rows(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    mu_ptr: tl.tensor,
    rsigma_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    stride: tl.int64,
    eps: tl.float64,
    OFFSET: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Rows that fit into registers, ROWS to a program."""
    ACC: tl.constexpr = rsigma_ptr.dtype.element_ty
    columns = columns * UNIT
    column = tl.arange(0, BLOCK)
    inside = column < columns
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None] & inside[None, :]
    start = row.to(tl.int64)
    where = x_ptr + (start * stride * UNIT)[:, None] + column[None, :]
    x = tl.load(where, mask=mask, other=0).to(ACC)
    if mu_ptr is not None:
        mu = tl.sum(x, axis=1) / columns
        tl.store(mu_ptr + row, mu, mask=row < rows)
        x = tl.where(inside[None, :], x - mu[:, None], 0)
    variance = tl.sum(x * x, axis=1) / columns
    rsigma = tl.rsqrt(variance + tl.full((ROWS,), eps, ACC))
    tl.store(rsigma_ptr + row, rsigma, mask=row < rows)
    # Loaded only now: ahead of the sums it would cost registers, and measured slower.
    weight = tl.load(weight_ptr + column, mask=inside, other=0)
    y = x * rsigma[:, None] * (weight.to(ACC) + OFFSET)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=inside, other=0).to(ACC)[None, :]
    out = y_ptr + (start * columns)[:, None] + column[None, :]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "columns", "stride", "eps"])  # type: ignore[untyped-decorator]
def _forward_wide(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    mu_ptr: tl.tensor,
    rsigma_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    stride: tl.int64,
    eps: tl.float64,
    OFFSET: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """One row per program in chunks of BLOCK columns, read twice."""
    ACC: tl.constexpr = rsigma_ptr.dtype.element_ty
    columns = columns * UNIT
    chunks = tl.cdiv(columns, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride * UNIT
    y_ptr += row * columns
    lane = tl.arange(0, BLOCK)
    mean = tl.zeros((BLOCK,), ACC)
    squares = tl.zeros((BLOCK,), ACC)
    for chunk in tl.range(0, chunks, loop_unroll_factor=UNROLL):
        column = chunk * BLOCK + lane
        inside = column < columns
        x = tl.load(x_ptr + column, mask=inside, other=0).to(ACC)
        if mu_ptr is not None:
            # Welford's update in each lane: no difference of large sums, whatever the mean
            ahead = tl.where(inside, x - mean, 0)
            mean += ahead / (chunk + 1)
            squares += ahead * (x - mean)
        else:
            squares += x * x
    mu = tl.zeros((), ACC)
    if mu_ptr is not None:
        count = (columns - lane + (BLOCK - 1)) // BLOCK
        mu = tl.sum(mean * count, axis=0) / columns
        squares += (mean - mu) * (mean - mu) * count
        tl.store(mu_ptr + row, mu)
    variance = tl.sum(squares, axis=0) / columns
    rsigma = tl.rsqrt(variance + tl.full((), eps, ACC))
    tl.store(rsigma_ptr + row, rsigma)
    # From the end: what was read last is the likeliest to be in the cache still.
    for done in tl.range(0, chunks, loop_unroll_factor=UNROLL):
        column = (chunks - 1 - done) * BLOCK + lane
        inside = column < columns
        x = tl.load(x_ptr + column, mask=inside, other=0, eviction_policy="evict_first").to(ACC)
        weight = tl.load(weight_ptr + column, mask=inside, other=0).to(ACC) + OFFSET
        y = (x - mu) * rsigma * weight
        if bias_ptr is not None:
            y += tl.load(bias_ptr + column, mask=inside, other=0).to(ACC)
        tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), mask=inside)


# --------------------------------------------------------------------- backward kernels
#
# With xhat = (x - mu) * rsigma and u = dy * gamma, a row needs mean(u * xhat), and mean(u)
# if it was centred. ``partial`` is [1 or 2, programs, columns]: dgamma and dbeta as each
# program summed them over its rows.


@triton.jit(do_not_specialize=["rows", "columns", "dy_stride", "x_stride"])  # type: ignore[untyped-decorator]
def _backward_rows(
    dy_ptr: tl.tensor,
    x_ptr: tl.tensor,
    mu_ptr: tl.tensor,
    rsigma_ptr: tl.tensor,
    gamma_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    dy_stride: tl.int64,
    x_stride: tl.int64,
    OFFSET: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Rows that fit into registers together with the sums for their parameters."""
    ACC: tl.constexpr = rsigma_ptr.dtype.element_ty
    columns = columns * UNIT
    column = tl.arange(0, BLOCK)
    inside = column < columns
    gamma = tl.load(gamma_ptr + column, mask=inside, other=0)
    dgamma = tl.zeros((ROWS, BLOCK), ACC)
    if mu_ptr is not None:
        dbeta = tl.zeros((ROWS, BLOCK), ACC)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES
    ):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        start = row.to(tl.int64)
        xhat = tl.load(
            x_ptr + (start * x_stride * UNIT)[:, None] + column[None, :],
            mask=mask,
            other=0,
            eviction_policy="evict_first",
        ).to(ACC)
        dy = tl.load(
            dy_ptr + (start * dy_stride * UNIT)[:, None] + column[None, :],
            mask=mask,
            other=0,
            eviction_policy="evict_first",
        ).to(ACC)
        rsigma = tl.load(rsigma_ptr + row, mask=row < rows, other=0)
        if mu_ptr is not None:
            xhat -= tl.load(mu_ptr + row, mask=row < rows, other=0)[:, None]
        xhat *= rsigma[:, None]
        u = dy * (gamma.to(ACC) + OFFSET)[None, :]
        dx = u - xhat * (tl.sum(u * xhat, axis=1) / columns)[:, None]
        if mu_ptr is not None:
            dx -= (tl.sum(u, axis=1) / columns)[:, None]
            dbeta += dy
        dgamma += dy * xhat
        dx *= rsigma[:, None]
        out = dx_ptr + (start * columns)[:, None] + column[None, :]
        tl.store(out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    partial_ptr += tl.program_id(0).to(tl.int64) * columns
    tl.store(partial_ptr + column, tl.sum(dgamma, axis=0), mask=inside)
    if mu_ptr is not None:
        partial_ptr += tl.num_programs(0).to(tl.int64) * columns
        tl.store(partial_ptr + column, tl.sum(dbeta, axis=0), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _row_means(
    dy_ptr: tl.tensor,
    x_ptr: tl.tensor,
    gamma_ptr: tl.tensor,
    mu: tl.tensor,
    rsigma: tl.tensor,
    columns: tl.tensor,
    OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """mean(u * xhat) and mean(u) of one row; the second is 0 unless CENTRED."""
    ACC: tl.constexpr = rsigma.dtype
    lane = tl.arange(0, BLOCK)
    products = tl.zeros((BLOCK,), ACC)
    plain = tl.zeros((BLOCK,), ACC)
    for chunk in tl.range(0, tl.cdiv(columns, BLOCK), loop_unroll_factor=UNROLL):
        column = chunk * BLOCK + lane
        inside = column < columns
        xhat = (tl.load(x_ptr + column, mask=inside, other=0).to(ACC) - mu) * rsigma
        gamma = tl.load(gamma_ptr + column, mask=inside, other=0).to(ACC) + OFFSET
        u = tl.load(dy_ptr + column, mask=inside, other=0).to(ACC) * gamma
        products += u * xhat
        if CENTRED:
            plain += u
    product = tl.sum(products, axis=0) / columns
    if CENTRED:
        return product, tl.sum(plain, axis=0) / columns
    else:
        return product, product * 0


@triton.jit(do_not_specialize=["rows", "columns", "dy_stride", "x_stride"])  # type: ignore[untyped-decorator]
def _backward_means(
    dy_ptr: tl.tensor,
    x_ptr: tl.tensor,
    mu_ptr: tl.tensor,
    rsigma_ptr: tl.tensor,
    gamma_ptr: tl.tensor,
    means_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    dy_stride: tl.int64,
    x_stride: tl.int64,
    OFFSET: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """One row per program: its two means, for rows that too many programs share."""
    row = tl.program_id(0).to(tl.int64)
    rsigma = tl.load(rsigma_ptr + row)
    mu = rsigma * 0
    if mu_ptr is not None:
        mu = tl.load(mu_ptr + row)
    product, plain = _row_means(
        dy_ptr + row * dy_stride * UNIT,
        x_ptr + row * x_stride * UNIT,
        gamma_ptr,
        mu,
        rsigma,
        columns * UNIT,
        OFFSET,
        mu_ptr is not None,
        BLOCK,
        UNROLL,
    )
    tl.store(means_ptr + 2 * row, product)
    tl.store(means_ptr + 2 * row + 1, plain)


@triton.jit(do_not_specialize=["rows", "columns", "dy_stride", "x_stride"])  # type: ignore[untyped-decorator]
def _backward_wide(
    dy_ptr: tl.tensor,
    x_ptr: tl.tensor,
    mu_ptr: tl.tensor,
    rsigma_ptr: tl.tensor,
    gamma_ptr: tl.tensor,
    means_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    dy_stride: tl.int64,
    x_stride: tl.int64,
    OFFSET: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """One row at a time, for CHUNKS chunks of its columns; the rest is other programs'.

    The sums for the parameters of these columns stay in registers over all rows. The
    means of the whole row are read, or worked out by each program that shares the row.
    """
    ACC: tl.constexpr = rsigma_ptr.dtype.element_ty
    columns = columns * UNIT
    lane = tl.program_id(1) * (CHUNKS * BLOCK) + tl.arange(0, BLOCK)
    dgammas = (tl.zeros((BLOCK,), ACC),) * CHUNKS
    dbetas = (tl.zeros((BLOCK,), ACC),) * CHUNKS
    for index in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.full((), index, tl.int64)
        dy_row = dy_ptr + row * dy_stride * UNIT
        x_row = x_ptr + row * x_stride * UNIT
        dx_row = dx_ptr + row * columns
        rsigma = tl.load(rsigma_ptr + row)
        mu = rsigma * 0
        if mu_ptr is not None:
            mu = tl.load(mu_ptr + row)
        if means_ptr is None:
            product, plain = _row_means(
                dy_row, x_row, gamma_ptr, mu, rsigma, columns, OFFSET, mu_ptr is not None, BLOCK,
                UNROLL,
            )  # fmt: skip
        else:
            product = tl.load(means_ptr + 2 * row)
            plain = tl.load(means_ptr + 2 * row + 1)
        dgammas_before = dgammas
        dbetas_before = dbetas
        dgammas = ()
        dbetas = ()
        for chunk in tl.static_range(CHUNKS):
            column = chunk * BLOCK + lane
            inside = column < columns
            x = tl.load(x_row + column, mask=inside, other=0).to(ACC)
            dy = tl.load(dy_row + column, mask=inside, other=0).to(ACC)
            gamma = tl.load(gamma_ptr + column, mask=inside, other=0).to(ACC) + OFFSET
            xhat = (x - mu) * rsigma
            dx = (dy * gamma - xhat * product - plain) * rsigma
            tl.store(dx_row + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
            dgammas += (dgammas_before[chunk] + dy * xhat,)
            if mu_ptr is not None:
                dbetas += (dbetas_before[chunk] + dy,)
            else:
                dbetas += (dbetas_before[chunk],)
    partial_ptr += tl.program_id(0).to(tl.int64) * columns
    other_ptr = partial_ptr + tl.num_programs(0).to(tl.int64) * columns
    for chunk in tl.static_range(CHUNKS):
        column = chunk * BLOCK + lane
        tl.store(partial_ptr + column, dgammas[chunk], mask=column < columns)
        if mu_ptr is not None:
            tl.store(other_ptr + column, dbetas[chunk], mask=column < columns)


# --------------------------------------------------------------------------- heuristics


class _Tiles(NamedTuple):
    """How the backward cuts rows that fit into registers.

    Attributes:
        threads: of one program.
        programs: per multiprocessor, all of them at work at once and each on many tiles.
        stages: tiles under way, counting the one that is computed.
    """

    threads: int
    programs: int
    stages: int


class _Chunks(NamedTuple):
    """How wider rows are cut.

    Attributes:
        threads, programs: as above.
        block: columns of a chunk.
        chunks: chunks of one program, whose sums for the parameters it holds.
    """

    threads: int
    programs: int
    block: int
    chunks: int


# By width: columns rounded up to a power of two, float64 counting double. The widest row
# listed is the widest that is kept in registers: up to 32 columns a thread in the forward,
# 16 in the backward, which also holds the sums for the parameters.
_BACKWARD_TILE = 4096  # width of a tile of several rows
_FORWARD_CHUNK, _FORWARD_CHUNK_THREADS = 4096, 256
_BACKWARD_TILES = {
    4096: _Tiles(threads=256, programs=2, stages=3),
    8192: _Tiles(threads=512, programs=1, stages=3),
}
# Sums of 64 columns a thread are what fits: half of them dbeta where rows are centred. The
# last entry also serves whatever is wider, its columns divided among several programs.
_BACKWARD_CHUNKS = {
    16384: _Chunks(threads=256, programs=2, block=2048, chunks=8),
    32768: _Chunks(threads=512, programs=1, block=4096, chunks=8),
}
_BACKWARD_CHUNKS_CENTRED = {
    16384: _Chunks(threads=512, programs=1, block=4096, chunks=4),
}
# Each program that shares a row reads all of it; with more of them a first kernel does.
_MOST_SHARING = 2
_MEANS_THREADS = 256
_UNROLL = 4


def _stages(tiles: _Tiles, tile_bytes: int, device: torch.device) -> int:
    """As many stages as wanted, or as shared memory has room for."""
    room: int = _launch.limits(device).shared_bytes // (tile_bytes * tiles.programs)
    return max(1, min(tiles.stages, 1 + room))


def _most_programs(programs: int, sharing: int, device: torch.device) -> int:
    """Programs, or groups of ``sharing`` of them, that start at once; ``programs`` as above."""
    return max(1, programs * _launch.limits(device).multiprocessors // sharing)


# -------------------------------------------------------------------------------- plans
#
# A plan is what a call needs beyond its tensors: made once per dtypes, width, options and
# device, so that a call is a look-up, its allocations and its launches.


class _ForwardPlan(NamedTuple):
    """How to run a forward.

    Attributes:
        launch: the kernel.
        statistics: dtype of mu and rsigma.
        unit: see the kernels.
        tile: rows of a program.
    """

    launch: _launch.Launch
    statistics: torch.dtype
    unit: int
    tile: int


class _BackwardPlan(NamedTuple):
    """How to run a backward.

    Attributes:
        launch: the kernel for dx and the sums of each program.
        means: the kernel for the means of each row, where one must go ahead.
        total: the sum over the programs.
        unit: see the kernels.
        tile: rows that a program handles at a time.
        most: programs that start at once on rows of their own.
        sharing: programs among which a row's columns are divided; 0 where they are not.
    """

    launch: _launch.Launch
    means: _launch.Launch | None
    total: SumOfPrograms
    unit: int
    tile: int
    most: int
    sharing: int


_FORWARD_PLANS: dict[object, _ForwardPlan] = {}
_BACKWARD_PLANS: dict[object, _BackwardPlan] = {}


def _plan_forward(
    columns: int, dtype: torch.dtype, offset: bool, unit: int, device: torch.device
) -> _ForwardPlan:
    double = 2 if dtype == torch.float64 else 1
    block = block_of(columns)
    statistics = contracts.statistics_dtype(dtype)
    make = functools.partial(_launch.Launch, device=device, OFFSET=int(offset), UNIT=unit)
    tile: tuple[int, int] | None = listed(FORWARD_TILES, block * double)
    if tile is None:
        launch = make(
            _forward_wide,
            threads=_FORWARD_CHUNK_THREADS,
            BLOCK=_FORWARD_CHUNK // double,
            UNROLL=_UNROLL,
        )
        return _ForwardPlan(launch, statistics, unit, 1)
    threads, width = tile
    rows = rows_of_tile(width, block * double)
    launch = make(_forward_rows, threads=threads, ROWS=rows, BLOCK=block)
    return _ForwardPlan(launch, statistics, unit, rows)


def _plan_backward(
    columns: int,
    dtype: torch.dtype,
    dy_dtype: torch.dtype,
    centred: bool,
    offset: bool,
    unit: int,
    device: torch.device,
) -> _BackwardPlan:
    double = 2 if dtype == torch.float64 else 1
    block = block_of(columns)
    make = functools.partial(_launch.Launch, device=device, UNIT=unit)
    total = SumOfPrograms(columns, unit, device)
    tiles: _Tiles | None = listed(_BACKWARD_TILES, block * double)
    if tiles is not None:
        rows = rows_of_tile(_BACKWARD_TILE, block * double)
        row_bytes = block * (dtype.itemsize + dy_dtype.itemsize)
        launch = make(
            _backward_rows,
            threads=tiles.threads,
            resident=tiles.programs,
            OFFSET=int(offset),
            ROWS=rows,
            BLOCK=block,
            STAGES=_stages(tiles, rows * row_bytes, device),
        )
        most = _most_programs(tiles.programs, 1, device)
        return _BackwardPlan(launch, None, total, unit, rows, most, 0)
    table = _BACKWARD_CHUNKS_CENTRED if centred else _BACKWARD_CHUNKS
    chunks: _Chunks = listed(table, block * double) or list(table.values())[-1]
    constants: dict[str, Any] = {"OFFSET": int(offset), "BLOCK": chunks.block // double}
    sharing = -(-columns * double // (chunks.block * chunks.chunks))
    launch = make(
        _backward_wide,
        threads=chunks.threads,
        resident=chunks.programs,
        **constants,
        CHUNKS=chunks.chunks,
        UNROLL=_UNROLL,
    )
    means = None
    if sharing > _MOST_SHARING:
        means = make(_backward_means, threads=_MEANS_THREADS, **constants, UNROLL=_UNROLL)
    most = _most_programs(chunks.programs, sharing, device)
    return _BackwardPlan(launch, means, total, unit, 1, most, sharing)


# ---------------------------------------------------------------------------- operators
#
# Each call takes a quick look at its arguments; when all is plain and dense and the plan is
# there, that look was the validation. Whatever else it finds goes to the contract's check,
# is made dense, or is declined.


def _examine_forward(
    op: Contract[..., Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
    out_dtype: torch.dtype | None,
) -> tuple[_ForwardPlan, Tensor, Tensor, Tensor | None, float, int]:
    """The plan, and the arguments as the kernels take them with the distance of two rows."""
    centred = op is contracts.layernorm_fwd
    extra = (bias,) if centred else ()
    options = {"zero_centered_gamma": zero_centered_gamma, "out_dtype": out_dtype}
    op.check(input, weight, *extra, eps=eps, **options)
    if not isinstance(eps, int | float):
        raise NotSupportedError(f"{op.name}: eps is a {type(eps).__name__}, not a number yet")
    columns, device = input.shape[-1], input.device
    check_size(op.name, "columns", columns)
    input, distance = by_rows(plain(op.name, "input", input))
    weight = plain(op.name, "weight", weight).contiguous()
    bias = None if bias is None else plain(op.name, "bias", bias).contiguous()
    kinds = (input.dtype, weight.dtype, None if bias is None else bias.dtype, out_dtype)
    unit = math.gcd(columns, distance, WIDEST_UNIT)
    # Where rows lie one after the other, the next quick look finds the plan.
    key = (centred, *kinds, columns, zero_centered_gamma, device)
    plan = _FORWARD_PLANS.get(key if distance == columns else (*key, unit))
    if plan is None:
        plan = _plan_forward(columns, input.dtype, zero_centered_gamma, unit, device)
        keep(_FORWARD_PLANS, key if distance == columns else (*key, unit), plan)
    return plan, input, weight, bias, float(eps), distance


def _forward(
    op: Contract[..., Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Output, mu (None unless the rows are centred) and rsigma."""
    centred = op is contracts.layernorm_fwd
    plan: _ForwardPlan | None = None
    columns = 0
    try:
        distance = columns = input.shape[-1]
        device = input.device
        if (
            type(input) in PLAIN
            and columns > 1  # one number may be dense and yet have its sign kept apart
            and input.is_contiguous()
            and is_vector(weight, columns, device)
            and (bias is None or is_vector(bias, columns, device))
            and type(eps) is float
            and eps >= 0
            and type(zero_centered_gamma) is bool
        ):
            kinds = (input.dtype, weight.dtype, None if bias is None else bias.dtype, out_dtype)
            plan = _FORWARD_PLANS.get((centred, *kinds, columns, zero_centered_gamma, device))
    except NOT_A_TENSOR:
        pass
    if plan is None:
        plan, input, weight, bias, eps, distance = _examine_forward(
            op, input, weight, bias, eps, zero_centered_gamma, out_dtype
        )
        columns, device = input.shape[-1], input.device
    rows = input.numel() // columns
    if rows > MOST:
        check_size(op.name, "rows", rows)
    empty = allocator(device)
    if out_dtype is None and distance == columns:
        output = empty(tuple(input.shape), input.stride(), input.dtype)
    else:
        output = torch.empty(input.shape, dtype=out_dtype or input.dtype, device=device)
    check_fresh(op.name, output)
    rsigma = empty((rows,), (1,), plan.statistics)
    mu = empty((rows,), (1,), plan.statistics) if centred else None
    if rows:
        unit = plan.unit
        plan.launch(
            (-(-rows // plan.tile), 1),
            (input, weight, bias, output, mu, rsigma),
            (rows, columns // unit, distance // unit, eps),
        )
    return output, mu, rsigma


def _examine_backward(
    op: Contract[..., Any],
    dy: Tensor,
    x: Tensor,
    mu: Tensor | None,
    rsigma: Tensor,
    gamma: Tensor,
    zero_centered_gamma: bool,
) -> tuple[_BackwardPlan, Tensor, Tensor, Tensor | None, Tensor, Tensor, int, int]:
    """The plan, and the arguments as the kernels take them with the distances of two rows."""
    centred = op is contracts.layernorm_bwd
    statistics = (mu, rsigma) if centred else (rsigma,)
    op.check(dy, x, *statistics, gamma, zero_centered_gamma=zero_centered_gamma)
    if centred and mu is None:
        raise ArgumentError(op.name, "mu", "None", "one value per row of 'x'")
    columns, device = x.shape[-1], x.device
    check_size(op.name, "columns", columns)
    x, x_distance = by_rows(plain(op.name, "x", x))
    dy, dy_distance = by_rows(plain(op.name, "dy", dy))
    mu = None if mu is None else plain(op.name, "mu", mu).contiguous()
    rsigma = plain(op.name, "rsigma", rsigma).contiguous()
    gamma = plain(op.name, "gamma", gamma).contiguous()
    unit = math.gcd(columns, x_distance, dy_distance, WIDEST_UNIT)
    dense = x_distance == columns == dy_distance
    key = (centred, dy.dtype, x.dtype, gamma.dtype, columns, zero_centered_gamma, device)
    plan = _BACKWARD_PLANS.get(key if dense else (*key, unit))
    if plan is None:
        plan = _plan_backward(
            columns, x.dtype, dy.dtype, centred, zero_centered_gamma, unit, device
        )
        keep(_BACKWARD_PLANS, key if dense else (*key, unit), plan)
    return plan, dy, x, mu, rsigma, gamma, dy_distance, x_distance


def _backward(
    op: Contract[..., Any],
    dy: Tensor,
    x: Tensor,
    mu: Tensor | None,
    rsigma: Tensor,
    gamma: Tensor,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx, dgamma and dbeta (None unless the rows are centred)."""
    centred = op is contracts.layernorm_bwd
    plan: _BackwardPlan | None = None
    columns = 0
    try:
        dy_distance = x_distance = columns = x.shape[-1]
        device = x.device
        if (
            type(x) in PLAIN
            and type(dy) in PLAIN
            and columns > 1  # as in the forward
            and x.is_contiguous()
            and dy.is_contiguous()
            and dy.shape == x.shape
            and dy.device == device
            and is_vector(gamma, columns, device)
            and is_vector(rsigma, rows := x.numel() // columns, device)
            and rsigma.dtype == (statistics := contracts.statistics_dtype(x.dtype))
            and (mu is None or (is_vector(mu, rows, device) and mu.dtype == statistics))
            and (mu is None) is not centred
            and type(zero_centered_gamma) is bool
        ):
            plan = _BACKWARD_PLANS.get(
                (centred, dy.dtype, x.dtype, gamma.dtype, columns, zero_centered_gamma, device)
            )
    except NOT_A_TENSOR:
        pass
    if plan is None:
        plan, dy, x, mu, rsigma, gamma, dy_distance, x_distance = _examine_backward(
            op, dy, x, mu, rsigma, gamma, zero_centered_gamma
        )
        columns, device = x.shape[-1], x.device
    rows = x.numel() // columns
    if rows > MOST:
        check_size(op.name, "rows", rows)
    empty = allocator(device)
    if x_distance == columns:
        dx = empty(tuple(x.shape), x.stride(), x.dtype)
    else:
        dx = torch.empty(x.shape, dtype=x.dtype, device=device)
    check_fresh(op.name, dx)
    if not rows:
        return dx, torch.zeros_like(gamma), torch.zeros_like(gamma) if centred else None
    dgamma = empty((columns,), (1,), gamma.dtype)
    dbeta = empty((columns,), (1,), gamma.dtype) if centred else None
    programs = min(-(-rows // plan.tile), plan.most)
    sums = 1 + centred
    partial = empty((sums * programs * columns,), (1,), rsigma.dtype)
    unit = plan.unit
    numbers = (rows, columns // unit, dy_distance // unit, x_distance // unit)
    if plan.sharing == 0:
        plan.launch((programs, 1), (dy, x, mu, rsigma, gamma, dx, partial), numbers)
    else:
        means = None
        if plan.means is not None:
            means = torch.empty(2 * rows, dtype=rsigma.dtype, device=device)
            plan.means((rows, 1), (dy, x, mu, rsigma, gamma, means), numbers)
        plan.launch(
            (programs, plan.sharing), (dy, x, mu, rsigma, gamma, means, dx, partial), numbers
        )
    plan.total(partial, dgamma, dbeta, programs)
    return dx, dgamma, dbeta


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``rmsnorm_fwd`` of the contract."""
    output, _, rsigma = _forward(
        contracts.rmsnorm_fwd, input, weight, None, eps, zero_centered_gamma, out_dtype
    )
    return output, rsigma


def rmsnorm_bwd(
    dy: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """``rmsnorm_bwd`` of the contract."""
    dx, dgamma, _ = _backward(
        contracts.rmsnorm_bwd, dy, x, None, rsigma, gamma, zero_centered_gamma
    )
    return dx, dgamma


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``layernorm_fwd`` of the contract."""
    output, mu, rsigma = _forward(
        contracts.layernorm_fwd, input, weight, bias, eps, zero_centered_gamma, out_dtype
    )
    return output, cast(Tensor, mu), rsigma


def layernorm_bwd(
    dy: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``layernorm_bwd`` of the contract."""
    dx, dgamma, dbeta = _backward(
        contracts.layernorm_bwd, dy, x, mu, rsigma, gamma, zero_centered_gamma
    )
    return dx, dgamma, cast(Tensor, dbeta)
