"""functional: the gradient of every softmax form, and the values of its rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import functional, ops
from transformer_engine_fl.testing import compare

UPPER = functional.scaled_upper_triang_masked_softmax
ALIGNED = functional.scaled_aligned_causal_masked_softmax


def scores(*shape: int) -> Tensor:
    torch.manual_seed(12)
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("scale", [1.0, 0.3, -2.0])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (6, 5), (7,)])
def test_the_gradient_of_the_plain_form(shape: tuple[int, ...], scale: float) -> None:
    assert torch.autograd.gradcheck(
        lambda it: functional.scaled_softmax(it, scale), (scores(*shape),)
    )


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_the_gradient_under_a_mask(dtype: torch.dtype, scale: float) -> None:
    mask = torch.rand(2, 1, 4, 5) < 0.4
    mask[0, 0, 1] = True
    x = scores(2, 3, 4, 5)
    assert torch.autograd.gradcheck(
        lambda it: functional.scaled_masked_softmax(it, mask.to(dtype), scale), (x,)
    )


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_the_gradient_of_the_causal_form(scale: float) -> None:
    assert torch.autograd.gradcheck(lambda it: UPPER(it, scale), (scores(3, 5, 5),))


@pytest.mark.parametrize("sizes", [(3, 5), (5, 3), (4, 4), (1, 6)])
def test_the_gradient_of_the_aligned_causal_form(sizes: tuple[int, int]) -> None:
    assert torch.autograd.gradcheck(lambda it: ALIGNED(it, 0.3), (scores(2, 2, *sizes),))


def test_values_are_those_of_the_formula() -> None:
    row = [0.5, -1.0, 2.0]
    weights = [math.exp(0.25 * value) for value in row]
    found = functional.scaled_softmax(torch.tensor(row, dtype=torch.float64), 0.25)
    assert found.tolist() == pytest.approx([it / sum(weights) for it in weights], rel=1e-14)


def test_a_row_that_is_hidden_whole_is_zero_and_gets_no_gradient() -> None:
    x = scores(2, 4)
    mask = torch.tensor([[True] * 4, [False, True, False, False]])
    output = functional.scaled_masked_softmax(x, mask)
    assert output[0].tolist() == [0.0] * 4
    assert output[1].sum().item() == pytest.approx(1.0)
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    assert gradient[0].tolist() == [0.0] * 4
    assert gradient[1, 1] == 0


def test_a_row_whose_visible_scores_are_all_minus_infinity_is_as_one_that_sees_nothing() -> None:
    inf = torch.inf
    x = torch.tensor([[-inf, 1, 1], [-inf, -inf, 1], [-inf, 2, -inf]], dtype=torch.float64)
    x.requires_grad_()
    mask = torch.tensor([False, False, True])
    causal = [[0, 0, 0], [0, 0, 0], [0, 1, 0]]
    for output, right in (
        (functional.scaled_masked_softmax(x, mask), [[0, 1, 0], [0, 0, 0], [0, 1, 0]]),
        (UPPER(x), causal),
        (ALIGNED(x), causal),
    ):
        assert output.tolist() == right
        (gradient,) = torch.autograd.grad(output.square().sum(), x)
        assert not gradient.any()


@pytest.mark.parametrize("low", [0.0, -9000.0, -30000.0])
def test_what_is_hidden_stays_so_however_low_the_visible_scores(low: float) -> None:
    x = torch.tensor([[low, low, low + 1]])
    output = functional.scaled_masked_softmax(x, torch.tensor([[False, False, True]]))
    assert output.tolist() == [[0.5, 0.5, 0.0]]


@pytest.mark.parametrize("sizes", [(3, 5), (5, 3), (4, 4)])
def test_the_last_query_sees_every_key_and_each_one_before_it_one_less(
    sizes: tuple[int, int],
) -> None:
    queries, keys = sizes
    output = ALIGNED(torch.zeros(queries, keys))
    for i in range(queries):
        seen = max(i + keys - queries + 1, 0)
        expected = [1 / max(seen, 1)] * seen + [0.0] * (keys - seen)
        assert output[i].tolist() == pytest.approx(expected)


def test_the_causal_forms_agree_where_both_apply() -> None:
    x = scores(3, 7, 7).detach()
    assert torch.equal(UPPER(x, 0.5), ALIGNED(x, 0.5))


def test_hidden_keys_of_a_row_that_is_nan_may_be_zero_or_nan_and_nothing_else() -> None:
    contract = ops.CATALOGUE["scaled_masked_softmax_forward"]
    x, mask = scores(3, 4).detach(), torch.zeros(3, 4, dtype=torch.bool)
    mask[:, 2], x[1, 0] = True, torch.nan
    expected = contract.oracle(x, mask)
    right = ops.scaled_masked_softmax_forward(x, mask)

    def ratio(row: int, column: int, value: float) -> float:
        changed = right.clone()
        changed[row, column] = value
        return compare(changed, expected, contract.tolerance["float64"]).ratio

    allowed = [(1, 2, 0.0), (1, 2, torch.nan), (0, 2, 0.0), (1, 1, torch.nan)]
    wrong = [(1, 2, 0.1), (0, 2, torch.nan), (1, 1, 0.0), (0, 0, right[0, 0].item() * (1 + 1e-9))]
    assert all(ratio(*it) <= 1 for it in allowed)
    assert all(ratio(*it) > 1 for it in wrong)


def test_a_mask_that_does_not_expand_is_refused_with_the_reason() -> None:
    x = torch.ones(2, 3, 4, 5)
    for shape in ((2, 1, 4, 4), (3, 1, 4, 5), (1, 2, 3, 4, 5)):
        with pytest.raises(te.ArgumentError, match="expands to"):
            functional.scaled_masked_softmax(x, torch.zeros(shape, dtype=torch.bool))
    with pytest.raises(te.ArgumentError, match="'mask'"):
        functional.scaled_masked_softmax(x, torch.zeros(4, 5))


def test_unequal_lengths_are_refused_by_the_form_that_needs_equal_ones() -> None:
    with pytest.raises(te.ArgumentError, match="as many keys as queries"):
        UPPER(torch.ones(2, 3, 4))
    with pytest.raises(te.ArgumentError, match="as many keys as queries"):
        ops.scaled_upper_triang_masked_softmax_backward(torch.ones(3, 4), torch.ones(3, 4))
    with pytest.raises(te.ArgumentError, match="at least 2"):
        ALIGNED(torch.ones(4))


def test_the_gradient_given_is_left_as_it_is() -> None:
    output = functional.scaled_softmax(scores(3, 4)).detach()
    grad = torch.ones(3, 4, dtype=torch.float64)
    ops.scaled_softmax_backward(grad, output, 2.0)
    assert grad.eq(1).all()
