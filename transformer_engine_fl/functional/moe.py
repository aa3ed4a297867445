"""Moving tokens to their experts and back, differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer_engine_fl.functional._differentiable import apply
from transformer_engine_fl.ops import _checks as check

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "moe_permute",
    "moe_permute_with_probs",
    "moe_unpermute",
]

MAP_TYPES = ("mask", "index")


def moe_permute(
    input: Tensor, routing_map: Tensor, num_out_tokens: int, *, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """Copies tokens into rows ordered by expert, differentiable with respect to ``input``.

    Args:
        input: ``[T, C]``.
        routing_map: ``[T, E]``, bool, for ``"mask"``
            (:func:`transformer_engine_fl.ops.moe_permute_mask_fwd`); ``[T, topk]``, int32 or
            int64, for ``"index"`` (:func:`transformer_engine_fl.ops.moe_permute_fwd`).
        num_out_tokens: the number of rows N; 0 and -1 stand for ``T * topk`` with
            ``"index"``.
        map_type: ``"mask"`` or ``"index"``.

    Returns:
        output: ``[N, C]``, dtype of ``input``.
        row_id_map: what :func:`moe_unpermute` goes by; it has no gradient.
    """
    check.is_choice("moe_permute", "map_type", map_type, MAP_TYPES)
    options = {"num_out_tokens": num_out_tokens}
    if map_type == "index":
        output, row_id_map = apply("moe_permute_fwd", options, input, routing_map, outputs=2)
    else:
        output, _, row_id_map = apply(
            "moe_permute_mask_fwd", options, input, routing_map, None, outputs=3
        )
    return output, row_id_map


def moe_permute_with_probs(
    input: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Copies tokens and their probs into rows ordered by expert; both are differentiable.

    See :func:`transformer_engine_fl.ops.moe_permute_mask_fwd`. The caller multiplies what the
    experts compute by these probs, and calls :func:`moe_unpermute` without probs.

    Args:
        input: ``[T, C]``.
        probs: ``[T, E]``.
        routing_map: ``[T, E]``, bool.
        num_out_tokens: the number of rows N.

    Returns:
        output: ``[N, C]``, dtype of ``input``.
        permuted_probs: ``[N]``, dtype of ``probs``.
        row_id_map: what :func:`moe_unpermute` goes by; it has no gradient.
    """
    output, permuted_probs, row_id_map = apply(
        "moe_permute_mask_fwd",
        {"num_out_tokens": num_out_tokens},
        input,
        routing_map,
        probs,
        outputs=3,
    )
    return output, permuted_probs, row_id_map


def moe_unpermute(
    input: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    *,
    map_type: str = "mask",
) -> Tensor:
    """Sums the rows of each token, differentiable.

    See :func:`transformer_engine_fl.ops.moe_unpermute_mask_fwd` and
    :func:`transformer_engine_fl.ops.moe_unpermute_fwd`.

    Args:
        input: ``[N, C]``.
        row_id_map: as :func:`moe_permute` returned it, for a mask or for indices.
        merging_probs: ``[T, E]`` for a mask, ``[T, topk]`` for indices: the factor of each row;
            None for 1. Without probs, the input is not kept for the backward.
        map_type: ``"mask"`` or ``"index"``, as in :func:`moe_permute`.

    Returns:
        ``[T, C]``, dtype of ``input``.
    """
    check.is_choice("moe_unpermute", "map_type", map_type, MAP_TYPES)
    op = "moe_unpermute_fwd" if map_type == "index" else "moe_unpermute_mask_fwd"
    return apply(op, {}, input, row_id_map, merging_probs)[0]
