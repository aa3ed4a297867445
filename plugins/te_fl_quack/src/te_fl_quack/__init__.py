"""Registers quack's CuTe kernels as implementations for transformer_engine_fl.

The entry point in pyproject.toml names this module. It imports neither torch nor quack:
``kernels`` does so when one of its operators is first chosen.
"""

from __future__ import annotations

import importlib.util

from transformer_engine_fl import BackendImplKind, OpImpl, OpRegistry
from transformer_engine_fl.vendors.detection import absent

__all__ = ["LIMITED", "OPERATORS", "TE_FL_PLUGIN_API", "dtypes", "is_available", "register"]

TE_FL_PLUGIN_API = 1

OPERATORS = (
    "layernorm_bwd",
    "layernorm_fwd",
    "rmsnorm_bwd",
    "rmsnorm_bwd_add",
    "rmsnorm_fwd",
    "rmsnorm_fwd_add",
    "scaled_softmax_backward",
    "scaled_softmax_forward",
)

LIMITED = {
    "rmsnorm_fwd_add": (
        frozenset({"float32"}),
        "what is normalized is the sum before it is rounded to the input's dtype",
    ),
    "scaled_softmax_forward": (
        frozenset({"float16"}),
        "a row is NaN where its largest logit, times log2(e), overflows float32",
    ),
}
"""Operators that keep the contract in some dtypes only: (these dtypes, the fault in others)."""


def dtypes(op_name: str) -> frozenset[str]:
    """The dtypes in which quack's operator keeps its contract."""
    limit = LIMITED.get(op_name)
    return limit[0] if limit else frozenset({"float32", "bfloat16", "float16"})


def is_available() -> bool | str:
    """Whether quack can run here; says why not."""
    for package, distribution in (("quack", "quack-kernels"), ("cutlass", "nvidia-cutlass-dsl")):
        if importlib.util.find_spec(package) is None:
            return f"{distribution} is not installed: pip install quack-kernels"
    return absent({"cuda"}) or True


def register(registry: OpRegistry) -> None:
    """Register every implementation of this package."""
    registry.register_many(
        OpImpl(
            op_name=name,
            impl_id="vendor.quack",
            kind=BackendImplKind.VENDOR,
            vendor="quack",
            fn=f"{__name__}.kernels:{name}",
            priority=100,
            supported_dtypes=dtypes(name),
            devices=frozenset({"cuda"}),
            min_arch="sm_90",
            is_available=is_available,
        )
        for name in OPERATORS
    )
