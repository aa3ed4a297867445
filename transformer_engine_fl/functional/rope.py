"""Rotary position embedding, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformer_engine_fl.functional._differentiable import apply

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "qkv_rope",
    "rope",
]


def rope(
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
    """Rotary position embedding, differentiable with respect to ``input``.

    See :func:`transformer_engine_fl.ops.fused_rope_forward` for the formula and the
    arguments. ``freqs`` is a constant, and gets no gradient.

    Returns:
        Shape and dtype of ``input``.
    """
    options = {
        "start_positions": start_positions,
        "qkv_format": qkv_format,
        "interleaved": interleaved,
        "cu_seqlens": cu_seqlens,
        "cp_size": cp_size,
        "cp_rank": cp_rank,
    }
    return apply("fused_rope_forward", options, input, freqs)[0]


def qkv_rope(
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
    """Splits packed queries, keys and values, and rotates queries and keys; differentiable.

    Differentiable with respect to ``qkv_input``. See
    :func:`transformer_engine_fl.ops.fused_qkv_rope_forward` for the formula and the
    arguments. The freqs are constants, and get no gradient.

    Returns:
        q: ``[..., h * dq / dk, dk]``, the input's dtype.
        k: ``[..., h, dk]``, likewise.
        v: ``[..., h, dv]``, likewise.
    """
    options = {
        "qkv_split": qkv_split,
        "start_positions": start_positions,
        "qkv_format": qkv_format,
        "interleaved": interleaved,
        "cu_seqlens": cu_seqlens,
        "cp_size": cp_size,
        "cp_rank": cp_rank,
    }
    q, k, v = apply("fused_qkv_rope_forward", options, qkv_input, q_freqs, k_freqs)
    return q, k, v
