"""The router: gradients, the published definitions, ties and bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import functional, ops
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.functional._differentiable import apply

FUNCTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax before": {"use_pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid"},
    "sqrtsoftplus": {"score_function": "sqrtsoftplus"},
}
NAMES = ("softmax", "sigmoid", "sqrtsoftplus")


def some_logits(tokens: int = 4, experts: int = 6, seed: int = 1) -> Tensor:
    """Logits that differ so much within a row that a small step changes no choice."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, experts, generator=generator).argsort(-1)
    return (order.double() - experts / 2) * (4 / experts)


def leaf(*shape: int) -> Tensor:
    return some_logits(*shape).requires_grad_()


def score(x: float, name: str) -> float:
    if name == "sigmoid":
        return 1 / (1 + math.exp(-x))
    return math.sqrt(math.log1p(math.exp(x)))


# --------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("topk", [1, 2, 6])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_router_passes_gradcheck(name: str, topk: int) -> None:
    assert torch.autograd.gradcheck(
        lambda it: functional.topk_router(it, topk, scaling_factor=2.5, **FUNCTIONS[name])[0],
        (leaf(),),
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_router_with_groups_passes_gradcheck(name: str) -> None:
    options = {"num_groups": 3, "group_topk": 2, **FUNCTIONS[name]}
    assert torch.autograd.gradcheck(
        lambda it: functional.topk_router(it, 2, **options)[0], (leaf(),)
    )


@pytest.mark.parametrize("name", ["sigmoid", "sqrtsoftplus"])
def test_a_bias_chooses_and_has_no_gradient(name: str) -> None:
    x, options = leaf(1, 4), {"score_function": name}
    bias = torch.tensor([0.0, 0.0, 100.0, 100.0]).double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda it: functional.topk_router(it, 2, bias, **options)[0], (x,)
    )
    probs, routing_map = functional.topk_router(x, 2, bias, **options)
    assert routing_map.tolist() == [[False, False, True, True]]
    chosen = [score(it, name) for it in x[0, 2:].tolist()]
    assert probs[0, 2:].tolist() == pytest.approx([it / sum(chosen) for it in chosen], rel=1e-12)
    probs[0, 2].backward()
    assert bias.grad is None


@pytest.mark.parametrize("topk", [1, 2, 6])
@pytest.mark.parametrize("name", NAMES)
def test_the_scores_for_the_loss_pass_gradcheck(name: str, topk: int) -> None:
    assert torch.autograd.gradcheck(
        lambda it: functional.score_for_moe_aux_loss(it, topk, score_function=name)[0], (leaf(),)
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_the_loss_passes_gradcheck(dtype: torch.dtype) -> None:
    counts = torch.tensor([3, 0, 1, 2, 5, 1], dtype=dtype)
    assert torch.autograd.gradcheck(
        lambda it: functional.moe_aux_loss(it, counts, 12, 2, 0.3), (leaf(),)
    )


def test_the_routing_map_is_the_same_with_and_without_grad_and_has_none() -> None:
    for run in (functional.topk_router, functional.score_for_moe_aux_loss):
        (_, plain), (probs, tracked) = run(some_logits(), 2), run(leaf(), 2)
        assert probs.requires_grad
        assert not tracked.requires_grad
        assert torch.equal(plain, tracked)


def test_what_is_saved_has_no_gradient_either() -> None:
    # It is floating point, so autograd must be told.
    outputs = apply("fused_topk_with_score_function_fwd", {"topk": 2}, leaf(), outputs=3)
    assert [it.requires_grad for it in outputs] == [True, False, False]


def test_only_the_chosen_get_a_gradient_unless_softmax_comes_first() -> None:
    for name, options in FUNCTIONS.items():
        x = leaf()
        probs, routing_map = functional.topk_router(x, 2, **options)
        (probs * some_logits(seed=3)).sum().backward()
        assert x.grad is not None
        assert bool(x.grad[routing_map].all())
        assert bool(x.grad[~routing_map].all()) == (name == "softmax before")
        assert bool(x.grad[~routing_map].any()) == (name == "softmax before")


def test_the_gradient_survives_where_the_square_of_a_score_does_not() -> None:
    # There sqrt(softplus(x)) is exp(x / 2), and its derivative is half of that.
    scores = torch.tensor([[math.exp(-75), math.exp(-85)]])
    ones, routing_map = torch.ones(1, 2), torch.tensor([[True, False]])
    options = {"score_function": "sqrtsoftplus"}
    gradient = ops.fused_topk_with_score_function_bwd(ones, routing_map, scores, 1, **options)
    assert gradient.tolist() == [[pytest.approx(math.exp(-75) / 2, rel=1e-6, abs=0), 0]]


def test_the_router_compiles_with_its_gradient() -> None:
    torch._dynamo.reset()
    bias = some_logits(1)[0] / 10
    options = {"num_groups": 3, "group_topk": 2, "score_function": "sigmoid"}

    def program(x: Tensor) -> Tensor:
        probs, routing_map = functional.topk_router(x, 2, bias, **options)
        scores, chosen = functional.score_for_moe_aux_loss(x, 2)
        loss = functional.moe_aux_loss(scores, chosen.sum(0), x.shape[0], 2, 0.1)
        return (probs.square() * routing_map).sum() + loss

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (4, 7):
        x = leaf(tokens)
        gradients = [torch.autograd.grad(run(x), x) for run in (program, compiled)]
        torch.testing.assert_close(*gradients)


# ---------------------------------------------------------------------------- meaning


def test_softmax_after_the_choice() -> None:
    x = some_logits(9, 16)
    probs, routing_map = functional.topk_router(x, 3)
    values, places = x.topk(3)
    assert torch.equal(routing_map, torch.zeros_like(x).scatter(1, places, 1).bool())
    torch.testing.assert_close(probs, torch.zeros_like(x).scatter(1, places, values.softmax(-1)))


def test_softmax_before_the_choice() -> None:
    x = some_logits(9, 16)
    probs, routing_map = functional.topk_router(x, 3, use_pre_softmax=True)
    values, places = x.softmax(-1).topk(3)
    assert torch.equal(routing_map, torch.zeros_like(x).scatter(1, places, 1).bool())
    torch.testing.assert_close(probs, torch.zeros_like(x).scatter(1, places, values))


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("name", ["sigmoid", "sqrtsoftplus"])
def test_other_scores_are_normalized_where_there_are_several(name: str, topk: int) -> None:
    x = some_logits(5, 9)
    probs, _ = functional.topk_router(x, topk, score_function=name, scaling_factor=3.0)
    for line, found in zip(x.tolist(), probs.tolist(), strict=True):
        best = sorted(range(9), key=lambda e: -line[e])[:topk]
        scores = {e: score(line[e], name) for e in best}
        total = sum(scores.values()) if topk > 1 else 1.0
        expected = [3.0 * scores.get(e, 0.0) / total for e in range(9)]
        assert found == pytest.approx(expected, rel=1e-12)


def test_deepseek_v3() -> None:
    # 8 of the experts in the 4 groups, of 8 groups of 32, whose two highest scores have the highest
    # sums; the bias only affects the choice; the chosen scores are normalized, then times 2.5.
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(33, 256, generator=generator, dtype=torch.float64)
    bias = torch.randn(256, generator=generator, dtype=torch.float64) * 0.2
    probs, routing_map = functional.topk_router(
        x, 8, bias, num_groups=8, group_topk=4, scaling_factor=2.5, score_function="sigmoid"
    )
    scores = x.sigmoid()
    biased = (scores + bias).view(33, 8, 32)
    kept = biased.topk(2, dim=-1).values.sum(-1).topk(4, dim=-1).indices
    hidden = torch.ones(33, 8, dtype=torch.bool).scatter(1, kept, False)
    places = biased.masked_fill(hidden.unsqueeze(-1), -torch.inf).flatten(1).topk(8).indices
    weights = scores.gather(1, places)
    expected = torch.zeros_like(x).scatter(1, places, 2.5 * weights / weights.sum(-1, True))
    torch.testing.assert_close(probs, expected)
    assert torch.equal(routing_map, expected > 0)
    assert bool((routing_map.view(33, 8, 32).any(-1).sum(-1) <= 4).all())
    unlimited = functional.topk_router(x, 8, bias, score_function="sigmoid")[1]
    assert not torch.equal(routing_map, unlimited)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_first_of_equal_experts_and_of_equal_groups_are_chosen(name: str) -> None:
    x = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 2.0]])
    _, routing_map = functional.topk_router(x, 3, **FUNCTIONS[name])
    assert routing_map.nonzero()[:, 1].tolist() == [1, 2, 4]
    grouped = {"num_groups": 3, "group_topk": 1, **FUNCTIONS[name]}
    _, routing_map = functional.topk_router(x[:, [1, 0, 4, 2, 3, 5]], 1, **grouped)
    assert routing_map.nonzero()[:, 1].tolist() == [0]
    _, routing_map = functional.topk_router(torch.zeros(1, 6), 2, **grouped)
    assert routing_map.nonzero()[:, 1].tolist() == [0, 1]
    many = functional.topk_router(torch.zeros(3, 300), 7, **FUNCTIONS[name])[1]
    assert bool(many[:, :7].all())
    assert not many[:, 7:].any()


def test_equal_experts_for_the_loss_are_the_first_as_well() -> None:
    for name in NAMES:
        options = {"score_function": name}
        many = functional.score_for_moe_aux_loss(torch.zeros(3, 300), 7, **options)[1]
        assert bool(many[:, :7].all())
        assert not many[:, 7:].any()


def test_every_row_has_topk_experts_even_where_most_are_hidden() -> None:
    x = torch.full((2, 5), -math.inf)
    x[:, 3] = 1.0
    probs, routing_map = functional.topk_router(x, 2)
    assert routing_map.sum(-1).tolist() == [2, 2]
    assert probs[:, 3].tolist() == [1, 1]
    assert not probs[:, [0, 1, 2, 4]].any()


def test_scores_that_are_all_zero_give_zeros() -> None:
    x = torch.full((2, 4), -1000.0, requires_grad=True)
    for name in ("sigmoid", "sqrtsoftplus"):
        probs, _ = functional.topk_router(x, 2, score_function=name)
        assert not probs.any()
        scores, _ = functional.score_for_moe_aux_loss(x, 2, score_function=name)
        assert not scores.any()
        (gradient,) = torch.autograd.grad((probs + scores).sum(), x)
        assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_is_saved_is_not_rounded_to_the_dtype_of_the_logits(dtype: torch.dtype) -> None:
    x = some_logits().to(dtype)
    probs, _, saved = ops.fused_topk_with_score_function_fwd(x, 2)
    scores, _, kept = ops.fused_score_for_moe_aux_loss_fwd(x, 2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert probs.dtype == scores.dtype == dtype
    assert saved.dtype == kept.dtype == wide
    torch.testing.assert_close(kept, x.to(wide).softmax(-1))


@pytest.mark.parametrize("name", NAMES)
def test_scores_for_the_loss_are_of_every_expert(name: str) -> None:
    x = some_logits(5, 9)
    scores, routing_map = functional.score_for_moe_aux_loss(x, 3, score_function=name)
    torch.testing.assert_close(scores.sum(-1), torch.ones(5).double())
    assert torch.equal(routing_map, torch.zeros_like(x).scatter(1, x.topk(3).indices, 1).bool())
    single, _ = functional.score_for_moe_aux_loss(x, 1, score_function=name)
    if name == "softmax":
        assert torch.equal(single, scores)
    else:
        torch.testing.assert_close(single[0, 0].item(), score(x[0, 0].item(), name))


def test_the_loss_is_its_weight_where_every_expert_has_the_same_load() -> None:
    probs = torch.full((12, 4), 0.25, dtype=torch.float64)
    loss = functional.moe_aux_loss(probs, torch.full((4,), 6), 12, 2, 0.01)
    assert loss.item() == pytest.approx(0.01, rel=1e-12)
    assert loss.shape == ()


def test_the_loss_is_that_of_fractions_and_mean_probs() -> None:
    probs, chosen = functional.score_for_moe_aux_loss(some_logits(12, 4), 2)
    counts = chosen.sum(0)
    fractions, means = counts / (12 * 2), probs.mean(0)
    expected = 0.01 * 4 * (fractions * means).sum()
    loss = functional.moe_aux_loss(probs, counts, 12, 2, 0.01)
    torch.testing.assert_close(loss, expected)


def test_a_weight_of_the_loss_beyond_float32_is_infinite() -> None:
    largest = torch.finfo(torch.float32).max
    loss, const = ops.fused_moe_aux_loss_fwd(torch.ones(2, 4), torch.ones(4), 1, 1, largest)
    assert loss.isinf()
    assert const.isinf()


def test_the_loss_of_parts_sums_to_that_of_the_whole() -> None:
    probs, chosen = functional.score_for_moe_aux_loss(some_logits(12, 4), 2)
    whole = functional.moe_aux_loss(probs, chosen.sum(0), 12, 2, 0.01)
    parts = [
        functional.moe_aux_loss(part, chosen.sum(0), 12, 2, 0.01) for part in probs.split([5, 7])
    ]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_hidden_expert_of_a_chosen_group_goes_before_one_of_another(name: str) -> None:
    x = torch.tensor([[1.0, 2.0, 5.0, 4.0, 3.0, 6.0]])
    hidden = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0, 0.0]).log()  # one expert each of groups 1 and 2
    given = {"expert_bias": hidden} if name in NAMES[1:] else {}
    x = x if given else x + hidden
    _, routing_map = functional.topk_router(x, 3, **given, **GROUPS, **FUNCTIONS[name])
    assert routing_map.nonzero()[:, 1].tolist() == [2, 3, 4]


def test_no_values_are_read_back() -> None:
    # Reading a value of a meta tensor fails.
    x, bias = some_logits().to("meta"), some_logits(1)[0].to("meta")
    with te.with_preference("reference"):
        probs, routing_map, saved = ops.fused_topk_with_score_function_fwd(
            x, 2, bias, num_groups=3, group_topk=2, score_function="sigmoid"
        )
        gradient = ops.fused_topk_with_score_function_bwd(probs, routing_map, saved, 2)
        assert gradient.shape == x.shape
        scores, _, saved = ops.fused_score_for_moe_aux_loss_fwd(x, 2)
        assert ops.fused_score_for_moe_aux_loss_bwd(scores, saved, 2).shape == x.shape
        loss, const = ops.fused_moe_aux_loss_fwd(scores, bias, 4, 2, 0.1)
        assert ops.fused_moe_aux_loss_bwd(loss, const, bias, 4).shape == x.shape


# ----------------------------------------------------------------------------- errors

GROUPS = {"num_groups": 3, "group_topk": 2}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no expert": ({"topk": 0}, "topk"),
    "more experts than there are": ({"topk": 7}, "topk"),
    "logits of no expert": ({"logits": some_logits()[:, :0]}, "logits"),
    "logits of one dimension": ({"logits": some_logits()[0]}, "logits"),
    "another score function": ({"score_function": "tanh"}, "score_function"),
    "a flag that is none": ({"use_pre_softmax": 1}, "use_pre_softmax"),
    "a factor that is no number": ({"scaling_factor": None}, "scaling_factor"),
    "a bias for softmax": ({"expert_bias": some_logits(1)[0]}, "expert_bias"),
    "a bias of other experts": (
        {"expert_bias": some_logits(1, 5)[0], "score_function": "sigmoid"},
        "expert_bias",
    ),
    "groups without how many": ({"num_groups": 3}, "group_topk"),
    "how many without groups": ({"group_topk": 2}, "num_groups"),
    "groups of different sizes": ({"num_groups": 4, "group_topk": 2}, "num_groups"),
    "more groups than there are": ({"num_groups": 3, "group_topk": 4}, "group_topk"),
    "too few groups for topk": ({"num_groups": 3, "group_topk": 1, "topk": 3}, "group_topk"),
    "more groups than experts": ({"num_groups": 3, "group_topk": 3}, "group_topk"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_call_that_breaks_the_contract_names_the_argument(what: str) -> None:
    change, argument = REFUSED[what]
    call = {"logits": some_logits(), "topk": 2, **change}
    with pytest.raises(ArgumentError) as raised:
        ops.fused_topk_with_score_function_fwd(call.pop("logits"), call.pop("topk"), **call)
    assert raised.value.argument == argument
