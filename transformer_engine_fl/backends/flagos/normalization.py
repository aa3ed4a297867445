"""Root mean square and layer normalization in Triton.

The same kernels serve both: a row has a mean only where the pointer for it is given. Rows that fit
into registers are read once; in the backward a program loops over tiles of them, so that the
parameters are loaded once and the next tile is prefetched while one is computed. A wider row is
split over several programs, see ``_rows``. Adding a residual before the norm, or a gradient after
it, is part of the same kernels.

The order in which a row is summed depends on its width and dtype alone, so a row's result is the
same whichever rows are beside it and wherever they lie: rows whose stride or address is no multiple
of the access that dense rows of their width allow are copied first. Gradients of the parameters are
summed per program, and then over the programs in a fixed order: no atomics, and the same bits each
time on the same device.

The contracts in ``ops`` define the arguments, ``_launch`` starts the kernels, and the manager
chooses the implementation.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_engine_fl.backends._allocation import allocator
from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends.flagos._arguments import (
    ALIGNMENT,
    MOST,
    NOT_A_TENSOR,
    PLAIN,
    WIDEST_UNIT,
    add_to_cache,
    check_fresh,
    check_size,
    is_vector,
    plain,
    rows_to_sum,
)
from transformer_engine_fl.backends.flagos._dependent import (
    has_dependent_launches,
    release_dependents,
)
from transformer_engine_fl.backends.flagos._exact import mean_of, mean_of_all
from transformer_engine_fl.backends.flagos._fetch import fetch
from transformer_engine_fl.backends.flagos._moments import gain_of, moments_of_parts, read_input
from transformer_engine_fl.backends.flagos._rows import (
    Cut,
    SharedRows,
    WholeRows,
    as_stored,
    begin_epochs,
    cut,
    cut_choice,
    existing,
    part_of_row,
    per_column,
    per_row,
    post,
    rows_of,
    two_sums,
    wait_for,
    within,
)
from transformer_engine_fl.backends.flagos._sums import SumOfPrograms
from transformer_engine_fl.core.errors import ArgumentError, NotSupportedError
from transformer_engine_fl.ops import normalization as contracts

if TYPE_CHECKING:
    from transformer_engine_fl.core.contract import Contract

__all__ = [
    "layernorm_bwd",
    "layernorm_fwd",
    "rmsnorm_bwd",
    "rmsnorm_bwd_add",
    "rmsnorm_fwd",
    "rmsnorm_fwd_add",
]


# ---------------------------------------------------------------------- forward kernels
#
# ``columns`` and the row strides count units of UNIT elements, so that the compiler knows a divisor
# of theirs and can vectorise accesses. All sums have the dtype of the statistics. A residual has
# the row stride of x.


@triton.jit(do_not_specialize=["rows", "columns", "stride", "eps"])  # type: ignore[untyped-decorator]
def _forward_rows(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    mu_ptr: tl.tensor,
    rsigma_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    stride: tl.int64,
    eps: tl.float64,
    OFFSET: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    EXACT: tl.constexpr,
    NARROW: tl.constexpr,
    LANES: tl.constexpr,
    ONCE: tl.constexpr,
    LOW_OCCUPANCY: tl.constexpr,
    SUM: tl.constexpr,
) -> None:
    """Rows that fit into registers, ROWS to a program, in PARTS; see ``_rows``.

    EXACT: the parts have no columns beyond the row's. ONCE: a row's numbers and their squares are
    summed in one reduction. LOW_OCCUPANCY: a multiprocessor has one program at most. A program has
    one tile: a loop over tiles took registers, and so lowered occupancy.
    """
    ACC: tl.constexpr = rsigma_ptr.dtype.element_ty
    columns = columns * UNIT
    row = rows_of(tl.program_id(0), ROWS)
    exists = existing(row, rows, ROWS)
    start = row.to(tl.int64)
    x_ptr += per_row(start * stride * UNIT, ROWS)
    y_ptr += per_row(start * columns, ROWS)
    if residual_ptr is not None:
        residual_ptr += per_row(start * stride * UNIT, ROWS)
        sum_ptr += per_row(start * columns, ROWS)
    x = ()
    for part in tl.static_range(len(PARTS)):
        column, inside = part_of_row(PARTS, part, columns, EXACT)
        place = per_column(column, ROWS)
        mask = per_row(exists, ROWS) & per_column(inside, ROWS)
        one = read_input(x_ptr, residual_ptr, sum_ptr, place, place, mask, SUM)
        x += (one,)  # type: ignore[assignment]
    # Loading gamma before the sums takes registers. That measured slower, except for these rows,
    # and for few rows, which have the registers and so wait for memory once instead of twice.
    AHEAD: tl.constexpr = LOW_OCCUPANCY or (
        PARTS == (4096,) and mu_ptr is None and residual_ptr is None
    )
    gamma = ()
    beta = ()
    if AHEAD:
        for part in tl.static_range(len(PARTS)):
            column, inside = part_of_row(PARTS, part, columns, EXACT)
            gamma += (fetch(weight_ptr + column, inside),)  # type: ignore[assignment]
            if bias_ptr is not None:
                beta += (fetch(bias_ptr + column, inside),)  # type: ignore[assignment]
    mu, rsigma = moments_of_parts(
        x, x_ptr, row, columns, eps, ACC, mu_ptr is not None, ONCE, ROWS, PARTS, EXACT, NARROW,
        LANES, 128 // SUM.primitive_bitwidth,
    )  # fmt: skip
    for part in tl.static_range(len(PARTS)):
        column, inside = part_of_row(PARTS, part, columns, EXACT)
        weight = gamma[part] if AHEAD else fetch(weight_ptr + column, inside)
        y = as_stored(x[part], NARROW).to(ACC)
        if mu_ptr is not None:
            y -= per_row(mu, ROWS)
        y = y * per_row(rsigma, ROWS) * per_column(gain_of(weight, ACC, OFFSET), ROWS)
        if bias_ptr is not None:
            bias = beta[part] if AHEAD else fetch(bias_ptr + column, inside)
            y += per_column(bias.to(ACC), ROWS)
        mask = per_row(exists, ROWS) & per_column(inside, ROWS)
        tl.store(y_ptr + per_column(column, ROWS), y.to(y_ptr.dtype.element_ty), mask=mask)
    # Last: stored right after the sums, they slowed rows in parts down by up to a fifth.
    tl.store(rsigma_ptr + row, rsigma, mask=exists)
    if mu_ptr is not None:
        tl.store(mu_ptr + row, mu, mask=exists)


_CANCELS = tl.constexpr(8)
"""The sum of squares around 0 may be at most so many times that around the mean."""
_TOO_LARGE = tl.constexpr(float("inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _post_squares(
    x: tl.tensor,
    inside: tl.tensor,
    shares_ptr: tl.tensor,
    row: tl.tensor,
    epoch: tl.tensor,
    count: tl.tensor,
    PIECES: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    HALF: tl.constexpr,
    STEP: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """Post this piece's sum of squares; with two SUMS that around its mean, and the mean.

    HALF: numbers of 2 bytes and their squares are summed in one reduction. They are summed again
    around their mean only if most of the sum of squares is the mean's part, where the difference
    would cancel, or if the sum of squares overflows.
    """
    x = x.to(ACC)
    mean = tl.zeros((), ACC)
    squares = mean
    if SUMS == 1:
        squares = tl.sum(x * x, axis=0)
    elif HALF:
        all_squares, total = two_sums(x * x, x)
        mean = mean_of_all(total, BLOCK) if EXACT else mean_of(total, count)
        squares = all_squares - total * mean
        if (squares * _CANCELS < all_squares) | (all_squares == _TOO_LARGE):
            squares = _squares_around(x, mean, inside, EXACT)
    else:
        total = tl.sum(x, axis=0)
        mean = mean_of_all(total, BLOCK) if EXACT else mean_of(total, count)
        squares = _squares_around(x, mean, inside, EXACT)
    post(shares_ptr, row, epoch, squares, mean, PIECES, SUMS, STEP)


@triton.jit  # type: ignore[untyped-decorator]
def _squares_around(
    x: tl.tensor, mean: tl.tensor, inside: tl.tensor, EXACT: tl.constexpr
) -> tl.tensor:
    """The sum of squares around a mean of a vector's elements inside the row."""
    x -= mean
    if not EXACT:
        x = tl.where(inside, x, 0)
    return tl.sum(x * x, axis=0)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["rows", "columns", "stride", "eps", "first_epoch"]
)
def _forward_shared(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    mu_ptr: tl.tensor,
    rsigma_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    stride: tl.int64,
    eps: tl.float64,
    first_epoch: tl.int64,
    OFFSET: tl.constexpr,
    UNIT: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    HALF: tl.constexpr,
    SUM: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """A piece of BLOCK columns of one row after the other; see ``_rows``."""
    ACC: tl.constexpr = rsigma_ptr.dtype.element_ty
    SUMS: tl.constexpr = 1 if mu_ptr is None else 2
    columns = columns * UNIT
    stride = stride * UNIT
    first = tl.program_id(0) * BLOCK
    column = first + tl.arange(0, BLOCK)
    inside = within(column, columns, EXACT)
    mine = tl.minimum(columns - first, BLOCK)
    pieces = tl.arange(0, triton.next_power_of_2(PIECES))
    count = tl.minimum(tl.maximum(columns - pieces * BLOCK, 0), BLOCK).to(ACC)
    groups = tl.num_programs(1)
    begin_epochs(shares_ptr, PIECES, SUMS, STEP)
    following_epoch = first_epoch.to(tl.int32)
    # Held beside beta, gamma would take the registers of a program or two. So with a mean both are
    # loaded for each row before the wait, in a branch, which keeps the compiler from pipelining
    # them through shared memory: they come from L1.
    if mu_ptr is None:
        weight = fetch(weight_ptr + column, inside)
    x = tl.zeros((BLOCK,), SUM)
    x_next = x
    # With a residual, the prefetched sums wait in registers, not their operands in shared memory:
    # half as much data, and the loads keep the hint of ``fetch``.
    if residual_ptr is not None:
        row = tl.program_id(1).to(tl.int64)
        x_next = read_input(
            x_ptr, residual_ptr, sum_ptr, row * stride + column, row * columns + column,
            inside, SUM,
        )  # fmt: skip
    for index in tl.range(tl.program_id(1) - groups, rows, groups, num_stages=STAGES):
        row = tl.full((), index, tl.int64)
        following = row + groups
        fetched_row = following if residual_ptr is None else following + groups
        x_asked = read_input(
            x_ptr, residual_ptr, sum_ptr, fetched_row * stride + column,
            fetched_row * columns + column, inside & (fetched_row < rows), SUM,
        )  # fmt: skip
        if residual_ptr is None:
            x_next = x_asked
        if STEP != "rest":
            _post_squares(
                x_next, inside, shares_ptr, following, following_epoch, mine, PIECES, SUMS, BLOCK,
                EXACT, HALF, STEP, ACC,
            )  # fmt: skip
        if STEP != "sums" and index >= 0:
            # For wider numbers there are no registers for both.
            AHEAD: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth == 16
            if mu_ptr is not None and AHEAD:
                weight = fetch(weight_ptr + column, inside)
            if bias_ptr is not None and AHEAD:
                bias = fetch(bias_ptr + column, inside)
            squares, means = wait_for(shares_ptr, row, following_epoch - 1, 0, PIECES, SUMS, STEP)
            if mu_ptr is not None:
                if not AHEAD:
                    weight = fetch(weight_ptr + column, inside)
                if EXACT:
                    mu = mean_of_all(tl.sum(means, axis=0), PIECES)
                else:
                    mu = mean_of(tl.sum(means * count, axis=0), columns)
                apart = tl.where(count > 0, means - mu, 0)  # 0 for lanes beyond the last piece
                squares += apart * apart * count
                if tl.program_id(0) == 0:
                    tl.store(mu_ptr + row, mu)
            variance = tl.sum(squares, axis=0) / columns
            rsigma = tl.rsqrt(variance + tl.full((), eps, ACC))
            if tl.program_id(0) == 0:
                tl.store(rsigma_ptr + row, rsigma)
            y = x.to(ACC) * rsigma
            if mu_ptr is not None:
                # Not (x - mu) * rsigma, which takes a hundredth longer: so a result is off by half
                # a unit of mu * rsigma.
                y -= mu * rsigma
            y *= gain_of(weight, ACC, OFFSET)
            if bias_ptr is not None:
                if not AHEAD:
                    bias = fetch(bias_ptr + column, inside)
                y += bias.to(ACC)
            out = y_ptr + row * columns + column
            tl.store(out, y.to(y_ptr.dtype.element_ty), mask=inside)
        x = x_next
        x_next = x_asked
        following_epoch += 1


# --------------------------------------------------------------------- backward kernels
#
# With xhat = (x - mu) * rsigma and u = dy * gamma, a row needs mean(u * xhat), and mean(u) if it
# has a mean. ``partial`` is [1 or 2, programs, columns]: dgamma and dbeta as each program summed
# them over its rows. What is added to dx has the row stride of x. HAS_DEPENDENT: the sum over the
# programs is a dependent launch.


@triton.jit(do_not_specialize=["rows", "columns", "dy_stride", "x_stride"])  # type: ignore[untyped-decorator]
def _backward_rows(
    dy_ptr: tl.tensor,
    x_ptr: tl.tensor,
    add_ptr: tl.tensor,
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
    HAS_DEPENDENT: tl.constexpr,
) -> None:
    """Rows that fit into registers together with the parameters' gradients."""
    release_dependents(HAS_DEPENDENT)
    ACC: tl.constexpr = rsigma_ptr.dtype.element_ty
    columns = columns * UNIT
    column = tl.arange(0, BLOCK)
    inside = column < columns
    gamma = fetch(gamma_ptr + column, inside)
    dgamma = tl.zeros((ROWS, BLOCK), ACC)
    if mu_ptr is not None:
        dbeta = tl.zeros((ROWS, BLOCK), ACC)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES
    ):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        start = row.to(tl.int64)
        x_place = (start * x_stride * UNIT)[:, None] + column[None, :]
        dy_place = (start * dy_stride * UNIT)[:, None] + column[None, :]
        xhat = fetch(x_ptr + x_place, mask).to(ACC)
        dy = fetch(dy_ptr + dy_place, mask).to(ACC)
        if add_ptr is not None:
            add = fetch(add_ptr + x_place, mask)
        rsigma = fetch(rsigma_ptr + row, row < rows)
        if mu_ptr is not None:
            xhat -= fetch(mu_ptr + row, row < rows)[:, None]
        xhat *= rsigma[:, None]
        u = dy * gain_of(gamma, ACC, OFFSET)[None, :]
        dx = u - xhat * (tl.sum(u * xhat, axis=1) / columns)[:, None]
        if mu_ptr is not None:
            dx -= (tl.sum(u, axis=1) / columns)[:, None]
            dbeta += dy
        dgamma += dy * xhat
        dx *= rsigma[:, None]
        if add_ptr is not None:
            dx += add.to(ACC)
        out = dx_ptr + (start * columns)[:, None] + column[None, :]
        tl.store(out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    partial_ptr += tl.program_id(0).to(tl.int64) * columns
    tl.store(partial_ptr + column, tl.sum(dgamma, axis=0), mask=inside)
    if mu_ptr is not None:
        partial_ptr += tl.num_programs(0).to(tl.int64) * columns
        tl.store(partial_ptr + column, tl.sum(dbeta, axis=0), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _post_means(
    dy: tl.tensor,
    x: tl.tensor,
    gamma: tl.tensor,
    mu: tl.tensor,
    rsigma: tl.tensor,
    shares_ptr: tl.tensor,
    row: tl.tensor,
    epoch: tl.tensor,
    OFFSET: tl.constexpr,
    PIECES: tl.constexpr,
    SUMS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Post this piece's shares of the sums of u * xhat and of u."""
    ACC: tl.constexpr = rsigma.dtype
    u = dy.to(ACC) * gain_of(gamma, ACC, OFFSET)
    if SUMS == 2:
        products, plain = two_sums(u * (x.to(ACC) * rsigma - mu * rsigma), u)
    else:
        products = tl.sum(u * (x.to(ACC) * rsigma), axis=0)
        plain = products
    post(shares_ptr, row, epoch, products, plain, PIECES, SUMS, STEP)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["rows", "columns", "dy_stride", "x_stride", "first_epoch"]
)
def _backward_shared(
    dy_ptr: tl.tensor,
    x_ptr: tl.tensor,
    add_ptr: tl.tensor,
    mu_ptr: tl.tensor,
    rsigma_ptr: tl.tensor,
    gamma_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    dy_stride: tl.int64,
    x_stride: tl.int64,
    first_epoch: tl.int64,
    OFFSET: tl.constexpr,
    UNIT: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    APART: tl.constexpr,
    STEP: tl.constexpr,
    HAS_DEPENDENT: tl.constexpr,
) -> None:
    """A piece of BLOCK columns of one row after the other; see ``_rows``.

    The parameters' gradients in these columns stay in registers over all rows. EXACT: the pieces
    have no columns beyond the row's. APART: posting the next row and finishing this one are in
    branches of their own, which takes fewer registers.
    """
    release_dependents(HAS_DEPENDENT)
    ACC: tl.constexpr = rsigma_ptr.dtype.element_ty
    SUMS: tl.constexpr = 1 if mu_ptr is None else 2
    columns = columns * UNIT
    dy_stride = dy_stride * UNIT
    x_stride = x_stride * UNIT
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tl.full((BLOCK,), True, tl.int1) if EXACT else column < columns
    groups = tl.num_programs(1)
    begin_epochs(shares_ptr, PIECES, SUMS, STEP)
    epoch = first_epoch.to(tl.int32)
    gamma = fetch(gamma_ptr + column, inside)
    dgamma = tl.zeros((BLOCK,), ACC)
    if mu_ptr is not None:
        dbeta = tl.zeros((BLOCK,), ACC)
    begin = tl.program_id(1)  # there are no more groups than rows
    rsigma = tl.zeros((), ACC)
    mu = rsigma
    if APART:
        begin -= groups
        epoch -= 1
        x = tl.zeros((BLOCK,), x_ptr.dtype.element_ty)
        dy = tl.zeros((BLOCK,), dy_ptr.dtype.element_ty)
    else:
        row = begin.to(tl.int64)
        x = fetch(x_ptr + row * x_stride + column, inside)
        dy = fetch(dy_ptr + row * dy_stride + column, inside)
        rsigma = fetch(rsigma_ptr + row)
        if mu_ptr is not None:
            mu = fetch(mu_ptr + row)
        if STEP != "rest":
            _post_means(
                dy, x, gamma, mu, rsigma, shares_ptr, row, epoch, OFFSET, PIECES, SUMS, STEP
            )
    for index in tl.range(begin, rows, groups, num_stages=STAGES):
        row = tl.full((), index, tl.int64)
        following = row + groups
        exists = following < rows
        wanted = inside & exists
        x_next = fetch(x_ptr + following * x_stride + column, wanted)
        dy_next = fetch(dy_ptr + following * dy_stride + column, wanted)
        rsigma_next = fetch(rsigma_ptr + following, exists)
        mu_next = mu
        if mu_ptr is not None:
            mu_next = fetch(mu_ptr + following, exists)
        if STEP != "rest" and (exists if APART else True):
            _post_means(
                dy_next, x_next, gamma, mu_next, rsigma_next, shares_ptr, following, epoch + 1,
                OFFSET, PIECES, SUMS, STEP,
            )  # fmt: skip
        if STEP != "sums" and (index >= 0 if APART else True):
            if add_ptr is not None:
                add = fetch(add_ptr + row * x_stride + column, inside)
            products, plain = wait_for(shares_ptr, row, epoch, 0, PIECES, SUMS, STEP)
            xhat = x.to(ACC) * rsigma
            grad = dy.to(ACC)
            u = grad * gain_of(gamma, ACC, OFFSET)
            if mu_ptr is not None:
                xhat -= mu * rsigma
                product, constant = two_sums(products, plain)
                back = xhat * (product / columns * rsigma) + constant / columns * rsigma
                dbeta += grad
            else:
                back = xhat * (tl.sum(products, axis=0) / columns * rsigma)
            dx = u * rsigma - back
            dgamma += grad * xhat
            if add_ptr is not None:
                dx += add.to(ACC)
            out = dx_ptr + row * columns + column
            tl.store(out, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        x, dy, mu, rsigma = x_next, dy_next, mu_next, rsigma_next
        epoch += 1
    if STEP != "sums":
        partial_ptr += tl.program_id(1).to(tl.int64) * columns
        tl.store(partial_ptr + column, dgamma, mask=inside)
        if mu_ptr is not None:
            partial_ptr += groups.to(tl.int64) * columns
            tl.store(partial_ptr + column, dbeta, mask=inside)


# -------------------------------------------------------------------------------- plans
#
# A plan is what a call needs beyond its tensors. It is made once per dtypes, width, options and
# device, so that a call is a look-up, its allocations and its launches.


class _ForwardPlan(NamedTuple):
    """How to run a forward.

    Attributes:
        run: the kernel.
        statistics: dtype of mu and rsigma.
        unit: see the kernels.
    """

    run: WholeRows | SharedRows
    statistics: torch.dtype
    unit: int


class _BackwardPlan(NamedTuple):
    """How to run a backward.

    Attributes:
        run: the kernel for dx and the sums of each program.
        total: the sum over the programs.
        unit: see the kernels.
    """

    run: WholeRows | SharedRows
    total: SumOfPrograms
    unit: int


_FORWARD_PLANS: dict[object, _ForwardPlan] = {}
_BACKWARD_PLANS: dict[object, _BackwardPlan] = {}

# Whole rows have up to 32 columns a thread in the forward, and mostly 16 in the backward, which
# also holds the parameters' gradients. In the forward, whole rows take a program per tile. Beyond
# 262,144 columns, where nothing was measured, pieces are wide, so that there are fewer.
_ANY = 2**32
_PERSISTENT = [(1, 3), (1, 4), (2, 3), (4, 3)]
_FORWARD_PIECES = Cut(threads=32, width=2048, programs=12, stages=4, shared=True)
_FORWARD_HALF = {
    2560: Cut(threads=128, width=2048),
    3584: Cut(threads=256, width=2048),
    7168: Cut(threads=256, width=4096),
    8192: Cut(threads=512, width=4096),
    12288: Cut(threads=256, width=8192, resident=4),
}
# For rows that are read singly a thread's registers hold no wider pieces, and a row of up to 2,048
# columns that is wider than a tile is best given to one warp. Beyond 262,144 columns none was
# measured.
_SINGLY_WARP = Cut(threads=32, width=1024)
_SINGLY = Cut(threads=32, width=1024, programs=16, stages=2, shared=True)
_SINGLY_NARROW = Cut(threads=32, width=512, programs=16, stages=2, shared=True)
_SINGLY_WIDE = Cut(threads=64, width=2048, programs=8, stages=2, shared=True)
_SINGLY_WIDEST = Cut(threads=128, width=4096, programs=4, stages=2, shared=True)
_FORWARD = cut_choice(
    "rmsnorm_fwd",
    _FORWARD_PLANS,
    {
        2048: Cut(threads=128, width=2048),
        4096: Cut(threads=256, width=4096),
        8192: Cut(threads=256, width=8192),
        16384: Cut(threads=512, width=16384),
        131072: Cut(threads=32, width=1024, programs=12, stages=3, shared=True),
        262144: Cut(threads=64, width=2048, programs=8, stages=3, shared=True),
        _ANY: Cut(threads=256, width=8192, programs=2, stages=3, shared=True),
    },
    whole=[(0, 1)],
    most_elements=32,
    half=_FORWARD_HALF
    | {
        14336: Cut(threads=256, width=8192, resident=4),
        16384: Cut(threads=512, width=8192, resident=2),
        24576: Cut(threads=512, width=16384, resident=2),
        32767: _FORWARD_PIECES,
        32768: Cut(threads=512, width=16384, resident=2),  # no column is beyond the row's
        262144: _FORWARD_PIECES,
        _ANY: Cut(threads=64, width=4096, programs=6, stages=3, shared=True),
    },
    singly=_FORWARD_HALF
    | {
        1024: Cut(threads=128, width=2048),
        2048: _SINGLY_WARP,
        20480: Cut(threads=256, width=8192, resident=3),
        131072: _SINGLY,
        262144: _SINGLY_WIDE,
        _ANY: _SINGLY_WIDEST,
    },
    parts=True,
)
_FORWARD_ADD_WHOLE = {
    2048: Cut(threads=128, width=2048),
    4096: Cut(threads=256, width=4096),
    8192: Cut(threads=256, width=8192),
    16384: Cut(threads=512, width=16384),
}
_FORWARD_ADD = cut_choice(
    "rmsnorm_fwd_add",
    _FORWARD_PLANS,
    _FORWARD_ADD_WHOLE
    | {
        131072: Cut(threads=32, width=1024, programs=8, shared=True),
        _ANY: Cut(threads=128, width=2048, programs=4, shared=True),
    },
    whole=[(0, 1)],
    most_elements=32,
    half=_FORWARD_ADD_WHOLE
    | {
        4096: Cut(threads=128, width=2048),
        8192: Cut(threads=512, width=8192, resident=2),
        65536: Cut(threads=32, width=1024, programs=12, shared=True),
        131072: Cut(threads=32, width=1024, programs=16, shared=True),
        163840: Cut(threads=64, width=4096, programs=4, shared=True),
        262144: Cut(threads=32, width=2048, programs=8, shared=True),
        _ANY: Cut(threads=64, width=4096, programs=4, shared=True),
    },
    singly={
        1024: Cut(threads=128, width=2048),
        2048: Cut(threads=64, width=1024, resident=16),
        4096: Cut(threads=128, width=2048),
        8192: Cut(threads=128, width=4096, resident=8),
        12288: Cut(threads=256, width=8192, resident=4),
        16384: Cut(threads=256, width=8192, resident=3),
        131072: _SINGLY_NARROW,
        262144: _SINGLY_WIDEST._replace(programs=3),
    },
    parts=True,
    stages=1,
)
_CENTRED_HALF = {
    1024: Cut(threads=128, width=2048),
    1792: Cut(threads=128, width=4096),
    3584: Cut(threads=128, width=2048),
    4096: Cut(threads=128, width=2048, resident=5),
    5120: Cut(threads=128, width=4096, resident=6),
    7168: Cut(threads=256, width=4096, resident=5),
    8192: Cut(threads=256, width=4096, resident=4),
    10240: Cut(threads=256, width=8192, resident=4),
    12288: Cut(threads=256, width=8192, resident=3),
}
_FORWARD_CENTRED = cut_choice(
    "layernorm_fwd",
    _FORWARD_PLANS,
    {
        2048: Cut(threads=128, width=2048),
        12288: Cut(threads=256, width=8192),
        131072: Cut(threads=32, width=1024, programs=12, stages=3, shared=True),
        262144: Cut(threads=64, width=2048, programs=8, stages=3, shared=True),
        _ANY: Cut(threads=128, width=4096, programs=4, stages=3, shared=True),
    },
    whole=[(0, 1)],
    most_elements=32,
    half=_CENTRED_HALF
    | {
        14336: Cut(threads=32, width=2048, programs=12, stages=2, shared=True),
        16384: Cut(threads=256, width=8192, resident=3),
        20480: Cut(threads=512, width=16384, resident=2),
        262144: Cut(threads=32, width=2048, programs=12, stages=2, shared=True),
        _ANY: Cut(threads=256, width=8192, programs=2, stages=3, shared=True),
    },
    singly=_CENTRED_HALF
    | {
        1792: _SINGLY_WARP,
        2048: _SINGLY_WARP,
        20480: Cut(threads=256, width=8192, resident=3),
        24576: Cut(threads=512, width=16384, resident=2),
        131072: _SINGLY._replace(programs=12),
        262144: _SINGLY_WIDE,
        _ANY: _SINGLY_WIDEST,
    },
    parts=True,
    stages=2,
)
_BACKWARD_WHOLE = {
    2048: Cut(threads=128, width=2048, programs=4, stages=3),
    3072: Cut(threads=256, width=4096, programs=2, stages=3),
}
_BACKWARD_SINGLY_WHOLE = {
    1024: _BACKWARD_WHOLE[2048],
    2048: Cut(threads=128, width=2048, programs=4),
}
_BACKWARD_NARROW = Cut(threads=32, width=512, programs=12, stages=3, shared=True)
_BACKWARD_WIDE = Cut(threads=128, width=2048, programs=4, stages=2, shared=True)
_BACKWARD = cut_choice(
    "rmsnorm_bwd",
    _BACKWARD_PLANS,
    _BACKWARD_WHOLE
    | {
        16384: _BACKWARD_NARROW,
        131072: Cut(threads=64, width=1024, programs=8, stages=3, shared=True),
        _ANY: _BACKWARD_WIDE,
    },
    whole=_PERSISTENT,
    most_elements=16,
    half=_BACKWARD_WHOLE
    | {
        131072: Cut(threads=32, width=1024, programs=12, stages=2, shared=True),
        262144: Cut(threads=64, width=2048, programs=6, stages=2, shared=True),
        _ANY: Cut(threads=128, width=4096, programs=3, stages=2, shared=True),
    },
    singly=_BACKWARD_SINGLY_WHOLE
    | {
        4096: Cut(threads=128, width=4096, programs=3),
        131072: _SINGLY_NARROW,
    },
)
_BACKWARD_ADD = cut_choice(
    "rmsnorm_bwd_add",
    _BACKWARD_PLANS,
    _BACKWARD_WHOLE | {16384: _BACKWARD_NARROW, _ANY: _BACKWARD_WIDE},
    whole=_PERSISTENT,
    most_elements=16,
    half=_BACKWARD_WHOLE
    | {
        8192: Cut(threads=32, width=512, programs=16, stages=3, shared=True),
        32768: Cut(threads=64, width=1024, programs=8, stages=3, shared=True),
        131072: Cut(threads=32, width=1024, programs=8, stages=3, shared=True),
        262144: Cut(threads=64, width=2048, programs=4, stages=3, shared=True),
        _ANY: Cut(threads=128, width=2048, programs=4, stages=3, shared=True),
    },
    singly={
        1024: _BACKWARD_WHOLE[2048],
        2048: Cut(threads=256, width=2048, programs=4),
        3072: _SINGLY_NARROW,
        4096: Cut(threads=256, width=4096, programs=2),
        131072: _SINGLY_NARROW,
    },
)
_BACKWARD_CENTRED = cut_choice(
    "layernorm_bwd",
    _BACKWARD_PLANS,
    {
        2048: _BACKWARD_WHOLE[2048],
        262144: Cut(threads=64, width=1024, programs=6, stages=3, shared=True),
        _ANY: Cut(threads=128, width=2048, programs=4, stages=3, shared=True),
    },
    whole=_PERSISTENT,
    most_elements=16,
    half={
        2048: _BACKWARD_WHOLE[2048],
        4096: Cut(threads=256, width=4096, programs=2, stages=3),
        6144: Cut(threads=32, width=512, programs=16, stages=3, shared=True),
        7168: Cut(threads=512, width=8192, programs=1, stages=4),
        8192: Cut(threads=256, width=8192, programs=1, stages=3),
        32768: Cut(threads=32, width=512, programs=16, stages=3, shared=True),
        131072: Cut(threads=32, width=1024, programs=8, stages=3, shared=True),
        262144: Cut(threads=64, width=2048, programs=4, stages=3, shared=True),
        _ANY: Cut(threads=256, width=8192, programs=1, stages=3, shared=True),
    },
    singly=_BACKWARD_SINGLY_WHOLE
    | {
        3072: _SINGLY_NARROW,
        4096: Cut(threads=256, width=4096, programs=2),
        131072: _SINGLY_NARROW._replace(stages=3),
    },
)


# The widest row of 2-byte numbers whose mean is computed before their squares are summed: wider
# rows are faster with one reduction across warps than with two.
_WIDEST_TWICE = 16384


def _sums_at_once(op: Contract[..., Any], columns: int, dtype: torch.dtype) -> bool:
    """Whether whole rows and their squares are summed in one reduction, around a number of each."""
    return op is contracts.layernorm_fwd and dtype.itemsize == 2 and columns > _WIDEST_TWICE


def _plan_forward(
    op: Contract[..., Any],
    columns: int,
    dtype: torch.dtype,
    offset: bool,
    unit: int,
    device: torch.device,
) -> _ForwardPlan:
    statistics = contracts.statistics_dtype(dtype)
    choice = _FORWARD
    if op is contracts.layernorm_fwd:
        choice = _FORWARD_CENTRED
    elif op is contracts.rmsnorm_fwd_add:
        choice = _FORWARD_ADD
    run = cut(
        choice,
        (_forward_rows, _forward_shared),
        device,
        columns,
        1 + (op is contracts.layernorm_fwd),
        statistics,
        dtype.itemsize,
        dtype.itemsize * (1 + (op is contracts.rmsnorm_fwd_add)),
        OFFSET=int(offset),
        UNIT=unit,
        ONCE=_sums_at_once(op, columns, dtype),
        HALF=dtype.itemsize == 2,
        SUM=getattr(tl, str(dtype).removeprefix("torch.")),
    )
    return _ForwardPlan(run, statistics, unit)


def _plan_backward(
    op: Contract[..., Any],
    columns: int,
    dtype: torch.dtype,
    bytes_read: int,
    offset: bool,
    unit: int,
    device: torch.device,
) -> _BackwardPlan:
    centred = op is contracts.layernorm_bwd
    choice = _BACKWARD
    if centred:
        choice = _BACKWARD_CENTRED
    elif op is contracts.rmsnorm_bwd_add:
        choice = _BACKWARD_ADD
    # Branches leave registers for one more program; the others do more, and are faster without.
    apart = op is contracts.rmsnorm_bwd
    run = cut(
        choice,
        (_backward_rows, _backward_shared),
        device,
        columns,
        1 + centred,
        contracts.statistics_dtype(dtype),
        dtype.itemsize,
        bytes_read,
        stages_in_use=int(apart),  # posted in a branch, a row leaves its stage an iteration later
        APART=apart,
        OFFSET=int(offset),
        UNIT=unit,
        HAS_DEPENDENT=has_dependent_launches(device),
    )
    return _BackwardPlan(run, SumOfPrograms(columns, unit, device), unit)


# ---------------------------------------------------------------------------- operators
#
# Each call first takes a quick look at its arguments: if they are plain and dense and their plan
# exists, nothing else validates them. Otherwise they go through the contract's check, and are made
# dense or declined.


def _is_alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether it is plain, dense and aligned, and has the shape and device of ``other``."""
    return (
        type(tensor) in PLAIN
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.data_ptr() % ALIGNMENT
        and tensor.shape == other.shape
        and tensor.device == other.device
    )


def _examine_forward(
    op: Contract[..., Any],
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
    out_dtype: torch.dtype | None,
) -> tuple[_ForwardPlan, Tensor, Tensor | None, Tensor, Tensor | None, float, int]:
    """The plan, the arguments as the kernels take them, and the row stride."""
    before = (residual,) if op is contracts.rmsnorm_fwd_add else ()
    after = (bias,) if op is contracts.layernorm_fwd else ()
    options = {"zero_centered_gamma": zero_centered_gamma, "out_dtype": out_dtype}
    op.check(input, *before, weight, *after, eps=eps, **options)
    if not isinstance(eps, int | float):
        raise NotSupportedError(f"{op.name}: eps is a {type(eps).__name__}, not a concrete number")
    columns, device = input.shape[-1], input.device
    check_size(op.name, "columns", columns)
    input, distance = rows_to_sum(op.name, plain(op.name, "input", input))
    if residual is not None:
        residual, other = rows_to_sum(op.name, plain(op.name, "residual", residual))
        if other != distance:
            input, residual, distance = input.contiguous(), residual.contiguous(), columns
    weight = plain(op.name, "weight", weight).contiguous()
    bias = None if bias is None else plain(op.name, "bias", bias).contiguous()
    kinds = (input.dtype, weight.dtype, None if bias is None else bias.dtype, out_dtype)
    unit = math.gcd(columns, distance, WIDEST_UNIT)
    # For dense rows, under the key that the next quick look uses.
    key = (op.name, *kinds, columns, zero_centered_gamma, device)
    plan = _FORWARD_PLANS.get(key if distance == columns else (*key, unit))
    if plan is None:
        plan = _plan_forward(op, columns, input.dtype, zero_centered_gamma, unit, device)
        add_to_cache(_FORWARD_PLANS, key if distance == columns else (*key, unit), plan)
    return plan, input, residual, weight, bias, float(eps), distance


def _forward(
    op: Contract[..., Any],
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Output, the sum with the residual, mu and rsigma; None for outputs that an operator lacks."""
    centred = op is contracts.layernorm_fwd
    plan: _ForwardPlan | None = None
    columns = 0
    try:
        distance = columns = input.shape[-1]
        device = input.device
        if (
            type(input) in PLAIN
            and columns
            and input.is_contiguous()
            and not input.is_neg()  # a dense tensor may have its negative bit set
            and not input.data_ptr() % ALIGNMENT
            and (residual is None or _is_alike(residual, input))
            and (residual is None or residual.dtype == input.dtype)
            and (residual is None) is (op is not contracts.rmsnorm_fwd_add)
            and is_vector(weight, columns, device)
            and (bias is None or is_vector(bias, columns, device))
            and type(eps) is float
            and eps >= 0
            and type(zero_centered_gamma) is bool
        ):
            kinds = (input.dtype, weight.dtype, None if bias is None else bias.dtype, out_dtype)
            plan = _FORWARD_PLANS.get((op.name, *kinds, columns, zero_centered_gamma, device))
    except NOT_A_TENSOR:
        pass
    if plan is None:
        plan, input, residual, weight, bias, eps, distance = _examine_forward(
            op, input, residual, weight, bias, eps, zero_centered_gamma, out_dtype
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
    total = None
    if residual is not None:
        total = torch.empty(input.shape, dtype=input.dtype, device=device)
    rsigma = empty((rows,), (1,), plan.statistics)
    mu = empty((rows,), (1,), plan.statistics) if centred else None
    if rows:
        unit = plan.unit
        plan.run(
            rows,
            (input, residual, weight, bias, output, total, mu, rsigma),
            (rows, columns // unit, distance // unit, eps),
        )
    return output, total, mu, rsigma


def _examine_backward(
    op: Contract[..., Any],
    dy: Tensor,
    x: Tensor,
    add: Tensor | None,
    mu: Tensor | None,
    rsigma: Tensor,
    gamma: Tensor,
    zero_centered_gamma: bool,
) -> tuple[
    _BackwardPlan,
    tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor],
    int,
    int,
]:
    """The plan, the arguments as the kernels take them, and the row strides of dy and x."""
    centred, adds = op is contracts.layernorm_bwd, op is contracts.rmsnorm_bwd_add
    between = (mu,) if centred else (add,) if adds else ()
    op.check(dy, x, *between, rsigma, gamma, zero_centered_gamma=zero_centered_gamma)
    if centred and mu is None:
        raise ArgumentError(op.name, "mu", "None", "one value per row of 'x'")
    columns, device = x.shape[-1], x.device
    check_size(op.name, "columns", columns)
    x, x_distance = rows_to_sum(op.name, plain(op.name, "x", x))
    dy, dy_distance = rows_to_sum(op.name, plain(op.name, "dz" if adds else "dy", dy))
    if add is not None:
        add, other = rows_to_sum(op.name, plain(op.name, "add", add))
        if other != x_distance:
            x, add, x_distance = x.contiguous(), add.contiguous(), columns
    mu = None if mu is None else plain(op.name, "mu", mu).contiguous()
    rsigma = plain(op.name, "rsigma", rsigma).contiguous()
    gamma = plain(op.name, "gamma", gamma).contiguous()
    unit = math.gcd(columns, x_distance, dy_distance, WIDEST_UNIT)
    dense = x_distance == columns == dy_distance
    kinds = (dy.dtype, x.dtype, None if add is None else add.dtype, gamma.dtype)
    key = (op.name, *kinds, columns, zero_centered_gamma, device)
    plan = _BACKWARD_PLANS.get(key if dense else (*key, unit))
    if plan is None:
        bytes_read = sum(one.dtype.itemsize for one in (dy, x, add) if one is not None)
        plan = _plan_backward(op, columns, x.dtype, bytes_read, zero_centered_gamma, unit, device)
        add_to_cache(_BACKWARD_PLANS, key if dense else (*key, unit), plan)
    return plan, (dy, x, add, mu, rsigma, gamma), dy_distance, x_distance


def _backward(
    op: Contract[..., Any],
    dy: Tensor,
    x: Tensor,
    add: Tensor | None,
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
            and columns
            and x.is_contiguous()
            and not x.is_neg()
            and not x.data_ptr() % ALIGNMENT
            and _is_alike(dy, x)
            and (add is None or _is_alike(add, x))
            and (add is None) is (op is not contracts.rmsnorm_bwd_add)
            and is_vector(gamma, columns, device)
            and is_vector(rsigma, rows := x.numel() // columns, device)
            and rsigma.dtype == (statistics := contracts.statistics_dtype(x.dtype))
            and (mu is None or (is_vector(mu, rows, device) and mu.dtype == statistics))
            and (mu is None) is not centred
            and type(zero_centered_gamma) is bool
        ):
            kinds = (dy.dtype, x.dtype, None if add is None else add.dtype, gamma.dtype)
            plan = _BACKWARD_PLANS.get((op.name, *kinds, columns, zero_centered_gamma, device))
    except NOT_A_TENSOR:
        pass
    if plan is None:
        plan, tensors, dy_distance, x_distance = _examine_backward(
            op, dy, x, add, mu, rsigma, gamma, zero_centered_gamma
        )
        dy, x, add, mu, rsigma, gamma = tensors
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
    programs = plan.run.groups(rows)
    partial = empty(((1 + centred) * programs * columns,), (1,), rsigma.dtype)
    unit = plan.unit
    plan.run(
        rows,
        (dy, x, add, mu, rsigma, gamma, dx, partial),
        (rows, columns // unit, dy_distance // unit, x_distance // unit),
    )
    plan.total(partial, dgamma, dbeta, programs)
    return dx, dgamma, dbeta


@repeating
def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``rmsnorm_fwd`` of the contract."""
    output, _, _, rsigma = _forward(
        contracts.rmsnorm_fwd, input, None, weight, None, eps, zero_centered_gamma, out_dtype
    )
    return output, rsigma


@repeating
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
        contracts.rmsnorm_bwd, dy, x, None, None, rsigma, gamma, zero_centered_gamma
    )
    return dx, dgamma


@repeating
def rmsnorm_fwd_add(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``rmsnorm_fwd_add`` of the contract."""
    output, total, _, rsigma = _forward(
        contracts.rmsnorm_fwd_add, input, residual, weight, None, eps, zero_centered_gamma,
        out_dtype,
    )  # fmt: skip
    return output, cast(Tensor, total), rsigma


@repeating
def rmsnorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """``rmsnorm_bwd_add`` of the contract."""
    dx, dgamma, _ = _backward(
        contracts.rmsnorm_bwd_add, dz, x, add, None, rsigma, gamma, zero_centered_gamma
    )
    return dx, dgamma


@repeating
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
    output, _, mu, rsigma = _forward(
        contracts.layernorm_fwd, input, None, weight, bias, eps, zero_centered_gamma, out_dtype
    )
    return output, cast(Tensor, mu), rsigma


@repeating
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
        contracts.layernorm_bwd, dy, x, None, mu, rsigma, gamma, zero_centered_gamma
    )
    return dx, dgamma, cast(Tensor, dbeta)
