"""Monitors are called with the implementation that serves, and do not affect the call."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from core_faults import ROUTES, Kernel, arrive, in_quarantine, world

import transformer_engine_fl.core.manager as manager_module
from transformer_engine_fl import OpImpl


def refuse(op_name: str, impl: OpImpl) -> None:
    raise KeyError(f"no column {impl.impl_id}")


REFUSED = re.compile(
    rf"a monitor raised an exception \(KeyError: 'no column impl\.0' \(at {re.escape(__file__)}:"
    rf"{refuse.__code__.co_firstlineno + 1}\)\) after 'impl\.0' served '(\w+)'"
)


@pytest.mark.parametrize("op_name", ["scale", "scale_"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_monitor_that_raises_ends_no_call_and_is_warned_of_once(
    route: str,
    op_name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernel = Kernel(in_place=op_name == "scale_")
    manager = world(op_name, kernel)
    monkeypatch.setattr(manager_module, "_default", manager)
    told: list[str] = []
    manager.monitor(refuse)
    manager.monitor(lambda name, impl: told.append(impl.impl_id))
    run = arrive(manager, op_name, route)
    for _ in range(3):
        assert run(torch.ones(4)).tolist() == [2.0] * 4
    assert kernel.runs == 3, "nothing runs again for what a monitor did"
    assert told == ["impl.0"] * 3, "another monitor is told all the same"
    (record,) = caplog.records
    found = REFUSED.search(record.getMessage())
    assert found is not None
    assert found[1] == op_name
    assert not in_quarantine(manager)


def test_each_monitor_that_raises_has_its_own_warning(caplog: pytest.LogCaptureFixture) -> None:
    manager = world("scale", Kernel())
    undo = manager.monitor(refuse)
    manager.monitor(refuse)
    manager.call("scale", torch.ones(4))
    assert len(caplog.records) == 2
    undo()
    manager.monitor(refuse)
    manager.call("scale", torch.ones(4))
    assert len(caplog.records) == 3


def test_a_monitor_may_be_interrupted() -> None:
    def interrupt(op_name: str, impl: OpImpl) -> None:
        raise KeyboardInterrupt

    manager = world("scale", Kernel())
    undo = manager.monitor(interrupt)
    with pytest.raises(KeyboardInterrupt):
        manager.call("scale", torch.ones(4))
    undo()
    told: list[str] = []
    manager.monitor(lambda name, impl: told.append(name))
    manager.call("scale", torch.ones(4))
    assert told == ["scale"]


def test_operators_that_a_monitor_calls_are_not_monitored(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise a monitor that calls an operator would be called for it, without end."""
    kernel = Kernel()
    manager = world("scale", kernel)
    told: list[Any] = []

    def measure(op_name: str, impl: OpImpl) -> None:
        told.append(manager.call("scale", torch.ones(4)).sum().item())
        told.append(manager.call("scale", torch.ones(2)).sum().item())

    manager.monitor(measure)
    for _ in range(2):
        manager.call("scale", torch.ones(4))
    assert told == [8.0, 4.0] * 2
    assert kernel.runs == 6
    assert not caplog.records


def test_operators_that_an_implementation_calls_are_monitored() -> None:
    manager = world("scale", Kernel())

    def composed(x: Any, factor: float = 2.0, *, mode: str = "plain") -> Any:
        return manager.call("scale", x, factor)

    manager.registry.register_impl(OpImpl("twice", "composed", "reference", composed, mutates=()))
    told: list[str] = []
    manager.monitor(lambda name, impl: told.append(name))
    manager.call("twice", torch.ones(4))
    assert told == ["scale", "twice"]
