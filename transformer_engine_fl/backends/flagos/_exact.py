"""Arithmetic that rounds once, also where Triton's own rounds twice or approximates."""

from __future__ import annotations

import triton
import triton.language as tl

from transformer_engine_fl.backends.flagos import _launch

__all__ = ["fma", "mean_of", "mean_of_all"]

_INTERPRETED = tl.constexpr(_launch.INTERPRETED)


@triton.jit  # type: ignore[untyped-decorator]
def fma(x: tl.tensor, y: tl.tensor, z: tl.tensor) -> tl.tensor:
    """``x * y + z`` of float32, rounded once."""
    if _INTERPRETED:  # where tl.fma would round the product too
        return (x.to(tl.float64) * y + z).to(tl.float32)
    else:
        return tl.fma(x, y, z)


@triton.jit  # type: ignore[untyped-decorator]
def mean_of(total: tl.tensor, count: tl.tensor) -> tl.tensor:
    """``total / count``. The mean of equal numbers is exactly that number, so their variance is 0.

    Triton's division of float32 may be off by two in the last place, and an exact one takes a
    branch. Here the remainder corrects an approximate quotient (P. W. Markstein, Computation of
    elementary functions on the IBM RISC System/6000 processor, 1990); an infinite total is not
    corrected.
    """
    if total.dtype == tl.float32:
        count = count.to(tl.float32)
        inverse = 1.0 / count
        mean = total * inverse
        rest = fma(-mean, count, total)
        return tl.where(rest == rest, fma(rest, inverse, mean), mean)
    else:
        return total / count


@triton.jit  # type: ignore[untyped-decorator]
def mean_of_all(total: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """The same for a count known at compile time: a power of two takes one product."""
    if COUNT & (COUNT - 1) == 0:
        return total * (1.0 / COUNT)
    else:
        return mean_of(total, tl.full((), COUNT, tl.int32))
