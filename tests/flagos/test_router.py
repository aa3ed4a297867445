"""Triton's router: extremes, groups of every size, and the widest rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_engine_fl.backends.flagos import router as flagos
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.ops import router as contracts

topk_of = flagos.fused_topk_with_score_function_fwd
right_topk_of = contracts.fused_topk_with_score_function_fwd.oracle


def distinct(tokens: int, experts: int, device: str) -> Tensor:
    """Logits such that no two of a row round to the same score."""
    generator = torch.Generator().manual_seed(experts)
    order = torch.rand(tokens, experts, generator=generator).argsort(-1)
    return (order.float() * (8 / experts) - 4).to(device)


def check(logits: Tensor, topk: int, *args: Any, **kwargs: Any) -> Tensor:
    """Check the choice and its probs against the contract; returns the choice."""
    found, expected = (it(logits, topk, *args, **kwargs) for it in (topk_of, right_topk_of))
    assert torch.equal(found[1], expected[1])
    assert (found[1].sum(1) == topk).all()
    for mine, right in ((found[0], expected[0]), (found[2], expected[2])):
        torch.testing.assert_close(
            mine.double(), right.double(), rtol=2e-6, atol=1e-6, equal_nan=True
        )
    return found[1]


@pytest.mark.parametrize("function", contracts.SCORE_FUNCTIONS)
@pytest.mark.parametrize(
    ("experts", "groups", "group_topk", "topk"),
    [(160, 8, 3, 6), (24, 3, 2, 5), (30, 5, 5, 30), (7, 7, 3, 3), (9, 1, 1, 4), (1000, 10, 2, 8)],
)
def test_groups_of_every_size(
    experts: int, groups: int, group_topk: int, topk: int, function: str, device: str
) -> None:
    logits = distinct(9, experts, device)
    check(logits, topk, num_groups=groups, group_topk=group_topk, score_function=function)


# Experts of a group that lost are not chosen, even if no other expert is above -inf.
@pytest.mark.parametrize("visible", [(), (2,), (0, 1, 2, 3), (5, 6)])
def test_hidden_experts_are_chosen_where_no_others_are_allowed(
    visible: tuple[int, ...], device: str
) -> None:
    logits = torch.full((2, 8), -math.inf, device=device)
    for expert in visible:
        logits[:, expert] = float(expert)
    chosen = check(logits, 3, num_groups=2, group_topk=1)
    assert not (chosen[:, :4].any() and chosen[:, 4:].any())


def test_zeros_of_both_signs_are_equal(device: str) -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, 0.0]], device=device)
    assert check(logits, 2).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_missing_values_are_chosen_as_the_highest(dtype: torch.dtype, device: str) -> None:
    logits = torch.tensor([[1.0, 2.0, math.nan, 3.0]], dtype=dtype, device=device)
    for name in contracts.SCORE_FUNCTIONS:
        _, chosen, _ = topk_of(logits, 2, score_function=name)
        assert chosen.tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("experts", [511, 2048, 5000])
def test_rows_of_every_width(experts: int, device: str) -> None:
    logits = distinct(3, experts, device)
    for topk in (1, 9):
        check(logits, topk)
        check(logits, topk, score_function="sqrtsoftplus")


def test_more_experts_than_registers_hold_are_declined(device: str) -> None:
    logits = torch.zeros(1, 16385, device=device)
    with pytest.raises(NotSupportedError, match="16384 experts"):
        topk_of(logits, 1)
    with pytest.raises(NotSupportedError, match="16384 experts"):
        flagos.fused_score_for_moe_aux_loss_fwd(logits, 1)


# From scores whose square underflows float32 to scores past the range of the series.
def test_the_slope_of_sqrtsoftplus_at_every_score(device: str) -> None:
    scores = torch.logspace(-30, 1, 200, dtype=torch.float64, device=device)[:, None]
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 1e-13)):
        kept = scores.to(dtype)
        found = flagos.fused_score_for_moe_aux_loss_bwd(
            torch.ones_like(kept), kept, 1, score_function="sqrtsoftplus"
        )
        square = kept.double().square()
        expected = -torch.expm1(-square) / (2 * kept.double())
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("shape", [(1, 1), (5, 3000), (3000, 5), (700, 128)])
def test_the_loss_of_every_shape(shape: tuple[int, int], device: str) -> None:
    probs = torch.rand(shape, generator=torch.Generator().manual_seed(5)).to(device)
    counts = torch.arange(shape[1], dtype=torch.int64, device=device)
    args = probs, counts, shape[0], 2, 0.5
    found = flagos.fused_moe_aux_loss_fwd(*args)
    expected = contracts.fused_moe_aux_loss_fwd.oracle(*args)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=2e-6, atol=0.0)
    backward = found[0], found[1], counts, shape[0]
    gradient = flagos.fused_moe_aux_loss_bwd(*backward)
    right = contracts.fused_moe_aux_loss_bwd.oracle(*backward)
    torch.testing.assert_close(gradient.double(), right, rtol=2e-6, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_scores_of_sqrtsoftplus_keep_their_digits(dtype: torch.dtype, device: str) -> None:
    logits = torch.linspace(-30, 20, 101, dtype=dtype)[:, None].to(device)
    _, _, scores = topk_of(logits, 1, score_function="sqrtsoftplus")
    exact = logits.double().logaddexp(torch.zeros((), dtype=torch.float64, device=device)).sqrt()
    tolerance = 2e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(scores.double(), exact, rtol=tolerance, atol=0.0)
