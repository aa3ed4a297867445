"""The scaling formats: what a quantised tensor of each is made of.

``input`` of shape ``[..., H]`` is seen as N rows of H columns. Values that share a scale make
a block; the last block of a row or column may be cut off. What is computed is laid down in
``ops/quantization.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

__all__ = ["FLOAT8", "FORMATS", "LARGEST", "Format"]

FLOAT8: Final = ("float8_e4m3fn", "float8_e5m2")

LARGEST: Final[Mapping[str, float]] = MappingProxyType(
    {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "uint8": 6.0}
)
"""The largest value of each data dtype; uint8 holds e2m1."""


@dataclass(frozen=True, slots=True)
class Format:
    """One way to scale.

    Attributes:
        name: what operators call it.
        dtypes: of the data, the first unless another is asked for.
        block: rows and columns that share a scale; None if all do.
        scale_dtype: dtype of ``scale_inv``.
        values_per_byte: how many values lie in an element of the data, along a row.
        global_scale: whether a factor of the whole tensor comes on top of the blocks'.
    """

    name: str
    dtypes: tuple[str, ...]
    block: tuple[int, int] | None
    scale_dtype: str = "float32"
    values_per_byte: int = 1
    global_scale: bool = False

    @property
    def by_tensor(self) -> bool:
        """Whether something is computed from the whole tensor, so that it has an amax."""
        return self.block is None or self.global_scale

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """How many blocks there are, down and across."""
        if self.block is None:
            return 1, 1
        down, across = self.block
        return -(-rows // down), -(-columns // across)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of ``scale_inv``."""
        return (1,) if self.block is None else self.grid(rows, columns)


FORMATS: Final[Mapping[str, Format]] = MappingProxyType(
    {
        it.name: it
        for it in (
            Format("per_tensor", FLOAT8, None),
            Format("block_1x128", FLOAT8, (1, 128)),
            Format("block_128x128", FLOAT8, (128, 128)),
            Format("mxfp8", FLOAT8, (1, 32), "float8_e8m0fnu"),
            Format("nvfp4", ("uint8",), (1, 16), "float8_e4m3fn", 2, global_scale=True),
        )
    }
)
