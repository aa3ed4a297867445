"""liger-kernel's Triton operators as implementations of transformer_engine_fl: what there is.

The entry point in pyproject.toml names this module. It loads neither torch, Triton nor
liger-kernel: ``kernels`` does, when one of its operators is first chosen.
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
"""Those of which a program of liger-kernel's calculates one row, whatever the others are."""

WIDE_ONLY = {
    "dgeglu": "the derivative of gelu is rounded before it is multiplied",
    "geglu": "gelu of the gate is rounded before the product",
    "scaled_softmax_backward": "products are rounded to the input's dtype before they are summed",
    "swiglu": "silu of the gate is rounded before the product",
}
"""What liger-kernel gets wrong in bfloat16 and float16, by more than the contract allows."""

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
    """The dtypes in which an operator of liger-kernel's keeps its contract."""
    if op_name in WIDE_ONLY:
        return frozenset({"float32"})
    # Triton's interpreter multiplies the bits of bfloat16.
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
