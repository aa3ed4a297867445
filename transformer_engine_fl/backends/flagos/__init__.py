"""The flagos set: Triton kernels, on a GPU, or on the CPU in Triton's interpreter.

Triton reads ``TRITON_INTERPRET`` when it is imported, so it must be set before that.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

from transformer_engine_fl.backends._register import register_set
from transformer_engine_fl.core.registry import OpRegistry
from transformer_engine_fl.core.types import BackendImplKind

__all__ = ["is_available", "register"]


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def _version(package: str) -> tuple[int, ...] | None:
    """The first two numbers of an installed package's version."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(it) for it in found.split(".")[:2] if it.isdecimal())


def _why_not_interpreted() -> str | None:
    numpy, triton = _version("numpy"), _version("triton")
    if numpy is None:
        return "Triton's interpreter needs NumPy: pip install numpy"
    if triton is not None and triton < (3, 7) and numpy >= (2, 4):
        # It takes arrays with one element for numbers, which NumPy no longer allows.
        return "the interpreter of Triton 3.6 needs NumPy before 2.4: pip install 'numpy<2.4'"
    return None


def is_available() -> bool | str:
    """Whether Triton can run a kernel here; says why not."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (it exists for Linux only): pip install triton"
    if _interpreted():
        return _why_not_interpreted() or True
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU; TRITON_INTERPRET=1 runs the kernels on the CPU, slowly"
    return True


_TRAITS = frozenset({"deterministic", "batch_invariant", "graph_safe"})
_OF_GEMM = frozenset({"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"})
# How torch sums a matrix product may depend on the number of rows; and in float64 the last bit of
# cross entropy's gradient may depend on which rows share a tile.
_NOT_INVARIANT = {"traits": _TRAITS - {"batch_invariant"}}


def register(registry: OpRegistry) -> None:
    """Register the set; its modules, and Triton, load when they are first chosen."""
    register_set(
        registry,
        __name__,
        families=(
            "activation",
            "attention",
            "attention_layout",
            "context_parallel",
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
        ),
        impl_id="default.flagos",
        kind=BackendImplKind.FLAGOS,
        devices=frozenset({"cpu"} if _interpreted() else {"cuda"}),
        is_available=is_available,
        traits=_TRAITS,
        differing={
            "gemm": {"supported_dtypes": _OF_GEMM},
            "cross_entropy_bwd": _NOT_INVARIANT,
            "fused_linear_cross_entropy_fwd": _NOT_INVARIANT,
            "fused_linear_cross_entropy_bwd": _NOT_INVARIANT,
            "fused_linear_cross_entropy_fwd_bwd": _NOT_INVARIANT,
        },
    )
