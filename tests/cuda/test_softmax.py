"""Softmax in CUDA C++: how rows are divided, and what the contracts' samples do not cover."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from against_contract import checking
from torch import Tensor

from transformer_engine_fl.backends.vendor.cuda import _launch, softmax
from transformer_engine_fl.backends.vendor.cuda._arguments import Plans
from transformer_engine_fl.backends.vendor.cuda._launch import Geometry, Limits
from transformer_engine_fl.backends.vendor.cuda._tiles import (
    EXCHANGE_OPTIONS,
    SHARED_PER_BLOCK,
    is_striped,
)
from transformer_engine_fl.core.errors import ArgumentError

check = checking(softmax)

AMPERE = Limits(8, 0, 108, 166_912, 167_936)
HOPPER = Limits(9, 0, 132, 232_448, 233_472)
SMALL = Limits(12, 0, 170, 101_376, 102_400)
WIDTHS = (1, 7, 129, 1024, 1536, 2052, 4096, 5003, 8192, 20001, 32768, 65536, 262144, 262152)


@pytest.mark.parametrize("device", [AMPERE, HOPPER], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize("sizes", [(2,), (4,), (8,), (2, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("columns", WIDTHS)
def test_a_tile_covers_its_row_and_fits_a_block(
    columns: int, sizes: tuple[int, ...], device: Limits
) -> None:
    tile = softmax.row_tile(columns, sizes, device, striped=is_striped(columns, *sizes))
    if tile is None:  # served by the kernels for wide rows
        assert columns > 4096
        return
    assert tile.striped or columns % tile.vec == 0
    assert tile.held * tile.lanes * tile.cluster >= columns
    assert tile.threads <= 1024
    kept = softmax._shared_bytes(tile, sizes)
    assert kept + softmax._exchanged(tile, sizes) <= device.shared_per_block
    assert tile.cluster == 1 or device.has_clusters


@pytest.mark.parametrize("device", [HOPPER, SMALL, AMPERE], ids=["sm_90", "sm_120", "sm_80"])
def test_rows_that_begin_anywhere_have_threads_for_little_more(device: Limits) -> None:
    low = torch.bfloat16
    striped = 0
    for columns in (*range(129, 9000, 251), *range(9001, 262_144, 4093)):
        for dy, sizes in ((None, (2,)), (low, (2, 2))):
            key = softmax.Key(columns, 1, low, dy)
            if not key.striped:
                assert columns % 8 == 0 or columns < 342 or (columns % 4 == 0 and columns < 8193)
                continue
            tile = softmax.source(key, device)[2]
            if tile is None:  # the row is read twice
                assert columns > 32_768
                continue
            assert tile.striped
            assert tile.lanes % 32 == 0
            assert columns <= tile.room <= 1.5 * columns
            kept = softmax._shared_bytes(tile, sizes) + softmax._exchanged(tile, sizes)
            assert kept <= device.shared_per_block
            striped += 1
    assert striped > 70


@pytest.mark.parametrize("most_blocks", [16, 8])
@pytest.mark.parametrize("device", [HOPPER, SMALL, AMPERE], ids=["sm_90", "sm_120", "sm_80"])
def test_rows_that_begin_anywhere_are_read_twice_beyond_a_width(
    device: Limits, most_blocks: int
) -> None:
    low = torch.bfloat16
    for options in ({}, {"causal": True}, {"dy": low}, {"gradients": low}):
        whole = [
            softmax.source(softmax.Key(columns, 1, low, **options), device, most_blocks)[2]
            is not None
            for columns in range(513, 262_144, 510)
        ]
        assert whole == sorted(whole, reverse=True)
        assert all(whole) or device is not HOPPER


def test_which_rows_are_striped() -> None:
    low, full = torch.bfloat16, torch.float32
    plain, masked, losses = ({}, {"mask_step": 1}, {"gradients": low})
    for columns, access, options, striped in (
        (255, 1, plain, True),
        (257, 1, plain, False),  # half of its warps' vectors would be empty
        (513, 1, plain, True),
        (4098, 2, plain, True),
        (4100, 4, plain, False),
        (8196, 4, plain, True),
        (8200, 8, plain, False),
        (4097, 1, masked, True),
        (4098, 2, masked, False),
        (516, 4, losses, True),
        (516, 4, {"dy": low}, True),
        (340, 4, {"dy": low}, False),
        (4097, 1, {"dy": full}, False),
    ):
        key = softmax.Key(columns, access, low, **options)
        assert key.striped is striped, key
    assert not softmax.Key(4097, 1, full).striped


@pytest.mark.parametrize(
    ("columns", "cluster", "blocks", "in_registers"),
    [(65536, 4, 3, False), (131072, 4, 2, True), (151_936, 8, 2, True), (262144, 8, 2, True)],
)
def test_blocks_that_share_a_gradients_row_fit_a_multiprocessor_together(
    columns: int, cluster: int, blocks: int, in_registers: bool
) -> None:
    sizes = (2, 2)
    tile = softmax.row_tile(columns, sizes, HOPPER)
    assert tile is not None
    assert (tile.cluster, tile.blocks) == (cluster, blocks)
    assert softmax.in_registers(tile, sizes) == in_registers
    kept = softmax._shared_bytes(tile, sizes) + softmax._exchanged(tile, sizes)
    assert blocks * (kept + SHARED_PER_BLOCK) <= HOPPER.shared_per_multiprocessor


@pytest.mark.parametrize(
    ("columns", "sizes", "lanes", "vecs", "blocks"),
    [
        (4096, (2,), 128, 4, 8),
        (4104, (2,), 512, 2, 4),
        (8192, (2,), 512, 2, 4),
        (8200, (2,), 512, 3, 2),
        (8192, (2, 2), 256, 4, 4),
        (8192, (4,), 512, 4, 1),
    ],
)
def test_which_scores_a_block_spreads_over_all_threads_of_a_multiprocessor(
    columns: int, sizes: tuple[int, ...], lanes: int, vecs: int, blocks: int
) -> None:
    tile = softmax.row_tile(columns, sizes, HOPPER)
    assert tile is not None
    assert (tile.lanes, tile.vecs, tile.blocks) == (lanes, vecs, blocks)


@pytest.mark.parametrize(
    ("columns", "team", "vecs", "blocks"),
    [
        (4104, (128, 1), 5, 12),
        (8184, (128, 1), 8, 12),
        (16384, (128, 1), 16, 6),
        (20480, (256, 1), 10, 5),
        (32768, (256, 1), 16, 3),
        (57344, (512, 1), 14, 2),
        (65536, (128, 8), 8, 12),  # a block of 512 would be alone on its multiprocessor
        (131072, (128, 8), 16, 6),
        (151936, (128, 16), 10, 10),
        (262144, (128, 16), 16, 6),
    ],
)
def test_which_scores_wait_in_shared_memory_of_several_blocks(
    columns: int, team: tuple[int, int], vecs: int, blocks: int
) -> None:
    tile = softmax.shared_memory_tile(columns, 2, HOPPER)
    assert tile is not None
    assert ((tile.lanes, tile.cluster), tile.vecs, tile.blocks) == (team, vecs, blocks)
    # If at most eight blocks may share a row.
    fewer = softmax.shared_memory_tile(columns, 2, HOPPER, 8)
    assert fewer is not None
    assert (fewer == tile) is (team[1] <= 8)
    assert fewer.cluster <= 8


@pytest.mark.parametrize("device", [HOPPER, SMALL], ids=["sm_90", "sm_120"])
def test_scores_that_wait_fit_with_those_of_another_block(device: Limits) -> None:
    waiting = 0
    for columns in range(8, 270_000, 1016):
        tile = softmax.shared_memory_tile(columns, 2, device)
        if tile is None:
            continue
        waiting += 1
        kept = softmax._shared_bytes(tile, (2,)) + softmax._exchanged(tile, (2,))
        assert tile.blocks > 1
        assert tile.blocks * (kept + SHARED_PER_BLOCK) <= device.shared_per_multiprocessor
        assert tile.held * tile.lanes * tile.cluster >= columns
        # Every lane of a warp combines results of equally many warps.
        warps = tile.lanes // 32 * tile.cluster
        assert warps % 32 == 0 or 32 % warps == 0
    assert waiting > 150


@pytest.mark.parametrize(
    ("columns", "size", "device"),
    [
        (4096, 2, HOPPER),
        (8192, 2, HOPPER),
        (262152, 2, HOPPER),
        (20480, 4, HOPPER),
        (20484, 2, HOPPER),  # vectors of 4
        (20484, 4, HOPPER),
        (20480, 2, AMPERE),
    ],
)
def test_which_scores_do_not_wait_in_shared_memory(columns: int, size: int, device: Limits) -> None:
    assert softmax.shared_memory_tile(columns, size, device) is None


def test_a_block_without_room_for_a_gradients_row_shares_it() -> None:
    sizes = ((HOPPER, (2, 2), 1), (HOPPER, (2, 8), 2), (SMALL, (2, 2), 2))
    for device, bytes_of_each, blocks in sizes:
        tile = softmax.row_tile(32768, bytes_of_each, device)
        assert tile is not None
        assert tile.cluster == blocks


@pytest.mark.parametrize("room", [0, 1])
def test_a_device_without_room_for_16_blocks_has_clusters_of_8(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(found: object, geometry: Geometry, device: int) -> SimpleNamespace:
        groups = room if geometry.cluster > 8 else 7
        return SimpleNamespace(cluster=geometry.cluster, resident_groups=lambda: groups)

    monkeypatch.setattr(_launch, "limits", lambda device: HOPPER)
    monkeypatch.setattr(_launch, "load", load)
    plan = softmax.Plan(softmax.Key(131072, 4, torch.float32, torch.float32), 0)
    assert plan._cluster == (16 if room else 8)


@pytest.mark.parametrize(
    ("columns", "forward", "backward"),
    [
        (32_768, None, None),
        (40_960, None, None),
        (40_968, None, (21, 32, 8, 8, 3)),
        (57_344, None, (28, 32, 8, 8, 3)),
        (57_352, (29, 32, 12, 8, 3), (29, 32, 8, 8, 3)),
        (65_536, (32, 32, 12, 8, 3), (32, 32, 8, 8, 3)),
        (65_540, None, None),  # vectors of 4
        (151_936, (75, 32, 12, 8, 3), (75, 32, 8, 8, 3)),
        (163_840, (40, 64, 6, 8, 2), (80, 32, 8, 8, 3)),
        (262_144, (64, 64, 6, 8, 2), (128, 32, 8, 8, 3)),
        (262_152, None, None),
    ],
)
def test_which_rows_are_in_pieces(
    columns: int, forward: tuple[int, ...] | None, backward: tuple[int, ...] | None
) -> None:
    low, half = torch.bfloat16, torch.float16
    for dy, cut in ((None, forward), (low, backward)):
        key = softmax.Key(columns, 4, low, dy)
        source, geometry, tile = softmax.source(key, HOPPER)
        assert source.kernel.endswith("_pieces") is (cut is not None)
        assert (geometry.together > 1) is (cut is not None)
        if cut is None:
            continue
        assert tile is not None
        assert (tile.cluster, tile.lanes, tile.blocks, tile.vecs) == cut[:4]
        assert dict(source.defines)["STAGES"] == cut[4]
        assert geometry.together == tile.cluster <= 128  # one warp reads the slots of all
        block = geometry.shared_bytes + SHARED_PER_BLOCK
        assert tile.blocks * block <= HOPPER.shared_per_multiprocessor
        other = softmax.Key(columns, 4, half, None if dy is None else half)
        assert softmax.source(other, HOPPER)[0].kernel == source.kernel
        for device in (AMPERE, SMALL):
            assert softmax.source(key, device)[1].together == 1
        for others in ({"causal": True}, {"mask_step": 1}, {"gradients": low}, {"dy": dy and half}):
            assert (softmax.source(replace(key, **others), HOPPER)[1].together > 1) is (
                "dy" in others
            )


def test_where_no_launch_is_cooperative_clusters_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(found: object, geometry: Geometry, device: int) -> SimpleNamespace:
        groups = 0 if geometry.together > 1 else 4
        return SimpleNamespace(cluster=geometry.cluster, resident_groups=lambda: groups)

    monkeypatch.setattr(_launch, "limits", lambda device: HOPPER)
    monkeypatch.setattr(_launch, "load", load)
    low = torch.bfloat16
    for dy, cluster in ((None, 16), (low, 8)):
        plan = softmax.Plan(softmax.Key(262_144, 8, low, dy), 0)
        assert (plan._cluster, plan._through_memory) == (cluster, False)


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)])
def test_rows_of_up_to_262144_columns_are_read_once(sizes: tuple[int, ...]) -> None:
    for columns in range(8, 262144 + 1, 4088):
        assert softmax.row_tile(columns, sizes, HOPPER) is not None, columns


@pytest.mark.parametrize(
    ("op", "args", "named"),
    [
        ("scaled_softmax_forward", (torch.ones(4, dtype=torch.int32),), "input"),
        ("scaled_softmax_forward", (torch.ones(4), None), "scale"),
        ("scaled_masked_softmax_forward", (torch.ones(2, 4), torch.ones(2, 3) > 0), "mask"),
        ("scaled_upper_triang_masked_softmax_forward", (torch.ones(2, 4),), "input"),
        ("scaled_softmax_backward", (torch.ones(4), torch.ones(5)), "output_grad"),
    ],
)
@pytest.mark.usefixtures("no_launch")
def test_wrong_arguments_are_named(op: str, args: tuple[object, ...], named: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        getattr(softmax, op)(*args)
    assert raised.value.argument == named


# ------------------------------------------------------------------------- on a device


def values(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (3 * torch.randn(*shape, generator=generator, device="cuda")).to(dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_values_of_every_width(columns: int, dtype: torch.dtype) -> None:
    rows = 300 if columns < 10_000 else 21
    for skip in (0, 1):  # aligned and unaligned memory
        x = values(rows, columns + 8, dtype=dtype, seed=1)[:, skip : columns + skip]
        mask = values(rows, columns, dtype=torch.float32, seed=2) > 1
        y = check("scaled_softmax_forward", x, 0.5)
        x[rows - 2] = float("-inf")
        check("scaled_masked_softmax_forward", x, mask, 0.5)
        check("scaled_aligned_causal_masked_softmax_forward", x)
        dy = values(rows, columns + 8, dtype=dtype, seed=3)[:, skip : columns + skip]
        check("scaled_softmax_backward", dy, y, 0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [64, 4096, 8192, 32768, 65_536, 262_144])
def test_a_row_does_not_depend_on_the_others(columns: int) -> None:
    x = values(200, columns, dtype=torch.bfloat16, seed=4)
    dy = values(200, columns, dtype=torch.bfloat16, seed=5)
    y = softmax.scaled_softmax_forward(x)
    dx = softmax.scaled_softmax_backward(dy, y)
    for some in (slice(0, 1), slice(3, 20)):
        assert torch.equal(softmax.scaled_softmax_forward(x[some]), y[some])
        assert torch.equal(softmax.scaled_softmax_backward(dy[some], y[some]), dx[some])


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [320, 4096, 32768, 131_072])
def test_it_can_be_captured_and_replayed(columns: int) -> None:
    x = values(50, columns, dtype=torch.bfloat16, seed=6)
    softmax._plans.clear()  # so the capture includes loading
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax.scaled_softmax_forward(x)
        dx = softmax.scaled_softmax_backward(x, y)
    for seed in (7, 8):
        x.copy_(values(50, columns, dtype=torch.bfloat16, seed=seed))
        graph.replay()
        again = softmax.scaled_softmax_forward(x)
        assert torch.equal(y, again)
        assert torch.equal(dx, softmax.scaled_softmax_backward(x, again))


# ------------------------------------------------------------------ on a device, or emulated


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launch is cooperative, so blocks that share a row form clusters."""
    monkeypatch.setattr(softmax, "EXCHANGE_OPTIONS", EXCHANGE_OPTIONS[1:])
    monkeypatch.setattr(softmax, "_plans", Plans())


@pytest.fixture
def few_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two groups of blocks are resident, so that each has several rows."""
    monkeypatch.setattr(softmax, "require_clusters", lambda kernel, columns: 2)
    monkeypatch.setattr(softmax, "_plans", Plans())


@pytest.mark.usefixtures("few_groups")
@pytest.mark.parametrize("columns", [57_352, 65_536, 131_080, 163_840, 262_136, 262_144])
def test_rows_in_pieces(columns: int, device: str) -> None:
    generator = torch.Generator().manual_seed(14)
    x = (3 * torch.randn(9, columns, generator=generator)).to(device, torch.bfloat16)
    x[1, : columns // 2] = float("-inf")  # all columns of some blocks
    x[2] = float("-inf")
    x[3, -1] = float("inf")
    x[4, 0] = float("nan")
    x[5] -= 3000  # all below 0, which padding columns might count as
    unlike = torch.isin(torch.arange(9), torch.tensor([2, 3, 4]))  # rows whose results are NaN
    for scale in (0.5, -0.5, 0.0):
        y = check("scaled_softmax_forward", x, scale)
        assert y[5:].isfinite().all()
        assert torch.equal(softmax.scaled_softmax_forward(x[5:6], scale), y[5:6])
    dy = torch.randn(9, columns, generator=generator).to(device, torch.bfloat16)
    y = check("scaled_softmax_forward", x, 0.5)
    dx = check("scaled_softmax_backward", dy, y, 0.5)
    assert torch.equal(softmax.scaled_softmax_backward(dy[5:6], y[5:6], 0.5), dx[5:6])
    assert torch.equal(dx.isnan().any(1).cpu(), unlike)


@pytest.mark.parametrize("columns", [32768, 65536, 262144])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_groups_that_have_several_wide_rows(columns: int, dtype: torch.dtype, device: str) -> None:
    rows = 19 if device == "cpu" and columns < 262144 else 5 if device == "cpu" else 300
    generator = torch.Generator().manual_seed(9)
    x = (3 * torch.randn(rows, columns, generator=generator)).to(device, dtype)
    x[1].view(-1, 256)[::2] = float("-inf")  # all columns of some warps
    y = check("scaled_softmax_forward", x, 0.5)
    assert torch.equal(softmax.scaled_softmax_forward(x[2:4], 0.5), y[2:4])
    x[4] = float("-inf")
    hidden = torch.rand(rows, columns, generator=generator).to(device) > 0.5
    hidden[0] = True
    assert not check("scaled_masked_softmax_forward", x, hidden, 0.5)[0].any()
    check("scaled_aligned_causal_masked_softmax_forward", x)
    check("scaled_softmax_backward", x.nan_to_num(neginf=1.0), y, 0.5)


@pytest.mark.usefixtures("few_groups")
@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_rows_of_float16_in_pieces(scale: float, device: str) -> None:
    """Few scores contribute, so that few results are subnormal."""
    x = torch.full((3, 65_544), -8.0 * scale, dtype=torch.float16, device=device)
    x[:, 7::8191] = torch.randn(9, generator=torch.Generator().manual_seed(15)).to(x) * scale
    y = check("scaled_softmax_forward", x, 2 * scale)
    check("scaled_softmax_backward", x, y, 2 * scale)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("columns", [4104, 9000, 20_480, 57_344, 65_528, 98_304, 151_936, 262_144])
@pytest.mark.parametrize("skip", [0, 1])
def test_scores_that_wait_in_shared_memory(columns: int, skip: int, device: str) -> None:
    rows = 3 if device == "cpu" else 300
    generator = torch.Generator().manual_seed(11)
    x = (3 * torch.randn(rows, columns + 8, generator=generator)).to(device, torch.bfloat16)
    x = x[:, skip : columns + skip]
    x[1, : columns // 2] = float("-inf")  # all columns of some warps, or blocks
    y = check("scaled_softmax_forward", x, 0.5)
    assert torch.equal(softmax.scaled_softmax_forward(x[1:2], 0.5), y[1:2])
    check("scaled_aligned_causal_masked_softmax_forward", x)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("columns", [100_008, 131_072])
@pytest.mark.parametrize("skip", [0, 1])
def test_gradients_of_rows_that_are_partly_in_registers(
    columns: int, skip: int, device: str
) -> None:
    generator = torch.Generator().manual_seed(10)
    dy, y = (
        torch.randn(3, columns + 8, generator=generator).to(device, torch.bfloat16)
        for _ in range(2)
    )
    dy, y = (it[:, skip : columns + skip] for it in (dy, y.softmax(-1)))
    check("scaled_softmax_backward", dy, y, 0.5)
    check("scaled_aligned_causal_masked_softmax_backward", dy, y, 0.5)


@pytest.mark.parametrize(
    "columns", [129, 250, 1023, 2049, 4097, 5003, 8194, 20_481, 50_257, 131_074, 262_143]
)
def test_rows_that_begin_anywhere(columns: int, device: str) -> None:
    rows = 3 if device == "cpu" else 300
    generator = torch.Generator().manual_seed(12)
    hidden = (torch.rand(rows, columns, generator=generator) > 0.5).to(device)
    hidden[0] = True
    dtype = torch.bfloat16
    for skip, apart in ((0, 0), (3, 5), (1, 8)):
        x = 3 * torch.randn(rows, columns + apart, generator=generator)
        x = x.to(device, dtype)[:, skip : columns + skip]
        x[1, : columns // 2] = float("-inf")  # all columns of some warps, or blocks
        y = check("scaled_softmax_forward", x, 0.5)
        for alone in (x[1:2], x[1:2].clone(), torch.cat([x[1], x[1]])[columns:][None]):
            assert torch.equal(softmax.scaled_softmax_forward(alone, 0.5), y[1:2])
        causal = check("scaled_aligned_causal_masked_softmax_forward", x)
        assert not check("scaled_masked_softmax_forward", x, hidden, 0.5)[0].any()
        check("scaled_masked_softmax_forward", x, hidden[:, :1], 0.5)
        dy = torch.randn(rows, columns + apart, generator=generator).to(device, dtype)
        dy = dy[:, apart - skip : columns + apart - skip]
        dx = check("scaled_softmax_backward", dy, y, 0.5)
        assert torch.equal(softmax.scaled_softmax_backward(dy[1:2], y[1:2].clone(), 0.5), dx[1:2])
        check("scaled_aligned_causal_masked_softmax_backward", dy, causal, 0.5)


@pytest.mark.parametrize("columns", [129, 50_257])
def test_nothing_behind_a_row_that_begins_anywhere_counts(columns: int, device: str) -> None:
    around = torch.full((3, columns + 12), float("nan"), device=device, dtype=torch.bfloat16)
    x = around[:, 5 : columns + 5]
    x.copy_(torch.randn(3, columns, generator=torch.Generator().manual_seed(13)))
    y = check("scaled_softmax_forward", x)
    assert not check("scaled_softmax_backward", x, y).isnan().any()
