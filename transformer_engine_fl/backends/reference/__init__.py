"""The reference set: every operator in plain PyTorch, readable as the definition."""

from transformer_engine_fl.backends._register import register_set
from transformer_engine_fl.core.registry import OpRegistry
from transformer_engine_fl.core.types import BackendImplKind

FAMILIES = {
    "dropout": ("dropout_fwd", "dropout_bwd"),
    "normalization": (
        "rmsnorm_fwd",
        "rmsnorm_bwd",
        "rmsnorm_fwd_add",
        "rmsnorm_bwd_add",
        "layernorm_fwd",
        "layernorm_bwd",
    ),
    "rope": (
        "fused_rope_forward",
        "fused_rope_backward",
        "fused_qkv_rope_forward",
        "fused_qkv_rope_backward",
    ),
}


def register(registry: OpRegistry) -> None:
    """Register the set; its modules, and torch, load when they are first chosen."""
    register_set(
        registry,
        __name__,
        FAMILIES,
        impl_id="reference.torch",
        kind=BackendImplKind.REFERENCE,
        traits=frozenset({"deterministic", "batch_invariant"}),
    )
