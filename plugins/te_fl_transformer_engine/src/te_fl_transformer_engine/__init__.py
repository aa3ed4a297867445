"""Registers NVIDIA Transformer Engine's kernels as implementations for transformer_engine_fl.

The entry point in pyproject.toml names this module. Transformer Engine is imported only when one
of its operators is first chosen. The adapters of ``transformer_engine_fl.integrations.tex`` call
its functions; operators.py applies them.
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
"""The operators that are registered; other functions of Transformer Engine are not bridged."""

_HALVES = frozenset({"bfloat16", "float16"})
_INEXACT = {
    # NaN where the cube of the input overflows float32, which float16 inputs cannot reach.
    "dgelu": frozenset({"float32", "bfloat16"}),
    # Exceeds the contract's tolerance where the exponential of the sigmoid overflows.
    "dglu": frozenset({"float32"}),
}
"""Dtypes in which the conformance kit found errors on a device; they are not registered."""


def is_available() -> bool | str:
    """Whether NVIDIA's Transformer Engine is installed; does not import it."""
    try:
        found = importlib.util.find_spec("transformer_engine")
    except ValueError:  # a module of that name in sys.modules without a spec
        found = None
    if found is None or found.origin is None:
        return "Transformer Engine is not installed: pip install transformer_engine[pytorch]"
    return True


def _dtypes(name: str) -> frozenset[str]:
    dtypes = _HALVES if name in _SOFTMAX else _HALVES | {"float32"}
    return dtypes - _INEXACT.get(name, frozenset())


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
