"""The same training on several implementation sets: do their losses agree?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformer_engine_fl.cli.demo.sets import ImplSet
from transformer_engine_fl.cli.demo.training import Run
from transformer_engine_fl.core.errors import TeFlError
from transformer_engine_fl.core.policy import policy_context

__all__ = ["TOLERANCE", "Outcome", "agree", "differences", "run_set", "tolerance"]

TOLERANCE = 1e-5
"""Largest relative difference of two losses during the first steps, in float32.

Correct implementations differ by rounding, about 1e-7 of a loss; a gradient that is wrong by
a hundredth shows as 1e-4.
"""

_FIRST_STEPS = 20


def tolerance(step: int) -> float:
    """The largest relative difference at a step: training amplifies differences in rounding."""
    return TOLERANCE * max(1.0, step / _FIRST_STEPS) ** 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one set.

    Attributes:
        impl_set: the set.
        run: its training, if it ran to the end.
        lacking: why the set cannot run on this machine.
        failed: why it did not run to the end, or did not serve.
    """

    impl_set: ImplSet
    run: Run | None = None
    lacking: str | None = None
    failed: str | None = None

    @property
    def status(self) -> str:
        """In a word."""
        return "lacking" if self.lacking else "failed" if self.failed else "ran"

    @property
    def others(self) -> dict[str, str]:
        """Operators that another implementation served, and which."""
        served = self.run.served if self.run else ()
        return {it.op: it.impl.impl_id for it in served if not self.impl_set.holds(it.impl)}


def run_set(impl_set: ImplSet, train: Callable[[], Run]) -> Outcome:
    """Train on one set in strict mode: no other implementation steps in where it fails."""
    try:
        with policy_context(impl_set.policy):
            run = train()
    except TeFlError as error:
        return Outcome(impl_set, failed=str(error))
    if not any(impl_set.holds(served.impl) for served in run.served):
        others = ", ".join(sorted({served.impl.impl_id for served in run.served}))
        return Outcome(impl_set, run, failed=f"it served no call; {others} served")
    return Outcome(impl_set, run)


def differences(run: Run, other: Run) -> list[float]:
    """Relative differences of the losses: before, at each step, after.

    Infinite where one of them is NaN.
    """
    mine = (run.loss_before, *run.losses, run.loss_after)
    theirs = (other.loss_before, *other.losses, other.loss_after)
    apart = [abs(one - two) / abs(two) for one, two in zip(mine, theirs, strict=True)]
    return [math.inf if math.isnan(it) else it for it in apart]


def agree(outcomes: Sequence[Outcome]) -> bool:
    """Whether two sets or more ran, none failed, and all losses agree with the first set's."""
    runs = [outcome.run for outcome in outcomes if outcome.run is not None]
    return (
        len(runs) >= 2
        and not any(outcome.failed for outcome in outcomes)
        and all(
            apart <= tolerance(step)
            for run in runs[1:]
            for step, apart in enumerate(differences(run, runs[0]))
        )
    )
