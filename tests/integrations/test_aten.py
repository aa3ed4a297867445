"""ATen operators of unmodified code, served by the registry: values, gradients, dispatch."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import threading
import timeit
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from core_helpers import slowly
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from transformer_engine_fl import (
    ConfigurationError,
    NotSupportedError,
    OpImpl,
    StrictModeError,
    get_default_manager,
    reset_default_manager,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from transformer_engine_fl.integrations import aten
from transformer_engine_fl.integrations.aten import routes, use_aten_ops

Ran = list[tuple[str, str]]

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float64: 1e-10}


@pytest.fixture
def ran() -> Iterator[Ran]:
    """(operator, implementation) of every call served, in order."""
    seen: Ran = []
    undo = get_default_manager().monitor(lambda name, impl: seen.append((name, impl.impl_id)))
    yield seen
    undo()


def silu_of(vendor: str, seen: list[str], **fields: Any) -> OpImpl:
    def silu(self: Tensor) -> Tensor:
        seen.append(vendor)
        return self * torch.sigmoid(self)

    common: dict[str, Any] = {"mutates": (), "devices": ("cpu",), **fields}
    return OpImpl("aten::silu", f"vendor.{vendor}", "vendor", silu, vendor=vendor, **common)  # type: ignore[arg-type]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


MASK = torch.ones(6, 6).tril().bool()
TARGET = torch.tensor([0, 1, 2, -100, 3, 7])

CASES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], tuple[str, ...]]] = {
    "gelu": (
        lambda x: F.gelu(x, approximate="tanh"),
        ((6, 8),),
        ("aten::gelu", "aten::gelu_backward"),
    ),
    "silu": (F.silu, ((6, 8),), ("aten::silu", "aten::silu_backward")),
    "relu": (F.relu, ((6, 8),), ("aten::relu", "aten::threshold_backward")),
    "softmax": (
        lambda x: F.softmax(x, -1),
        ((2, 6, 8),),
        ("aten::_softmax", "aten::_softmax_backward_data"),
    ),
    "log_softmax": (lambda x: F.log_softmax(x, -1), ((6, 8),), ("aten::_log_softmax",)),
    "mm": (torch.mm, ((6, 8), (8, 5)), ("aten::mm",)),
    "linear": (F.linear, ((2, 6, 8), (5, 8)), ("aten::mm",)),
    "linear with bias": (F.linear, ((6, 8), (5, 8), (5,)), ("aten::addmm", "aten::mm")),
    "addmm of a matrix": (
        lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2.0),
        ((6, 5), (6, 8), (8, 5)),
        ("aten::addmm", "aten::mm"),
    ),
    "addmm of nothing": (
        lambda b, x, w: torch.addmm(b, x, w, beta=0),
        ((5,), (6, 8), (8, 5)),
        ("aten::addmm",),
    ),
    "bmm": (torch.bmm, ((3, 4, 5), (3, 5, 6)), ("aten::bmm",)),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (8,), w, b),
        ((2, 6, 8), (8,), (8,)),
        ("aten::native_layer_norm", "aten::native_layer_norm_backward"),
    ),
    "layer_norm without weights": (
        lambda x: F.layer_norm(x, (8,)),
        ((6, 8),),
        ("aten::native_layer_norm", "aten::native_layer_norm_backward"),
    ),
    "rms_norm": (
        lambda x, w: F.rms_norm(x, (8,), w, 1e-5),
        ((2, 6, 8), (8,)),
        ("aten::rms_norm", "rmsnorm_bwd"),
    ),
    "rms_norm without weights": (lambda x: F.rms_norm(x, (8,)), ((6, 8),), ("aten::rms_norm",)),
    "cross_entropy": (
        lambda x: F.cross_entropy(x, TARGET, label_smoothing=0.1),
        ((6, 8),),
        ("aten::cross_entropy_loss", "cross_entropy_bwd"),
    ),
    "cross_entropy of each row": (
        lambda x: F.cross_entropy(x, TARGET, reduction="none"),
        ((6, 8),),
        ("aten::cross_entropy_loss",),
    ),
    "attention": (
        F.scaled_dot_product_attention,
        ((2, 4, 6, 8),) * 3,
        ("aten::scaled_dot_product_attention", "fused_attn_bwd"),
    ),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        ((2, 4, 6, 8),) * 3,
        ("aten::scaled_dot_product_attention",),
    ),
    "masked attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=MASK),
        ((2, 4, 6, 8),) * 3,
        ("aten::scaled_dot_product_attention",),
    ),
    "attention in groups": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        ((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)),
        ("aten::scaled_dot_product_attention",),
    ),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda it: str(it).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_float64(name: str, dtype: torch.dtype, ran: Ran) -> None:
    function, shapes, operators = CASES[name]
    torch.manual_seed(0)
    given = [randn(*shape).to(dtype) for shape in shapes]
    exact = [it.double().requires_grad_() for it in given]
    expected = function(*exact)
    grad = torch.randn_like(expected).to(dtype)
    expected.backward(grad.double())

    tensors = [it.requires_grad_() for it in given]
    with use_aten_ops():
        output = function(*tensors)
        output.backward(grad)
    assert {(operator, "reference.torch") for operator in operators} <= set(ran)
    assert output.dtype == dtype
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(output.double(), expected, **close)
    for tensor, reference in zip(tensors, exact, strict=True):
        if reference.grad is None:
            assert tensor.grad is None
            continue
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad.double(), reference.grad, **close)


@pytest.mark.parametrize("offset", [1e6, -1e9])
def test_probabilities_of_logits_far_from_zero_are_exact(offset: float, ran: Ran) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(6, 8) + offset).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    grad = torch.randn(6)
    F.cross_entropy(exact, TARGET, reduction="none").backward(grad.double())
    with use_aten_ops():
        logarithms = F.log_softmax(logits, -1)
        losses = F.cross_entropy(logits, TARGET, reduction="none")
        losses.backward(grad)
    served = ("aten::_log_softmax", "aten::cross_entropy_loss")
    assert {(name, "reference.torch") for name in served} <= set(ran)
    close: dict[str, Any] = {"rtol": 2e-6, "atol": 2e-6}
    torch.testing.assert_close(logarithms.double(), F.log_softmax(exact, -1), **close)
    expected = F.cross_entropy(exact, TARGET, reduction="none")
    torch.testing.assert_close(losses.double(), expected, **close)
    torch.testing.assert_close(logits.grad.double(), exact.grad, **close)  # type: ignore[union-attr]


def test_rows_without_a_largest_logit_are_as_torch_has_them() -> None:
    rows = torch.tensor([[1.0, -torch.inf], [-torch.inf] * 2, [torch.nan, 1.0], [torch.inf, 0.0]])
    expected = F.log_softmax(rows, -1)
    with use_aten_ops():
        torch.testing.assert_close(F.log_softmax(rows, -1), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda it: str(it).removeprefix("torch."))
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "softmax", "log_softmax", "silu"])
def test_a_backward_outside_of_the_block_goes_with_the_forward_inside(
    name: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    function, shapes, _ = CASES[name]
    tensors = [randn(*shape).to(dtype).requires_grad_() for shape in shapes]
    exact = [it.detach().double().requires_grad_() for it in tensors]
    with use_aten_ops():
        output = function(*tensors)
    output.backward(torch.ones_like(output))
    reference = function(*exact)
    reference.backward(torch.ones_like(reference))
    within = 4 * TOLERANCE[dtype]  # torch's backward, on a CPU from bfloat16 statistics
    close = {"rtol": within, "atol": within}
    for tensor, other in zip(tensors, exact, strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad.double(), other.grad, **close)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "softmax", "silu", "linear"])
def test_a_backward_inside_of_a_block_goes_with_the_forward_outside(name: str) -> None:
    function, shapes, _ = CASES[name]
    tensors = [randn(*shape).requires_grad_() for shape in shapes]
    output = function(*tensors)
    output.sum().backward(retain_graph=True)
    expected = [it.grad for it in tensors]
    for tensor in tensors:
        tensor.grad = None
    with use_aten_ops():
        output.sum().backward()
    torch.testing.assert_close([it.grad for it in tensors], expected)


def test_the_gradient_of_relu_passes_where_the_input_is_nan(ran: Ran) -> None:
    x = torch.tensor([torch.nan, 1.0, 0.0, -0.0, -1.0, torch.inf], requires_grad=True)
    (expected,) = torch.autograd.grad(F.relu(x), x, torch.arange(1.0, 7.0))
    with use_aten_ops():
        (gradient,) = torch.autograd.grad(F.relu(x), x, torch.arange(1.0, 7.0))
    assert ("aten::threshold_backward", "reference.torch") in ran
    assert gradient.tolist() == expected.tolist() == [1, 2, 0, 0, 0, 6]


@pytest.mark.parametrize("beta", [0, 1])
def test_a_product_times_zero_is_zero_as_torch_has_it(beta: int) -> None:
    infinite = torch.full((2, 3), torch.inf)
    with use_aten_ops():
        total = torch.addmm(torch.ones(2, 4), infinite, torch.ones(3, 4), alpha=0, beta=beta)
    assert total.tolist() == [[beta] * 4] * 2


def test_dropout_keeps_the_mean_and_follows_the_seed(ran: Ran) -> None:
    x = torch.ones(4000, requires_grad=True)
    with use_aten_ops():
        torch.manual_seed(1)
        first = F.dropout(x, 0.25)
        torch.manual_seed(1)
        again = F.dropout(x, 0.25)
        first.sum().backward()
        quiet = F.dropout(x, 0.25, training=False)
    assert ("aten::dropout", "reference.torch") in ran
    assert torch.equal(first, again)
    assert first.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert abs((first == 0).double().mean().item() - 0.25) < 0.03
    assert torch.equal(x.grad, first)  # type: ignore[arg-type]
    assert torch.equal(quiet, x)


@pytest.mark.parametrize(
    ("name", "operator", "function"),
    [
        ("the erf form", "aten::gelu", lambda: F.gelu(torch.ones(2))),
        ("another dimension", "aten::_softmax", lambda: F.softmax(torch.ones(2, 3), 0)),
        ("integers", "aten::mm", lambda: torch.eye(2).long().mm(torch.eye(2).long())),
        ("nothing in it", "aten::relu", lambda: F.relu(torch.ones(0))),
        ("two", "aten::native_layer_norm", lambda: F.layer_norm(torch.ones(2, 3), (2, 3))),
    ],
)  # fmt: skip
def test_what_no_contract_can_say_is_served_by_torch(
    name: str, operator: str, function: Callable[[], Tensor], ran: Ran
) -> None:
    expected = function()
    with use_aten_ops():
        torch.testing.assert_close(function(), expected)
    if name != "nothing in it":
        assert (operator, "native.aten") in ran


def test_explain_says_why_torch_serves() -> None:
    x = torch.ones(2, 2, dtype=torch.int64)
    decision = aten.explain("mm", x, x)
    assert decision.selected is not None
    assert decision.selected.impl_id == "native.aten"
    assert "dtype 'int64' is not supported; supported: bfloat16, float16, float32, float64" in str(
        decision
    )
    declined = str(aten.explain("aten::gelu", torch.ones(2)))
    assert "the contract's GELU is the tanh approximation" in declined
    assert get_default_manager().explain("aten::mm", x, x).op_name == "aten::mm"


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (lambda x: x.to_sparse(), "a tensor with layout torch.sparse_coo"),
        (lambda x: x.as_subclass(Subclass), "Subclass is a subclass of Tensor"),
        (lambda x: x.to("meta"), "a meta tensor"),
        (torch.nn.Parameter, None),
    ],
    ids=["sparse", "subclass", "meta", "parameter"],
)
def test_explain_says_which_tensors_are_left_to_torch(
    left: Callable[[torch.Tensor], torch.Tensor], said: str | None
) -> None:
    x = torch.ones(2, 2)
    a, b = left(x), (left(x) if said == "a meta tensor" else x)
    decision = aten.explain("mm", a, b)
    assert decision.selected is not None
    assert decision.selected.impl_id == ("native.aten" if said else "reference.torch")
    assert said is None or f"not routed: {said}" in str(decision)
    ran: list[str] = []
    undo = get_default_manager().monitor(lambda name, impl: ran.append(name))
    with aten.use_aten_ops():
        torch.mm(a, b)
    undo()
    assert ("aten::mm" in ran) == (said is None)


@pytest.mark.parametrize(
    ("args", "options", "said"),
    [
        ((torch.ones(2, 2),), {}, "missing a required argument: 'mat2'"),
        ((torch.ones(2, 2),) * 3, {}, "too many positional arguments"),
        ((torch.ones(2, 2),) * 2, {"alpha": 2}, "unexpected keyword argument 'alpha'"),
    ],
)
def test_explain_reports_wrong_arguments_without_a_warning(
    args: tuple[Any, ...], options: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    decision = aten.explain("mm", *args, **options)
    assert decision.note == "the arguments do not fit torch's schema"
    assert decision.selected is None
    blamed = [it.reason for it in decision.verdicts if it.cause == "arguments"]
    assert {"native.aten", "reference.torch"} <= {
        it.impl.impl_id for it in decision.verdicts if it.cause == "arguments"
    }
    for reason in blamed:
        assert said in reason
        assert "aten::mm(Tensor self, Tensor mat2)" in reason
    assert not caplog.records, "no implementation is warned of"


def test_nothing_is_routed_outside_of_a_block_and_blocks_nest(ran: Ran) -> None:
    x = torch.ones(3)
    F.silu(x)
    assert ran == []
    block = use_aten_ops()
    with block:
        with block, use_aten_ops("silu"):
            F.silu(x)
        F.silu(x)
    assert len(ran) == 2
    F.silu(x)
    assert len(ran) == 2
    assert not aten.enabled()


def test_a_block_is_not_freed_while_others_hold_it() -> None:
    """torch 2.11 stashes the block without taking a reference, but later releases one; ``_stash``
    compensates for it.
    """
    with use_aten_ops():
        block = aten._current()
        held = sys.getrefcount(block)
        for _ in range(3):
            aten._stash(block)
        assert sys.getrefcount(block) == held


def test_a_block_ends_with_an_error_too(ran: Ran) -> None:
    with pytest.raises(KeyError), use_aten_ops():
        raise KeyError("gone")
    F.silu(torch.ones(3))
    assert ran == []


def test_enable_lasts_until_disable(ran: Ran) -> None:
    aten.enable()
    aten.enable()
    try:
        F.silu(torch.ones(3))
        with (
            use_aten_ops(),
            pytest.raises(ConfigurationError, match="leave the use_aten_ops block"),
        ):
            aten.disable()
    finally:
        aten.disable()
    aten.disable()
    F.silu(torch.ones(3))
    assert ran == [("aten::silu", "reference.torch")]


def test_generators_end_their_own_blocks_in_any_order(ran: Ran) -> None:
    def within(*operators: str) -> Generator[None]:
        with use_aten_ops(*operators):
            yield

    def served() -> set[str]:
        ran.clear()
        F.silu(torch.ones(3, 3).mm(torch.ones(3, 3)))
        return {operator for operator, _ in ran}

    first, second, third = within("mm"), within("silu"), within("mm", "silu")
    next(first)
    next(second)
    first.close()
    assert served() == {"aten::silu"}
    next(third)
    second.close()
    assert served() == {"aten::mm", "aten::silu"}
    third.close()
    assert served() == set()
    assert not aten.enabled()


def elsewhere(call: Callable[[], Any]) -> None:
    """Make a call in another thread."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_a_generators_block_ends_in_whichever_thread_closes_it(ran: Ran) -> None:
    def within(block: use_aten_ops) -> Generator[None]:
        with block:
            yield

    x = torch.ones(3, requires_grad=True)
    shared = use_aten_ops("silu", "silu_backward")
    for _ in range(2):
        suspended = within(shared)
        next(suspended)
        assert aten.enabled()
        elsewhere(suspended.close)
        assert not aten.enabled()
        F.silu(x).sum().backward()
        assert ran == []
    with use_aten_ops("silu_backward"):
        suspended = within(use_aten_ops("silu"))
        next(suspended)
        elsewhere(suspended.close)
        F.silu(x).sum().backward()
    assert [operator for operator, _ in ran] == ["aten::silu_backward"]


def test_of_a_shared_block_each_ends_when_the_last_has(ran: Ran) -> None:
    def within(block: use_aten_ops) -> Generator[None]:
        with block:
            yield

    shared = use_aten_ops("silu")
    first, second = within(shared), within(shared)
    next(first)
    next(second)
    elsewhere(first.close)
    F.silu(torch.ones(3))
    assert ran == [("aten::silu", "reference.torch")]
    second.close()
    assert not aten.enabled()


def test_a_block_of_some_operators_leaves_the_others(ran: Ran) -> None:
    with use_aten_ops("mm"):
        F.silu(torch.ones(3, 3).mm(torch.ones(3, 3)))
    assert {operator for operator, _ in ran} == {"aten::mm"}
    with pytest.raises(
        ConfigurationError, match="'aten::slu' is not routed; did you mean 'aten::silu'"
    ):
        use_aten_ops("slu")
    with pytest.raises(ConfigurationError, match="'aten::zzz' is not routed; routed"):
        use_aten_ops("zzz")
    with pytest.raises(
        ConfigurationError, match=r"\['mm'\] is not an .*use_aten_ops\('mm', 'addmm'\)"
    ):
        use_aten_ops(["mm"])  # type: ignore[arg-type]


def test_a_block_decorates_functions(ran: Ran) -> None:
    @use_aten_ops("mm")
    def function() -> Tensor:
        return torch.ones(3, 3).mm(torch.ones(3, 3))

    assert torch.equal(function(), torch.full((3, 3), 3.0))
    assert [operator for operator, _ in ran] == ["aten::mm"]


def test_routed_lists_every_operator_with_its_implementations() -> None:
    routes = {route.name: route for route in aten.routed()}
    assert routes["aten::mm"].operator == "generic_gemm"
    assert routes["aten::mm"].implementations[-1] == "native.aten"
    assert routes["aten::rms_norm"].whole
    assert routes["aten::nll_loss_forward"].operator is None
    assert all("native.aten" in route.implementations for route in routes.values())


def test_what_is_registered_while_the_routes_are_made_is_routed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = get_default_manager().registry
    listed = registry.list_operators

    def list_operators() -> tuple[str, ...]:
        found = listed()
        monkeypatch.undo()
        registry.register_impl(  # as another thread might after the listing
            OpImpl("aten::cosh", "vendor.acme", "vendor", lambda self: self + 5, vendor="acme")
        )
        return found

    get_default_manager().ensure_initialized()
    monkeypatch.setattr(registry, "list_operators", list_operators)
    with use_aten_ops():
        assert torch.zeros(2).cosh().tolist() == [5, 5]


def test_a_handle_has_the_signature_of_the_schema() -> None:
    manager = aten.prepared()
    assert str(inspect.signature(manager.bind("aten::gelu"))) == "(self, *, approximate='none')"
    x = torch.ones(3)
    output = manager.bind("aten::gelu")(self=x, approximate="tanh")
    torch.testing.assert_close(output, F.gelu(x.double(), approximate="tanh").float())


def test_a_vendor_is_picked_denied_and_preferred_by_aten_name() -> None:
    seen: list[str] = []
    registry = get_default_manager().registry
    registry.register_many([silu_of("acme", seen, priority=9), silu_of("zeta", seen)])
    x = torch.linspace(-3, 3, 7, requires_grad=True)
    with use_aten_ops():
        y = F.silu(x)
        with with_denied_vendors("acme"):
            F.silu(x)
        with with_preference("vendor:zeta"):
            F.silu(x)
        with with_preference("impl:native.aten"):
            F.silu(x)
        y.sum().backward()
    assert seen == ["acme", "zeta", "zeta"]
    exact = x.detach().double().requires_grad_()
    F.silu(exact).sum().backward()
    torch.testing.assert_close(x.grad, exact.grad.float())  # type: ignore[union-attr]


def test_an_operator_that_only_a_vendor_names_is_routed_even_within_a_block() -> None:
    seen: list[str] = []

    def tanh(self: Tensor) -> Tensor:
        seen.append("tanh")
        return torch.tanh(self)

    registry = get_default_manager().registry
    x = torch.ones(3)
    with use_aten_ops():
        torch.tanh(x)
        registry.register_impl(
            OpImpl("aten::tanh", "vendor.acme", "vendor", tanh, vendor="acme", mutates=())  # type: ignore[arg-type]
        )
        output = torch.tanh(x)
    torch.testing.assert_close(output, x.double().tanh().float())
    assert seen == ["tanh"]


def test_an_implementation_that_calls_its_own_operator_gets_torchs() -> None:
    depth: list[int] = []

    def silu(self: Tensor) -> Tensor:
        depth.append(1)
        return F.silu(self) + F.relu(self) * 0

    get_default_manager().registry.register_impl(
        OpImpl("aten::silu", "vendor.acme", "vendor", silu, vendor="acme", mutates=())  # type: ignore[arg-type]
    )
    with use_aten_ops():
        F.silu(torch.ones(3))
    assert depth == [1]


def test_a_vendors_own_comes_in_place_of_what_was_bridged_for_it(ran: Ran) -> None:
    common: dict[str, Any] = {"impl_id": "vendor.acme", "kind": "vendor", "vendor": "acme"}
    registry = get_default_manager().registry
    registry.register_impl(OpImpl("silu", fn=lambda input: input * 0, **common))
    seen: list[str] = []
    with use_aten_ops(), with_preference("vendor"):
        assert F.silu(torch.ones(3)).tolist() == [0.0] * 3
        registry.register_impl(silu_of("acme", seen))
        F.silu(torch.ones(3))
    assert seen == ["acme"]


def test_a_vendor_that_fails_is_set_aside_and_one_that_declines_is_not() -> None:
    def broken(self: Tensor) -> Tensor:
        raise RuntimeError("no such core")

    def declining(self: Tensor) -> Tensor:
        raise NotSupportedError("not today")

    registry = get_default_manager().registry
    for name, fn in {"silu": broken, "relu": declining}.items():
        registry.register_impl(
            OpImpl(f"aten::{name}", "vendor.acme", "vendor", fn, vendor="acme", mutates=())  # type: ignore[arg-type]
        )
    x = torch.ones(3)
    with use_aten_ops(), with_preference("vendor"):
        torch.testing.assert_close(F.silu(x), F.silu(x.double()).float())
        F.relu(x)
        assert "in quarantine after a fault: RuntimeError: no such core" in str(
            aten.explain("silu", x)
        )
        assert "quarantine" not in str(aten.explain("relu", x))
        strict = with_preference("vendor:acme"), with_strict_mode()
        with strict[0], strict[1], pytest.raises(StrictModeError, match="no such core"):
            F.silu(x)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", ["silu", "rms_norm"])
def test_a_warning_names_the_line_that_failed(
    name: str, requires_grad: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def silu(input: Tensor) -> Tensor:
        raise RuntimeError("broken")

    def rmsnorm_fwd(input: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
        raise RuntimeError("broken")

    broken, call = {
        "silu": (silu, F.silu),
        "rms_norm": (rmsnorm_fwd, lambda x: F.rms_norm(x, (3,))),
    }[name]
    fields: dict[str, Any] = {"vendor": "acme", "devices": ("cpu",), "mutates": ()}
    get_default_manager().registry.register_impl(
        OpImpl(broken.__name__, "vendor.acme", "vendor", broken, **fields)  # type: ignore[arg-type]
    )
    x = torch.randn(2, 3, requires_grad=requires_grad)
    with use_aten_ops(), with_preference("vendor:acme"):
        call(x)
    line = broken.__code__.co_firstlineno + 1
    assert f"(RuntimeError: broken (at {__file__}:{line}))" in caplog.text


def _bare_layernorm(input: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return torch.native_layer_norm(input, weight.shape, weight, None, 1e-5)


def _bare_gemm(A: Tensor, B: Tensor) -> tuple[Tensor, None, None]:
    return B @ A.t(), None, None


BARE: dict[str, tuple[str, Callable[..., Any], Callable[[], Tensor]]] = {
    "by position": (
        "layernorm_fwd",
        _bare_layernorm,
        lambda: F.layer_norm(torch.arange(12.0).view(2, 6), (6,), torch.ones(6)),
    ),
    "by keyword": (
        "generic_gemm",
        _bare_gemm,
        lambda: torch.mm(torch.arange(12.0).view(2, 6), torch.arange(18.0).view(3, 6).t()),
    ),
}


@pytest.mark.parametrize(("name", "fn", "call"), BARE.values(), ids=BARE)
def test_an_implementation_without_options_serves_what_needs_none(
    name: str, fn: Callable[..., Any], call: Callable[[], Tensor], ran: Ran
) -> None:
    manager = get_default_manager()
    manager.registry.register_impl(
        OpImpl(name, "vendor.bare", "vendor", fn, vendor="bare", devices=("cpu",))  # type: ignore[arg-type]
    )
    expected = call()
    with use_aten_ops(), with_preference("vendor:bare"):
        torch.testing.assert_close(call(), expected)
    assert "vendor.bare" in [impl_id for _, impl_id in ran]
    assert not manager.quarantine.held()


def test_memory_that_runs_out_in_supports_is_no_answer() -> None:
    def full(*args: Any, **kwargs: Any) -> bool:
        raise torch.OutOfMemoryError("no room for a plan")

    get_default_manager().registry.register_impl(
        OpImpl("silu", "vendor.acme", "vendor", lambda input: input, vendor="acme", supports=full)  # type: ignore[arg-type]
    )
    with use_aten_ops(), with_preference("vendor"):
        with pytest.raises(torch.OutOfMemoryError, match="no room for a plan"):
            F.silu(torch.ones(3))
        assert not get_default_manager().quarantine.held()


def test_explain_checks_bridged_implementations_and_their_options() -> None:
    def rms_norm(input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("takes no other eps than the contract's")

    def short(input: Tensor, p: float, **options: Any) -> str | bool:
        return "only rows of 128" if input.shape[-1] != 128 else True

    def dropout(input: Tensor, dropout_probability: float, *, seed: int, offset: int = 0) -> Any:
        raise AssertionError("explain calls nobody")

    manager, x, w = get_default_manager(), torch.ones(2, 4), torch.ones(4)
    common: dict[str, Any] = {"impl_id": "vendor.acme", "kind": "vendor", "vendor": "acme"}
    manager.registry.register_impl(OpImpl("rmsnorm_fwd", fn=rms_norm, **common))
    manager.registry.register_impl(OpImpl("dropout_fwd", fn=dropout, supports=short, **common))
    before = torch.random.get_rng_state()
    for call, said in {
        ("rms_norm", x, (4,), w, 0.5): "does not support the option 'eps' (got float 0.5)",
        ("dropout", x, 0.5, True): "only rows of 128",
    }.items():
        with with_preference("vendor:acme"):
            decision = aten.explain(*call)
            also = manager.explain(f"aten::{call[0]}", *call[1:])
        assert decision.verdicts[0].impl.impl_id == "vendor.acme"
        assert decision.verdicts[0].reason == said
        assert decision.selected is not None
        assert also.verdicts == decision.verdicts
    assert torch.equal(torch.random.get_rng_state(), before)
    with with_preference("vendor:acme"):
        assert aten.explain("rms_norm", x, (4,), w, 1e-5).verdicts[0].accepted
        assert aten.explain("dropout", torch.ones(128), 0.5, True).verdicts[0].accepted


def test_a_probe_that_raised_is_asked_again_for_the_aten_operator_too() -> None:
    answers = iter([OSError("the driver is busy"), True])

    def is_available() -> bool:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    manager = get_default_manager()
    manager.registry.register_impl(
        OpImpl(
            "silu",
            "vendor.acme",
            "vendor",  # type: ignore[arg-type]
            lambda input: input * 5,
            vendor="acme",
            is_available=is_available,
        )
    )
    x = torch.ones(3)
    with use_aten_ops(), with_preference("vendor:acme"):
        assert torch.equal(F.silu(x), torch.sigmoid(x))
        manager.reset_quarantine()
        assert torch.equal(F.silu(x), 5 * x)


def test_routes_of_an_earlier_manager_do_not_apply_to_the_next() -> None:
    seen: list[Tensor] = []

    def add(self: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
        seen.append(self)
        return self.sub(other, alpha=-alpha)

    get_default_manager().registry.register_impl(
        OpImpl("aten::add.Tensor", "vendor.acme", "vendor", add, vendor="acme", mutates=())  # type: ignore[arg-type]
    )
    x = torch.ones(3)
    with use_aten_ops():
        assert torch.equal(x + x, torch.full((3,), 2.0))
    assert len(seen) == 1
    reset_default_manager()
    with use_aten_ops():
        assert torch.equal(x + x, torch.full((3,), 2.0))
    assert len(seen) == 1
    one = torch.ones((), requires_grad=True)
    with use_aten_ops():  # Python numbers do not become tensors with a dtype
        assert torch.equal(x + 1, torch.full((3,), 2.0))
        (one + 1e-5).backward()
        assert (one + 1e-5).dtype == torch.float32
    assert one.grad == 1


def test_a_function_that_does_not_take_atens_arguments_is_passed_over_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = torch.ones(3)
    for vendor in ("acme", "zeta"):
        get_default_manager().registry.register_impl(
            OpImpl(
                "aten::gelu",
                f"vendor.{vendor}",
                "vendor",  # type: ignore[arg-type]
                lambda self: self,
                vendor=vendor,
                mutates=(),
            )
        )
        for _ in range(2):
            with use_aten_ops(), with_preference(f"vendor:{vendor}"):
                output = F.gelu(x, approximate="tanh")
                with with_strict_mode(), pytest.raises(TypeError, match="approximate"):
                    F.gelu(x, approximate="tanh")
            torch.testing.assert_close(output, F.gelu(x.double(), approximate="tanh").float())
        who = f"(vendor.{vendor}, registered at {__file__}:"
        assert caplog.text.count(f"aten::gelu: the selected implementation {who}") == 1
    assert caplog.text.count("does not accept ATen's arguments") == 2


def test_a_wrong_call_gets_torchs_own_error() -> None:
    with use_aten_ops():
        with pytest.raises(
            RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"
        ) as caught:
            torch.ones(2, 3).mm(torch.ones(2, 3))
        assert type(caught.value) is RuntimeError
        assert torch.equal(torch.ones(2, 2).mm(torch.eye(2)), torch.ones(2, 2))
    assert not get_default_manager().quarantine.held()


def test_a_composite_served_without_a_gradient_is_served_again_by_torch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def rms_norm(
        input: Tensor, normalized_shape: Any, weight: Any = None, eps: Any = None
    ) -> Tensor:
        return input.detach() * 7

    get_default_manager().registry.register_impl(
        OpImpl("aten::rms_norm", "vendor.acme", "vendor", rms_norm, vendor="acme", mutates=())  # type: ignore[arg-type]
    )
    x = torch.ones(2, 4, requires_grad=True)
    with use_aten_ops(), with_preference("vendor"):
        assert F.rms_norm(x.detach(), (4,)).max() == 7
        y = F.rms_norm(x, (4,))
    assert y.requires_grad
    assert y.max() < 2
    assert "is not differentiable, as a composite must be" in caplog.text


def test_second_derivatives_are_right_or_refused() -> None:
    x = randn(3, 4).requires_grad_()
    w = randn(4).requires_grad_()
    with use_aten_ops():
        assert torch.autograd.gradcheck(lambda x: F.silu(x), x)
        assert torch.autograd.gradgradcheck(lambda x: F.softmax(F.silu(x), -1), x)
        assert torch.autograd.gradgradcheck(lambda x, w: F.layer_norm(x, (4,), w), (x, w))
        (gradient,) = torch.autograd.grad(F.rms_norm(x, (4,), w).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            (gradient.square().sum() + x.sum()).backward()
        target = torch.tensor([0, 1, 2])
        for function in (
            lambda x: F.rms_norm(x, (4,), w.detach()).sum(),
            lambda x: F.cross_entropy(x, target),
        ):
            with pytest.raises(RuntimeError, match="cannot be differentiated again"):
                torch.autograd.functional.hessian(function, x)


def test_transformations_of_functions_see_torchs_operators() -> None:
    x = randn(3, 4)

    def function(x: Tensor) -> Tensor:
        return F.rms_norm(F.silu(x), (4,)).square().sum()

    def answers() -> tuple[Any, ...]:
        return (
            torch.func.grad(function)(x),
            torch.vmap(function)(x),
            torch.func.jvp(function, (x,), (torch.ones_like(x),))[1],
            torch.func.hessian(function)(x),
        )

    expected = answers()
    with use_aten_ops():
        torch.testing.assert_close(answers(), expected)


MODEL_SIZE = 8


def model() -> nn.Sequential:
    torch.manual_seed(0)
    size = MODEL_SIZE
    parts = (nn.Linear(size, size), nn.SiLU(), nn.LayerNorm(size), nn.RMSNorm(size), nn.Softmax(-1))
    return nn.Sequential(*parts)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_autocast_casts_as_it_does_without_us(ran: Ran) -> None:
    module, x, q = model(), torch.randn(4, MODEL_SIZE), torch.randn(2, 4, 6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x), F.scaled_dot_product_attention(q, q, q)
    with use_aten_ops(), torch.autocast("cpu", torch.bfloat16):
        outputs = module(x), F.scaled_dot_product_attention(q, q, q)
    assert [it.dtype for it in outputs] == [it.dtype for it in expected]
    torch.testing.assert_close(outputs, expected, rtol=3e-2, atol=3e-2)
    served = {("aten::addmm", "reference.torch")}
    assert {*served, ("aten::scaled_dot_product_attention", "reference.torch")} <= set(ran)


def _routes_in_a_mode() -> bool:
    """Whether the routes' dispatch keys apply to operators that a mode runs; not in torch 2.11."""
    found: list[bool] = []

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            found.append(not routes.excluded(routes.BELOW))
            return func(*args, **(kwargs or {}))

    with Mode():  # type: ignore[no-untyped-call]
        torch.ones(1)
    return found[0]


def test_a_mode_sees_the_operator_and_what_it_runs_is_routed(ran: Ran) -> None:
    x = torch.randn(4, MODEL_SIZE)
    with use_aten_ops(), FlopCounterMode(display=False) as counter:
        model()(x)
    assert counter.get_total_flops() == 2 * 4 * MODEL_SIZE * MODEL_SIZE
    assert (("aten::addmm", "reference.torch") in ran) == _routes_in_a_mode()
    with use_aten_ops():
        graph = make_fx(lambda x: F.silu(x))(x).graph
    assert torch.ops.aten.silu.default in [node.target for node in graph.nodes]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # if it raised, torch would serve
def test_a_trace_has_torchs_operators_and_is_routed_where_it_runs() -> None:
    module, x = nn.RMSNorm(8), torch.randn(6, 8)
    seen: list[str] = []
    with use_aten_ops():
        traced = torch.jit.trace(module, x)  # type: ignore[no-untyped-call]
        undo = get_default_manager().monitor(lambda name, impl: seen.append(name))
        output = traced(x)
        undo()
    assert [node.kind() for node in traced.graph.findAllNodes("aten::rms_norm")]
    assert seen == ["aten::rms_norm"]
    torch.testing.assert_close(output, module.double()(x.double()).float())


def test_tensors_with_ways_of_their_own_are_torchs(ran: Ran) -> None:
    sparse = torch.eye(3).to_sparse()
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    with use_aten_ops():
        assert torch.equal(sparse.mm(torch.ones(3, 2)), torch.ones(3, 2))
        assert F.silu(nested).is_nested
        assert F.silu(torch.ones(3, device="meta")).is_meta
    assert ("aten::mm", "reference.torch") not in ran


def test_checkpointing_and_inference_mode_are_routed(ran: Ran) -> None:
    module, x = model(), torch.randn(4, MODEL_SIZE, requires_grad=True)
    with use_aten_ops():
        checkpoint(module, x, use_reentrant=False).sum().backward()
        ran.clear()
        with torch.inference_mode():
            module(x)
    assert ("aten::rms_norm", "reference.torch") in ran
    assert x.grad is not None


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_works_in_and_out_of_a_block(backend: str) -> None:
    torch._dynamo.reset()
    module, x = model(), torch.randn(4, MODEL_SIZE)
    counting = CompileCounterWithBackend(backend)
    compiled = torch.compile(module, backend=counting, fullgraph=True)
    expected = module(x)
    for _ in range(2):
        with use_aten_ops():
            inside = x.clone().requires_grad_()
            output = compiled(inside)
            output.sum().backward()
        torch.testing.assert_close(output, expected)
        assert inside.grad is not None
        torch.testing.assert_close(compiled(x), expected)
    assert 0 < counting.frame_count <= 3
    torch._dynamo.reset()


def test_a_block_inside_of_compiled_code_says_where_it_belongs() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def function(x: Tensor) -> Tensor:
        with use_aten_ops():
            return F.silu(x)

    with pytest.raises(Exception, match="put the block around the call of the function"):
        function(torch.ones(3))
    torch._dynamo.reset()


def test_higher_order_operators_pass_the_keys() -> None:
    x = torch.ones(3)
    with use_aten_ops():
        output = torch.cond(torch.tensor(True), lambda x: F.silu(x), lambda x: x.clone(), (x,))
    torch.testing.assert_close(output, F.silu(x))


def test_a_block_is_its_threads_own(ran: Ran) -> None:
    with use_aten_ops():
        thread = threading.Thread(target=F.silu, args=(torch.ones(3),))
        thread.start()
        thread.join()
    assert ran == []


def routed(ran: Ran) -> bool:
    """Whether a call is routed; asserts that ``enabled`` says the same."""
    ran.clear()
    F.silu(torch.ones(3))
    assert aten.enabled() == bool(ran)
    return aten.enabled()


def test_a_thread_with_a_copy_of_the_context_enters_for_itself(ran: Ran) -> None:
    def in_a_thread() -> list[bool]:
        found = [routed(ran)]
        aten.disable()
        aten.enable()
        found.append(routed(ran))
        with use_aten_ops():
            found.append(routed(ran))
        found.append(routed(ran))
        aten.disable()
        return [*found, routed(ran)]

    async def run() -> None:
        aten.enable()
        try:
            assert await asyncio.to_thread(in_a_thread) == [False, True, True, True, False]
            assert routed(ran)
        finally:
            aten.disable()
        with use_aten_ops():
            assert await asyncio.to_thread(in_a_thread) == [False, True, True, True, False]
            assert routed(ran)
        assert not routed(ran)

    asyncio.run(run())


@pytest.mark.parametrize("lasting", [False, True])
def test_a_task_outlives_the_block_it_was_made_in(lasting: bool, ran: Ran) -> None:
    async def child(left: asyncio.Event) -> list[bool]:
        found = [routed(ran)]
        await left.wait()
        with other:
            found.append(routed(ran))
        aten.enable()
        found.append(routed(ran))
        aten.disable()
        return [*found, routed(ran)]

    async def run() -> list[bool]:
        left = asyncio.Event()
        if lasting:
            aten.enable()
            task = asyncio.create_task(child(left))
            await asyncio.sleep(0)
            aten.disable()
        else:
            with use_aten_ops():
                task = asyncio.create_task(child(left))
                await asyncio.sleep(0)
        left.set()
        return await task

    other = use_aten_ops()
    assert asyncio.run(run()) == [True, True, True, False]
    assert not routed(ran)


def test_threads_that_enter_at_once_share_the_routes(
    monkeypatch: pytest.MonkeyPatch, ran: Ran
) -> None:
    together = threading.Barrier(4)
    made: list[Any] = []

    def run() -> None:
        together.wait()
        with use_aten_ops(), with_preference("reference"):
            F.silu(torch.ones(3))

    threads = [threading.Thread(target=run) for _ in range(4)]
    monkeypatch.setattr(aten, "Routes", slowly(routes.Routes, made))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert ran == [("aten::silu", "reference.torch")] * 4


def test_a_block_is_its_tasks_own(ran: Ran) -> None:
    counts: dict[str, int] = {}

    def count(name: str) -> None:
        ran.clear()
        F.silu(torch.ones(3))
        counts[name] = len(ran)

    async def routed(entered: asyncio.Event, other: asyncio.Event) -> None:
        with use_aten_ops():
            entered.set()
            await other.wait()
            count("inside, another task outside")
        count("after")

    async def unrouted(entered: asyncio.Event, other: asyncio.Event) -> None:
        await entered.wait()
        count("outside, another task inside")
        with use_aten_ops():
            other.set()
            await asyncio.sleep(0.01)
            count("inside, the other task gone")

    async def both() -> None:
        events = asyncio.Event(), asyncio.Event()
        await asyncio.gather(routed(*events), unrouted(*events))

    asyncio.run(both())
    assert counts == {
        "inside, another task outside": 1,
        "after": 0,
        "outside, another task inside": 0,
        "inside, the other task gone": 1,
    }


def test_nothing_keeps_a_tensor_that_went_through() -> None:
    with use_aten_ops():
        x = torch.randn(1000)
        reference = __import__("weakref").ref(x)
        with pytest.raises(RuntimeError):
            x.view(10, 100).mm(x.view(10, 100))
        F.silu(x)
        del x
    gc.collect()
    assert reference() is None


def test_entering_costs_less_than_25_microseconds_and_others_pay_nothing() -> None:
    block = use_aten_ops()

    def enter() -> None:
        with block:
            pass

    enter()
    seconds = min(timeit.repeat(enter, number=200, repeat=5)) / 200
    assert seconds < 25e-6  # measured: 2 to 4 microseconds

    x = torch.ones(4, 8)
    outside = min(timeit.repeat(lambda: x.hypot(x), number=500, repeat=7))
    with block:
        inside = min(timeit.repeat(lambda: x.hypot(x), number=500, repeat=7))
    assert inside < 2 * outside  # an operator without a route


def test_policies_name_aten_operators_before_they_are_routed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ran: Ran
) -> None:
    from transformer_engine_fl import ops, reset_global_policy

    monkeypatch.setenv("TE_FL_PER_OP", "aten::silu=impl:native.aten")
    reset_global_policy()
    ops.silu(torch.ones(3))
    assert "aten::silu" not in caplog.text
    with use_aten_ops():
        F.silu(torch.ones(3))
    assert ran[-1] == ("aten::silu", "native.aten")


def test_te_fl_explain_knows_aten_operators(capsys: pytest.CaptureFixture[str]) -> None:
    from transformer_engine_fl.cli import main

    with pytest.raises(SystemExit) as caught:
        main(["explain", "aten::mm", "--device", "cuda", "--dtype", "bfloat16"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "aten::mm" in shown
    assert "default.flagos" in shown
    assert "native.aten" in shown


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x: torch.softmax(x, 7), id="softmax-dim"),
        pytest.param(lambda x: F.log_softmax(x, -5), id="log_softmax-dim"),
        *(
            pytest.param(
                lambda x, last=last: F.cross_entropy(x[0, 0], torch.tensor([0, 1, last, -100])),
                id=f"target-{last}",
            )
            for last in (4, -1, 2**40)
        ),
        pytest.param(lambda x: F.cross_entropy(x[0, 0, 0, 0], torch.tensor(0)), id="one-logit"),
        pytest.param(
            lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.zeros(4, 4).double()),
            id="mask-dtype",
        ),
    ],
)
def test_a_call_that_torch_refuses_is_refused_in_a_block_alike(
    call: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(2, 3, 4, 4)
    with pytest.raises((IndexError, RuntimeError)) as outside:
        call(x)
    with use_aten_ops(), pytest.raises((IndexError, RuntimeError)) as inside:
        call(x)
    assert type(inside.value) is type(outside.value)
    assert str(inside.value) == str(outside.value)
    assert "supports()" not in caplog.text


def test_a_mask_of_one_dimension_is_left_to_torch() -> None:
    x = torch.randn(2, 3, 4, 4)
    said = str(aten.explain("scaled_dot_product_attention", x, x, x, torch.zeros(4)))
    assert "attn_mask has fewer than two dimensions" in said
