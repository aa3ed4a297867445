"""Allocating an output with the least work on the host.

For a small tensor the allocation of outputs is a good part of an operator's cost: ``torch.empty``
goes through the dispatcher, which a kernel's own output does not need. The replacement here is the
function that torch's compiled code uses. While a mode wants to see allocations (fake tensors, the
conformance kit's poison), allocation goes through torch's dispatcher again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Allocate", "allocator", "quickest", "sees_allocations"]

_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
# The devices of this process, whatever the environment says by now.
_count_devices: Callable[[], int] = getattr(torch._C, "_cuda_getDeviceCount", lambda: 2)
_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_on_current_device: Any = getattr(_guards, "_empty_strided_cuda", None)


Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""(size, stride, dtype) -> uninitialised memory; the size a tuple, not a ``torch.Size``."""


def allocator(device: torch.device) -> Allocate:
    """A function that allocates on ``device`` now; for the outputs of one call."""
    index = device.index
    if (
        index is None  # type: ignore[redundant-expr]  # the CPU's is, whatever torch declares
        or _on_current_device is None
        or sees_allocations()
        or index != _current_device()
    ):
        return functools.partial(_through_the_dispatcher, device)
    return quickest(device)


def sees_allocations() -> bool:
    """Whether a torch mode is active, which may want to see allocations and all other operators."""
    return bool(_function_modes() or _dispatch_modes())


def quickest(device: torch.device) -> Allocate:
    """The fastest allocation on ``device`` while it is the current one and no mode is active."""
    if device.type == "cuda" and _on_current_device is not None:
        allocate: Allocate = _on_current_device
        return allocate
    return functools.partial(_through_the_dispatcher, device)


def _through_the_dispatcher(
    device: torch.device, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)
