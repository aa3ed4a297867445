"""What narrow numbers there are, and float32 arithmetic, in float64: for oracles.

Float64 has more than twice as many bits as float32, so that what is calculated in it from
float32 numbers and then rounded is rounded as if once.
"""

from __future__ import annotations

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
    "unpacked",
]

NARROW = {
    # bits of the mantissa, least exponent of a normal number
    "float8_e4m3fn": (3, -6),
    "float8_e5m2": (2, -14),
    "uint8": (1, 0),
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_BITS = {
    # an integer of its size, the bias of the exponent, bits of the mantissa
    "float32": ("int32", 127, 23),
    "float64": ("int64", 1023, 52),
}

LARGEST_FLOAT32 = (2 - 2.0**-23) * 2.0**127


def float32(value: Tensor) -> Tensor:
    """Rounded to float32, in float64."""
    return value.float().double()


def power_of_two(exponent: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``2 ** exponent``, exactly, of whole numbers; in float64 or float32.

    What ``torch.ldexp`` is for. With tensors on a device that is not the current one, that
    launches its kernel on the current one (https://github.com/pytorch/pytorch/issues/189567).
    """
    import torch

    dtype = dtype or torch.float64
    whole, bias, mantissa = _BITS[str(dtype).removeprefix("torch.")]
    exponent = exponent.to(getattr(torch, whole))

    def normal(part: Tensor) -> Tensor:
        return ((part.clamp(1 - bias, bias) + bias) << mantissa).view(dtype)

    half = exponent >> 1  # of a subnormal number both factors are normal
    return normal(half) * normal(exponent - half)


def nearest(value: Tensor, dtype: str) -> Tensor:
    """The value of a data dtype that is nearest, ties to even, clamped."""
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

    a = amax.clamp_min(float32(torch.tensor(epsilon)).item())
    quotient = float32(largest / a).clamp_max(LARGEST_FLOAT32)
    scale = quotient.masked_fill((a == 0) | a.isinf(), 1.0)
    return power_of_two(torch.frexp(scale).exponent - 1) if power_of_2 else scale


def microscaling_exponent(amax: Tensor, largest: float) -> Tensor:
    """The least e with amax <= largest * 2**e, from -127 to 127."""
    import torch

    mantissa, exponent = torch.frexp(amax / largest)
    e = torch.where(mantissa > 0.5, exponent, exponent - 1)
    e = e.masked_fill(amax == 0, -127).masked_fill(amax.isinf(), 127)
    return e.clamp(-127, 127)


def largest_of(magnitude: Tensor, owner: Tensor, count: int) -> Tensor:
    """The largest magnitude of each of so many owners, 0 for one that has none."""
    start = magnitude.new_zeros(count)
    return start.scatter_reduce(0, owner.flatten(), magnitude.flatten(), "amax")


def unpacked(data: Tensor) -> Tensor:
    """Bytes of two e2m1 values each, to float64 values."""
    import torch

    code = torch.stack([data & 15, data >> 4], -1).flatten(-2).long()
    size = torch.tensor(E2M1, dtype=torch.float64, device=data.device)[code & 7]
    return torch.where(code >= 8, -size, size)
