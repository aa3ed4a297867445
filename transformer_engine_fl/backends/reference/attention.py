"""Attention in plain PyTorch: the definition, with all scores in memory at once.

Every format is converted to ``[b, h, s, d]`` first, and back at the end; tokens that belong to no
sequence are zero in between. No value is read back to the host.
On CUDA devices float32 products follow torch's setting for TF32: the contracts hold while it
is off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends.reference._values import as_output, as_written
from transformer_engine_fl.backends.reference.dropout import words_of_blocks
from transformer_engine_fl.ops._dtypes import math_dtype
from transformer_engine_fl.ops.attention import CAUSAL, TOP_LEFT, extents
from transformer_engine_fl.ops.dropout import scale_of_kept

__all__ = ["fused_attn_bwd", "fused_attn_fwd"]


@dataclass(frozen=True, slots=True)
class _SequenceLayout:
    """The queries, or the keys, of every sequence.

    Attributes:
        qkv_format: the format of the operator's tensors.
        lengths: ``[b, 1]``, the length of each sequence; None if all have s tokens.
        rows: ``[b, s]`` for thd: the row of each token, ``tokens`` if there is no such token.
        tokens: t of thd.
        longest: s.
    """

    qkv_format: str
    lengths: Tensor | None
    rows: Tensor | None
    tokens: int
    longest: int

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensor as ``[b, h, s, d]``, in the math dtype."""
        wide = tensor.to(math_dtype(tensor.dtype))
        if self.rows is not None:
            return F.pad(wide, (0, 0, 0, 0, 0, 1))[self.rows].transpose(1, 2)
        if self.qkv_format == "sbhd":
            wide = wide.transpose(0, 1)
        return self._inside(wide).transpose(1, 2)

    def _inside(self, tokens: Tensor) -> Tensor:
        """``[b, s, h, d]`` with zeros at places that belong to no sequence."""
        if self.lengths is None:
            return tokens
        outside = torch.arange(self.longest, device=tokens.device) >= self.lengths
        return tokens.masked_fill(outside[..., None, None], 0)

    def scatter(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """The inverse of :meth:`gather`; thd tokens that belong to no sequence become ``fill``."""
        values = values.transpose(1, 2)
        if self.rows is not None:
            _, _, *features = values.shape
            packed = values.new_full((self.tokens + 1, *features), fill)
            packed[self.rows] = values
            return packed[:-1]
        values = self._inside(values)
        return values.transpose(0, 1) if self.qkv_format == "sbhd" else values


def _sequence_layout(
    tensor: Tensor,
    qkv_format: str,
    longest: int,
    cu_seqlens: Tensor | None,
    begins: Tensor | None,
) -> _SequenceLayout:
    if cu_seqlens is None:
        return _SequenceLayout(qkv_format, None, None, 0, longest)
    lengths = cu_seqlens.long().diff().unsqueeze(-1)
    if qkv_format != "thd":
        return _SequenceLayout(qkv_format, lengths, None, 0, longest)
    tokens = tensor.shape[0]
    place = torch.arange(longest, device=tensor.device)
    begin = (cu_seqlens if begins is None else begins).long()[:-1, None]
    rows = torch.where(place < lengths, begin + place, tokens).clamp(0, tokens)
    return _SequenceLayout(qkv_format, lengths, rows, tokens, longest)


@dataclass(frozen=True, slots=True)
class _Attention:
    """What forward and backward have in common.

    Attributes:
        queries, keys: the layouts of the tokens.
        hidden: ``[b or 1, 1, sq, skv]``, whether a key is not seen.
        factors: ``[b, h, sq, skv]``, dropout's factors of the weights; None without dropout.
        scale: of the dot products.
        sink: ``[h, 1, 1]``, the logit that joins those of the keys; None for vanilla.
        group: the number of query heads for each key head.
    """

    queries: _SequenceLayout
    keys: _SequenceLayout
    hidden: Tensor
    factors: Tensor | None
    scale: float
    sink: Tensor | None
    group: int

    def of_keys(self, tensor: Tensor) -> Tensor:
        """Keys or values as ``[b, h, skv, d]``, repeated for each query head."""
        return self.keys.gather(tensor).repeat_interleave(self.group, 1)

    def sum_groups(self, gradient: Tensor) -> Tensor:
        """A gradient of :meth:`of_keys`, summed over query heads, in the operator's format."""
        b, heads, *rest = gradient.shape
        grouped = gradient.reshape(b, heads // self.group, self.group, *rest)
        return self.keys.scatter(grouped.sum(2))

    def scores(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        """``[b, h, sq, skv]``, -inf where a key is not seen."""
        scores = q @ k.mT * self.scale
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        return scores.masked_fill(self.hidden, -torch.inf)

    def dropped(self, weights: Tensor) -> Tensor:
        """Weights, or the gradients of weights, after dropout."""
        return weights if self.factors is None else weights * self.factors


def _attention(
    q: Tensor,
    k: Tensor,
    softmax_offset: Tensor | None,
    *,
    scale: float | None,
    qkv_format: str,
    attn_mask_type: str,
    window_size_left: int,
    window_size_right: int,
    softmax_type: str,
    dropout_p: float,
    seed: int,
    offset: int,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
) -> _Attention:
    b, sq, skv = extents(q, k, qkv_format, cu_seqlens_q, max_seqlen_q, max_seqlen_kv)
    queries = _sequence_layout(q, qkv_format, sq, cu_seqlens_q, cu_seqlens_q_padded)
    keys = _sequence_layout(k, qkv_format, skv, cu_seqlens_kv, cu_seqlens_kv_padded)
    heads, dtype = q.shape[-2], math_dtype(q.dtype)
    right = 0 if attn_mask_type in CAUSAL else window_size_right
    sink = None
    if softmax_type == "off_by_one":
        sink = q.new_zeros((heads, 1, 1), dtype=dtype)
    elif softmax_offset is not None:
        sink = softmax_offset.to(dtype)[:, None, None]
    return _Attention(
        queries,
        keys,
        _hidden(queries, keys, attn_mask_type in TOP_LEFT, window_size_left, right, q.device),
        _factors((b, heads, sq, skv), dropout_p, seed, offset, q.device, dtype),
        q.shape[-1] ** -0.5 if scale is None else scale,
        sink,
        heads // k.shape[-2],
    )


def _hidden(
    queries: _SequenceLayout,
    keys: _SequenceLayout,
    top_left: bool,
    left: int,
    right: int,
    device: torch.device,
) -> Tensor:
    """``[b or 1, 1, sq, skv]``; ``left`` and ``right`` do not limit the window if -1."""

    def length(side: _SequenceLayout) -> Tensor | int:
        return side.longest if side.lengths is None else side.lengths[..., None]

    i = torch.arange(queries.longest, device=device)[:, None]
    j = torch.arange(keys.longest, device=device)
    diagonal = i if top_left else i + length(keys) - length(queries)
    hidden = (i >= length(queries)) | (j >= length(keys))
    if left >= 0:
        hidden = hidden | (j < diagonal - left)
    if right >= 0:
        hidden = hidden | (j > diagonal + right)
    return hidden.unsqueeze(-3)


def _factors(
    shape: tuple[int, int, int, int],
    probability: float,
    seed: int,
    offset: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor | None:
    """0 where a weight is dropped, ``1 / (1 - probability)`` elsewhere; None if all are kept."""
    if probability == 0:
        return None
    b, heads, sq, skv = shape
    row = torch.arange(b * heads, device=device).view(b, heads, 1, 1)
    query = torch.arange(sq, device=device)[:, None]
    block = torch.arange((skv + 3) // 4, device=device)
    words = words_of_blocks(((row << 22 | query) << 20) | block, seed, offset)
    kept = words.flatten(-2)[..., :skv] >= int(probability * 2**32)
    return kept.to(dtype) * scale_of_kept(probability)


@as_written
def fused_attn_fwd(
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
) -> tuple[Tensor, Tensor]:
    """Attention."""
    options: dict[str, Any] = {
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
    ops.fused_attn_fwd.check(q, k, v, bias, softmax_offset, **options)
    it = _attention(q, k, softmax_offset, **options)
    scores = it.scores(it.queries.gather(q), it.of_keys(k), bias)
    hidden = scores == -torch.inf
    logits = scores
    if it.sink is not None:
        logits = torch.cat([scores, it.sink.expand(*scores.shape[:-1], 1)], -1)
    unseeing = hidden.all(-1, keepdim=True)
    lse = logits.logsumexp(-1).masked_fill(unseeing.squeeze(-1), -torch.inf)
    # Also clears the rows in which no key is seen, where softmax is 0 / 0.
    weights = logits.softmax(-1)[..., : scores.shape[-1]].masked_fill(hidden, 0)
    # Such rows are cleared again: 0 times an infinite value is NaN.
    out = it.queries.scatter((it.dropped(weights) @ it.of_keys(v)).masked_fill(unseeing, 0))
    if qkv_format == "thd":
        lse = it.queries.scatter(lse.unsqueeze(-1), -torch.inf).squeeze(-1).t()
    return as_output(out, q.dtype), lse.contiguous()


@as_written
def fused_attn_bwd(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of attention."""
    options: dict[str, Any] = {
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
    ops.fused_attn_bwd.check(dout, q, k, v, out, softmax_lse, bias, softmax_offset, **options)
    it = _attention(q, k, softmax_offset, **options)
    queries, keys, values = it.queries.gather(q), it.of_keys(k), it.of_keys(v)
    lse = softmax_lse
    if qkv_format == "thd":
        lse = it.queries.gather(lse.t().unsqueeze(-1)).squeeze(-1)
    lse = lse.unsqueeze(-1)
    scores = it.scores(queries, keys, bias)
    hidden = scores == -torch.inf
    unseeing = hidden.all(-1, keepdim=True)
    grad = it.queries.gather(dout).masked_fill(unseeing, 0)
    weights = (scores - lse).exp().masked_fill(hidden, 0)
    delta = (grad * it.queries.gather(out)).sum(-1, keepdim=True)
    # Masked too: 0 times an infinite gradient is NaN.
    dscores = (weights * (it.dropped(grad @ values.mT) - delta)).masked_fill(hidden, 0)
    dbias = None if bias is None else as_output(dscores.sum_to_size(bias.shape), bias.dtype)
    doffset = None
    if softmax_offset is not None:
        sink = softmax_offset.to(lse.dtype)[:, None, None]
        beside = (sink - lse).exp().masked_fill(lse == -torch.inf, 0)
        doffset = as_output(-(beside * delta).sum((0, 2, 3)), softmax_offset.dtype)
    dq = (it.scale * (dscores @ keys)).masked_fill(unseeing, 0)
    queries = queries.masked_fill(unseeing, 0)
    return (
        as_output(it.queries.scatter(dq), q.dtype),
        as_output(it.sum_groups(it.scale * (dscores.mT @ queries)), k.dtype),
        as_output(it.sum_groups(it.dropped(weights).mT @ grad), v.dtype),
        dbias,
        doffset,
    )
