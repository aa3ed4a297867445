"""The router in plain PyTorch: the definitions, in float32 (float64 for float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends.reference._values import as_output, as_written
from transformer_engine_fl.ops._dtypes import math_dtype
from transformer_engine_fl.ops.router import EPSILON

__all__ = [
    "fused_moe_aux_loss_bwd",
    "fused_moe_aux_loss_fwd",
    "fused_score_for_moe_aux_loss_bwd",
    "fused_score_for_moe_aux_loss_fwd",
    "fused_topk_with_score_function_bwd",
    "fused_topk_with_score_function_fwd",
]


def _scores(logits: Tensor, score_function: str) -> Tensor:
    if score_function == "softmax":
        return logits.softmax(-1)
    if score_function == "sigmoid":
        return logits.sigmoid()
    return torch.logaddexp(logits, logits.new_zeros(())).sqrt()


def _slope(scores: Tensor, score_function: str) -> Tensor:
    """The derivative of the scores of sigmoid or sqrtsoftplus, from the scores."""
    if score_function == "sigmoid":
        return scores * (1 - scores)
    square = scores.square()
    slope = -torch.expm1(-square) / (2 * scores)
    # The limit, where the square underflows.
    return torch.where(square < torch.finfo(square.dtype).tiny, scores / 2, slope)


def _highest(scores: Tensor, count: int, allowed: Tensor | None = None) -> Tensor:
    """A bool mask of the highest ``count`` scores that are allowed; of equal ones the first."""
    places = scores.sort(dim=-1, descending=True, stable=True).indices
    if allowed is not None:  # masking with -inf would not do: allowed scores may be -inf too
        first = allowed.gather(-1, places).int().sort(dim=-1, descending=True, stable=True)
        places = places.gather(-1, first.indices)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, places[..., :count], True)


def _in_best_groups(scores: Tensor, topk: int, num_groups: int, group_topk: int) -> Tensor:
    tokens, experts = scores.shape
    size = experts // num_groups
    members = scores.view(tokens, num_groups, size)
    best = members.sort(-1, descending=True).values[..., : topk // group_topk].sum(-1)
    return _highest(best, group_topk).repeat_interleave(size, 1)


def _normalized(scores: Tensor, topk: int, score_function: str) -> Tensor:
    if score_function == "softmax" or topk == 1:
        return scores
    return scores / (scores.sum(-1, keepdim=True) + EPSILON)


def _gradient(
    grad: Tensor, chosen: Tensor, scores: Tensor, topk: int, score_function: str
) -> Tensor:
    """The gradient of the logits from ``grad``, that of the normalized scores; ``grad`` and
    ``chosen``, the scores, must be 0 for experts that are not chosen.
    """
    product = (grad * chosen).sum(-1, keepdim=True)
    if score_function == "softmax":
        return scores * (grad - product)
    if topk > 1:
        total = chosen.sum(-1, keepdim=True) + EPSILON
        grad = (grad - product / total) / total
    return grad * _slope(scores, score_function)


@as_written
def fused_topk_with_score_function_fwd(
    logits: Tensor,
    topk: int,
    expert_bias: Tensor | None = None,
    *,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float = 1.0,
    score_function: str = "softmax",
) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses the experts of each token."""
    ops.fused_topk_with_score_function_fwd.check(
        logits,
        topk,
        expert_bias,
        use_pre_softmax=use_pre_softmax,
        num_groups=num_groups,
        group_topk=group_topk,
        scaling_factor=scaling_factor,
        score_function=score_function,
    )
    x = logits.to(math_dtype(logits.dtype)).contiguous()
    softmax_comes_last = score_function == "softmax" and not use_pre_softmax
    scores = x if softmax_comes_last else _scores(x, score_function)
    compared = scores if expert_bias is None else scores + expert_bias.to(scores.dtype)
    allowed = None
    if num_groups is not None and group_topk is not None:
        allowed = _in_best_groups(compared, topk, num_groups, group_topk)
    routing_map = _highest(compared, topk, allowed)
    if softmax_comes_last:
        scores = x.masked_fill(~routing_map, -torch.inf).softmax(-1)
    probs = _normalized(scores.masked_fill(~routing_map, 0), topk, score_function)
    return as_output(probs * scaling_factor, logits.dtype), routing_map, scores


@as_written
def fused_topk_with_score_function_bwd(
    grad_probs: Tensor,
    routing_map: Tensor,
    intermediate: Tensor,
    topk: int,
    *,
    use_pre_softmax: bool = False,
    scaling_factor: float = 1.0,
    score_function: str = "softmax",
) -> Tensor:
    """Gradient of :func:`fused_topk_with_score_function_fwd`."""
    ops.fused_topk_with_score_function_bwd.check(
        grad_probs,
        routing_map,
        intermediate,
        topk,
        use_pre_softmax=use_pre_softmax,
        scaling_factor=scaling_factor,
        score_function=score_function,
    )
    scores = intermediate.to(math_dtype(grad_probs.dtype))
    grad = (scaling_factor * grad_probs.to(scores.dtype)).masked_fill(~routing_map, 0)
    chosen = scores.masked_fill(~routing_map, 0)
    gradient = _gradient(grad, chosen, scores, topk, score_function)
    if score_function != "softmax":
        gradient = gradient.masked_fill(~routing_map, 0)
    return as_output(gradient, grad_probs.dtype)


@as_written
def fused_score_for_moe_aux_loss_fwd(
    logits: Tensor, topk: int, *, score_function: str = "softmax"
) -> tuple[Tensor, Tensor, Tensor]:
    """The scores of all experts."""
    ops.fused_score_for_moe_aux_loss_fwd.check(logits, topk, score_function=score_function)
    x = logits.to(math_dtype(logits.dtype)).contiguous()
    intermediate = _scores(x, score_function)
    scores = _normalized(intermediate, topk, score_function)
    routing_map = _highest(intermediate, topk)
    if scores is intermediate:
        intermediate = intermediate.clone()
    return as_output(scores, logits.dtype), routing_map, intermediate


@as_written
def fused_score_for_moe_aux_loss_bwd(
    grad_scores: Tensor, intermediate: Tensor, topk: int, *, score_function: str = "softmax"
) -> Tensor:
    """Gradient of :func:`fused_score_for_moe_aux_loss_fwd`."""
    ops.fused_score_for_moe_aux_loss_bwd.check(
        grad_scores, intermediate, topk, score_function=score_function
    )
    scores = intermediate.to(math_dtype(grad_scores.dtype))
    grad = grad_scores.to(scores.dtype)
    return as_output(_gradient(grad, scores, scores, topk, score_function), grad_scores.dtype)


@as_written
def fused_moe_aux_loss_fwd(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int, topk: int, coeff: float
) -> tuple[Tensor, Tensor]:
    """The load-balancing loss."""
    ops.fused_moe_aux_loss_fwd.check(probs, tokens_per_expert, total_num_tokens, topk, coeff)
    wide = probs.to(math_dtype(probs.dtype))
    const = probs.shape[1] * coeff / (topk * total_num_tokens**2)
    loads = (wide.sum(0) * tokens_per_expert.to(wide.dtype)).sum()
    # As a product, in which a value beyond the dtype becomes infinite; new_full would raise.
    return (loads * const).to(probs.dtype), loads.new_ones(()) * const


@as_written
def fused_moe_aux_loss_bwd(
    grad_aux_loss: Tensor, const_buf: Tensor, tokens_per_expert: Tensor, num_rows: int
) -> Tensor:
    """Gradient of :func:`fused_moe_aux_loss_fwd`."""
    ops.fused_moe_aux_loss_bwd.check(grad_aux_loss, const_buf, tokens_per_expert, num_rows)
    dtype = math_dtype(grad_aux_loss.dtype)
    grad = const_buf.to(dtype) * tokens_per_expert.to(dtype) * grad_aux_loss.to(dtype)
    return as_output(grad.expand(num_rows, -1), grad_aux_loss.dtype)
