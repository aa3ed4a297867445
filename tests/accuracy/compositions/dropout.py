"""Dropout in torch: a product of the elements that the operator keeps, and a factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine_fl.backends.reference import dropout as reference


def _dropped(values: Tensor, mask: Tensor, probability: float) -> Tensor:
    bits = mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    kept = bits.flatten()[: values.numel()].view(values.shape)
    return values * kept.to(values.dtype) * (1 / (1 - probability) if probability < 1 else 0.0)


def dropout_fwd(
    input: Tensor, dropout_probability: float, *, seed: int, offset: int = 0
) -> tuple[Any, ...]:
    """The mask is the operator's: which elements are kept is no question of precision."""
    _, mask = reference.dropout_fwd(input, dropout_probability, seed=seed, offset=offset)
    return _dropped(input, mask, dropout_probability), None


def dropout_bwd(grad_output: Tensor, mask: Tensor, dropout_probability: float) -> tuple[Any, ...]:
    """The same product, with the given mask."""
    return (_dropped(grad_output, mask, dropout_probability),)


COMPOSITIONS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "dropout_bwd": dropout_bwd,
    "dropout_fwd": dropout_fwd,
}
