"""Monitors: callbacks that see each operator call served, and cannot end it.

A call must come out as if no monitor were set. So a monitor's own error is logged once and the
call goes on, as with a handler of ``logging``; and operators that a monitor calls are not
reported, as with ``sys.settrace``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from transformer_engine_fl.core.blame import error_details
from transformer_engine_fl.core.log import logger
from transformer_engine_fl.core.types import OpImpl

__all__ = ["ActiveMonitor", "Monitor"]

Monitor = Callable[[str, OpImpl], object]
"""Called with the operator and the implementation after each operator served."""


class _MonitorState(threading.local):
    """Whether a monitor runs in this thread."""

    active = False


_monitor_state: Final = _MonitorState()


class ActiveMonitor:
    """A monitor that is set; one that is set twice has two of these."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._warned = False

    def notify(self, op_name: str, impl: OpImpl) -> None:
        """Call the monitor, unless the operator was itself called by a monitor."""
        if _monitor_state.active:
            return
        _monitor_state.active = True
        try:
            self._monitor(op_name, impl)
        except Exception as error:  # noqa: BLE001 - the monitor's own; the call was served
            self._warn(op_name, impl, error)
        finally:
            _monitor_state.active = False

    def _warn(self, op_name: str, impl: OpImpl, error: Exception) -> None:
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "a monitor raised an exception (%s) after %r served %r; the call is unaffected. The "
            "monitor stays active; its further exceptions are not logged",
            error_details(error),
            impl.impl_id,
            op_name,
        )
