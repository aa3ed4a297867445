"""Locks that a forked child can always take.

After a fork only the forking thread exists in the child, so a lock that another
thread held would stay locked for ever. Every shared state of this package is swapped
in whole (nothing is left half written), so the child can simply start with new locks.

Python's own import locks cannot be replaced: in the child, a module that another thread
was importing could never be imported. A fork waits for our imports to end instead.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Final

__all__ = ["LOADING", "ForkSafeLock"]

_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


class ForkSafeLock:
    """A re-entrant lock, renewed in a forked child."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def renew(self) -> None:
        """Replace it if another thread holds it; only for a child that has just been forked."""
        if self._lock.acquire(blocking=False):  # free, or held by this very thread
            self._lock.release()
        else:
            self._lock = threading.RLock()

    def acquire(self, timeout: float) -> bool:
        """Take it, waiting ``timeout`` seconds at most; returns whether it was taken."""
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        """Give it back."""
        self._lock.release()

    @contextlib.contextmanager
    def patiently(self, seconds: float) -> Iterator[None]:
        """Hold it; or go on without it after so many seconds."""
        held = self.acquire(seconds)
        try:
            yield
        finally:
            if held:
                self.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()


LOADING: Final = ForkSafeLock()
"""Held while code is imported late or registers."""

_PATIENCE: Final = 60.0
"""Seconds that a fork waits at most for :data:`LOADING`: its holder may wait for the fork."""


class _Fork(threading.local):
    """What a forking thread keeps from before the fork to after it.

    Attributes:
        waited: the thread holds :data:`LOADING`.
    """

    waited = False


_fork: Final = _Fork()


def _before() -> None:
    _fork.waited = LOADING.acquire(_PATIENCE)


def _after() -> None:
    if _fork.waited:
        _fork.waited = False
        LOADING.release()


def _after_in_child() -> None:
    _after()
    for lock in list(_locks):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after_in_child)
