"""Cross entropy by torch's own functions, in the given dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["COMPOSITIONS"]


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def cross_entropy_fwd(
    input: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    logits = _capped(input, softcap)
    ignored = target == ignore_index
    outside = ((target < 0) | (target >= input.shape[-1])) & ~ignored  # torch raises for these
    loss = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        target.masked_fill(outside, ignore_index).reshape(-1),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    ).view(target.shape)
    lse = logits.logsumexp(-1).masked_fill(ignored, 0)
    if z_loss:
        loss = loss + z_loss * lse.square()
    return loss.masked_fill(outside, torch.nan), lse


def cross_entropy_bwd(
    grad_loss: Tensor,
    input: Tensor,
    target: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> tuple[Tensor | None]:
    """From the saved lse, as the operator; autograd would use another."""
    if vocab_start or vocab_size is not None:
        return (None,)  # torch has no equivalent for a shard
    words, dtype = input.shape[-1], input.dtype
    scores = _capped(input, softcap)
    dloss, normalizer = grad_loss.to(dtype).unsqueeze(-1), lse.to(dtype).unsqueeze(-1)
    outside = (target < 0) | (target >= words)
    chosen = F.one_hot(target.masked_fill(outside, 0), words).to(dtype)
    wanted = (1 - label_smoothing) * chosen + label_smoothing / words
    weights = (scores - normalizer).exp()
    factor = 2 * z_loss * normalizer * dloss
    if grad_lse is not None:
        factor = factor + grad_lse.to(dtype).unsqueeze(-1)
    gradient = dloss * (weights - wanted) + factor * weights
    if softcap is not None:
        gradient = gradient * (1 - (scores / softcap).square())
    gradient = gradient.masked_fill(outside.unsqueeze(-1), torch.nan)
    return (gradient.masked_fill((target == ignore_index).unsqueeze(-1), 0),)


def cross_entropy_partial_fwd(
    input: Tensor,
    target: Tensor,
    *,
    vocab_start: int = 0,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> tuple[Tensor]:
    scores = _capped(input, softcap)
    column = (target - vocab_start).unsqueeze(-1)
    outside = (column < 0) | (column >= input.shape[-1])
    highest = scores.amax(-1, keepdim=True)
    total = (scores - highest).exp().sum(-1, keepdim=True).masked_fill(highest == -torch.inf, 0)
    at_target = scores.gather(-1, column.masked_fill(outside, 0)).masked_fill(outside, 0)
    stats = torch.cat((highest, total, at_target, scores.sum(-1, keepdim=True)), -1)
    return (stats.masked_fill((target == ignore_index).unsqueeze(-1), 0),)


def cross_entropy_merge(
    stats: Tensor,
    target: Tensor,
    *,
    vocab_size: int,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    highest, total, at_target, summed = stats.unbind(-1)
    lse = (highest + total.log()).logsumexp(0)
    loss = (1 - label_smoothing) * (lse - at_target.sum(0))
    if label_smoothing:
        loss = loss + label_smoothing * (lse - summed.sum(0) / vocab_size)
    loss = loss + z_loss * lse.square() if z_loss else loss
    loss = loss.masked_fill((target < 0) | (target >= vocab_size), torch.nan)
    ignored = target == ignore_index
    return loss.masked_fill(ignored, 0), lse.masked_fill(ignored, 0)


def fused_linear_cross_entropy_fwd(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    return cross_entropy_fwd(F.linear(input, weight, bias), target, **options)


def fused_linear_cross_entropy_bwd(
    grad_loss: Tensor,
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    lse: Tensor,
    bias: Tensor | None = None,
    grad_lse: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    logits = F.linear(input, weight, bias)
    (gradient,) = cross_entropy_bwd(grad_loss, logits, target, lse, grad_lse, **options)
    assert gradient is not None
    rows = gradient.reshape(-1, gradient.shape[-1])
    dweight = rows.T @ input.reshape(-1, input.shape[-1])
    return gradient @ weight, dweight, None if bias is None else rows.sum(0)


def fused_linear_cross_entropy_fwd_bwd(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    grad_loss: Tensor,
    bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    loss, lse = fused_linear_cross_entropy_fwd(input, weight, target, bias, **options)
    gradients = fused_linear_cross_entropy_bwd(
        grad_loss, input, weight, target, lse, bias, **options
    )
    return loss, lse, *gradients


COMPOSITIONS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "cross_entropy_bwd": cross_entropy_bwd,
    "cross_entropy_fwd": cross_entropy_fwd,
    "cross_entropy_merge": cross_entropy_merge,
    "cross_entropy_partial_fwd": cross_entropy_partial_fwd,
    "fused_linear_cross_entropy_bwd": fused_linear_cross_entropy_bwd,
    "fused_linear_cross_entropy_fwd": fused_linear_cross_entropy_fwd,
    "fused_linear_cross_entropy_fwd_bwd": fused_linear_cross_entropy_fwd_bwd,
}
