"""The second stage of a sum over rows: adding up what groups of rows gave (``sums.cu``).

No atomics and a fixed order, so that the same bits come each time.
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
        threads: of a block.
        warps: that share out the groups of the same columns.
    """

    vec: int
    threads: int
    warps: int

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.vec * self.threads // self.warps


FEW: Final = 64
"""So many groups, or fewer, leave most warps of a large block nothing to load but what others do:
with 64 of them a backward of 4,096 columns took 9.9 microseconds, and 8.1 in small blocks; with
128 as long.
"""


def _shape(columns: int, sums: torch.dtype, results: int, few: bool) -> _Shape:
    """Few columns leave few blocks, so those are large; many columns take wider loads. Of 8,192
    the sums of two parameters are enough of them. Of 65,536 there are threads enough if each
    adds up all groups by itself. ``few``: whether there are no more groups than FEW.
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
    """The kernel that adds up partial sums of ``sums`` and gives them as ``result``; ``few``:
    no more than FEW.
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

    It is launched as a dependent of the kernel before it on the stream, whose last act is
    to write the partial sums.
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
        # Each with the blocks of its grid: of many groups, then of few.
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
            groups: how many partial sums there are of each.
        """
        kernel, blocks = self._kernels[groups <= FEW]
        results = 2 if second else 1
        kernel.launch(blocks, results, partial, first, second, groups, self._columns)
