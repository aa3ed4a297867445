"""Reading rows and computing their mean and variance, for every kernel that normalizes them.

The order of the sums depends only on a row's width and on how it is tiled, so a row's statistics
are the same whichever rows are beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transformer_engine_fl.backends.flagos._exact import mean_of, mean_of_all
from transformer_engine_fl.backends.flagos._fetch import fetch
from transformer_engine_fl.backends.flagos._narrow import rounded
from transformer_engine_fl.backends.flagos._rows import (
    as_stored,
    by_lane,
    columns_before,
    part_of_row,
    per_row,
    two_sums,
)

__all__ = ["gain_of", "moments_of_parts", "moments_of_wide_row", "read_input"]


@triton.jit  # type: ignore[untyped-decorator]
def read_input(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    place: tl.tensor,
    out: tl.tensor,
    mask: tl.tensor,
    SUM: tl.constexpr,
) -> tl.tensor:
    """``x``; with a residual, their rounded sum, which is also stored."""
    x = fetch(x_ptr + place, mask)
    if residual_ptr is not None:
        ACC: tl.constexpr = tl.float64 if x.dtype == tl.float64 else tl.float32
        residual = fetch(residual_ptr + place, mask)
        x = rounded(x.to(ACC) + residual.to(ACC), SUM)
        tl.store(sum_ptr + out, x, mask=mask)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def gain_of(gamma: tl.tensor, ACC: tl.constexpr, OFFSET: tl.constexpr) -> tl.tensor:
    """The factors of a row.

    An offset of 0 is not added: the compiler would keep the addition, as it turns -0 into 0.
    """
    gain = gamma.to(ACC)
    if OFFSET:
        gain += OFFSET
    return gain


@triton.jit  # type: ignore[untyped-decorator]
def moments_of_parts(
    x: tl.tuple,
    x_ptr: tl.tensor,
    row: tl.tensor,
    columns: tl.tensor,
    eps: tl.tensor,
    ACC: tl.constexpr,
    CENTRED: tl.constexpr,
    ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    EXACT: tl.constexpr,
    NARROW: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The mean (0 unless CENTRED) and rsigma of whole rows in PARTS; see ``_rows``.

    Args:
        x: the parts, 0 beyond the row; those of a single row may be vectors.
        x_ptr: the rows, from which ONCE reads three numbers.
        row: the rows' numbers.
        columns: columns of a row.
        eps: added to the mean of squares.
        ACC: dtype of the sums.
        CENTRED: whether there is a mean.
        ONCE: sum the numbers of a single row and their squares in one reduction.
        ROWS, PARTS, EXACT, NARROW, LANES: see :class:`WholeRows`.
        VECTOR: elements that a thread reads at a time.
    """
    AT_ONCE: tl.constexpr = ONCE and ROWS == 1
    zero = (row * 0).to(ACC)
    mu = zero
    if CENTRED:
        if AT_ONCE:
            mu = _typical(x_ptr, columns, ACC)
        else:
            sums = zero
            for part in tl.static_range(len(PARTS)):
                sums += _sums(x[part].to(ACC), ROWS, LANES, VECTOR)
            mu = _whole(sums, ROWS)
            WIDTH: tl.constexpr = columns_before(PARTS, len(PARTS))
            mu = mean_of_all(mu, WIDTH) if EXACT else mean_of(mu, columns)
    squares = zero
    ahead = zero
    for part in tl.static_range(len(PARTS)):
        distance = as_stored(x[part], NARROW and CENTRED).to(ACC)
        if CENTRED:
            distance -= per_row(mu, ROWS)
            if not EXACT:
                _, inside = part_of_row(PARTS, part, columns, EXACT)
                inside = inside if len(distance.shape) == 1 else inside[None, :]
                distance = tl.where(inside, distance, 0)
        squares += _sums(distance * distance, ROWS, LANES, VECTOR)
        if AT_ONCE:
            ahead += _sums(distance, ROWS, LANES, VECTOR)
    if AT_ONCE:
        squares, ahead = two_sums(squares, ahead)
        squares -= ahead * (ahead / columns)
        squares = tl.where(squares < 0, 0, squares)
        mu += ahead / columns
    else:
        squares = _whole(squares, ROWS)
    return mu, tl.rsqrt(squares / columns + tl.full((), eps, ACC))


@triton.jit  # type: ignore[untyped-decorator]
def _sums(x: tl.tensor, ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr) -> tl.tensor:
    """The sums of a part's rows; of a single row, one sum for each thread."""
    if ROWS == 1:
        return tl.sum(tl.sum(by_lane(x, LANES, VECTOR), axis=2), axis=0)
    else:
        return tl.sum(x, axis=1)


@triton.jit  # type: ignore[untyped-decorator]
def _whole(sums: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """The sums of rows from what :func:`_sums` gave for their parts."""
    return tl.sum(sums, axis=0) if ROWS == 1 else sums


@triton.jit  # type: ignore[untyped-decorator]
def _typical(x_ptr: tl.tensor, columns: tl.tensor, ACC: tl.constexpr) -> tl.tensor:
    """The median of three numbers of a row, so that a single outlier is not chosen."""
    third = columns // 3
    one = fetch(x_ptr, True).to(ACC)
    two = fetch(x_ptr + third, True).to(ACC)
    three = fetch(x_ptr + 2 * third, True).to(ACC)
    return tl.maximum(tl.minimum(one, two), tl.minimum(tl.maximum(one, two), three))


@triton.jit  # type: ignore[untyped-decorator]
def moments_of_wide_row(
    x_ptr: tl.tensor,
    columns: tl.tensor,
    eps: tl.tensor,
    ACC: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The mean (0 unless CENTRED) and rsigma of one row, read in chunks of BLOCK columns."""
    lane = tl.arange(0, BLOCK)
    mean = tl.zeros((BLOCK,), ACC)
    squares = tl.zeros((BLOCK,), ACC)
    for chunk in tl.range(0, tl.cdiv(columns, BLOCK), loop_unroll_factor=UNROLL):
        column = chunk * BLOCK + lane
        inside = column < columns
        x = fetch(x_ptr + column, inside).to(ACC)
        if CENTRED:
            # Welford's update in each lane: no difference of large sums, whatever the mean
            ahead = tl.where(inside, x - mean, 0)
            mean += ahead / (chunk + 1)
            squares += ahead * (x - mean)
        else:
            squares += x * x
    mu = tl.zeros((), ACC)
    if CENTRED:
        count = (columns - lane + (BLOCK - 1)) // BLOCK
        mu = mean_of(tl.sum(mean * count, axis=0), columns)
        squares += (mean - mu) * (mean - mu) * count
    variance = tl.sum(squares, axis=0) / columns
    return mu, tl.rsqrt(variance + tl.full((), eps, ACC))
