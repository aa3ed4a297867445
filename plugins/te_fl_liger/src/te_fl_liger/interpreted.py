"""Provides what liger-kernel's kernels lack in Triton's interpreter, so that a CPU can run them.

In the interpreter, libdevice functions are stubs that return nothing, so the kernels get Triton's
own functions instead. A floating-point argument is a Python float, which has no ``to``. bfloat16
arithmetic is done on the bits as integers, so bfloat16 is not supported there.
"""

from __future__ import annotations

import importlib
from typing import Any

import triton
import triton.language as tl

__all__ = ["fill_in", "number"]

MODULES = ("fused_add_rms_norm", "geglu", "layer_norm", "rms_norm")


# Wrappers, because the interpreter replaces Triton's own functions while it runs.
def _rsqrt(x: Any) -> Any:
    return tl.rsqrt(x)


def _tanh(x: Any) -> Any:
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


class _Number(float):
    """A kernel's floating-point argument; it takes the dtype of the other operand."""

    def to(self, dtype: Any) -> float:
        return self


def number(value: float) -> float:
    """A floating-point argument for a kernel."""
    return _Number(value) if triton.knobs.runtime.interpret else float(value)


FUNCTIONS = {"rsqrt": _rsqrt, "tanh": _tanh}


def fill_in() -> None:
    """Replace the stubs in the kernels' modules; does nothing if kernels are compiled."""
    if not triton.knobs.runtime.interpret:
        return
    for name in MODULES:
        module = importlib.import_module(f"liger_kernel.ops.{name}")
        for function in FUNCTIONS.keys() & vars(module).keys():
            setattr(module, function, FUNCTIONS[function])
