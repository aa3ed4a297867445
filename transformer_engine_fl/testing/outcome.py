"""What a case comes to: a pass, a decline with its reason, or a ConformanceError."""

from __future__ import annotations

from dataclasses import dataclass

from transformer_engine_fl.testing.comparison import Worst

__all__ = ["PASSED", "ConformanceError", "Outcome"]


class ConformanceError(AssertionError):
    """An implementation does not keep the contract.

    Attributes:
        worst: the error of the values, if that is what is wrong.
    """

    def __init__(self, message: str, worst: Worst | None = None) -> None:
        super().__init__(message)
        self.worst = worst


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case ended that did not fail.

    Attributes:
        worst: the largest error, where values were compared.
        declined: why the implementation did not take the sample, so that nothing was
            checked; None if it was.
    """

    worst: Worst | None = None
    declined: str | None = None


PASSED = Outcome()
