"""Quantisation in eager torch; only a bias gradient is not exact by definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["COMPOSITIONS"]


def bgrad_quantize(input: Tensor, scale: Tensor | None = None, **options: Any) -> tuple[Any, ...]:
    """The sum over the rows, in the gradient's dtype."""
    return input.flatten(0, -2).sum(0) if input.ndim > 1 else input, *[None] * 6


COMPOSITIONS: dict[str, Callable[..., tuple[Any, ...]]] = {"bgrad_quantize": bgrad_quantize}
