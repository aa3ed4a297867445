"""Registering an in-tree set: one implementation for each operator of each family file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.core.errors import RegistrationError, suggestion
from transformer_engine_fl.core.types import DEFAULT_PRIORITY, BackendImplKind, OpImpl
from transformer_engine_fl.ops import CATALOGUE

if TYPE_CHECKING:
    from transformer_engine_fl.core.registry import OpRegistry

__all__ = ["register_set"]


def register_set(
    registry: OpRegistry,
    package: str,
    *,
    kind: BackendImplKind,
    families: Collection[str] | None = None,
    omit: Collection[str] = (),
    differing: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    **common: Any,
) -> None:
    """Register ``package.family:operator`` for the operators of the catalogue.

    Args:
        registry: the registry to add them to.
        package: the set's package.
        kind: the set's kind; decides its priority.
        families: the families the set has a file for; all of them unless given.
        omit: operators of those families that the set does not implement.
        differing: by name of a family or operator: the fields in which it differs from ``common``.
        common: the other fields of every :class:`OpImpl`.

    Raises:
        RegistrationError: a name is not in the catalogue, so its entry would have no effect.
    """
    operators = {contract.name for contract in CATALOGUE.values()}
    existing = {contract.family for contract in CATALOGUE.values()}
    _check_names(package, "families", families or (), existing)
    _check_names(package, "omit", omit, operators)
    _check_names(package, "differing", differing, existing | operators)
    registry.register_many(
        OpImpl(
            op_name=contract.name,
            kind=kind,
            fn=f"{package}.{contract.family}:{contract.name}",
            priority=DEFAULT_PRIORITY[kind],
            **{
                **common,
                **differing.get(contract.family, {}),
                **differing.get(contract.name, {}),
            },
        )
        for contract in CATALOGUE.values()
        if (families is None or contract.family in families) and contract.name not in omit
    )


def _check_names(package: str, argument: str, names: Collection[str], known: set[str]) -> None:
    if isinstance(names, str):
        raise RegistrationError(
            f"{package}: {argument} must be a collection of names, got the string {names!r}"
        )
    for name in names:
        if name not in known:
            raise RegistrationError(
                f"{package}: {argument}: the catalogue has no {name!r}{suggestion(name, known)}"
            )
