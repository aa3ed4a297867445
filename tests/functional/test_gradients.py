"""functional: gradients with any pairing of sets, under the conditions that autograd creates."""

from __future__ import annotations

import functools
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


def test_what_a_forward_returned_wrongly_is_said_where_its_backward_refuses_it() -> None:
    def rmsnorm_fwd(
        input: Tensor, weight: Tensor, eps: float = 1e-5, *, zero_centered_gamma: bool = False
    ) -> tuple[Tensor, Tensor]:
        return input.detach() * 1, input.new_ones(input.shape[0], dtype=torch.bfloat16)

    te.get_default_manager().registry.register_impl(
        te.OpImpl("rmsnorm_fwd", "vendor.acme", "vendor", rmsnorm_fwd, vendor="acme")
    )
    x, weight = leaves(2, torch.float32)
    with te.with_preference("vendor:acme"):
        output = functional.rms_norm(x, weight)
    with pytest.raises(te.ArgumentError, match="'rsigma'") as caught:
        output.sum().backward()
    (note,) = caught.value.__notes__
    assert "output[1] of 'rmsnorm_fwd'" in note


@pytest.mark.parametrize(
    ("change", "place", "kind", "grad"),
    [
        (list, 0, "a list", False),
        (list, 0, "a list", True),
        (lambda outputs: None, 0, "None", False),
        (lambda outputs: None, 0, "None", True),
        # Elements of a tuple are checked when they are saved.
        (lambda outputs: (None, outputs[1]), 0, "None", True),
        (lambda outputs: (outputs[0], [outputs[1]]), 1, "a list", True),
        (lambda outputs: (outputs[0], 1.5), 1, "a float", True),
    ],
)
def test_an_output_that_is_no_tensor_is_named_with_its_implementation(
    change: Callable[[Any], Any], place: int, kind: str, grad: bool
) -> None:
    def rmsnorm_fwd(input: Tensor, weight: Tensor, eps: float = 1e-5) -> Any:
        return change((input * 1, input.new_ones(input.shape[0])))

    te.get_default_manager().registry.register_impl(
        te.OpImpl("rmsnorm_fwd", "vendor.acme", "vendor", rmsnorm_fwd, vendor="acme")
    )
    x, weight = (it.requires_grad_(grad) for it in leaves(2, torch.float32))
    said = f"rmsnorm_fwd: output {place} of 'vendor.acme' is {kind}; "
    with te.with_preference("vendor:acme"), pytest.raises(te.TeFlError, match=said):
        functional.rms_norm(x, weight)


def serve_changed(op_name: str, change: Callable[[Any], Any]) -> None:
    """Register vendor.acme, which applies ``change`` to the reference's results."""
    manager = te.get_default_manager()
    manager.ensure_initialized()
    registry = manager.registry
    entry = next(it for it in registry.entries(op_name) if it.impl.impl_id == "reference.torch")
    assert entry.load() is None
    true = entry.fn

    @functools.wraps(true)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(true(*args, **kwargs))

    registry.register_impl(te.OpImpl(op_name, "vendor.acme", "vendor", changed, vendor="acme"))


MADE_OF_SEVERAL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "generic_gemm": lambda x, weight: functional.linear(x, weight, gelu=True),
    "te_general_grouped_gemm": lambda x, weight: functional.grouped_linear(
        x, [weight], [5], gelu=True
    ),
    "cross_entropy_fwd_bwd": lambda x, weight: functional.cross_entropy(
        x * weight[0], torch.arange(5), gradient_in_forward=True
    ),
    "fused_linear_cross_entropy_fwd_bwd": lambda x, weight: functional.fused_linear_cross_entropy(
        x, weight, torch.tensor([0, 1, 2, 0, 1]), gradient_in_forward=True
    ),
}


@pytest.mark.parametrize("name", MADE_OF_SEVERAL)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (list, r"'vendor.acme' returned \(list\); the contract requires . outputs, in a tuple"),
        (lambda outputs: None, r"'vendor.acme' returned \(None\)"),
        # Its three rows could be taken for three outputs.
        (lambda outputs: torch.ones(3, 2), r"'vendor.acme' returned \(Tensor\)"),
        (lambda outputs: outputs[:1], r"'vendor.acme' returned \(Tensor\)"),
        (lambda outputs: (None, *outputs[1:]), "output 0 of 'vendor.acme' is None"),
        (
            lambda outputs: (*outputs[:2], 1.5, *outputs[3:]),
            "output 2 of 'vendor.acme' is a float",
        ),
    ],
    ids=["a list", "None", "a tensor", "one of several", "None first", "a number"],
)
def test_functions_of_several_operators_report_a_wrong_result(
    name: str, change: Callable[[Any], Any], said: str
) -> None:
    serve_changed(name, change)
    x, weight = torch.rand(5, 6).requires_grad_(), torch.rand(3, 6).requires_grad_()
    with te.with_preference("vendor:acme"), pytest.raises(te.TeFlError, match=f"^{name}: {said}"):
        MADE_OF_SEVERAL[name](x, weight)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, weight: functional.linear(x, weight),
        lambda x, weight: functional.grouped_linear(x, [weight], [5]),
    ],
    ids=["linear", "grouped_linear"],
)
def test_an_output_outside_a_tuple_is_an_error_and_is_not_unpacked(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    for name in ("generic_gemm", "te_general_grouped_gemm"):
        serve_changed(name, lambda outputs: outputs[0])
    with te.with_preference("vendor:acme"), pytest.raises(te.TeFlError, match=r"\(Tensor\); the"):
        function(torch.rand(5, 6), torch.rand(3, 6))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (list, r"its implementation returned \(list\)"),
        (lambda outputs: (None, *outputs[1:]), "output 0 of its implementation is N"),
        (lambda outputs: (*outputs[:1], None, None), "output 1 of its implementation"),
    ],
    ids=["a list", "no gradient of a matrix", "no gradient of the bias"],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_a_product_of_a_backward_that_is_not_there_is_no_zero(
    grouped: bool, change: Callable[[Any], Any], said: str
) -> None:
    name = "te_general_grouped_gemm" if grouped else "generic_gemm"
    right = True
    serve_changed(name, lambda outputs: outputs if right else change(outputs))
    x = torch.rand(5, 6)
    weight, bias = torch.rand(3, 6).requires_grad_(), torch.rand(3).requires_grad_()
    with te.with_preference("vendor:acme"):
        if grouped:
            output = functional.grouped_linear(x, [weight], [5], [bias])
        else:
            output = functional.linear(x, weight, bias)
    right = False
    with pytest.raises(te.TeFlError, match=f"^{name}: {said}"):
        output.sum().backward()


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (list, "list"),
        (lambda gradients: None, "None"),
        (lambda gradients: gradients[:1], "Tensor"),
        (lambda gradients: (None, gradients[1]), "None, Tensor"),
        (lambda gradients: (gradients[0], 1.5), "Tensor, float"),
    ],
)
def test_a_required_gradient_that_is_not_returned_is_an_error(
    change: Callable[[Any], Any], kinds: str
) -> None:
    def rmsnorm_bwd(dy: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor) -> Any:
        return change((dy * 1, gamma * 1))

    te.get_default_manager().registry.register_impl(
        te.OpImpl("rmsnorm_bwd", "vendor.acme", "vendor", rmsnorm_bwd, vendor="acme")
    )
    x, weight = leaves(2, torch.float32)
    with te.with_preference("vendor:acme"):
        output = functional.rms_norm(x, weight)
    said = (
        rf"rmsnorm_bwd: .* returned \({kinds}\); the contract requires the gradients of \(input, w"
    )
    with pytest.raises(te.TeFlError, match=said):
        output.sum().backward()


def test_layer_norm_without_bias_has_gradients_for_the_rest() -> None:
    x, weight = leaves(2)
    assert torch.autograd.gradcheck(lambda *args: functional.layer_norm(*args), (x, weight))


def fused_losses(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "reduction": "none", "return_z_loss": True}
    target = torch.tensor([1, -100, 3])
    return torch.stack(functional.fused_linear_cross_entropy(x, weight, target, bias, **options))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (functional.rms_norm, ((2, 3, 6), (6,))),
        (functional.layer_norm, ((2, 3, 6), (6,), (6,))),
        (functional.linear, ((2, 3, 6), (4, 6), (4,))),
        (functional.rms_norm, ((0, 6), (6,))),
        (lambda it: functional.linear(it.new_ones(2, 3, 6), it.new_ones(4, 6), it), ((4,),)),
        (lambda it: functional.rope(it, torch.ones(4, 1, 1, 6)), ((4, 2, 2, 6),)),
        (lambda it: functional.rope(it, torch.ones(4, 1, 1, 4), interleaved=True), ((4, 2, 2, 6),)),
        (fused_losses, ((3, 4), (5, 4), (5,))),
        (lambda *given: fused_losses(*given)[1], ((3, 4), (5, 4))),
        (lambda it: functional.thd_to_bshd(it, torch.tensor([0, 3, 7]).int(), 4), ((7, 2, 3),)),
        (lambda it: functional.bshd_to_thd(it, torch.tensor([0, 3, 7]).int(), 7), ((2, 4, 2, 3),)),
    ],
    ids=[
        "rms_norm",
        "layer_norm",
        "linear",
        "rms_norm without rows",
        "linear by its bias",
        "rope of everything",
        "rope of some, interleaved",
        "fused_linear_cross_entropy",
        "the z_loss of fused_linear_cross_entropy",
        "thd_to_bshd",
        "bshd_to_thd",
    ],
)
def test_gradients_asked_for_in_a_batch_are_those_asked_for_one_by_one(
    function: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...]
) -> None:
    torch.manual_seed(7)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    output = function(*inputs)
    grads = torch.randn(3, *output.shape, dtype=torch.float64)
    batch = torch.autograd.grad(output, inputs, grads, retain_graph=True, is_grads_batched=True)
    for place, grad in enumerate(grads):
        one = torch.autograd.grad(output, inputs, grad, retain_graph=True)
        torch.testing.assert_close([gradients[place] for gradients in batch], list(one))


@pytest.mark.parametrize(
    ("function", "shapes", "lists"),
    [
        (
            functional.multi_row_padding,
            ((8, 3),),
            {"row_list": ([3, 5], [4, 4]), "padded_row_list": ([5, 7], [6, 6])},
        ),
        (
            functional.multi_row_unpadding,
            ((12, 3),),
            {"row_list": ([3, 5], [4, 4]), "padded_row_list": ([5, 7], [6, 6])},
        ),
        (
            functional.qkv_rope,
            ((2, 1, 2, 12), (2, 1, 1, 4), (2, 1, 1, 4)),
            {"qkv_split": ([4, 4, 4], [8, 2, 2])},
        ),
        (
            functional.grouped_linear,
            ((5, 6), (2, 3, 6)),
            {"m_splits": ([1, 4], [3, 2])},
        ),
    ],
    ids=["padding", "unpadding", "qkv_rope", "grouped_linear"],
)
def test_a_list_that_the_caller_changes_after_the_forward_changes_no_gradient(
    function: Callable[..., Any],
    shapes: tuple[tuple[int, ...], ...],
    lists: dict[str, tuple[list[int], list[int]]],
) -> None:
    torch.manual_seed(7)
    x, *others = (torch.randn(shape) for shape in shapes)
    x.requires_grad_()
    given = {name: [*before] for name, (before, _) in lists.items()}
    outputs = function(x, *others, **given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.randn_like(it) for it in outputs]
    (expected,) = torch.autograd.grad(outputs, x, grads, retain_graph=True)
    for name, (_, after) in lists.items():
        given[name][:] = after
    (found,) = torch.autograd.grad(outputs, x, grads)
    assert torch.equal(found, expected)


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
    """A vendor with the reference's operators that records its calls."""

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


TWICE: dict[str, Callable[[Tensor], Tensor]] = {
    "a saved input": lambda x: functional.rms_norm(x, torch.linspace(1, 2, 6)),
    "a saved output": lambda x: functional.scaled_softmax(x.reshape(1, 1, 5, 6)),
    "numbers of the forward's own": lambda x: functional.score_for_moe_aux_loss(x, 2)[0],
    "the router": lambda x: functional.topk_router(x, 2)[0],
    "cross entropy": lambda x: functional.cross_entropy(x, torch.arange(5)),
    "linear with GELU": lambda x: functional.linear(x, torch.ones(4, 6), gelu=True),
    "a bias before GELU": lambda x: functional.linear(
        torch.ones(2, 6), torch.ones(6, 6), x[0], gelu=True
    ),
    "grouped linear with GELU": lambda x: functional.grouped_linear(
        x, [torch.ones(4, 6)] * 2, [2, 3], gelu=True
    ),
    "linear, of itself": lambda x: functional.linear(x, x),
}


def _of_gradients(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(function(x), x, create_graph=True)
    torch.autograd.grad(gradient.square().sum(), x)


def _backward_twice(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    x.requires_grad_()
    function(x).backward(create_graph=True)
    assert x.grad is not None
    x.grad.sum().backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize(
    "twice",
    [
        _of_gradients,
        _backward_twice,
        torch.autograd.functional.hessian,
        lambda f, x: torch.autograd.functional.hvp(f, x, torch.ones_like(x)),
        lambda f, x: torch.autograd.functional.vhp(f, x, torch.ones_like(x)),
        lambda f, x: torch.autograd.functional.jvp(f, x, torch.ones_like(x)),
    ],
    ids=["grad", "backward", "hessian", "hvp", "vhp", "jvp"],
)
@pytest.mark.parametrize("squared", [False, True], ids=["constant grad", "grad with a gradient"])
@pytest.mark.parametrize("name", TWICE)
def test_a_second_derivative_is_refused_rather_than_wrong(
    name: str, squared: bool, twice: Callable[..., Any]
) -> None:
    def loss(x: Tensor) -> Tensor:
        output = TWICE[name](x)
        return (output.square() if squared else output).sum()

    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        twice(loss, torch.randn(5, 6))


def test_a_second_derivative_is_refused_for_the_parameters_too() -> None:
    x, weight = leaves(2)
    first = torch.autograd.grad(functional.rms_norm(x, weight).sum(), [x, weight], None, True, True)
    for gradient in first:
        for other in (x, weight):
            with pytest.raises(RuntimeError, match="cannot be differentiated again"):
                torch.autograd.grad(gradient.sum(), other, retain_graph=True)


def test_the_second_derivative_of_a_product_alone_is_known_to_be_zero() -> None:
    weight = torch.ones(4, 6)
    hessian = torch.autograd.functional.hessian(
        lambda x: functional.linear(x, weight).sum(), torch.ones(5, 6)
    )
    assert not hessian.any()


def test_gradients_that_could_be_differentiated_may_be_written() -> None:
    x, weight = leaves(2)
    first = torch.autograd.grad(functional.rms_norm(x, weight).sum(), [x, weight], None, True, True)
    before = [it.detach().clone() for it in first]
    for gradient in first:
        gradient.mul_(2)
        with torch.no_grad():
            gradient.mul_(2)
    torch.testing.assert_close([it.detach() for it in first], [4 * it for it in before])


FORWARD_MODE: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: functional.rms_norm(x, torch.ones(6)),
    "linear": lambda x: functional.linear(x, torch.ones(4, 6)),
    "grouped_linear": lambda x: functional.grouped_linear(x, [torch.ones(4, 6)], [5]),
}


@pytest.mark.parametrize("name", FORWARD_MODE)
@pytest.mark.parametrize("grad", [False, True], ids=["", "and grad"])
def test_a_tangent_is_refused_rather_than_lost(name: str, grad: bool) -> None:
    x = torch.ones(5, 6, requires_grad=grad)
    with torch.autograd.forward_ad.dual_level():
        FORWARD_MODE[name](x)
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(5, 6))
        with pytest.raises(te.NotSupportedError, match="forward-mode derivatives"):
            FORWARD_MODE[name](dual)
    FORWARD_MODE[name](x)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("before", [False, True], ids=["compiled there", "compiled before"])
def test_a_tangent_is_not_lost_in_compiled_code(fullgraph: bool, before: bool) -> None:
    torch._dynamo.reset()
    x = torch.ones(5, 6)
    compiled = torch.compile(FORWARD_MODE["rms_norm"], backend="aot_eager", fullgraph=fullgraph)
    if before:
        compiled(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(5, 6))
        with pytest.raises((te.NotSupportedError, torch._dynamo.exc.Unsupported)):
            compiled(dual)


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_the_transforms_of_torch_func_are_refused_by_name(name: str) -> None:
    function, x = FORWARD_MODE[name], torch.ones(5, 6)
    for transformed in (
        torch.func.grad(lambda x: function(x).sum()),
        torch.func.jacrev(function),
        lambda x: torch.func.vjp(function, x),
    ):
        with pytest.raises(te.NotSupportedError, match=r"transform of torch\.func"):
            transformed(x)
    for transformed in (
        lambda x: torch.func.jvp(function, (x,), (x,)),
        torch.func.jacfwd(function),
    ):
        with pytest.raises(te.NotSupportedError, match="forward-mode derivatives"):
            transformed(x)


@pytest.mark.parametrize("grad", [False, True])
def test_what_is_no_tensor_is_an_error_of_the_contract(grad: bool) -> None:
    number: Any = 3.0
    with pytest.raises(te.ArgumentError, match=r"'input' is float 3\.0"):
        functional.rms_norm(number, torch.ones(6, requires_grad=grad))


def test_a_graph_of_gradients_may_be_made_of_what_is_checkpointed() -> None:
    x, weight = leaves(2)
    (expected,) = torch.autograd.grad(functional.rms_norm(x, weight).sum(), x)
    output = checkpoint(functional.rms_norm, x, weight, use_reentrant=False)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    torch.testing.assert_close(gradient.detach(), expected)
