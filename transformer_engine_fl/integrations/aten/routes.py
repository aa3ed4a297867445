"""The routes: which ATen operators are routed, and the candidates of each.

torch's dispatcher has two keys that nothing in torch uses (they were added for torchdistX) and
that it skips unless a thread includes them: one directly below autograd and one above it. The
kernels here are registered for these keys. A thread that includes them is routed; other threads,
and operators without a route, have no cost. Operators that devices implement are routed
below autograd, where autograd and autocast have run already. Composites are routed
above it, as they would otherwise arrive in pieces.

Candidates are the implementations registered under the operator's ATen name, each implementation
of the contract's operator that it is bridged to, and, last, the native kernel.
"""

from __future__ import annotations

import functools
import inspect
import keyword
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from transformer_engine_fl.core.errors import ArgumentError, NotSupportedError
from transformer_engine_fl.core.locks import LOADING, ForkSafeLock
from transformer_engine_fl.core.log import logger
from transformer_engine_fl.core.manager import OpManager
from transformer_engine_fl.core.policy import active_scope, policy_state
from transformer_engine_fl.core.registry import Entry, OpRegistry
from transformer_engine_fl.core.selection import ask_supports, options_decline
from transformer_engine_fl.core.types import BackendImplKind, OpImpl
from transformer_engine_fl.functional._differentiable import apply
from transformer_engine_fl.integrations.aten.bridges import PARTS, WHOLE, Bridge
from transformer_engine_fl.ops._dtypes import FLOATS
from transformer_engine_fl.ops._tensors import TorchTensors, first_tensor

__all__ = [
    "ABOVE",
    "BELOW",
    "NATIVE",
    "PREFIX",
    "Route",
    "Routes",
    "exclude",
    "excluded",
    "include",
    "misfit",
    "overload",
]

PREFIX: Final = "aten::"
NATIVE: Final = "native.aten"
"""The impl id of torch's own kernel."""

_NAMES: Final = ("Fake", "DeferredInit")


def _key(name: str) -> torch._C.DispatchKey:
    key = torch._C._parse_dispatch_key(name)
    assert key is not None  # torch has both
    return key


BELOW: Final = _key(_NAMES[0])
ABOVE: Final = _key(_NAMES[1])

include: Final[Callable[[Any, bool], None]] = torch._C._dispatch_tls_set_dispatch_key_included
exclude: Final[Callable[[Any, bool], None]] = torch._C._dispatch_tls_set_dispatch_key_excluded
excluded: Final[Callable[[Any], bool]] = torch._C._dispatch_tls_is_dispatch_key_excluded

_UNBRIDGED: Final = (
    "_log_softmax_backward_data",
    "nll_loss_forward",
    "nll_loss_backward",
    "native_dropout",
    "native_dropout_backward",
    "baddbmm",
)
"""Routed, and listed, for vendors that implement them; no contract matches them."""

_POSITIONAL: Final = inspect.Parameter.POSITIONAL_OR_KEYWORD

_MOST_EXPLAINED: Final = 1024

Serve = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Route:
    """An ATen operator that is routed.

    Attributes:
        name: ``"aten::gelu"``.
        whole: whether it is a torch composite, which is served as a whole and differentiable.
        operator: the contract's operator that it is bridged to, or None.
        implementations: the ids of the implementations registered for it.
    """

    name: str
    whole: bool
    operator: str | None
    implementations: tuple[str, ...]


def overload(name: str) -> Any:
    """The overload of that name (``"gelu"``, ``"add.Tensor"``), or None where torch has none."""
    base, _, which = name.removeprefix(PREFIX).partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return getattr(packet, which or "default", None)


def is_whole(op: Any) -> bool:
    """Whether the operator is a composite, which torch decomposes above autograd."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(op.name(), "CompositeImplicitAutograd") and not has(op.name(), "Autograd")


def signature(op: Any) -> inspect.Signature | None:
    """An operator's signature, from its schema; None if a parameter has no valid Python name."""
    parameters = []
    for it in op._schema.arguments:
        kind = inspect.Parameter.KEYWORD_ONLY if it.kwarg_only else _POSITIONAL
        default = it.default_value if it.has_default_value() else inspect.Parameter.empty
        if not it.name.isidentifier() or keyword.iskeyword(it.name):
            return None
        parameters.append(inspect.Parameter(it.name, kind, default=default))
    return inspect.Signature(parameters)


def misfit(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a call does not fit the operator's schema; None if it does, or if that is unknown."""
    op = overload(name)
    found = None if op is None else signature(op)
    if found is None:
        return None
    try:
        found.bind(*args, **kwargs)
    except TypeError as error:
        return f"{name}: {error}; torch declares {op._schema}"
    return None


def _with_signature(op: Any, function: Serve) -> Serve:
    found = signature(op)
    if found is not None:
        function.__signature__ = found  # type: ignore[attr-defined]
    return function


class _Dispatcher:
    """Registers the kernels for the two keys with torch's dispatcher; one for the process."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._passing: list[Any] = []
        self._libraries: dict[str, Any] = {}
        self._routed: set[str] = set()

    def route(self, name: str, serve: Callable[[str, Any, Any], Serve]) -> None:
        """Register an operator's kernel, once."""
        op = overload(name)
        with self._lock:
            if op is None or name in self._routed:
                return
            key = _NAMES[is_whole(op)]
            if not self._libraries:
                self._open()
            after = torch._C._dispatch_keyset_full_after(_key(key))
            kernel = serve(name, op, after)
            self._libraries[key].impl(name.removeprefix(PREFIX), kernel, key, with_keyset=True)
            self._routed.add(name)

    def _open(self) -> None:
        for key in _NAMES:
            every = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
            every.fallback(torch.library.fallthrough_kernel, key)  # type: ignore[no-untyped-call]
            self._passing.append(every)
            self._libraries[key] = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        _pass_higher_order_operators()


def _pass_higher_order_operators() -> None:
    """Make torch's higher order operators, which have their own lists, skip the keys as well."""
    from torch import _ops

    skipped = _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    for key in (BELOW, ABOVE):
        if key not in skipped:
            skipped.append(key)
            for op in _ops._higher_order_ops.values():
                op.fallthrough(key)  # type: ignore[no-untyped-call]


_dispatcher: Final = _Dispatcher()


class Routes:
    """The routes of one manager: registers candidates, and follows later registrations.

    Args:
        manager: the manager that dispatches.
        serve: makes the kernel for ``(name, overload, keys below ours)``.
    """

    def __init__(self, manager: OpManager, serve: Callable[[str, Any, Any], Serve]) -> None:
        self.manager = manager
        self._serve = serve
        self._explained: set[tuple[object, ...]] = set()
        self.names: frozenset[str] = frozenset()
        manager.ensure_initialized()
        registry = manager.registry
        registry.subscribe(self)  # before reading it, so that no registration is missed
        ours = [f"{PREFIX}{name}" for name in (*PARTS, *WHOLE, *_UNBRIDGED)]
        theirs = [name for name in registry.list_operators() if name.startswith(PREFIX)]
        self._add({*ours, *theirs})

    def registry_changed(self, operators: frozenset[str]) -> None:
        """Called after registrations: adds ATen operators, and those bridged to ``operators``."""
        named = {name for name in operators if name.startswith(PREFIX)}
        bridged = {
            f"{PREFIX}{name}"
            for name, bridge in (*PARTS.items(), *WHOLE.items())
            if bridge.operator in operators
        }
        self._add(named | bridged)

    def _add(self, names: Iterable[str]) -> None:
        here = sorted(name for name in names if overload(name) is not None)
        registry = self.manager.registry
        with LOADING:  # missing candidates are registered once, even if other threads register
            new = [impl for name in here for impl in _missing(registry, name)]
            if new:
                registry.register_many(new)
            for name in here:
                _dispatcher.route(name, self._serve)
            self.names |= frozenset(here)

    def listed(self) -> tuple[Route, ...]:
        """Every route, by name."""
        found = []
        for name in sorted(self.names):
            bridge = _bridge(name)
            impls = self.manager.registry.get_implementations(name)
            found.append(
                Route(
                    name,
                    is_whole(overload(name)),
                    bridge.operator if bridge else None,
                    tuple(impl.impl_id for impl in impls),
                )
            )
        return tuple(found)

    def warn(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], said: str) -> None:
        """Warn once about each implementation that was chosen and is at fault.

        Which one was chosen is determined once for each kind of call and policy, because that
        takes longer than many calls.
        """
        tensor = first_tensor((*args, *kwargs.values()))
        like = None if tensor is None else (tensor.device, tensor.dtype)
        policy = active_scope().key, policy_state.key, self.manager.epoch
        kind = (name, said, like, *policy)
        if kind in self._explained or len(self._explained) >= _MOST_EXPLAINED:
            return
        self._explained.add(kind)
        chosen = self.manager.explain(name, *args, **kwargs).selected
        entries = self.manager.registry.entries(name)
        entry = next((it for it in entries if it.impl is chosen), None)
        source = f" ({entry.impl.impl_id}, registered at {entry.where})" if entry else ""
        warning = f"{name}: the selected implementation{source} {said}"
        if self.manager.is_new_warning(warning):
            logger.warning("%s", warning)


def _bridge(name: str) -> Bridge | None:
    short = name.removeprefix(PREFIX)
    return PARTS.get(short) or WHOLE.get(short)


def _missing(registry: OpRegistry, name: str) -> list[OpImpl]:
    """The candidates that are not registered for an operator yet."""
    known = {impl.impl_id for impl in registry.get_implementations(name)}
    found: list[OpImpl] = []
    bridge = _bridge(name)
    if bridge is not None:
        entries = registry.entries(bridge.operator)
        found += [_bridged(name, bridge, it) for it in entries if it.impl.impl_id not in known]
    if NATIVE not in known:
        found.append(_native(name))
    return found


class _ArgumentsSeenError(Exception):
    """Ends a bridge's call that was made only to see its arguments."""


def _bridged(name: str, bridge: Bridge, entry: Entry) -> OpImpl:
    """An implementation of the contract's operator, as an implementation of ATen's."""
    impl = entry.impl
    whole = name.removeprefix(PREFIX) in WHOLE

    def refusal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        reason = entry.load() or options_decline(entry, args, kwargs)
        if reason is None and impl.supports is not None:
            reason = ask_supports(entry, (args, kwargs), TorchTensors().is_fatal)
        return reason

    def run(*args: Any, **kwargs: Any) -> Any:
        reason = refusal(args, kwargs)
        if reason is not None:
            raise NotSupportedError(f"{impl.label}: {reason}")
        try:
            return entry.with_all_options(entry.fn)(*args, **kwargs)
        except ArgumentError as error:  # torch may accept what the contract refuses
            raise NotSupportedError(str(error)) from None

    def differentiable(*tensors: Any, **options: Any) -> Any:
        return _apply(bridge.operator, run, tensors, options)

    runs = differentiable if whole else run

    def fn(*args: Any, **kwargs: Any) -> Any:
        return bridge.call(*args, **kwargs)(runs)

    def serves(*args: Any, **kwargs: Any) -> bool | str:
        """Whether the implementation would take the contract's call that this call turns into.

        It does a part of the bridge's work, so dispatch does not call it.
        """
        if entry.load() is None and impl.supports is None and not entry.missing:
            return True
        found: list[str | None] = []

        def record_refusal(*given: Any, **options: Any) -> None:
            found.append(refusal(given, options))
            raise _ArgumentsSeenError

        with suppress(_ArgumentsSeenError), torch.random.fork_rng(devices=()), torch.no_grad():
            bridge.call(*args, **kwargs)(record_refusal)
        return found[0] or True

    fn.te_fl_serves = serves  # type: ignore[attr-defined]

    def supports(*args: Any, **kwargs: Any) -> bool | str:
        try:
            bridge.call(*args, **kwargs)
        except NotSupportedError as error:
            return str(error)
        return True

    return OpImpl(
        op_name=name,
        impl_id=impl.impl_id,
        kind=impl.kind,
        fn=_with_signature(overload(name), fn),
        vendor=impl.vendor,
        priority=impl.priority,
        supported_dtypes=_floats(entry),
        min_arch=impl.min_arch,
        devices=impl.devices,
        supports=supports,
        is_available=lambda: entry.unavailable() or True,
        switched_off=impl.switched_off,
        traits=impl.traits,
        mutates=(),
        opt_in=impl.opt_in,
        stand_in=True,
    )


def _floats(entry: Entry) -> frozenset[str]:
    known = set(entry.contract.dtypes) if entry.contract else set(FLOATS)
    own = entry.impl.supported_dtypes
    return frozenset(known.intersection(FLOATS, known if own is None else own))


def _apply(operator: str, run: Serve, tensors: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run a contract's operator differentiably, with ``run`` for its forward."""
    given = [it for it in tensors if it is None or isinstance(it, Tensor)]
    names = _parameters(operator)[len(given) : len(tensors)]
    numbers = dict(zip(names, tensors[len(given) :], strict=True))
    return apply(operator, {**numbers, **options}, *given, run=run)


@functools.cache
def _parameters(operator: str) -> tuple[str, ...]:
    from transformer_engine_fl.ops import CATALOGUE

    return tuple(CATALOGUE[operator].signature.parameters)


def _native(name: str) -> OpImpl:
    op = overload(name)
    below = not is_whole(op)

    def native(*args: Any, **kwargs: Any) -> Any:
        if below or not excluded(BELOW):
            return op(*args, **kwargs)
        exclude(BELOW, False)  # the pieces of a composite are routed
        try:
            return op(*args, **kwargs)
        finally:
            exclude(BELOW, True)

    return OpImpl(
        op_name=name,
        impl_id=NATIVE,
        kind=BackendImplKind.REFERENCE,
        fn=_with_signature(op, native),
        priority=-1000,
        mutates=(),
        traits=frozenset({"traceable"}),
    )
