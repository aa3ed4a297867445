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

__all__ = ["exit_on_sigterm", "run_in_processes"]

T = TypeVar("T")
R = TypeVar("R")

_CALLS_EACH = 8
"""Calls that each process makes on average; then new ones replace them, to free device memory."""


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
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


def run_in_processes(
    work: Callable[[T], R], calls: Sequence[T], processes: int, on_result: Callable[[int, R], None]
) -> None:
    """Make calls in several processes, none of which outlives this function.

    The calls only save time later: if a process dies, a warning says so and the calls that
    remain are dropped.

    Args:
        work: the function; it, its argument and its result must be picklable.
        calls: the argument of each call.
        processes: how many processes.
        on_result: called with the number of calls done, and the result of the last one.
    """
    done, size = 0, processes * _CALLS_EACH
    context = multiprocessing.get_context("spawn")  # a device does not survive a fork
    with exit_on_sigterm():
        # Not max_tasks_per_child, with which an executor may hang (CPython gh-115634).
        for start in range(0, len(calls), size):
            with ProcessPoolExecutor(processes, context) as pool:
                try:
                    # submit raises, too, if a process has died while calls are being submitted.
                    waiting = [pool.submit(work, call) for call in calls[start : start + size]]
                    for future in as_completed(waiting):
                        gave = future.result()
                        done += 1
                        on_result(done, gave)
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
