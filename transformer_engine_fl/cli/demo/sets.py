"""Implementation sets by the names that users give them, and whether they can serve the demo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from transformer_engine_fl.cli.demo.training import OPERATORS
from transformer_engine_fl.core.errors import ConfigurationError, suggestion
from transformer_engine_fl.core.manager import OpManager
from transformer_engine_fl.core.policy import SelectionPolicy, policy_context
from transformer_engine_fl.core.selection import Decision
from transformer_engine_fl.core.types import BackendImplKind, OpImpl, Selector

__all__ = ["ImplSet", "decide", "find_sets"]


@dataclass(frozen=True, slots=True)
class ImplSet:
    """Implementations that go by one name.

    Attributes:
        name: the set's name.
        selector: the token that selects the implementations.
        fault: why it registered nothing, if it is known to be broken.
    """

    name: str
    selector: Selector
    fault: str | None = None

    @property
    def policy(self) -> SelectionPolicy:
        """A strict policy for this set; the reference serves what it does not implement."""
        order = dict.fromkeys((str(self.selector), str(BackendImplKind.REFERENCE)))
        return SelectionPolicy(strict=True, per_op_order=dict.fromkeys(OPERATORS, tuple(order)))

    def holds(self, impl: OpImpl) -> bool:
        """Whether an implementation belongs to it."""
        return self.selector.matches(impl)

    def judge(self, manager: OpManager, device: torch.device) -> tuple[tuple[OpImpl, ...], str]:
        """The implementations of the set that can serve the demo, and why the others cannot."""
        with policy_context(self.policy):
            verdicts = [
                verdict
                for decision in decide(manager, device)
                for verdict in decision.verdicts
                if self.holds(verdict.impl)
            ]
        able = tuple(verdict.impl for verdict in verdicts if verdict.accepted)
        reasons = dict.fromkeys(
            f"{verdict.impl.impl_id}: {verdict.reason}"
            for verdict in verdicts
            if not verdict.accepted
        )
        return able, "; ".join(
            reasons
        ) or self.fault or "it has no implementation of these operators"


def decide(manager: OpManager, device: torch.device) -> list[Decision]:
    """Which implementation serves each operator of the demo, for a call like the demo's."""
    contracts = manager.registry.contracts
    samples = ((name, next(contracts[name].samples("float32", str(device)))) for name in OPERATORS)
    return [manager.explain(name, *sample.args, **sample.kwargs) for name, sample in samples]


def find_sets(names: str, manager: OpManager) -> tuple[ImplSet, ...]:
    """The sets that ``--compare`` names.

    A name is a kind (``reference``), a vendor's (``nvidia``), an in-tree vendor's folder
    (``cuda``), a plugin's, an impl id, or a selector token as it stands.

    Raises:
        ConfigurationError: a name means nothing here, comes twice, or there is only one.
    """
    known = _known(manager)
    found: dict[str, ImplSet] = {}
    for name in (part.strip() for part in names.split(",")):
        one = _find(name, known)
        if one.name in found:
            raise ConfigurationError(f"--compare: {name!r} is given twice")
        found[one.name] = one
    if len(found) < 2:
        raise ConfigurationError(f"--compare: {names!r} is one set; name two or more: SET,SET")
    return tuple(found.values())


def _find(name: str, known: Mapping[str, ImplSet]) -> ImplSet:
    if not name:
        raise ConfigurationError("--compare: a name is empty; separate names with commas: SET,SET")
    if ":" in name:
        return ImplSet(name, Selector.parse(name, "--compare"))
    by_folded = {each.casefold(): one for each, one in known.items()}
    found = known.get(name) or by_folded.get(name.casefold())
    if found is None:
        raise ConfigurationError(
            f"--compare: unknown set {name!r}; known: {', '.join(sorted(known))}"
            f"{suggestion(name, known)}"
        )
    return found


def _known(manager: OpManager) -> Mapping[str, ImplSet]:
    """Every name of a set here; where one name fits two sets, the coarser one."""
    manager.ensure_initialized()
    known: dict[str, ImplSet] = {}
    faults: dict[str, str] = {}
    for report in manager.plugins:
        # "set vendor.cuda", "entry point acme", "module my_kernels"
        name = report.name.rpartition(" ")[2].removeprefix("vendor.")
        impl_ids = {label.rpartition("/")[2] for label in report.registered}
        if len(impl_ids) <= 1:
            selector = Selector("impl", next(iter(impl_ids), f"vendor.{name}"))
            known[name] = ImplSet(name, selector, report.error)
        if report.error:
            faults[name] = report.error
    impls = [impl for op in OPERATORS for impl in manager.registry.get_implementations(op)]
    coarser = [
        *(Selector("impl", impl.impl_id) for impl in impls),
        *(Selector("vendor", impl.vendor.lower()) for impl in impls if impl.vendor),
        *(Selector("kind", kind.value) for kind in BackendImplKind),
    ]
    for selector in coarser:
        known[selector.value] = ImplSet(selector.value, selector, faults.get(selector.value))
    return known
