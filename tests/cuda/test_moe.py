"""Moving tokens in CUDA C++: how work is divided, and what the samples do not cover."""

from __future__ import annotations

import re

import pytest
import torch
from against_contract import checking
from some_tensors import normal_of_shape
from torch import Tensor

from transformer_engine_fl.backends.vendor.cuda import _compile, moe
from transformer_engine_fl.core.errors import ArgumentError, NotSupportedError

check = checking(moe)


@pytest.mark.parametrize("least", [32, 512])
@pytest.mark.parametrize("size", [1, 31, 512, 513, 32768, 32769, 10**6, 2**30])
def test_groups_cover_what_is_counted(size: int, least: int) -> None:
    each, groups = moe.groups_of(size, least)
    assert each % least == 0
    assert (groups - 1) * each < size <= groups * each
    assert groups <= moe.MOST_GROUPS


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("usual", [2, 4])
@pytest.mark.parametrize("vectors", [1, 8, 33, 512, 896, 1024, 5000])
def test_a_team_covers_its_row(vectors: int, usual: int, halved: bool) -> None:
    team = moe.team_of(vectors, usual, 512, halved=halved)
    assert team.lanes % 32 == 0
    assert team.threads <= 512
    assert team.whole == (vectors <= team.lanes * team.vecs)
    assert team.whole or vectors > 2048
    assert not halved or team.lanes & (team.lanes - 1) == 0


def test_host_and_kernels_agree_on_buckets_and_groups() -> None:
    header = (_compile.FOLDER / "include/row_maps.cuh").read_text()
    found = dict(re.findall(r"constexpr int (\w+) = (\d+);", header))
    assert int(found["kBuckets"]) == moe.BUCKETS
    assert int(found["kMostGroups"]) == moe.MOST_GROUPS


@pytest.mark.parametrize(
    ("op", "args", "named"),
    [
        ("moe_permute_fwd", (torch.ones(4, 2), torch.zeros(3, 1, dtype=torch.int32)), "indices"),
        ("moe_permute_bwd", (torch.ones(4, 2), torch.zeros(1, 4)), "row_id_map"),
        ("moe_unpermute_fwd", (torch.ones(4), torch.zeros(1, 4, dtype=torch.int32)), "input"),
    ],
)
@pytest.mark.usefixtures("no_launch")
def test_wrong_arguments_are_named(op: str, args: tuple[object, ...], named: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        getattr(moe, op)(*args)
    assert raised.value.argument == named


def test_a_row_of_more_accesses_than_kernels_count_is_declined() -> None:
    row = torch.empty((1, moe.MOST_COLUMNS + 1), dtype=torch.uint8)  # never read
    with pytest.raises(NotSupportedError, match="accesses of a row"):
        moe._in_units("moe_permute_fwd", row)
    assert moe._in_units("moe_permute_fwd", row[:, :-1])[2] <= moe.MOST_COLUMNS


# ------------------------------------------------------------------ on a device, or emulated


def choices(tokens: int, topk: int, experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(experts)
    return torch.randint(0, experts, (tokens, topk), generator=generator)


@pytest.mark.parametrize("most", [1, 3])
def test_groups_that_are_counted_in_several_turns(
    most: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "MOST_GROUPS", most)
    indices = choices(900, 3, 11).to(device)
    x = normal_of_shape(900, 4, device=device)
    check("moe_permute_fwd", x, indices, 2000)
    routed = torch.zeros(900, 70, dtype=torch.bool, device=device)
    routed.scatter_(1, (indices * 7).clamp(max=69), True)
    probs = normal_of_shape(900, 70, device=device)
    check("moe_permute_mask_fwd", x, routed, probs, num_out_tokens=2000)


def test_experts_of_any_number(device: str) -> None:
    numbers = torch.tensor([-(2**62), -7, -1, 0, 1020, 1021, 1022, 5000, 2**40, 2**63 - 1])
    x = normal_of_shape(300, 4, device=device)
    for some in (numbers, numbers[2:], numbers[:7], numbers[[2, 3, 8]]):
        indices = some[choices(300, 2, len(some))].to(device)
        check("moe_permute_fwd", x, indices)


@pytest.mark.parametrize("topk", [33, 100])
def test_tokens_of_more_experts_than_a_team_has_threads(topk: int, device: str) -> None:
    x = normal_of_shape(7, 8, device=device)
    indices = torch.stack([torch.randperm(120)[:topk] for _ in range(7)]).to(device)
    y, row_id_map = check("moe_permute_fwd", x, indices, 6 * topk)
    probs = normal_of_shape(7, topk, device=device)
    check("moe_unpermute_fwd", y, row_id_map, probs)
    have = y.shape[0] + 3
    check("moe_unpermute_bwd", x, row_id_map, num_rows=have)
    wider = normal_of_shape(have, 8, device=device)
    check("moe_unpermute_bwd", x, row_id_map, wider, probs, num_rows=have)

    routed = torch.zeros(7, 120, dtype=torch.bool, device=device).scatter(1, indices, True)
    probs = normal_of_shape(7, 120, device=device)
    have = 5 * topk
    y, moved, row_id_map = check("moe_permute_mask_fwd", x, routed, probs, num_out_tokens=have)
    check("moe_permute_mask_bwd", y, row_id_map, moved)
    check("moe_unpermute_mask_fwd", y, row_id_map, probs)
    check("moe_unpermute_mask_bwd", x, row_id_map, y, probs, num_rows=have)
    check("moe_unpermute_mask_bwd", x, row_id_map, num_rows=have)


@pytest.mark.parametrize("topk", [1, 2, 3, 5])
def test_pairs_that_do_not_fill_a_round(topk: int, device: str) -> None:
    x = normal_of_shape(6, 24, device=device)
    indices = torch.stack([torch.randperm(8)[:topk] for _ in range(6)]).to(device)
    have = 6 * topk - 2  # two pairs have no row
    y, row_id_map = check("moe_permute_fwd", x, indices, have)
    check("moe_permute_bwd", y, row_id_map)
    probs = normal_of_shape(6, topk, device=device)
    check("moe_unpermute_fwd", y, row_id_map, probs)
    check("moe_unpermute_bwd", x, row_id_map, y, probs, num_rows=have)

    routed = torch.zeros(6, 8, dtype=torch.bool, device=device).scatter(1, indices, True)
    routed[2] = False  # one token without experts
    routed[4] = True
    probs = normal_of_shape(6, 8, device=device)
    have = int(routed.sum()) - 2
    y, moved, row_id_map = check("moe_permute_mask_fwd", x, routed, probs, num_out_tokens=have)
    check("moe_permute_mask_bwd", y, row_id_map, moved)
    check("moe_unpermute_mask_fwd", y, row_id_map, probs)
    check("moe_unpermute_mask_bwd", x, row_id_map, y, probs, num_rows=have)


@pytest.mark.parametrize("columns", [4500, 9004])
def test_rows_that_a_team_goes_over_several_times(columns: int, device: str) -> None:
    x = normal_of_shape(3, columns, device=device)
    indices = choices(3, 2, 4).to(device)
    y, row_id_map = check("moe_permute_fwd", x, indices)
    probs = normal_of_shape(3, 2, device=device)
    check("moe_unpermute_fwd", y, row_id_map, probs)
    check("moe_unpermute_bwd", x, row_id_map, num_rows=8)
    wider = normal_of_shape(8, columns, device=device)
    check("moe_unpermute_bwd", x, row_id_map, wider, probs, num_rows=8)
    routed = torch.ones(3, 4, dtype=torch.bool, device=device)
    probs = normal_of_shape(3, 4, device=device)
    y, _, row_id_map = check("moe_permute_mask_fwd", x, routed, num_out_tokens=11)
    check("moe_unpermute_mask_fwd", y, row_id_map, probs)
    check("moe_unpermute_mask_bwd", x, row_id_map, y, probs, num_rows=11)


def test_many_rows_without_a_pair_are_zero(device: str) -> None:
    x = normal_of_shape(2, 8, device=device)
    row_id_map = torch.tensor([[150, 3]], dtype=torch.int32, device=device)
    for _ in range(2):  # the second time on memory that the first call wrote
        check("moe_unpermute_bwd", x, row_id_map, num_rows=300)


def test_no_row_is_touched_that_a_map_only_claims_to_have(device: str) -> None:
    x = normal_of_shape(3, 8, device=device)
    entries = [[-5, 2**30, 1], [-(2**31), 2, 2**31 - 1]]
    row_id_map = torch.tensor(entries, dtype=torch.int32, device=device)
    found = moe.moe_unpermute_bwd(x, row_id_map, num_rows=4)[0]
    expected = torch.zeros(4, 8, device=device)
    expected[1], expected[2] = x[2], x[1]
    assert torch.equal(found, expected)
    lines = [[0, 9, 7, -3, 5], [1, -1, 0, -1, 2**31 - 1], [-1, -1, -1, -1, -7]]
    row_id_map = torch.tensor(lines, dtype=torch.int32, device=device)
    found = moe.moe_unpermute_mask_fwd(normal_of_shape(4, 8, device=device), row_id_map)
    expected = torch.zeros(3, 8, device=device)
    expected[1] = normal_of_shape(4, 8, device=device)[1]
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
def test_many_tokens_of_many_experts() -> None:
    x = normal_of_shape(20_000, 2048, device="cuda", dtype=torch.bfloat16)
    indices = choices(20_000, 8, 256).to("cuda")
    y, row_id_map = moe.moe_permute_fwd(x, indices)
    order = indices.flatten().sort(stable=True).indices
    assert torch.equal(y, x[order // 8])
    assert torch.equal(row_id_map.t().flatten().long()[order], torch.arange(160_000, device="cuda"))
    routed = torch.zeros(20_000, 256, dtype=torch.bool, device="cuda").scatter(1, indices, True)
    pairs = routed.t().nonzero()
    have = pairs.shape[0] + 100
    probs = normal_of_shape(20_000, 256, device="cuda")
    y, moved, _ = moe.moe_permute_mask_fwd(x, routed, probs, num_out_tokens=have)
    assert moved is not None
    assert torch.equal(y[:-100], x[pairs[:, 1]])
    assert torch.equal(moved[:-100], probs[pairs[:, 1], pairs[:, 0]])
    assert not y[-100:].any()
    assert not moved[-100:].any()


@pytest.mark.gpu
def test_it_can_be_captured_and_replayed() -> None:
    x = normal_of_shape(500, 512, device="cuda", dtype=torch.bfloat16)
    indices = choices(500, 4, 16).to("cuda")
    probs = normal_of_shape(500, 4, device="cuda")
    moe._kernels.clear()  # so the capture includes loading
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, row_id_map = moe.moe_permute_fwd(x, indices)
        z = moe.moe_unpermute_fwd(y, row_id_map, probs)
        dy, dprobs = moe.moe_unpermute_bwd(z, row_id_map, y, probs, num_rows=2000)
    for experts in (16, 5):
        indices.copy_(choices(500, 4, experts))
        graph.replay()
        again, entries = moe.moe_permute_fwd(x, indices)
        assert torch.equal(y, again)
        assert torch.equal(row_id_map, entries)
        assert torch.equal(z, moe.moe_unpermute_fwd(again, entries, probs))
        gradients = moe.moe_unpermute_bwd(z, entries, again, probs, num_rows=2000)
        assert torch.equal(dy, gradients[0])
        assert dprobs is not None
        assert gradients[1] is not None
        assert torch.equal(dprobs, gradients[1])
