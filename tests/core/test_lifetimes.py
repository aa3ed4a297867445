"""A manager without references is collected, with all that it kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from core_helpers import SCALE, StubTensor, StubTensors, impl, make_manager

from transformer_engine_fl import (
    OpManager,
    OpRegistry,
    SelectionPolicy,
    get_default_manager,
    policy_context,
    reset_default_manager,
    set_global_policy,
    with_preference,
)

X = StubTensor()


def unwell(x: Any, factor: float = 1.0, *, mode: str = "plain") -> Any:
    raise RuntimeError("unwell")


def fail_and_recover(manager: OpManager) -> None:
    manager.registry.register_impl(impl("unwell", priority=9, fn=unwell))
    assert manager.call("scale", X) == "only"


def call_in_blocks(manager: OpManager) -> None:
    with with_preference("reference"), policy_context(strict=True):
        manager.call("scale", X)
        manager.bind("scale")(X)


def watch(manager: OpManager) -> None:
    undo = manager.monitor(lambda op_name, served: None)
    manager.call("scale", X)
    undo()


LIVES: dict[str, Callable[[OpManager], object]] = {
    "never used": lambda manager: None,
    "started": OpManager.ensure_initialized,
    "called": lambda manager: manager.call("scale", X),
    "called by a guard": lambda manager: manager.call("guarded", X),
    "called in blocks": call_in_blocks,
    "bound": lambda manager: manager.bind("scale"),
    "bound and called": lambda manager: manager.bind("guarded")(X),
    "pinned": lambda manager: manager.pin("scale")(X),
    "explained": lambda manager: manager.explain("scale", X),
    "recovered": fail_and_recover,
    "watched": watch,
    "told of a policy": lambda manager: set_global_policy(SelectionPolicy(prefer="reference")),
}


@pytest.mark.parametrize("live", LIVES.values(), ids=LIVES)
def test_a_manager_without_references_is_collected(live: Callable[[OpManager], object]) -> None:
    registry = OpRegistry({"scale": SCALE})
    registry.register_impl(impl("only"))
    registry.register_impl(impl("only", op_name="guarded", devices=("cpu",)))
    manager = OpManager(registry, builtins=False, plugins=False, tensors=StubTensors())
    gone = weakref.ref(manager)
    live(manager)
    del manager
    gc.collect()
    assert gone() is None
    assert registry.get_implementations("scale"), "its registry lives on"


def test_a_registry_and_the_policy_outlive_collected_managers() -> None:
    registry = OpRegistry({"scale": SCALE})
    for _ in range(3):
        OpManager(registry, builtins=False, plugins=False).ensure_initialized()
    gc.collect()
    registry.register_impl(impl("only"))
    set_global_policy(None)
    kept = OpManager(registry, builtins=False, plugins=False, tensors=StubTensors())
    assert kept.call("scale", X) == "only"


def test_a_registry_goes_with_its_last_manager() -> None:
    manager = make_manager(impl("only"))
    manager.call("scale", X)
    gone = weakref.ref(manager.registry)
    del manager
    gc.collect()
    assert gone() is None


def test_a_handle_keeps_its_manager_working() -> None:
    run = make_manager(impl("only")).bind("scale")
    gc.collect()
    assert run(X) == "only"
    with with_preference("reference"):
        assert run(X) == "only"


def test_the_default_manager_is_forgotten_when_it_is_reset() -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    assert get_default_manager() is manager
    reset_default_manager()
    assert get_default_manager() is not manager
    gone = weakref.ref(manager)
    del manager
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("guarded", [False, True])
def test_a_result_and_its_arguments_are_not_kept(guarded: bool) -> None:
    class Data(StubTensor):
        """A stub tensor that supports weak references."""

    manager = make_manager(
        impl("echo", fn=lambda x: x, **({"devices": ("cpu",)} if guarded else {}))
    )
    run = manager.bind("scale")
    x = Data()
    gone = weakref.ref(x)
    gc.disable()
    try:
        assert manager.call("scale", x) is run(x) is x
        with with_preference("reference"):
            assert manager.call("scale", x) is x
        manager.explain("scale", x)
        del x
        assert gone() is None
    finally:
        gc.enable()


def test_an_implementation_goes_with_its_registration() -> None:
    def fn(x: Any, factor: float = 1.0, *, mode: str = "plain") -> Any:
        return "short-lived"

    manager = make_manager(impl("only", fn=fn))
    run = manager.bind("scale")
    assert manager.call("scale", X) == run(X) == "short-lived"
    gone = weakref.ref(fn)
    del fn
    manager.registry.clear()
    gc.collect()
    assert gone() is None
