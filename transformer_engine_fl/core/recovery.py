"""What may happen after an implementation fails: the rules, and the quarantine.

The order of the rules makes the framework safe: nothing may run a second time on data
that a first run has changed, and a mistake of the caller is never blamed on an
implementation. This module decides; plan.py acts.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformer_engine_fl.core.blame import out_of_stack
from transformer_engine_fl.core.errors import (
    ArgumentError,
    ConfigurationError,
    NotStartedError,
    NotSupportedError,
)
from transformer_engine_fl.core.locks import ForkSafeLock

__all__ = ["Outcome", "Quarantine", "QuarantineKey", "judge"]


class Outcome(enum.Enum):
    """What follows from a failure."""

    RAISE = "raise it unchanged"
    WRONG_ARGUMENTS = "the caller's mistake"
    DECLINED = "not these arguments: the next candidate"
    HALF_WRITTEN = "arguments may be half written: nothing else may run"
    FAILED = "the next candidate, and quarantine"


def judge(
    error: Exception,
    *,
    is_fatal: Callable[[Exception], bool],
    check_arguments: Callable[[], ArgumentError | None],
    no_fallback: Callable[[], str | None],
    mutates: bool,
) -> tuple[Outcome, ArgumentError | None]:
    """Apply the rules in their order.

    Args:
        error: what the implementation raised.
        is_fatal: whether the device is lost or memory ran out.
        check_arguments: the contract's verdict on the call.
        no_fallback: why nothing may fall back now (capture, tracing), or None.
        mutates: the operator writes its arguments.

    Returns:
        The outcome, and for WRONG_ARGUMENTS the error to raise.
    """
    if is_fatal(error) or isinstance(error, ConfigurationError) or out_of_stack(error):
        # The user must correct a wrong setting; a fallback would hide the error.
        # The same holds for a stack that was nearly full before the call.
        return Outcome.RAISE, None
    wrong = check_arguments()
    if wrong is not None:
        return Outcome.WRONG_ARGUMENTS, wrong
    if no_fallback() is not None:
        return Outcome.RAISE, None
    if isinstance(error, NotSupportedError):
        return Outcome.DECLINED, None
    written = mutates and not isinstance(error, NotStartedError)
    return (Outcome.HALF_WRITTEN if written else Outcome.FAILED), None


@dataclass(frozen=True, slots=True)
class QuarantineKey:
    """What is in quarantine: one implementation of one operator for one device and dtype."""

    op_name: str
    impl_id: str
    device: str | None
    dtype: str | None


class Quarantine:
    """Implementations that are not used after a fault, each with the reason as text."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._held: Mapping[QuarantineKey, str] = {}

    def add(self, key: QuarantineKey, reason: str) -> bool:
        """Add an entry; returns whether it is new."""
        with self._lock:
            new = key not in self._held
            self._held = {**self._held, key: reason}
            return new

    def clear(self, operators: frozenset[str] | None = None) -> None:
        """Remove the entries of these operators (of all unless given)."""
        with self._lock:
            self._held = {
                key: reason
                for key, reason in self._held.items()
                if operators is not None and key.op_name not in operators
            }

    def held(self) -> Mapping[QuarantineKey, str]:
        """Every entry."""
        return self._held

    def concerns(self, op_name: str) -> bool:
        """Whether an operator has an entry."""
        return any(key.op_name == op_name for key in self._held)

    def reasons(self, op_name: str, device: str | None, dtype: str | None) -> Mapping[str, str]:
        """impl id -> reason, for one operator, device and dtype."""
        return {
            key.impl_id: reason
            for key, reason in self._held.items()
            if (key.op_name, key.device, key.dtype) == (op_name, device, dtype)
        }
