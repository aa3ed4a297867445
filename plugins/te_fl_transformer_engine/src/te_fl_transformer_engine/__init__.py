"""NVIDIA Transformer Engine's kernels for transformer_engine_fl: which there are, and when.

The entry point in pyproject.toml names this module. Nothing of Transformer Engine is loaded
before one of its operators is first chosen; how its functions are called is in the adapters of
``transformer_engine_fl.integrations.tex``, and operators.py puts the two together.
"""

from __future__ import annotations

import importlib.util

from transformer_engine_fl import BackendImplKind, OpImpl, OpRegistry

__all__ = ["IMPL_ID", "OPERATORS", "TE_FL_PLUGIN_API", "VENDOR", "is_available", "register"]

TE_FL_PLUGIN_API = 1
VENDOR = "transformer_engine"
IMPL_ID = "vendor.transformer_engine"

_ACTIVATIONS = (
    *("gelu", "geglu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu"),
    *("silu", "swiglu", "glu"),
)
_NORMS = ("rmsnorm_fwd", "rmsnorm_bwd", "rmsnorm_bwd_add", "layernorm_fwd", "layernorm_bwd")
_SOFTMAX = tuple(
    f"{name}_{way}"
    for name in (
        "scaled_softmax",
        "scaled_masked_softmax",
        "scaled_upper_triang_masked_softmax",
        "scaled_aligned_causal_masked_softmax",
    )
    for way in ("forward", "backward")
)
OPERATORS = (*_ACTIVATIONS, *(f"d{name}" for name in _ACTIVATIONS), *_NORMS, *_SOFTMAX)
"""The operators that it serves; the other functions of Transformer Engine are not bridged."""

_HALVES = frozenset({"bfloat16", "float16"})
_INEXACT = {
    # NaN where the cube of the input overflows float32, which float16 cannot reach.
    "dgelu": frozenset({"float32", "bfloat16"}),
    # Past the contract's tolerance where the exponential of the sigmoid overflows.
    "dglu": frozenset({"float32"}),
}
"""What the conformance kit found wrong on a device, and so is not registered."""


def is_available() -> bool | str:
    """Whether NVIDIA's Transformer Engine is installed; loads nothing of it."""
    try:
        found = importlib.util.find_spec("transformer_engine")
    except ValueError:  # a module of that name in sys.modules that was not found anywhere
        found = None
    if found is None or found.origin is None:
        return "Transformer Engine is not installed: pip install transformer_engine[pytorch]"
    return True


def _dtypes(name: str) -> frozenset[str]:
    taken = _HALVES if name in _SOFTMAX else _HALVES | {"float32"}
    return taken - _INEXACT.get(name, frozenset())


def register(registry: OpRegistry) -> None:
    """Register every implementation of this package."""
    registry.register_many(
        OpImpl(
            op_name=name,
            impl_id=IMPL_ID,
            kind=BackendImplKind.VENDOR,
            vendor=VENDOR,
            fn=f"{__name__}.operators:{name}",
            priority=100,
            supported_dtypes=_dtypes(name),
            devices=frozenset({"cuda"}),
            min_arch="sm_80",
            is_available=is_available,
        )
        for name in OPERATORS
    )
