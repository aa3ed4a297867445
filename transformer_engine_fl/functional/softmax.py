"""Scaled softmax, differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer_engine_fl.functional._differentiable import apply

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "scaled_aligned_causal_masked_softmax",
    "scaled_masked_softmax",
    "scaled_softmax",
    "scaled_upper_triang_masked_softmax",
]


def scaled_softmax(input: Tensor, scale: float = 1.0) -> Tensor:
    """Softmax of ``scale * input`` over the last dimension, differentiable.

    See :func:`transformer_engine_fl.ops.scaled_softmax_forward`.
    """
    return apply("scaled_softmax_forward", {"scale": scale}, input)[0]


def scaled_masked_softmax(input: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
    """:func:`scaled_softmax` over what ``mask`` leaves visible, and 0 elsewhere; differentiable.

    See :func:`transformer_engine_fl.ops.scaled_masked_softmax_forward`.
    """
    return apply("scaled_masked_softmax_forward", {"scale": scale}, input, mask)[0]


def scaled_upper_triang_masked_softmax(input: Tensor, scale: float = 1.0) -> Tensor:
    """:func:`scaled_softmax` for causal attention, ``[..., s, s]``, differentiable.

    See :func:`transformer_engine_fl.ops.scaled_upper_triang_masked_softmax_forward`.
    """
    return apply("scaled_upper_triang_masked_softmax_forward", {"scale": scale}, input)[0]


def scaled_aligned_causal_masked_softmax(input: Tensor, scale: float = 1.0) -> Tensor:
    """:func:`scaled_softmax` for causal attention, ``[..., sq, sk]`` aligned at the end;
    differentiable.

    See :func:`transformer_engine_fl.ops.scaled_aligned_causal_masked_softmax_forward`.
    """
    return apply("scaled_aligned_causal_masked_softmax_forward", {"scale": scale}, input)[0]
