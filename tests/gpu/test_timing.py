"""Timing of calls that are slow on the host."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from transformer_engine_fl.testing.timing import median_ms, medians_ms

pytestmark = pytest.mark.gpu


def test_the_time_of_the_host_is_not_counted() -> None:
    x = torch.ones(64, device="cuda")

    def slow_to_ask() -> None:
        time.sleep(1e-3)
        x.add_(1)

    assert median_ms(slow_to_ask, warmup=5, rep=20) < 0.1


def test_the_time_of_the_device_is_counted() -> None:
    x = torch.ones(2**28, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    x.add_(1)
    start.record()
    for _ in range(20):
        x.add_(1)
    end.record()
    torch.cuda.synchronize()
    each = start.elapsed_time(end) / 20
    assert median_ms(lambda: x.add_(1)) > each / 2  # other processes may use the device meanwhile


def test_calls_that_are_timed_together_have_times_of_their_own() -> None:
    x = torch.ones(2**28, device="cuda")
    order: list[str] = []

    def long() -> None:
        order.append("long")
        for _ in range(20):
            x.add_(1)

    def short() -> None:
        order.append("short")
        x[: 2**20].add_(1)

    slow, quick = medians_ms([long, short], warmup=5, rep=40)
    assert slow > 20 * quick
    places = [place for place, name in enumerate(order) if name == "long"][-4:]
    assert all(later - earlier > 4 for earlier, later in itertools.pairwise(places))
