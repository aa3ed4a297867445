"""The reference set: every operator in plain PyTorch, readable as the definition."""

from transformer_engine_fl.backends._register import register_set
from transformer_engine_fl.core.registry import OpRegistry
from transformer_engine_fl.core.types import BackendImplKind


def register(registry: OpRegistry) -> None:
    """Register the set; its modules, and torch, are imported when first chosen."""
    register_set(
        registry,
        __name__,
        impl_id="reference.torch",
        kind=BackendImplKind.REFERENCE,
        traits=frozenset({"deterministic"}),
    )
