"""Tensors as memory: which are no more than that, how far one reaches, who records its use."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["PLAIN", "extent", "is_captured"]

PLAIN = (torch.Tensor, Parameter)
"""The types of tensors that are nothing but memory."""


def extent(tensor: Tensor) -> int:
    """How many elements lie from its first to its last, those between them included."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def is_captured(device: torch.device) -> bool:
    """Whether what goes to the current stream of a CUDA device becomes part of a graph."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
