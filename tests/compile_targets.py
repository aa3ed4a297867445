"""Which of a family's kernels a compile test compiles for which target.

All are for the target whose code tests look at. The others take turns: the same code at other sizes
and types, for which a compiler seldom fails on one target alone, took most of the suite's time. But
each compiles the first case of every kernel, and every case that the looked-at target lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

__all__ = ["in_turn"]

Case = TypeVar("Case", bound=Hashable)


def in_turn(
    target: str,
    cases: Mapping[str, Sequence[Case]],
    looked_at: str,
    kernel: Callable[[Case], Hashable],
) -> list[bool]:
    """Whether each case of a target is compiled for it.

    Args:
        target: for which.
        cases: of every target.
        looked_at: the target for which all are.
        kernel: which kernel a case is of.
    """
    own = cases[target]
    if target == looked_at:
        return [True] * len(own)
    numbers = {case: number for number, case in enumerate(cases[looked_at])}
    have = {name: set(those) for name, those in cases.items() if name != looked_at}
    seen: set[Hashable] = set()
    chosen = []
    for case in own:
        takers = [name for name, those in have.items() if case in those]
        turn = case not in numbers or takers[numbers[case] % len(takers)] == target
        chosen.append(turn or kernel(case) not in seen)
        seen.add(kernel(case))
    return chosen
