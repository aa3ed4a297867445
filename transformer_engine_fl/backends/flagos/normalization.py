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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import Parameter

from transformer_engine_fl import ops
from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.core.errors import NotSupportedError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["layernorm_bwd", "layernorm_fwd", "rmsnorm_bwd", "rmsnorm_fwd"]


# ---------------------------------------------------------------------- forward kernels
#
# ``columns`` and the row strides count units of UNIT elements, so that the compiler knows
# their divisor and can use wide accesses. The dtype of the statistics is that of all sums.


@triton.jit(do_not_specialize=["rows", "columns", "stride", "eps"])
def _forward_rows(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mu_ptr,
    rsigma_ptr,
    rows: tl.int32,
    columns: tl.int32,
    stride: tl.int64,
    eps: tl.float64,
    OFFSET: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows that fit into registers, ROWS at a time; KEEP holds the parameters there too."""
    ACC: tl.constexpr = rsigma_ptr.dtype.element_ty
    columns = columns * UNIT
    column = tl.arange(0, BLOCK)
    inside = column < columns
    if KEEP:
        weight = tl.load(weight_ptr + column, mask=inside, other=0)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + column, mask=inside, other=0)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES
    ):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        start = row.to(tl.int64)
        x = tl.load(
            x_ptr + (start * stride * UNIT)[:, None] + column[None, :],
            mask=mask,
            other=0,
            eviction_policy="evict_first",
        ).to(ACC)
        if mu_ptr is not None:
            mu = tl.sum(x, axis=1) / columns
            tl.store(mu_ptr + row, mu, mask=row < rows)
            x = tl.where(inside[None, :], x - mu[:, None], 0)
        variance = tl.sum(x * x, axis=1) / columns
        rsigma = tl.rsqrt(variance + tl.full((ROWS,), eps, ACC))
        tl.store(rsigma_ptr + row, rsigma, mask=row < rows)
        if not KEEP:
            weight = tl.load(weight_ptr + column, mask=inside, other=0)
        y = x * rsigma[:, None] * (weight.to(ACC) + OFFSET)[None, :]
        if bias_ptr is not None:
            if not KEEP:
                bias = tl.load(bias_ptr + column, mask=inside, other=0)
            y += bias.to(ACC)[None, :]
        out = y_ptr + (start * columns)[:, None] + column[None, :]
        tl.store(out, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "columns", "stride", "eps"])
def _forward_wide(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mu_ptr,
    rsigma_ptr,
    rows: tl.int32,
    columns: tl.int32,
    stride: tl.int64,
    eps: tl.float64,
    OFFSET: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
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


@triton.jit(do_not_specialize=["rows", "columns", "dy_stride", "x_stride"])
def _backward_rows(
    dy_ptr,
    x_ptr,
    mu_ptr,
    rsigma_ptr,
    gamma_ptr,
    dx_ptr,
    partial_ptr,
    rows: tl.int32,
    columns: tl.int32,
    dy_stride: tl.int64,
    x_stride: tl.int64,
    OFFSET: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
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


@triton.jit
def _row_means(
    dy_ptr,
    x_ptr,
    gamma_ptr,
    mu,
    rsigma,
    columns,
    OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
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


@triton.jit(do_not_specialize=["rows", "columns", "dy_stride", "x_stride"])
def _backward_means(
    dy_ptr,
    x_ptr,
    mu_ptr,
    rsigma_ptr,
    gamma_ptr,
    means_ptr,
    rows: tl.int32,
    columns: tl.int32,
    dy_stride: tl.int64,
    x_stride: tl.int64,
    OFFSET: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
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


@triton.jit(do_not_specialize=["rows", "columns", "dy_stride", "x_stride"])
def _backward_wide(
    dy_ptr,
    x_ptr,
    mu_ptr,
    rsigma_ptr,
    gamma_ptr,
    means_ptr,
    dx_ptr,
    partial_ptr,
    rows: tl.int32,
    columns: tl.int32,
    dy_stride: tl.int64,
    x_stride: tl.int64,
    OFFSET: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """One row at a time, for CHUNKS chunks of its columns; the rest is other programs'.

    The sums for the parameters of these columns stay in registers over all rows. The
    means of the whole row are read, or worked out by each program that shares the row.
    """
    ACC: tl.constexpr = rsigma_ptr.dtype.element_ty
    columns = columns * UNIT
    lane = tl.program_id(1) * (CHUNKS * BLOCK) + tl.arange(0, BLOCK)
    dgammas = ()
    dbetas = ()
    for _ in tl.static_range(CHUNKS):
        dgammas += (tl.zeros((BLOCK,), ACC),)
        dbetas += (tl.zeros((BLOCK,), ACC),)
    for index in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        row = index.to(tl.int64)
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


@triton.jit(do_not_specialize=["programs", "columns"])
def _sum_programs(
    partial_ptr,
    dgamma_ptr,
    dbeta_ptr,
    programs: tl.int32,
    columns: tl.int32,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sums of ``partial`` over the programs: dgamma, and dbeta on the second grid axis."""
    ACC: tl.constexpr = partial_ptr.dtype.element_ty
    columns = columns * UNIT
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    partial_ptr += tl.program_id(1).to(tl.int64) * programs * columns
    total = tl.zeros((ROWS, BLOCK), ACC)
    for first in tl.range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)
        total += tl.load(
            partial_ptr + row.to(tl.int64)[:, None] * columns + column[None, :],
            mask=(row < programs)[:, None] & inside[None, :],
            other=0,
        )
    result = tl.sum(total, axis=0).to(dgamma_ptr.dtype.element_ty)
    if dbeta_ptr is None:
        tl.store(dgamma_ptr + column, result, mask=inside)
    elif tl.program_id(1) == 0:
        tl.store(dgamma_ptr + column, result, mask=inside)
    else:
        tl.store(dbeta_ptr + column, result, mask=inside)
