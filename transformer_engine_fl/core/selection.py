"""select(...) -> Decision: which implementation is chosen, and why each other is not.

A pure function of what is registered, the policy and the facts of a call. Plans are
built from its answer, and users read it; it is not part of a dispatch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.core.blame import caused_by_caller, error_details, error_text
from transformer_engine_fl.core.contract import same
from transformer_engine_fl.core.errors import ConfigurationError, NotSupportedError
from transformer_engine_fl.core.types import OpImpl, Selector, parse_arch

if TYPE_CHECKING:
    from transformer_engine_fl.core.policy import EffectivePolicy
    from transformer_engine_fl.core.registry import Entry
    from transformer_engine_fl.core.tensors import Facts

__all__ = [
    "Decision",
    "Verdict",
    "ask_supports",
    "named_by",
    "options_decline",
    "select",
    "tensor_reason",
    "vendors_named",
]

KIND_ORDER: Mapping[str, tuple[str, ...]] = {
    "flagos": ("flagos", "vendor", "reference"),
    "vendor": ("vendor", "flagos", "reference"),
    "reference": ("reference", "flagos", "vendor"),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided about one candidate.

    Attributes:
        impl: the implementation.
        accepted: it may serve.
        reason: why it is accepted or rejected, for a person.
        cause: the rule behind a rejection: ``"policy"``, ``"available"``, ``"device"``,
            ``"dtype"``, ``"arch"``, ``"option"``, ``"supports"``, ``"tensor"``,
            ``"quarantine"`` or ``"failed"``; empty if accepted.
    """

    impl: OpImpl
    accepted: bool
    reason: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """Every candidate of an operator in rank order, with the reason for each.

    Attributes:
        op_name: the operator.
        verdicts: one per candidate, best rank first.
        policy: the policy in force, and the source of each of its fields.
        facts: what was known of the call.
        note: anything else worth saying.
    """

    op_name: str
    verdicts: tuple[Verdict, ...]
    policy: EffectivePolicy
    facts: Facts
    note: str = ""

    @property
    def selected(self) -> OpImpl | None:
        """The implementation that serves, or None."""
        return next((verdict.impl for verdict in self.verdicts if verdict.accepted), None)

    @property
    def accepted(self) -> tuple[OpImpl, ...]:
        """Every implementation that may serve, best first."""
        return tuple(verdict.impl for verdict in self.verdicts if verdict.accepted)

    def rejecting(self, reasons: Mapping[str, tuple[str, str]]) -> Decision:
        """The same with further rejections: impl id -> (cause, reason)."""
        verdicts = tuple(
            dataclasses.replace(verdict, accepted=False, cause=cause, reason=reason)
            if verdict.accepted
            and (cause := reasons.get(verdict.impl.impl_id, ("", ""))[0])
            and (reason := reasons[verdict.impl.impl_id][1])
            else verdict
            for verdict in self.verdicts
        )
        return dataclasses.replace(self, verdicts=verdicts)

    def with_note(self, note: str) -> Decision:
        """The same with another note."""
        return dataclasses.replace(self, note=note)

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """(mark, impl id, kind, priority, reason) for each candidate."""
        rows = []
        chosen = self.selected
        for verdict in self.verdicts:
            impl = verdict.impl
            mark = "*" if impl is chosen else "+" if verdict.accepted else "-"
            kind = f"{impl.kind}:{impl.vendor}" if impl.vendor else str(impl.kind)
            rows.append((mark, impl.impl_id, kind, str(impl.priority), verdict.reason))
        return rows

    def headline(self) -> str:
        """One line: the operator, what was asked, the implementation that serves."""
        known = ((name, getattr(self.facts, name)) for name in ("device", "arch", "dtype"))
        asked = ", ".join(f"{name}={value}" for name, value in known if value)
        chosen = self.selected
        answer = f"{chosen.impl_id!r} serves" if chosen else "no implementation serves"
        return f"{self.op_name}({asked}): {answer}" if asked else f"{self.op_name}: {answer}"

    def table(self) -> str:
        """An aligned table: ``*`` serves, ``+`` would be next, ``-`` is rejected."""
        rows = [("", "implementation", "kind", "priority", "reason"), *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = []
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
            reason = row[4].replace("\n", "\n" + " " * (sum(widths) + 8))
            lines.append("  ".join((*cells, reason)).rstrip())
        return "\n".join(lines)

    def __str__(self) -> str:
        lines = [self.headline()]
        for mark, impl_id, kind, priority, reason in self.rows():
            shown = reason.replace("\n", "\n      ")
            lines.append(f"  {mark} {impl_id} ({kind}, priority {priority}): {shown}")
        if not self.verdicts:
            lines.append("  no implementation is registered")
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The decision as plain JSON values."""
        chosen = self.selected
        return {
            "op": self.op_name,
            "selected": chosen.impl_id if chosen else None,
            "device": self.facts.device,
            "arch": self.facts.arch,
            "dtype": self.facts.dtype,
            "note": self.note,
            "policy": {
                field: {"value": value, "origin": self.policy.origins.get(field, "")}
                for field, value in self.policy.policy.to_dict().items()
            },
            "candidates": [
                {
                    "impl_id": verdict.impl.impl_id,
                    "kind": verdict.impl.kind.value,
                    "vendor": verdict.impl.vendor,
                    "priority": verdict.impl.priority,
                    "accepted": verdict.accepted,
                    "cause": verdict.cause,
                    "reason": verdict.reason,
                }
                for verdict in self.verdicts
            ],
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2)


Call = tuple[tuple[Any, ...], dict[str, Any]]


def select(
    op_name: str,
    entries: Sequence[Entry],
    policy: EffectivePolicy,
    facts: Facts,
    *,
    is_fatal: Callable[[Exception], bool],
    call: Call | None = None,
    quarantined: Mapping[str, str] | None = None,
    assume_available: bool = False,
) -> Decision:
    """Judge every candidate of an operator.

    Args:
        op_name: the operator's own name.
        entries: its candidates.
        policy: the policy in force.
        facts: what is known of the dispatch tensor.
        is_fatal: which errors of a candidate's ``supports`` are raised, not taken for a decline.
        call: the arguments, if there is a call to judge.
        quarantined: impl id -> why it is in quarantine for these facts.
        assume_available: take every candidate as available (a what-if question), except
            those that the environment switches off.
    """
    order = _order(op_name, entries, policy)
    tokens = _tokens(order, policy)
    strict = policy.origins["strict"] if policy.policy.strict else None
    serving: str | None = None
    verdicts = []
    for entry in sorted(entries, key=lambda entry: _rank(entry.impl, tokens)):
        impl = entry.impl
        rejected = _policy_reason(impl, op_name, policy, tokens)
        if rejected is None and strict and serving:
            rejected = (
                "policy",
                f"strict: only the first candidate, {serving!r}, may serve ({strict})",
            )
        elif rejected is None:
            serving = serving or impl.impl_id
            rejected = _capability_reason(entry, facts, call, assume_available, is_fatal)
            why = None if strict or not quarantined else quarantined.get(impl.impl_id)
            if rejected is None and why:
                held = f"in quarantine after a fault: {why}; until reset_quarantine()"
                rejected = "quarantine", held
        if rejected is None:
            origin = policy.origins["prefer" if order is None else "per_op_order"]
            reason = _accepted(impl, facts, tokens, origin, call is not None)
            verdicts.append(Verdict(impl, True, reason))
        else:
            verdicts.append(Verdict(impl, False, rejected[1], rejected[0]))
    return Decision(op_name, tuple(verdicts), policy, facts)


Rejection = tuple[str, str]
"""(cause, reason)"""


def _order(
    op_name: str, entries: Sequence[Entry], effective: EffectivePolicy
) -> Sequence[str] | None:
    """The order that the policy gives an operator, by its own name or else by an alias."""
    orders = effective.policy.per_op_order or {}
    contract = entries[0].contract if entries else None
    names = (op_name, *(contract.aliases if contract else ()))
    return next((orders[name] for name in names if name in orders), None)


def _tokens(order: Sequence[str] | None, effective: EffectivePolicy) -> Sequence[Selector]:
    """The selector tokens in force: an operator's own order, or what ``prefer`` implies."""
    if order is None:
        first = Selector.parse(effective.policy.prefer or "flagos", "prefer")
        base = {"kind": first.value, "vendor": "vendor", "impl": "flagos"}[first.form]
        order = (str(first), *(kind for kind in KIND_ORDER[base] if kind != str(first)))
    return [Selector.parse(token, "per_op_order") for token in order]


def _rank(impl: OpImpl, tokens: Sequence[Selector]) -> tuple[int, int, str]:
    """Position of the first token that names it; then priority, then impl id."""
    return _place(impl, tokens), -impl.priority, impl.impl_id


def _place(impl: OpImpl, tokens: Sequence[Selector]) -> int:
    return next((i for i, token in enumerate(tokens) if token.matches(impl)), len(tokens))


def named_by(impl: OpImpl, op_name: str, entry: Entry, effective: EffectivePolicy) -> str | None:
    """The token by which the policy names this implementation or its vendor, or None."""
    tokens = _tokens(_order(op_name, (entry,), effective), effective)
    named = (token for token in tokens if token.form != "kind" and token.matches(impl))
    return next((str(token) for token in named), None)


def vendors_named(
    op_name: str, entries: Sequence[Entry], effective: EffectivePolicy, chosen: OpImpl | None
) -> tuple[str, ...]:
    """The vendors that the policy names before the one chosen, in lower case; not denied ones."""
    tokens = _tokens(_order(op_name, entries, effective), effective)
    before = tokens if chosen is None else tokens[: _place(chosen, tokens)]
    denied = effective.policy.deny_vendors or ()
    return tuple(it.value for it in before if it.form == "vendor" and it.value not in denied)


def _policy_reason(
    impl: OpImpl, op_name: str, effective: EffectivePolicy, tokens: Sequence[Selector]
) -> Rejection | None:
    policy, origins = effective.policy, effective.origins
    vendor = impl.vendor.lower() if impl.vendor else None
    if vendor is not None and vendor in (policy.deny_vendors or ()):
        origin = effective.origin("deny_vendors", vendor)
        return "policy", f"vendor {impl.vendor!r} is denied ({origin})"
    allowed = policy.allow_vendors
    if vendor is not None and allowed is not None and vendor not in allowed:
        origin = effective.origin("allow_vendors", vendor, listed=False)
        return "policy", f"vendor {impl.vendor!r} is not allowed ({origin})"
    claimed = set(impl.traits) | ({"traceable"} if impl.traceable else set())
    lacking = sorted(set(policy.require or ()) - claimed)
    if lacking:
        origin = effective.origin("require", lacking[0])
        return "policy", f"does not claim {lacking[0]!r} ({origin})"
    if _place(impl, tokens) == len(tokens):
        if impl.opt_in:
            names = f"vendor:{impl.vendor} or " * bool(impl.vendor) + f"impl:{impl.impl_id}"
            return "policy", f"opt-in: serves only if the policy names it, as {names}"
        order = "|".join(str(token) for token in tokens)
        return "policy", f"not in the order {order!r} of {op_name!r} ({origins['per_op_order']})"
    return None


def _capability_reason(
    entry: Entry,
    facts: Facts,
    call: Call | None,
    assume_available: bool,
    is_fatal: Callable[[Exception], bool],
) -> Rejection | None:
    impl = entry.impl
    missing = entry.switched_off() if assume_available else entry.unavailable()
    if missing:
        return "available", f"not available: {missing}"
    rejected = tensor_reason(entry, facts)
    if rejected:
        return rejected
    if call is not None:
        declined = options_decline(entry, *call)
        if declined:
            return "option", declined
        # ``te_fl_serves`` of the function tells what a dispatch learns only by making the call.
        for ask in (entry.supports, getattr(impl.fn, "te_fl_serves", None)):
            answer = None if ask is None else ask_supports(entry, call, is_fatal, ask)
            if answer is not None:
                return "supports", answer
    return None


def tensor_reason(entry: Entry, facts: Facts) -> Rejection | None:
    """Why an implementation does not take tensors of that kind; None if it does."""
    impl = entry.impl
    unusual = facts.unusual
    if facts.fake and entry.contract is None:
        unusual = "a fake tensor has no data"
    if unusual and not (impl.traceable or impl.unconditional):
        return "tensor", f"{unusual}, and this implementation is not plain PyTorch code"
    for wanted, found, cause in (
        (impl.devices, facts.device, "device"),
        (impl.supported_dtypes, facts.dtype, "dtype"),
    ):
        if wanted is not None and cause in facts.judged and found not in wanted:
            had = f"{cause} {found!r} is not supported; supported:"
            had = had if found else f"no {cause} is known; it needs one of"
            return cause, f"{had} {', '.join(sorted(wanted))}"
    return _arch_reason(impl, facts)


def _arch_reason(impl: OpImpl, facts: Facts) -> Rejection | None:
    if impl.min_arch is None or "arch" not in facts.judged:
        return None
    if facts.arch is None:
        where = f"device {facts.device!r} has none" if facts.device else "none is known"
        return "arch", f"needs architecture {impl.min_arch} or newer; {where}"
    wanted, found = parse_arch(impl.min_arch), parse_arch(facts.arch)
    if wanted and found and wanted[0] == found[0]:
        # "a": this architecture alone; "f": newer ones of its major version too; else all newer.
        kept = {"a": len(wanted[1]), "f": 1}.get(wanted[2], 0)
        if found[1][:kept] == wanted[1][:kept] and found[1] >= wanted[1]:
            return None
    newer = "" if wanted and wanted[2] == "a" else " or newer"
    return "arch", f"needs architecture {impl.min_arch}{newer}; the device is {facts.arch}"


def options_decline(entry: Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Why a call's options go beyond what an implementation takes, or None."""
    if not entry.missing or entry.contract is None:
        return None
    given = {**dict(zip(entry.contract.positional, args, strict=False)), **kwargs}
    for name, default in entry.missing.items():
        value = given.get(name, default)
        if not same(value, default):
            return f"does not support the option {name!r} (got {_given(value)})"
    return None


def _given(value: object) -> str:
    """A value's type, and its repr unless it holds data: a tensor's data is on its device."""
    kind = type(value)
    if hasattr(kind, "__len__") and not issubclass(kind, str):
        return kind.__name__
    return f"{kind.__name__} {value!r:.60}"


def ask_supports(
    entry: Entry,
    call: Call,
    is_fatal: Callable[[Exception], bool],
    ask: Callable[..., bool | str] | None = None,
) -> str | None:
    """Why ``supports`` declines a call, or None.

    If it raises, that is a decline. It is warned of once, unless the call breaks the contract:
    then the call may be why it raised.

    Args:
        entry: the candidate, which has a ``supports`` unless ``ask`` is given.
        call: the arguments.
        is_fatal: whether the device is lost or memory ran out, which is raised as it is.
        ask: a check of the arguments to call in place of ``supports``.
    """
    ask = ask or entry.supports
    assert ask is not None  # an internal invariant
    try:
        answer = ask(*call[0], **call[1])
    except NotSupportedError as error:
        return f"supports() raised {error_text(error)}"
    except BaseException as error:
        fatal = isinstance(error, Exception) and is_fatal(error)
        if fatal or isinstance(error, ConfigurationError) or caused_by_caller(error):
            raise
        if entry.contract is None or entry.contract.objection(*call) is None:
            entry.predicate_broken(error_details(error))
        return f"supports() raised {error_text(error)}"
    if answer is True:
        return None
    return answer if isinstance(answer, str) and answer else f"supports() returned {answer!r}"


def _accepted(
    impl: OpImpl, facts: Facts, tokens: Sequence[Selector], origin: str, judged_call: bool
) -> str:
    place = _place(impl, tokens)
    reason = f"choice {place + 1}, {str(tokens[place])!r} ({origin})"
    wanted = (
        ("device", impl.devices),
        ("dtype", impl.supported_dtypes),
        ("arch", impl.min_arch and {f"{impl.min_arch} or newer"}),
    )
    conditions = [
        f"{name} {', '.join(sorted(names))}"
        for name, names in wanted
        if names and name not in facts.judged
    ]
    if impl.supports and not judged_call:
        conditions.append("its own check of the arguments")
    return f"{reason}; subject to {'; '.join(conditions)}" if conditions else reason
