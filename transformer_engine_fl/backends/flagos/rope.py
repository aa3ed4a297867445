"""Rotary position embedding in Triton.

One kernel rotates some heads of one token: it finds the token's position, works out the
cosines and sines of its angles once, and uses them for all those heads. Packed queries,
keys and values are three launches of it, on views of the packed tensor; the values' turns
no feature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import (
    WIDEST_UNIT,
    check_fresh,
    check_size,
    keep,
    plain,
)
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.ops import rope as contracts
from transformer_engine_fl.ops._dtypes import math_dtype

__all__ = [
    "fused_qkv_rope_backward",
    "fused_qkv_rope_forward",
    "fused_rope_backward",
    "fused_rope_forward",
]

_INTERPRETED = tl.constexpr(_launch.INTERPRETED)

# ------------------------------------------------------------------------------ kernels


@triton.jit  # type: ignore[untyped-decorator]
def _in_full(
    place: tl.tensor, length: tl.tensor, cp_size: tl.tensor, cp_rank: tl.tensor
) -> tl.tensor:
    """A place among a rank's ``length`` tokens of a sequence -> the place in the full one."""
    chunk = length // 2
    ahead = tl.where(place < chunk, cp_rank, 2 * cp_size - 2 - cp_rank) * chunk
    return place + tl.where(cp_size == 1, 0, ahead)


@triton.jit  # type: ignore[untyped-decorator]
def _cos_sin(
    freqs_ptr: tl.tensor, feature: tl.tensor, mask: tl.tensor, ACC: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    angle = tl.load(freqs_ptr + feature, mask=mask, other=0).to(ACC)
    if _INTERPRETED:
        return tl.cos(angle), tl.sin(angle)
    else:  # Triton's own are approximations there, and wrong for large angles
        return libdevice.cos(angle), libdevice.sin(angle)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "inner", "heads", "per_group", "table_rows", "table_stride", "cp_size", "cp_rank",
        "sequences", "length", "x_outer", "x_inner", "x_group", "x_head",
        "y_outer", "y_inner", "y_group", "y_head",
    ]
)  # fmt: skip
def _rotate(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    freqs_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    inner: tl.int32,
    heads: tl.int32,
    per_group: tl.int32,
    table_rows: tl.int32,
    table_stride: tl.int64,
    cp_size: tl.int32,
    cp_rank: tl.int32,
    sequences: tl.int32,
    length: tl.int32,
    x_outer: tl.int64,
    x_inner: tl.int64,
    x_group: tl.int64,
    x_head: tl.int64,
    y_outer: tl.int64,
    y_inner: tl.int64,
    y_group: tl.int64,
    y_head: tl.int64,
    SEQUENCE_FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    SEQUENCES: tl.constexpr,
) -> None:
    """HEADS heads of one token; strides count units of UNIT elements.

    ROTATED of the WIDTH features turn, of which HALF holds one half and REST the others.
    BACK: the gradient, which goes through the transpose.
    """
    outer = tl.program_id(0) // inner
    within = tl.program_id(0) % inner
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    exists = (head < heads)[:, None]
    group = (head // per_group).to(tl.int64)
    member = (head % per_group).to(tl.int64)
    x_ptr += (outer * x_outer + within * x_inner) * UNIT
    y_ptr += (outer * y_outer + within * y_inner) * UNIT
    x_row = x_ptr + ((group * x_group + member * x_head) * UNIT)[:, None]
    y_row = y_ptr + ((group * y_group + member * y_head) * UNIT)[:, None]
    if REST > 0:
        rest = ROTATED + tl.arange(0, REST)[None, :]
        others = exists & (rest < WIDTH)
        tl.store(y_row + rest, tl.load(x_row + rest, mask=others), mask=others)
    if ROTATED > 0:
        turns = True
        if offsets_ptr is not None:
            number = tl.arange(0, SEQUENCES)
            begins = tl.load(offsets_ptr + number, mask=number <= sequences, other=2**31 - 1)
            sequence = tl.sum((begins // cp_size <= outer).to(tl.int32), axis=0) - 1
            turns = sequence < sequences
            sequence = tl.minimum(sequence, sequences - 1)
            begin = tl.load(offsets_ptr + sequence) // cp_size
            end = tl.load(offsets_ptr + sequence + 1) // cp_size
            position = _in_full(outer - begin, end - begin, cp_size, cp_rank)
        elif SEQUENCE_FIRST:
            sequence = within
            position = _in_full(outer, length, cp_size, cp_rank)
        else:
            sequence = outer
            position = _in_full(within, length, cp_size, cp_rank)
        if starts_ptr is not None:
            position += tl.load(starts_ptr + sequence)
        known = (position >= 0) & (position < table_rows)
        freqs_ptr += position.to(tl.int64) * table_stride
        pair = tl.arange(0, HALF)
        paired = pair < ROTATED // 2
        if INTERLEAVED:
            first = 2 * pair
            second = 2 * pair + 1
        else:
            first = pair
            second = pair + ROTATED // 2
        cos_a, sin_a = _cos_sin(freqs_ptr, first, paired & known, ACC)
        cos_b, sin_b = _cos_sin(freqs_ptr, second, paired & known, ACC)
        nothing = tl.where(known, 0.0, float("nan")).to(ACC)
        cos_a = tl.where(turns, cos_a + nothing, 1.0)[None, :]
        cos_b = tl.where(turns, cos_b + nothing, 1.0)[None, :]
        sin_a = tl.where(turns, sin_a + nothing, 0.0)[None, :]
        sin_b = tl.where(turns, sin_b + nothing, 0.0)[None, :]
        if BACK:
            sin_a, sin_b = -sin_b, -sin_a
        if INTERLEAVED:
            feature = tl.arange(0, 2 * HALF)[None, :]
            mask = exists & (feature < ROTATED)
            x = tl.load(x_row + feature, mask=mask, other=0).to(ACC)
            u, v = tl.split(x.reshape(HEADS, HALF, 2))
            y = tl.join(u * cos_a - v * sin_a, v * cos_b + u * sin_b).reshape(HEADS, 2 * HALF)
            tl.store(y_row + feature, y.to(y_ptr.dtype.element_ty), mask=mask)
        else:
            mask = exists & paired[None, :]
            u = tl.load(x_row + first[None, :], mask=mask, other=0).to(ACC)
            v = tl.load(x_row + second[None, :], mask=mask, other=0).to(ACC)
            new_u = u * cos_a - v * sin_a
            new_v = v * cos_b + u * sin_b
            tl.store(y_row + first[None, :], new_u.to(y_ptr.dtype.element_ty), mask=mask)
            tl.store(y_row + second[None, :], new_v.to(y_ptr.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------------------- launching

_TILE, _THREADS = 2048, 128  # features of a program
_LAUNCHES: dict[object, _launch.Launch] = {}
_TRITON_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


class _Places(NamedTuple):
    """Where tokens stand: what all launches of one call share."""

    starts: Tensor | None
    qkv_format: str
    offsets: Tensor | None
    interleaved: bool
    cp_size: int
    cp_rank: int
    back: bool


def _turn(op: str, x: Tensor, y: Tensor, freqs: Tensor | None, places: _Places) -> None:
    """Rotate ``x``, ``[outer, inner, groups, per_group, d]``, into ``y`` of the same shape."""
    outer, inner, groups, per_group, width = x.shape
    heads = groups * per_group
    if not x.numel():
        return
    check_size(op, "tokens", outer * inner)
    rotated = 0 if freqs is None else freqs.shape[-1]
    half = triton.next_power_of_2(max(1, rotated // 2))
    rest = triton.next_power_of_2(width - rotated) if width > rotated else 0
    block = min(triton.next_power_of_2(heads), max(1, _TILE // max(2 * half, rest)))
    sequences = 0 if places.offsets is None else places.offsets.shape[0] - 1
    counted = triton.next_power_of_2(sequences + 1)
    strides = (*x.stride()[:-1], *y.stride()[:-1])
    unit = math.gcd(*strides, WIDEST_UNIT)
    first = places.qkv_format != "bshd"
    key = (
        x.dtype, width, rotated, block, counted, unit, first, places.starts is None,
        places.offsets is None, places.interleaved, places.back, x.device,
    )  # fmt: skip
    launch = _LAUNCHES.get(key) or keep(
        _LAUNCHES,
        key,
        _launch.Launch(
            _rotate,
            x.device,
            threads=_THREADS,
            SEQUENCE_FIRST=first,
            INTERLEAVED=places.interleaved,
            BACK=places.back,
            WIDTH=width,
            ROTATED=rotated,
            ACC=_TRITON_TYPES[math_dtype(x.dtype)],
            UNIT=unit,
            HEADS=block,
            HALF=half,
            REST=rest,
            SEQUENCES=counted,
        ),
    )
    table = (0, 0) if freqs is None else (freqs.shape[0], freqs.stride(0))
    length = outer if first else inner
    numbers = (inner, heads, per_group, *table, places.cp_size, places.cp_rank, sequences, length)
    launch(
        (outer * inner, -(-heads // block)),
        (x, y, freqs, places.starts, places.offsets),
        (*numbers, *(stride // unit for stride in strides)),
    )


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
        raise NotSupportedError(f"{op}: its options are no numbers yet")
    starts, offsets = (
        None if value is None else plain(op, name, value).contiguous()
        for name, value in (("start_positions", start_positions), ("cu_seqlens", cu_seqlens))
    )
    return _Places(starts, qkv_format, offsets, interleaved, cp_size, cp_rank, back)


def _dense(op: str, name: str, tensor: Tensor) -> Tensor:
    """The tensor with dense features."""
    tensor = plain(op, name, tensor)
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _table(op: str, name: str, freqs: Tensor) -> Tensor:
    """``[positions, d2]``."""
    return _dense(op, name, freqs)[:, 0, 0]


def _five(tokens: Tensor) -> Tensor:
    """Tokens as ``[outer, inner, heads, 1, d]``."""
    return (tokens if tokens.dim() == 4 else tokens.unsqueeze(1)).unsqueeze(-2)


def _queries(tokens: Tensor, groups: int, per_group: int) -> Tensor:
    """Queries, a head each or ``per_group`` side by side, as ``[outer, inner, groups, .., d]``."""
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


def _empty(op: str, like: Tensor, shape: Sequence[int]) -> Tensor:
    output = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    check_fresh(op, output)
    return output


# ---------------------------------------------------------------------------- operators


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
    tokens = _dense(op, name, tokens)
    output = _empty(op, tokens, tokens.shape)
    _turn(op, _five(tokens), _five(output), _table(op, "freqs", freqs), places)
    return output


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
    packed = _dense(op.name, "qkv_input", qkv_input)
    *leading, groups, _ = packed.shape
    dq, dk, dv = qkv_split
    q = _empty(op.name, packed, (*leading, groups * (dq // dk), dk))
    k = _empty(op.name, packed, (*leading, groups, dk))
    v = _empty(op.name, packed, (*leading, groups, dv))
    of_q, of_k, of_v = _parts(packed, qkv_split)
    q_table = _table(op.name, "q_freqs", q_freqs)
    _turn(op.name, _queries(of_q, groups, dq // dk), _queries(q, groups, dq // dk), q_table, places)
    _turn(op.name, _five(of_k), _five(k), _table(op.name, "k_freqs", k_freqs), places)
    _turn(op.name, _five(of_v), _five(v), None, places)
    return q, k, v


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
        _dense(op.name, name, grad)
        for name, grad in (("q_grad", q_grad), ("k_grad", k_grad), ("v_grad", v_grad))
    )
    *leading, groups, _ = k.shape
    dq, dk, dv = qkv_split
    packed = _empty(op.name, k, (*leading, groups, dq + dk + dv))
    of_q, of_k, of_v = _parts(packed, qkv_split)
    q_table = _table(op.name, "q_freqs", q_freqs)
    _turn(op.name, _queries(q, groups, dq // dk), _queries(of_q, groups, dq // dk), q_table, places)
    _turn(op.name, _five(k), _five(of_k), _table(op.name, "k_freqs", k_freqs), places)
    _turn(op.name, _five(v), _five(of_v), None, places)
    return packed
