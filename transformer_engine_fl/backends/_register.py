"""Registering an in-tree set: one implementation for each operator of each family file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.core.types import DEFAULT_PRIORITY, BackendImplKind, OpImpl

if TYPE_CHECKING:
    from transformer_engine_fl.core.registry import OpRegistry

__all__ = ["register_set"]


def register_set(
    registry: OpRegistry,
    package: str,
    families: Mapping[str, Sequence[str]],
    *,
    kind: BackendImplKind,
    **common: Any,
) -> None:
    """Register ``package.family:operator`` for each operator of each family.

    Args:
        registry: where to.
        package: the set's package.
        families: family file -> the operators in it.
        kind: the set's kind; decides its priority.
        common: the other fields of every :class:`OpImpl`.
    """
    registry.register_many(
        OpImpl(
            op_name=operator,
            kind=kind,
            fn=f"{package}.{family}:{operator}",
            priority=DEFAULT_PRIORITY[kind],
            **common,
        )
        for family, operators in families.items()
        for operator in operators
    )
