"""The second stage of a sum over rows: adds up the partial sums of groups of rows (``sums.cu``).

Without atomics and in a fixed order, so the same call gives the same bits each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from transformer_engine_fl.backends.vendor.cuda import _launch
from transformer_engine_fl.backends.vendor.cuda._arguments import NAMES, SIZES
from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation

if TYPE_CHECKING:
    import torch

__all__ = ["SumOfGroups", "sum_source"]


class _Shape(NamedTuple):
    """How columns and groups are spread over threads.

    Attributes:
        vec: columns of a thread.
        threads: threads of a block.
        warps: warps among which the groups of the same columns are divided.
    """

    vec: int
    threads: int
    warps: int

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.vec * self.threads // self.warps


FEW_GROUPS: Final = 64
"""With so many groups, or fewer, most warps of a large block would only repeat the loads of others:
with 64 groups a backward of 4,096 columns took 9.9 microseconds, and 8.1 in small blocks; with 128
both took as long.
"""


def _shape(columns: int, sums: torch.dtype, results: int, few: bool) -> _Shape:
    """Few columns make few blocks, so these are large; many columns take wider loads. 8,192 columns
    are many if there are sums for two parameters. From 65,536 columns on there are enough threads
    if each adds up all groups by itself. ``few``: whether there are no more groups than FEW_GROUPS.
    """
    if columns % 4 == 0 and columns >= 65536 and SIZES[sums] == 4:
        return _Shape(4, 128, 1)
    many = columns > 8192 or (columns == 8192 and results > 1)
    if columns % 4 == 0 and many:
        return _Shape(4, 256, 8)
    return _Shape(1, 256, 8) if few else _Shape(1, 1024, 32)


def sum_source(
    columns: int,
    sums: torch.dtype,
    result: torch.dtype,
    device: _launch.Limits,
    results: int = 1,
    few: bool = False,
) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel that adds up partial sums of dtype ``sums`` to results of dtype ``result``.

    ``few``: whether there are no more groups than FEW_GROUPS.
    """
    vec, threads, warps = _shape(columns, sums, results, few)
    defines: dict[str, str | int] = {
        "TS": NAMES[sums],
        "TW": NAMES[result],
        "VEC": vec,
        "LANES": threads,
        "WARPS": warps,
    }
    geometry = _launch.Geometry(threads, "PPPii", dependent=device.has_clusters)
    return Specialisation("sums", "sum_of_groups", tuple(defines.items())), geometry


class SumOfGroups:
    """The kernel on a device.

    Where the device has them it is a dependent launch: it starts early, and waits for the kernel
    before it on the stream, which writes the partial sums.
    """

    __slots__ = ("_columns", "_kernels")

    def __init__(
        self,
        columns: int,
        sums: torch.dtype,
        result: torch.dtype,
        device: int,
        results: int = 1,
    ) -> None:
        limits = _launch.limits(device)
        # Kernels for many groups and for few, each with the blocks of its grid.
        self._kernels = [
            (
                _launch.load(*sum_source(columns, sums, result, limits, results, few), device),
                -(-columns // _shape(columns, sums, results, few).columns),
            )
            for few in (False, True)
        ]
        self._columns = columns

    def __call__(self, partial: int, first: int, second: int, groups: int) -> None:
        """Launch.

        Args:
            partial: pointer to ``[1 or 2, groups, columns]``.
            first, second: pointers of the results; 0 if there is no second one.
            groups: the number of partial sums of each result.
        """
        kernel, blocks = self._kernels[groups <= FEW_GROUPS]
        results = 2 if second else 1
        kernel.launch(blocks, results, partial, first, second, groups, self._columns)
