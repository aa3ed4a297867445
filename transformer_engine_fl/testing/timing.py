"""How long the work of a call takes on a GPU, whatever time the host needs to queue it."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch

__all__ = ["median_ms"]

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
    if not torch.cuda.is_available():
        from triton.testing import do_bench  # it supports all of Triton's devices

        found: float = do_bench(work, warmup=warmup, rep=rep, return_mode="median")
        return found
    cache = torch.empty(_CACHE_BYTES // 4, dtype=torch.int32, device="cuda")
    work()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(_REHEARSALS):
        work()
    queued_ms = (time.perf_counter() - begun) / _REHEARSALS * 1e3
    cycles = int(_LEAD * queued_ms * _cycles_per_ms(torch.cuda.current_device()))

    def timed(calls: int) -> list[float]:
        pairs = [(_event(), _event()) for _ in range(calls)]
        for start, end in pairs:
            _sleep(cycles)
            cache.zero_()
            start.record()
            work()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    whole = (_event(), _event())
    whole[0].record()
    timed(_REHEARSALS)
    whole[1].record()
    torch.cuda.synchronize()
    each = max(1e-3, whole[0].elapsed_time(whole[1]) / _REHEARSALS)
    timed(max(1, int(warmup / each)))
    return statistics.median(timed(max(_FEWEST, int(rep / each))))


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
