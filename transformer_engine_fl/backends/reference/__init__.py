"""The reference set: every operator in plain PyTorch, readable as the definition."""

from transformer_engine_fl.backends._register import register_set
from transformer_engine_fl.core.registry import OpRegistry
from transformer_engine_fl.core.types import BackendImplKind

FAMILIES = {
    "activation": (
        *("gelu", "dgelu", "dbias_dgelu", "geglu", "dgeglu"),
        *("qgelu", "dqgelu", "dbias_dqgelu", "qgeglu", "dqgeglu"),
        *("relu", "drelu", "dbias_drelu", "reglu", "dreglu"),
        *("srelu", "dsrelu", "dbias_dsrelu", "sreglu", "dsreglu"),
        *("silu", "dsilu", "dbias_dsilu", "swiglu", "dswiglu"),
        *("glu", "dglu", "clamped_swiglu", "clamped_dswiglu"),
    ),
    "normalization": ("rmsnorm_fwd", "rmsnorm_bwd", "layernorm_fwd", "layernorm_bwd"),
    "softmax": (
        "scaled_softmax_forward",
        "scaled_softmax_backward",
        "scaled_masked_softmax_forward",
        "scaled_masked_softmax_backward",
        "scaled_upper_triang_masked_softmax_forward",
        "scaled_upper_triang_masked_softmax_backward",
        "scaled_aligned_causal_masked_softmax_forward",
        "scaled_aligned_causal_masked_softmax_backward",
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
