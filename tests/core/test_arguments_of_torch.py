"""Which tensors and numbers contracts refuse, and what a message names as the cause."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import core_helpers
import pytest
import torch
from core_faults import Kernel, KernelError, world

import transformer_engine_fl as te
from transformer_engine_fl import ops


def made_in_inference_mode(*sizes: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(sizes)


def adam(parameter: torch.Tensor, **numbers: Any) -> Any:
    lists = [[torch.ones(4)], [parameter], [torch.zeros(4)], [torch.zeros(4)]]
    return ops.multi_tensor_adam(*lists, **({"lr": 0.1, "step": 1} | numbers))


def multiply(total: torch.Tensor) -> Any:
    return ops.generic_gemm(torch.ones(2, 2), torch.ones(2, 2), accumulate_into=total)


@pytest.mark.parametrize(
    ("call", "sizes", "argument"),
    [(adam, (4,), "params[0]"), (multiply, (2, 2), "accumulate_into")],
)
def test_a_tensor_of_inference_mode_is_written_there_only(
    call: Callable[[torch.Tensor], Any], sizes: tuple[int, ...], argument: str
) -> None:
    value = made_in_inference_mode(*sizes)
    with pytest.raises(te.ArgumentError, match="clone it") as caught:
        call(value)
    assert caught.value.argument == argument
    assert not value.count_nonzero(), "nothing is written"
    assert not te.get_default_manager().quarantine.held()
    call(torch.zeros(sizes))
    with torch.inference_mode():
        call(value)
        call(made_in_inference_mode(*sizes))
    assert value.count_nonzero()


@pytest.mark.parametrize("name", ["lr", "step"])
@pytest.mark.parametrize(
    "value", [2**63, 10**400, 10**5000], ids=["just", "beyond float64", "more digits than printed"]
)
def test_an_integer_beyond_int64_is_refused(name: str, value: int) -> None:
    with pytest.raises(te.ArgumentError, match="in the range of int64") as caught:
        adam(torch.zeros(4), **{name: value})
    assert caught.value.argument == name
    adam(torch.zeros(4), **{name: 2**63 - 1})


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(1, 4)])


def jagged() -> torch.Tensor:
    rows = [torch.ones(2, 4), torch.ones(1, 4)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.eye(4).to_sparse(), "a float32 tensor, sparse_coo, on cpu"),
        (nested, "a float32 tensor, nested"),
        (jagged, "a float32 tensor, nested"),
    ],
)
def test_a_tensor_without_strides_is_refused(make: Callable[[], torch.Tensor], said: str) -> None:
    with pytest.raises(te.ArgumentError, match=said) as caught:
        ops.rmsnorm_fwd(make(), torch.ones(4))
    assert caught.value.argument == "input"
    assert not te.get_default_manager().quarantine.held()


@torch.no_grad()
def without_grad(x: Any, factor: float = 2.0, *, mode: str = "plain") -> Any:
    raise KernelError("unwell")


@torch.inference_mode()
def in_inference_mode(x: Any, factor: float = 2.0, *, mode: str = "plain") -> Any:
    raise KernelError("unwell")


def _compiled(x: Any, factor: float = 2.0, *, mode: str = "plain") -> Any:
    torch._dynamo.graph_break()
    raise KernelError("unwell")


@pytest.mark.parametrize(
    "fn", [without_grad, in_inference_mode, torch.compile(_compiled, backend="eager")]
)
def test_a_message_names_the_line_of_a_decorated_implementation(
    fn: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world("scale", fn, Kernel()).call("scale", torch.ones(4))
    said = [it.getMessage() for it in caplog.records if it.name == "TE-FL"]
    assert f"KernelError: unwell (at {__file__}:" in said[0]


# ------------------------------------------------------------------- pickling and copying


def test_the_default_manager_is_the_default_one_where_it_arrives() -> None:
    manager = te.get_default_manager()
    assert pickle.loads(pickle.dumps(manager)) is manager
    text = pickle.dumps(manager)
    te.reset_default_manager()
    assert pickle.loads(text) is te.get_default_manager()
    with pytest.raises(TypeError, match="only the default manager can be pickled"):
        pickle.dumps(manager)


def test_a_decision_may_be_copied_and_sent() -> None:
    manager = core_helpers.make_manager(core_helpers.impl("only", fn=core_helpers.importable))
    with te.with_denied_vendors("acme"):
        decision = manager.explain("scale")
    for other in (pickle.loads(pickle.dumps(decision)), copy.deepcopy(decision)):
        assert str(other) == str(decision)
        assert other.to_json() == decision.to_json()
