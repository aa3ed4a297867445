"""Makes Triton's interpreter faster: it patches ``triton.language`` once per launch.

The interpreter replaces functions of ``triton.language`` at a launch and restores them afterwards.
It also searches for the functions to replace at each call of a function within the kernel, when
all are replaced already; this takes half of an interpreted test's time or more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Nothing:
    """A patch scope with nothing to restore."""

    def restore(self) -> None:
        pass


class _OncePerLaunch:
    """Stands in for ``_patch_lang(function)``, which patches what a function's module imports."""

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
        if not seen <= done:  # Triton does not restore what a call within a kernel has patched
            self.patch(function)
            done |= seen
        return _Nothing()

    @staticmethod
    def _modules(function: Any) -> set[int]:
        import triton.language as tl

        return {id(it) for it in function.__globals__.values() if it is tl or it is tl.core}


def replace_once_per_launch() -> None:
    """Patch once per launch from now on in this process, if Triton has ``_patch_lang``."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if hasattr(interpreter, "_patch_lang"):
        interpreter._patch_lang = _OncePerLaunch(interpreter._patch_lang)


@contextmanager
def as_triton_does() -> Iterator[None]:
    """Within the block, Triton's interpreter patches as it does by itself."""
    from triton.runtime import interpreter

    ours = interpreter._patch_lang
    interpreter._patch_lang = getattr(ours, "patch", ours)
    try:
        yield
    finally:
        interpreter._patch_lang = ours
