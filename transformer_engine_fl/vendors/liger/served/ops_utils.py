"""``liger_kernel.ops.utils``: helpers of kernels and of the functions that launch them.

Triton is imported only when first needed: a package may use another language.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from transformer_engine_fl.vendors.info import BackendInfo, VendorInfo
from transformer_engine_fl.vendors.registry import get_current_backend, infer_device

__all__ = [
    "calculate_settings",
    "compare_version",
    "device_context",
    "ensure_contiguous",
    "get_amp_custom_fwd_bwd",
    "get_npu_core_count",
    "is_hip",
]


def is_hip() -> bool:
    """Whether torch's "cuda" devices are AMD GPUs."""
    return torch.version.hip is not None


@contextlib.contextmanager
def device_context(device: Any) -> Iterator[None]:
    """Within the block ``device`` is the current device of its type."""
    device = torch.device(device)
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "device"):
        yield
        return
    with module.device(device):
        yield


def ensure_contiguous(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A forward or backward whose tensor arguments are made contiguous."""

    def dense(value: Any) -> Any:
        return value.contiguous() if isinstance(value, torch.Tensor) else value

    @functools.wraps(fn)
    def call(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        named = {name: dense(value) for name, value in kwargs.items()}
        return fn(ctx, *map(dense, args), **named)

    return call


def calculate_settings(n: int) -> tuple[int, int]:
    """(block size, warps) of a program that holds a row of ``n`` elements."""
    backend = get_current_backend() or BackendInfo(VendorInfo("any", infer_device()))
    block, warps = backend.calculate_settings(n)
    return block, min(warps, 16) if is_hip() else warps  # an AMD warp has twice the threads


def compare_version(package: str, operator: Callable[[Any, Any], bool], target: str) -> bool:
    """Compare an installed package's version with ``target``; False if it is not installed."""
    try:
        version = importlib.import_module(package).__version__
    except ImportError:
        return False
    return operator(_numbers(version), _numbers(target))


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release, without trailing zeros."""
    release = re.match(r"[\d.]*", version)
    numbers = [int(part) for part in (release.group() if release else "").split(".") if part]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def get_amp_custom_fwd_bwd() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Decorators for a forward and a backward under autocast, for this machine's device."""
    device = infer_device()
    return (
        functools.partial(torch.amp.custom_fwd, device_type=device),
        functools.partial(torch.amp.custom_bwd, device_type=device),
    )


def get_npu_core_count(default: int = 20) -> int:
    """The number of an NPU's vector cores; ``default`` if it is unknown."""
    try:
        import triton

        properties = triton.runtime.driver.active.utils.get_device_properties(0)
        return int(properties.get("num_vectorcore", default))
    except Exception:  # noqa: BLE001 - no Triton, no driver or no device
        return default


def set_large_grf_mode(kernel_args: dict[str, Any]) -> None:
    """Request the large register file mode of Intel devices."""
    kernel_args["grf_mode"] = "256"


def __getattr__(name: str) -> Any:
    if name in ("amp_custom_fwd", "amp_custom_bwd"):
        return get_amp_custom_fwd_bwd()[name == "amp_custom_bwd"]
    if name in ("element_mul_kernel", "torch_to_triton_dtype"):
        return getattr(importlib.import_module(f"{__package__}.triton_utils"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
