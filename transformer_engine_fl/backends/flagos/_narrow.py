"""8-bit and 4-bit numbers, and their scales, in Triton.

The arithmetic is that described at the head of ``ops/quantization.py``, to the bit. A conversion is
an instruction where the device has one that rounds and clamps as specified there, otherwise integer
arithmetic, which is exact on every device and in the interpreter.

A number's kind is ``"e4m3"``, ``"e5m2"`` or ``"e2m1"``. CAST says whether the device has
instructions for the first two; LEAVES_NAN, that a maximum or minimum of two numbers is NaN only if
both are. CAST implies LEAVES_NAN.

Also here: rounding to the dtype of a tensor, for which the interpreter needs its own code.
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from transformer_engine_fl.backends.flagos import _launch

if TYPE_CHECKING:
    from typing import Any

    import torch

__all__ = [
    "LARGEST_FLOAT32",
    "amax_of",
    "constants_of",
    "encoded",
    "encoded_pair",
    "encoded_quad",
    "inverse_of",
    "microscale",
    "narrowed",
    "nibble_pair",
    "nibble_word",
    "power_of_byte",
    "quotient",
    "quotient_of",
    "rounded",
    "scale_of",
    "size_of",
    "value_of",
]

_HAS_CAST = 89  # the first compute capability with conversions to float8


def constants_of(device: torch.device) -> dict[str, Any]:
    """The kernels' constants that depend on the device."""
    ptx = _launch.has_ptx()
    return {"CAST": ptx and _launch.limits(device).capability >= _HAS_CAST, "LEAVES_NAN": ptx}


# ------------------------------------------------------------------------------ numbers

_INTERPRETED = tl.constexpr(_launch.INTERPRETED)
LARGEST_FLOAT32 = tl.constexpr((2 - 2.0**-23) * 2.0**127)
_INFINITE = tl.constexpr(0x7F800000)
_SIZE = tl.constexpr(0x7FFFFFFF)  # a float32 without its sign
_FRACTION = tl.constexpr(0x7FFFFF)
_ONE = tl.constexpr(0x3F800000)
_OCTAVE = tl.constexpr(8388608.0)  # 2 ** 23


@triton.jit  # type: ignore[untyped-decorator]
def rounded(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Rounded to the dtype that it is stored in."""
    if x.dtype == tl.float64 and KIND.primitive_bitwidth < 64:
        x = x.to(tl.float32)
    if _INTERPRETED and KIND.is_bf16():  # where it truncates, and is wrong for 0
        bits = x.to(tl.int32, bitcast=True)
        bits_up = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x == x, bits_up, bits | 0x400000) >> 16
        return bits.to(tl.int16).to(KIND, bitcast=True)
    else:
        return x.to(KIND)


class _Kind(NamedTuple):
    """A kind of number.

    Attributes:
        mantissa: its mantissa bits.
        bias: the exponent's bias.
        largest: the largest value, as bits of a float32.
    """

    mantissa: int
    bias: int
    largest: int


_TABLE = {
    "e4m3": _Kind(3, 7, 0x43E00000),
    "e5m2": _Kind(2, 15, 0x47600000),
    "e2m1": _Kind(1, 1, 0x40C00000),
}


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _mantissa(kind: str) -> int:
    return _TABLE[kind].mantissa


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _bias(kind: str) -> int:
    return _TABLE[kind].bias


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _largest(kind: str) -> int:
    return _TABLE[kind].largest


@triton.jit  # type: ignore[untyped-decorator]
def _code(y: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """The code of float32 values as a float8, in integer arithmetic, as an int32."""
    MANTISSA: tl.constexpr = _mantissa(KIND)
    BIAS: tl.constexpr = _bias(KIND)
    DROPPED: tl.constexpr = 23 - MANTISSA
    # Added to a float32 below the least normal number, it leaves the bits of the code. It is a sum,
    # and the compiler does not see that the summand is a product, so that it is rounded once.
    SHIFTER: tl.constexpr = (151 - BIAS - MANTISSA) << 23
    bits = y.to(tl.int32, bitcast=True)
    size = bits & _SIZE
    missing = size > _INFINITE
    size = tl.minimum(size, _largest(KIND))
    even = (size >> DROPPED) & 1
    normal = (size + even + ((1 << (DROPPED - 1)) - 1)) >> DROPPED
    shifter = tl.full((), SHIFTER, tl.int32).to(tl.float32, bitcast=True)
    below = (size.to(tl.float32, bitcast=True) + shifter).to(tl.int32, bitcast=True) - SHIFTER
    code = tl.where(size < ((128 - BIAS) << 23), below, normal - ((127 - BIAS) << MANTISSA))
    return tl.where(missing, 127, code | ((bits >> 24) & 128))


@triton.jit  # type: ignore[untyped-decorator]
def _nibble(y: tl.tensor, LEAVES_NAN: tl.constexpr) -> tl.tensor:
    """The e2m1 code of float32 values with bit 2 inverted, as an int32.

    Before rounding, the code of a magnitude x is the least of three lines: 2 x up to 2, x + 2 from
    there, and x / 2 + 4 from 4 on; it is at most 7, also for NaN. Just below 2 ** 23 the last bit
    of a float32 is worth a half, and from there on 1: so adding x to 2 ** 23 - 2 rounds to the
    first two lines at once, and the low bits of the sum count codes from 4 on. The third line is x
    / 2 added to 2 ** 23; where there are instructions that clamp to [0, 1], this line and the bound
    are 2 ** 23 + 3 minus what x / 2 lacks to 3. Rounding keeps the order of the lines, and what is
    even. NaN lacks nothing; a product that is NaN has no sign.
    """
    if LEAVES_NAN:
        return tl.inline_asm_elementwise(
            """{ .reg .f32 size, a, b; .reg .b32 bits, sign;
            abs.f32 size, $1;
            fma.rn.sat.f32 b, size, 0fBF000000, 0f40400000;
            add.rn.f32 a, size, 0f4AFFFFFC;
            sub.rn.f32 b, 0f4B000003, b;
            min.f32 a, a, b;
            mov.b32 bits, a;
            mov.b32 sign, $1;
            shr.u32 sign, sign, 28;
            lop3.b32 $0, bits, 7, sign, 0xE2; }""",
            "=r,f", [y], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        y = tl.where(y < 6.0, y, 6.0)
        size = tl.minimum(tl.abs(y), 6.0)
        least = tl.minimum(size + (_OCTAVE - 2), size * 0.5 + _OCTAVE)
        return (least.to(tl.int32, bitcast=True) & 7) | ((y.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit  # type: ignore[untyped-decorator]
def nibble_pair(a: tl.tensor, b: tl.tensor, LEAVES_NAN: tl.constexpr) -> tl.tensor:
    """The e2m1 codes of two tensors side by side, as an int32."""
    return (_nibble(a, LEAVES_NAN) | (_nibble(b, LEAVES_NAN) << 4)) ^ 0x44


@triton.jit  # type: ignore[untyped-decorator]
def nibble_word(y: tl.tensor, LEAVES_NAN: tl.constexpr) -> tl.tensor:
    """The e2m1 codes of eight values along the last of three dimensions, in one int32."""
    shift = (tl.arange(0, 8) * 4)[None, None, :]
    return tl.sum(_nibble(y, LEAVES_NAN) << shift, axis=2) ^ 0x44444444


@triton.jit  # type: ignore[untyped-decorator]
def inverse_of(x: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """``1 / x``, rounded once, by a single instruction where there is one."""
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.div_rn(1.0, x)


@triton.jit  # type: ignore[untyped-decorator]
def encoded(y: tl.tensor, KIND: tl.constexpr, CAST: tl.constexpr) -> tl.tensor:
    """float32 values as codes of float8, in bytes."""
    if not CAST:
        return _code(y, KIND).to(tl.uint8)
    elif KIND == "e4m3":
        return tl.inline_asm_elementwise(
            """{ .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high}; }""",
            "=r,f,f,f,f", [y], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 low, high;
            cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
            mov.b32 $0, {low, high}; }""",
            "=r,f,f,f,f", [y], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def encoded_pair(a: tl.tensor, b: tl.tensor, KIND: tl.constexpr, CAST: tl.constexpr) -> tl.tensor:
    """The codes of two tensors side by side: an int16, or for e2m1 a byte."""
    if KIND == "e2m1":
        return nibble_pair(a, b, CAST).to(tl.uint8)
    elif not CAST:
        return (_code(a, KIND) | (_code(b, KIND) << 8)).to(tl.int16)
    elif KIND == "e4m3":
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;",
            "=h,f,f", [a, b], dtype=tl.int16, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;",
            "=h,f,f", [a, b], dtype=tl.int16, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def encoded_quad(
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    d: tl.tensor,
    KIND: tl.constexpr,
    CAST: tl.constexpr,
) -> tl.tensor:
    """The codes of four tensors side by side: an int32, or for e2m1 an int16."""
    if KIND == "e2m1":
        return (nibble_pair(a, b, CAST) | (nibble_pair(c, d, CAST) << 8)).to(tl.int16)
    elif not CAST:
        low = _code(a, KIND) | (_code(b, KIND) << 8)
        return low | (_code(c, KIND) << 16) | (_code(d, KIND) << 24)
    elif KIND == "e4m3":
        return tl.inline_asm_elementwise(
            """{ .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high}; }""",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 low, high;
            cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
            mov.b32 $0, {low, high}; }""",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def narrowed(x: tl.tensor, CAST: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The e4m3 code of float32 values, in the low byte of an int32, and the code's value."""
    if CAST:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 code, low, high; .reg .b32 both;
            cvt.rn.satfinite.e4m3x2.f32 code, $2, $2;
            cvt.rn.f16x2.e4m3x2 both, code;
            mov.b32 {low, high}, both;
            cvt.f32.f16 $1, low;
            cvt.u32.u16 $0, code; }""",
            "=r,=f,f", [x], dtype=(tl.int32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        code = _code(x, "e4m3")
        return code, value_of(code, "e4m3")


@triton.jit  # type: ignore[untyped-decorator]
def value_of(code: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """The float32 values of codes, exactly."""
    MANTISSA: tl.constexpr = _mantissa(KIND)
    BIAS: tl.constexpr = _bias(KIND)
    SIGN: tl.constexpr = 8 if KIND == "e2m1" else 128
    code = code.to(tl.int32)
    size = code & (SIGN - 1)
    # As the bits of a float32 a code's value is too small by a power of two, subnormal or not.
    bits = ((code & SIGN) << (28 if KIND == "e2m1" else 24)) | (size << (23 - MANTISSA))
    power = tl.full((), (254 - BIAS) << 23, tl.int32).to(tl.float32, bitcast=True)
    value = bits.to(tl.float32, bitcast=True) * power
    if KIND == "e4m3":
        return tl.where(size == 127, float("nan"), value)
    elif KIND == "e5m2":
        # An exponent of all ones stays so.
        special = (bits | _INFINITE).to(tl.float32, bitcast=True)
        return tl.where(size >= 124, special, value)
    else:
        return value


# ------------------------------------------------------------------------------- scales


@triton.jit  # type: ignore[untyped-decorator]
def size_of(x: tl.tensor, LEAVES_NAN: tl.constexpr) -> tl.tensor:
    """Magnitudes whose largest is to be found; :func:`amax_of` takes that largest."""
    if LEAVES_NAN:
        return tl.abs(x)
    else:
        return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def amax_of(largest: tl.tensor, LEAVES_NAN: tl.constexpr) -> tl.tensor:
    """The amax, from the largest result of :func:`size_of`: 0 if all values are NaN."""
    if LEAVES_NAN:
        return tl.where(largest == largest, largest, 0.0)
    else:
        return largest


@triton.jit  # type: ignore[untyped-decorator]
def quotient(largest: tl.tensor, amax: tl.tensor) -> tl.tensor:
    """``largest / amax``, rounded once, at most the largest float32."""
    return tl.minimum(tl.div_rn(largest, amax), LARGEST_FLOAT32)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _significand(number: float) -> float:
    """The significand of a positive number, in [1, 2)."""
    return math.frexp(number)[0] * 2


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _exponent_bits(number: float) -> int:
    """The exponent bits of a number, in their place in a float32."""
    return (math.frexp(number)[1] + 126) << 23


@triton.jit  # type: ignore[untyped-decorator]
def quotient_of(LARGEST: tl.constexpr, amax: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """:func:`quotient` if the compiler knows LARGEST, at least 4, and the amax is no NaN.

    PTX: without the branch of a division, which makes the divisions of a thread wait for each
    other. Mantissas are divided with a correction of the remainder (Markstein, see ``_exact``); a
    test checks for all mantissas, and the largest numbers of float8, that this rounds once.
    Exponents are subtracted, perhaps below 0. This does not hold below the least normal number, but
    there any quotient is too large. For an infinite amax the result is arbitrary.
    """
    if PTX:
        bits = amax.to(tl.int32, bitcast=True)
        m = ((bits & _FRACTION) | _ONE).to(tl.float32, bitcast=True)
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [m], dtype=tl.float32, is_pure=True, pack=1
        )
        one = tl.full((), 1.0, tl.float32)
        over = tl.full((), _significand(LARGEST), tl.float32)
        inverse = tl.fma(tl.fma(-m, inverse, one), inverse, inverse)
        q = over * inverse
        q = tl.fma(tl.fma(-m, q, over), inverse, q)
        scale = q.to(tl.int32, bitcast=True) + (_exponent_bits(LARGEST) - (bits & _INFINITE))
        # Too large a scale has become negative, or the bits of no finite number.
        scale = tl.minimum(scale.to(tl.uint32, bitcast=True), _INFINITE - 1)
        return scale.to(tl.float32, bitcast=True)
    else:
        return quotient(tl.full((), LARGEST, tl.float32), amax)


@triton.jit  # type: ignore[untyped-decorator]
def scale_of(
    amax: tl.tensor,
    LARGEST: tl.constexpr,
    epsilon: tl.tensor,
    POW2: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:
    """The float32 scale of an amax. PTX: as for :func:`quotient_of`."""
    a = tl.maximum(amax, epsilon)
    scale = quotient_of(LARGEST, a, PTX)
    scale = tl.where((a == 0) | (a == float("inf")), 1.0, scale)
    if POW2:
        return (scale.to(tl.int32, bitcast=True) & _INFINITE).to(tl.float32, bitcast=True)
    else:
        return scale


@triton.jit  # type: ignore[untyped-decorator]
def microscale(amax: tl.tensor, KIND: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """``2**-e`` and the byte e + 127, for the least e with ``amax <= largest * 2**e``."""
    LARGEST: tl.constexpr = _largest(KIND)
    # A mantissa above that of the largest value carries over into the exponent.
    CARRY: tl.constexpr = 0x7FFFFF - (LARGEST & 0x7FFFFF)
    bits = amax.to(tl.int32, bitcast=True)
    infinite = bits == _INFINITE
    byte = tl.maximum(((bits + CARRY) >> 23) - ((LARGEST >> 23) - 127), 0)
    scale = tl.where(infinite, 0x400000, (254 - byte) << 23)
    return scale.to(tl.float32, bitcast=True), tl.where(infinite, 254, byte).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def power_of_byte(byte: tl.tensor) -> tl.tensor:
    """The float32 value of a byte of e8m0: ``2 ** (byte - 127)``, NaN for 255."""
    byte = byte.to(tl.int32)
    bits = tl.where(byte == 0, 0x400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
