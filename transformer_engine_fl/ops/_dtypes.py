"""The dtypes that operators take, and what they calculate in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["COPIED", "FLOATS", "math_dtype"]

FLOATS = ("float32", "bfloat16", "float16", "float64")

COPIED = (*FLOATS, "float8_e4m3fn", "float8_e5m2", "uint8")
"""What an operator may take that only moves values: those of a quantised tensor as well."""


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """What an operator calculates in for an input of ``dtype``: float64 or else float32."""
    import torch

    return torch.float64 if dtype == torch.float64 else torch.float32
