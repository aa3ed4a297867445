"""The memory in which programs that share a row, and run at once, exchange its sums.

A slot is 8 bytes: a sum of 4, and in the upper half the epoch that it is of. So it says by itself
that it is there, and nobody clears slots for a launch: each gets epochs that none before it had.
They are those of one stream, where one launch has ended before the next begins. What becomes part
of a CUDA graph may run beside anything, and again: it has memory of its own there, which the graph
clears.

A group of programs takes its rows one after the other, and nobody posts an epoch before it has
waited for the one before the last. All have posted that one by then, and so have waited for the
one two before it: of :data:`EPOCHS` in a row nobody writes a slot that somebody still waits for.
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

__all__ = ["EPOCHS", "FIRST_EPOCH", "SLOTS", "repeated_exchange", "slots_for"]

T = TypeVar("T")

EPOCHS: Final = 4
"""Epochs whose slots have places of their own."""
SUMS: Final = 2
"""Of an epoch, that a program posts, at most."""
FEWEST: Final = 2**15
"""Slots of a stream at first; more than the programs of most devices need."""
LAST_EPOCH: Final = 2**31 - 1
"""The last epoch that a slot may be of: what numbers them may be signed."""
FIRST_EPOCH: Final = Address(16)
"""Stands for the first epoch of a launch that is repeated."""
SLOTS: Final = Address(32)
"""Stands for the address of its slots, as aligned as theirs."""


@dataclass(slots=True)
class _Slots:
    """Those of a stream, and the first epoch that nobody has had."""

    memory: Tensor
    next_epoch: int = 1


_of_streams: dict[tuple[torch.device, int], _Slots] = {}
_lock = ForkSafeLock()


def slots_for(device: torch.device, programs: int, epochs: int) -> tuple[int, Tensor]:
    """Slots for a launch on the current stream of a device.

    Args:
        device: where the kernel runs; the CPU for one that is emulated.
        programs: of its grid, all of which post.
        epochs: that each of them posts, at most.

    Returns:
        The number of the first epoch, and the slots, 8 bytes each: those of a group follow each
        other, of EPOCHS epochs, of its programs, of each one's sums.
    """
    count = programs * EPOCHS * SUMS
    stream = keeping_stream(device)
    if stream is None:
        with _disable_current_modes():
            return 1, _zeros(count, device)
    key = device, stream
    with _lock:
        slots = _of_streams.get(key)
        if slots is None or slots.memory.numel() < count or slots.next_epoch + epochs > LAST_EPOCH:
            if slots is not None and device.type == "cuda":
                slots.memory.record_stream(torch.cuda.current_stream(device))
            slots = _of_streams[key] = _Slots(_kept(max(count, FEWEST), device))
        first = slots.next_epoch
        slots.next_epoch += epochs
        return first, slots.memory


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
    slots, ready = _by_a_thread(on_stream_of_its_own)
    torch.cuda.current_stream(device).wait_event(ready)
    return slots


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


def repeated_exchange(
    name: Callable[[Any], str], slots: Callable[[int, int], tuple[int, Tensor]], *asked: int
) -> tuple[Callable[[Any], str], str]:
    """How a launch that exchanges sums is written into what repeats it, see ``_repeats.note``.

    Args:
        name: how a value is written there.
        slots: gives the first epoch and the slots.
        asked: what it is called with.

    Returns:
        How values are written then, :data:`FIRST_EPOCH` and :data:`SLOTS` among them, and the line
        before the launch.
    """

    def named(value: Any) -> str:
        if value is FIRST_EPOCH:
            return "_its_first"
        return "_its_slots.data_ptr()" if value is SLOTS else name(value)

    numbers = ", ".join(map(name, asked))
    return named, f"_its_first, _its_slots = {name(slots)}({numbers})"
