"""Attention, differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer_engine_fl.functional._differentiable import apply

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "attention",
]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    softmax_offset: Tensor | None = None,
    *,
    scale: float | None = None,
    qkv_format: str = "bshd",
    attn_mask_type: str = "no_mask",
    window_size_left: int = -1,
    window_size_right: int = -1,
    softmax_type: str = "vanilla",
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
) -> Tensor:
    """Attention, differentiable with respect to its first five arguments.

    See :func:`transformer_engine_fl.ops.fused_attn_fwd` for the formula and the arguments.
    Views of one packed tensor may be passed: their gradients add up to that of the packed tensor.

    Returns:
        Shape of ``q`` with the width of ``v``, dtype of ``q``.
    """
    options = {
        "scale": scale,
        "qkv_format": qkv_format,
        "attn_mask_type": attn_mask_type,
        "window_size_left": window_size_left,
        "window_size_right": window_size_right,
        "softmax_type": softmax_type,
        "dropout_p": dropout_p,
        "seed": seed,
        "offset": offset,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
        "cu_seqlens_q_padded": cu_seqlens_q_padded,
        "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_kv": max_seqlen_kv,
    }
    return apply("fused_attn_fwd", options, q, k, v, bias, softmax_offset)[0]
