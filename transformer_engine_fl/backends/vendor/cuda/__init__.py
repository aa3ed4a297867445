"""NVIDIA's set: CUDA C++ compiled at run time, from wheels alone.

``TE_FL_SKIP_CUDA=1`` switches it off whole.
"""

from __future__ import annotations

from transformer_engine_fl.backends._register import register_set
from transformer_engine_fl.core.policy import get_environment
from transformer_engine_fl.core.registry import OpRegistry
from transformer_engine_fl.core.types import BackendImplKind
from transformer_engine_fl.vendors.info import VendorInfo
from transformer_engine_fl.vendors.registry import register_vendor

__all__ = ["FAMILIES", "INFO", "is_available", "register"]

INFO = VendorInfo("nvidia", "cuda", "nvidia-smi -L")

FAMILIES = (
    "activation",
    "attention",
    "dropout",
    "gemm",
    "moe",
    "normalization",
    "padding",
    "rope",
    "router",
    "softmax",
)
"""The families that the set has a file for."""


def is_available() -> bool | str:
    """Whether a kernel can be compiled and run here; says why not."""
    if get_environment().skip_cuda:
        return "switched off by TE_FL_SKIP_CUDA"
    from transformer_engine_fl.backends.vendor.cuda import _compile

    return _compile.missing() or True


def register(registry: OpRegistry) -> None:
    """Register the set; its modules load, and its kernels compile, when first chosen."""
    register_vendor(INFO)
    register_set(
        registry,
        __name__,
        families=FAMILIES,
        omit=("rmsnorm_fwd_add", "rmsnorm_bwd_add"),
        impl_id="vendor.cuda",
        kind=BackendImplKind.VENDOR,
        vendor=INFO.vendor,
        devices=frozenset({INFO.device}),
        min_arch="sm_80",
        is_available=is_available,
        traits=frozenset({"deterministic", "batch_invariant", "graph_safe"}),
        differing={
            # Which of its kernels a library takes depends on the size of the whole.
            "gemm": {"traits": frozenset({"deterministic", "graph_safe"})},
            "attention": {
                "supported_dtypes": frozenset({"bfloat16", "float16"}),
                "traits": frozenset({"graph_safe"}),
            },
        },
    )
