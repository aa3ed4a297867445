"""Routes the ATen operators of an unmodified model to the implementations registered here.

    from transformer_engine_fl.integrations.aten import use_aten_ops

    with use_aten_ops():
        loss = model(x).sum()
        loss.backward()

Like a policy, a block applies to the thread and the context that entered it, and also to the
threads in which autograd runs a backward that was called inside. :func:`enable` and
:func:`disable` do the same without a block. The policy in force chooses the implementation;
``explain("aten::gelu", x)`` says which one serves a call and why. Calls that no implementation
takes, for example because of the dtype or device, go to torch's own kernel, the implementation
``native.aten``; so do calls with subclasses of Tensor or tensors without data, and calls under a
dispatch mode, ``torch.func`` or ``torch.jit.trace``. Code compiled by torch.compile does not
change.

``routes.py`` has the routed operators and their candidates; ``bridges.py`` converts their
arguments to those of the contracts.
"""

from __future__ import annotations

import contextvars
import ctypes
import sys
import threading
from collections.abc import Callable, Collection
from threading import get_ident
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor

from transformer_engine_fl.core.errors import (
    AllCandidatesFailedError,
    ConfigurationError,
    NotSupportedError,
    nearest,
)
from transformer_engine_fl.core.locks import LOADING, ForkSafeLock
from transformer_engine_fl.core.manager import OpManager, get_default_manager
from transformer_engine_fl.core.policy import (
    DecoratingBlock,
    Scope,
    active_scope,
    effective_policy,
    policy_context,
)
from transformer_engine_fl.core.selection import Decision
from transformer_engine_fl.core.tracing import constant, in_compiled_code
from transformer_engine_fl.integrations.aten.bridges import autocast
from transformer_engine_fl.integrations.aten.routes import (
    ABOVE,
    BELOW,
    NATIVE,
    PREFIX,
    Route,
    Routes,
    exclude,
    excluded,
    include,
    misfit,
)

__all__ = ["disable", "enable", "enabled", "explain", "routed", "use_aten_ops"]

_TLS: Final = "transformer_engine_fl.aten"
"""The key of the block in torch's thread-local state, which a backward's threads inherit."""


class _Block:
    """A block in force.

    Attributes:
        routes: the routes of the manager that dispatches.
        only: names of the operators that are routed, or None for all.
        owner: the object that entered it; None for :func:`enable`.
        outer: the block around it.
        thread: the id of the thread that entered it.
        ended: whether it has been left; a copied context may still refer to it then.
        scope: the policy blocks in force at its last call, for the threads of a backward.
    """

    __slots__ = ("ended", "only", "outer", "owner", "routes", "scope", "thread")

    def __init__(
        self,
        routes: Routes,
        only: frozenset[str] | None,
        owner: use_aten_ops | None,
        outer: _Block | None,
    ) -> None:
        self.routes = routes
        self.only = only
        self.owner = owner
        self.outer = outer
        self.thread = get_ident()
        self.ended = False
        self.scope: Scope = active_scope()


_active: Final[contextvars.ContextVar[_Block | None]] = contextvars.ContextVar(
    "te_fl_aten", default=None
)


def _current() -> _Block | None:
    """The innermost block that applies here.

    asyncio.to_thread and tasks copy the context: the copy may be used in another thread, and the
    block may have ended since.
    """
    return _holding(_active.get())


def _holding(block: _Block | None) -> _Block | None:
    while block is not None and (block.ended or block.thread != get_ident()):
        block = block.outer
    return block


_sharing: Final = ForkSafeLock()
"""Held while the entered blocks of a shared ``use_aten_ops`` object are read or changed."""


class _Depth(threading.local):
    """The number of blocks entered in this thread, including those of other tasks on it."""

    value = 0


_depth: Final = _Depth()


class _Installed:
    routes: Routes | None = None


def _routes() -> Routes:
    """The default manager's routes, made when first needed."""
    manager = get_default_manager()
    routes = _Installed.routes
    if routes is None or routes.manager is not manager:
        with LOADING:
            routes = _Installed.routes
            if routes is None or routes.manager is not manager:  # another thread was first
                routes = _Installed.routes = Routes(manager, _kernel)
    return routes


@constant
def _refuse() -> None:
    raise ConfigurationError(
        "use_aten_ops inside a compiled function is not supported: put the block around the "
        "call of the function"
    )


class use_aten_ops(DecoratingBlock):  # noqa: N801 - used like the functions of contextlib
    """``with use_aten_ops(): ...``: ATen operators are served by the implementations here.

    An object may be nested, reentered and shared between threads, and decorates functions. A
    generator that is suspended inside a block may be closed in another thread; if the same object
    is entered elsewhere at that time, the generator's first thread stays routed until the object
    has been left everywhere.

    Args:
        operators: names of the operators to route, ``"mm"`` or ``"aten::mm"``; all unless given.

    Raises:
        ConfigurationError: a name is not routed; the error names the nearest.
    """

    __slots__ = ("_entered", "_inside", "_only")

    def __init__(self, *operators: str) -> None:
        self._only = _checked(operators) if operators else None
        self._entered: set[_Block] = set()
        self._inside = 0

    @in_compiled_code(lambda self: _refuse())
    def __enter__(self) -> None:
        block = _enter(self._only, self)
        with _sharing:
            self._entered.add(block)
            self._inside += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        block = _current()
        while block is not None and block.owner is not self:  # a suspended generator's block
            block = _holding(block.outer)
        with _sharing:
            self._inside -= 1
            if block is not None:
                self._entered.discard(block)
            if self._inside < 1:  # any block left belongs to a generator closed in another thread
                for it in self._entered:
                    it.ended = True
                self._entered.clear()
        if block is not None:
            _leave(block)


def _checked(operators: Collection[str]) -> frozenset[str]:
    known = _routes().names
    for name in operators:
        if not isinstance(name, str):
            raise ConfigurationError(
                f"use_aten_ops: {name!r} is not an operator name; pass each name as a separate "
                "argument: use_aten_ops('mm', 'addmm')"
            )
    names = [f"{PREFIX}{name.removeprefix(PREFIX)}" for name in operators]
    for name in names:
        if name not in known:
            # Compared without the prefix, which would make any two names similar.
            close = nearest(name.removeprefix(PREFIX), (it.removeprefix(PREFIX) for it in known))
            hint = f"; did you mean {PREFIX + close!r}?" if close else ""
            raise ConfigurationError(
                f"use_aten_ops: {name!r} is not routed{hint}; "
                "routed() lists the routed ones; a vendor may register any other by its name"
            )
    return frozenset(names)


def _stash_borrows() -> bool:
    """Whether torch stashes a thread's object without taking a reference, but releases one later.

    torch 2.11 does, and 2.13 does not. The object would be freed while it is still in use.
    """
    stashed = object()
    before = sys.getrefcount(stashed)
    torch._C._stash_obj_in_tls(f"{_TLS}.tried", stashed)
    if sys.getrefcount(stashed) > before:
        return False
    _increment_refcount(stashed)
    return True


def _increment_refcount(value: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


_STASH_BORROWS: Final = _stash_borrows()


def _stash(block: _Block | None) -> None:
    """Make the block visible to the threads of backwards that are called from now on."""
    if _STASH_BORROWS:
        _increment_refcount(block)
    torch._C._stash_obj_in_tls(_TLS, block)


def _enter(only: frozenset[str] | None, owner: use_aten_ops | None) -> _Block:
    block = _Block(_routes(), only, owner, _active.get())
    _active.set(block)
    _stash(block)
    _depth.value += 1
    if _depth.value == 1:
        include(BELOW, True)
        include(ABOVE, True)
    return block


def _leave(block: _Block) -> None:
    block.ended = True
    _active.set(_without_ended(_active.get()))
    _stash(_current())
    _depth.value = max(_depth.value - 1, 0)
    if _depth.value == 0:
        include(BELOW, False)
        include(ABOVE, False)


def _without_ended(block: _Block | None) -> _Block | None:
    while block is not None and block.ended:
        block = block.outer
    if block is not None:
        block.outer = _without_ended(block.outer)
    return block


_enabled_block: Final[contextvars.ContextVar[_Block | None]] = contextvars.ContextVar(
    "te_fl_aten_enabled", default=None
)


def enable() -> None:
    """Route in this thread and context from now on, until :func:`disable`; calls do not add up."""
    if _get_enabled_block() is None:
        _enter(None, None)
        _enabled_block.set(_active.get())


def disable() -> None:
    """Undo :func:`enable`. Blocks that were entered after it must have ended.

    Raises:
        ConfigurationError: such a block has not ended.
    """
    block = _get_enabled_block()
    if block is None:
        return
    if _current() is not block:
        raise ConfigurationError("disable(): leave the use_aten_ops block entered since enable()")
    _leave(block)
    _enabled_block.set(None)


def _get_enabled_block() -> _Block | None:
    """The block of :func:`enable`, if it applies here."""
    block = _enabled_block.get()
    return block if _holding(block) is block else None


def enabled() -> bool:
    """Whether ATen operators are routed here."""
    return _current() is not None


def routed() -> tuple[Route, ...]:
    """Every ATen operator that a block routes, with the implementations registered for it."""
    return _routes().listed()


def explain(op_name: str, /, *args: Any, **kwargs: Any) -> Decision:
    """Which implementation would serve this call of an ATen operator, and why others would not."""
    manager, name = prepared(), f"{PREFIX}{op_name.removeprefix(PREFIX)}"
    wrong = misfit(name, args, kwargs) if args or kwargs else None
    if wrong is None:
        decision = manager.explain(name, *args, **kwargs)
        left = _left_to_torch(args, kwargs)
        if left is None:
            return decision
        ours = (impl.impl_id for impl in decision.accepted if impl.impl_id != NATIVE)
        return decision.rejecting(dict.fromkeys(ours, ("tensor", f"not routed: {_kind(left)}")))
    decision = manager.explain(name)  # the call is invalid: no implementation is asked about it
    blamed = {impl.impl_id: ("arguments", wrong) for impl in decision.accepted}
    return decision.rejecting(blamed).with_note("the arguments do not fit torch's schema")


def prepared() -> OpManager:
    """The default manager, with the ATen operators registered."""
    return _routes().manager


# ------------------------------------------------------------------------- in each call


def _kernel(name: str, op: Any, after: Any) -> Callable[..., Any]:
    """The kernel that torch's dispatcher calls for an operator while a thread is routed."""
    redispatch = _redispatcher(op)
    whole = after.has(BELOW)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        block = _current() or _inherited_block()
        if (
            block is None
            or (block.only is not None and name not in block.only)
            or name not in block.routes.names  # routed for an earlier default manager
            or _left_to_torch(args, kwargs) is not None
            or _watched(whole)
        ):
            return redispatch(keyset & after, *args, **kwargs)
        if whole:
            cast = _as_autocast(name, args)
            if cast is None:
                return redispatch(keyset & after, *args, **kwargs)
            args = cast
        exclude(BELOW, True)
        exclude(ABOVE, True)
        try:
            if block.thread == get_ident():
                block.scope = active_scope()
                result = block.routes.manager.call(name, *args, **kwargs)
            else:
                with policy_context(block.scope.overlay):
                    result = block.routes.manager.call(name, *args, **kwargs)
        except AllCandidatesFailedError as error:
            raise _native_error(error) from None
        except NotSupportedError:  # dispatch itself does not fall back during CUDA graph capture
            if effective_policy().policy.strict:
                raise
            return op(*args, **kwargs)
        except TypeError as error:  # the implementation does not take ATen's arguments
            if effective_policy().policy.strict:
                raise
            result = op(*args, **kwargs)  # raises torch's own error if the call itself is wrong
            said = f"does not accept ATen's arguments ({error}); torch's own served the call"
            block.routes.warn(name, args, kwargs, said)
            return result
        finally:
            exclude(BELOW, False)
            exclude(ABOVE, False)
        if whole and _lost_gradient(args, kwargs, result):
            said = "is not differentiable, as a composite must be; torch's own served the call"
            block.routes.warn(name, args, kwargs, said)
            return redispatch(keyset & after, *args, **kwargs)
        return result

    return kernel


def _redispatcher(op: Any) -> Callable[..., Any]:
    """A function that passes a call on to torch as if it had not been routed.

    The dispatcher passes the 1 of ``x + 1`` to a Python kernel as a number, but ``redispatch`` does
    not accept a number in place of a tensor. Calling the operator with our keys excluded does.
    """
    redispatch: Callable[..., Any] = op.redispatch
    if "Scalar" not in op.overloadpacket.overloads():
        return redispatch

    def pass_on(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if all(isinstance(it, Tensor) for it in args):
            return redispatch(keyset, *args, **kwargs)
        kept = {key: excluded(key) for key in (BELOW, ABOVE)}
        for key in kept:
            exclude(key, True)
        try:
            return op(*args, **kwargs)
        finally:
            for key, was in kept.items():
                exclude(key, was)

    return pass_on


def _inherited_block() -> _Block | None:
    """The block of the thread that called the backward which this thread runs."""
    if not torch._C._is_key_in_tls(_TLS):
        return None
    block: _Block | None = torch._C._get_obj_in_tls(_TLS)
    while block is not None and block.ended:  # left in a thread that could not unstash it here
        block = block.outer
    return block if block is not None and block.thread != get_ident() else None


_PLAIN: Final = (Tensor, torch.nn.Parameter)


def _left_to_torch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The first tensor that is not strided, has no data, or is of a subclass but Parameter."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor) and (
            type(value) not in _PLAIN
            or value.layout is not torch.strided
            or value.is_nested
            or value.is_meta
        ):
            return value
        if isinstance(value, list | tuple):
            found = _left_to_torch(tuple(value), {})
            if found is not None:
                return found
    return None


def _kind(tensor: Tensor) -> str:
    """What such a tensor is, in words."""
    if type(tensor) not in _PLAIN:
        return f"{type(tensor).__name__} is a subclass of Tensor"
    if tensor.is_meta or tensor.is_nested:
        return "a meta tensor" if tensor.is_meta else "a nested tensor"
    return f"a tensor with layout {tensor.layout}"


def _watched(whole: bool) -> bool:
    """Whether a mode, ``torch.func`` or ``torch.jit.trace`` must see the operator itself."""
    if torch._C._len_torch_dispatch_stack():
        return True
    return whole and (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def _as_autocast(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The arguments, cast if autocast is on; None where autocasting is left to torch."""
    device = next((it.device.type for it in args if isinstance(it, Tensor)), None)
    if device is None:
        return None
    if not torch._C._is_any_autocast_enabled() or not torch.is_autocast_enabled(device):
        return args
    return autocast(name.removeprefix(PREFIX), args, device)


def _native_error(error: AllCandidatesFailedError) -> BaseException:
    """The error of torch's kernel, if it was tried last and raised; else ``error``."""
    verdicts = error.decision.verdicts if error.decision else ()
    native_failed = any(it.impl.impl_id == NATIVE and it.cause == "failed" for it in verdicts)
    cause = error.__cause__
    return cause if native_failed and cause is not None else error


def _lost_gradient(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """Whether a composite was served by an implementation that is not differentiable."""
    if not torch.is_grad_enabled():
        return False
    wanted = any(isinstance(it, Tensor) and it.requires_grad for it in (*args, *kwargs.values()))
    results = result if isinstance(result, tuple) else (result,)
    return wanted and not any(isinstance(it, Tensor) and it.requires_grad for it in results)
