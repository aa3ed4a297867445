"""NVIDIA's set: CUDA C++ kernels, compiled at run time with a compiler from Python wheels.

``TE_FL_SKIP_CUDA=1`` switches the whole set off.
"""

from __future__ import annotations

from transformer_engine_fl.backends._register import register_set
from transformer_engine_fl.core.policy import get_environment
from transformer_engine_fl.core.registry import OpRegistry
from transformer_engine_fl.core.types import BackendImplKind
from transformer_engine_fl.vendors.info import VendorInfo
from transformer_engine_fl.vendors.registry import register_vendor

__all__ = ["FAMILIES", "INFO", "is_available", "register", "switched_off"]

INFO = VendorInfo("nvidia", "cuda", "nvidia-smi -L")

FAMILIES = (
    "activation",
    "attention",
    "dropout",
    "epilogue",
    "gemm",
    "loss",
    "moe",
    "normalization",
    "optimizer",
    "padding",
    "quantization",
    "rope",
    "router",
    "softmax",
)
"""The families that the set implements, a module each."""

_NOT_INVARIANT = {"traits": frozenset({"deterministic", "graph_safe"})}
"""Not batch invariant: the library picks a kernel by the size of the whole matrix product."""


def is_available() -> bool | str:
    """True if kernels can be compiled and run here, else the reason why not."""
    from transformer_engine_fl.backends.vendor.cuda import _compile

    return _compile.missing() or True


def switched_off() -> str | None:
    """The reason, if the environment switches the set off; else None."""
    return "switched off by TE_FL_SKIP_CUDA" if get_environment().skip_cuda else None


def register(registry: OpRegistry) -> None:
    """Register the set; its modules are imported and its kernels compiled on first use."""
    register_vendor(INFO)
    register_set(
        registry,
        __name__,
        families=FAMILIES,
        impl_id="vendor.cuda",
        kind=BackendImplKind.VENDOR,
        vendor=INFO.vendor,
        devices=frozenset({INFO.device}),
        min_arch="sm_80",
        is_available=is_available,
        switched_off=switched_off,
        traits=frozenset({"deterministic", "batch_invariant", "graph_safe"}),
        differing={
            "gemm": _NOT_INVARIANT,
            "fused_linear_cross_entropy_fwd": _NOT_INVARIANT,
            "fused_linear_cross_entropy_bwd": _NOT_INVARIANT,
            "fused_linear_cross_entropy_fwd_bwd": _NOT_INVARIANT,
            "attention": {
                "supported_dtypes": frozenset({"bfloat16", "float16"}),
                "traits": frozenset({"graph_safe"}),
            },
        },
    )
