"""What the families of the reference set do alike with the values they return."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["as_output", "over_rows"]


def as_output(value: Tensor, dtype: torch.dtype) -> Tensor:
    """In the output's dtype and contiguous; a fresh ``value`` shares no memory with an input."""
    return value.to(dtype).contiguous()


def over_rows(value: Tensor) -> Tensor:
    """The sum over all dimensions but the last."""
    return value.unsqueeze(0).flatten(0, -2).sum(0)
