"""OpManager: call, bind, resolve, explain.

The hot path is :meth:`OpManager.call`: a look-up of the operator's name in a table, then
the call. plan.py makes the tables' entries. When a registration, the quarantine or a policy
changes, whole tables are dropped, so that the next call sees the change.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import re
import threading
import weakref
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any

from transformer_engine_fl.core import contract as contracts
from transformer_engine_fl.core import discovery
from transformer_engine_fl.core.contract import signature_of
from transformer_engine_fl.core.dispatch import (
    MISS,
    DispatchEntry,
    Handle,
    HandleCell,
    accept_any_arguments,
    handle,
    settles_failures,
)
from transformer_engine_fl.core.errors import (
    ConfigurationError,
    NoImplementationError,
    PluginError,
    UnknownOperatorError,
    nearest,
    suggestion,
)
from transformer_engine_fl.core.late import load_attribute
from transformer_engine_fl.core.locks import LOADING, ForkSafeLock
from transformer_engine_fl.core.log import logger
from transformer_engine_fl.core.monitors import ActiveMonitor, Monitor
from transformer_engine_fl.core.plan import Plan
from transformer_engine_fl.core.policy import (
    ROOT,
    EffectivePolicy,
    Scope,
    active_scope,
    effective_policy,
    get_environment,
    subscribe,
)
from transformer_engine_fl.core.recovery import Quarantine
from transformer_engine_fl.core.registry import OpRegistry
from transformer_engine_fl.core.selection import Decision
from transformer_engine_fl.core.tensors import TORCH, Facts, Tensors
from transformer_engine_fl.core.tracing import (
    forget_default_manager,
    in_compiled_code,
    traced_call,
    traced_default_manager,
    traced_pin,
)
from transformer_engine_fl.core.types import OpImpl, parse_arch
from transformer_engine_fl.core.vetting import unknown_names

__all__ = ["OpManager", "get_default_manager", "manager_named", "reset_default_manager"]

_MAX_SCOPES = 64
"""How many tables are kept for nestings of ``with`` blocks, one each."""

_MAX_WARNINGS = 1024
"""How many different warnings are logged, each once; a program that makes new ones for ever
gets no more after that."""

_numbers = itertools.count(1)
_managers: weakref.WeakValueDictionary[str, OpManager] = weakref.WeakValueDictionary()


class Table(dict[str, DispatchEntry]):
    """Operator -> how it is served, under one policy.

    Attributes:
        plans: operator -> the plan that its entry was made from.
    """

    __slots__ = ("plans",)

    def __init__(self) -> None:
        super().__init__()
        self.plans: dict[str, Plan] = {}


class OpManager:
    """Serves calls from a registry under the policy in force.

    Args:
        registry: what to serve from; a new one unless given.
        builtins: register the sets of this package in it.
        plugins: register installed plugins in it.
        tensors: answers questions about tensors; torch's unless given.
    """

    def __init__(
        self,
        registry: OpRegistry | None = None,
        *,
        builtins: bool = True,
        plugins: bool = True,
        tensors: Tensors | None = None,
    ) -> None:
        self.registry = OpRegistry() if registry is None else registry
        self.quarantine = Quarantine()
        self.plugins: tuple[discovery.SourceReport, ...] = ()
        # Compiled code refers to a manager by name: torch before 2.13 cannot pass the object on.
        self.name = f"manager {next(_numbers)}"
        _managers[self.name] = self
        self.epoch = "0"  # a string: torch.compile makes an int that changes a symbolic one
        self._builtins = builtins
        self._use_plugins = plugins
        self._tensors = tensors
        self._lock = ForkSafeLock()
        self._starting: tuple[int, int] | None = None
        self._started = False
        self._table = Table()
        self._scoped: dict[Scope, Table] = {}
        self._cells: dict[str, HandleCell] = {}
        self._contractless_handles: dict[str, weakref.WeakSet[FunctionType]] = {}
        self._active_monitors: tuple[ActiveMonitor, ...] = ()
        self._logged: dict[str, list[str]] = {}
        self._vetted: set[str] = set()
        self._warned: set[str] = set()
        self.registry.subscribe(self)
        subscribe(self)

    def __copy__(self) -> OpManager:
        return self

    def __deepcopy__(self, memo: object) -> OpManager:
        return self  # its handles are not copied either, and a copied module keeps both

    def __reduce__(self) -> tuple[Any, ...]:
        if self is not _default:
            raise TypeError(
                "only the default manager can be pickled (it unpickles as the default manager of "
                "the other process); the registry of this one exists in this process only"
            )
        return get_default_manager, ()

    # ------------------------------------------------------------------ the hot path

    @in_compiled_code(traced_call)
    def call(self, op_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call an operator on whichever implementation the policy chooses.

        Raises:
            UnknownOperatorError: there is no such operator; names the nearest.
            ArgumentError: the arguments break the operator's contract.
            NoImplementationError: no implementation may serve this call; says why for each.
        """
        if (scope := active_scope()) is ROOT:
            served = self._table.get(op_name)
        else:
            served = self._scoped.get(scope, _NO_TABLE).get(op_name)
        if served is None:
            served = self._build(op_name, scope)
        repeats = served.repeats
        if repeats is not None and (last := repeats.last) is served.approved:
            try:
                found = last(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - judged by the rules of recovery.py
                found = served.failed(repeats, args, kwargs, error)
            return served.missed(last, args, kwargs) if found is MISS else found
        fn = served.fn
        try:
            return fn(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - judged by the rules of recovery.py
            return self._failed(op_name, fn, args, kwargs, error)

    def bind(self, op_name: str) -> Handle:
        """A function with the operator's own signature; the cheapest way to call it often.

        Follows every later change of policy and registration, as :meth:`call` does. It cannot
        be pickled, being generated at run time; an operator object (``ops.rmsnorm_fwd``) can.
        """
        self.ensure_initialized()
        name = self._known(op_name)
        contract = self.registry.contracts.get(name)
        entries = self.registry.entries(name)
        signature = contract.signature if contract else self._common_signature(name)
        with self._lock:
            cell = self._cells.setdefault(name, HandleCell(self._unbuilt(name)))
        made = handle(
            name,
            signature,
            cell,
            lambda: self._find(name, active_scope()),
            functools.partial(self._failed, name),
        )
        made.__doc__ = contract.__doc__ if contract else f"Dispatches {name!r}."
        made.__signature__ = signature  # type: ignore[attr-defined]
        if contract is None:
            with self._lock:
                self._contractless_handles.setdefault(name, weakref.WeakSet()).add(made)
            if self.registry.entries(name) is not entries:
                self._drop_signatures({name})
        return in_compiled_code(lambda *args, **kwargs: traced_call(self, name, *args, **kwargs))(
            made
        )

    @in_compiled_code(traced_pin)
    def pin(self, op_name: str) -> Handle:
        """A function that calls the operator under the policy in force now, not under later ones.

        Later registrations, monitors and quarantines do count. A backward uses it to run under its
        forward's policy, in whichever thread it runs.
        """
        table = self._table
        state = (table, *self._built(op_name, active_scope()))

        def pinned(*args: Any, **kwargs: Any) -> Any:
            nonlocal state
            table, served, plan = state
            if table is not self._table:  # every plan is outdated
                table = self._table
                plan = self._plan(plan.op_name, plan.effective)
                served = plan.served()
                state = (table, served, plan)
            fn, repeats = served.fn, served.repeats
            if repeats is not None and (last := repeats.last) is served.approved:
                try:
                    found = last(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 - judged by the rules of recovery.py
                    found = served.failed(repeats, args, kwargs, error)
                return served.missed(last, args, kwargs) if found is MISS else found
            try:
                return fn(*args, **kwargs)
            except Exception as error:
                if hasattr(fn, "settles_failures"):
                    raise
                return plan.recover(fn, args, kwargs, error)

        return pinned

    # -------------------------------------------------------------------- questions

    def resolve(self, op_name: str, /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """The callable that would serve; chosen for the arguments if any are given.

        Raises:
            ArgumentError: the arguments break the operator's contract.
            NoImplementationError: no implementation would serve.
            PluginError: the policy names a package that cannot be loaded.
        """
        plan = self.plan(op_name)
        wrong = plan.wrong_arguments(args, kwargs) if args or kwargs else None
        if wrong is not None:
            raise wrong
        decision = plan.explain(*self._question(plan, args, kwargs))
        if (broken := plan.named_but_broken(decision)) is not None:
            raise PluginError(broken)
        return plan.runnable(self._selected(decision), decision.facts)

    def resolve_candidates(self, op_name: str, /, *args: Any, **kwargs: Any) -> tuple[OpImpl, ...]:
        """Every implementation that may serve, best first."""
        return self.explain(op_name, *args, **kwargs).accepted

    def get_selected_impl_id(self, op_name: str) -> str:
        """The id of the implementation for this machine, before any tensor is seen.

        Raises:
            NoImplementationError: there is none.
        """
        return self._selected(self.explain(op_name)).impl_id

    def explain(self, op_name: str, /, *args: Any, **kwargs: Any) -> Decision:
        """Which implementation would serve this call, and why each other would not.

        Without arguments: which one serves on this machine, before any tensor is seen. What an
        implementation finds out only when it runs, and then declines, cannot be told.
        """
        plan = self.plan(op_name)
        decision = plan.explain(*self._question(plan, args, kwargs))
        if (broken := plan.named_but_broken(decision)) is not None:
            blamed = {impl.impl_id: ("policy", "not asked") for impl in decision.accepted}
            decision = decision.rejecting(blamed).with_note(f"a call raises PluginError: {broken}")
        wrong = plan.wrong_arguments(args, kwargs) if args or kwargs else None
        if wrong is not None:
            blamed = {impl.impl_id: ("arguments", str(wrong)) for impl in decision.accepted}
            decision = decision.rejecting(blamed).with_note("the arguments break the contract")
        return decision

    def explain_for(
        self, op_name: str, *, device: str, arch: str | None = None, dtype: str | None = None
    ) -> Decision:
        """As :meth:`explain`, for a device that need not be present.

        Every implementation counts as available there, except those that this process's
        environment switches off.

        Raises:
            ConfigurationError: ``device`` is not a device type, ``arch`` is not an architecture
                name or the device is a CPU, or ``dtype`` is not one of this operator's.
        """
        plan = self.plan(op_name)
        if arch is not None and parse_arch(arch) is None:
            raise ConfigurationError(
                f"arch: {arch!r} is not an architecture name; examples: 'sm_90', 'gfx942'"
            )
        named = re.fullmatch(r"([a-z][a-z0-9_]*)(:\d+)?", str(device))  # "cuda:0" is a cuda device
        if named is None:
            raise ConfigurationError(
                f"device: {device!r} is not a device type; examples: 'cuda', 'cpu'"
            )
        device = named[1]
        if arch is not None and device == "cpu":
            raise ConfigurationError(
                f"arch: {arch!r} is a GPU architecture, but the device is 'cpu'; leave arch out"
            )
        dtype = plan.checked_dtype(str(dtype).removeprefix("torch.")) if dtype is not None else None
        given = {"device": device, "arch": arch, "dtype": dtype}
        judged = frozenset(name for name, value in given.items() if value)
        return plan.what_if(Facts(device=device, arch=arch, dtype=dtype, judged=judged))

    def monitor(self, callback: Monitor) -> Callable[[], None]:
        """Call ``callback(op_name, impl)`` after each call served; returns a function to undo it.

        While a monitor is set, dispatch takes its slow path. Compiled code dispatches
        when it is traced, so a monitor does not see its calls. An exception in the callback
        does not end the operator's call: the first one is logged as a warning. Operators that
        a callback calls are not reported.
        """
        if not callable(callback):
            raise TypeError(f"a monitor must be callable, got {type(callback).__name__}")
        # The same callback may be set twice, and each is undone alone.
        own = ActiveMonitor(callback)
        with self._lock:
            self._active_monitors = (*self._active_monitors, own)
        self._invalidate()

        def undo() -> None:
            with self._lock:
                self._active_monitors = tuple(it for it in self._active_monitors if it is not own)
            self._invalidate()

        return undo

    def reset_quarantine(self) -> None:
        """Take every implementation out of quarantine.

        An ``is_available`` that has raised is called again, too.
        """
        changed = bool(self.quarantine.held())
        self.quarantine.clear()
        for entries in self.registry.snapshot().operators.values():
            for entry in entries:
                changed |= entry.ask_again()
        self._invalidate(epoch=changed)

    # ---------------------------------------------------------------- coming to life

    def ensure_initialized(self) -> None:
        """Register the built-in sets and the plugins, once.

        Raises:
            ConfigurationError: a setting is malformed; the next call tries again.
        """
        me = (os.getpid(), threading.get_ident())
        if self._started or self._starting == me:
            return
        with LOADING:
            self._start(me)

    def _start(self, me: tuple[int, int]) -> None:
        if self._started:  # another thread was first
            return
        self._starting = me
        try:
            get_environment()
            found = discovery.find_sources(builtins=self._builtins, plugins=self._use_plugins)
            self.plugins = tuple(discovery.install(self.registry, source) for source in found)
            self._started = True
        finally:
            self._starting = None
        operators = self.registry.snapshot().operators.values()
        impl_ids = sorted({entry.impl.impl_id for entries in operators for entry in entries})
        logger.info("Registered impl_ids: %s", impl_ids)

    @property
    def tensors(self) -> Tensors:
        """Answers questions about tensors; imported at first use."""
        if self._tensors is None:
            made: Tensors = load_attribute(TORCH)()
            self._tensors = made
        return self._tensors

    @property
    def active_monitors(self) -> tuple[ActiveMonitor, ...]:
        """The monitors set by :meth:`monitor`."""
        return self._active_monitors

    # -------------------------------------------------------------------- the tables

    def _find(self, op_name: str, scope: Scope) -> DispatchEntry:
        table = self._table if scope is ROOT else self._scoped.get(scope, _NO_TABLE)
        return table.get(op_name) or self._build(op_name, scope)

    def _build(self, op_name: str, scope: Scope) -> DispatchEntry:
        """Find out how an operator is served, and keep that in the scope's table."""
        return self._built(op_name, scope, anew=True)[0]

    def _built(
        self, op_name: str, scope: Scope, *, anew: bool = False
    ) -> tuple[DispatchEntry, Plan]:
        """How an operator is served, and the plan behind that.

        The table is looked up before the policy and the registry are read. A later change
        replaces the table, so nothing that was built from the old state is kept.
        """
        self.ensure_initialized()
        table = self._table_for(scope)
        if not anew and op_name in table:
            return table[op_name], table.plans[op_name]
        plan = self.plan(op_name, scope)
        served = plan.served()
        with self._lock:
            if table is self._table_for(scope):
                table.plans[op_name] = plan
                table[op_name] = served
                if scope is ROOT and (cell := self._cells.get(op_name)) is not None:
                    cell.served = served
        return served, plan

    def _unbuilt(self, op_name: str) -> Handle:
        """The placeholder in a handle's cell until there is a plan."""

        @settles_failures
        def unbuilt(*args: Any, **kwargs: Any) -> Any:
            self._build(op_name, ROOT)
            return self.call(op_name, *args, **kwargs)

        return unbuilt

    def _table_for(self, scope: Scope) -> Table:
        with self._lock:
            if scope is ROOT:
                return self._table
            table = self._scoped.get(scope)
            if table is None:
                kept = dict(self._scoped)
                while len(kept) >= _MAX_SCOPES:
                    del kept[next(iter(kept))]
                table = kept[scope] = Table()
                self._scoped = kept
            return table

    def plan(self, op_name: str, scope: Scope | None = None) -> Plan:
        """How an operator is served under the policy in force (in ``scope``, if given)."""
        self.ensure_initialized()
        name = self._known(op_name)
        effective = effective_policy(scope)
        self._vet(effective)
        return self._plan(name, effective)

    def _plan(self, name: str, effective: EffectivePolicy) -> Plan:
        entries = self.registry.entries(name)
        return Plan(self, name, self.registry.contracts.get(name), entries, effective)

    def _known(self, op_name: str) -> str:
        if not isinstance(op_name, str):
            raise UnknownOperatorError(
                "an operator name must be a string, such as 'rmsnorm_fwd'; "
                f"got {type(op_name).__name__}"
            )
        name = self.registry.canonical(op_name)
        if not self.registry.entries(name) and name not in self.registry.contracts:
            contracts = self.registry.contracts
            known = {*self.registry.list_operators(), *contracts}
            aliases = {alias for it in contracts.values() for alias in it.aliases}
            left_out = [it.name for it in self.plugins if it.error is not None]
            hint = f"; {', '.join(left_out)} left out: `te-fl doctor` says why" if left_out else ""
            raise UnknownOperatorError(_unknown(op_name, known, aliases) + hint)
        return name

    def _common_signature(self, name: str) -> inspect.Signature:
        """The signature that all implementations of an operator without a contract share.

        ``(*args, **kwargs)`` if they share none.
        """
        entries = self.registry.entries(name)
        found = [signature_of(entry.fn) for entry in entries if entry.load() is None]
        if found and found[0] and all(it == found[0] for it in found):
            return found[0]
        return inspect.signature(lambda *args, **kwargs: None)

    def _drop_signatures(self, operators: Collection[str]) -> None:
        """Make these operators' handles pass on only what they are given.

        Their defaults are those of the implementations before the latest registration.
        """
        for name in operators:
            with self._lock:
                handles = self._contractless_handles.pop(name, ())
            for made in handles:
                accept_any_arguments(made)

    def _question(
        self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Facts, Any]:
        return (plan.facts(args, kwargs), (args, kwargs)) if args or kwargs else (Facts(), None)

    def _selected(self, decision: Decision) -> OpImpl:
        if decision.selected is None:
            raise NoImplementationError(f"no implementation serves {decision.op_name!r}", decision)
        return decision.selected

    def _vet(self, effective: EffectivePolicy) -> None:
        """Warn once of each unknown name in the policy, but not while plugins still register."""
        key = effective.policy.key
        if key in self._vetted or not self._started:
            return
        for message in unknown_names(effective, self.registry):
            if self.is_new_warning(message):
                logger.warning("%s", message)
        if len(self._vetted) >= _MAX_SCOPES:
            self._vetted.clear()
        self._vetted.add(key)

    def is_new_warning(self, message: str) -> bool:
        """Whether this message has not been logged yet; marks it as logged."""
        if message in self._warned or len(self._warned) >= _MAX_WARNINGS:
            return False
        self._warned.add(message)
        return True

    # ----------------------------------------------------------------- what happens

    def _failed(
        self,
        op_name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        error: Exception,
    ) -> Any:
        """Continue after an implementation that was called directly has failed."""
        try:
            if hasattr(fn, "settles_failures"):
                raise error
            return self.plan(op_name).recover(fn, args, kwargs, error)
        finally:
            del error  # its traceback has this frame: the cycle would keep the call's tensors

    def log_selection(self, op_name: str, impl: OpImpl, *, again: bool = True) -> None:
        """Log which implementation serves an operator, when that has changed.

        Args:
            again: log it also if it has served before; False where the arguments of each
                call decide, and implementations may alternate.
        """
        served = self._logged.setdefault(op_name, [])
        if (not served or served[-1] != impl.impl_id) and (again or impl.impl_id not in served):
            served[:] = [*(it for it in served if it != impl.impl_id), impl.impl_id]
            logger.info("Op %r using %r (%s)", op_name, impl.impl_id, impl.origin)

    def registry_changed(self, operators: frozenset[str]) -> None:
        """After a registration: clear these operators' quarantine, and every plan."""
        self.quarantine.clear(operators)
        self._vetted.clear()
        self._drop_signatures(operators)
        self._invalidate(epoch=True)

    def policy_changed(self) -> None:
        """After the global policy was set or reset: clear the quarantine and every plan."""
        had_quarantine = bool(self.quarantine.held())
        self.quarantine.clear()
        self._invalidate(epoch=had_quarantine)

    def plans_outdated(self) -> None:
        """Drop every plan, as something that plans depend on has changed (quarantine, say)."""
        self._invalidate(epoch=True)

    def _invalidate(self, *, epoch: bool = False) -> None:
        """Drop every plan.

        Args:
            epoch: change the epoch too, so that compiled code is compiled again: the same
                policy may now lead to another choice.
        """
        with self._lock:
            self.epoch = str(int(self.epoch) + epoch)
            self._table = Table()
            self._scoped = {}
            for cell in self._cells.values():
                cell.served = cell.unbuilt


_NO_TABLE = Table()


def _unknown(op_name: str, known: Collection[str], aliases: Collection[str]) -> str:
    """The message for an unknown operator.

    Args:
        op_name: the name that was asked for.
        known: every operator's name, with its namespace if it has one.
        aliases: their other names.
    """
    space, double, rest = op_name.rpartition("::")
    if not double:
        own = [name for name in known if "::" not in name]
        close = suggestion(op_name, (*own, *aliases))
        return (
            f"unknown operator {op_name!r}{close} ({len(own)} are known; `te-fl list` shows them)"
        )
    in_namespace = [
        name.removeprefix(f"{space}::") for name in known if name.startswith(f"{space}::")
    ]
    nearest_name = nearest(rest, in_namespace)
    hint = f"; did you mean {f'{space}::{nearest_name}'!r}?" if nearest_name else ""
    return (
        f"unknown operator {op_name!r}{hint} ({len(in_namespace)} are known in {space!r}; "
        "registering an implementation adds one)"
    )


def manager_named(name: str) -> OpManager:
    """The live manager with that :attr:`OpManager.name`."""
    return _managers[name]


_default_lock = ForkSafeLock()
_default: OpManager | None = None


@in_compiled_code(traced_default_manager)
def get_default_manager() -> OpManager:
    """The manager that operator objects, ``functional`` and the modules use."""
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                _default = OpManager()
    return _default


def reset_default_manager() -> None:
    """Forget the default manager; the next use makes a new one with a new registry."""
    global _default
    with _default_lock:
        _default = None
        forget_default_manager()
        contracts.set_binder(_default_handle)


def _default_handle(op_name: str) -> Handle:
    return get_default_manager().bind(op_name)


contracts.set_binder(_default_handle)
