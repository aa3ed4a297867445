"""Commands that share their work among processes."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["ended_together"]


@contextlib.contextmanager
def ended_together() -> Iterator[None]:
    """Within the block a SIGTERM unwinds the program, which ends the processes it has started.

    Otherwise it would end at once and leave them running.
    """

    def leave(*_: Any) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
