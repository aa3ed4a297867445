"""The router in CUDA C++: how rows are divided, and what the contracts' samples do not cover."""

from __future__ import annotations

import pytest
import torch
from against_contract import checking
from some_tensors import normal_of_shape

from transformer_engine_fl.backends.vendor.cuda import router
from transformer_engine_fl.backends.vendor.cuda._launch import Limits
from transformer_engine_fl.core.errors import ArgumentError, NotSupportedError

check = checking(router)

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tile_covers_its_row(dtype: torch.dtype) -> None:
    most = router.most_experts(dtype)
    for experts in (1, 19, 64, 128, 160, 256, 511, 512, 2048, 5003, most):
        tile = router.tile_of(experts, dtype)
        assert experts % tile.vec == 0
        assert tile.vec * tile.vecs * tile.lanes >= experts
        assert tile.vec * tile.vecs <= 32  # one bit for each number of a thread
        assert tile.lanes * tile.rows <= 1024


@pytest.mark.parametrize(
    ("op", "args", "named"),
    [
        ("fused_topk_with_score_function_fwd", (torch.ones(4), 1), "logits"),
        ("fused_score_for_moe_aux_loss_fwd", (torch.ones(2, 4), 5), "topk"),
        ("fused_moe_aux_loss_fwd", (torch.ones(2, 4), torch.ones(3), 2, 1, 1.0), None),
    ],
)
@pytest.mark.usefixtures("no_launch")
def test_wrong_arguments_are_named(op: str, args: tuple[object, ...], named: str | None) -> None:
    with pytest.raises(ArgumentError) as raised:
        getattr(router, op)(*args)
    assert raised.value.argument == (named or "tokens_per_expert")


@pytest.mark.parametrize("limit", [101_376, 166_912])
def test_groups_leave_room_for_what_threads_exchange(limit: int) -> None:
    """The shared memory that a kernel declares counts, too, or the launch would fail."""
    device = Limits(8, 0, 108, limit, limit + 1024)

    def shared(experts: int) -> int:
        options = (torch.float32, None, "sigmoid", experts, False, True, False)
        _, geometry, _ = router.choosing(experts, 1, *options, device)
        return geometry.shared_bytes

    # Each expert is a group by itself, with three numbers of 4 bytes.
    assert shared((limit - router.EXCHANGED) // 12) > 0
    with pytest.raises(NotSupportedError, match="shared memory"):
        shared(limit // 12)


# ------------------------------------------------------------------ on a device, or emulated


# In float64, as the contract makes its choice in float64 and the scores of so many experts are
# close to each other.
@pytest.mark.parametrize("experts", [160, 512, 600, 2051, 8192])
@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_rows_of_many_experts(experts: int, function: str, device: str) -> None:
    x = normal_of_shape(3, experts, device=device, dtype=torch.float64)
    named = {"score_function": function}
    _, routed, scores = check("fused_topk_with_score_function_fwd", x, 9, **named)
    grad = normal_of_shape(3, experts, device=device, dtype=torch.float64)
    check("fused_topk_with_score_function_bwd", grad, routed, scores, 9, **named)
    scores = check("fused_score_for_moe_aux_loss_fwd", x, 9, **named)[2]
    check("fused_score_for_moe_aux_loss_bwd", grad, scores, 9, **named)


@pytest.mark.parametrize(
    ("experts", "groups", "group_topk", "topk"),
    [
        (256, 8, 4, 8),
        (256, 8, 1, 8),
        (57, 19, 5, 11),
        (64, 64, 7, 7),
        (40, 1, 1, 3),
        (280, 40, 3, 21),
        (600, 3, 2, 12),
        (2048, 16, 4, 8),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_every_size(
    experts: int, groups: int, group_topk: int, topk: int, dtype: torch.dtype, device: str
) -> None:
    x = torch.linspace(-3, 3, 2 * experts, dtype=torch.float64)
    order = torch.randperm(2 * experts, generator=torch.Generator().manual_seed(experts))
    x = x[order].view(2, experts)
    if dtype == torch.bfloat16:  # ties in bfloat16 are ties for the contract, too
        x = x.to(dtype)
    check(
        "fused_topk_with_score_function_fwd",
        x.to(device, dtype),
        topk,
        num_groups=groups,
        group_topk=group_topk,
        scaling_factor=2.5,
    )


def test_equal_experts_are_chosen_in_their_order(device: str) -> None:
    for experts in (96, 700):
        x = torch.zeros(2, experts, dtype=torch.bfloat16, device=device)
        x[1, ::7] = -0.0
        _, routed, _ = router.fused_topk_with_score_function_fwd(x, 5)
        assert routed[:, :5].all()
        assert routed.sum() == 10
        chosen = router.fused_topk_with_score_function_fwd(x, 4, num_groups=4, group_topk=2)[1]
        assert chosen[:, :4].all()


def test_what_is_hidden_is_chosen_last(device: str) -> None:
    x = torch.full((1, 64), -torch.inf, device=device)
    x[0, 50] = 1.0
    _, routed, _ = router.fused_topk_with_score_function_fwd(x, 3)
    assert routed[0].nonzero().flatten().tolist() == [0, 1, 50]


@pytest.mark.parametrize("rows", [1, 500, 4099])
def test_losses_of_many_tokens_and_experts(rows: int, device: str) -> None:
    for experts in (6, 128, 1300):
        probs = normal_of_shape(rows, experts, device=device).softmax(-1)
        counts = torch.arange(experts, dtype=torch.int32, device=device)
        loss, constant = check("fused_moe_aux_loss_fwd", probs, counts, rows, 2, 0.5)
        check("fused_moe_aux_loss_bwd", loss, constant, counts, rows)


def test_more_experts_than_registers_hold_are_declined(device: str) -> None:
    for dtype in DTYPES:
        x = normal_of_shape(1, router.most_experts(dtype) + 1, device=device, dtype=dtype)
        with pytest.raises(NotSupportedError, match="in registers"):
            router.fused_topk_with_score_function_fwd(x, 1)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
def test_many_tokens() -> None:
    x = normal_of_shape(30_001, 128, device="cuda")
    probs, routed, scores = router.fused_topk_with_score_function_fwd(x, 8)
    chosen = x.topk(8).indices
    assert torch.equal(routed, torch.zeros_like(routed).scatter(1, chosen, True))
    expected = x.double().masked_fill(~routed, -torch.inf).softmax(-1)
    torch.testing.assert_close(probs.double(), expected, rtol=2e-6, atol=1e-7)
    grad = normal_of_shape(30_001, 128, device="cuda").flip(0)
    dx = router.fused_topk_with_score_function_bwd(grad, routed, scores, 8)
    expected = expected * (grad - (expected * grad).sum(-1, keepdim=True))
    torch.testing.assert_close(dx.double(), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.gpu
def test_it_can_be_captured_and_replayed() -> None:
    x = normal_of_shape(500, 128, device="cuda")
    counts = torch.arange(128, device="cuda")
    router._kernels.clear()  # so the capture includes loading
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        probs, routed, scores = router.fused_topk_with_score_function_fwd(x, 4)
        dx = router.fused_topk_with_score_function_bwd(probs, routed, scores, 4)
        loss, _ = router.fused_moe_aux_loss_fwd(probs, counts, 500, 4, 0.1)
    for shift in (1, 2):
        x.copy_(x.roll(shift, 0))
        graph.replay()
        again = router.fused_topk_with_score_function_fwd(x, 4)
        assert torch.equal(probs, again[0])
        assert torch.equal(dx, router.fused_topk_with_score_function_bwd(*again, 4))
        assert torch.equal(loss, router.fused_moe_aux_loss_fwd(probs, counts, 500, 4, 0.1)[0])
