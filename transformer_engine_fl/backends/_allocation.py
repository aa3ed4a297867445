"""Allocating an output with the least work on the host.

For a small tensor the allocation of its outputs is a good part of an operator's cost:
``torch.empty`` goes through the dispatcher, which a kernel's own output does not need.
What stands in for it here is what compiled code uses. Where a mode wants to see
allocations (fake tensors, the conformance kit's poison), it is ``torch.empty`` again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["empty"]

_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_on_current_device: Any = getattr(_guards, "_empty_strided_cuda", None)


def empty(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Uninitialised memory, as ``torch.empty_strided`` gives it."""
    index = device.index
    if (
        index is None  # type: ignore[redundant-expr]  # the CPU's is, whatever torch declares
        or _on_current_device is None
        or _function_modes()
        or _dispatch_modes()
        or index != _current_device()
    ):
        return torch.empty_strided(size, stride, dtype=dtype, device=device)
    made: Tensor = _on_current_device(size, stride, dtype)
    return made
