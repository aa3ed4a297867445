"""Rotary embedding in plain PyTorch: the definitions, in float32 (float64 for float64)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends.reference._sequences import Packed
from transformer_engine_fl.backends.reference._values import as_written

__all__ = [
    "fused_qkv_rope_backward",
    "fused_qkv_rope_forward",
    "fused_rope_backward",
    "fused_rope_forward",
]


@dataclass(frozen=True, slots=True)
class _Places:
    """The position of each token, shaped to broadcast over the tokens' own dimensions.

    Attributes:
        positions: int64.
        inside: whether a token belongs to a sequence; None if all do.
    """

    positions: Tensor
    inside: Tensor | None


def _places(
    tokens: Tensor,
    start_positions: Tensor | None,
    qkv_format: str,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> _Places:
    if cu_seqlens is not None:
        held = Packed(cu_seqlens.long() // cp_size, tokens.shape[0]).tokens()
        positions = _in_full(held.place, held.length, cp_size, cp_rank)
        if start_positions is not None:
            positions = positions + start_positions[held.sequence]
        return _Places(positions, held.inside)
    axis = qkv_format.index("s")
    length = tokens.shape[axis]
    token = torch.arange(length, device=tokens.device)
    positions = _in_full(token, length, cp_size, cp_rank).unsqueeze(1 - axis)
    if start_positions is not None:
        positions = positions + start_positions.unsqueeze(axis)
    return _Places(positions, None)


def _in_full(place: Tensor, length: Tensor | int, cp_size: int, cp_rank: int) -> Tensor:
    """Places among a rank's ``length`` tokens of a sequence -> places in the full sequence.

    The first half of rank r's tokens is chunk r, the second is chunk 2 cp_size - 1 - r.
    """
    if cp_size == 1:
        return place
    chunk = length // 2
    first = place + cp_rank * chunk
    second = place + (2 * cp_size - 2 - cp_rank) * chunk
    return torch.where(place < chunk, first, second)


def _cos_sin(freqs: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [..., 1, d2] each; NaN for a position without a row in freqs."""
    table = freqs[:, 0, 0].to(dtype)
    rows = table.shape[0]
    table = torch.cat([table, table.new_full((1, table.shape[1]), torch.nan)])
    known = (positions >= 0) & (positions < rows)
    angles = table[torch.where(known, positions, rows)].unsqueeze(-2)
    return angles.cos(), angles.sin()


def _rotate_half(x: Tensor, interleaved: bool) -> Tensor:
    """Each pair (u, v) becomes (-v, u)."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    u, v = x.chunk(2, -1)
    return torch.cat([-v, u], -1)


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in its math dtype."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _rotate(
    tokens: Tensor, freqs: Tensor, places: _Places, interleaved: bool, *, back: bool
) -> Tensor:
    """Rotate the leading features; ``back`` applies the transpose, as the gradient needs."""
    width = freqs.shape[-1]
    x, rest = torch.split(tokens, [width, tokens.shape[-1] - width], -1)
    x = _wide(x)
    cos, sin = _cos_sin(freqs, places.positions, x.dtype)
    if back:
        rotated = x * cos - _rotate_half(x * sin, interleaved)
    else:
        rotated = x * cos + _rotate_half(x, interleaved) * sin
    if places.inside is not None:
        rotated = torch.where(places.inside[:, None, None], rotated, x)
    return torch.cat([rotated.to(tokens.dtype), rest], -1).contiguous()  # cat keeps channels_last


@as_written
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
    """Rotary position embedding."""
    ops.fused_rope_forward.check(
        input,
        freqs,
        start_positions=start_positions,
        qkv_format=qkv_format,
        interleaved=interleaved,
        cu_seqlens=cu_seqlens,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )
    places = _places(input, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank)
    return _rotate(input, freqs, places, interleaved, back=False)


@as_written
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
    """Gradient of rotary position embedding."""
    ops.fused_rope_backward.check(
        output_grads,
        freqs,
        start_positions=start_positions,
        qkv_format=qkv_format,
        interleaved=interleaved,
        cu_seqlens=cu_seqlens,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )
    places = _places(output_grads, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank)
    return _rotate(output_grads, freqs, places, interleaved, back=True)


@as_written
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
    """Splits packed queries, keys and values, and rotates the first two."""
    ops.fused_qkv_rope_forward.check(
        qkv_input,
        q_freqs,
        k_freqs,
        qkv_split=qkv_split,
        start_positions=start_positions,
        qkv_format=qkv_format,
        interleaved=interleaved,
        cu_seqlens=cu_seqlens,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )
    places = _places(qkv_input, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank)
    dq, dk, dv = qkv_split
    q, k, v = torch.split(qkv_input, [dq, dk, dv], -1)
    q = q.reshape(*q.shape[:-2], q.shape[-2] * (dq // dk), dk)
    return (
        _rotate(q, q_freqs, places, interleaved, back=False),
        _rotate(k, k_freqs, places, interleaved, back=False),
        v.clone(memory_format=torch.contiguous_format),
    )


@as_written
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
    """Gradient of the packed queries, keys and values."""
    ops.fused_qkv_rope_backward.check(
        q_grad,
        k_grad,
        v_grad,
        q_freqs,
        k_freqs,
        qkv_split=qkv_split,
        start_positions=start_positions,
        qkv_format=qkv_format,
        interleaved=interleaved,
        cu_seqlens=cu_seqlens,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )
    places = _places(k_grad, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank)
    dq = qkv_split[0]
    q = _rotate(q_grad, q_freqs, places, interleaved, back=True)
    k = _rotate(k_grad, k_freqs, places, interleaved, back=True)
    q = q.view(*k.shape[:-1], dq)
    return torch.cat([q, k, v_grad], -1).contiguous()
