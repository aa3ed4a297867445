"""Values of the narrow dtypes, and float32 arithmetic, computed in float64: for oracles.

Float64 has more than twice the mantissa bits of float32, so an operation on float32 numbers that
is calculated in float64 and then rounded to float32 gives the correctly rounded float32 result.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from transformer_engine_fl.ops._formats import LARGEST

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "E2M1",
    "LARGEST_FLOAT32",
    "NARROW",
    "float32",
    "largest_of",
    "microscaling_exponent",
    "nearest",
    "power_of_two",
    "scale_of",
    "single",
    "unpacked",
]

NARROW = {
    # mantissa bits, least exponent of a normal number
    "float8_e4m3fn": (3, -6),
    "float8_e5m2": (2, -14),
    "uint8": (1, 0),
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_BITS = {
    # an integer dtype of its size, exponent bias, mantissa bits
    "float32": ("int32", 127, 23),
    "float64": ("int64", 1023, 52),
}

LARGEST_FLOAT32 = (2 - 2.0**-23) * 2.0**127


def float32(value: Tensor) -> Tensor:
    """Rounded to float32, in float64."""
    return value.float().double()


def single(number: float) -> float:
    """A number in the range of float32, rounded to it."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def power_of_two(exponent: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``2 ** exponent`` for whole exponents, exact, in float64 or float32.

    Replaces ``torch.ldexp``, which launches its kernel on the current device even if the tensors
    are on another one (https://github.com/pytorch/pytorch/issues/189567).
    """
    import torch

    dtype = dtype or torch.float64
    whole, bias, mantissa = _BITS[str(dtype).removeprefix("torch.")]
    exponent = exponent.to(getattr(torch, whole))

    def normal(part: Tensor) -> Tensor:
        return ((part.clamp(1 - bias, bias) + bias) << mantissa).view(dtype)

    half = exponent >> 1  # both factors are normal even if the result is subnormal
    return normal(half) * normal(exponent - half)


def nearest(value: Tensor, dtype: str) -> Tensor:
    """The nearest value of a data dtype: ties to even, clamped to its range."""
    import torch

    mantissa, least = NARROW[dtype]
    value = value.clamp(-LARGEST[dtype], LARGEST[dtype])
    exponent = torch.frexp(value.nan_to_num(1.0)).exponent - 1
    step = power_of_two(exponent.clamp_min(least) - mantissa)
    return (value / step).round() * step


def scale_of(
    amax: Tensor, largest: float, epsilon: float = 0.0, power_of_2: bool = False
) -> Tensor:
    """The float32 scale of an amax."""
    import torch

    a = amax.clamp_min(single(epsilon))
    quotient = float32(largest / a).clamp_max(LARGEST_FLOAT32)
    scale = quotient.masked_fill((a == 0) | a.isinf(), 1.0)
    return power_of_two(torch.frexp(scale).exponent - 1) if power_of_2 else scale


def microscaling_exponent(amax: Tensor, largest: float) -> Tensor:
    """The least e from -127 to 127 with ``amax <= largest * 2**e``."""
    import torch

    mantissa, exponent = torch.frexp(amax / largest)
    e = torch.where(mantissa > 0.5, exponent, exponent - 1)
    e = e.masked_fill(amax == 0, -127).masked_fill(amax.isinf(), 127)
    return e.clamp(-127, 127)


def largest_of(magnitude: Tensor, owner: Tensor, count: int) -> Tensor:
    """The largest magnitude that each of ``count`` owners has, 0 for an owner without elements."""
    start = magnitude.new_zeros(count)
    return start.scatter_reduce(0, owner.flatten(), magnitude.flatten(), "amax")


def unpacked(data: Tensor) -> Tensor:
    """Bytes that hold two e2m1 values each, as float64 values."""
    import torch

    code = torch.stack([data & 15, data >> 4], -1).flatten(-2).long()
    size = torch.tensor(E2M1, dtype=torch.float64, device=data.device)[code & 7]
    return torch.where(code >= 8, -size, size)
