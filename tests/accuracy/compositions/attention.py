"""Attention in torch's own words: its function, or products and a softmax, by sequence."""

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
    """Of one sequence, all of it ``[h, s, d]`` in one dtype; ``bias`` hides with -inf."""
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
        return None, None  # torch draws other numbers
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
    **options: Any,
) -> tuple[Tensor | None, ...]:
    given = (q, k, v, bias, softmax_offset)
    leaves = [None if it is None else it.detach().requires_grad_() for it in given]
    with torch.enable_grad():
        again, _ = _forward(*leaves, **options)
    if again is None or not again.requires_grad:
        return (None,) * len(given)
    wanted = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad(again, wanted, dout))
    return tuple(None if leaf is None else next(found) for leaf in leaves)


COMPOSITIONS: dict[str, Callable[..., Any]] = {
    "fused_attn_fwd": _forward,
    "fused_attn_bwd": _backward,
}
