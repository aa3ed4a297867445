"""Attention in torch, by sequence: its own function, or products and a softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from transformer_engine_fl.ops.attention import bias_of, hidden_keys, spans

__all__ = ["COMPOSITIONS"]


def _attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, offsets: Tensor | None, scale: float | None
) -> Tensor:
    """One sequence, ``[h, s, d]`` in one dtype; -inf in ``bias`` hides keys."""
    if offsets is None:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(
                q[None], k[None], v[None], bias[None], scale=scale, enable_gqa=True
            )[0]
    k, v = (it.repeat_interleave(q.shape[0] // k.shape[0], 0) for it in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    column = offsets.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    softmax_offset: Tensor | None = None,
    *,
    scale: float | None = None,
    softmax_type: str = "vanilla",
    dropout_p: float = 0.0,
    **options: Any,
) -> tuple[Tensor | None, None]:
    if dropout_p:
        return None, None  # torch draws other random numbers
    if softmax_type == "off_by_one":
        softmax_offset = q.new_zeros(q.shape[-2])
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    for it in spans(q, k, **options):
        hidden = torch.tensor(
            hidden_keys(it.lq, it.lkv, **options), dtype=torch.bool, device=q.device
        )
        added = q.new_zeros((q.shape[-2], it.lq, it.lkv))
        if bias is not None:
            added = added + bias_of(bias, it).to(q.dtype)
        added = added.masked_fill(hidden.view(it.lq, it.lkv), -torch.inf)
        parts = (tensor.transpose(0, 1) for tensor in (q[it.queries], k[it.keys], v[it.keys]))
        out[it.queries] = _attention(*parts, added, softmax_offset, scale).transpose(0, 1)
    return out, None


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    bias: Tensor | None = None,
    softmax_offset: Tensor | None = None,
    *,
    scale: float | None = None,
    softmax_type: str = "vanilla",
    dropout_p: float = 0.0,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """From the saved lse and out, as the operator; autograd would use others."""
    if dropout_p:
        return (None,) * 5
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    heads, groups = q.shape[-2], k.shape[-2]
    dq, dk, dv = (torch.zeros_like(it) for it in (q, k, v))
    dbias = None if bias is None else torch.zeros_like(bias)
    doffset = None if softmax_offset is None else torch.zeros_like(softmax_offset)
    for it in spans(q, k, **options):
        queries, grad, saved = (x[it.queries].transpose(0, 1) for x in (q, dout, out))
        keys, values = (
            x[it.keys].transpose(0, 1).repeat_interleave(heads // groups, 0) for x in (k, v)
        )
        hidden = torch.tensor(
            hidden_keys(it.lq, it.lkv, **options), dtype=torch.bool, device=q.device
        )
        scores = queries @ keys.mT * factor
        if bias is not None:
            scores = scores + bias_of(bias, it).to(q.dtype)
        lse = softmax_lse[it.lse].to(q.dtype)[..., None]
        seen = ~hidden.view(it.lq, it.lkv) & (scores > -torch.inf)
        weights = torch.where(seen, (scores - lse).exp(), 0)
        delta = (grad * saved).sum(-1, keepdim=True)
        dscores = weights * (grad @ values.mT - delta)
        dq[it.queries] = (dscores @ keys * factor).transpose(0, 1)
        of_keys = (dscores.mT @ queries * factor, dk), (weights.mT @ grad, dv)
        for per_head, gradient in of_keys:
            summed = per_head.unflatten(0, (groups, heads // groups)).sum(1)
            gradient[it.keys] = summed.transpose(0, 1)
        if dbias is not None:
            place = bias_of(dbias, it)
            place += dscores.sum_to_size(place.shape).to(place.dtype)
        if doffset is not None:
            beside = (softmax_offset[:, None, None].to(q.dtype) - lse).exp()
            beside = beside.masked_fill(lse == -torch.inf, 0)
            doffset -= (beside * delta).sum((1, 2)).to(doffset.dtype)
    return dq, dk, dv, dbias, doffset


COMPOSITIONS: dict[str, Callable[..., Any]] = {
    "fused_attn_fwd": _forward,
    "fused_attn_bwd": _backward,
}
