"""The mean and the spread of rows, as every kernel that normalizes them calculates both.

The order of the sums depends on a row's width and on how it is cut alone, so a row's
statistics are the same whichever rows come with it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transformer_engine_fl.backends.flagos._exact import mean_of
from transformer_engine_fl.backends.flagos._fetch import fetch

__all__ = ["moments_of_rows", "moments_of_wide_row"]


@triton.jit  # type: ignore[untyped-decorator]
def moments_of_rows(
    x: tl.tensor, inside: tl.tensor, columns: tl.tensor, eps: tl.tensor, CENTRED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of whole rows, ``x [rows, columns]``: x without its mean, the mean, and rsigma.

    Args:
        x: 0 outside.
        inside: which columns there are.
        columns: how many.
        eps: added to the mean of squares.
        CENTRED: whether there is a mean; otherwise it is 0.
    """
    if CENTRED:
        mu = mean_of(tl.sum(x, axis=1), columns)
        x = tl.where(inside[None, :], x - mu[:, None], 0)
        variance = tl.sum(x * x, axis=1) / columns
    else:
        variance = tl.sum(x * x, axis=1) / columns
        mu = variance * 0
    return x, mu, tl.rsqrt(variance + tl.full((), eps, x.dtype))


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
