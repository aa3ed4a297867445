"""Tensors for tests: random ones that are the same in each run, offsets, and others."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

__all__ = ["int32", "normal", "normal_of_shape", "offsets", "surrounded", "with_tensors"]


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    """Normally distributed numbers, as float32 has them."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normal_of_shape(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same on a device, with other numbers for another shape."""
    return normal(*shape, dtype=torch.float32, seed=sum(shape)).to(device, dtype)


def int32(*values: Any) -> Tensor:
    """The given numbers, or rows of them."""
    return torch.tensor(values, dtype=torch.int32)


def with_tensors(options: dict[str, Any]) -> dict[str, Any]:
    """The options, each list of numbers as a tensor of them."""
    return {name: int32(*it) if isinstance(it, list) else it for name, it in options.items()}


def offsets(lengths: list[int], device: str) -> Tensor:
    """Where sequences of these lengths begin, and where the last one ends."""
    return int32(0, *accumulate(lengths)).to(device)


def surrounded(tensor: Tensor) -> Tensor:
    """The same values between NaN, which no output may show."""
    whole = torch.full((tensor.numel() + 2048,), torch.nan, dtype=tensor.dtype)
    return whole.to(tensor.device)[1024:-1024].view(tensor.shape).copy_(tensor)
