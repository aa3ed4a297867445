"""Dispatch in compiled code: what torch.compile and torch.export trace.

The implementation is chosen while tracing, by the same decision as in eager code, and becomes a
constant of the graph. What the choice depends on (the ``with`` blocks, the global policy, what
is registered and in quarantine) is guarded as plain values: a change recompiles once, and a
policy that was seen before hits the cache. Plain torch implementations are traced through;
raw kernels become operators of ``torch.library`` with the contract's shape rule.

Nothing falls back here: an error while tracing is raised, and a compiled kernel that
fails at run time raises there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from transformer_engine_fl.core.contract import same
from transformer_engine_fl.core.errors import (
    ArgumentError,
    ConfigurationError,
    NoImplementationError,
    NotSupportedError,
)
from transformer_engine_fl.core.manager import manager_named
from transformer_engine_fl.core.policy import ROOT, policy_state
from transformer_engine_fl.core.registry import Entry
from transformer_engine_fl.core.tracing import constant
from transformer_engine_fl.ops import _library
from transformer_engine_fl.ops._tensors import TorchTensors, facts_of, first_tensor

__all__ = ["traced_call"]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class _Target:
    """A candidate as compiled code calls it.

    Attributes:
        name: its attribute's name in ``_TARGETS``.
        run: the function to trace through, or an operator of ``torch.library``.
        added: keywords that ``run`` needs besides the call's own.
        supports: the candidate's own check of the arguments, for any call, or None.
        check: the contract's check of the arguments, or None.
        missing: (name, position or None, default) of each option that the candidate lacks.
    """

    def __init__(self, entry: Entry) -> None:
        self.name = _name_of(entry)
        self.supports = entry.supports
        self.check = entry.contract.check if entry.contract is not None else None
        self.added: Kwargs = {}
        self.run: Callable[..., Any] = entry.fn
        if not entry.impl.traceable and entry.contract is not None:
            self.run = _library.operator(entry.contract)
            self.added = {"impl": _library.reference_to(entry)}
        places = entry.contract.positional if entry.contract is not None else ()
        self.missing = tuple(
            (name, places.index(name) if name in places else None, default)
            for name, default in entry.missing.items()
        )


class _Targets:
    """Holds each target as an attribute of its own, which a trace reads and guards."""


_TARGETS: Final = _Targets()
_ENTRIES: Final[weakref.WeakValueDictionary[str, Entry]] = weakref.WeakValueDictionary()


def traced_call(manager: Any, op_name: str, args: Args, kwargs: Kwargs) -> Any:
    """What ``manager.call(op_name, *args, **kwargs)`` is in compiled code."""
    place, name = _dispatch_on(manager.name, op_name)
    misfit = _misfit(manager.name, op_name, len(args), tuple(kwargs))
    if misfit:
        raise ArgumentError(*misfit)
    given = (*args, *kwargs.values())
    if name:  # empty without a contract: then the first tensor of all arguments counts
        given = (args[place] if place < len(args) else kwargs.get(name),)
    tensor = first_tensor(given)
    device, dtype = (tensor.device, tensor.dtype) if tensor is not None else (None, None)
    for target_name in _choose(
        manager.name, op_name, ROOT.active.key, policy_state.key, manager.epoch, device, dtype
    ):
        target = getattr(_TARGETS, target_name)
        if _takes(target, args, kwargs):
            _log_selection(manager.name, op_name, target_name)
            if target.added or not torch.is_grad_enabled():
                return _run(target, args, kwargs)
            with torch.no_grad():
                return _run(target, args, kwargs)
    raise NotSupportedError(f"{op_name}: no implementation supports these arguments")


def _takes(target: _Target, args: Args, kwargs: Kwargs) -> bool:
    for name, place, default in target.missing:
        value = kwargs.get(name, default) if place is None or place >= len(args) else args[place]
        if not same(value, default):
            return False
    try:
        return target.supports is None or target.supports(*args, **kwargs) is True
    except NotSupportedError:
        return False
    except (ConfigurationError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a bug in third-party code declines, as in eager code
        text = str(error.args[0]) if error.args else ""
        if isinstance(error, RuntimeError) and _is_fatal(text):
            raise
        if not _contract_rejects(target, args, kwargs):
            _predicate_broken(target.name, f"{type(error).__name__}: {text}")
        return False


def _contract_rejects(target: _Target, args: Args, kwargs: Kwargs) -> bool:
    """Whether the contract refuses the call: then the call, not ``supports``, may be at fault."""
    if target.check is None:
        return False
    try:
        target.check(*args, **kwargs)
    except ArgumentError:
        return True
    return False


@constant
def _is_fatal(text: str) -> bool:
    return TorchTensors().is_fatal(RuntimeError(text))


def _run(target: _Target, args: Args, kwargs: Kwargs) -> Any:
    if target.missing:
        places = [place for _, place, _ in target.missing]
        names = [name for name, _, _ in target.missing]
        args = tuple(value for place, value in enumerate(args) if place not in places)
        kwargs = {name: value for name, value in kwargs.items() if name not in names}
    if target.added:
        return target.run(*args, **kwargs, **target.added)
    return _as_views(target.run(*args, **kwargs))


def _as_views(result: Any) -> Any:
    """A view of each tensor of a result.

    Dynamo of torch 2.11 loses the gradient of an output that ``.to`` or ``.contiguous`` returned
    unchanged.
    """
    if isinstance(result, Tensor):
        return result.view(result.shape)
    return tuple(_as_views(it) for it in result) if isinstance(result, tuple) else result


def _target_name(entry: Entry) -> str:
    """The name of an entry's target; it stays the same as long as the entry lives."""
    name = _name_of(entry)
    if not hasattr(_TARGETS, name):
        setattr(_TARGETS, name, _Target(entry))
        _ENTRIES[name] = entry
        weakref.finalize(entry, delattr, _TARGETS, name)
    return name


def _name_of(entry: Entry) -> str:
    return f"target_{id(entry)}"


@constant
def _predicate_broken(name: str, error: str) -> None:
    _ENTRIES[name].predicate_broken(f"{error} while it was traced")


@constant
def _log_selection(manager: str, op_name: str, name: str) -> None:
    """Log which implementation is compiled, as eager code logs which one serves."""
    its = manager_named(manager)
    its.log_selection(its.registry.canonical(op_name), _ENTRIES[name].impl)


@constant
def _dispatch_on(manager: str, op_name: str) -> tuple[int, str]:
    """Position and name of the dispatch tensor. Also reads the settings and registers the
    sets, before any of that is guarded.
    """
    place: tuple[int, str] = manager_named(manager).plan(op_name).dispatch_on
    return place


@constant
def _misfit(
    manager: str, op_name: str, count: int, names: tuple[str, ...]
) -> tuple[Any, ...] | None:
    """The arguments of the ArgumentError for a call with ``count`` positional arguments and
    keywords ``names``, or None if the signature takes them.
    """
    registry = manager_named(manager).registry
    contract = registry.contracts.get(registry.canonical(op_name))
    if contract is not None:
        try:
            contract.bind(*[None] * count, **dict.fromkeys(names))
        except ArgumentError as wrong:
            return wrong.args
    return None


@constant
def _choose(
    manager: str,
    op_name: str,
    scope_key: str,
    policy_key: str,
    epoch: str,
    device: torch.device | None,
    dtype: torch.dtype | None,
) -> tuple[str, ...]:
    """Names of the targets that may serve, best first; the keys are parameters to be guarded."""
    plan = manager_named(manager).plan(op_name)
    decision = plan.decide(facts_of(device, dtype))
    if not decision.accepted:
        raise plan.unserved(decision)
    names = []
    passed_over = {}
    for impl in decision.accepted:
        try:
            entry = plan.entry(impl)
        except NoImplementationError as error:
            passed_over[impl.impl_id] = ("failed", str(error.args[0]))
            continue
        if entry.contract is None and not impl.traceable:
            reason = "cannot be compiled: without a contract its output shapes are unknown"
            passed_over[impl.impl_id] = ("tensor", reason)
            continue
        names.append(_target_name(entry))
        if impl.supports is None and not entry.missing:
            break
    if not names:
        raise NoImplementationError(
            f"no implementation of {op_name!r} can be compiled; a kernel needs a contract for "
            "its output shapes, or the trait 'traceable'",
            decision.rejecting(passed_over),
        )
    return tuple(names)
