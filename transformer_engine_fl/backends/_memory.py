"""Tensors as memory: which are no more than that, and how far one reaches."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["PLAIN", "extent"]

PLAIN = (torch.Tensor, Parameter)
"""The types of tensors that are nothing but memory."""


def extent(tensor: Tensor) -> int:
    """How many elements lie from its first to its last, those between them included."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)
