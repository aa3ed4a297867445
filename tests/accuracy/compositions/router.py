"""The router in eager torch, in the dtype of the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["COMPOSITIONS"]


def _scores(logits: Tensor, score_function: str) -> Tensor:
    if score_function == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if score_function == "sigmoid" else F.softplus(logits).sqrt()


def _normalized(scores: Tensor, topk: int, score_function: str) -> Tensor:
    if score_function == "softmax" or topk == 1:
        return scores
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def _route(
    logits: Tensor,
    topk: int,
    expert_bias: Tensor | None = None,
    *,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float = 1.0,
    score_function: str = "softmax",
) -> Any:
    """The choice is the oracle's, as rounded scores could lead to another."""
    from transformer_engine_fl import ops

    routing_map = ops.fused_topk_with_score_function_fwd.oracle(
        logits,
        topk,
        expert_bias,
        num_groups=num_groups,
        group_topk=group_topk,
        score_function=score_function,
        use_pre_softmax=use_pre_softmax,
    )[1]
    if score_function == "softmax" and not use_pre_softmax:
        probs = logits.masked_fill(~routing_map, -torch.inf).softmax(-1)
    else:
        scores = _scores(logits, score_function).masked_fill(~routing_map, 0)
        probs = _normalized(scores, topk, score_function)
    return probs * scaling_factor, None, None


def _gradient(grad: Tensor, scores: Tensor, topk: int, score_function: str) -> Tensor:
    if score_function == "softmax":
        return torch._softmax_backward_data(grad, scores, -1, scores.dtype)
    if topk > 1:
        total = scores.sum(-1, keepdim=True) + 1e-20
        grad = grad / total - (grad * scores).sum(-1, keepdim=True) / total**2
    if score_function == "sigmoid":
        return torch.ops.aten.sigmoid_backward(grad, scores)
    return grad * (1 - (-scores * scores).exp()) / (2 * scores)


def _route_backward(
    grad_probs: Tensor,
    routing_map: Tensor,
    intermediate: Tensor,
    topk: int,
    *,
    use_pre_softmax: bool = False,
    scaling_factor: float = 1.0,
    score_function: str = "softmax",
) -> Any:
    grad = (grad_probs * scaling_factor).masked_fill(~routing_map, 0)
    scores = intermediate.to(grad.dtype)
    if score_function == "softmax":
        return (_gradient(grad, scores, topk, score_function),)
    chosen = scores.masked_fill(~routing_map, 0)
    gradient = _gradient(grad, chosen, topk, score_function)
    return (gradient.masked_fill(~routing_map, 0),)


def _score(logits: Tensor, topk: int, *, score_function: str = "softmax") -> Any:
    scores = _scores(logits, score_function)
    return _normalized(scores, topk, score_function), None, None


def _score_backward(
    grad_scores: Tensor, intermediate: Tensor, topk: int, *, score_function: str = "softmax"
) -> Any:
    scores = intermediate.to(grad_scores.dtype)
    return (_gradient(grad_scores, scores, topk, score_function),)


def _aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int, topk: int, coeff: float
) -> Any:
    factor = probs.shape[1] * coeff / (topk * total_num_tokens**2)
    return (probs.sum(0) * tokens_per_expert.to(probs.dtype)).sum() * factor, None


def _aux_loss_backward(
    grad_aux_loss: Tensor, const_buf: Tensor, tokens_per_expert: Tensor, num_rows: int
) -> Any:
    dtype = grad_aux_loss.dtype
    grad = const_buf.to(dtype) * tokens_per_expert.to(dtype) * grad_aux_loss
    return (grad.expand(num_rows, -1),)


COMPOSITIONS: dict[str, Callable[..., Any]] = {
    "fused_moe_aux_loss_bwd": _aux_loss_backward,
    "fused_moe_aux_loss_fwd": _aux_loss,
    "fused_score_for_moe_aux_loss_bwd": _score_backward,
    "fused_score_for_moe_aux_loss_fwd": _score,
    "fused_topk_with_score_function_bwd": _route_backward,
    "fused_topk_with_score_function_fwd": _route,
}
