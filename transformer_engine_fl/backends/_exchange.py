"""Slots in global memory through which concurrent programs exchange the partial sums of a row.

A slot is 8 bytes: the lower half holds a 4-byte partial sum, the upper half the number of the epoch
in which it was posted, as in NCCL's LL protocol. A reader sees from the slot itself whether it has
been written, so no launch clears slots: each launch uses epochs that no earlier one used. Slots
belong to a stream, where a launch ends before the next begins. A launch captured into a CUDA graph
may run beside anything, and repeatedly: it gets slots of its own, which the graph clears.

Each row of a group of programs is an epoch. A program posts epoch e only after it has waited for
epoch e - 2. By then all programs have posted epoch e - 2, and so have waited for e - 4: with
:data:`EPOCHS` sets of slots in rotation, no program overwrites a slot that another still reads.
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
"""Sets of slots in rotation: epoch e uses set e % EPOCHS."""
SUMS: Final = 2
"""Partial sums that a program posts in an epoch, at most."""
MIN_SLOTS: Final = 2**15
"""Slots that a stream gets at first; more than the programs of most devices need."""
LAST_EPOCH: Final = 2**31 - 1
"""The largest epoch: kernels may number epochs in signed 32-bit integers."""
FIRST_EPOCH: Final = Address(16)
"""Placeholder for the first epoch in a launch that is recorded to be repeated."""
SLOTS: Final = Address(32)
"""Placeholder for the address of its slots, with the same alignment."""


@dataclass(slots=True)
class _Slots:
    """A stream's slots, and the first epoch that no launch has used."""

    memory: Tensor
    next_epoch: int = 1


_slots_by_stream: dict[tuple[torch.device, int], _Slots] = {}
_lock = ForkSafeLock()


def slots_for(device: torch.device, programs: int, epochs: int) -> tuple[int, Tensor]:
    """Slots for a launch on the current stream of a device.

    Args:
        device: where the kernel runs; the CPU if it is emulated.
        programs: programs in the grid, all of which post.
        epochs: epochs that each program posts, at most.

    Returns:
        The first epoch, and the slots of 8 bytes: ``[groups, EPOCHS, programs of a group, sums of
        a program]``, flat.
    """
    count = programs * EPOCHS * SUMS
    stream = keeping_stream(device)
    if stream is None:
        with _disable_current_modes():
            return 1, _zeros(count, device)
    key = device, stream
    with _lock:
        slots = _slots_by_stream.get(key)
        if slots is None or slots.memory.numel() < count or slots.next_epoch + epochs > LAST_EPOCH:
            if slots is not None and device.type == "cuda":
                slots.memory.record_stream(torch.cuda.current_stream(device))
            slots = _slots_by_stream[key] = _Slots(_persistent_zeros(max(count, MIN_SLOTS), device))
        first = slots.next_epoch
        slots.next_epoch += epochs
        return first, slots.memory


def _persistent_zeros(count: int, device: torch.device) -> Tensor:
    """Zeros that stay valid: allocated in another thread, outside this thread's modes and
    transforms, and on another stream, outside any memory pool that this thread or its stream
    allocates from, such as the pool of a graph that is about to be captured.
    """

    def on_side_stream() -> tuple[Tensor, torch.cuda.Event]:
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            return _zeros(count, device), side.record_event()

    if device.type != "cuda":
        return _run_in_thread(lambda: _zeros(count, device))
    slots, ready = _run_in_thread(on_side_stream)
    torch.cuda.current_stream(device).wait_event(ready)
    return slots


def _run_in_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in a new thread; returns its result or raises its exception.

    Not in an executor, which starts no more threads once the main thread has ended.
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
    name: Callable[[Any], str], slots: Callable[[int, int], tuple[int, Tensor]], *arguments: int
) -> tuple[Callable[[Any], str], str]:
    """How generated code that repeats a launch gets new epochs each time, see ``_repeats.note``.

    Args:
        name: gives the expression for a value in the generated code.
        slots: a function that returns the first epoch and the slots.
        arguments: the arguments of ``slots``.

    Returns:
        ``name`` extended to :data:`FIRST_EPOCH` and :data:`SLOTS`, and the statement that calls
        ``slots``, which goes before the launch.
    """

    def named(value: Any) -> str:
        if value is FIRST_EPOCH:
            return "_its_first"
        return "_its_slots.data_ptr()" if value is SLOTS else name(value)

    numbers = ", ".join(map(name, arguments))
    return named, f"_its_first, _its_slots = {name(slots)}({numbers})"
