"""Tensors as memory: which are no more than that, how far one reaches, who records its use.

And which stream's it is, for what is kept from one call to the next.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["PLAIN", "extent", "is_captured", "keeping_stream"]

PLAIN = (torch.Tensor, Parameter)
"""The types of tensors that are nothing but memory."""

_PER_THREAD: Final = 2
"""The driver's number of a stream that is another one in each thread."""


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


def keeping_stream(device: torch.device) -> int | None:
    """The current stream, as a number, by which memory that it has written may be kept for what is
    launched on it later; None if there is no such: what goes to it becomes part of a graph, or its
    number is not its own.
    """
    if device.type != "cuda":
        return 0
    if torch._C._cuda_getDevice() == device.index:
        captured = torch._C._cuda_isCurrentStreamCapturing()
    else:
        captured = is_captured(device)
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return None if captured or stream == _PER_THREAD else stream
