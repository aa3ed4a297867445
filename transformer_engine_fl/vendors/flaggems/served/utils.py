"""``flag_gems.utils``: helpers of kernels and of the functions that launch them.

Triton is imported only when first needed: a folder may have no kernels.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "bracket_next_power_of_2",
    "broadcast_shapes",
    "broadcastable",
    "broadcastable_to",
    "c_contiguous_stride",
    "dim_compress",
    "get_dtype_max",
    "get_dtype_min",
    "libentry",
    "libtuner",
    "volume",
]


def libentry() -> Callable[[Any], Any]:
    """A decorator that returns the kernel unchanged."""
    return lambda kernel: kernel


def libtuner(configs: Sequence[Any], key: Sequence[str], **options: Any) -> Callable[[Any], Any]:
    """Triton's autotuner, with those of the options that it supports."""
    import triton

    known = (
        "prune_configs_by",
        "reset_to_zero",
        "restore_value",
        "warmup",
        "rep",
        "use_cuda_graph",
    )
    taken = {name: options[name] for name in known if name in options}
    few = configs[:1] if os.environ.get("TRITON_INTERPRET") == "1" else configs
    made: Callable[[Any], Any] = triton.autotune(list(few), list(key), **taken)
    return made


def dim_compress(inp: Tensor, dims: int | Iterable[int]) -> Tensor:
    """A contiguous tensor with these dimensions last, in the order of their strides."""
    of = [dims] if isinstance(dims, int) else list(dims)
    reduced = [dim % inp.ndim for dim in of]
    others = [dim for dim in range(inp.ndim) if dim not in reduced]
    by_stride = sorted(reduced, key=lambda dim: inp.stride(dim), reverse=True)
    return inp.permute(others + by_stride).contiguous()


def broadcastable_to(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether a shape expands to another."""
    pairs = zip(reversed(shape), reversed(other), strict=False)
    return len(shape) <= len(other) and all(a in (1, b) for a, b in pairs)


def broadcastable(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes expand to a common one."""
    pairs = zip(reversed(shape), reversed(other), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def broadcast_shapes(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The shape that all of them expand to."""
    import torch

    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def volume(shape: Iterable[int]) -> int:
    """The number of elements of a shape."""
    return math.prod(shape)


def c_contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides[: len(shape)]))


def bracket_next_power_of_2(number: int, lower: int, upper: int) -> int:
    """The least power of two that is at least ``number``, clamped to the bounds."""
    return min(max(1 << max(number - 1, 0).bit_length(), lower), upper)


def get_dtype_max(dtype: Any) -> float:
    """The largest finite value."""
    return float(_limits(dtype).max)


def get_dtype_min(dtype: Any) -> float:
    """The smallest finite value."""
    return float(_limits(dtype).min)


def _limits(dtype: Any) -> Any:
    import torch

    return torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)


def __getattr__(name: str) -> Any:
    if name == "tl_extra_shim":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return importlib.import_module(f"{__package__}.interpreted")
        return importlib.import_module("triton.language.extra.libdevice")
    if name == "pointwise_dynamic":
        return importlib.import_module(f"{__package__}.pointwise").pointwise_dynamic
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
