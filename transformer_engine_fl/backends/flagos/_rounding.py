"""Rounding to the dtype of a tensor where a kernel goes on with what it has rounded."""

from __future__ import annotations

import triton
import triton.language as tl

from transformer_engine_fl.backends.flagos import _launch

__all__ = ["rounded"]

_INTERPRETED = tl.constexpr(_launch.INTERPRETED)


@triton.jit  # type: ignore[untyped-decorator]
def rounded(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Rounded to the dtype that it is stored in."""
    if x.dtype == tl.float64 and KIND.primitive_bitwidth < 64:
        x = x.to(tl.float32)
    if _INTERPRETED and KIND.is_bf16():  # which cuts bits off there, and takes 0 for another number
        bits = x.to(tl.int32, bitcast=True)
        up = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x == x, up, bits | 0x400000) >> 16
        return bits.to(tl.int16).to(KIND, bitcast=True)
    else:
        return x.to(KIND)
