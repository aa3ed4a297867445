"""Device library functions written in Triton, for its interpreter, which has no device library."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = ["div_rn", "div_rz", "erf", "exp", "fmod", "log", "pow", "rsqrt", "tanh", "trunc"]


@triton.jit  # type: ignore[untyped-decorator]
def erf(x: Any) -> Any:
    """The error function."""
    return tl.erf(x)


@triton.jit  # type: ignore[untyped-decorator]
def exp(x: Any) -> Any:
    """e to the power of x."""
    return tl.exp(x)


@triton.jit  # type: ignore[untyped-decorator]
def log(x: Any) -> Any:
    """The natural logarithm."""
    return tl.log(x)


@triton.jit  # type: ignore[untyped-decorator]
def rsqrt(x: Any) -> Any:
    """The reciprocal of the square root."""
    return tl.rsqrt(x)


@triton.jit  # type: ignore[untyped-decorator]
def tanh(x: Any) -> Any:
    """The hyperbolic tangent."""
    tail = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - tail) / (1.0 + tail)
    return tl.where(x < 0, -size, size)


@triton.jit  # type: ignore[untyped-decorator]
def pow(x: Any, y: Any) -> Any:
    """x to the power of y; for y = 2 or positive x only."""
    return tl.where(y == 2, x * x, tl.exp2(y * tl.log2(tl.abs(x))))


@triton.jit  # type: ignore[untyped-decorator]
def div_rn(x: Any, y: Any) -> Any:
    """A quotient, rounded to nearest."""
    return x / y


@triton.jit  # type: ignore[untyped-decorator]
def trunc(x: Any) -> Any:
    """x rounded towards zero."""
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit  # type: ignore[untyped-decorator]
def div_rz(x: Any, y: Any) -> Any:
    """A quotient; computed as rounded to nearest, not towards zero."""
    return x / y


@triton.jit  # type: ignore[untyped-decorator]
def fmod(x: Any, y: Any) -> Any:
    """The remainder of a division."""
    return x - y * trunc(x / y)
