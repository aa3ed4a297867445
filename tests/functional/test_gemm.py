"""Matrix products: agreement with torch's own, gradients, accumulation, compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from some_tensors import normal
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import functional, ops
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.ops import _library

OPERATORS = ("generic_gemm", "te_general_grouped_gemm")
SPLITS = [3, 0, 4]


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [normal(*shape, seed=place).requires_grad_() for place, shape in enumerate(shapes)]


def torch_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: bool = False
) -> Tensor:
    output = F.linear(input, weight, bias)
    return F.gelu(output, approximate="tanh") if gelu else output


# --------------------------------------------------------------------- a linear layer


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4), (4,), (0, 4)])
def test_linear_passes_gradcheck(shape: tuple[int, ...], with_bias: bool, gelu: bool) -> None:
    inputs = leaves(shape, (6, 4), *[(6,)] * with_bias)
    assert torch.autograd.gradcheck(lambda *it: functional.linear(*it, gelu=gelu), inputs)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("wanted", range(3))
def test_one_gradient_of_a_linear_layer_alone(wanted: int, gelu: bool) -> None:
    inputs = [it.detach() for it in leaves((2, 3, 4), (6, 4), (6,))]
    inputs[wanted].requires_grad_()
    gradients = []
    for function in (functional.linear, torch_linear):
        output = function(*inputs, gelu=gelu).square().sum()
        gradients.append(torch.autograd.grad(output, inputs[wanted]))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_grouped_linear_passes_gradcheck(with_bias: bool, gelu: bool) -> None:
    inputs = leaves((7, 4), *[(6, 4)] * 3, *[(6,)] * 3 * with_bias)

    def function(input: Tensor, *rest: Tensor) -> Tensor:
        return functional.grouped_linear(input, rest[:3], SPLITS, rest[3:] or None, gelu=gelu)

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("wanted", [[0], [1], [3], [4], [6], [2, 5]])
def test_some_gradients_of_a_grouped_layer_alone(wanted: list[int]) -> None:
    inputs = [it.detach() for it in leaves((7, 4), *[(6, 4)] * 3, *[(6,)] * 3)]
    chosen = [inputs[place].requires_grad_() for place in wanted]
    input, weights, biases = inputs[0], inputs[1:4], inputs[4:]
    grouped = functional.grouped_linear(input, weights, SPLITS, biases, gelu=True)
    parts = zip(input.split(SPLITS), weights, biases, strict=True)
    each = torch.cat([torch_linear(*part, gelu=True) for part in parts])
    torch.testing.assert_close(grouped, each)
    gradients = [torch.autograd.grad(it.square().sum(), chosen) for it in (grouped, each)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("shape", [(6, 7), (2, 3, 4), (4,)])
def test_a_weight_that_does_not_fit_is_named_as_the_caller_does(shape: tuple[int, ...]) -> None:
    x, weight = leaves((5, 4), shape)
    for given in (weight, weight.detach()):
        with pytest.raises(
            ArgumentError, match=r"^linear: argument 'weight' .*\[out, in\].*\(5, 4\)"
        ):
            functional.linear(x, given)


def test_a_weight_of_another_dtype_and_what_is_no_tensor_are_named_so_too() -> None:
    x, weight = leaves((5, 4), (6, 4))
    wrong: list[tuple[str, Callable[[], Any]]] = [
        (
            "linear: argument 'weight' is a bfloat16",
            lambda: functional.linear(x, weight.bfloat16()),
        ),
        ("linear: argument 'weight' is NoneType", lambda: functional.linear(x, None)),
        ("linear: argument 'input' is list", lambda: functional.linear([x], weight)),
        ("grouped_linear: argument 'weights'", lambda: functional.grouped_linear(x, None, [5])),
        ("grouped_linear: argument 'm_splits'", lambda: functional.grouped_linear(x, [weight], 5)),
    ]
    for words, call in wrong:
        with pytest.raises(ArgumentError, match=f"^{words}"):
            call()


def test_only_what_the_backward_needs_is_saved() -> None:
    x, weight, bias = leaves((5, 4), (6, 4), (6,))
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    def kept(*args: Any) -> list[int]:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it):
            functional.linear(*args)
        return [it.data_ptr() for it in saved if it is not None]

    assert kept(x, weight.detach()) == [weight.data_ptr()]
    assert kept(x.detach(), weight) == [x.data_ptr()]
    assert kept(x.detach(), weight.detach(), bias) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_narrow_dtypes_are_rounded_once(dtype: torch.dtype) -> None:
    """bfloat16 gradients are within half a unit in the last place of those in float64."""
    x, weight, bias = (
        normal(*shape, seed=place, dtype=dtype).requires_grad_()
        for place, shape in enumerate([(300, 16), (8, 16), (8,)])
    )
    dy = normal(300, 8, seed=9, dtype=dtype)
    gradients = torch.autograd.grad(functional.linear(x, weight, bias), (x, weight, bias), dy)
    wide = [dy.double() @ weight.double(), dy.double().T @ x.double(), dy.double().sum(0)]
    half = torch.finfo(dtype).eps / 2
    for found, expected in zip(gradients, wide, strict=True):
        assert found.dtype == dtype
        bound = half * expected.abs() + 1e-6 * expected.square().mean().sqrt() * 3
        assert bool(((found.double() - expected).abs() <= bound).all())


def test_a_gradient_of_the_input_times_the_slope_of_the_gelu_before() -> None:
    """The backward through a layer and the GELU before it is one product."""
    x, first, second = leaves((5, 4), (6, 4), (3, 6))
    hidden, _, pre_gelu = ops.generic_gemm(first, x, gelu=True)
    assert hidden is not None
    assert pre_gelu is not None
    dy = normal(5, 3, seed=8)
    d_pre, d_bias, _ = ops.generic_gemm(
        second,
        dy,
        transa=False,
        grad=True,
        gelu=True,
        gelu_input=pre_gelu,
        bias_grad=True,
    )
    leaf = pre_gelu.requires_grad_()
    expected = torch.autograd.grad(F.linear(F.gelu(leaf, approximate="tanh"), second), leaf, dy)[0]
    torch.testing.assert_close(d_pre, expected)
    torch.testing.assert_close(d_bias, dy.sum(0))


# ------------------------------------------------------------------------ accumulation


@pytest.mark.parametrize("gelu", [False, True])
def test_main_grad_collects_the_gradients_of_several_batches(gelu: bool) -> None:
    weight, bias = leaves((6, 4), (6,))
    main_grad, expected = torch.zeros(6, 4).double(), torch.zeros(6, 4).double()
    batches = [normal(5, 4, seed=20 + place) for place in range(3)]
    outputs = [
        functional.linear(it, weight, bias, gelu=gelu, main_grad=main_grad) for it in batches
    ]
    for output, batch in zip(outputs, batches, strict=True):
        output.square().sum().backward()
        loss = torch_linear(batch, weight, bias, gelu=gelu).square().sum()
        expected += torch.autograd.grad(loss, weight)[0]
    torch.testing.assert_close(main_grad, expected)
    assert weight.grad is None
    assert bias.grad is not None


def test_main_grads_of_groups() -> None:
    weights = leaves(*[(6, 4)] * 3)
    x = normal(7, 4, seed=30)
    main_grads = [torch.full((6, 4), float(place)).double() for place in range(3)]
    functional.grouped_linear(x, weights, SPLITS, main_grads=main_grads).sum().backward()
    for place, (main_grad, part) in enumerate(zip(main_grads, x.split(SPLITS), strict=True)):
        torch.testing.assert_close(main_grad, place + part.sum(0).expand(6, 4))
    assert [it.grad for it in weights] == [None] * 3


def test_nothing_is_added_for_a_weight_that_is_frozen() -> None:
    x, weight, bias = leaves((5, 4), (6, 4), (6,))
    main_grad = torch.zeros(6, 4).double()
    functional.linear(x, weight.detach(), bias, main_grad=main_grad).sum().backward()
    functional.grouped_linear(
        x, [weight.detach()], [5], [bias], main_grads=[main_grad]
    ).sum().backward()
    assert not main_grad.any()
    others = torch.zeros(6, 4).double()
    functional.grouped_linear(
        x, [weight.detach(), weight], [2, 3], main_grads=[main_grad, others]
    ).sum().backward()
    assert not main_grad.any()
    torch.testing.assert_close(others, x.detach()[2:].sum(0).expand(6, 4))


@pytest.mark.parametrize("grouped", [False, True])
def test_float32_sums_of_bfloat16_products_are_not_rounded_on_the_way(grouped: bool) -> None:
    """A product that is rounded to bfloat16 first would be within bfloat16's tolerance."""
    x, dy = normal(40, 16, dtype=torch.bfloat16), normal(40, 8, seed=2, dtype=torch.bfloat16)
    total = normal(8, 16, seed=3, dtype=torch.float32)
    expected = total + dy.float().T @ x.float()
    wgrad = {"transa": False, "transb": True}
    if grouped:
        returned = ops.te_general_grouped_gemm([x], [dy], [40], accumulate_into=[total], **wgrad)
    else:
        returned = ops.generic_gemm(x, dy, accumulate_into=total, **wgrad)
    assert returned == (None, None, None)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-5)


def test_an_empty_group_gives_zero_or_leaves_what_is_accumulated() -> None:
    x, dy = normal(7, 4), normal(7, 6, seed=2)
    wgrad = {"transa": False, "transb": True}
    D, _, _ = ops.te_general_grouped_gemm([x], [dy], SPLITS, **wgrad)
    assert D is not None
    assert not D.view(3, 6, 4)[1].any()
    totals = [normal(6, 4, seed=3 + place) for place in range(3)]
    before = totals[1].clone()
    ops.te_general_grouped_gemm([x], [dy], SPLITS, accumulate_into=totals, **wgrad)
    assert torch.equal(totals[1], before)


def test_groups_are_products_of_their_own() -> None:
    weights, x = [normal(6, 4, seed=place) for place in range(3)], normal(7, 4, seed=5)
    bias = [normal(6, seed=10 + place) for place in range(3)]
    D, _, pre_gelu = ops.te_general_grouped_gemm(weights, [x], SPLITS, bias=bias, gelu=True)
    each = [
        ops.generic_gemm(weight, part, bias=b, gelu=True)
        for weight, part, b in zip(weights, x.split(SPLITS), bias, strict=True)
    ]
    for found, place in ((D, 0), (pre_gelu, 2)):
        torch.testing.assert_close(found, torch.cat([it[place] for it in each]))


# ----------------------------------------------------------------------------- float8


@pytest.mark.parametrize("transa", [True, False])
def test_the_scales_of_float8_blocks_apply_to_their_own_data(transa: bool) -> None:
    """One block of each operand is scaled by two, so that a misplaced scale shows."""
    A, B = (torch.ones(shape).to(torch.float8_e4m3fn) for shape in ((256, 256), (3, 256)))
    of_a, of_b = torch.ones(2, 2), torch.ones(3, 2)
    of_a[0, 1], of_b[2, 0] = 2, 2
    D, _, _ = ops.generic_gemm(
        A, B, transa=transa, A_scale_inv=of_a, B_scale_inv=of_b, out_dtype=torch.float32
    )
    assert D is not None
    a, b = torch.ones(256, 256), torch.ones(3, 256)
    a[:128, 128:], b[2, :128] = 2, 2
    assert torch.equal(D, b @ (a.T if transa else a))


def test_an_exponent_scales_each_32_values() -> None:
    A, B = (torch.ones(shape).to(torch.float8_e4m3fn) for shape in ((5, 64), (2, 64)))
    exponents = torch.tensor([[0, 3], [-2, 1]])
    D, _, _ = ops.generic_gemm(
        A,
        B,
        A_scale_inv=torch.ones(1),
        B_scale_inv=exponents.float().exp2().to(torch.float8_e8m0fnu),
    )
    assert D is not None
    assert D.dtype == torch.bfloat16
    assert D[:, 0].tolist() == [32 * (1 + 8), 32 * (0.25 + 2)]


# -------------------------------------------------------------------------- compiled


@pytest.fixture
def opaque() -> Iterator[None]:
    """A vendor whose kernels are opaque to the compiler."""
    torch._dynamo.reset()
    family = import_module("transformer_engine_fl.backends.reference.gemm")
    registry = te.get_default_manager().registry
    for name in OPERATORS:
        registry.register_impl(
            te.OpImpl(
                name, "vendor.own", "vendor", getattr(family, name), vendor="own", devices=["cpu"]
            )
        )
    yield
    torch._dynamo.reset()


def written(name: str) -> te.Sample:
    samples = ops.CATALOGUE[name].samples("float32", "cpu")
    return next(it for it in samples if it.label == "accumulated, bias_grad")


@pytest.mark.parametrize("name", OPERATORS)
def test_torchs_own_check_where_an_argument_is_written(name: str, opaque: None) -> None:
    manager = te.get_default_manager()
    entry = next(it for it in manager.registry.entries(name) if it.impl.vendor == "own")
    assert entry.load() is None
    sample, impl = written(name), _library.reference_to(entry)
    call = {**sample.kwargs, "impl": impl}
    torch.library.opcheck(_library.operator(ops.CATALOGUE[name]), sample.args, call)


@pytest.mark.parametrize("prefer", ["reference", "vendor:own"])
@pytest.mark.parametrize("name", OPERATORS)
def test_accumulation_compiles(name: str, prefer: str, opaque: None) -> None:
    manager = te.get_default_manager()

    def program(args: Any, kwargs: Any) -> Tensor:
        _, sums, _ = manager.call(name, *args, **kwargs)
        into = kwargs["accumulate_into"]
        return sums.sum() * sum(it.sum() for it in (into if isinstance(into, list) else [into]))

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    results = []
    with te.with_preference(prefer):
        for run in (program, compiled):
            sample = written(name)
            results.append((run(sample.args, sample.kwargs), sample.kwargs["accumulate_into"]))
    torch.testing.assert_close(*results)


def test_a_vendor_that_fails_leaves_a_product_to_the_others() -> None:
    """Only a call that accumulates can leave its result half written."""

    def failing(A: Tensor, B: Tensor, *, accumulate_into: Tensor | None = None) -> Any:
        raise RuntimeError("no kernel")

    te.get_default_manager().registry.register_impl(
        te.OpImpl("generic_gemm", "vendor.bad", "vendor", failing, vendor="bad", devices=["cpu"])
    )
    weight, x = normal(6, 4), normal(5, 4)
    with te.with_preference("vendor:bad"):
        with pytest.raises(te.PartialMutationError, match="accumulate_into"):
            ops.generic_gemm(weight, x, accumulate_into=torch.zeros(5, 6).double())
        te.get_default_manager().reset_quarantine()
        D, _, _ = ops.generic_gemm(weight, x)
    torch.testing.assert_close(D, x @ weight.T)


@pytest.mark.parametrize("block", ["1x128", "128x128", "MX"])
def test_scales_of_blocks_compile(block: str) -> None:
    """With inductor, which used to read out of bounds where the last block is cut off."""
    torch._dynamo.reset()
    label = f"A scaled {block}, B {block}"
    samples = ops.generic_gemm.samples("float8_e4m3fn", "cpu")
    sample = next(it for it in samples if it.label == label)
    compiled = torch.compile(lambda *args, **kw: ops.generic_gemm(*args, **kw), fullgraph=True)
    expected = ops.generic_gemm(*sample.args, **sample.kwargs)
    torch.testing.assert_close(compiled(*sample.args, **sample.kwargs), expected)


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.linear(x, weight, bias, gelu=True)


def groups(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.grouped_linear(x, [weight, weight * 2], [2, 3], [bias, bias + 1], gelu=True)


def tied(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    shared = functional.grouped_linear(x, [weight, weight], [2, 3], [bias, bias])
    return shared + functional.linear(x, x).sum()


@pytest.mark.parametrize("prefer", ["reference", "vendor:own"])
@pytest.mark.parametrize("function", [layer, groups, tied])
def test_layers_compile_forward_and_backward(
    function: Callable[..., Tensor], prefer: str, opaque: None
) -> None:
    inputs = leaves((5, 4), (6, 4), (6,))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with te.with_preference(prefer):
        outputs = [run(*inputs) for run in (function, compiled)]
    results = [(it, *torch.autograd.grad(it.square().sum(), inputs)) for it in outputs]
    torch.testing.assert_close(*results)


def test_main_grad_is_written_by_compiled_code_too() -> None:
    torch._dynamo.reset()
    x, weight = leaves((5, 4), (6, 4))
    main_grad = torch.zeros(6, 4).double()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def program(x: Tensor, weight: Tensor, main_grad: Tensor) -> Tensor:
        return functional.linear(x, weight, main_grad=main_grad)

    for _ in range(2):
        program(x, weight, main_grad).sum().backward()
    torch.testing.assert_close(main_grad, 2 * x.detach().sum(0).expand(6, 4))
    assert weight.grad is None


# ----------------------------------------------------------------------------- errors

W, X = normal(6, 4), normal(5, 4)
E4M3 = torch.float8_e4m3fn
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "matrices that do not fit": ({"A": normal(6, 5)}, "A"),
    "a transpose that does not fit": ({"transa": False}, "A"),
    "operands of two dtypes": ({"A": W.float()}, "A"),
    "a bias of another width": ({"bias": normal(4)}, "bias"),
    "a bias under grad": ({"bias": normal(6), "grad": True}, "bias"),
    "a bias gradient without grad": ({"bias_grad": True}, "bias_grad"),
    "dgelu without its input": ({"gelu": True, "grad": True}, "gelu_input"),
    "an input of GELU without grad": ({"gelu": True, "gelu_input": normal(5, 6)}, "gelu_input"),
    "an input of GELU without GELU": ({"grad": True, "gelu_input": normal(5, 6)}, "gelu_input"),
    "a total of another shape": ({"accumulate_into": normal(6, 5)}, "accumulate_into"),
    "a total that is expanded": (
        {"accumulate_into": normal(1, 6).expand(5, 6)},
        "accumulate_into",
    ),
    "a scale of what is not float8": ({"A_scale_inv": torch.ones(1)}, "A_scale_inv"),
    "float8 without a scale": (
        {"A": W.to(E4M3), "B": X.to(E4M3), "A_scale_inv": torch.ones(1)},
        "B_scale_inv",
    ),
    "a scale of no blocks": (
        {"A": W.to(E4M3), "B": X.to(E4M3), "A_scale_inv": torch.ones(3, 1)},
        "A_scale_inv",
    ),
    "float8 as the output": ({"out_dtype": E4M3}, "out_dtype"),
    "float8 times bfloat16": (
        {"A": W.bfloat16(), "B": X.to(E4M3), "B_scale_inv": torch.ones(1)},
        "A",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_call_that_breaks_the_contract_names_the_argument(what: str) -> None:
    change, argument = REFUSED[what]
    call = {"A": W, "B": X, **change}
    with pytest.raises(ArgumentError) as raised:
        ops.generic_gemm(**call)
    assert raised.value.argument == argument


X7 = normal(7, 4)
TOTAL = normal(6, 4)
GROUPS_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "splits of another sum": ({"m_splits": [3, 1, 4]}, "B"),
    "no splits of one tensor": ({"m_splits": None}, "A"),
    "a split that is negative": ({"m_splits": [4, -1, 4]}, "m_splits"),
    "too few weights": ({"A": [W, W]}, "A"),
    "weights of two widths": ({"A": [W, W, normal(5, 4)]}, "A"),
    "a vector among matrices": ({"A": [W, W, normal(4)]}, "A"),
    "too few biases": ({"bias": [normal(6), normal(6)]}, "bias"),
    "too few totals": (
        {"accumulate_into": [normal(3, 6), normal(0, 6)]},
        "accumulate_into",
    ),
    "a total of another group": (
        {"accumulate_into": [normal(3, 6), normal(4, 6), normal(0, 6)]},
        "accumulate_into",
    ),
    "one total for two groups": (
        {"A": [X7], "B": [normal(7, 6)], "transa": False, "transb": True}
        | {"accumulate_into": [TOTAL, normal(6, 4), TOTAL]},
        "accumulate_into",
    ),
    "an input of GELU for one group": (
        {"grad": True, "gelu": True, "gelu_input": normal(3, 6)},
        "gelu_input",
    ),
    "no scale in a list": ({"B_scale_inv": [None]}, "B_scale_inv"),
    "no scales in a list": ({"A_scale_inv": [None] * 3}, "A_scale_inv"),
    "bias gradients of several widths": (
        {
            "A": [normal(4, 6), normal(5, 6)],
            "B": [normal(3, 4), normal(3, 5)],
            "m_splits": None,
            "transa": False,
            "grad": True,
            "bias_grad": True,
        },
        "B",
    ),
}


@pytest.mark.parametrize("what", GROUPS_REFUSED)
def test_groups_that_break_the_contract_name_the_argument(what: str) -> None:
    change, argument = GROUPS_REFUSED[what]
    call = {"A": [W, W, W], "B": [X7], "m_splits": SPLITS, **change}
    with pytest.raises(ArgumentError) as raised:
        ops.te_general_grouped_gemm(**call)
    assert raised.value.argument == argument


def test_a_grouped_layer_has_a_weight_for_each_group() -> None:
    with pytest.raises(ArgumentError, match="weights"):
        functional.grouped_linear(normal(12, 4), [normal(12, 4)], [6, 6])


def test_a_grouped_layer_has_a_main_grad_for_each_group() -> None:
    x, frozen, weight = leaves((5, 4), (6, 4), (6, 4))
    with pytest.raises(ArgumentError, match="main_grads"):
        functional.grouped_linear(
            x, [frozen.detach(), weight], [2, 3], main_grads=[torch.zeros(12, 4).double()]
        )


def test_weights_and_biases_of_groups_may_be_parts_of_one_tensor() -> None:
    x, weights, biases = leaves((7, 4), (3, 6, 4), (3, 6))
    assert torch.autograd.gradcheck(
        lambda *it: functional.grouped_linear(it[0], it[1], SPLITS, it[2]), (x, weights, biases)
    )
