"""Which of a family's kernels a compile test compiles for which target."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

__all__ = ["in_turn"]


def in_turn(
    kernels: Iterable[Hashable], target: str, targets: Sequence[str], *, every: bool
) -> list[bool]:
    """Whether each case, told by its kernel, is compiled for a target.

    All are for a target that is none of ``targets``, and with ``every``. Otherwise these take
    turns, but the first case of a kernel is compiled for each: the same code at other sizes and
    types, for which a compiler seldom fails on one target alone, takes most of a run.
    """
    seen: set[Hashable] = set()
    chosen = []
    for number, kernel in enumerate(kernels):
        turn = number % len(targets)
        chosen.append(
            every or target not in targets or targets[turn] == target or kernel not in seen
        )
        seen.add(kernel)
    return chosen
