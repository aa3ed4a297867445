"""Kernels by what chooses them, for families whose kernels are functions of a few choices.

A source is a function of what a kernel depends on (dtypes, sizes, alignment) and of the
device's limits; what it names is loaded once for each choice.
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
"""A kernel, how it is launched, and how many rows (tokens, groups) a block takes."""


class Loaded:
    """A kernel on a device.

    Attributes:
        each: rows of a block.
    """

    __slots__ = ("_kernel", "each")

    def __init__(self, source: Source, device: int) -> None:
        found, geometry, self.each = source
        self._kernel = _launch.load(found, geometry, device)

    def __call__(self, rows: int, *values: Any) -> None:
        """Launch for so many rows; ``values`` are the kernel's arguments."""
        self._kernel.launch(-(-rows // self.each), 1, *values)


class LoadedKernels(Plans[Loaded]):
    """The kernels that a family has loaded."""

    __slots__ = ()

    def of(self, like: Tensor, source: Callable[..., Source], *key: Any) -> Loaded:
        """What ``source(*key, limits)`` names, on the device of a tensor."""
        device = like.get_device()
        full = (device, source, *key)
        return self.get(full) or self.made(
            full, lambda: Loaded(source(*key, _launch.limits(device)), device)
        )


def common_access(columns: int, *tensors: tuple[Tensor, int]) -> int:
    """Elements that one access may cover in all of some tensors.

    Args:
        columns: of their rows.
        tensors: each with the elements from row to row; the first one's vectors count.
    """
    parts = []
    for tensor, step in tensors:
        size = tensor.itemsize
        parts += [(tensor.data_ptr(), size), (step * size, size)]
    return access_width(vector_width(columns or 1, tensors[0][0].itemsize), *parts)
