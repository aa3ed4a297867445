"""Dropout, differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer_engine_fl.functional._differentiable import apply

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "dropout",
]


def dropout(input: Tensor, dropout_probability: float, *, seed: int, offset: int = 0) -> Tensor:
    """Dropout whose mask follows from ``seed`` and ``offset``, differentiable.

    See :func:`transformer_engine_fl.ops.dropout_fwd` for how. The mask is kept for the
    backward, one bit for each element.

    Returns:
        Shape and dtype of ``input``.
    """
    options = {"dropout_probability": dropout_probability, "seed": seed, "offset": offset}
    return apply("dropout_fwd", options, input)[0]
