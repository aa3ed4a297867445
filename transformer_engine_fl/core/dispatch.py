"""What runs at each call: nothing here builds, logs, locks or reads a setting.

The manager's table maps an operator to a :class:`DispatchEntry`, which holds a callable. That is
the implementation itself where the first candidate does not depend on the tensors; otherwise it is
a :func:`guarded` function, which looks at one tensor's device and dtype and remembers which
candidates follow from them. An implementation that remembers its calls (:class:`Repeats`) checks
its tensors itself. The code that looked up the table tries it first, without the guarded function
in between: one more function is more than a third of the time of a dispatch. A :func:`handle`
does the same, with the operator's own signature. The manager and its plans decide what goes in.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

from transformer_engine_fl.core.policy import ROOT, active_scope

__all__ = [
    "MISS",
    "DispatchEntry",
    "Handle",
    "HandleCell",
    "Repeats",
    "Steps",
    "accept_any_arguments",
    "guarded",
    "handle",
    "settles_failures",
]

Handle = Callable[..., Any]
Failed = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any], Exception], Any]


def settles_failures(fn: Handle) -> Handle:
    """Mark a callable that handles implementations' failures itself; its caller must not."""
    fn.settles_failures = True  # type: ignore[attr-defined]
    return fn


MISS: Final = object()
"""What :attr:`Repeats.last` returns for a call that it does not serve."""


class Repeats:
    """An implementation's short path for calls like its last one: its attribute ``calls``.

    Attributes:
        of: the implementation. A wrapper that copies its attributes is another function, and
            has no short path.
        last: takes the implementation's arguments and serves calls like the last one, all of
            which have tensors of the same devices, dtypes and classes. Returns MISS for others.
        other: serves a call for which ``last`` returned MISS.
    """

    of: Callable[..., Any]
    last: Callable[..., Any]
    other: Callable[..., Any]


class Steps:
    """The candidates for one kind of tensor, with the first one at hand.

    Attributes:
        fn: the first candidate's callable.
        direct: ``fn``, if it takes every call with such tensors and has no :class:`Repeats`.
        repeats: the :class:`Repeats` of ``fn``, if it takes every such call and has one.
        fake: the tensors have no data.
    """

    __slots__ = ("candidates", "direct", "fake", "fn", "repeats")

    def __init__(
        self, fn: Callable[..., Any], simple: bool, fake: bool, candidates: tuple[Any, ...]
    ) -> None:
        self.fn = fn
        self.fake = fake
        self.candidates = candidates
        self.direct: Callable[..., Any] | None = fn if simple else None
        self.repeats: Repeats | None = None
        found = getattr(fn, "calls", None)
        if simple and isinstance(found, Repeats) and found.of is fn:
            self.direct, self.repeats = None, found


class DispatchEntry:
    """How an operator is served.

    A caller tries ``repeats.last`` first if that is ``approved``, and calls ``fn`` otherwise.

    Attributes:
        fn: serves any call.
        repeats: the short path of the implementation that served last; None if it has none.
        approved: the ``repeats.last`` that served a call after ``fn`` had looked at its tensor.
            It serves no call for which that look would choose another implementation.
        failed: ``failed(repeats, args, kwargs, error)``, for when ``approved`` has raised
            ``error``: recovers or raises; MISS if its implementation would not get the call.
        missed: ``missed(approved, args, kwargs)``, for when ``approved`` returned MISS: serves
            the call.
    """

    __slots__ = ("approved", "failed", "fn", "missed", "repeats")

    failed: Callable[[Repeats, tuple[Any, ...], dict[str, Any], Exception], Any]
    missed: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.repeats: Repeats | None = None
        self.approved: Callable[..., Any] | None = None


def guarded(
    key: Callable[[Any], Any],
    place: int,
    find: Callable[..., Steps],
    serve: Callable[..., Any],
) -> DispatchEntry:
    """Serve by the dispatch tensor's device and dtype.

    Args:
        key: cheap hashable key of a tensor; AttributeError for anything else.
        place: position of the dispatch tensor among the positional arguments.
        find: ``find(args, kwargs, memo)``: the steps for a kind of tensor not seen yet.
        serve: ``serve(steps, args, kwargs, error)``: tries the candidates in order; ``error``
            is what the first has already raised, or None.
    """
    memo: dict[Any, Steps] = {}

    # A closure, because calling an object through __call__ costs a quarter more.
    @settles_failures
    def choose(*args: Any, **kwargs: Any) -> Any:
        try:
            steps = memo[key(args[place])]
        except (LookupError, AttributeError, TypeError):
            steps = find(args, kwargs, memo)
        direct = steps.direct
        if direct is not None:
            try:
                return direct(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - judged by the rules of recovery.py
                return serve(steps, args, kwargs, error)
        own = steps.repeats
        if own is not None:
            try:
                last = own.last
                found = last(*args, **kwargs)
                if found is not MISS:
                    served.repeats, served.approved = own, last
                    return found
                return own.other(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - judged by the rules of recovery.py
                return serve(steps, args, kwargs, error)
        return serve(steps, args, kwargs, None)

    def failed(
        repeats: Repeats, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
    ) -> Any:
        try:
            steps = find(args, kwargs, memo)
            # If another implementation serves this call, this one has not failed: it ran nothing.
            return serve(steps, args, kwargs, error) if steps.repeats is repeats else MISS
        finally:
            del error  # its traceback has this frame: the cycle would keep the call's tensors

    def missed(approved: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            steps = memo[key(args[place])]
        except (LookupError, AttributeError, TypeError):
            steps = find(args, kwargs, memo)
        own = steps.repeats
        if own is None or own.last is not approved:
            return choose(*args, **kwargs)
        try:
            return own.other(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - judged by the rules of recovery.py
            return serve(steps, args, kwargs, error)

    served = DispatchEntry(choose)
    served.failed, served.missed = failed, missed
    return served


class HandleCell:
    """Holds how the calls of a bound handle are served outside every ``with`` block."""

    __slots__ = ("served", "unbuilt")

    def __init__(self, unbuilt: Handle) -> None:
        self.unbuilt = DispatchEntry(unbuilt)
        self.served = self.unbuilt


_TEMPLATE = """\
def {name}({parameters}):
    if _te_fl_active_scope() is _te_fl_ROOT:
        _te_fl_served = _te_fl_cell.served
    else:
        _te_fl_served = _te_fl_scoped()
    _te_fl_repeats = _te_fl_served.repeats
    if (
        _te_fl_repeats is not None
        and (_te_fl_last := _te_fl_repeats.last) is _te_fl_served.approved
    ):
        try:
            _te_fl_found = _te_fl_last({arguments})
        except Exception as _te_fl_error:
            _te_fl_found = _te_fl_served.failed(
                _te_fl_repeats, ({positional}), {{{named}}}, _te_fl_error
            )
        if _te_fl_found is not _te_fl_MISS:
            return _te_fl_found
        return _te_fl_served.missed(_te_fl_last, ({positional}), {{{named}}})
    _te_fl_fn = _te_fl_served.fn
    try:
        return _te_fl_fn({arguments})
    except Exception as _te_fl_error:
        return _te_fl_failed(_te_fl_fn, ({positional}), {{{named}}}, _te_fl_error)
"""
"""Its own names have a prefix that no parameter's name has."""


def handle(
    name: str,
    signature: inspect.Signature,
    cell: HandleCell,
    scoped: Callable[[], DispatchEntry],
    failed: Failed,
) -> FunctionType:
    """Make a function with ``signature`` that calls what ``cell`` holds.

    A generated function passes its arguments by position and name without packing
    them, which costs a fraction of a ``*args, **kwargs`` wrapper.
    """
    namespace: dict[str, Any] = {
        "_te_fl_active_scope": active_scope,
        "_te_fl_ROOT": ROOT,
        "_te_fl_cell": cell,
        "_te_fl_scoped": scoped,
        "_te_fl_failed": failed,
        "_te_fl_MISS": MISS,
    }
    return _generated(name, signature, namespace)


_ANY_SIGNATURE: Final = inspect.signature(lambda *args, **kwargs: None)


def accept_any_arguments(made: FunctionType) -> None:
    """Make a handle pass on only what it is given, as its signature may not hold any more."""
    made.__code__ = _generated(made.__name__, _ANY_SIGNATURE, {}).__code__


def _generated(name: str, signature: inspect.Signature, namespace: dict[str, Any]) -> FunctionType:
    """The function of a handle, whose globals are ``namespace``."""
    parameters, positional, named = [], [], []
    starred = False
    only = sum(it.kind is it.POSITIONAL_ONLY for it in signature.parameters.values())
    for parameter in signature.parameters.values():
        text = parameter.name
        if parameter.kind is parameter.VAR_POSITIONAL:
            text, starred = f"*{text}", True
        elif parameter.kind is parameter.VAR_KEYWORD:
            text = f"**{text}"
        elif parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parameters.append("*")
            starred = True
        if parameter.default is not parameter.empty:
            namespace[f"_te_fl_default_{parameter.name}"] = parameter.default
            text += f"=_te_fl_default_{parameter.name}"
        parameters.append(text)
        if len(parameters) == only:
            parameters.append("/")
        if parameter.kind is parameter.KEYWORD_ONLY:
            named.append(parameter.name)
        elif parameter.kind is parameter.VAR_KEYWORD:
            named.append(f"**{parameter.name}")
        else:
            positional.append(text.partition("=")[0])
    by_name = [it if it.startswith("**") else f"{it}={it}" for it in named]
    if not name.isidentifier() or keyword.iskeyword(name):
        name = "operator"
    source = _TEMPLATE.format(
        name=name,
        parameters=", ".join(parameters),
        arguments=", ".join([*positional, *by_name]),
        positional="".join(f"{it}, " for it in positional),
        named=", ".join(it if it.startswith("**") else f"{it!r}: {it}" for it in named),
    )
    exec(compile(source, f"<handle of {name}>", "exec"), namespace)
    made: FunctionType = namespace[name]
    return made
