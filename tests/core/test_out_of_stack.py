"""A RecursionError because the caller left too little stack is not a fault of the callee.

If it were, an implementation, a set or a plugin would be lost for the rest of the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core_faults import (
    GUARDS,
    LEFT,
    ROUTES,
    Kernel,
    KernelError,
    arrive,
    climb,
    deep,
    in_quarantine,
    world,
)

import transformer_engine_fl.core.manager as manager_module
from transformer_engine_fl import OpImpl, OpManager, OpRegistry


def hungry(x: Any, factor: float = 2.0, *, mode: str = "plain") -> Any:
    """Needs more stack than :func:`deep` leaves, and less than the recursion limit."""
    climb(2 * LEFT)
    return x.mul_(factor)


def wrapping(x: Any, factor: float = 2.0, *, mode: str = "plain") -> Any:
    """Replaces any exception with an error of its own, as compilers do."""
    try:
        return hungry(x, factor)
    except Exception as error:  # noqa: BLE001 - what this test is about
        raise KernelError(repr(error)) from None


def endless(x: Any, factor: float = 2.0, *, mode: str = "plain") -> Any:
    return endless(x, factor)


@pytest.mark.parametrize("op_name", ["scale", "scale_"])
@pytest.mark.parametrize("guarded", GUARDS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kernel", [hungry, wrapping])
def test_a_call_without_stack_left_raises_and_quarantines_nothing(
    kernel: Callable[..., Any],
    route: str,
    guarded: bool,
    op_name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    second = Kernel(in_place=op_name == "scale_")
    manager = world(op_name, kernel, second, guarded=guarded)
    monkeypatch.setattr(manager_module, "_default", manager)
    run = arrive(manager, op_name, route)
    with pytest.raises(RecursionError if kernel is hungry else KernelError):
        deep(lambda: run(torch.ones(4)))
    assert not in_quarantine(manager)
    assert not caplog.records
    assert run(torch.ones(4)).tolist() == [2.0] * 4
    assert second.runs == 0


def test_one_that_recurses_without_end_is_at_fault_itself() -> None:
    second = Kernel()
    manager = world("scale", endless, second)
    assert manager.call("scale", torch.ones(4)).tolist() == [2.0] * 4
    assert in_quarantine(manager) == {("scale", "impl.0", "cpu", "float32")}


def test_a_failure_in_the_callers_handler_of_a_recursion_error_is_a_fault() -> None:
    second = Kernel()
    manager = world("scale", Kernel(lambda: KernelError("no image")), second)

    def after_another_error() -> Any:
        try:
            climb(2 * LEFT)
        except RecursionError:
            return manager.call("scale", torch.ones(4))

    assert deep(after_another_error).tolist() == [2.0] * 4
    assert in_quarantine(manager) == {("scale", "impl.0", "cpu", "float32")}


@pytest.mark.parametrize("field", ["supports", "is_available", "switched_off"])
def test_a_check_that_the_caller_left_no_stack_is_repeated_at_the_next_call(field: str) -> None:
    def answer(*args: Any, **kwargs: Any) -> Any:
        climb(2 * LEFT)
        return None if field == "switched_off" else True

    first, second = Kernel(), Kernel()
    manager = world("scale", second)
    impl = OpImpl("scale", "asks", "reference", first, priority=9, **{field: answer})  # type: ignore[arg-type]
    manager.registry.register_impl(impl)
    with pytest.raises(RecursionError):
        deep(lambda: manager.call("scale", torch.ones(4)))
    manager.call("scale", torch.ones(4))
    assert (first.runs, second.runs) == (1, 0)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module whose import needs much stack; it has a kernel and, as a plugin, registers it."""
    name = "deep_to_import"
    (tmp_path / f"{name}.py").write_text(
        f"from core_faults import climb\nclimb({2 * LEFT})\n"
        "from transformer_engine_fl import OpImpl\n"
        "def kernel(x):\n    return x * 2\n"
        "def register(registry):\n"
        "    registry.register_impl(OpImpl('own', 'own.kernel', 'reference', kernel))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_a_kernel_that_the_caller_left_no_stack_to_import_is_imported_later(module: str) -> None:
    manager = world("scale")
    impl = OpImpl("own", "own.kernel", "reference", f"{module}:kernel")
    manager.registry.register_impl(impl)
    with pytest.raises(RecursionError):
        deep(lambda: manager.call("own", torch.ones(2)))
    assert manager.call("own", torch.ones(2)).tolist() == [2.0, 2.0]


def test_a_plugin_that_the_caller_left_no_stack_to_load_is_loaded_later(
    module: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", module)
    manager = OpManager(OpRegistry({}), builtins=False)
    with pytest.raises(RecursionError):
        deep(lambda: manager.call("own", torch.ones(2)))
    assert not caplog.records
    assert manager.call("own", torch.ones(2)).tolist() == [2.0, 2.0]
    own = [it for it in manager.plugins if module in it.name]
    assert [it.registered for it in own] == [("own/own.kernel",)]
