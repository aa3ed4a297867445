"""Choosing experts, and the load-balancing loss, differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer_engine_fl.functional._differentiable import apply

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "moe_aux_loss",
    "score_for_moe_aux_loss",
    "topk_router",
]


def topk_router(
    logits: Tensor,
    topk: int,
    expert_bias: Tensor | None = None,
    *,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float = 1.0,
    score_function: str = "softmax",
) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each token, differentiable with respect to ``logits``.

    See :func:`transformer_engine_fl.ops.fused_topk_with_score_function_fwd` for how, and for
    the arguments. ``expert_bias`` affects only the choice, and gets no gradient.

    Returns:
        probs: ``[T, E]``, dtype of ``logits``; 0 for experts that are not chosen.
        routing_map: ``[T, E]``, bool; it has no gradient.
    """
    options = {
        "topk": topk,
        "expert_bias": expert_bias,
        "use_pre_softmax": use_pre_softmax,
        "num_groups": num_groups,
        "group_topk": group_topk,
        "scaling_factor": scaling_factor,
        "score_function": score_function,
    }
    probs, routing_map = apply("fused_topk_with_score_function_fwd", options, logits, outputs=2)
    return probs, routing_map


def score_for_moe_aux_loss(
    logits: Tensor, topk: int, *, score_function: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """The scores of all experts for :func:`moe_aux_loss`, differentiable.

    See :func:`transformer_engine_fl.ops.fused_score_for_moe_aux_loss_fwd`.

    Returns:
        scores: ``[T, E]``, dtype of ``logits``.
        routing_map: ``[T, E]``, bool, true for the topk highest scores; it has no gradient.
    """
    options = {"topk": topk, "score_function": score_function}
    scores, routing_map = apply("fused_score_for_moe_aux_loss_fwd", options, logits, outputs=2)
    return scores, routing_map


def moe_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int, topk: int, coeff: float
) -> Tensor:
    """The load-balancing loss, differentiable with respect to ``probs``.

    See :func:`transformer_engine_fl.ops.fused_moe_aux_loss_fwd`.

    Returns:
        A scalar, dtype of ``probs``.
    """
    options = {
        "tokens_per_expert": tokens_per_expert,
        "total_num_tokens": total_num_tokens,
        "topk": topk,
        "coeff": coeff,
    }
    return apply("fused_moe_aux_loss_fwd", options, probs)[0]
