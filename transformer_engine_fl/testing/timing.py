"""How long the work of calls takes on a GPU, whatever time the host needs to queue it."""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

__all__ = ["median_ms", "medians_ms"]

_CACHE_BYTES: Final = 2**28
"""More than the L2 cache of any GPU."""

_REHEARSALS: Final = 5
_FEWEST: Final = 5

_sleep: Callable[[int], None] = torch.cuda._sleep
_LEAD: Final = 2.0
"""How long the device waits for the host, in units of the time that the host needs for a call."""


def median_ms(work: Callable[[], Any], warmup: float = 20, rep: float = 80) -> float:
    """Median time of a call on the current GPU, with the L2 cache cleared before each.

    The device waits before each call until the host has queued it. Otherwise a call that takes
    the host longer than the device takes to clear the cache would show the host's time, for
    which a program that keeps its device busy, or replays a CUDA graph, does not wait.

    Args:
        work: the call.
        warmup, rep: milliseconds to spend on calls before timing, and on timed calls.

    Returns:
        Milliseconds between the events recorded before and after the call on its stream.
    """
    return medians_ms([work], warmup, rep)[0]


def medians_ms(
    works: Sequence[Callable[[], Any]], warmup: float = 20, rep: float = 80
) -> list[float]:
    """Median times of several calls that are to be compared, each as :func:`median_ms` has it.

    The calls are timed in turns: a device whose clocks change while it is busy would otherwise be
    slower for those that are timed later. Each turn has an order of its own, so no call always
    follows the same other one. On devices other than CUDA's they are timed one after the other.

    Args:
        works: the calls.
        warmup, rep: milliseconds to spend on each before timing, and on its timed calls, of which
            there are at least five.

    Returns:
        Milliseconds for each.
    """
    if not torch.cuda.is_available():
        from triton.testing import do_bench  # it supports all of Triton's devices

        return [do_bench(it, warmup=warmup, rep=rep, return_mode="median") for it in works]
    cache = torch.empty(_CACHE_BYTES // 4, dtype=torch.int32, device="cuda")
    leads = [_lead(it) for it in works]
    orders = random.Random(0)

    def timed(calls: Sequence[int]) -> list[list[float]]:
        pairs = [[(_event(), _event()) for _ in range(count)] for count in calls]
        turns = max(calls, default=0)
        half = turns // 2
        for turn in range(turns):
            # Calls that are timed less often than others are spread evenly over the turns, each in
            # the middle of its share of them.
            due = [
                (place, (turn * count + half) // turns)
                for place, count in enumerate(calls)
                if (turn * count + half) // turns < ((turn + 1) * count + half) // turns
            ]
            for place, number in orders.sample(due, len(due)):
                start, end = pairs[place][number]
                _sleep(leads[place])
                cache.zero_()
                start.record()
                works[place]()
                end.record()
        torch.cuda.synchronize()
        return [[start.elapsed_time(end) for start, end in of_one] for of_one in pairs]

    each = []
    for place in range(len(works)):
        whole = (_event(), _event())
        whole[0].record()
        timed([_REHEARSALS if it == place else 0 for it in range(len(works))])
        whole[1].record()
        torch.cuda.synchronize()
        each.append(max(1e-3, whole[0].elapsed_time(whole[1]) / _REHEARSALS))
    timed([max(1, int(warmup / it)) for it in each])
    times = timed([max(_FEWEST, int(rep / it)) for it in each])
    return [statistics.median(it) for it in times]


def _lead(work: Callable[[], Any]) -> int:
    """Clock cycles for which the device is to wait until the host has queued a call."""
    work()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(_REHEARSALS):
        work()
    queued_ms = (time.perf_counter() - begun) / _REHEARSALS * 1e3
    return int(_LEAD * queued_ms * _cycles_per_ms(torch.cuda.current_device()))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@functools.cache
def _cycles_per_ms(device: int) -> float:
    """Clock cycles per millisecond as torch's sleep kernel counts them: the multiprocessors'."""
    cycles = 2_000_000
    with torch.cuda.device(device):
        start, end = _event(), _event()
        _sleep(cycles)  # from idle, clocks rise first
        start.record()
        _sleep(cycles)
        end.record()
        torch.cuda.synchronize()
        taken: float = start.elapsed_time(end)
        return cycles / taken
