"""The calls that are measured for a choice, by shape; one module for each family.

Shapes are those of the benchmarks: rows x columns for operators on rows, layers x width for lists
of tensors.
"""

from __future__ import annotations

from transformer_engine_fl.backends.flagos.tuning.calls import (
    activation,
    attention,
    dropout,
    gemm,
    loss,
    moe,
    normalization,
    optimizer,
    quantization,
    rope,
    softmax,
)
from transformer_engine_fl.backends.flagos.tuning.calls.call import Calls, Shape

__all__ = ["CALLS", "Calls", "Shape"]

_FAMILIES = (
    activation,
    attention,
    dropout,
    gemm,
    loss,
    moe,
    normalization,
    optimizer,
    quantization,
    rope,
    softmax,
)
CALLS: tuple[Calls, ...] = tuple(it for family in _FAMILIES for it in family.CALLS)
"""For every operator that has choices; several entries if it has several kernels."""
