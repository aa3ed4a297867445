"""Replacements of library functions that torch has only for CUDA, as they are documented.

They reject what torch rejects on CUDA, as far as that is documented.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["STAND_INS"]

_NARROW = (torch.bfloat16, torch.float16)


def _mm_wide(left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> None:
    """``aten::mm.dtype_out``: products of a narrow dtype with the sums stored in float32."""
    assert left.dtype == right.dtype
    assert left.dtype in _NARROW
    assert out_dtype == out.dtype == torch.float32
    out.copy_(left.float() @ right.float())


def _addmm_wide(
    added: Tensor,
    left: Tensor,
    right: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float,
    alpha: float,
    out: Tensor,
) -> None:
    """``aten::addmm.dtype_out``."""
    assert added.dtype in (left.dtype, out_dtype)
    assert left.dtype == right.dtype
    assert left.dtype in _NARROW
    assert out_dtype == out.dtype == torch.float32
    torch.addmm(added.float(), left.float(), right.float(), beta=beta, alpha=alpha, out=out)


def _weights(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, queries, keys and values in float64, with the same number of heads."""
    for it in (q, k, v):
        assert it.dtype in _NARROW
        assert it.stride(-1) == 1
        assert it.shape[-1] % 8 == 0
        assert it.shape[-1] <= 128
    assert k.shape[2] > 1
    groups = q.shape[1] // k.shape[1]
    wide = q.double()
    keys, values = (it.double().repeat_interleave(groups, 1) for it in (k, v))
    scores = scale * wide @ keys.mT
    if is_causal:  # in cuDNN the first query is aligned with the first key
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
    return scores, wide, keys, values


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: None,
    compute_log_sumexp: bool,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
) -> tuple[Any, ...]:
    """``aten::_scaled_dot_product_cudnn_attention``, for ``[b, h, s, d]``."""
    assert attn_bias is None
    assert compute_log_sumexp
    assert dropout_p == 0
    assert not return_debug_mask
    scores, _, _, values = _weights(q, k, v, is_causal, scale)
    out = torch.empty_like(q)  # in the order of the queries
    out.copy_(scores.softmax(-1) @ values)
    lse = scores.logsumexp(-1, keepdim=True).float()
    nothing = torch.empty((), dtype=torch.int64)
    return out, lse, None, None, q.shape[2], k.shape[2], nothing, nothing, nothing


def _attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    attn_bias: None,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    """``aten::_scaled_dot_product_cudnn_attention_backward``."""
    assert seed.dtype == offset.dtype == torch.int64
    assert attn_bias is cum_seq_q is cum_seq_k is None
    assert (max_q, max_k, dropout_p) == (q.shape[2], k.shape[2], 0)
    assert lse.shape == (*q.shape[:3], 1)
    assert lse.is_contiguous()
    # torch caches a plan by the strides of q, k and v, so these strides must follow from them.
    assert dout.stride() == out.stride() == torch.empty_like(q).stride()
    scores, queries, keys, values = _weights(q, k, v, is_causal, scale)
    weights = (scores - lse.double()).exp()
    wide = dout.double()
    along = (wide * out.double()).sum(-1, keepdim=True)
    slopes = scale * weights * (wide @ values.mT - along)
    shares = (slopes.mT @ queries, weights.mT @ wide)
    heads = k.shape[1]
    dk, dv = (it.unflatten(1, (heads, -1)).sum(2) for it in shares)
    found = (slopes @ keys, dk, dv)
    return tuple(
        torch.empty_like(like).copy_(it) for like, it in zip((q, k, v), found, strict=True)
    )


STAND_INS: dict[str, dict[str, Any]] = {
    "gemm": {"_mm_wide": _mm_wide, "_addmm_wide": _addmm_wide},
    "attention": {
        "_forward": _attention,
        "_backward": _attention_backward,
        "_cudnn_version": lambda: 91000,
    },
}
"""The replacements by module of the set, and by the name that they replace in it."""
