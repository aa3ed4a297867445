"""functional: every activation's gradient, by finite differences and at its kinks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import functional, ops

PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
GATED = ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu")
DBIAS = ("gelu", "qgelu", "relu", "srelu", "silu")

Function = Callable[..., Tensor]


def function(name: str) -> Function:
    found: Function = getattr(functional, name)
    return found


def points(*shape: int) -> Tensor:
    """Values around zero, none so near to a kink that a finite difference crosses it."""
    torch.manual_seed(11)
    x = torch.randn(shape, dtype=torch.float64) * 2
    near = x.abs() < 0.05
    return torch.where(near, x + 0.2, x).requires_grad_()


@pytest.mark.parametrize("name", [*PLAIN, *GATED])
@pytest.mark.parametrize("shape", [(3, 8), (10,), (2, 3, 4)])
def test_gradients_pass_gradcheck(name: str, shape: tuple[int, ...]) -> None:
    assert torch.autograd.gradcheck(function(name), (points(*shape),))


@pytest.mark.parametrize(("limit", "alpha"), [(1.0, 1.702), (7.0, 0.5), (0.5, 1.0)])
def test_the_options_of_the_clamped_form_reach_its_backward(limit: float, alpha: float) -> None:
    x = points(4, 10)
    x = torch.where((x.abs() - limit).abs() < 0.05, x + 0.2, x).detach().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda it: functional.clamped_swiglu(it, limit=limit, alpha=alpha), (x,)
    )


def test_no_dimensions_have_a_gradient_too() -> None:
    x = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(functional.silu, (x,))


@pytest.mark.parametrize("name", ["relu", "srelu"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_the_gradient_at_zero_is_zero(name: str, zero: float) -> None:
    x = torch.tensor([zero, -1.0, 1.0], requires_grad=True)
    function(name)(x).sum().backward()
    assert x.grad is not None
    assert x.grad[:2].tolist() == [0.0, 0.0]
    assert x.grad[2] > 0


def test_nothing_flows_to_what_was_clamped_and_all_to_what_is_at_the_limit() -> None:
    a = torch.tensor([8.0, 7.0, -9.0, 1.0, 1.0, 1.0])
    b = torch.tensor([1.0, 1.0, 1.0, 8.0, -8.0, 7.0])
    da, db = ops.clamped_dswiglu(torch.ones(6), torch.cat([a, b])).chunk(2)
    assert (da != 0).tolist() == [False, True, True, True, True, True]
    assert (db != 0).tolist() == [True, True, True, False, False, True]


def test_an_infinite_limit_is_none() -> None:
    grad, x = torch.ones(3), torch.tensor([8.0, -9.0, 1e30, 8.0, -1e30, 1.0])
    assert torch.equal(ops.clamped_swiglu(x, torch.inf), ops.clamped_swiglu(x, 1e32))
    found, expected = (ops.clamped_dswiglu(grad, x, limit) for limit in (torch.inf, 1e32))
    assert torch.equal(found, expected)
    with pytest.raises(te.ArgumentError, match="'limit'"):
        ops.clamped_swiglu(x, -torch.inf)


def test_a_steepness_beyond_the_dtype_is_infinite() -> None:
    grad, x = torch.ones(3), torch.tensor([8.0, -9.0, 0.5, 8.0, -1.0, 1.0])
    gradients = [ops.clamped_dswiglu(grad, x, alpha=alpha) for alpha in (1e39, torch.inf)]
    torch.testing.assert_close(*gradients, equal_nan=True)


def test_values_are_those_of_the_formulas() -> None:
    x = 1.3
    sigmoid = 1 / (1 + math.exp(-x))
    wide = 1 / (1 + math.exp(-1.702 * x))
    tanh = math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    expected = {
        "gelu": 0.5 * x * (1 + tanh),
        "qgelu": x * wide,
        "relu": x,
        "srelu": x * x,
        "silu": x * sigmoid,
        "glu": sigmoid * 2,
        "geglu": x * (1 + tanh),
        "qgeglu": x * wide * 2,
        "reglu": x * 2,
        "sreglu": x * x * 2,
        "swiglu": x * sigmoid * 2,
        "clamped_swiglu": x * wide * 3,
    }
    assert set(expected) == {*PLAIN, *GATED}
    for name, value in expected.items():
        values = [x] if name in PLAIN else [x, 2.0]
        found = function(name)(torch.tensor(values, dtype=torch.float64)).item()
        assert found == pytest.approx(value, rel=1e-14), name


@pytest.mark.parametrize("name", DBIAS)
def test_the_bias_gradient_comes_first_and_is_that_of_an_added_bias(name: str) -> None:
    x = points(4, 3, 6)
    bias = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(4, 3, 6, dtype=torch.float64)
    expected = torch.autograd.grad(function(name)(x + bias), (bias, x), grad)
    found = ops.CATALOGUE[f"dbias_d{name}"](grad, x.detach())
    torch.testing.assert_close(found, expected)


def test_the_bias_gradient_is_summed_before_it_is_rounded() -> None:
    ones = torch.ones(1000, 1, dtype=torch.bfloat16)  # bfloat16 can count only to 256
    dbias, dact = ops.dbias_drelu(ones, ones)
    assert dbias.item() == 1000.0
    assert dact.dtype == dbias.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PLAIN)
def test_gradients_far_out_are_numbers(name: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, -largest, 1e4, -1e4], dtype=dtype)
    gradient = ops.CATALOGUE[f"d{name}"](torch.full_like(x, 1e-3), x)
    assert gradient[[1, 3]].abs().tolist() == [0.0, 0.0]
    assert (gradient[[0, 2]] > 0).all()


@pytest.mark.parametrize("name", PLAIN)
def test_infinity_stays_and_what_is_no_number_stays_none(name: str) -> None:
    values = function(name)(torch.tensor([math.inf, math.nan]))
    assert values[0] == math.inf
    assert values[1].isnan()


def test_an_odd_last_dimension_is_refused_with_the_reason() -> None:
    with pytest.raises(te.ArgumentError, match="even last dimension"):
        functional.swiglu(torch.ones(2, 7))
    with pytest.raises(te.ArgumentError, match="'grad'"):
        ops.dswiglu(torch.ones(2, 8), torch.ones(2, 8))
    with pytest.raises(te.ArgumentError, match="'limit'"):
        functional.clamped_swiglu(torch.ones(2, 8), limit=-1.0)
