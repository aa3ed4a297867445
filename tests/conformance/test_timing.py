"""Timing several calls in turns, on a device that is simulated."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from transformer_engine_fl.testing import timing


class Device:
    """A device on which work takes longer the longer it has been busy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slower: float) -> None:
        self.now = 0.0
        self.slower = slower
        self.called: list[str] = []
        device = self

        class Event:
            at = 0.0

            def record(self) -> None:
                self.at = device.now

            def elapsed_time(self, later: Event) -> float:
                return later.at - self.at

        cache = torch.empty(1, dtype=torch.int32)
        monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(timing.torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(timing.torch, "empty", lambda *size, **options: cache)
        monkeypatch.setattr(timing, "_event", Event)
        monkeypatch.setattr(timing, "_sleep", lambda cycles: None)
        monkeypatch.setattr(timing, "_cycles_per_ms", lambda index: 1.0)

    def work(self, name: str, milliseconds: float) -> Callable[[], None]:
        def run() -> None:
            self.called.append(name)
            self.now += milliseconds * (1 + self.slower * self.now)

        return run


def test_each_call_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, 0)
    works = [device.work(name, ms) for name, ms in (("a", 0.5), ("b", 2.0), ("c", 64.0))]
    assert timing.medians_ms(works) == pytest.approx([0.5, 2.0, 64.0])
    assert timing.median_ms(works[1]) == pytest.approx(2.0)
    assert timing.medians_ms([]) == []


def test_equal_work_has_equal_times_on_a_device_that_slows_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch, 1e-3)
    first, second, long = timing.medians_ms(
        [device.work(name, ms) for name, ms in (("a", 1.0), ("b", 1.0), ("c", 16.0))]
    )
    assert first == pytest.approx(second, rel=0.005)
    assert long == pytest.approx(16 * first, rel=0.005)  # timed less often, but not later
    alone = [timing.median_ms(device.work("d", 1.0)) for _ in range(2)]
    assert alone[1] > 1.05 * alone[0]  # one after the other they would differ


def test_calls_come_in_every_order_and_as_often_as_their_time_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch, 0)
    times = {"a": 1.0, "b": 1.0, "c": 8.0, "d": 1000.0}
    timing.medians_ms([device.work(*it) for it in times.items()], warmup=0, rep=80)
    # After rehearsals and one call each for warming up.
    timed = device.called[-(80 + 80 + 10 + 5) :]
    assert [timed.count(name) for name in times] == [80, 80, 10, 5]
    assert {"ab", "ba", "ac", "ca", "ad"} <= {a + b for a, b in itertools.pairwise(timed)}
    places = [place for place, name in enumerate(timed) if name == "d"]
    assert places[0] < len(timed) / 4  # spread over all turns
    assert places[-1] > len(timed) * 3 / 4
