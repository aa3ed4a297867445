"""Tensors for tests: reproducible random tensors, offsets, and others."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

__all__ = ["int32", "normal", "normal_of_shape", "offsets", "surrounded", "with_tensors"]


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    """Normally distributed numbers, drawn in float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normal_of_shape(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Like :func:`normal`, on a device, with a seed that depends on the shape."""
    return normal(*shape, dtype=torch.float32, seed=sum(shape)).to(device, dtype)


def int32(*values: Any) -> Tensor:
    """An int32 tensor of the given numbers or rows."""
    return torch.tensor(values, dtype=torch.int32)


def with_tensors(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with each list of numbers replaced by an int32 tensor."""
    return {name: int32(*it) if isinstance(it, list) else it for name, it in options.items()}


def offsets(lengths: list[int], device: str) -> Tensor:
    """The ``cu_seqlens`` of sequences of these lengths."""
    return int32(0, *accumulate(lengths)).to(device)


def surrounded(tensor: Tensor) -> Tensor:
    """The same values with NaNs before and after them in memory, which no output may contain."""
    whole = torch.full((tensor.numel() + 2048,), torch.nan, dtype=tensor.dtype)
    return whole.to(tensor.device)[1024:-1024].view(tensor.shape).copy_(tensor)
