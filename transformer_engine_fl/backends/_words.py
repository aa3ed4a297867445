"""The memory in which programs that share a row, and run at once, tell each other its sums.

A word is 8 bytes: a sum of 4, and in the upper half the turn that it is of. So it says by itself
that it is there, and nobody clears words for a launch: each gets turns that none before it had.
They are those of one stream, where one launch has ended before the next begins. What becomes part
of a CUDA graph may run beside anything, and again: it has memory of its own there, which the graph
clears.

A group of programs takes turns at its rows, and nobody tells of a turn before it has heard the one
before the last. All have told that one by then, and so have heard the one two before it: of
:data:`TURNS` in a row nobody writes a word that somebody still waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from transformer_engine_fl.backends._memory import keeping_stream
from transformer_engine_fl.backends._repeats import Address
from transformer_engine_fl.core.locks import ForkSafeLock

__all__ = ["FIRST_TURN", "TURNS", "WORDS", "telling", "words_of"]

T = TypeVar("T")

TURNS: Final = 4
"""Turns whose words have places of their own."""
SUMS: Final = 2
"""Of a turn, that a program tells, at most."""
FEWEST: Final = 2**15
"""Words of a stream at first; more than the programs of most devices need."""
MOST_TURNS: Final = 2**31 - 1
"""The last turn that a word may be of: what numbers them may be signed."""
FIRST_TURN: Final = Address(16)
"""Stands for the first turn of a launch that is repeated."""
WORDS: Final = Address(32)
"""Stands for the address of its words, as aligned as theirs."""


@dataclass(slots=True)
class _Words:
    """Those of a stream, and the first turn that nobody has had."""

    memory: Tensor
    turn: int = 1


_of_streams: dict[tuple[torch.device, int], _Words] = {}
_lock = ForkSafeLock()


def words_of(device: torch.device, programs: int, turns: int) -> tuple[int, Tensor]:
    """Words for a launch on the current stream of a device.

    Args:
        device: where the kernel runs; the CPU for one that is emulated.
        programs: of its grid, all of which tell.
        turns: that each of them tells of, at most.

    Returns:
        The number of the first turn, and the words, 8 bytes each: those of a group follow each
        other, of TURNS turns, of its programs, of each one's sums.
    """
    count = programs * TURNS * SUMS
    stream = keeping_stream(device)
    if stream is None:
        with _disable_current_modes():
            return 1, _zeros(count, device)
    key = device, stream
    with _lock:
        words = _of_streams.get(key)
        if words is None or words.memory.numel() < count or words.turn + turns > MOST_TURNS:
            if words is not None and device.type == "cuda":
                words.memory.record_stream(torch.cuda.current_stream(device))
            words = _of_streams[key] = _Words(_kept(max(count, FEWEST), device))
        first = words.turn
        words.turn += turns
        return first, words.memory


def _kept(count: int, device: torch.device) -> Tensor:
    """Zeros for good: neither a mode nor a transform of this thread has made them, and no pool that
    it, or its stream, allocates from just now has them, as that of a graph which is yet to come.
    """

    def on_stream_of_its_own() -> tuple[Tensor, torch.cuda.Event]:
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            return _zeros(count, device), side.record_event()

    if device.type != "cuda":
        return _by_a_thread(lambda: _zeros(count, device))
    words, ready = _by_a_thread(on_stream_of_its_own)
    torch.cuda.current_stream(device).wait_event(ready)
    return words


def _by_a_thread(work: Callable[[], T]) -> T:
    """What it gives, or raises, in a thread of its own.

    An executor's threads start no more once the main thread has ended, while others go on.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller raises it
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return done.result()


def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int64, device=device)


def telling(
    name: Callable[[Any], str], words: Callable[[int, int], tuple[int, Tensor]], *asked: int
) -> tuple[Callable[[Any], str], str]:
    """How a launch that tells is written into what repeats it, see ``_repeats.note``.

    Args:
        name: how a value is written there.
        words: gives the first turn and the words.
        asked: what it is called with.

    Returns:
        How values are written then, :data:`FIRST_TURN` and :data:`WORDS` among them, and the line
        before the launch.
    """

    def named(value: Any) -> str:
        if value is FIRST_TURN:
            return "_its_first"
        return "_its_words.data_ptr()" if value is WORDS else name(value)

    numbers = ", ".join(map(name, asked))
    return named, f"_its_first, _its_words = {name(words)}({numbers})"
