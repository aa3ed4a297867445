"""Objects that are used later or elsewhere: pins, pickled errors, copied contracts."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import transformer_engine_fl as te
from transformer_engine_fl import functional, ops


def manager_with(**fields: Any) -> te.OpManager:
    def failing(x: Any) -> str:
        raise RuntimeError("out of order")

    registry = te.OpRegistry({})
    registry.register_impl(
        te.OpImpl("work", "first", "flagos", failing, mutates=(), priority=9, **fields)
    )
    registry.register_impl(te.OpImpl("work", "second", "reference", lambda x: "second", mutates=()))
    return te.OpManager(registry, builtins=False, plugins=False)


@pytest.mark.parametrize("fields", [{}, {"devices": ["cpu"]}], ids=["direct", "guarded"])
def test_a_pin_fails_by_the_rules_of_the_policy_it_was_made_under(fields: dict[str, Any]) -> None:
    x = torch.ones(2)
    strict, loose = te.SelectionPolicy(strict=True), te.SelectionPolicy(strict=False)

    te.set_global_policy(strict)
    pinned = manager_with(**fields).pin("work")
    te.set_global_policy(loose)
    with pytest.raises(te.StrictModeError):
        pinned(x)

    pinned = manager_with(**fields).pin("work")
    te.set_global_policy(strict)
    assert pinned(x) == "second"


@pytest.mark.parametrize("fields", [{}, {"devices": ["cpu"]}], ids=["direct", "guarded"])
def test_a_pin_fixes_the_policy_alone(
    fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Quarantine, monitors and registrations after it count."""
    runs: list[str] = []

    def failing(x: Any) -> str:
        runs.append("first")
        raise RuntimeError("out of order")

    registry = te.OpRegistry({})
    first = te.OpImpl("work", "first", "flagos", failing, mutates=(), priority=9, **fields)
    second = te.OpImpl("work", "second", "reference", lambda x: "second", mutates=())
    registry.register_many([first, second])
    manager = te.OpManager(registry, builtins=False, plugins=False)
    with te.with_preference("flagos"):
        pinned = manager.pin("work")
    x = torch.ones(2)
    assert [pinned(x) for _ in range(3)] == ["second"] * 3
    assert runs == ["first"], "then it is in quarantine"

    seen: list[str] = []
    undo = manager.monitor(lambda name, impl: seen.append(impl.impl_id))
    pinned(x)
    undo()
    pinned(x)
    assert seen == ["second"]

    with te.with_preference("reference"):
        third = te.OpImpl("work", "third", "flagos", lambda x: "third", mutates=(), priority=10)
        registry.register_impl(third)
        assert pinned(x) == "third", "its own policy prefers flagos"


def test_a_monitor_sees_the_backward_of_a_forward_before_it() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    y = functional.rms_norm(x, torch.ones(4))
    seen: list[str] = []
    undo = te.get_default_manager().monitor(lambda name, impl: seen.append(name))
    y.sum().backward()
    undo()
    assert seen == ["rmsnorm_bwd"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.rmsnorm_fwd(),  # type: ignore[call-arg]
        lambda: ops.rmsnorm_fwd(torch.ones(2, 4)),  # type: ignore[call-arg]
        lambda: te.get_default_manager().call("rmsnorm_fwd", torch.ones(2, 4)),
    ],
)
def test_a_missing_argument_is_named_however_the_operator_is_called(
    call: Callable[[], Any],
) -> None:
    with pytest.raises(te.ArgumentError, match=r"'(input|weight)' is missing"):
        call()


def test_a_contract_is_one_object_however_it_travels() -> None:
    assert copy.copy(ops.rmsnorm_fwd) is ops.rmsnorm_fwd
    assert copy.deepcopy([ops.rmsnorm_fwd])[0] is ops.rmsnorm_fwd
    assert pickle.loads(pickle.dumps(ops.rmsnorm_fwd)) is ops.rmsnorm_fwd


def test_a_copied_module_dispatches_through_the_same_manager() -> None:
    registry = te.OpRegistry({})
    registry.register_impl(te.OpImpl("work", "first", "reference", lambda x: "first"))
    module = torch.nn.Module()
    module.manager = te.OpManager(registry, builtins=False, plugins=False)
    module.work = module.manager.bind("work")
    copies = [copy.copy(module), copy.deepcopy(module)]
    registry.register_impl(te.OpImpl("work", "second", "flagos", lambda x: "second"))
    for it in copies:
        assert it.work(torch.ones(2)) == it.manager.call("work", torch.ones(2)) == "second"
    assert copy.copy(module.manager) is module.manager


def test_an_error_keeps_its_words_when_it_leaves_the_process() -> None:
    with te.policy_context(per_op_order={"work": ["vendor:nobody"]}):
        with pytest.raises(te.NoImplementationError) as raised:
            manager_with().call("work", torch.ones(2))
        arrived = pickle.loads(pickle.dumps(raised.value))
    assert type(arrived) is te.NoImplementationError
    assert str(arrived) == str(raised.value)
    half = te.PartialMutationError("half written", None, ("p",))
    assert pickle.loads(pickle.dumps(half)).tensors == ("p",)


def test_explain_says_that_the_call_itself_is_wrong() -> None:
    decision = te.get_default_manager().explain("rmsnorm_fwd", torch.ones(2, 4), torch.ones(3))
    assert decision.selected is None
    assert "the arguments break the contract" in str(decision)
    assert "'weight'" in str(decision)


def test_a_what_if_question_takes_a_device_with_an_index_and_refuses_an_unknown_dtype() -> None:
    manager = te.get_default_manager()
    decision = manager.explain_for("rmsnorm_fwd", device="cuda:1", arch="sm_90", dtype="bfloat16")
    assert decision.selected is not None
    assert decision.selected.impl_id == "default.flagos"
    with pytest.raises(te.ConfigurationError, match="did you mean 'bfloat16'"):
        manager.explain_for("rmsnorm_fwd", device="cuda", dtype="bf16")


def test_undoing_a_monitor_leaves_the_same_one_that_another_has_set() -> None:
    manager = manager_with()
    seen: list[str] = []

    def watch(op_name: str, impl: te.OpImpl) -> None:
        seen.append(impl.impl_id)

    undo, other = manager.monitor(watch), manager.monitor(watch)
    undo()
    undo()
    manager.call("work", torch.ones(2))
    assert seen == ["second"]
    other()
    manager.call("work", torch.ones(2))
    assert seen == ["second"]


def test_a_monitor_must_be_callable() -> None:
    with pytest.raises(TypeError, match="a monitor must be callable, got int"):
        te.get_default_manager().monitor(3)  # type: ignore[arg-type]


def test_a_duplicate_in_tree_names_the_set_and_not_its_helper() -> None:
    manager = te.get_default_manager()
    manager.ensure_initialized()
    with pytest.raises(te.DuplicateImplError, match=r"reference/__init__\.py"):
        manager.registry.register_impl(
            te.OpImpl("rmsnorm_fwd", "reference.torch", "reference", "a.b:c")
        )
