"""The scaling formats: what a quantised tensor of each is made of.

``input`` of shape ``[..., H]`` is treated as N rows of H columns. Values that share a scale form
a block; the last block of a row or column may be incomplete. ``ops/quantization.py`` specifies
the arithmetic.
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
        name: the value of the operators' ``format``.
        dtypes: that the data may have; the first is the default.
        block: the rows and columns that share a scale; None if the whole tensor does.
        scale_dtype: dtype of ``scale_inv``.
        values_per_byte: how many values are packed into an element of the data, along a row.
        global_scale: whether the tensor has a scale in addition to those of its blocks.
    """

    name: str
    dtypes: tuple[str, ...]
    block: tuple[int, int] | None
    scale_dtype: str = "float32"
    values_per_byte: int = 1
    global_scale: bool = False

    @property
    def by_tensor(self) -> bool:
        """Whether the whole tensor has a scale, and therefore an amax."""
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
