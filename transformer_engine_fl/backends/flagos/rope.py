"""Rotary position embedding in Triton.

A program takes some tokens and some heads of each. It finds the tokens' positions, computes the
cosines and sines of their angles once, keeps them in registers, and processes its heads with them,
several at a time so that enough loads are in flight. Packed queries, keys and values are one
launch, in which every program has heads of one of the three, on views of the packed tensor; no
feature of the values is rotated.
"""

# mypy: disable-error-code="assignment,misc,no-any-return,unreachable"
# Kernels build tuples step by step, which a type checker takes for changes of type.

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import libdevice

from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import (
    TRITON_TYPES,
    WIDEST_UNIT,
    add_to_cache,
    check_size,
    dense,
    fresh,
    plain,
)
from transformer_engine_fl.backends.flagos._exact import fma
from transformer_engine_fl.backends.flagos._fetch import fetch
from transformer_engine_fl.backends.flagos._sequences import highest_power, steps, token_at
from transformer_engine_fl.backends.flagos._tiles import bounded
from transformer_engine_fl.backends.flagos.tuning import Choice
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.ops import rope as contracts
from transformer_engine_fl.ops._dtypes import math_dtype

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "fused_qkv_rope_backward",
    "fused_qkv_rope_forward",
    "fused_rope_backward",
    "fused_rope_forward",
]

_INTERPRETED = tl.constexpr(_launch.INTERPRETED)

# --------------------------------------------------------------------- cosines and sines
#
# An angle is a multiple k of pi / 2 plus a rest r (W. J. Cody and W. Waite, Software Manual
# for the Elementary Functions, 1980). k is the integer nearest to the angle times 2 / pi,
# which a fused multiply-add with 1.5 * 2 ** 23 leaves in the low bits of its result. pi / 2
# is the sum of two float32, less 1.8e-15. Up to the largest angle:
#
# - k is off by at most 0.054 because 2 / pi is rounded, so that |r| <= 0.8701;
# - the angle minus k times the first float32 is exact, as a multiple of 2 ** -23 below 1, or
#   of 2 ** -24 where k is 1; subtracting k times the second rounds once; what is left out is
#   below 2.4e-9.
#
# The polynomials are minimax on that range, found by Remez's exchange with coefficients
# rounded to float32 one after another: off by less than 4.7e-9 for the sine and 2.8e-10 for
# the cosine. With all roundings both are within 1e-7 of the exact value.

_LARGEST_ANGLE = tl.constexpr(2097152.0)  # 2 ** 21
_TWO_OVER_PI = tl.constexpr(0.6366197466850281)
_HALF_PI = tl.constexpr(1.5707963705062866)
_REST_OF_HALF_PI = tl.constexpr(-4.371138828673793e-08)
_TO_INTEGER = tl.constexpr(12582912.0)
_SIN_3 = tl.constexpr(-0.16666637361049652)
_SIN_5 = tl.constexpr(0.008331302553415298)
_SIN_7 = tl.constexpr(-0.0001941808732226491)
_COS_4 = tl.constexpr(0.041666630655527115)
_COS_6 = tl.constexpr(-0.0013886616798117757)
_COS_8 = tl.constexpr(2.435762871755287e-05)

# The bits of 2 / pi in 32-bit words, shifted right by four bits: enough for the largest float32.
_WORDS = (
    0x0A2F9836, 0xE4E44152, 0x9FC2757D, 0x1F534DDC, 0x0DB62959, 0x93C43904, 0x1FE5163A
)  # fmt: skip


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _bits_of_two_over_pi(place: int) -> int:
    return _WORDS[place]


@triton.jit  # type: ignore[untyped-decorator]
def _reduced(angle: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The rest and k, as described above, of float32 angles up to the largest."""
    shifted = fma(angle, _TWO_OVER_PI, _TO_INTEGER)
    k = shifted - _TO_INTEGER
    rest = fma(k, -_REST_OF_HALF_PI, fma(k, -_HALF_PI, angle))
    return rest, shifted.to(tl.int32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _word(from_word: tl.tensor, PLACE: tl.constexpr) -> tl.tensor:
    """The word of 2 / pi with index PLACE + ``from_word``."""
    word = tl.full(from_word.shape, _bits_of_two_over_pi(PLACE), tl.uint64)
    for further in tl.static_range(1, 4):
        word = tl.where(from_word == further, _bits_of_two_over_pi(PLACE + further), word)
    return word.to(tl.uint64)


@triton.jit  # type: ignore[untyped-decorator]
def _reduced_exactly(angle: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The same for float32 angles of at least 2 ** 21; NaN for infinities and NaN.

    An angle is m * 2 ** s, with an integer m of 24 bits. In 2 ** s * 2 / pi the bits of weight 4
    and more do not matter, since m times them is a multiple of 4. m times the following 96 bits
    gives k and, in its last 94 bits, the fraction, which is too small by less than 2 ** -70.
    """
    bits = angle.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 255
    m = ((bits & 0x7FFFFF) | 0x800000).to(tl.uint64)
    first = exponent - 148
    by = (first & 31).to(tl.uint64)
    first = first >> 5
    a, b, c, d = _word(first, 0), _word(first, 1), _word(first, 2), _word(first, 3)
    top = (((a << 32) | b) << by) >> 32
    middle = (((b << 32) | c) << by) >> 32
    last = (((c << 32) | d) << by) >> 32
    product = ((m * top) << 32) + m * middle + ((m * last) >> 32)
    half = tl.full((), 1 << 61, tl.uint64)
    product = tl.add(product, half, sanitize_overflow=False)
    k = (product >> 62).to(tl.int32)
    fraction = (product & ((1 << 62) - 1)).to(tl.int64) - (1 << 61)
    high = fraction.to(tl.float32)
    low = (fraction - high.to(tl.int64)).to(tl.float32)
    unit = 2.0**-62
    rest = fma(high, _REST_OF_HALF_PI * unit, low * (_HALF_PI * unit))
    rest = fma(high, _HALF_PI * unit, rest)
    rest = tl.where(exponent == 255, float("nan"), rest)
    return tl.where(bits < 0, -rest, rest), tl.where(bits < 0, -k, k)


@triton.jit  # type: ignore[untyped-decorator]
def _cos_sin_of_rest(r: tl.tensor, quarter: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Cosine and sine of ``quarter`` * pi / 2 plus a rest."""
    square = r * r
    sin = fma(fma(fma(square, _SIN_7, _SIN_5), square, _SIN_3), square * r, r)
    tail = fma(fma(square, _COS_8, _COS_6), square, _COS_4)
    cos = fma(tail, square * square, fma(square, -0.5, 1.0))
    odd = quarter & 1 != 0
    new_sin = tl.where(odd, cos, sin)
    new_cos = tl.where(odd, sin, cos)
    new_sin = tl.where(quarter & 2 != 0, -new_sin, new_sin)
    new_cos = tl.where((quarter + 1) & 2 != 0, -new_cos, new_cos)
    return new_cos, new_sin


@triton.jit  # type: ignore[untyped-decorator]
def _cos_sin_any(angle: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    if _INTERPRETED:
        return tl.cos(angle), tl.sin(angle)
    else:  # Triton's own are approximations there, and wrong for large angles
        return libdevice.cos(angle), libdevice.sin(angle)


@triton.jit  # type: ignore[untyped-decorator]
def _is_large(angle: tl.tensor) -> tl.tensor:
    """1 if the angle is large, infinite or NaN; else 0."""
    return 1 - (tl.abs(angle) <= _LARGEST_ANGLE).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _cos_sin_mixed(angle: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Cosines and sines of angles some of which are large."""
    rest, quarter = _reduced(angle)
    exact_rest, exact_quarter = _reduced_exactly(angle)
    large = _is_large(angle) != 0
    return _cos_sin_of_rest(
        tl.where(large, exact_rest, rest), tl.where(large, exact_quarter, quarter)
    )


@triton.jit  # type: ignore[untyped-decorator]
def _cos_sin(a: tl.tensor, b: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Cosines and sines of tiles of angles; how an angle is reduced does not depend on the others.

    Most tables hold each angle twice, for both features of a pair.
    """
    if a.dtype == tl.float32:
        if tl.max(_is_large(a) | (a != b).to(tl.int32)) == 0:
            rest, quarter = _reduced(a)
            cos_a, sin_a = _cos_sin_of_rest(rest, quarter)
            cos_b, sin_b = cos_a, sin_a
        else:
            cos_a, sin_a = _cos_sin_mixed(a)
            cos_b, sin_b = _cos_sin_mixed(b)
    else:
        cos_a, sin_a = _cos_sin_any(a)
        cos_b, sin_b = _cos_sin_any(b)
    return cos_a, sin_a, cos_b, sin_b


# ------------------------------------------------------------------------------ kernels


@triton.jit  # type: ignore[untyped-decorator]
def _in_full(
    place: tl.tensor, length: tl.tensor, cp_size: tl.tensor, cp_rank: tl.tensor
) -> tl.tensor:
    """The position in the full sequence of a place among a rank's ``length`` tokens of it."""
    chunk = length // 2
    ahead = tl.where(place < chunk, cp_rank, 2 * cp_size - 2 - cp_rank) * chunk
    return place + tl.where(cp_size == 1, 0, ahead)


@triton.jit  # type: ignore[untyped-decorator]
def _head_at(
    head: tl.tensor,
    per_group: tl.tensor,
    group_step: tl.tensor,
    head_step: tl.tensor,
    GROUPED: tl.constexpr,
) -> tl.tensor:
    """The offset of a head from the first one, in units."""
    if GROUPED:
        return (head // per_group) * group_step + (head % per_group) * head_step
    else:
        return head * group_step


@triton.jit  # type: ignore[untyped-decorator]
def _read_heads(
    x_ptr: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    exists: tl.tensor,
    per_group: tl.tensor,
    x_group: tl.tensor,
    x_head: tl.tensor,
    INTERLEAVED: tl.constexpr,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
) -> tl.tuple:
    """Load HEADS heads: two halves, or both at once if pairs are interleaved, and the rest."""
    pair = tl.arange(0, HALF)
    feature = tl.arange(0, 2 * HALF)
    reads = ()
    for i in tl.static_range(HEADS):
        there = exists[:, None] & (start + i < end)
        row = x_ptr + _head_at(start + i, per_group, x_group, x_head, GROUPED) * UNIT
        if INTERLEAVED and ROTATED > 0:
            mask = there & (feature < ROTATED)[None, :]
            reads += (fetch(row + feature[None, :], mask),)
        elif ROTATED > 0:
            mask = there & (pair < ROTATED // 2)[None, :]
            reads += (fetch(row + pair[None, :], mask),)
            reads += (fetch(row + ROTATED // 2 + pair[None, :], mask),)
        if REST > 0:
            other = ROTATED + tl.arange(0, REST)
            others = there & (other < WIDTH)[None, :]
            reads += (fetch(row + other[None, :], others, other=None),)
    return reads


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_heads(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    freqs_ptr: tl.tensor,
    outer: tl.tensor,
    within: tl.tensor,
    exists: tl.tensor,
    position: tl.tensor,
    in_sequence: tl.tensor,
    first_head: tl.tensor,
    portion: tl.tensor,
    heads: tl.tensor,
    per_group: tl.tensor,
    table_rows: tl.tensor,
    table_stride: tl.tensor,
    x_outer: tl.tensor,
    x_inner: tl.tensor,
    x_group: tl.tensor,
    x_head: tl.tensor,
    y_outer: tl.tensor,
    y_inner: tl.tensor,
    y_group: tl.tensor,
    y_head: tl.tensor,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    TABLE_UNIT: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    """Rotate ``portion`` heads of these tokens, HEADS at a time.

    ROTATED of the WIDTH features are rotated; HALF has room for half of them, REST for the others.
    GROUPED: a group has several heads. PACKED: some tokens may not be rotated.
    """
    pair = tl.arange(0, HALF)
    feature = tl.arange(0, 2 * HALF)
    x_ptr += (outer * x_outer + within * x_inner)[:, None] * UNIT
    y_ptr += (outer * y_outer + within * y_inner)[:, None] * UNIT
    end = tl.minimum(first_head + portion, heads)
    # In flight while the angles are computed.
    reads = _read_heads(
        x_ptr, first_head, end, exists, per_group, x_group, x_head,
        INTERLEAVED, UNIT, HEADS, GROUPED, WIDTH, ROTATED, HALF, REST,
    )  # fmt: skip
    if ROTATED > 0:
        known = (in_sequence & (position >= 0) & (position < table_rows))[:, None]
        freqs_ptr += position.to(tl.int64)[:, None] * (table_stride * TABLE_UNIT)
        if INTERLEAVED:
            entry = freqs_ptr + feature[None, :]
            angle = fetch(entry, known & (feature < ROTATED)[None, :])
            angle_a, angle_b = tl.split(angle.to(ACC).reshape(TOKENS, HALF, 2))
        else:
            entry = freqs_ptr + pair[None, :]
            has_angle = known & (pair < ROTATED // 2)[None, :]
            angle_a = fetch(entry, has_angle).to(ACC)
            angle_b = fetch(entry + ROTATED // 2, has_angle).to(ACC)
        cos_a, sin_a, cos_b, sin_b = _cos_sin(angle_a, angle_b)
        nothing = tl.where(in_sequence[:, None] & ~known, float("nan"), 0.0).to(ACC)
        cos_a += nothing
        cos_b += nothing
        sin_a += nothing
        sin_b += nothing
        if BACK:
            sin_a, sin_b = -sin_b, -sin_a
    EACH: tl.constexpr = (ROTATED > 0) + (ROTATED > 0 and not INTERLEAVED) + (REST > 0)
    for start in tl.range(first_head, end, HEADS):
        # All loads come before the first store: the compiler does not know that stores go to other
        # memory.
        for i in tl.static_range(HEADS):
            there = exists[:, None] & (start + i < end)
            row = y_ptr + _head_at(start + i, per_group, y_group, y_head, GROUPED) * UNIT
            if ROTATED > 0:
                if INTERLEAVED:
                    u, v = tl.split(reads[EACH * i].to(ACC).reshape(TOKENS, HALF, 2))
                else:
                    u = reads[EACH * i].to(ACC)
                    v = reads[EACH * i + 1].to(ACC)
                new_u = u * cos_a - v * sin_a
                new_v = v * cos_b + u * sin_b
                # Tokens that are not rotated are copied below: rotated by 0, an infinity or NaN
                # would spread to the other feature of its pair.
                if INTERLEAVED:
                    y = tl.join(new_u, new_v).reshape(TOKENS, 2 * HALF)
                    y = y.to(y_ptr.dtype.element_ty)
                    if PACKED:
                        y = tl.where(in_sequence[:, None], y, reads[EACH * i])
                    mask = there & (feature < ROTATED)[None, :]
                    tl.store(row + feature[None, :], y, mask=mask)
                else:
                    y_u = new_u.to(y_ptr.dtype.element_ty)
                    y_v = new_v.to(y_ptr.dtype.element_ty)
                    if PACKED:
                        y_u = tl.where(in_sequence[:, None], y_u, reads[EACH * i])
                        y_v = tl.where(in_sequence[:, None], y_v, reads[EACH * i + 1])
                    mask = there & (pair < ROTATED // 2)[None, :]
                    tl.store(row + pair[None, :], y_u, mask=mask)
                    row_v = row + ROTATED // 2
                    tl.store(row_v + pair[None, :], y_v, mask=mask)
            if REST > 0:
                other = ROTATED + tl.arange(0, REST)
                others = there & (other < WIDTH)[None, :]
                tl.store(row + other[None, :], reads[EACH * i + EACH - 1], mask=others)
        reads = _read_heads(
            x_ptr, start + HEADS, end, exists, per_group, x_group, x_head,
            INTERLEAVED, UNIT, HEADS, GROUPED, WIDTH, ROTATED, HALF, REST,
        )  # fmt: skip


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "tokens", "inner", "portion", "cp_size", "cp_rank", "sequences", "highest", "length",
        *(
            f"{part}_{number}"
            for part in "qkv"
            for number in (
                "heads", "per_group", "rows", "stride", "outer", "inner", "group", "head",
                "to_outer", "to_inner", "to_group", "to_head",
            )
        ),
    ]
)  # fmt: skip
def _rotate(
    q_ptr: tl.tensor,
    q_to_ptr: tl.tensor,
    q_freqs_ptr: tl.tensor,
    k_ptr: tl.tensor,
    k_to_ptr: tl.tensor,
    k_freqs_ptr: tl.tensor,
    v_ptr: tl.tensor,
    v_to_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    tokens: tl.int32,
    inner: tl.int32,
    portion: tl.int32,
    cp_size: tl.int32,
    cp_rank: tl.int32,
    sequences: tl.int32,
    highest: tl.int32,
    length: tl.int32,
    q_heads: tl.int32,
    q_per_group: tl.int32,
    q_rows: tl.int32,
    q_stride: tl.int64,
    q_outer: tl.int64,
    q_inner: tl.int64,
    q_group: tl.int64,
    q_head: tl.int64,
    q_to_outer: tl.int64,
    q_to_inner: tl.int64,
    q_to_group: tl.int64,
    q_to_head: tl.int64,
    k_heads: tl.int32,
    k_per_group: tl.int32,
    k_rows: tl.int32,
    k_stride: tl.int64,
    k_outer: tl.int64,
    k_inner: tl.int64,
    k_group: tl.int64,
    k_head: tl.int64,
    k_to_outer: tl.int64,
    k_to_inner: tl.int64,
    k_to_group: tl.int64,
    k_to_head: tl.int64,
    v_heads: tl.int32,
    v_per_group: tl.int32,
    v_rows: tl.int32,
    v_stride: tl.int64,
    v_outer: tl.int64,
    v_inner: tl.int64,
    v_group: tl.int64,
    v_head: tl.int64,
    v_to_outer: tl.int64,
    v_to_inner: tl.int64,
    v_to_group: tl.int64,
    v_to_head: tl.int64,
    SEQUENCE_FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    TABLE_UNIT: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    Q_GROUPED: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    Q_ROTATED: tl.constexpr,
    Q_HALF: tl.constexpr,
    Q_REST: tl.constexpr,
    K_GROUPED: tl.constexpr,
    K_WIDTH: tl.constexpr,
    K_ROTATED: tl.constexpr,
    K_HALF: tl.constexpr,
    K_REST: tl.constexpr,
    V_GROUPED: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_ROTATED: tl.constexpr,
    V_HALF: tl.constexpr,
    V_REST: tl.constexpr,
) -> None:
    """TOKENS tokens, and of each ``portion`` heads of the queries, the keys or the values.

    A single tensor takes the place of the queries. Strides count units of UNIT elements, row
    strides of freqs units of TABLE_UNIT. BACK: the gradient, which uses the transposed rotation.
    """
    q_portions = tl.cdiv(q_heads, portion)
    k_portions = tl.cdiv(k_heads, portion)
    portions = q_portions + k_portions + tl.cdiv(v_heads, portion)
    part = tl.program_id(0) % portions
    token = (tl.program_id(0) // portions) * TOKENS + tl.arange(0, TOKENS)
    exists = token < tokens
    outer = token // inner
    within = token % inner
    in_sequence = exists
    if offsets_ptr is not None:
        sequence, place, own_length, in_sequence = token_at(
            offsets_ptr, outer, sequences, highest, cp_size
        )
        position = _in_full(place, own_length, cp_size, cp_rank)
    elif SEQUENCE_FIRST:
        sequence = within
        position = _in_full(outer, length, cp_size, cp_rank)
    else:
        sequence = outer
        position = _in_full(within, length, cp_size, cp_rank)
    if starts_ptr is not None:
        position += tl.load(starts_ptr + sequence, mask=exists, other=0)
    outer = outer.to(tl.int64)
    within = within.to(tl.int64)
    if part < q_portions:
        _rotate_heads(
            q_ptr, q_to_ptr, q_freqs_ptr, outer, within, exists, position, in_sequence,
            part * portion, portion, q_heads, q_per_group, q_rows, q_stride,
            q_outer, q_inner, q_group, q_head, q_to_outer, q_to_inner, q_to_group, q_to_head,
            INTERLEAVED, BACK, offsets_ptr is not None, ACC, UNIT, TABLE_UNIT, HEADS, TOKENS,
            Q_GROUPED, Q_WIDTH, Q_ROTATED, Q_HALF, Q_REST,
        )  # fmt: skip
    elif k_ptr is not None:
        if part < q_portions + k_portions:
            _rotate_heads(
                k_ptr, k_to_ptr, k_freqs_ptr, outer, within, exists, position, in_sequence,
                (part - q_portions) * portion, portion, k_heads, k_per_group, k_rows, k_stride,
                k_outer, k_inner, k_group, k_head, k_to_outer, k_to_inner, k_to_group, k_to_head,
                INTERLEAVED, BACK, offsets_ptr is not None, ACC, UNIT, TABLE_UNIT, HEADS, TOKENS,
                K_GROUPED, K_WIDTH, K_ROTATED, K_HALF, K_REST,
            )  # fmt: skip
        else:
            _rotate_heads(
                v_ptr, v_to_ptr, v_ptr, outer, within, exists, position, in_sequence,
                (part - q_portions - k_portions) * portion, portion,
                v_heads, v_per_group, v_rows, v_stride,
                v_outer, v_inner, v_group, v_head, v_to_outer, v_to_inner, v_to_group, v_to_head,
                INTERLEAVED, BACK, offsets_ptr is not None, ACC, UNIT, TABLE_UNIT, HEADS, TOKENS,
                V_GROUPED, V_WIDTH, V_ROTATED, V_HALF, V_REST,
            )  # fmt: skip


# ---------------------------------------------------------------------------- launching


class _Cut(NamedTuple):
    """How tokens and heads are divided among programs.

    Attributes:
        threads: threads of a program.
        bytes: bytes of one head of a program's tokens.
        heads: heads that a program reads at a time.
        programs: least programs per multiprocessor, as far as heads can be divided.
    """

    threads: int
    bytes: int
    heads: int
    programs: int


_OF_ONE = _Cut(128, 2048, 8, 128)
_OF_THREE = _Cut(128, 2048, 4, 40)  # so that programs of queries have no more heads than others


def _rule(tensors: int) -> _Cut:
    return _OF_ONE if tensors == 1 else _OF_THREE


class _Plan(NamedTuple):
    """How to rotate.

    Attributes:
        launch: the kernel.
        heads, tokens: what a program processes at a time.
        wanted: number of programs to aim for, as far as heads can be divided.
    """

    launch: _launch.Launch
    heads: int
    tokens: int
    wanted: int


_PLANS: dict[object, _Plan] = {}


def _candidates(tensors: int, features: int, itemsize: int) -> Iterator[_Cut]:
    for threads, size, heads in itertools.product((128, 256), (2048, 4096), (4, 8)):
        yield _Cut(threads, size, heads, _rule(tensors).programs)


_CUT = Choice(
    "fused_rope",
    _Cut,
    key=("tensors", "features", "itemsize"),
    rounded=("features",),
    candidates=_candidates,
    heuristic=lambda device, tensors, features, itemsize: _rule(tensors),
    wrong=bounded(threads=(32, 1024), bytes=(512, 2**15), heads=(1, 16), programs=range(1, 257)),
    plans=(_PLANS,),
)


class _Places(NamedTuple):
    """The positions of tokens, and how to rotate."""

    starts: Tensor | None
    qkv_format: str
    offsets: Tensor | None
    interleaved: bool
    cp_size: int
    cp_rank: int
    back: bool


class _Part(NamedTuple):
    """``[outer, inner, groups, per_group, d]``, and a new tensor of the same shape."""

    x: Tensor
    y: Tensor
    freqs: Tensor | None

    def constants(self) -> tuple[int, int, int, int, int]:
        """GROUPED, WIDTH, ROTATED, HALF and REST."""
        width, rotated = self.x.shape[-1], 0 if self.freqs is None else self.freqs.shape[-1]
        rest = triton.next_power_of_2(width - rotated) if width > rotated else 0
        half = triton.next_power_of_2(max(1, rotated // 2))
        return int(self.x.shape[3] > 1), width, rotated, half, rest

    @property
    def heads(self) -> int:
        return self.x.shape[2] * self.x.shape[3]

    def steps(self) -> tuple[int, ...]:
        return (*steps(self.x), *steps(self.y))


_CONSTANTS = ("GROUPED", "WIDTH", "ROTATED", "HALF", "REST")
_NUMBERS = 12  # per part


def _run_rotation(op: str, parts: Sequence[_Part], places: _Places) -> None:
    """Rotate one tensor, or queries, keys and values."""
    if not any(part.x.numel() for part in parts):
        return
    first = parts[0].x
    outer, inner = first.shape[:2]
    check_size(op, "tokens", outer * inner)
    check_size(op, "ranks", places.cp_size)
    tables = [
        (0, 0) if it.freqs is None else (it.freqs.shape[0], it.freqs.stride(0)) for it in parts
    ]
    check_size(op, "positions", max(rows for rows, _ in tables))
    unit = math.gcd(*(step for part in parts for step in part.steps()), WIDEST_UNIT)
    table_unit = math.gcd(*(stride for _, stride in tables), WIDEST_UNIT)
    constants = tuple([part.constants() for part in parts])
    heads = [part.heads for part in parts]
    check_size(op, "heads (counted twice)", 2 * sum(heads))  # portions may be twice as large
    portion = triton.next_power_of_2(max(heads))
    plan = _plan_of(first, constants, places, (unit, table_unit, portion))
    blocks = -(-outer * inner // plan.tokens)
    while portion > plan.heads and blocks * _portions(heads, portion) < plan.wanted:
        portion //= 2
    programs = blocks * _portions(heads, portion)
    check_size(op, "programs", programs)
    sequences = 0 if places.offsets is None else places.offsets.shape[0] - 1
    check_size(op, "sequences", sequences)
    length = inner if places.qkv_format == "bshd" else outer
    numbers = [outer * inner, inner, portion, places.cp_size, places.cp_rank]
    numbers += (sequences, highest_power(sequences) if sequences else 0, length)
    tensors: list[Tensor | None] = []
    for part, (rows, stride) in zip(parts, tables, strict=True):
        numbers += (part.heads, part.x.shape[3], rows, stride // table_unit)
        numbers += (step // unit for step in part.steps())
        tensors += (part.x, part.y, part.freqs)
    missing = 3 - len(parts)
    numbers += [0] * (_NUMBERS * missing)
    tensors = [*tensors, *[None] * (3 * missing)][:8]  # the values have no table
    plan.launch((programs, 1), (*tensors, places.starts, places.offsets), tuple(numbers))


def _portions(heads: Sequence[int], portion: int) -> int:
    """The number of programs for each block of tokens."""
    return sum(-(-it // portion) for it in heads)


def _plan_of(
    like: Tensor, parts: tuple[tuple[int, ...], ...], places: _Places, sizes: tuple[int, int, int]
) -> _Plan:
    """The plan for parts with these constants; ``sizes``: UNIT, TABLE_UNIT, the most heads."""
    sequence_first = places.qkv_format != "bshd"
    key = (
        like.dtype, parts, sizes, sequence_first, places.starts is None, places.offsets is None,
        places.interleaved, places.back, like.device,
    )  # fmt: skip
    plan = _PLANS.get(key)
    if plan is not None:
        return plan
    unit, table_unit, most_heads = sizes
    widest = max(2 * half * (rotated > 0) + rest for *_, rotated, half, rest in parts)
    cut = _CUT(like.device, len(parts), widest, like.itemsize)
    tokens = max(1, cut.bytes // like.itemsize // triton.next_power_of_2(widest))
    heads = min(most_heads, cut.heads)
    names = [f"{part}_{it}" for part in "QKV" for it in _CONSTANTS]
    nothing = (1,) * len(_CONSTANTS)
    values = [it for part in (*parts, nothing, nothing) for it in part]
    of_parts: dict[str, Any] = dict(zip(names, values, strict=False))
    launch = _launch.Launch(
        _rotate,
        like.device,
        threads=cut.threads,
        SEQUENCE_FIRST=sequence_first,
        INTERLEAVED=places.interleaved,
        BACK=places.back,
        ACC=TRITON_TYPES[math_dtype(like.dtype)],
        UNIT=unit,
        TABLE_UNIT=table_unit,
        HEADS=heads,
        TOKENS=tokens,
        **of_parts,
    )
    wanted = cut.programs * _launch.limits(like.device).multiprocessors
    return add_to_cache(_PLANS, key, _Plan(launch, heads, tokens, wanted))


def _places(
    op: str,
    start_positions: Tensor | None,
    qkv_format: str,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
    back: bool,
) -> _Places:
    if not all(isinstance(value, int) for value in (cp_size, cp_rank)):
        raise NotSupportedError(f"{op}: its options are symbolic, not concrete numbers")
    starts, offsets = (
        None if value is None else plain(op, name, value).contiguous()
        for name, value in (("start_positions", start_positions), ("cu_seqlens", cu_seqlens))
    )
    return _Places(starts, qkv_format, offsets, interleaved, cp_size, cp_rank, back)


def _table(op: str, name: str, freqs: Tensor) -> Tensor:
    """``[positions, d2]``."""
    return dense(op, name, freqs)[:, 0, 0]


def _five(tokens: Tensor) -> Tensor:
    """Tokens as ``[outer, inner, heads, 1, d]``."""
    return (tokens if tokens.dim() == 4 else tokens.unsqueeze(1)).unsqueeze(-2)


def _queries(tokens: Tensor, groups: int, per_group: int) -> Tensor:
    """Queries, single heads or ``per_group`` side by side, as ``[outer, inner, groups, .., d]``."""
    tokens = tokens if tokens.dim() == 4 else tokens.unsqueeze(1)
    width = tokens.shape[2] * tokens.shape[3] // max(1, groups * per_group)
    strides = (tokens.stride(2) * per_group, tokens.stride(2))
    if tokens.shape[2] == groups and per_group > 1:
        strides = (tokens.stride(2), width)
    shape = (*tokens.shape[:2], groups, per_group, width)
    return tokens.as_strided(shape, (*tokens.stride()[:2], *strides, tokens.stride(3)))


def _parts(packed: Tensor, split: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The views of queries, keys and values."""
    dq, dk, _ = split
    return packed[..., :dq], packed[..., dq : dq + dk], packed[..., dq + dk :]


# ---------------------------------------------------------------------------- operators


@repeating
def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    *,
    start_positions: Tensor | None = None,
    qkv_format: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """``fused_rope_forward`` of the contract."""
    op = contracts.fused_rope_forward
    given = (start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank)
    op.check(input, freqs, **dict(zip(_OPTIONS, given, strict=True)))
    return _one(op.name, "input", input, freqs, _places(op.name, *given, back=False))


@repeating
def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    *,
    start_positions: Tensor | None = None,
    qkv_format: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """``fused_rope_backward`` of the contract."""
    op = contracts.fused_rope_backward
    given = (start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank)
    op.check(output_grads, freqs, **dict(zip(_OPTIONS, given, strict=True)))
    return _one(op.name, "output_grads", output_grads, freqs, _places(op.name, *given, back=True))


_OPTIONS = (
    "start_positions", "qkv_format", "interleaved", "cu_seqlens", "cp_size", "cp_rank"
)  # fmt: skip


def _one(op: str, name: str, tokens: Tensor, freqs: Tensor, places: _Places) -> Tensor:
    tokens = dense(op, name, tokens)
    output = fresh(op, tokens, tokens.shape)
    _run_rotation(op, [_Part(_five(tokens), _five(output), _table(op, "freqs", freqs))], places)
    return output


@repeating
def fused_qkv_rope_forward(
    qkv_input: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    *,
    qkv_split: Sequence[int],
    start_positions: Tensor | None = None,
    qkv_format: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """``fused_qkv_rope_forward`` of the contract."""
    op = contracts.fused_qkv_rope_forward
    given = (start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank)
    options = dict(zip(_OPTIONS, given, strict=True))
    op.check(qkv_input, q_freqs, k_freqs, qkv_split=qkv_split, **options)
    places = _places(op.name, *given, back=False)
    packed = dense(op.name, "qkv_input", qkv_input)
    *leading, groups, _ = packed.shape
    dq, dk, dv = qkv_split
    q = fresh(op.name, packed, (*leading, groups * (dq // dk), dk))
    k = fresh(op.name, packed, (*leading, groups, dk))
    v = fresh(op.name, packed, (*leading, groups, dv))
    of_q, of_k, of_v = _parts(packed, qkv_split)
    tables = _table(op.name, "q_freqs", q_freqs), _table(op.name, "k_freqs", k_freqs)
    parts = (
        _Part(_queries(of_q, groups, dq // dk), _queries(q, groups, dq // dk), tables[0]),
        _Part(_five(of_k), _five(k), tables[1]),
        _Part(_five(of_v), _five(v), None),
    )
    _run_rotation(op.name, parts, places)
    return q, k, v


@repeating
def fused_qkv_rope_backward(
    q_grad: Tensor,
    k_grad: Tensor,
    v_grad: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    *,
    qkv_split: Sequence[int],
    start_positions: Tensor | None = None,
    qkv_format: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """``fused_qkv_rope_backward`` of the contract."""
    op = contracts.fused_qkv_rope_backward
    given = (start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank)
    options = dict(zip(_OPTIONS, given, strict=True))
    op.check(q_grad, k_grad, v_grad, q_freqs, k_freqs, qkv_split=qkv_split, **options)
    places = _places(op.name, *given, back=True)
    q, k, v = (
        dense(op.name, name, grad)
        for name, grad in (("q_grad", q_grad), ("k_grad", k_grad), ("v_grad", v_grad))
    )
    *leading, groups, _ = k.shape
    dq, dk, dv = qkv_split
    packed = fresh(op.name, k, (*leading, groups, dq + dk + dv))
    of_q, of_k, of_v = _parts(packed, qkv_split)
    tables = _table(op.name, "q_freqs", q_freqs), _table(op.name, "k_freqs", k_freqs)
    parts = (
        _Part(_queries(q, groups, dq // dk), _queries(of_q, groups, dq // dk), tables[0]),
        _Part(_five(k), _five(of_k), tables[1]),
        _Part(_five(v), _five(of_v), None),
    )
    _run_rotation(op.name, parts, places)
    return packed
