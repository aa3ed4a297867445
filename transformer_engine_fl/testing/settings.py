"""torch's global settings, which no call may leave changed.

A change would affect whatever the program does next: gradients are off, new tensors have
another dtype, dropout is the same at each step. Here a change is reported, and undone for the
cases that follow.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from transformer_engine_fl.testing.machine import device_types
from transformer_engine_fl.testing.outcome import ConformanceError

__all__ = ["settings_unchanged"]


@contextlib.contextmanager
def settings_unchanged() -> Iterator[None]:
    """A block that ends with torch's settings as they were.

    Raises:
        ConformanceError: the block has changed some; names them.
    """
    before = {name: ask() for name, (ask, _) in _SETTINGS.items()}
    generators = [(name, it, it.get_state()) for name, it in _generators()]
    raised: BaseException | None = None
    try:
        yield
    except BaseException as error:
        raised = error
        raise
    finally:
        changed = []
        for name, (ask, put) in _SETTINGS.items():
            after = ask()
            if after != before[name]:
                changed.append(f"{name} ({_shown(before[name])} before, now {_shown(after)})")
                put(before[name])
        for name, it, state in generators:
            if _content(it.get_state()) != _content(state):
                changed.append(f"the state of {name}, which operators must not use")
                it.set_state(state)
        if changed and (raised is None or isinstance(raised, Exception)):
            raise ConformanceError(f"did not restore: {'; '.join(changed)}") from raised


def _generators() -> Iterator[tuple[str, torch.Generator]]:
    """torch's default generators; none during CUDA graph capture, which may not read them."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if started and torch.cuda.is_current_stream_capturing():
        return
    yield "torch's default generator", torch.default_generator
    for kind in _kinds():
        for it in getattr(getattr(torch, kind, None), "default_generators", ()):
            yield f"the default generator of {it.device}", it


@functools.cache
def _kinds() -> tuple[str, ...]:
    """The types of device here, cached because each call needs them."""
    return device_types()


def _content(state: torch.Tensor) -> bytes:
    """Its bytes, read without torch: under some modes tensors' data cannot be compared."""
    return ctypes.string_at(state.data_ptr(), state.numel())


def _autocast() -> dict[str, torch.dtype | None]:
    return {
        kind: torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in _kinds()
        if torch.amp.is_autocast_available(kind)
    }


def _put_autocast(before: dict[str, torch.dtype | None]) -> None:
    for kind, dtype in before.items():
        torch.set_autocast_enabled(kind, dtype is not None)
        if dtype is not None:
            torch.set_autocast_dtype(kind, dtype)


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


_CPU: Final = torch.device("cpu")

_SETTINGS: Final[dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]] = {
    "whether gradients are recorded": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (
        torch.get_default_device,
        lambda it: torch.set_default_device(None if it == _CPU else it),
    ),
    "use_deterministic_algorithms": (
        _deterministic,
        lambda it: torch.use_deterministic_algorithms(it[0], warn_only=it[1]),
    ),
    "autocast": (_autocast, _put_autocast),
}
"""Name -> (how the setting is read, how it is set)."""


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{kind} {dtype or 'off'}" for kind, dtype in value.items())
    if isinstance(value, tuple):
        return f"{value[0]}{', warning only' if value[1] else ''}"
    return str(value)
