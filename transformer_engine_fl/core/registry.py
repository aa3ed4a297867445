"""OpRegistry: which implementations are registered for each operator.

Readers take an immutable snapshot and never lock; writers hold one lock and replace the
whole snapshot. Whether an implementation may serve a call is not decided here.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol

from transformer_engine_fl.core.blame import INTERNAL_PATHS, caused_by_caller, error_details
from transformer_engine_fl.core.contract import (
    Contract,
    Fit,
    adapt_predicate,
    check_predicate,
    fit,
    signature_of,
)
from transformer_engine_fl.core.errors import (
    DuplicateImplError,
    PluginError,
    RegistrationError,
    SignatureMismatchError,
    UnknownOperatorError,
    suggestion,
)
from transformer_engine_fl.core.late import load_attribute
from transformer_engine_fl.core.locks import LOADING, ForkSafeLock
from transformer_engine_fl.core.log import logger
from transformer_engine_fl.core.types import OpImpl

__all__ = ["CATALOGUE", "Entry", "OpRegistry", "Snapshot", "StagedRegistry"]

Contracts = Mapping[str, Contract[..., Any]]

CATALOGUE: Final = "transformer_engine_fl.ops:CATALOGUE"
"""Where the contracts are: named, not imported, because the catalogue builds on core."""


_WARNED: Final[set[tuple[str, str]]] = set()
"""Faults that were warned of: (where the implementation was registered, what is broken)."""

_PATIENCE: Final = 2.0
"""Seconds that a thread waits while another calls a probe. The other thread may in turn wait
for this one, e.g. for a module that this one is importing."""

_NO_PROBE_LOCK: Final = ForkSafeLock()
"""The lock that all entries without a probe share; they have nothing to call under it."""


class Entry:
    """A registered implementation, and what is found out about it once.

    Attributes:
        impl: as it was registered.
        where: ``file:line`` of the registration.
        contract: the operator's contract, or None.
        supports: its ``supports``, callable with any call of the contract, or None.
        broken: its package could not be loaded; a policy that names it gets a PluginError.
    """

    __slots__ = (
        "__weakref__",
        "_fit",
        "_fn",
        "_probe_lock",
        "_probe_raised",
        "_unavailable",
        "broken",
        "contract",
        "impl",
        "supports",
        "where",
    )

    def __init__(self, impl: OpImpl, where: str, contract: Contract[..., Any] | None) -> None:
        self.impl = impl
        self.where = where
        self.contract = contract
        self.supports = impl.supports
        if contract is not None and impl.supports is not None:
            self.supports = adapt_predicate(contract.signature, impl.supports)
        self.broken = False
        self._fn: Callable[..., Any] | None = None
        self._fit: Fit | None = None
        probed = impl.is_available is not None
        self._unavailable: str | None = None if probed else ""
        self._probe_raised = False
        self._probe_lock = ForkSafeLock() if probed else _NO_PROBE_LOCK
        if not isinstance(impl.fn, str):
            self._settle(impl.fn)

    def _settle(self, fn: Callable[..., Any]) -> None:
        """Check the signatures, then keep the callable."""
        if self.contract is not None:
            self._fit = fit(self.contract.signature, fn, self.impl.label)
            if self.impl.supports is not None:
                check_predicate(self.contract.signature, self.impl.supports, self.impl.label)
        else:
            self._fit = Fit({})
        self._fn = fn

    @property
    def fn(self) -> Callable[..., Any]:
        """The callable; only after :meth:`load` has returned None."""
        assert self._fn is not None, "used before it was loaded"  # an internal invariant
        return self._fn

    @property
    def missing(self) -> Mapping[str, Any]:
        """Options of the contract that the implementation does not take."""
        return self._fit.missing if self._fit else {}

    def with_all_options(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, which runs it, made to accept every option of the contract."""
        if self.contract is None or not self.missing:
            return fn
        return self.contract.without(fn, self.missing)

    def runs(self, fn: Callable[..., Any]) -> bool:
        """Whether ``fn`` is its callable."""
        return self._fn is fn

    def takes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call's arguments fit its signature, as far as that can be told."""
        signature = signature_of(self.fn)
        try:
            if signature is not None:
                signature.bind(*args, **kwargs)
        except TypeError:
            return False
        return True

    def unavailable(self) -> str | None:
        """Why this machine cannot run it; None if it can, as far as known.

        Calls its probe once, but its switch each time: the environment may have been read again.
        """
        if (off := self.switched_off()) is not None:
            return off
        if self._unavailable is None:
            with self._probe_lock.patiently(_PATIENCE):
                if self._unavailable is None:
                    self._unavailable = self._probe()
        return self._unavailable or None

    def ask_again(self) -> bool:
        """Have its probe called again if it raised: that is no answer, and may not happen again.

        A stand-in always forgets the answer, as its probe asks another implementation. Returns
        whether an answer was forgotten.
        """
        with self._probe_lock.patiently(_PATIENCE):
            if not (self._probe_raised or self.impl.stand_in):
                return False
            self._probe_raised, self._unavailable = False, None
            return True

    def load(self) -> str | None:
        """Import the callable if needed; returns why that cannot be done, or None."""
        if self._fn is None and not self._unavailable:
            with LOADING:
                if self._fn is None:  # loading says nothing of the probe: keep its answer, if any
                    self._unavailable = self._load() or self._unavailable
        return None if self._fn is not None else self._unavailable

    def switched_off(self) -> str | None:
        """Why the environment switches it off everywhere, or None; does not ask the machine."""
        if self.impl.switched_off is None:
            return None
        try:
            return self.impl.switched_off() or None
        except BaseException as error:
            if caused_by_caller(error):
                raise
            return self._warn_once(f"switched_off() raised {error_details(error)}")

    def _probe(self) -> str:
        if self.impl.is_available is None:
            return ""
        try:
            answer = self.impl.is_available()
        except BaseException as error:
            if caused_by_caller(error):
                raise
            self._probe_raised = True
            return self._warn_once(f"is_available() raised {error_details(error)}")
        if answer is True:
            return ""
        return answer if isinstance(answer, str) and answer else "is_available() says no"

    def _load(self) -> str:
        reference = str(self.impl.fn)
        try:
            fn = load_attribute(reference)
            if not callable(fn):
                return self._warn_once(f"{reference} is not callable", reference)
            self._settle(fn)
        except SignatureMismatchError as error:
            return self._warn_once(f"{error}\n  registered at  {self.where}", reference)
        except PluginError as error:
            if caused_by_caller(error):
                raise
            self.broken = True
            return str(error) or type(error).__name__  # an empty text would say that it is loaded
        except BaseException as error:
            if caused_by_caller(error):  # it may load later: uninterrupted, or with more stack
                raise
            module = reference.partition(":")[0]
            return self._warn_once(f"cannot import {reference}: {error_details(error)}", module)
        return ""

    def predicate_broken(self, problem: str) -> None:
        """Warn, once, that its ``supports`` has raised."""
        what = f"the check of {self.impl.label}"
        self._warn_once(f"supports() raised {problem}, which counts as a decline", what)

    def _warn_once(self, problem: str, what: str | None = None) -> str:
        """Return a fault; warn of it once for all implementations registered at one place.

        Once for each ``what``, if given.
        """
        key = self.where, what or problem
        if key not in _WARNED:
            _WARNED.add(key)
            logger.warning(
                "%s: %s; it is skipped (registered for %r at %s)",
                self.impl.impl_id,
                problem,
                self.impl.op_name,
                self.where,
            )
        return problem


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is registered at one moment; never changes.

    Attributes:
        operators: operator -> its entries, in order of registration.
        sources: names of the sets and plugins that are registered, with their state.
        version: counts changes.
    """

    operators: Mapping[str, tuple[Entry, ...]] = field(default_factory=dict)
    sources: Mapping[str, Any] = field(default_factory=dict)
    version: int = 0


class RegistryListener(Protocol):
    """Called after operators' implementations have changed, with the operators' names."""

    def registry_changed(self, operators: frozenset[str]) -> None: ...


class OpRegistry:
    """Implementations by operator.

    Args:
        contracts: operator -> contract; the catalogue of this package unless given.
    """

    def __init__(self, contracts: Contracts | None = None) -> None:
        self._lock = ForkSafeLock()
        self._snapshot = Snapshot()
        self._contracts = contracts
        self._aliases: Mapping[str, str] | None = None
        self._listeners: weakref.WeakSet[RegistryListener] = weakref.WeakSet()

    @property
    def contracts(self) -> Contracts:
        """Operator -> contract."""
        if self._contracts is None:
            self._contracts = load_attribute(CATALOGUE)
        return self._contracts

    def canonical(self, op_name: str) -> str:
        """The operator that ``op_name`` (a name or an alias) means."""
        if self._aliases is None:
            contracts = self.contracts.items()
            self._aliases = {alias: name for name, it in contracts for alias in it.aliases}
        return self._aliases.get(op_name, op_name)

    def register_impl(self, impl: OpImpl) -> None:
        """Register one implementation.

        Raises:
            DuplicateImplError: its ``impl_id`` is taken for this operator.
            SignatureMismatchError: its signature does not fit the contract.
        """
        self._register((impl,))

    def register_many(self, impls: Iterable[OpImpl]) -> None:
        """Register all of ``impls``, or none if one of them cannot be registered."""
        if isinstance(impls, OpImpl):
            raise RegistrationError(
                f"register_many takes several implementations, got one ({impls.label}); "
                "register_impl takes one"
            )
        self._register(impls)

    def _register(self, impls: Iterable[OpImpl]) -> None:
        where = _caller()
        entries = [self._entry(impl, where) for impl in impls]
        self._commit(entries)

    def _entry(self, impl: OpImpl, where: str) -> Entry:
        if not isinstance(impl, OpImpl):
            raise RegistrationError(f"{where}: expected an OpImpl, got {type(impl).__name__}")
        return Entry(impl, where, self.contracts.get(self.canonical(impl.op_name)))

    def _commit(self, entries: list[Entry], source: tuple[str, Any] | None = None) -> None:
        with self._lock:
            before = self._snapshot
            if source is not None and source[0] in before.sources:
                return  # another thread was first
            operators = dict(before.operators)
            for entry in entries:
                op_name = self.canonical(entry.impl.op_name)
                operators[op_name] = _with_entry(entry, operators.get(op_name, ()))
            sources = dict(before.sources)
            if source is not None:
                sources[source[0]] = source[1]
            self._snapshot = Snapshot(
                MappingProxyType(operators), MappingProxyType(sources), before.version + 1
            )
        self._notify_listeners(frozenset(self.canonical(entry.impl.op_name) for entry in entries))

    @contextlib.contextmanager
    def transaction(self, source: str) -> Iterator[StagedRegistry]:
        """A registry to fill, whose whole content is registered here when the block ends.

        If the block raises, nothing is registered. In the same step ``source`` is recorded,
        with the ``state`` that the block leaves, so that no set is ever registered twice.
        """
        staged = StagedRegistry(self)
        try:
            yield staged
        finally:
            staged.ended = True
        self._commit(staged.added, (source, staged.state))

    def record_source(self, source: str, state: Any) -> None:
        """Record a set or plugin that registered nothing, and why."""
        self._commit([], (source, state))

    def get_implementations(self, op_name: str) -> tuple[OpImpl, ...]:
        """Every implementation of an operator (none for an unknown one)."""
        return tuple(entry.impl for entry in self.entries(op_name))

    def get_implementation(self, op_name: str, impl_id: str) -> OpImpl:
        """One implementation.

        Raises:
            UnknownOperatorError: none has that id; names the nearest.
        """
        known = {impl.impl_id: impl for impl in self.get_implementations(op_name)}
        if impl_id not in known:
            raise UnknownOperatorError(
                f"{op_name!r} has no implementation {impl_id!r}; "
                f"it has: {', '.join(known) or 'none'}{suggestion(impl_id, known)}"
            )
        return known[impl_id]

    def entries(self, op_name: str) -> tuple[Entry, ...]:
        """The entries of an operator, by name or alias."""
        return self._snapshot.operators.get(self.canonical(op_name), ())

    def list_operators(self) -> tuple[str, ...]:
        """Names of the operators that have an implementation, sorted."""
        return tuple(sorted(self._snapshot.operators))

    def snapshot(self) -> Snapshot:
        """What is registered now."""
        return self._snapshot

    def clear(self) -> None:
        """Forget everything, sets and plugins included."""
        with self._lock:
            before = self._snapshot
            self._snapshot = Snapshot(version=before.version + 1)
        self._notify_listeners(frozenset(before.operators))

    def _notify_listeners(self, changed: frozenset[str]) -> None:
        """Call the listeners, outside our lock: one may hold its own while it calls us."""
        with self._lock:
            listeners = list(self._listeners) if changed else []
        for listener in listeners:
            listener.registry_changed(changed)

    def subscribe(self, listener: RegistryListener) -> None:
        """Call ``listener``, which is held weakly, after every change."""
        with self._lock:
            self._listeners.add(listener)


class StagedRegistry(OpRegistry):
    """A registry whose content is not visible elsewhere yet.

    Attributes:
        added: what has been registered so far.
        state: what to record of the source once it is registered.
        ended: its transaction has ended, so further registrations are refused.
    """

    def __init__(self, base: OpRegistry) -> None:
        super().__init__(base.contracts)
        self._snapshot = base.snapshot()
        self.added: list[Entry] = []
        self.state: Any = None
        self.ended = False

    def _commit(self, entries: list[Entry], source: tuple[str, Any] | None = None) -> None:
        if self.ended and entries:
            labels = ", ".join(entry.impl.label for entry in entries)
            raise RegistrationError(
                f"{labels}: this registry is valid only during register(registry), which has "
                "returned; register later with get_default_manager().registry"
            )
        super()._commit(entries, source)
        self.added.extend(entries)


def _with_entry(entry: Entry, present: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The entries so far, and one more; of two with the same id, a stand-in gives way.

    Raises:
        DuplicateImplError: neither is a stand-in.
    """
    impl_id = entry.impl.impl_id
    other = next((it for it in present if it.impl.impl_id == impl_id), None)
    if other is None:
        return (*present, entry)
    if other.impl.stand_in:
        return (*(it for it in present if it is not other), entry)
    if entry.impl.stand_in:
        return present
    raise DuplicateImplError(
        f"{entry.impl.label} is registered twice: at {other.where} "
        f"({other.impl.origin}) and at {entry.where} ({entry.impl.origin}); "
        "an impl_id must be unique within an operator"
    )


def _caller() -> str:
    """``file:line`` of the nearest frame outside core."""
    frame = inspect.currentframe()
    ours = (*INTERNAL_PATHS, contextlib.__file__)
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown location"
