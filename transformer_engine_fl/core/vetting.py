"""Unknown names in a policy: most likely misspelt, so they are reported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from transformer_engine_fl.core.discovery import broken_vendors
from transformer_engine_fl.core.errors import suggestion
from transformer_engine_fl.core.policy import RESTRICTIONS
from transformer_engine_fl.core.types import Selector

if TYPE_CHECKING:
    from transformer_engine_fl.core.policy import EffectivePolicy
    from transformer_engine_fl.core.registry import OpRegistry

__all__ = ["unknown_names"]


def unknown_names(effective: EffectivePolicy, registry: OpRegistry) -> Iterator[str]:
    """A message for each unknown operator, vendor or implementation that a policy names.

    And for an operator that it names twice, the second time by an alias.
    """
    known: dict[str, set[str]] = {}
    for form, name, field in _names(effective):
        if form not in known:
            known[form] = _known(form, registry)
        if (registry.canonical(name) if form == "operator" else name) not in known[form]:
            kind = "implementation" if form == "impl" else form
            owner = _vendor_of_set(name, registry) if form == "vendor" else None
            hint = f"; its name is {owner!r}" if owner else suggestion(name, known[form])
            listed = field in RESTRICTIONS
            origin = effective.origin(field, name) if listed else effective.origins[field]
            yield f"{origin}: unknown {kind} {name!r}{hint}"
    orders = effective.policy.per_op_order or {}
    for name in orders:
        own = registry.canonical(name)
        if own != name and own in orders:
            origin = effective.origins["per_op_order"]
            yield f"{origin}: {name!r} is an alias of {own!r}; the order for {own!r} is used"


def _vendor_of_set(name: str, registry: OpRegistry) -> str | None:
    """The vendor of the set ``vendor.<name>``, for users who take ``name`` for the vendor's."""
    operators = registry.snapshot().operators.values()
    impls = (entry.impl for entries in operators for entry in entries)
    return next((it.vendor for it in impls if it.impl_id == f"vendor.{name}"), None)


def _known(form: str, registry: OpRegistry) -> set[str]:
    """Every known name of an operator, a vendor or an implementation, whichever ``form`` says."""
    operators = registry.snapshot().operators
    if form == "operator":
        return {*operators, *registry.contracts}
    impls = (entry.impl for entries in operators.values() for entry in entries)
    if form == "vendor":
        return {*broken_vendors(registry), *(it.vendor.lower() for it in impls if it.vendor)}
    return {impl.impl_id for impl in impls}


def _names(effective: EffectivePolicy) -> Iterator[tuple[str, str, str]]:
    """(form, name, policy field) of everything that a policy names."""
    policy = effective.policy
    tokens = [(policy.prefer or "flagos", "prefer")]
    for op_name, order in (policy.per_op_order or {}).items():
        if "::" in op_name:
            continue  # other namespaces' operators are registered when they are first routed
        yield "operator", op_name, "per_op_order"
        tokens += [(token, "per_op_order") for token in order]
    for text, field in tokens:
        token = Selector.parse(text, field)
        if token.form != "kind":
            yield token.form, token.value, field
    for field in ("allow_vendors", "deny_vendors"):
        for vendor in sorted(getattr(policy, field) or ()):
            yield "vendor", vendor, field
