"""functional: gradients on any pairing of sets, in autograd's own circumstances."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import transformer_engine_fl as te
from transformer_engine_fl import functional, ops

NORMS = {
    "rms_norm": (functional.rms_norm, ("input", "weight"), "rmsnorm"),
    "layer_norm": (functional.layer_norm, ("input", "weight", "bias"), "layernorm"),
}


def leaves(count: int, dtype: torch.dtype = torch.float64, rows: int = 5) -> list[Tensor]:
    torch.manual_seed(7)
    shapes = [(rows, 6), (6,), (6,)][:count]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_gradients_pass_gradcheck(name: str, zero_centered: bool) -> None:
    function, names, _ = NORMS[name]
    inputs = leaves(len(names))
    assert torch.autograd.gradcheck(
        lambda *args: function(*args, zero_centered_gamma=zero_centered), inputs
    )


def test_layer_norm_without_bias_has_gradients_for_the_rest() -> None:
    x, weight = leaves(2)
    assert torch.autograd.gradcheck(lambda *args: functional.layer_norm(*args), (x, weight))


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("wanted", [0, 1])
def test_only_the_gradients_that_are_wanted_are_returned(name: str, wanted: int) -> None:
    function, names, _ = NORMS[name]
    inputs = [tensor.detach() for tensor in leaves(len(names))]
    inputs[wanted].requires_grad_()
    function(*inputs).sum().backward()
    assert [tensor.grad is not None for tensor in inputs] == [
        i == wanted for i in range(len(names))
    ]


@pytest.mark.parametrize("name", NORMS)
def test_nothing_is_recorded_without_grad(name: str) -> None:
    function, names, _ = NORMS[name]
    inputs = leaves(len(names))
    with torch.no_grad():
        assert not function(*inputs).requires_grad
    assert function(*inputs).requires_grad
    assert not te.get_default_manager().call(f"{NORMS[name][2]}_fwd", *inputs)[0].requires_grad


class Recording:
    """A vendor whose operators are the reference's, and which remembers its calls."""

    def __init__(self, vendor: str) -> None:
        self.vendor = vendor
        self.calls: list[tuple[str, str]] = []

    def register(self) -> None:
        registry = te.get_default_manager().registry
        for name, contract in ops.CATALOGUE.items():
            registry.register_impl(
                te.OpImpl(
                    name,
                    f"vendor.{self.vendor}",
                    te.BackendImplKind.VENDOR,
                    self._recorded(name, contract),
                    vendor=self.vendor,
                )
            )

    def _recorded(self, name: str, contract: Any) -> Any:
        family = import_module(f"transformer_engine_fl.backends.reference.{contract.family}")
        inner = getattr(family, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, threading.current_thread().name))
            return inner(*args, **kwargs)

        recorded.__signature__ = contract.signature  # type: ignore[attr-defined]
        return recorded


def test_the_backward_stays_with_what_the_forward_chose() -> None:
    vendor = Recording("keeper")
    vendor.register()
    x, weight = leaves(2)
    with te.with_preference("vendor:keeper"):
        output = functional.rms_norm(x, weight)
    with te.with_preference("reference"):
        output.sum().backward()
    assert [name for name, _ in vendor.calls] == ["rmsnorm_fwd", "rmsnorm_bwd"]


def test_the_backward_runs_right_in_a_thread_of_its_own() -> None:
    vendor = Recording("threaded")
    vendor.register()
    x, weight = leaves(2)
    with te.with_preference("vendor:threaded"):
        output = functional.rms_norm(x, weight)
    worker = threading.Thread(target=lambda: output.sum().backward(), name="elsewhere")
    worker.start()
    worker.join()
    assert vendor.calls[-1] == ("rmsnorm_bwd", "elsewhere")
    assert x.grad is not None


@pytest.mark.parametrize("forward", ["reference", "vendor:one", "vendor:two"])
@pytest.mark.parametrize("backward", ["reference", "vendor:one", "vendor:two"])
@pytest.mark.parametrize("name", NORMS)
def test_any_forward_goes_with_any_backward(name: str, forward: str, backward: str) -> None:
    for vendor in ("one", "two"):
        Recording(vendor).register()
    function, names, op = NORMS[name]
    inputs = leaves(len(names))
    order = {f"{op}_fwd": [forward], f"{op}_bwd": [backward]}
    with te.policy_context(per_op_order=order):
        assert torch.autograd.gradcheck(lambda *args: function(*args), inputs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_the_same(reentrant: bool) -> None:
    x, weight = leaves(2)
    functional.rms_norm(x, weight).square().sum().backward()
    expected = [x.grad, weight.grad]
    x.grad = weight.grad = None
    output = checkpoint(functional.rms_norm, x, weight, use_reentrant=reentrant)
    output.square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close([x.grad, weight.grad], expected)


def test_autocast_leaves_the_dtypes_of_the_call_alone() -> None:
    x, weight = leaves(2, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = torch.nn.functional.linear(x, torch.eye(6))
        output = functional.rms_norm(hidden, weight)
    assert hidden.dtype == output.dtype == torch.bfloat16
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_out_dtype_is_the_dtype_of_the_output_and_gradients_keep_their_own() -> None:
    x, weight = leaves(2, torch.bfloat16)
    output = functional.rms_norm(x, weight, out_dtype=torch.float32)
    assert output.dtype == torch.float32
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "function",
    [
        functional.rms_norm,
        lambda x, weight: functional.linear(x, weight[None]),
        lambda x, weight: functional.grouped_linear(x, [weight[None]], [len(x)]),
    ],
    ids=["a contract's backward", "linear", "grouped linear"],
)
@pytest.mark.parametrize("squared", [False, True], ids=["constant grad", "grad with a gradient"])
def test_a_second_derivative_is_refused_rather_than_wrong(
    function: Callable[..., Tensor], squared: bool
) -> None:
    x, weight = leaves(2)
    output = function(x, weight)
    loss = (output.square() if squared else output).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        gradient.sum().backward()


def test_a_graph_of_gradients_may_be_made_of_what_is_checkpointed() -> None:
    x, weight = leaves(2)
    (expected,) = torch.autograd.grad(functional.rms_norm(x, weight).sum(), x)
    output = checkpoint(functional.rms_norm, x, weight, use_reentrant=False)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    torch.testing.assert_close(gradient.detach(), expected)
