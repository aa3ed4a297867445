"""What torch.compile traces instead of the eager dispatch.

Dynamo follows a function's ``_torchdynamo_inline`` attribute in place of its body, so
the eager path pays nothing for it. The functions here import the traced dispatch from
``ops``, late, so that core itself does not need torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from transformer_engine_fl.core.errors import ConfigurationError
from transformer_engine_fl.core.late import load_attribute

__all__ = [
    "constant",
    "forget_default_manager",
    "in_compiled_code",
    "refuse_block",
    "traced_call",
    "traced_default_call",
    "traced_default_manager",
    "traced_pin",
]

TRACED_CALL: Final = "transformer_engine_fl.ops._tracing:traced_call"
"""Where the traced dispatch is: named, not imported, because it builds on core."""

DEFAULT_MANAGER: Final = "transformer_engine_fl.core.manager:get_default_manager"

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(fn: Function) -> Function:
    """Mark a function that Dynamo runs while it traces, taking the result as a constant.

    The result must be plain (a number, text, a tuple of them): anything else could not
    be guarded. Other objects are stored as attributes of an object that the trace then reads.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def in_compiled_code(traced: Callable[..., Any]) -> Callable[[Function], Function]:
    """Decorate an eager function with the one that compiled code uses in its place."""

    def decorate(eager: Function) -> Function:
        eager._torchdynamo_inline = traced  # type: ignore[attr-defined]
        return eager

    return decorate


class _LateImports:
    """What is imported late, for the trace to read."""

    call: Callable[..., Any]
    default_manager: Any = None


_LATE_IMPORTS: Final = _LateImports()


@constant
def _fetch() -> None:
    _LATE_IMPORTS.call = load_attribute(TRACED_CALL)


def traced_call(manager: Any, op_name: str, /, *args: Any, **kwargs: Any) -> Any:
    """``manager.call`` in compiled code."""
    _fetch()
    return _LATE_IMPORTS.call(manager, op_name, args, kwargs)


@constant
def _fetch_default_manager() -> None:
    _LATE_IMPORTS.default_manager = load_attribute(DEFAULT_MANAGER)()


def forget_default_manager() -> None:
    """Forget the default manager, which is another one from now on; compiled code notices."""
    _LATE_IMPORTS.default_manager = None


def traced_default_manager() -> Any:
    """``get_default_manager()`` in compiled code."""
    _fetch_default_manager()
    return _LATE_IMPORTS.default_manager


def traced_default_call(op_name: str, /, *args: Any, **kwargs: Any) -> Any:
    """A call through the default manager in compiled code."""
    return traced_call(traced_default_manager(), op_name, *args, **kwargs)


def traced_pin(manager: Any, op_name: str) -> Callable[..., Any]:
    """``manager.pin`` in compiled code, where forward and backward are traced together."""

    def pinned(*args: Any, **kwargs: Any) -> Any:
        return traced_call(manager, op_name, *args, **kwargs)

    return pinned


@constant
def refuse_block() -> None:
    """Refuse a policy block that compiled code enters.

    Raises:
        ConfigurationError: always.
    """
    raise ConfigurationError(
        "a policy block inside a compiled function is not supported: the policy is a "
        "constant of the compiled code; put the block around the call of the function"
    )
