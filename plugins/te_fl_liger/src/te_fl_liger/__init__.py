"""Registers liger-kernel's Triton operators as implementations for transformer_engine_fl.

The entry point in pyproject.toml names this module. It imports neither torch, Triton nor
liger-kernel: ``kernels`` does so when one of its operators is first chosen.
"""

from __future__ import annotations

import importlib.util
import os

from transformer_engine_fl import BackendImplKind, OpImpl, OpRegistry
from transformer_engine_fl.vendors.detection import absent

__all__ = [
    "BY_ROWS",
    "OPERATORS",
    "TE_FL_PLUGIN_API",
    "WIDE_ONLY",
    "dtypes",
    "is_available",
    "register",
]

TE_FL_PLUGIN_API = 1

BY_ROWS = (
    "dgeglu",
    "dsrelu",
    "dswiglu",
    "geglu",
    "layernorm_fwd",
    "rmsnorm_fwd_add",
    "scaled_softmax_backward",
    "scaled_softmax_forward",
    "srelu",
    "swiglu",
)
"""Operators of which a program computes one row, independently of the others."""

WIDE_ONLY = {
    "dgeglu": "the derivative of gelu is rounded before it is multiplied",
    "geglu": "gelu of the gate is rounded before the product",
    "scaled_softmax_backward": "products are rounded to the input's dtype before they are summed",
    "swiglu": "silu of the gate is rounded before the product",
}
"""Operators whose error in bfloat16 and float16 exceeds the contract's tolerance, and why."""

OPERATORS = (*BY_ROWS, "layernorm_bwd", "rmsnorm_bwd", "rmsnorm_bwd_add", "rmsnorm_fwd")


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def is_available() -> bool | str:
    """Whether liger-kernel can run here; says why not."""
    for package in ("triton", "liger_kernel"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: pip install {package.replace('_', '-')}"
    return _interpreted() or absent({"cuda"}) or True


def dtypes(op_name: str) -> frozenset[str]:
    """The dtypes in which liger-kernel's operator keeps its contract."""
    if op_name in WIDE_ONLY:
        return frozenset({"float32"})
    # Triton's interpreter does bfloat16 arithmetic on the bits as integers.
    return frozenset(
        {"float32", "float16"} if _interpreted() else {"float32", "float16", "bfloat16"}
    )


def register(registry: OpRegistry) -> None:
    """Register every implementation of this package."""
    registry.register_many(
        OpImpl(
            op_name=name,
            impl_id="vendor.liger",
            kind=BackendImplKind.VENDOR,
            vendor="liger",
            fn=f"{__name__}.kernels:{name}",
            priority=100,
            supported_dtypes=dtypes(name),
            devices=frozenset({"cpu"} if _interpreted() else {"cuda"}),
            is_available=is_available,
            traits=frozenset({"deterministic"})
            | (frozenset({"batch_invariant"}) if name in BY_ROWS else frozenset()),
        )
        for name in OPERATORS
    )
