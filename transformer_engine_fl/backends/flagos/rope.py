"""Rotary position embedding in Triton.

A program takes a few tokens and a few neighbouring heads of each, so that programs which run at
the same time read and write the same parts of memory. It finds the tokens' positions, and computes
the cosines and sines of their angles once for its heads, while these are being loaded. Packed
queries, keys and values are one launch, in which every program has heads of one of the three, on
views of the packed tensor; no feature of the values is rotated.
"""

# mypy: disable-error-code="assignment,misc,no-any-return,unreachable"
# Kernels build tuples step by step, which a type checker takes for changes of type.

from __future__ import annotations

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
    import torch
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
def _is_large(angle: tl.tensor) -> tl.tensor:
    """1 if the angle is large, infinite or NaN; else 0."""
    return 1 - (tl.abs(angle) <= _LARGEST_ANGLE).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _cos_sin(angle: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Cosines and sines of any angles; how one is reduced does not depend on the others."""
    if angle.dtype == tl.float32:
        rest, quarter = _reduced(angle)
        exact_rest, exact_quarter = _reduced_exactly(angle)
        large = _is_large(angle) != 0
        return _cos_sin_of_rest(
            tl.where(large, exact_rest, rest), tl.where(large, exact_quarter, quarter)
        )
    elif _INTERPRETED:
        return tl.cos(angle), tl.sin(angle)
    else:  # Triton's own are approximations there, and wrong for large angles
        return libdevice.cos(angle), libdevice.sin(angle)


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
def _write_rotated(
    x: tl.tuple,
    y_row: tl.tensor,
    mask: tl.tensor,
    in_sequence: tl.tensor,
    known: tl.tensor,
    cos_a: tl.tensor,
    sin_a: tl.tensor,
    cos_b: tl.tensor,
    sin_b: tl.tensor,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Store the rotated features; ``x`` are both halves, or pairs, which were read by ``mask``."""
    nothing = tl.where(in_sequence & ~known, float("nan"), 0.0).to(ACC)
    cos_a += nothing
    cos_b += nothing
    sin_a += nothing
    sin_b += nothing
    if BACK:
        sin_a, sin_b = -sin_b, -sin_a
    dtype: tl.constexpr = y_row.dtype.element_ty
    if INTERLEAVED:
        u, v = tl.split(x[0].to(ACC).reshape(x[0].shape[0], x[0].shape[1], HALF, 2))
    else:
        u, v = x[0].to(ACC), x[1].to(ACC)
    new_u = (u * cos_a - v * sin_a).to(dtype)
    new_v = (v * cos_b + u * sin_b).to(dtype)
    # Tokens that are not rotated are copied: rotated by 0, an infinity or NaN would spread to the
    # other feature of its pair.
    if INTERLEAVED:
        y = tl.join(new_u, new_v).reshape(x[0].shape)
        if PACKED:
            y = tl.where(in_sequence, y, x[0])
        tl.store(y_row + tl.arange(0, 2 * HALF)[None, None, :], y, mask=mask)
    else:
        if PACKED:
            new_u = tl.where(in_sequence, new_u, x[0])
            new_v = tl.where(in_sequence, new_v, x[1])
        pair = tl.arange(0, HALF)[None, None, :]
        tl.store(y_row + pair, new_u, mask=mask)
        tl.store(y_row + ROTATED // 2 + pair, new_v, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_heads(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    freqs_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    first_token: tl.tensor,
    program: tl.tensor,
    tokens: tl.tensor,
    inner: tl.tensor,
    cp_size: tl.tensor,
    cp_rank: tl.tensor,
    sequences: tl.tensor,
    highest: tl.tensor,
    length: tl.tensor,
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
    SEQUENCE_FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    TABLE_UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    """Rotate HEADS heads of TOKENS tokens, as ``program`` of those for tokens from the first on.

    ROTATED of the WIDTH features are rotated; HALF has room for half of them, REST for the others.
    GROUPED: a group has several heads.
    """
    PACKED: tl.constexpr = offsets_ptr is not None
    portions = tl.cdiv(heads, HEADS)
    token = first_token + (program // portions) * TOKENS + tl.arange(0, TOKENS)
    exists = token < tokens
    outer = token // inner
    within = token % inner
    in_sequence = exists
    if PACKED:
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
    pair = tl.arange(0, HALF)[None, None, :]
    feature = tl.arange(0, 2 * HALF)[None, None, :]
    head = (program % portions) * HEADS + tl.arange(0, HEADS)
    there = exists[:, None, None] & (head < heads)[None, :, None]
    x_head_at = _head_at(head, per_group, x_group, x_head, GROUPED)[None, :, None]
    y_head_at = _head_at(head, per_group, y_group, y_head, GROUPED)[None, :, None]
    x_row = x_ptr + ((outer * x_outer + within * x_inner)[:, None, None] + x_head_at) * UNIT
    y_row = y_ptr + ((outer * y_outer + within * y_inner)[:, None, None] + y_head_at) * UNIT
    # In flight while the angles are computed.
    x = ()
    if INTERLEAVED and ROTATED > 0:
        mask = there & (feature < ROTATED)
        x += (fetch(x_row + feature, mask),)
    elif ROTATED > 0:
        mask = there & (pair < ROTATED // 2)
        x += (fetch(x_row + pair, mask),)
        x += (fetch(x_row + ROTATED // 2 + pair, mask),)
    if REST > 0:
        other = ROTATED + tl.arange(0, REST)[None, None, :]
        others = there & (other < WIDTH)
        rest = fetch(x_row + other, others, other=None)
    if ROTATED > 0:
        in_sequence = in_sequence[:, None, None]
        known = in_sequence & ((position >= 0) & (position < table_rows))[:, None, None]
        freqs_ptr += position.to(tl.int64)[:, None, None] * (table_stride * TABLE_UNIT)
        if INTERLEAVED:
            angles = fetch(freqs_ptr + feature, known & (feature < ROTATED)).to(ACC)
            a, b = tl.split(angles.reshape(angles.shape[0], 1, HALF, 2))
        else:
            has_angle = known & (pair < ROTATED // 2)
            a = fetch(freqs_ptr + pair, has_angle).to(ACC)
            b = fetch(freqs_ptr + ROTATED // 2 + pair, has_angle).to(ACC)
        if a.dtype != tl.float32:
            usual: tl.constexpr = False
        else:  # most tables hold each angle twice, for both features of a pair
            usual = tl.max(_is_large(a) | (a != b).to(tl.int32)) == 0
        if usual:
            angle, quarter = _reduced(a)
            cos, sin = _cos_sin_of_rest(angle, quarter)
            _write_rotated(
                x, y_row, mask, in_sequence, known, cos, sin, cos, sin,
                INTERLEAVED, BACK, PACKED, ACC, ROTATED, HALF,
            )  # fmt: skip
        else:
            cos_a, sin_a = _cos_sin(a)
            cos_b, sin_b = _cos_sin(b)
            _write_rotated(
                x, y_row, mask, in_sequence, known, cos_a, sin_a, cos_b, sin_b,
                INTERLEAVED, BACK, PACKED, ACC, ROTATED, HALF,
            )  # fmt: skip
    if REST > 0:
        tl.store(y_row + other, rest, mask=others)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "tokens", "inner", "cp_size", "cp_rank", "sequences", "highest", "length",
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
    TOGETHER: tl.constexpr,
    Q_TOKENS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    Q_GROUPED: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    Q_ROTATED: tl.constexpr,
    Q_HALF: tl.constexpr,
    Q_REST: tl.constexpr,
    K_TOKENS: tl.constexpr,
    K_HEADS: tl.constexpr,
    K_GROUPED: tl.constexpr,
    K_WIDTH: tl.constexpr,
    K_ROTATED: tl.constexpr,
    K_HALF: tl.constexpr,
    K_REST: tl.constexpr,
    V_TOKENS: tl.constexpr,
    V_HEADS: tl.constexpr,
    V_GROUPED: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_ROTATED: tl.constexpr,
    V_HALF: tl.constexpr,
    V_REST: tl.constexpr,
) -> None:
    """Some heads of some tokens of the queries, the keys or the values.

    A single tensor takes the place of the queries. TOGETHER tokens after one another have the
    programs of their queries, then of their keys, then of their values: a program has Q_TOKENS and
    Q_HEADS of the queries, and so on. Strides count units of UNIT elements, row strides of freqs
    units of TABLE_UNIT. BACK: the gradient, which uses the transposed rotation.
    """
    q_programs = tl.cdiv(q_heads, Q_HEADS) * (TOGETHER // Q_TOKENS)
    k_programs = tl.cdiv(k_heads, K_HEADS) * (TOGETHER // K_TOKENS)
    programs = q_programs + k_programs + tl.cdiv(v_heads, V_HEADS) * (TOGETHER // V_TOKENS)
    program = tl.program_id(0) % programs
    first = (tl.program_id(0) // programs) * TOGETHER
    if program < q_programs:
        _rotate_heads(
            q_ptr, q_to_ptr, q_freqs_ptr, starts_ptr, offsets_ptr, first, program,
            tokens, inner, cp_size, cp_rank, sequences, highest, length,
            q_heads, q_per_group, q_rows, q_stride, q_outer, q_inner, q_group, q_head,
            q_to_outer, q_to_inner, q_to_group, q_to_head,
            SEQUENCE_FIRST, INTERLEAVED, BACK, ACC, UNIT, TABLE_UNIT,
            Q_TOKENS, Q_HEADS, Q_GROUPED, Q_WIDTH, Q_ROTATED, Q_HALF, Q_REST,
        )  # fmt: skip
    elif k_ptr is not None:
        if program < q_programs + k_programs:
            _rotate_heads(
                k_ptr, k_to_ptr, k_freqs_ptr, starts_ptr, offsets_ptr, first, program - q_programs,
                tokens, inner, cp_size, cp_rank, sequences, highest, length,
                k_heads, k_per_group, k_rows, k_stride, k_outer, k_inner, k_group, k_head,
                k_to_outer, k_to_inner, k_to_group, k_to_head,
                SEQUENCE_FIRST, INTERLEAVED, BACK, ACC, UNIT, TABLE_UNIT,
                K_TOKENS, K_HEADS, K_GROUPED, K_WIDTH, K_ROTATED, K_HALF, K_REST,
            )  # fmt: skip
        else:
            _rotate_heads(
                v_ptr, v_to_ptr, v_ptr, starts_ptr, offsets_ptr, first,
                program - q_programs - k_programs, tokens, inner, cp_size, cp_rank, sequences,
                highest, length,
                v_heads, v_per_group, v_rows, v_stride, v_outer, v_inner, v_group, v_head,
                v_to_outer, v_to_inner, v_to_group, v_to_head,
                SEQUENCE_FIRST, INTERLEAVED, BACK, ACC, UNIT, TABLE_UNIT,
                V_TOKENS, V_HEADS, V_GROUPED, V_WIDTH, V_ROTATED, V_HALF, V_REST,
            )  # fmt: skip


# ---------------------------------------------------------------------------- launching


class _Cut(NamedTuple):
    """How tokens and heads are divided among programs.

    Attributes:
        threads: threads of a program whose heads fit into ``bytes``; others have more.
        bytes: bytes of heads for which ``threads`` suffice.
        heads: heads of a token in a program, at most.
    """

    threads: int
    bytes: int
    heads: int


class _Plan(NamedTuple):
    """How to rotate.

    Attributes:
        launch: the kernel.
        together: tokens whose programs follow one another.
        programs: their number.
    """

    launch: _launch.Launch
    together: int
    programs: int


_PLANS: dict[object, _Plan] = {}

_WIDEST = 8192
"""Bytes of a program's heads, at most, unless one head, or the cut, has more."""


def _candidates(tensors: int, interleaved: int, features: int, itemsize: int) -> Iterator[_Cut]:
    for threads, size in ((32, 2048), (64, 2048), (64, 4096), (128, 8192)):
        for heads in (8, 16):
            yield _Cut(threads, size, heads)


def _rule(
    device: torch.device | None, tensors: int, interleaved: int, features: int, itemsize: int
) -> _Cut:
    threads, size = (64, 4096) if interleaved else (32, 2048)
    heads = size // (128 * itemsize)  # as many as fill these bytes if they have 128 features
    narrow = features * itemsize <= 128
    return _Cut(threads, size, 2 * heads if narrow and not interleaved else heads)


_CUT = Choice(
    "fused_rope",
    _Cut,
    key=("tensors", "interleaved", "features", "itemsize"),
    rounded=("features",),
    candidates=_candidates,
    heuristic=_rule,
    wrong=bounded(threads=(32, 1024), bytes=(512, 2**15), heads=(1, 64)),
    plans=(_PLANS,),
)


def _heads_of(heads: int, bytes_of_one: int, cut: _Cut) -> int:
    """HEADS for a tensor that has ``heads``."""
    fit = max(1, max(_WIDEST, cut.bytes) // bytes_of_one)
    return min(triton.next_power_of_2(heads), cut.heads, fit)


def _tokens_of(heads: int, most: int, half: int, room: int, threads: int) -> int:
    """TOKENS for HEADS heads, where ``most`` is that of the tensor with the most.

    The angles of more tokens take registers, of which all tensors have as many as one needs.
    """
    angles = max(2, (8 if heads == most else 4) // heads)  # of a thread
    return max(1, min(room // heads, angles * threads // half))


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


_CONSTANTS = ("TOKENS", "HEADS", "GROUPED", "WIDTH", "ROTATED", "HALF", "REST")
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
    heads = tuple([part.heads for part in parts])
    check_size(op, "heads (counted twice)", 2 * sum(heads))  # with those of unfilled programs
    constants = tuple([part.constants() for part in parts])
    plan = _plan_of(first, heads, constants, places, (unit, table_unit))
    programs = -(-outer * inner // plan.together) * plan.programs
    check_size(op, "programs", programs)
    sequences = 0 if places.offsets is None else places.offsets.shape[0] - 1
    check_size(op, "sequences", sequences)
    length = inner if places.qkv_format == "bshd" else outer
    numbers = [outer * inner, inner, places.cp_size, places.cp_rank]
    numbers += (sequences, highest_power(sequences) if sequences else 0, length)
    tensors: list[Tensor | None] = []
    for part, count, (rows, stride) in zip(parts, heads, tables, strict=True):
        numbers += (count, part.x.shape[3], rows, stride // table_unit)
        numbers += (step // unit for step in part.steps())
        tensors += (part.x, part.y, part.freqs)
    missing = 3 - len(parts)
    numbers += [0] * (_NUMBERS * missing)
    tensors = [*tensors, *[None] * (3 * missing)][:8]  # the values have no table
    plan.launch((programs, 1), (*tensors, places.starts, places.offsets), tuple(numbers))


def _plan_of(
    like: Tensor,
    heads: tuple[int, ...],
    parts: tuple[tuple[int, ...], ...],
    places: _Places,
    units: tuple[int, int],
) -> _Plan:
    """The plan for parts with so many heads and these constants; ``units``: UNIT, TABLE_UNIT."""
    sequence_first = places.qkv_format != "bshd"
    key = (
        like.dtype, heads, parts, units, sequence_first, places.starts is None,
        places.offsets is None, places.interleaved, places.back, like.device,
    )  # fmt: skip
    plan = _PLANS.get(key)
    if plan is not None:
        return plan
    widest = max(max(width, 2 * half * (rotated > 0)) for _, width, rotated, half, _ in parts)
    cut = _CUT(like.device, len(parts), int(places.interleaved), widest, like.itemsize)
    bytes_of_one = triton.next_power_of_2(widest) * like.itemsize
    of_programs = [_heads_of(count, bytes_of_one, cut) for count in heads]
    most = max(of_programs)
    room = max(cut.bytes // bytes_of_one, most)
    threads = min(max(1, room * bytes_of_one // cut.bytes) * cut.threads, 1024)
    sizes = [
        (_tokens_of(own, most, half, room, threads), own)
        for own, (*_, half, _) in zip(of_programs, parts, strict=True)
    ]
    together = max(tokens for tokens, _ in sizes)
    programs = sum(
        together // tokens * -(-count // most)
        for count, (tokens, most) in zip(heads, sizes, strict=True)
    )
    nothing = (1,) * len(_CONSTANTS)
    values = [(*size, *part) for size, part in zip(sizes, parts, strict=True)]
    of_parts: dict[str, Any] = {
        f"{name}_{constant}": value
        for name, part in zip("QKV", (*values, nothing, nothing), strict=False)
        for constant, value in zip(_CONSTANTS, part, strict=True)
    }
    launch = _launch.Launch(
        _rotate,
        like.device,
        threads=threads,
        SEQUENCE_FIRST=sequence_first,
        INTERLEAVED=places.interleaved,
        BACK=places.back,
        ACC=TRITON_TYPES[math_dtype(like.dtype)],
        UNIT=units[0],
        TABLE_UNIT=units[1],
        TOGETHER=together,
        **of_parts,
    )
    return add_to_cache(_PLANS, key, _Plan(launch, together, programs))


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
