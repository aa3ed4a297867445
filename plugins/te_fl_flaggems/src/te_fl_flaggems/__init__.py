"""Registers FlagGems' operators as implementations for transformer_engine_fl.

The entry point in pyproject.toml names this module. It imports neither torch nor flag_gems,
which initialises a device on import: ``kernels`` does so when one of its operators is
first chosen.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from transformer_engine_fl import BackendImplKind, OpImpl, OpRegistry
from transformer_engine_fl.vendors.detection import absent

__all__ = [
    "ATEN",
    "DEVICES",
    "LIMITED",
    "OPERATORS",
    "TE_FL_PLUGIN_API",
    "UNSUPPORTED",
    "dtypes",
    "implementations",
    "is_available",
    "register",
]

TE_FL_PLUGIN_API = 1

DEVICES = frozenset({"aipu", "cuda", "gcu", "mlu", "musa", "npu", "ptpu", "txda"})
"""Types of the devices for which FlagGems has a folder, except CPUs."""

OPERATORS = (
    "dgeglu",
    "dreglu",
    "dsilu",
    "dswiglu",
    "geglu",
    "gelu",
    "generic_gemm",
    "layernorm_bwd",
    "layernorm_fwd",
    "reglu",
    "relu",
    "rmsnorm_bwd",
    "rmsnorm_fwd",
    "rmsnorm_fwd_add",
    "scaled_softmax_backward",
    "scaled_softmax_forward",
    "silu",
    "swiglu",
)

ATEN = {
    "_log_softmax": "log_softmax",
    "_log_softmax_backward_data": "log_softmax_backward",
    "_softmax": "softmax",
    "_softmax_backward_data": "softmax_backward",
    "addmm": "addmm",
    "bmm": "bmm",
    "gelu": "gelu",
    "gelu_backward": "gelu_backward",
    "mm": "mm",
    "native_dropout": "dropout",
    "native_dropout_backward": "dropout_backward",
    "relu": "relu",
    "silu": "silu",
    "silu_backward": "silu_backward",
}
"""ATen operator -> the function of FlagGems that implements it."""

LIMITED = {
    "rmsnorm_fwd_add": (
        frozenset({"float32"}),
        "what is normalized is the sum before it is rounded to the input's dtype",
    ),
}
"""Operators that keep the contract in some dtypes only: (these dtypes, the fault in others)."""

UNSUPPORTED = {
    "dgelu": "gelu_backward is NaN where the square of an input overflows float32",
    "cross_entropy_fwd": "cross_entropy_loss returns no log-sum-exp, and -inf for a row whose "
    "logits are all below about -104",
    "cross_entropy_bwd": "the gradient of cross_entropy_loss is not computed from the log-sum-exp",
    "fused_rope_forward": "apply_rotary_pos_emb has one angle for both features of a pair",
    "dropout_fwd": "dropout draws other random numbers, and its mask has one byte per element",
    "fused_attn_fwd": "scaled_dot_product_attention returns no log-sum-exp",
    "fused_topk_with_score_function_fwd": "topk_softmax returns weights and indices, not the "
    "probabilities of every expert",
    "aten::native_layer_norm": "layer_norm returns its statistics flat, and rounded to the "
    "input's dtype",
    "aten::rms_norm": "rms_norm needs a weight",
}
"""Operators that FlagGems seems to have and that are not registered, with the reasons."""


def dtypes(op_name: str) -> frozenset[str]:
    """The dtypes in which FlagGems' operator keeps its contract."""
    limit = LIMITED.get(op_name)
    return limit[0] if limit else frozenset({"float32", "bfloat16", "float16"})


def is_available() -> bool | str:
    """Whether FlagGems can run here; says why not."""
    if importlib.util.find_spec("flag_gems") is None:
        return "flag_gems is not installed: pip install flag_gems"
    return absent(DEVICES) or True


def register(registry: OpRegistry) -> None:
    """Register every implementation of this package."""
    registry.register_many(implementations(f"{__name__}.kernels"))


def implementations(kernels: str) -> Iterator[OpImpl]:
    """Every implementation, with functions of the module ``kernels``."""
    common = {
        "impl_id": "vendor.flaggems",
        "kind": BackendImplKind.VENDOR,
        "vendor": "flaggems",
        "priority": 100,
        "devices": DEVICES,
        "is_available": is_available,
    }
    served = {name: f"{kernels}:{name}" for name in OPERATORS}
    served |= {f"aten::{name}": f"{kernels}:aten.{name}" for name in ATEN}
    for name, fn in served.items():
        yield OpImpl(
            op_name=name,
            fn=fn,
            supported_dtypes=dtypes(name),
            mutates=() if name.startswith("aten::") else None,
            **common,
        )
