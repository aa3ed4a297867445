"""Tensors as memory: plain tensor types, extent, and the stream to cache device memory by."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["PLAIN", "extent", "is_captured", "keeping_stream"]

PLAIN = (torch.Tensor, Parameter)
"""The types of tensors that are nothing but memory."""

_PER_THREAD: Final = 2
"""The driver's handle of the per-thread default stream."""


def extent(tensor: Tensor) -> int:
    """The number of elements from its first to its last in memory, gaps included."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def is_captured(device: torch.device) -> bool:
    """Whether work on the current stream of a CUDA device is being captured into a graph."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def keeping_stream(device: torch.device) -> int | None:
    """The current stream's handle, by which to cache memory that was written on it.

    Such memory may be used by later launches on that stream. None if it must not be kept: a graph
    is being captured, or the handle stands for a different stream in each thread.
    """
    if device.type != "cuda":
        return 0
    if torch._C._cuda_getDevice() == device.index:
        captured = torch._C._cuda_isCurrentStreamCapturing()
    else:
        captured = is_captured(device)
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return None if captured or stream == _PER_THREAD else stream
