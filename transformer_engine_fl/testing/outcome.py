"""The result of a case: a pass, a decline with its reason, or a ConformanceError."""

from __future__ import annotations

from dataclasses import dataclass

from transformer_engine_fl.testing.comparison import Worst

__all__ = ["PASSED", "ConformanceError", "Outcome"]


class ConformanceError(AssertionError):
    """An implementation breaks the contract.

    Attributes:
        worst: the error of the values, if they are wrong.
    """

    def __init__(self, message: str, worst: Worst | None = None) -> None:
        super().__init__(message)
        self.worst = worst


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a case that did not fail.

    Attributes:
        worst: the largest error, where values were compared.
        declined: why the implementation did not take the sample, so that nothing was
            checked; None if it was checked.
    """

    worst: Worst | None = None
    declined: str | None = None


PASSED = Outcome()
