"""Rotary embedding in torch: products with cosines and sines in the tokens' dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def _positions(length: int, cp_size: int, cp_rank: int) -> Tensor:
    """The positions of a rank's tokens, in a sequence of that length."""
    places = torch.arange(length)
    if cp_size == 1:
        return places
    chunks = places.chunk(2 * cp_size)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


def _angles(
    tokens: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: str,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """``[..., 1, d2]``: each token's angles; NaN if freqs has no row, 0 after the last sequence."""
    table = freqs[:, 0, 0]

    def sequence(length: int, number: int) -> Tensor:
        start = 0 if start_positions is None else int(start_positions[number])
        places = _positions(length, cp_size, cp_rank) + start
        known = (places >= 0) & (places < len(table))
        if not len(table):
            return table.new_full((len(places), table.shape[1]), torch.nan)
        rows = table[places.clamp(0, len(table) - 1)]
        return torch.where(known[:, None], rows, torch.nan)

    if qkv_format == "thd":
        assert cu_seqlens is not None
        lengths = [end - begin for begin, end in pairwise(cu_seqlens.tolist())]
        parts = [sequence(length, number) for number, length in enumerate(lengths)]
        after = tokens.shape[0] - sum(map(len, parts))
        return torch.cat([*parts, table.new_zeros(after, table.shape[1])])[:, None]
    axis = qkv_format.index("s")
    length, batch = tokens.shape[axis] * cp_size, tokens.shape[1 - axis]
    if not batch:
        return table.new_zeros(*tokens.shape[:2], 1, table.shape[1])
    return torch.stack([sequence(length, n) for n in range(batch)], 1 - axis).unsqueeze(-2)


def _turned_half(x: Tensor, interleaved: bool) -> Tensor:
    """The other feature of each pair, the first with its sign changed."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
    u, v = x.chunk(2, -1)
    return torch.cat([-v, u], -1)


def _rotated(tokens: Tensor, freqs: Tensor, interleaved: bool, **where: Any) -> Tensor:
    angles = _angles(tokens, freqs, **where)
    cos, sin = angles.cos().to(tokens.dtype), angles.sin().to(tokens.dtype)
    x, rest = tokens[..., : cos.shape[-1]], tokens[..., cos.shape[-1] :]
    return torch.cat([x * cos + _turned_half(x, interleaved) * sin, rest], -1)


DEFAULTS: dict[str, Any] = {
    "start_positions": None,
    "qkv_format": "sbhd",
    "interleaved": False,
    "cu_seqlens": None,
    "cp_size": 1,
    "cp_rank": 0,
}


def fused_rope_forward(input: Tensor, freqs: Tensor, **options: Any) -> tuple[Any, ...]:
    """``x * cos + rotated * sin``."""
    return (_rotated(input, freqs, **DEFAULTS | options),)


def fused_rope_backward(output_grads: Tensor, freqs: Tensor, **options: Any) -> tuple[Any, ...]:
    """Autograd over the forward."""
    with torch.enable_grad():
        leaf = torch.zeros_like(output_grads).requires_grad_()
        (output,) = fused_rope_forward(leaf, freqs, **options)
    return torch.autograd.grad(output, leaf, output_grads)


def fused_qkv_rope_forward(
    qkv_input: Tensor, q_freqs: Tensor, k_freqs: Tensor, *, qkv_split: Sequence[int], **options: Any
) -> tuple[Any, ...]:
    """A split, and the same for queries and keys."""
    dq, dk, dv = qkv_split
    q, k, v = qkv_input.split((dq, dk, dv), -1)
    *tokens, groups, _ = qkv_input.shape
    q = q.reshape(*tokens, groups * (dq // dk), dk)
    options = DEFAULTS | options
    return _rotated(q, q_freqs, **options), _rotated(k, k_freqs, **options), v


def fused_qkv_rope_backward(
    q_grad: Tensor,
    k_grad: Tensor,
    v_grad: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    *,
    qkv_split: Sequence[int],
    **options: Any,
) -> tuple[Any, ...]:
    """Autograd over the forward."""
    with torch.enable_grad():
        leaf = k_grad.new_zeros((*k_grad.shape[:-1], sum(qkv_split))).requires_grad_()
        outputs = fused_qkv_rope_forward(leaf, q_freqs, k_freqs, qkv_split=qkv_split, **options)
    return torch.autograd.grad(outputs, leaf, (q_grad, k_grad, v_grad))


COMPOSITIONS: dict[str, Callable[..., tuple[Any, ...]]] = {
    it.__name__: it
    for it in (
        fused_qkv_rope_backward,
        fused_qkv_rope_forward,
        fused_rope_backward,
        fused_rope_forward,
    )
}
