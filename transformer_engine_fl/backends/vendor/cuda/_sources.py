"""A cache of loaded kernels, for families that choose a kernel by a few values.

A function maps what a kernel depends on (dtypes, sizes, alignment) and the device's limits to a
:data:`Source`, which is loaded once for each combination of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.backends.vendor.cuda import _launch
from transformer_engine_fl.backends.vendor.cuda._arguments import (
    Plans,
    access_width,
    vector_width,
)
from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Loaded", "LoadedKernels", "Source", "common_access"]

Source = tuple[Specialisation, _launch.Geometry, int]
"""A kernel, its launch geometry, and how many rows (tokens, groups) a block takes."""


class Loaded:
    """A kernel on a device.

    Attributes:
        each: rows that a block takes.
    """

    __slots__ = ("_kernel", "each")

    def __init__(self, source: Source, device: int) -> None:
        found, geometry, self.each = source
        self._kernel = _launch.load(found, geometry, device)

    def __call__(self, rows: int, *values: Any) -> None:
        """Launch enough blocks for ``rows`` rows; ``values`` are the kernel's arguments."""
        self._kernel.launch(-(-rows // self.each), 1, *values)


class LoadedKernels(Plans[Loaded]):
    """The kernels that a family has loaded."""

    __slots__ = ()

    def of(self, like: Tensor, source: Callable[..., Source], *key: Any) -> Loaded:
        """The kernel that ``source(*key, limits)`` names, on the device of ``like``."""
        device = like.get_device()
        full = (device, source, *key)
        return self.get(full) or self.get_or_create(
            full, lambda: Loaded(source(*key, _launch.limits(device)), device)
        )


def common_access(columns: int, *tensors: tuple[Tensor, int]) -> int:
    """Elements that one access may cover in every one of several tensors.

    Args:
        columns: columns of a row.
        tensors: each with its row stride in elements; the first one's dtype sets the vector width.
    """
    parts = []
    for tensor, step in tensors:
        size = tensor.itemsize
        parts += [(tensor.data_ptr(), size), (step * size, size)]
    return access_width(vector_width(columns or 1, tensors[0][0].itemsize), *parts)
