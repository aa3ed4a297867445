"""Times of calls that the host is slow to ask for."""

from __future__ import annotations

import time

import pytest
import torch

from transformer_engine_fl.testing.timing import median_ms

pytestmark = pytest.mark.gpu


def test_the_time_of_the_host_is_not_counted() -> None:
    x = torch.ones(64, device="cuda")

    def slow_to_ask() -> None:
        time.sleep(1e-3)
        x.add_(1)

    assert median_ms(slow_to_ask, warmup=5, rep=20) < 0.1


def test_the_time_of_the_device_is_counted() -> None:
    x = torch.ones(2**28, device="cuda")
    bytes_ = 2 * x.nbytes
    assert bytes_ / median_ms(lambda: x.add_(1)) / 1e6 < 1.2 * _bandwidth()


def _bandwidth() -> float:
    """GB/s of a copy, by the wall clock."""
    source = torch.ones(2**30, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    torch.cuda.synchronize()
    return 2 * source.nbytes * 10 / (time.perf_counter() - start) / 1e9
