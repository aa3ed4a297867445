"""The dtypes that operators take, and what they calculate in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["COPIED", "FLOATS", "math_dtype"]

FLOATS = ("float32", "bfloat16", "float16", "float64")

COPIED = (*FLOATS, "float8_e4m3fn", "float8_e5m2", "uint8")
"""The dtypes of an operator that only moves values: those of quantised data are among them."""


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype an operator calculates in: float64 for a float64 input, otherwise float32."""
    import torch

    return torch.float64 if dtype == torch.float64 else torch.float32
