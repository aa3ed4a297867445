"""What liger-kernel's kernels lack in Triton's interpreter, so that a CPU can run them.

The functions of libdevice are stubs there that return nothing: Triton's own stand in for
those that the kernels call. A floating-point argument is Python's number there, which has no
``to``. And bfloat16 is calculated on its bits, so it is not offered there at all.
"""

from __future__ import annotations

import importlib
from typing import Any

import triton
import triton.language as tl

__all__ = ["fill_in", "number"]

MODULES = ("fused_add_rms_norm", "geglu", "layer_norm", "rms_norm")


# Functions around Triton's: the interpreter puts its own under Triton's names while it runs.
def _rsqrt(x: Any) -> Any:
    return tl.rsqrt(x)


def _tanh(x: Any) -> Any:
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


class _Number(float):
    """A kernel's floating-point argument; its dtype is that of what it meets."""

    def to(self, dtype: Any) -> float:
        return self


def number(value: float) -> float:
    """A floating-point argument for a kernel."""
    return _Number(value) if triton.knobs.runtime.interpret else float(value)


FUNCTIONS = {"rsqrt": _rsqrt, "tanh": _tanh}


def fill_in() -> None:
    """Give the kernels functions that work; nothing if they are compiled."""
    if not triton.knobs.runtime.interpret:
        return
    for name in MODULES:
        module = importlib.import_module(f"liger_kernel.ops.{name}")
        for function in FUNCTIONS.keys() & vars(module).keys():
            setattr(module, function, FUNCTIONS[function])
