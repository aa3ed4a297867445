"""Commands that share their work among processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from transformer_engine_fl.core.log import logger

__all__ = ["beforehand", "ended_together"]

T = TypeVar("T")
R = TypeVar("R")

_CALLS_EACH = 8
"""Calls that each process makes on average; then new ones replace them, to free device memory."""


@contextlib.contextmanager
def ended_together() -> Iterator[None]:
    """Within the block a SIGTERM unwinds the program, so that it ends its child processes.

    Otherwise the program would end at once and leave them running.
    """

    def leave(*_: Any) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def beforehand(
    work: Callable[[T], R], calls: Sequence[T], processes: int, tell: Callable[[int, R], None]
) -> None:
    """Make calls in several processes, none of which outlives this function.

    The calls only save time later: if a process dies, a warning says so and the calls that
    remain are dropped.

    Args:
        work: the function; it, its argument and its result must be picklable.
        calls: the argument of each call.
        processes: how many processes.
        tell: called with the number of calls done, and the result of the last one.
    """
    done, size = 0, processes * _CALLS_EACH
    context = multiprocessing.get_context("spawn")  # a device does not survive a fork
    with ended_together():
        # Not max_tasks_per_child, with which an executor may hang (CPython gh-115634).
        for start in range(0, len(calls), size):
            with ProcessPoolExecutor(processes, context) as pool:
                try:
                    # submit raises, too, if a process has died while calls are being submitted.
                    waiting = [pool.submit(work, call) for call in calls[start : start + size]]
                    for future in as_completed(waiting):
                        gave = future.result()
                        done += 1
                        tell(done, gave)
                except BrokenProcessPool:
                    logger.warning(
                        "a compiling process was killed after %d of %d calls; the rest is "
                        "compiled when it is measured",
                        done,
                        len(calls),
                    )
                    return
                except BaseException:
                    for process in multiprocessing.active_children():
                        process.terminate()
                    raise
                finally:
                    pool.shutdown(cancel_futures=True)
