"""Triton's permutation to experts and back: numbers of experts, invalid maps, wide rows."""

from __future__ import annotations

import pytest
import torch
from against_contract import checking
from torch import Tensor

from transformer_engine_fl.backends.flagos import _row_maps
from transformer_engine_fl.backends.flagos import moe as flagos
from transformer_engine_fl.backends.flagos._tiles import Tile
from transformer_engine_fl.testing.allocation import Guarded
from transformer_engine_fl.testing.arguments import as_tuple

check = checking(flagos)

WILD = (-(2**31), -5, 3, 2**31 - 1, 0, 7, 2**30, 1)
"""Values that no entry of a map should have."""


def numbers(*shape: int, device: str, seed: int = 0) -> Tensor:
    """Small integers, of which every sum and product is exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(device, torch.float32)


# ------------------------------------------------------------------------ maps by index

SPREAD = {
    "a shared bucket of one number each": (-1, 3, 7, 2**31 - 1),
    "several negative ones": (-7, -1, 0, 4),
    "several large ones": (0, 5, 10**6, 10**6 + 1),
    "the last that has a bucket of its own, and the first that has not": (1020, 1021, 1022, 1023),
    "the ends of an int32": (-(2**31), -(2**31) + 1, 2**31 - 2, 2**31 - 1),
}


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("which", SPREAD)
def test_experts_of_any_number(which: str, kind: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randint(4, (201, 3), generator=generator)
    indices = torch.tensor(SPREAD[which], dtype=kind)[chosen].to(device)
    x = numbers(201, 2, device=device)
    for rows in (-1, 250):
        check("moe_permute_fwd", x, indices, rows)


def test_numbers_that_need_64_bits(device: str) -> None:
    experts = torch.tensor([-(2**62), 5, 2**40, 2**40 + 2**32, 2**62], device=device)
    chosen = torch.randint(5, (70, 2), generator=torch.Generator().manual_seed(2)).to(device)
    check("moe_permute_fwd", numbers(70, 3, device=device), experts[chosen])


@pytest.mark.parametrize("tokens", [127, 128, 129, 700])
def test_tiles_of_pairs_and_what_is_left_of_them(tokens: int, device: str) -> None:
    generator = torch.Generator().manual_seed(tokens)
    indices = torch.randint(6, (tokens, 2), generator=generator).to(device)
    check("moe_permute_fwd", numbers(tokens, 1, device=device), indices)


@pytest.mark.parametrize("topk", [1, 5, 16, 17])
def test_wide_tokens_of_several_pairs(topk: int, device: str) -> None:
    indices = torch.rand(9, 40, generator=torch.Generator().manual_seed(topk)).topk(topk).indices
    x = numbers(9, 5000, device=device)
    for rows in (7, 9 * topk + 3):
        check("moe_permute_fwd", x, indices.to(device), rows)


def test_tokens_that_are_copied_first_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    launches: list[bool] = []
    monkeypatch.setattr(flagos, "has_dependent_launches", lambda device: True)
    monkeypatch.setattr(
        flagos, "launch_rows", lambda *call, DEPENDENT, **how: launches.append(DEPENDENT)
    )
    x, indices = numbers(6, 8, device=device), torch.zeros(6, 2, dtype=torch.int32, device=device)
    routed = torch.zeros(6, 3, dtype=torch.bool, device=device)
    for tokens in (x, x.t().contiguous().t()):
        flagos.moe_permute_fwd(tokens, indices)
        flagos.moe_permute_mask_fwd(tokens, routed, num_out_tokens=4)
    assert launches == [True, True, False, False]


# ------------------------------------------------------------------------- maps of groups

GROUPINGS = {
    "one tile each, summed up once": (1, 16),
    "several tiles each": (16, 4),
    "several tiles each, summed up once": (1, 4),
}


@pytest.fixture(params=GROUPINGS)
def grouping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits so small that few tiles take the paths of many."""
    few, groups = GROUPINGS[request.param]
    monkeypatch.setattr(_row_maps, "_FEW_OF_INDICES", few)
    monkeypatch.setattr(_row_maps, "_FEW_OF_MASKS", few)
    monkeypatch.setattr(_row_maps, "_GROUPS", groups)
    monkeypatch.setattr(_row_maps, "_PAIRS", 32)
    monkeypatch.setattr(_row_maps, "_MASK_TOKENS", 8)


@pytest.mark.usefixtures("grouping")
@pytest.mark.parametrize("which", SPREAD)
def test_groups_of_tiles_of_pairs(which: str, device: str) -> None:
    chosen = torch.randint(4, (139, 3), generator=torch.Generator().manual_seed(5))
    indices = torch.tensor(SPREAD[which])[chosen].to(device)
    check("moe_permute_fwd", numbers(139, 2, device=device), indices, 400)


@pytest.mark.usefixtures("grouping")
@pytest.mark.parametrize("which", SPREAD)
def test_groups_of_tiles_of_pairs_that_programs_of_their_tokens_place(
    which: str, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(_row_maps, "_PAIRS", 8)
    monkeypatch.setattr(flagos, "_SPREAD_TILE", lambda device, itemsize: Tile(128, 2))
    chosen = torch.randint(4, (25, 3), generator=torch.Generator().manual_seed(5))
    indices = torch.tensor(SPREAD[which])[chosen].to(device)
    check("moe_permute_fwd", numbers(25, 2, device=device), indices, 70)


@pytest.mark.usefixtures("grouping")
@pytest.mark.parametrize("experts", [3, 64, 200])
def test_groups_of_tiles_of_a_mask(experts: int, device: str) -> None:
    generator = torch.Generator().manual_seed(experts)
    routed = torch.rand(101, experts, generator=generator) < 3 / (experts + 1)
    probs = torch.rand(101, experts, generator=generator).to(device)
    x = numbers(101, 2, device=device)
    for rows in (60, 500):
        check("moe_permute_mask_fwd", x, routed.to(device), probs, num_out_tokens=rows)


# ------------------------------------------------------------------------- maps by mask


def test_masks_whose_experts_do_not_follow_one_another(device: str) -> None:
    routed = torch.rand(32, 70, generator=torch.Generator().manual_seed(6)) < 0.1
    x = numbers(70, 2, device=device)
    check("moe_permute_mask_fwd", x, routed.to(device).t(), num_out_tokens=250)
    check("moe_permute_mask_fwd", x, routed.to(device).t()[:, ::2], num_out_tokens=120)


@pytest.mark.parametrize("experts", [1, 3, 127, 128, 129, 300])
@pytest.mark.parametrize("rows", [0, 40, 10_000])
def test_masks_of_every_width(experts: int, rows: int, device: str) -> None:
    generator = torch.Generator().manual_seed(experts)
    routed = torch.rand(70, experts, generator=generator) < 2 / (experts + 1)
    probs = torch.rand(70, experts, generator=generator).to(device)
    x = numbers(70, 3, device=device)
    check("moe_permute_mask_fwd", x, routed.to(device), probs, num_out_tokens=rows)


def test_tokens_of_many_experts_and_of_none(device: str) -> None:
    routed = torch.zeros(300, 40, dtype=torch.bool)
    routed[::7] = True
    rows = int(routed.sum())
    x = numbers(300, 8, device=device)
    permuted, _, row_id_map = check(
        "moe_permute_mask_fwd", x, routed.to(device), num_out_tokens=rows + 100
    )
    check("moe_unpermute_mask_fwd", permuted, row_id_map)


# --------------------------------------------------------------------------- moving rows


def by_index(tokens: int, topk: int, device: str) -> Tensor:
    """A map of rows in random order, with pairs that have no row, and rows that have no pair."""
    order = torch.randperm(2 * tokens * topk, generator=torch.Generator().manual_seed(3))
    rows = order[: tokens * topk].view(topk, tokens)
    return rows.masked_fill(rows % 5 == 0, -1).to(device, torch.int32)


def by_mask(tokens: int, experts: int, device: str) -> Tensor:
    """The same kind of map, by mask."""
    generator = torch.Generator().manual_seed(4)
    order = torch.randperm(2 * tokens * experts, generator=generator)
    lines = torch.full((tokens, 2 * experts + 1), 10**9)  # never read
    for t in range(tokens):
        count = t % (experts + 1)
        lines[t, :count] = order[t * experts : t * experts + count]
        lines[t, experts : experts + count] = torch.randperm(experts, generator=generator)[:count]
        lines[t, -1] = count
    return lines.to(device, torch.int32)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("columns", [1, 24, 1000, 4096, 9001])
def test_rows_of_every_width_in_no_order(columns: int, mask: bool, device: str) -> None:
    name = "_mask" if mask else ""
    tokens, slots = 11, 3
    row_id_map = (by_mask if mask else by_index)(tokens, slots, device)
    count = 2 * tokens * slots
    rows = numbers(count, columns + 8, device=device)[:, :columns]
    probs = numbers(tokens, slots, device=device, seed=1)
    dy = numbers(tokens, columns, device=device, seed=2)
    check(f"moe_unpermute{name}_fwd", rows, row_id_map, probs)
    check(f"moe_unpermute{name}_bwd", dy, row_id_map, rows, probs, num_rows=count)
    check(f"moe_unpermute{name}_bwd", dy, row_id_map, num_rows=count)
    check(f"moe_permute{name}_bwd", rows, row_id_map)


@pytest.mark.parametrize("mask", [False, True])
def test_more_rows_than_programs_look_after_at_first(mask: bool, device: str) -> None:
    name = "_mask" if mask else ""
    row_id_map = (by_mask if mask else by_index)(2, 2, device)
    rows = numbers(900, 5, device=device)
    probs = numbers(2, 2, device=device, seed=1)
    dy = numbers(2, 5, device=device, seed=2)
    check(f"moe_unpermute{name}_bwd", dy, row_id_map, rows, probs, num_rows=900)
    check(f"moe_unpermute{name}_bwd", dy, row_id_map, num_rows=900)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_wrong_maps_read_and_write_nothing_outside(seed: int, mask: bool, device: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (7, 7) if mask else (3, 7)
    entries = torch.tensor(WILD, dtype=torch.int32)
    row_id_map = entries[torch.randint(len(WILD), shape, generator=generator)].to(device)
    name = "_mask" if mask else ""
    whole = torch.full((3000,), torch.nan, device=device)
    rows = whole[1000:1040].view(5, 8).fill_(1.0)
    dy, probs = torch.ones(7, 8, device=device), torch.ones(7, 3, device=device)
    with Guarded() as allocations:
        found = [
            getattr(flagos, f"moe_unpermute{name}_fwd")(rows, row_id_map, probs),
            *getattr(flagos, f"moe_unpermute{name}_bwd")(dy, row_id_map, rows, probs, num_rows=5),
            getattr(flagos, f"moe_unpermute{name}_bwd")(dy, row_id_map, num_rows=5)[0],
            *as_tuple(
                getattr(flagos, f"moe_permute{name}_bwd")(rows, row_id_map, *[rows[:, 0]] * mask)
            ),
        ]
    assert allocations.broken() is None
    assert not any(it.isnan().any() for it in found)
