"""Plan: how one operator is served under one policy.

A plan turns a decision into the callable that the manager's table holds, and tries the other
candidates when the first one declines or fails. It is built once per policy and operator;
nothing here runs in a dispatch whose first candidate simply serves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from transformer_engine_fl.core import blame
from transformer_engine_fl.core.discovery import broken_vendors
from transformer_engine_fl.core.dispatch import DispatchEntry, Steps, guarded, settles_failures
from transformer_engine_fl.core.errors import (
    AllCandidatesFailedError,
    ArgumentError,
    ConfigurationError,
    NoImplementationError,
    PartialMutationError,
    PluginError,
    StrictModeError,
    suggestion,
)
from transformer_engine_fl.core.log import logger
from transformer_engine_fl.core.recovery import Outcome, QuarantineKey, judge
from transformer_engine_fl.core.selection import (
    Decision,
    ask_supports,
    named_by,
    options_decline,
    select,
    tensor_reason,
    vendors_named,
)
from transformer_engine_fl.core.tensors import ALL_FACTS, Facts
from transformer_engine_fl.core.types import OpImpl

if TYPE_CHECKING:
    from transformer_engine_fl.core.contract import Contract
    from transformer_engine_fl.core.manager import OpManager
    from transformer_engine_fl.core.policy import EffectivePolicy
    from transformer_engine_fl.core.registry import Entry

__all__ = ["Plan"]

_MAX_KINDS = 256
"""Kinds of tensor (device, dtype, class) that a plan remembers."""

_TEXT = 500
"""Characters that are kept of an error's message."""

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Fault(NamedTuple):
    """An implementation that has failed in a call, the class of its error, and the error's text."""

    impl: OpImpl
    kind: str
    error_details: str


class Plan:
    """How one operator is served under one policy.

    Args:
        manager: the manager whose quarantine, monitors and ``tensors`` are used.
        op_name: the operator's own name.
        contract: its contract, if it has one.
        entries: its candidates.
        effective: the policy in force.
    """

    def __init__(
        self,
        manager: OpManager,
        op_name: str,
        contract: Contract[..., Any] | None,
        entries: Sequence[Entry],
        effective: EffectivePolicy,
    ) -> None:
        self._manager = manager
        self.op_name = op_name
        self._contract = contract
        self._entries = {entry.impl.impl_id: entry for entry in entries}
        self.effective = effective
        self._strict = bool(effective.policy.strict)

    # ------------------------------------------------------------------- questions

    def entry(self, impl: OpImpl) -> Entry:
        """The loaded entry of a candidate.

        Raises:
            NoImplementationError: it cannot be loaded.
        """
        entry = self._entries[impl.impl_id]
        reason = entry.load()
        if reason is not None:
            decision = self.explain(Facts(), None)
            raise NoImplementationError(f"{impl.label} cannot be loaded: {reason}", decision)
        return entry

    def runnable(self, impl: OpImpl, facts: Facts) -> Callable[..., Any]:
        """A callable that runs a candidate, and takes every option of the contract."""
        return self._callable(self.entry(impl), facts.fake)

    def explain(self, facts: Facts, call: tuple[Args, Kwargs] | None) -> Decision:
        """Judge every candidate; the one selected is loaded, to be sure that it can serve."""
        while True:
            held = self._manager.quarantine.reasons(self.op_name, facts.device, facts.dtype)
            decision = select(
                self.op_name,
                tuple(self._entries.values()),
                self.effective,
                facts,
                call=call,
                quarantined=held,
                is_fatal=self._is_fatal,
            )
            chosen = decision.selected
            if chosen is None or self._entries[chosen.impl_id].load() is None:
                return decision if facts.judged else self._with_quarantine(decision)

    def _is_fatal(self, error: Exception) -> bool:
        return self._manager.tensors.is_fatal(error)

    def what_if(self, facts: Facts) -> Decision:
        """Judge every candidate for a device that need not be present."""
        entries = tuple(self._entries.values())
        decision = select(
            self.op_name,
            entries,
            self.effective,
            facts,
            quarantined=self._manager.quarantine.reasons(self.op_name, facts.device, facts.dtype),
            is_fatal=self._is_fatal,
            assume_available=True,
        )
        note = "assumes that every implementation is available on that machine"
        return self._with_quarantine(decision.with_note(note))

    def _with_quarantine(self, decision: Decision) -> Decision:
        """Note what is in quarantine: whether it applies depends on tensors not known here."""
        held = [
            f"{key.impl_id} is in quarantine for {key.device}, {key.dtype}: {reason}"
            for key, reason in self._manager.quarantine.held().items()
            if key.op_name == self.op_name
        ]
        return decision.with_note("; ".join([decision.note] * bool(decision.note) + held))

    def checked_dtype(self, name: str) -> str:
        """``name``, if it is a dtype of the contract or of a candidate.

        Raises:
            ConfigurationError: it is not; names the nearest.
        """
        known = set(self._contract.dtypes) if self._contract else set()
        for entry in self._entries.values():
            known.update(entry.impl.supported_dtypes or ())
        if known and name not in known:
            raise ConfigurationError(
                f"dtype: {name!r} is not a dtype of {self.op_name!r}; "
                f"valid: {', '.join(sorted(known))}{suggestion(name, known)}"
            )
        return name

    def facts(self, args: Args, kwargs: Kwargs) -> Facts:
        """What is known of a call's dispatch tensor."""
        value = self._dispatch_value(args, kwargs)
        return Facts(judged=ALL_FACTS) if value is None else self._manager.tensors.facts(value)

    def _dispatch_value(self, args: Args, kwargs: Kwargs) -> Any:
        """The tensor by which the implementation is chosen, or None."""
        candidates: Sequence[Any] = (*args, *kwargs.values())
        if self._contract is not None:
            place, name = self.dispatch_on
            candidates = (args[place] if place < len(args) else kwargs.get(name),)
        return next(self._tensors_in(candidates), None)

    def _tensors_in(self, values: Any) -> Any:
        for value in values:
            if isinstance(value, list | tuple):
                yield from self._tensors_in(value)
            elif self._manager.tensors.is_tensor(value):
                yield value

    @functools.cached_property
    def dispatch_on(self) -> tuple[int, str]:
        """Position and name of the argument by which the implementation is chosen."""
        if self._contract is None:
            return 0, ""
        name = self._contract.dispatch_on
        return list(self._contract.signature.parameters).index(name), name

    # ------------------------------------------------------------- building callables

    def served(self) -> DispatchEntry:
        """What to keep in the table: the implementation itself where that is safe."""
        if self._manager.active_monitors:
            return DispatchEntry(self._slow_path())
        chosen = self.decide(Facts()).selected
        if chosen is None:
            return DispatchEntry(self._slow_path())
        entry = self._entries[chosen.impl_id]
        if self._unconditional(entry):
            self._manager.log_selection(self.op_name, chosen)
            return DispatchEntry(entry.fn)
        return guarded(self._manager.tensors.key, self.dispatch_on[0], self._remember, self.serve)

    def _slow_path(self) -> Callable[..., Any]:
        """A callable that tries the candidates at each call: for monitors, or if none serves."""

        @settles_failures
        def watched(*args: Any, **kwargs: Any) -> Any:
            return self.serve(self.steps(args, kwargs), args, kwargs, None)

        return watched

    def _unconditional(self, entry: Entry) -> bool:
        """Whether a candidate serves every call, whatever the tensors and the options are."""
        return (
            entry.impl.unconditional
            and not entry.missing
            and (self._strict or not self._manager.quarantine.concerns(self.op_name))
        )

    def _remember(self, args: Args, kwargs: Kwargs, memo: dict[Any, Steps]) -> Steps:
        """The steps for a call that a guarded callable did not find in its memo."""
        value = self._dispatch_value(args, kwargs)
        key = None if value is None else self._manager.tensors.key(value)
        steps: Steps | None = memo.get(key)  # it may be known: passed by keyword, or in a list
        if steps is None:
            steps = self.steps(args, kwargs)
            if len(memo) >= _MAX_KINDS:
                memo.clear()
            memo[key] = steps
        return steps

    def steps(self, args: Args, kwargs: Kwargs) -> Steps:
        """The candidates for a call's kind of tensor, best first."""
        facts = self.facts(args, kwargs)
        accepted = self.decide(facts).accepted
        entries = tuple(self._entries[impl.impl_id] for impl in accepted)
        if not entries:
            return Steps(_nothing, False, facts.fake, ())
        first = entries[0]
        simple = first.impl.supports is None and not first.missing
        if simple:  # otherwise each call's arguments decide, and _after_success logs it
            self._manager.log_selection(self.op_name, first.impl)
        return Steps(self._callable(first, facts.fake), simple, facts.fake, entries)

    def decide(self, facts: Facts) -> Decision:
        """Judge every candidate for a dispatch.

        Raises:
            PluginError: the policy names a package that cannot be loaded; no other serves instead.
        """
        decision = self.explain(facts, None)
        if (broken := self.named_but_broken(decision)) is not None:
            raise PluginError(broken)
        return decision

    def named_but_broken(self, decision: Decision) -> str | None:
        """That the policy names a package which cannot be loaded, and why; None if it does not."""
        for verdict in decision.verdicts:
            if verdict.accepted:
                break
            entry = self._entries[verdict.impl.impl_id]
            meant = entry.broken and tensor_reason(entry, decision.facts) is None
            if meant and verdict.cause == "available":
                token = named_by(verdict.impl, self.op_name, entry, self.effective)
                if token is not None:
                    return f"the policy names {token!r}: {entry.load()}"
        broken = broken_vendors(self._manager.registry)
        if broken:
            entries, chosen = tuple(self._entries.values()), decision.selected
            for name in vendors_named(self.op_name, entries, self.effective, chosen):
                if name in broken:
                    return f"the policy names 'vendor:{name}': {broken[name]}"
        return None

    def _callable(self, entry: Entry, fake: bool) -> Callable[..., Any]:
        """A callable that runs a loaded candidate, and leaves out options that it lacks."""
        fn = entry.fn
        if fake and not (entry.impl.traceable or entry.impl.unconditional):
            fn = self._manager.tensors.opaque(entry) or fn
        return entry.with_all_options(fn)

    # ------------------------------------------------------------------- after all

    def recover(self, fn: Callable[..., Any], args: Args, kwargs: Kwargs, error: Exception) -> Any:
        """Continue after ``fn``, called directly from the table, has failed."""
        try:
            steps = self.steps(args, kwargs)
            if steps.fn is not fn:
                steps = self._after_another(fn, steps)
            if not steps.candidates:
                raise error
            return self.serve(steps, args, kwargs, error)
        finally:
            del error  # its traceback has this frame: the cycle would keep the call's tensors

    def _after_another(self, fn: Callable[..., Any], steps: Steps) -> Steps:
        """The steps after ``fn`` has run, although another candidate would be chosen now."""
        ran = next((entry for entry in self._entries.values() if entry.runs(fn)), None)
        if ran is None:
            return Steps(fn, False, steps.fake, ())
        others = () if self._strict else (it for it in steps.candidates if it is not ran)
        return Steps(fn, False, steps.fake, (ran, *others))

    def serve(self, steps: Steps, args: Args, kwargs: Kwargs, error: Exception | None) -> Any:
        """Try the candidates in order; ``error`` is what the first has just raised, or None."""
        reasons: dict[str, tuple[str, str]] = {}
        faults: list[Fault] = []
        last: Exception | None = None
        reason: tuple[str, str] | Exception | None = None
        try:
            for entry in steps.candidates:
                try:
                    reason = None if error else self._declined(entry, args, kwargs)
                except Exception as raised:
                    self._after_last_failure(entry.impl, raised, faults, reasons, args, kwargs)
                    raise
                if reason is None and error is None:
                    try:
                        result = self._callable(entry, steps.fake)(*args, **kwargs)
                    except Exception as raised:  # noqa: BLE001 - judged by the rules of recovery.py
                        error = raised
                    else:
                        self._after_success(entry.impl, faults, args, kwargs)
                        return result
                if error is not None:
                    last, error = error, None
                    reason = self._after_failure(entry, last, reasons, args, kwargs)
                    if isinstance(reason, Exception):
                        self._after_last_failure(entry.impl, reason, faults, reasons, args, kwargs)
                        raise reason
                    if reason[0] == "failed":
                        error_details = reason[1].removeprefix("failed: ")
                        faults.append(Fault(entry.impl, type(last).__name__, error_details))
                if reason is not None:
                    reasons[entry.impl.impl_id] = reason
            raise self._refusal(reasons, faults, args, kwargs) from last
        finally:
            error = last = reason = None  # as in recover: no cycle through the traceback

    def _declined(self, entry: Entry, args: Args, kwargs: Kwargs) -> tuple[str, str] | None:
        """(cause, reason) why a candidate does not take this call, or None."""
        unloadable = entry.load()
        if unloadable is not None:
            return "available", f"not available: {unloadable}"
        option = options_decline(entry, args, kwargs)
        if option is not None:
            return "option", option
        asked = entry.impl.supports is not None
        answer = ask_supports(entry, (args, kwargs), self._is_fatal) if asked else None
        return ("supports", answer) if answer is not None else None

    def _after_failure(
        self,
        entry: Entry,
        error: Exception,
        before: Mapping[str, tuple[str, str]],
        args: Args,
        kwargs: Kwargs,
    ) -> tuple[str, str] | Exception:
        """(cause, reason) if another candidate may run; the error to raise if none may.

        ``before`` has the cause and the reason of each candidate that did not serve this call.
        """
        tensors = self._manager.tensors
        if self._contract is None and not entry.takes(args, kwargs):
            return error  # a mistake in the call: nothing has run
        outcome, wrong = judge(
            error,
            is_fatal=self._is_fatal,
            check_arguments=lambda: self.wrong_arguments(args, kwargs),
            no_fallback=lambda: tensors.no_fallback(self._tensors_in((args, *kwargs.values()))),
            mutates=self._written(entry.impl, args, kwargs) != (),
        )
        if outcome is Outcome.RAISE:
            return error
        if wrong is not None:
            return wrong
        error_details = blame.error_details(error, most=_TEXT)
        if outcome is Outcome.DECLINED:
            return "supports", f"declined: {blame.error_text(error)}"[:_TEXT]
        if outcome is Outcome.HALF_WRITTEN:
            half_written = self._half_written(entry.impl, error_details, before, args, kwargs)
            half_written.__cause__ = error
            return half_written
        return "failed", f"failed: {error_details}"

    def _half_written(
        self,
        impl: OpImpl,
        error_details: str,
        before: Mapping[str, tuple[str, str]],
        args: Args,
        kwargs: Kwargs,
    ) -> PartialMutationError:
        """The error for arguments that may be half written; quarantines what failed.

        But if no other candidate is left for such calls, the failed one is tried again next
        time, as after a failure that writes nothing. Candidates that have just failed or declined
        (``before``) are not left.
        """
        declared_writes = self._written(impl, args, kwargs)
        names = declared_writes or self._tensor_names(args, kwargs)
        listed = ", ".join(names)
        if declared_writes is None:
            what = (
                f"failed and may have partly written any of {listed}: the operator has no "
                "contract, and the implementation does not declare what it writes (mutates=() if "
                "it writes nothing); no other implementation was tried"
            )
        else:
            what = f"failed and may have partly written {listed}; no other implementation was tried"
        decision = self.explain(self.facts(args, kwargs), (args, kwargs))
        decision = decision.rejecting(before)
        others = [it.impl_id for it in decision.accepted if it.impl_id != impl.impl_id]
        if others and self._quarantine_impl(impl, error_details, args, kwargs)[0]:
            then = (
                f"will use {others[0]!r}: {impl.impl_id!r} is in quarantine until "
                "reset_quarantine()"
            )
        else:
            then = f"will use {impl.impl_id!r} again"
        failed = {impl.impl_id: ("failed", f"failed: {error_details}")}
        return PartialMutationError(
            f"{impl.label} {what}. Cause: {error_details}\n"
            f"The next call like this {then}. Candidates now:",
            decision.rejecting(failed),
            names,
        )

    def _written(self, impl: OpImpl, args: Args, kwargs: Kwargs) -> tuple[str, ...] | None:
        """Arguments that this call writes; None if neither contract nor implementation says."""
        if self._contract is None:
            return impl.mutates
        given = dict(zip(self._contract.signature.parameters, args, strict=False)) | kwargs
        return tuple(
            name for name in self._contract.mutates if [*self._tensors_in((given.get(name),))]
        )

    def _tensor_names(self, args: Args, kwargs: Kwargs) -> tuple[str, ...]:
        given = {f"#{place + 1}": value for place, value in enumerate(args)} | kwargs
        return tuple(name for name, value in given.items() if [*self._tensors_in((value,))])

    def wrong_arguments(self, args: Args, kwargs: Kwargs) -> ArgumentError | None:
        """The error of a call that breaks the contract, or None."""
        return None if self._contract is None else self._contract.objection(args, kwargs)

    def _quarantine_impl(
        self, impl: OpImpl, error_details: str, args: Args, kwargs: Kwargs
    ) -> tuple[bool, bool]:
        """Put an implementation into quarantine; (whether it is there, whether it is new there).

        Quarantine distinguishes tensors only by device and dtype, so a fault on a sparse tensor,
        say, causes none: the implementation may be right for all the others.
        """
        tensors = self._tensors_in((args, tuple(kwargs.values())))
        if self._strict or not all(map(self._manager.tensors.is_ordinary, tensors)):
            return False, False
        facts = self.facts(args, kwargs)
        key = QuarantineKey(self.op_name, impl.impl_id, facts.device, facts.dtype)
        new = self._manager.quarantine.add(key, error_details)
        self._manager.plans_outdated()
        return True, new

    def _after_success(
        self, impl: OpImpl, faults: Sequence[Fault], args: Args, kwargs: Kwargs
    ) -> None:
        """After a candidate has served: quarantine those that failed before it."""
        self._quarantine_failed(faults, f"{impl.impl_id!r} served", args, kwargs)
        self._manager.log_selection(self.op_name, impl, again=False)
        for monitor in self._manager.active_monitors:
            monitor.notify(self.op_name, impl)

    def _after_last_failure(
        self,
        impl: OpImpl,
        error: Exception,
        faults: Sequence[Fault],
        reasons: Mapping[str, tuple[str, str]],
        args: Args,
        kwargs: Kwargs,
    ) -> None:
        """After a failure that ends the call: report the candidates tried before it."""
        if isinstance(error, ArgumentError):
            return  # the caller's mistake: no implementation is blamed
        for impl_id, (_, reason) in reasons.items():
            error.add_note(f"{self.op_name}: {impl_id!r}, tried before {impl.impl_id!r}, {reason}")
        ended = f"{impl.impl_id!r}, tried next, ended the call with {type(error).__name__}"
        self._quarantine_failed(faults, ended, args, kwargs)

    def _quarantine_failed(
        self, faults: Sequence[Fault], then: str, args: Args, kwargs: Kwargs
    ) -> None:
        """Quarantine what has failed, and warn of each; ``then`` says what followed."""
        for failed, kind, error_details in faults:
            quarantined, new = self._quarantine_impl(failed, error_details, args, kwargs)
            message = f"{self.op_name}/{failed.impl_id}: {kind}"
            if not (new if quarantined else self._manager.is_new_warning(message)):
                continue  # warned of before: it fails at each such call, or in several threads
            logger.warning(
                "Op %r: %r failed (%s) and is %s; %s",
                self.op_name,
                failed.impl_id,
                error_details,
                "in quarantine for this device and dtype until reset_quarantine()"
                if quarantined
                else "tried again next time, as this call has tensors that are not ordinary "
                "ones (further failures like this are not logged)",
                then,
            )

    def _refusal(
        self,
        reasons: Mapping[str, tuple[str, str]],
        faults: Sequence[Fault],
        args: Args,
        kwargs: Kwargs,
    ) -> Exception:
        """The error for a call that no candidate has served."""
        wrong = self.wrong_arguments(args, kwargs)
        if wrong is not None:
            return wrong
        decision = self.explain(self.facts(args, kwargs), (args, kwargs)).rejecting(reasons)
        if faults and not self._strict:
            message = f"every implementation of {self.op_name!r} failed or declined"
            return AllCandidatesFailedError(message, decision)
        return self.unserved(decision)

    def unserved(self, decision: Decision) -> StrictModeError | NoImplementationError:
        """The error for a call that no candidate may serve."""
        if self._strict:
            message = f"strict mode: {self.op_name!r} is not served by its first candidate"
            return StrictModeError(message, decision)
        return NoImplementationError(
            f"no implementation of {self.op_name!r} serves this call", decision
        )


def _nothing(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("no candidate: never called")
