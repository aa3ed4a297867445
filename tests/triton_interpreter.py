"""Triton's interpreter in less time: what it replaces for a launch, it replaces once.

For a launch it puts functions of its own in the places of ``triton.language``'s, and takes
them back afterwards. It looks for those places again at each call of a function within the
kernel, and finds them done: half of an interpreted test's time, and more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Nothing:
    """What there is to take back where nothing was replaced."""

    def restore(self) -> None:
        pass


class _OncePerLaunch:
    """In place of ``_patch_lang(function)``, which replaces what a function's module sees."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self.patch = patch
        self._thread = threading.local()

    def __call__(self, function: Any) -> Any:
        seen = self._modules(function)
        done: set[int] | None = getattr(self._thread, "done", None)
        if done is None:  # a launch
            scope = self.patch(function)
            if hasattr(scope, "restore"):
                self._thread.done = seen
                restore = scope.restore

                def restored() -> None:
                    self._thread.done = None
                    restore()

                scope.restore = restored
            return scope
        if not seen <= done:  # Triton does not take back what a call within a kernel replaced
            self.patch(function)
            done |= seen
        return _Nothing()

    @staticmethod
    def _modules(function: Any) -> set[int]:
        import triton.language as tl

        return {id(it) for it in function.__globals__.values() if it is tl or it is tl.core}


def replace_once_per_launch() -> None:
    """From now on, in this process, if it has a Triton that does so."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if hasattr(interpreter, "_patch_lang"):
        interpreter._patch_lang = _OncePerLaunch(interpreter._patch_lang)


@contextmanager
def as_triton_does() -> Iterator[None]:
    """Within the block, as if this module were not there."""
    from triton.runtime import interpreter

    ours = interpreter._patch_lang
    interpreter._patch_lang = getattr(ours, "patch", ours)
    try:
        yield
    finally:
        interpreter._patch_lang = ours
