"""Device functions shared by all kernels that compute losses or gradients of rows."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["of_z_loss", "softmax_shift", "store_loss"]


@triton.jit  # type: ignore[untyped-decorator]
def softmax_shift(highest: tl.tensor) -> tl.tensor:
    """What to subtract from scores before exp: the highest, or 0 if all are ``-inf`` (hidden)."""
    return tl.where(highest == float("-inf"), 0, highest)


@triton.jit  # type: ignore[untyped-decorator]
def of_z_loss(grad_loss: tl.tensor, lse: tl.tensor, z: tl.tensor) -> tl.tensor:
    """What z_loss adds to the factor of a row's probabilities in its gradients."""
    twice_z = tl.full((), 2 * z, lse.dtype)
    return tl.where(twice_z == 0, 0, twice_z * lse * grad_loss)


@triton.jit  # type: ignore[untyped-decorator]
def store_loss(
    loss_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    row: tl.tensor,
    exists: tl.tensor,
    target: tl.tensor,
    ignored: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    at_target: tl.tensor,
    summed: tl.tensor,
    last: tl.tensor,
    words: tl.tensor,
    smoothing: tl.tensor,
    z: tl.tensor,
    SUMMED: tl.constexpr,
    ACC: tl.constexpr,
    center: tl.tensor = 0,
) -> None:
    """Loss and lse of rows from the four numbers of each; words end before ``last``.

    ``summed`` is the sum of the scores, each minus ``center``.
    """
    shift = softmax_shift(highest)
    log_total = tl.log(total)
    lse = shift + log_total
    # Not computed from lse, in which a large shift would round away log_total.
    loss = log_total - (at_target - shift)
    if SUMMED:
        uniform = log_total - (summed / tl.full((), words, ACC) + (center - shift))
        # 1 - smoothing in float64: a rounded smoothing near 1 would leave few of its digits.
        loss = tl.full((), 1 - smoothing, ACC) * loss + tl.full((), smoothing, ACC) * uniform
    factor = tl.full((), z, ACC)
    loss += tl.where(factor == 0, 0, factor * lse * lse)
    outside = (target < 0) | (target >= last)
    loss = tl.where(outside, float("nan"), loss)
    tl.store(loss_ptr + row, tl.where(ignored, 0, loss), mask=exists)
    tl.store(lse_ptr + row, tl.where(ignored, 0, lse), mask=exists)
