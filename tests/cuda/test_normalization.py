"""Normalization in CUDA C++: values, and everything around a launch, also without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import cuda_emulation
import pytest
import repeated_calls
import torch
from cuda_binaries import DEVICES
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends.vendor.cuda import _casting, _launch, normalization
from transformer_engine_fl.backends.vendor.cuda._arguments import Plans, access_width, dense_rows
from transformer_engine_fl.backends.vendor.cuda._sums import SumOfGroups
from transformer_engine_fl.core.contract import Sample
from transformer_engine_fl.core.errors import ArgumentError, NotSupportedError
from transformer_engine_fl.ops._formats import FORMATS
from transformer_engine_fl.ops.normalization import statistics_dtype

OPERATORS = ("rmsnorm_fwd", "rmsnorm_bwd", "layernorm_fwd", "layernorm_bwd")
HOPPER = _launch.Limits(9, 0, 132, 232_448, 233_472)
ADA = _launch.Limits(8, 9, 128, 101_376, 102_400)
BLACKWELL = _launch.Limits(12, 0, 170, 101_376, 102_400)


def serve(op: str) -> Callable[..., tuple[Tensor, ...]]:
    function: Callable[..., tuple[Tensor, ...]] = getattr(normalization, op)
    return function


def first_sample(op: str, device: str = "cpu") -> Sample:
    samples: Iterator[Sample] = iter(getattr(ops, op).samples("bfloat16", device))
    return next(samples)


# ------------------------------------------------------------------ without a launch


@pytest.mark.parametrize("columns", [4097, 8194, 10238, 32769, 81918])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("added", [False, True])
def test_blocks_leave_room_for_the_memory_in_which_warps_exchange_sums(
    columns: int, dtype: torch.dtype, added: bool
) -> None:
    for limits in (ADA, BLACKWELL):
        for weight in (torch.bfloat16, torch.float32, torch.float64):
            same = (dtype, weight, weight, dtype)
            key = normalization.ForwardKey(columns, 1, *same, not added, False, added)
            source, geometry, _, cluster = normalization.forward_source(key, limits)
            if source.kernel == "forward_wide":
                continue
            warps = geometry.threads // 32 * cluster
            values = 1 if added else 3
            exchanged = 2 * values * warps * (8 if dtype == torch.float64 else 4)
            assert geometry.shared_bytes + exchanged <= limits.shared_per_block, (key, limits)


class Wrapper(Tensor):
    """A subclass without memory of its own."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError("nothing should be computed with it")


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("op", OPERATORS)
def test_wrapper_subclasses_are_declined(op: str) -> None:
    sample = first_sample(op)
    with pytest.raises(NotSupportedError, match="memory of their own"):
        serve(op)(Wrapper(sample.args[0]), *sample.args[1:])


@pytest.mark.usefixtures("no_launch")
def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(ArgumentError, match="'input' is a float32 tensor, sparse_coo, on cpu"):
        normalization.rmsnorm_fwd(torch.eye(4).to_sparse(), torch.ones(4))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weight": torch.ones(7)}, "weight"),
        ({"input": torch.ones(2, 8, dtype=torch.int32)}, "input"),
        ({"input": torch.ones(())}, "input"),
        ({"input": torch.ones(3, 0)}, "input"),
        ({"eps": -1.0}, "eps"),
        ({"eps": float("nan")}, "eps"),
        ({"eps": True}, "eps"),
        ({"zero_centered_gamma": 1}, "zero_centered_gamma"),
        ({"out_dtype": torch.int8}, "out_dtype"),
        ({"weight": None}, "weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
@pytest.mark.usefixtures("no_launch")
def test_wrong_arguments_of_a_forward_are_named(change: dict[str, Any], named: str) -> None:
    arguments = {"input": torch.ones(2, 8), "weight": torch.ones(8), **change}
    for op in ("rmsnorm_fwd", "layernorm_fwd"):
        with pytest.raises(ArgumentError) as raised:
            serve(op)(**arguments)
        assert raised.value.argument == named


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dy": torch.ones(2, 7)}, "dy"),
        ({"dy": torch.ones(2, 8, dtype=torch.int32)}, "dy"),
        ({"rsigma": torch.ones(3)}, "rsigma"),
        ({"rsigma": torch.ones(2, dtype=torch.float64)}, "rsigma"),
        ({"gamma": torch.ones(2, 8)}, "gamma"),
        ({"zero_centered_gamma": None}, "zero_centered_gamma"),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
@pytest.mark.usefixtures("no_launch")
def test_wrong_arguments_of_a_backward_are_named(change: dict[str, Any], named: str) -> None:
    arguments = {
        "dy": torch.ones(2, 8),
        "x": torch.ones(2, 8),
        "rsigma": torch.ones(2),
        "gamma": torch.ones(8),
        **change,
    }
    with pytest.raises(ArgumentError) as raised:
        normalization.rmsnorm_bwd(**arguments)
    assert raised.value.argument == named
    with pytest.raises(ArgumentError) as raised:
        normalization.layernorm_bwd(mu=torch.ones(2), **arguments)
    assert raised.value.argument == named


@pytest.mark.usefixtures("no_launch")
def test_a_wrong_bias_or_mean_is_named() -> None:
    x, gamma, rsigma = torch.ones(2, 8), torch.ones(8), torch.ones(2)
    with pytest.raises(ArgumentError, match="'bias'"):
        normalization.layernorm_fwd(x, gamma, torch.ones(9))
    with pytest.raises(ArgumentError, match="'mu'"):
        normalization.layernorm_bwd(x, x, torch.ones(3), rsigma, gamma)


# --------------------------------------------------------------------------- planning


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("columns", [1, 3, 8, 48, 129, 1000, 1024, 2052, 4096, 5003, 8192, 32768])
def test_a_tile_covers_its_row_and_fits_a_block(columns: int, size: int) -> None:
    for clusters in (False, True):
        for tile in (
            normalization.forward_tile(columns, size, size, clusters),
            normalization.backward_tile(columns, size, size, False, clusters),
            normalization.backward_tile(columns, size, size, True, clusters),
        ):
            if tile is None:  # served by the kernels for wide rows
                assert columns > 4096
                continue
            assert columns % tile.vec == 0
            assert tile.vec * tile.vecs * tile.lanes * tile.cluster >= columns
            assert tile.threads <= 1024
            assert tile.rows == 1 or tile.lanes <= 32
            assert tile.cluster == 1 or clusters


@pytest.mark.parametrize(
    ("parts", "access"),
    [
        ([(0, 2)], 8),
        ([(1024, 2), (48, 2)], 8),
        ([(8, 2)], 4),
        ([(2, 2)], 1),
        ([(0, 2), (16, 4)], 8),
    ],
)
def test_badly_aligned_memory_is_read_in_smaller_pieces(
    parts: list[tuple[int, int]], access: int
) -> None:
    assert access_width(8, *parts) == access


def test_rows_with_a_constant_stride_are_not_copied() -> None:
    storage = torch.arange(4 * 6 * 10.0)
    padded = storage.view(4, 6, 10)[..., :8]
    assert dense_rows(padded) == (padded, 10)
    one = torch.ones(1, 8).expand(5, 8)
    assert dense_rows(one)[1] == 0
    for value in (padded[:, :5], torch.ones(8, 4).t(), torch.ones(4, 16)[:, ::2]):
        copy, stride = dense_rows(value)
        assert copy.is_contiguous()
        assert stride == value.shape[-1]
        assert torch.equal(copy, value)


def test_the_split_of_a_row_does_not_depend_on_its_alignment() -> None:
    low = torch.bfloat16
    shapes = []
    for access in (8, 4, 1):
        key = normalization.ForwardKey(4096, access, low, low, low, low, True, False)
        source = normalization.forward_source(key, HOPPER)[0]
        shapes.append({name: value for name, value in source.defines if name != "ACCESS"})
    assert shapes[0] == shapes[1] == shapes[2]


LONG = 4096, 4104, 16384, 16392, 32768, 32776, 65536, 65544, 131072, 131_080, 262144


@pytest.mark.parametrize("centred", [False, True])
def test_long_rows_keep_their_parameters_and_have_others_under_way(centred: bool) -> None:
    low = torch.bfloat16
    found = {}
    for columns in LONG:
        key = normalization.ForwardKey(columns, 8, low, low, low, low, centred, False)
        source, geometry, *_ = normalization.forward_source(key, HOPPER, through_memory=False)
        found[columns] = source.kernel
        if source.kernel == "forward_stream":
            assert int(dict(source.defines)["STAGES"]) > 1
            assert geometry.shared_bytes <= HOPPER.shared_per_block
    streamed = {columns for columns in LONG if found[columns] == "forward_stream"}
    wide = {columns for columns in LONG if columns > (32768 if centred else 131072)}
    assert streamed == wide


@pytest.mark.parametrize(
    ("columns", "centred", "ahead"),
    [(4096, True, 1), (4104, True, 0), (16384, True, 0), (4104, False, 1), (15360, False, 1)],
)
def test_gamma_and_beta_of_longer_rows_are_not_in_shared_memory(
    columns: int, centred: bool, ahead: int
) -> None:
    low = torch.bfloat16
    key = normalization.ForwardKey(columns, 8, low, low, low, low, centred, False)
    source, *_ = normalization.forward_source(key, HOPPER)
    assert (source.kernel, dict(source.defines)["AHEAD"]) == ("forward", ahead)


@pytest.mark.parametrize(
    ("columns", "gamma", "dbeta"),
    [(8192, 1, 0), (16384, 0, 0), (32768, 0, 0), (131072, 1, 1)],
)
def test_where_a_backward_keeps_gamma_and_dbeta(columns: int, gamma: int, dbeta: int) -> None:
    low = torch.bfloat16
    key = normalization.BackwardKey(columns, 8, low, low, low, True, False)
    found = normalization.shared_source(key, HOPPER, 16)
    assert found is not None
    defines = dict(found[0][0].defines)
    assert (defines["HOLD_GAMMA"], defines["SHARED_DBETA"]) == (gamma, dbeta)


def backward_kernel(
    columns: int,
    centred: bool,
    *,
    added: bool = False,
    other: torch.dtype = torch.bfloat16,
    limits: _launch.Limits = HOPPER,
    through_memory: bool = False,
) -> tuple[str, dict[str, Any]]:
    """The name and macros of the first kernel of a backward of bfloat16 rows."""
    low = torch.bfloat16
    add = other if added else None
    key = normalization.BackwardKey(columns, 8, low, other, low, centred, False, add)
    sources, _ = normalization.backward_sources(key, limits, through_memory=through_memory)
    source = sources[0][0]
    return source.kernel, dict(source.defines)


@pytest.mark.parametrize(
    ("columns", "centred", "added", "kernel", "lanes"),
    [
        (768, False, False, None, 32),
        (1024, False, False, "registers", 128),
        (2048, False, False, "registers", 128),
        (2048, False, True, None, 128),
        (2056, False, False, "registers", 320),
        (3072, False, True, "registers", 384),
        (4096, False, False, "registers", 512),
        (5120, False, True, "registers", 320),
        (8192, False, False, "registers", 512),
        (8192, False, True, "registers", 512),
        (8200, False, False, None, 512),
        (768, True, False, None, 32),
        (776, True, False, "registers", 128),
        (1024, True, False, "registers", 128),
        (1032, True, False, None, 256),
        (3072, True, False, "pairs", 192),
        (4096, True, False, "pairs", 256),
        (3584, True, False, "registers", 512),
        (5120, True, False, "pairs", 320),
        (6144, True, False, "registers", 384),
        (8192, True, False, "pairs", 512),
        (8200, True, False, None, 256),
    ],
)
def test_which_rows_a_backward_keeps_in_registers(
    columns: int, centred: bool, added: bool, kernel: str | None, lanes: int
) -> None:
    found, defines = backward_kernel(columns, centred, added=added)
    assert found == ("backward" if kernel is None else f"backward_{kernel}")
    assert defines["LANES"] == lanes
    if kernel is not None:
        for others in ({"other": torch.float32}, {"limits": ADA}):
            options: dict[str, Any] = {"added": added, **others}
            assert backward_kernel(columns, centred, **options)[0] == "backward"


@pytest.mark.parametrize(("centred", "added"), [(False, False), (False, True), (True, False)])
def test_rows_in_registers_are_held_by_threads_that_have_them(centred: bool, added: bool) -> None:
    for columns in range(2056, 8193, 8):
        _, defines = backward_kernel(columns, centred, added=added)
        share = defines["LANES"] * 8
        assert (defines["VECS"] - 1) * share < columns <= defines["VECS"] * share
        assert 65536 // (defines["LANES"] * defines["BLOCKS"]) >= 64  # registers of each thread


@pytest.mark.parametrize(
    ("centred", "added", "pieces"),
    [
        (
            False,
            False,
            {
                5120: None,
                5124: None,  # not a multiple of a vector
                5128: (6, 32, 4),
                7168: (7, 32, 4),
                7176: None,
                8192: None,
                8200: (9, 32, 4),
                10240: (10, 32, 4),
                57344: (56, 32, 4),
                131072: (128, 32, 4),
                131_080: (86, 32, 6),
                151936: (99, 32, 6),
                196608: (128, 32, 6),
                262144: (64, 128, 4),
            },
        ),
        (
            False,
            True,
            {
                8192: None,
                33000: (33, 32, 4),
                131072: (128, 32, 4),
                151936: (99, 32, 6),
                196608: (128, 32, 6),
                229376: (56, 128, 4),
                262144: (64, 128, 4),
                262152: None,
            },
        ),
        (
            True,
            False,
            {
                9216: (9, 32, 4),
                32768: (32, 32, 4),
                49152: (48, 32, 4),
                131072: (128, 32, 4),
                131_080: (86, 32, 6),
                196608: (128, 32, 6),
                200_000: (33, 256, 3),
                229376: (75, 64, 6),
                262144: (128, 64, 4),
                8188: None,
            },
        ),
    ],
)
def test_which_rows_are_those_of_blocks_that_exchange_through_memory(
    centred: bool, added: bool, pieces: dict[int, tuple[int, int, int] | None]
) -> None:
    options: dict[str, Any] = {"added": added, "through_memory": True}
    for columns, expected in pieces.items():
        kernel, defines = backward_kernel(columns, centred, **options)
        found = None
        if kernel == "backward" and defines["EXCHANGE"] == 2:
            found = (defines["CLUSTER"], defines["LANES"], defines["VECS"])
        assert found == expected
        for other in ({"other": torch.float32}, {"limits": BLACKWELL}, {"limits": ADA}):
            _, defines = backward_kernel(columns, centred, **options, **other)
            assert defines.get("EXCHANGE", 0) < 2


@pytest.mark.parametrize("device", [HOPPER, BLACKWELL, ADA], ids=["sm_90", "sm_120", "sm_89"])
def test_rows_that_begin_anywhere_have_threads_for_little_more(device: _launch.Limits) -> None:
    low = torch.bfloat16
    striped = 0
    for columns in (*range(129, 9000, 251), *range(9001, 262_144, 4093)):
        tiles = []
        for centred, add in ((False, None), (True, None), (False, low)):
            key = normalization.ForwardKey(
                columns, 1, low, low, low, low, centred, False, add is not None
            )
            if key.striped:
                tiles.append(key.tile(device))
            back = normalization.BackwardKey(columns, 1, low, low, low, centred, False, add)
            if back.striped:
                tiles.append(normalization.backward_sources(back, device)[1])
        for tile in tiles:
            if tile is None:  # the row is read twice
                assert columns > (16_384 if device.has_clusters else 8_192)
                continue
            assert tile.striped
            assert tile.vec == 8
            assert tile.lanes % 32 == 0
            assert tile.threads <= 1024
            assert columns <= tile.room <= 1.6 * columns
            striped += 1
    assert striped > 150


@pytest.mark.parametrize("most_blocks", [16, 8])
@pytest.mark.parametrize("device", [HOPPER, BLACKWELL, ADA], ids=["sm_90", "sm_120", "sm_89"])
def test_rows_that_begin_anywhere_are_read_twice_beyond_a_width(
    device: _launch.Limits, most_blocks: int
) -> None:
    low = torch.bfloat16
    for centred, add in ((False, None), (True, None), (False, low)):
        added = add is not None
        forwards, backwards = [], []
        for columns in range(513, 262_144, 510):
            forward = normalization.ForwardKey(columns, 1, *(low,) * 4, centred, False, added)
            back = normalization.BackwardKey(columns, 1, low, low, low, centred, False, add)
            forwards.append(forward.tile(device, most_blocks) is not None)
            way = (device, most_blocks, False)
            backwards.append(normalization.backward_sources(back, *way)[1] is not None)
        for whole in (forwards, backwards):
            assert whole == sorted(whole, reverse=True)
        assert all(forwards) or device is not HOPPER


def test_only_rows_of_half_precision_begin_anywhere() -> None:
    low, full = torch.bfloat16, torch.float32
    for types in ((full, full, full, full), (low, full, low, low), (low, low, low, full)):
        tile = normalization.ForwardKey(4097, 1, *types, False, False).tile(HOPPER)
        assert tile is not None
        assert not tile.striped
    for x, dy, gamma in ((full, full, full), (low, full, low), (low, low, full)):
        key = normalization.BackwardKey(4097, 1, x, dy, gamma, False, False)
        tile = normalization.backward_sources(key, HOPPER)[1]
        assert tile is not None
        assert not tile.striped


@pytest.mark.parametrize(("centred", "added"), [(False, False), (False, True), (True, False)])
def test_rows_in_pieces_leave_few_threads_without_columns(centred: bool, added: bool) -> None:
    low = torch.bfloat16
    for columns in (*range(8200, 66_000, 8), *range(66_000, 262_145, 1000), 262_144):
        key = normalization.BackwardKey(
            columns, 8, low, low, low, centred, False, low if added else None
        )
        found = normalization.memory_source(key, HOPPER)
        assert found is not None
        (source, geometry), tile = found
        assert tile.cluster <= 128  # one warp reads the slots of all
        held = tile.threads * tile.held * tile.cluster
        assert columns <= held < columns + (1024 if columns <= 131_072 else 6144)
        assert dict(source.defines)["FULL"] == (held == columns)
        block = geometry.shared_bytes + 2 * (tile.lanes // 32) * 4 * (1 + centred) + 1024
        assert tile.blocks * block <= HOPPER.shared_per_multiprocessor


@pytest.mark.parametrize(
    ("columns", "late", "stages", "exchange"),
    [(32768, 0, 2, 0), (65536, 1, 3, 0), (131072, 1, 3, 1), (262144, 0, 2, 0)],
)
def test_the_stages_of_wide_rows_in_a_backward_with_a_residual(
    columns: int, late: int, stages: int, exchange: int
) -> None:
    _, defines = backward_kernel(columns, False, added=True)
    assert (defines["LATE_ADD"], defines["STAGES"], defines["EXCHANGE"]) == (late, stages, exchange)
    assert defines["OVERLAP"] == (stages > 2)


@pytest.mark.parametrize(
    ("backward", "centred", "widths"),
    [
        (False, False, {262144}),
        (False, True, {65536, 131072, 262144}),
        (True, False, {131072, 262144}),
        (True, True, {32768}),
    ],
)
def test_which_clusters_exchange_without_a_barrier(
    backward: bool, centred: bool, widths: set[int]
) -> None:
    low = torch.bfloat16
    found = set()
    for columns in (32768, 65536, 131072, 262144):
        if backward:
            defines = backward_kernel(columns, centred)[1]
        else:
            key = normalization.ForwardKey(columns, 8, low, low, low, low, centred, False)
            source = normalization.forward_source(key, HOPPER, through_memory=False)[0]
            defines = dict(source.defines)
        if defines.get("EXCHANGE"):
            found.add(columns)
    assert found == widths


@pytest.mark.parametrize(
    ("centred", "added", "limits", "team"),
    [
        (False, False, HOPPER, (512, 1)),
        (False, True, HOPPER, (1024, 1)),
        (True, False, HOPPER, (512, 1)),
        (False, False, BLACKWELL, (1024, 1)),
        (False, True, BLACKWELL, (256, 4)),  # shared memory has no room for two such rows
    ],
)
def test_which_threads_and_blocks_share_a_row_of_32768_columns(
    centred: bool, added: bool, limits: _launch.Limits, team: tuple[int, int]
) -> None:
    low = torch.bfloat16
    key = normalization.ForwardKey(32768, 8, low, low, low, low, centred, False, added)
    tile = key.tile(limits)
    assert tile is not None
    assert (tile.lanes, tile.cluster) == team


@pytest.mark.parametrize(
    ("columns", "most_blocks", "spread", "stages"),
    [
        (65536, 16, (256, 8, 4, 2), 4),
        (131072, 16, (512, 8, 4, 1), 4),
        (262144, 16, (512, 16, 4, 1), 4),
        (262144, 8, (1024, 8, 4, 1), 3),
    ],
)
def test_a_longer_layer_norm_gives_a_thread_more_vectors_and_registers(
    columns: int, most_blocks: int, spread: tuple[int, ...], stages: int
) -> None:
    low = torch.bfloat16
    key = normalization.ForwardKey(columns, 8, low, low, low, low, True, False)
    tile, way = key.spread(HOPPER, most_blocks)
    assert tile is not None
    assert (tile.lanes, tile.cluster, tile.vecs, tile.blocks) == spread
    assert way == (stages, True)


@pytest.mark.parametrize(
    ("columns", "centred", "spread"),
    [
        (2048, False, None),
        (4096, False, (256, 1, 2, 3)),
        (8192, False, (512, 1, 2, 4)),
        (8200, False, (256, 1, 5, 5)),
        (12296, False, (512, 1, 4, 4)),
        (14336, False, (512, 1, 4, 4)),
        (14344, False, None),
        (16376, False, None),
        (16384, False, (256, 1, 8, 4)),
        (16392, False, (512, 1, 5, 2)),
        (24576, False, (256, 1, 12, 3)),
        (28672, False, (256, 1, 14, 3)),
        (32768, False, (512, 1, 8, 2)),
        (40960, False, (512, 1, 10, 2)),
        (65536, False, (256, 2, 16, 3)),
        (131072, False, (256, 4, 16, 3)),
        (131_080, False, None),
        (1024, True, (64, 1, 2, 24)),
        (1280, True, (64, 1, 3, 20)),
        (2048, True, (64, 1, 4, 20)),
        (4096, True, None),
        (5120, True, (128, 1, 5, 8)),
        (6144, True, (128, 1, 6, 8)),
        (6152, True, (256, 1, 4, 6)),
        (7168, True, (128, 1, 7, 8)),
        (8184, True, (256, 1, 4, 6)),
        (8192, True, None),
        (14336, True, (256, 1, 7, 5)),
        (16384, True, (512, 1, 4, 3)),
        (18432, True, (256, 1, 9, 4)),
        (20480, True, (512, 1, 5, 3)),
        (22528, True, (256, 1, 11, 3)),
        (24576, True, (512, 1, 6, 3)),
        (26624, True, (256, 1, 13, 3)),
        (32768, True, (512, 1, 8, 3)),
        (40960, True, None),
        (57344, True, None),
        (49152, True, None),
        (65536, True, None),
        (81920, True, None),
        (98304, True, None),
        (229_376, True, None),
        (262144, True, None),
    ],
)
def test_which_rows_wait_in_the_shared_memory_of_small_blocks(
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
    centred: bool,
    spread: tuple[int, ...] | None,
) -> None:
    low = torch.bfloat16
    key = normalization.ForwardKey(columns, 8, low, low, low, low, centred, False)
    tile, way = key.spread(HOPPER)
    assert tile is not None
    if spread is None:
        monkeypatch.setattr(normalization, "IN_SHARED_MEMORY", ())
        assert key.spread(HOPPER) == (tile, way)
    else:
        assert (tile.lanes, tile.cluster, tile.vecs, tile.blocks) == spread
        source = normalization.forward_source(key, HOPPER, through_memory=False)[0]
        assert source.kernel == "forward"
        taken = tile.threads * tile.held * 2 + 1024
        assert tile.blocks * taken <= HOPPER.shared_per_multiprocessor
        # Here there is no room left for the exchange of the sums.
        tight = dataclasses.replace(HOPPER, shared_per_multiprocessor=tile.blocks * taken)
        assert key.spread(tight)[0] != tile
        assert key.spread(dataclasses.replace(HOPPER, major=8))[0] != tile


@pytest.mark.parametrize("columns", [16384, 32768, 65536])
@pytest.mark.parametrize("other", ["residual", "float32", "cast", "narrow"])
def test_only_plain_rows_of_half_precision_wait_in_shared_memory(
    monkeypatch: pytest.MonkeyPatch, columns: int, other: str
) -> None:
    low = torch.bfloat16
    x = torch.float32 if other == "float32" else low
    cast = normalization.Cast(None, True) if other == "cast" else None
    columns -= 4 if other == "narrow" else 0
    added = other == "residual"
    keys = [
        normalization.ForwardKey(columns, 8, x, low, low, x, centred, False, added, cast)
        for centred in {False, not added}
    ]
    found = [key.spread(HOPPER) for key in keys]
    monkeypatch.setattr(normalization, "IN_SHARED_MEMORY", ())
    assert found == [key.spread(HOPPER) for key in keys]


@pytest.mark.parametrize(("columns", "streamed"), [(65536, False), (65544, True)])
def test_rows_of_65536_columns_with_a_residual_are_not_streamed(
    columns: int, streamed: bool
) -> None:
    low = torch.bfloat16
    key = normalization.ForwardKey(columns, 8, low, low, low, low, False, False, True)
    kernel = normalization.forward_source(key, HOPPER, through_memory=False)[0].kernel
    assert (kernel == "forward_stream") == streamed


def test_which_forwards_exchange_through_memory() -> None:
    found: dict[tuple[bool, bool], dict[int, tuple[int, ...]]] = {}
    low = torch.bfloat16
    narrow = (20480, 20488, 22520, 22528, 22536, 26624, 28672, 28680)
    wide = (32768, 32776, 65536, 65540, 65544, 98304, 131072, 131_080, 262144, 262152)
    widths = (*narrow, *wide)
    for columns in widths:
        for centred, added in itertools.product((False, True), repeat=2):
            same = normalization.ForwardKey(
                columns, 4, low, low, low, low, centred, False, added and not centred
            )
            wider = dataclasses.replace(same, output=torch.float32)
            for key, device in ((same, HOPPER), (same, BLACKWELL), (same, ADA), (wider, HOPPER)):
                source, geometry, _, blocks = normalization.forward_source(key, device)
                if source.kernel != "forward_pieces":
                    assert geometry.together == 1
                    continue
                assert (key, device) == (same, HOPPER)
                assert geometry.together == blocks <= 128  # one warp reads the slots of all
                defines = dict(source.defines)
                assert defines["HOLD_GAMMA"] == (not centred)
                spread = (blocks, *(defines[name] for name in ("LANES", "VECS", "BLOCKS")))
                found.setdefault((centred, same.added), {})[columns] = spread
                block = geometry.shared_bytes + 1024
                assert int(defines["BLOCKS"]) * block <= HOPPER.shared_per_multiprocessor
    assert found.pop((True, False)) == {
        20488: (14, 32, 6, 16),
        22520: (15, 32, 6, 16),  # 22,528 would fill the vectors of 256 threads
        22536: (15, 32, 6, 16),
        28680: (19, 32, 6, 16),
        32776: (22, 32, 6, 16),
        65536: (32, 32, 8, 12),
        65544: (43, 32, 6, 16),
        98304: (48, 32, 8, 12),
        131072: (16, 128, 8, 3),
        131_080: (65, 32, 8, 12),
        262144: (32, 128, 8, 3),
    }
    assert found.pop((False, False)) == {
        20488: (11, 32, 8, 12),
        22520: (11, 32, 8, 12),  # 22,528 would fill the vectors of 256 threads
        22536: (12, 32, 8, 12),
        28680: (15, 32, 8, 12),
        32768: (16, 32, 8, 12),
        32776: (17, 32, 8, 12),
        65536: (32, 32, 8, 12),
        65544: (33, 32, 8, 12),
        98304: (48, 32, 8, 12),
        131072: (64, 32, 8, 12),
        131_080: (17, 128, 8, 3),
        262144: (32, 128, 8, 3),
    }
    assert found.pop((False, True)) == {
        32776: (17, 32, 8, 8),
        65536: (32, 32, 8, 8),
        65544: (33, 32, 8, 8),
        98304: (48, 32, 8, 8),
        131072: (64, 32, 8, 8),
        131_080: (65, 32, 8, 8),
        262144: (128, 32, 8, 8),
    }
    assert not found


def _cast(kind: str) -> normalization.Cast:
    """The cast of a kernel that writes codes of the format, or what a later cast needs."""
    if kind in ("statistics", "amax"):
        return normalization.Cast(None, kind == "amax")
    recipe = next(it for it in _casting.recipes() if it.form is FORMATS[kind] and not it.columnwise)
    return normalization.Cast(recipe, recipe.form.by_tensor)


@pytest.mark.parametrize(
    ("kind", "columns", "norm", "spread"),
    [  # lanes, vectors per thread, blocks per row and per multiprocessor, columns side by side
        ("per_tensor", 248, "rms", None),
        ("per_tensor", 256, "rms", (32, 1, 1, 16, 8)),
        ("per_tensor", 2048, "rms", (64, 4, 1, 8, 8)),
        ("per_tensor", 4096, "rms", None),
        ("per_tensor", 5120, "rms", (128, 5, 1, 3, 8)),
        ("amax", 5120, "rms", (128, 5, 1, 3, 8)),
        ("per_tensor", 8192, "rms", None),
        ("per_tensor", 16384, "rms", (512, 4, 1, 1, 8)),
        ("per_tensor", 32768, "rms", (512, 4, 2, 2, 8)),
        ("mxfp8", 512, "rms", (32, 2, 1, 16, 8)),
        ("mxfp8", 1024, "rms", None),
        ("mxfp8", 4096, "rms", None),
        ("mxfp8", 5120, "rms", None),
        ("mxfp8", 8224, "rms", None),
        ("per_tensor", 8208, "rms", (256, 5, 1, 1, 8)),
        ("nvfp4", 8192, "rms", None),
        ("block_1x128", 12288, "rms", (256, 6, 1, 1, 16)),
        ("mxfp8", 32768, "rms", (512, 4, 2, 1, 8)),
        ("per_tensor", 262144, "rms", (1024, 4, 8, 1, 8)),
        ("mxfp8", 262144, "rms", (1024, 4, 8, 1, 8)),
        ("mxfp8", 262144, "layer", (512, 4, 16, 1, 8)),
        ("per_tensor", 1024, "layer", (32, 4, 1, 16, 8)),
        ("per_tensor", 4096, "layer", (64, 8, 1, 4, 8)),
        ("amax", 4104, "layer", (128, 5, 1, 2, 8)),
        ("amax", 7168, "layer", (128, 7, 1, 2, 8)),
        ("per_tensor", 8192, "layer", (128, 8, 1, 2, 8)),
        ("mxfp8", 8192, "layer", (256, 4, 1, 2, 16)),
        ("mxfp8", 2048, "layer", (64, 4, 1, 8, 16)),
        ("mxfp8", 7168, "layer", None),
        ("mxfp8", 6136, "layer", (128, 6, 1, 2, 8)),
        ("mxfp8", 32768, "layer", (512, 4, 2, 1, 8)),
        ("statistics", 8192, "layer", None),
        ("statistics", 32768, "layer", (512, 4, 2, 1, 8)),
        ("per_tensor", 1024, "added", (32, 4, 1, 16, 8)),
        ("mxfp8", 1024, "added", None),
        ("per_tensor", 16384, "added", None),
        ("mxfp8", 32768, "added", (512, 4, 2, 1, 8)),
    ],
)
def test_which_rows_that_are_cast_are_streamed(
    kind: str, columns: int, norm: str, spread: tuple[int, ...] | None
) -> None:
    low = torch.bfloat16
    key = normalization.ForwardKey(
        columns, 8, *(low,) * 4, norm == "layer", False, norm == "added", _cast(kind)
    )
    source, geometry, *_ = normalization.forward_source(key, HOPPER)
    defines = dict(source.defines)
    if spread is None:
        assert source.kernel == "forward"
    else:
        assert source.kernel == "forward_stream"
        named = ("LANES", "VECS", "CLUSTER", "BLOCKS", "SPAN")
        assert tuple(defines[name] for name in named) == spread
        together = int(defines["BLOCKS"]) * (geometry.shared_bytes + 1024)
        assert together <= HOPPER.shared_per_multiprocessor
    assert normalization.forward_source(key, ADA)[0].kernel == "forward" or columns > 16384


@pytest.mark.parametrize("kind", ["per_tensor", "amax", "mxfp8"])
@pytest.mark.parametrize("centred", [False, True])
def test_listed_ways_to_cast_hold_all_their_rows(centred: bool, kind: str) -> None:
    ways = normalization.CAST_AS[centred, kind == "mxfp8"]
    narrowest = normalization.CAST_NARROWEST + 7
    for way in ways:
        assert narrowest <= way.widest <= way.tile.held * way.lanes
        assert way.blocks * way.lanes <= 1536
        for columns in (narrowest, way.widest):
            low = (torch.bfloat16,) * 4
            key = normalization.ForwardKey(columns, 8, *low, centred, False, cast=_cast(kind))
            source, *_ = normalization.forward_source(key, HOPPER)
            assert source.kernel == ("forward" if way.one_row else "forward_stream")
            assert dict(source.defines)["VECS"] == way.vecs
        narrowest = way.widest + 8


@pytest.mark.parametrize(
    ("kind", "columns", "dtype", "span"),
    [
        ("mxfp8", 4096, torch.bfloat16, 16),
        ("block_1x128", 2048, torch.float16, 16),
        ("per_tensor", 4096, torch.bfloat16, 8),  # no threads share a scale
        ("mxfp8", 3072, torch.bfloat16, 16),
        ("mxfp8", 1536, torch.bfloat16, 8),  # a warp holds the row
        ("mxfp8", 2304, torch.bfloat16, 8),  # three vectors per thread
        ("mxfp8", 1024, torch.bfloat16, 8),  # within a warp
        ("mxfp8", 4096, torch.float32, 4),
    ],
)
def test_two_vectors_of_a_row_in_shared_memory_are_cast_side_by_side(
    kind: str, columns: int, dtype: torch.dtype, span: int
) -> None:
    key = normalization.ForwardKey(
        columns, 16 // dtype.itemsize, *(dtype,) * 4, False, False, cast=_cast(kind)
    )
    source, *_ = normalization.forward_source(key, HOPPER)
    assert (source.kernel, dict(source.defines)["SPAN"]) == ("forward", span)


class Unloaded:
    """A kernel on a device without room for clusters of 16 blocks or for cooperative launches."""

    most = 8

    def __init__(self, source: object, geometry: _launch.Geometry, device: int) -> None:
        self.cluster = geometry.cluster
        self.together = geometry.together

    def resident_groups(self) -> int:
        return 0 if self.cluster > self.most or self.together > 1 else 4


class Alone(Unloaded):
    """A kernel on a device with room for clusters of 16, but none for cooperative launches."""

    most = 16


@pytest.mark.parametrize("added", [False, True])
def test_where_16_blocks_form_no_cluster_others_serve(
    added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = torch.bfloat16
    monkeypatch.setattr(_launch, "load", Unloaded)
    monkeypatch.setattr(_launch, "limits", lambda device: HOPPER)
    key = normalization.ForwardKey(262144, 8, low, low, low, low, False, False, added)
    without = normalization.forward_source(key, HOPPER, through_memory=False)
    assert without[3] == (16 if added else 8)
    assert normalization.Forward(key, 0).cluster == 8
    back = normalization.BackwardKey(262144, 8, low, low, low, False, False, low if added else None)
    kernels = normalization.Backward(back, 0)._kernels
    assert {kernel.cluster for kernel in kernels} == {1}  # the kernel that reads rows twice
    assert len(kernels) == 2


@pytest.mark.parametrize(
    ("columns", "centred", "cluster"), [(65536, True, 8), (262144, True, 16), (262144, False, 16)]
)
def test_where_no_launch_is_cooperative_clusters_serve(
    columns: int, centred: bool, cluster: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = torch.bfloat16
    monkeypatch.setattr(_launch, "load", Alone)
    monkeypatch.setattr(_launch, "limits", lambda device: HOPPER)
    key = normalization.BackwardKey(
        columns, 8, low, low, low, centred, False, None if centred else low
    )
    assert normalization.backward_sources(key, HOPPER)[0][0][1].together > 1
    plan = normalization.Backward(key, 0)
    assert [kernel.cluster for kernel in plan._kernels] == [cluster]
    assert not plan.through_memory


@pytest.mark.parametrize(("columns", "cluster"), [(65536, 8), (131072, 8), (262144, 16)])
def test_where_no_launch_is_cooperative_clusters_serve_a_forward(
    columns: int, cluster: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = torch.bfloat16
    monkeypatch.setattr(_launch, "load", Alone)
    monkeypatch.setattr(_launch, "limits", lambda device: HOPPER)
    key = normalization.ForwardKey(columns, 8, low, low, low, low, False, False, True)
    assert normalization.forward_source(key, HOPPER)[1].together > 1
    plan = normalization.Forward(key, 0)
    assert (plan.cluster, plan.through_memory) == (cluster, False)


def test_a_backward_without_large_clusters_has_another_kernel() -> None:
    low = torch.bfloat16
    for centred in (False, True):
        key = normalization.BackwardKey(262144, 8, low, low, low, centred, False)
        for most, cluster in ((16, 16), (8, 1)):
            sources, tile = normalization.backward_sources(key, HOPPER, most, False)
            assert {geometry.cluster for _, geometry in sources} == {cluster}
            assert (tile is None) == (cluster == 1)


# ------------------------------------------------------------------------- on a device


def assert_right(op: str, rows: int, columns: int, device: str) -> None:
    """Check an operator against its contract on random rows of bfloat16."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(rows, columns, generator=generator).to(torch.bfloat16).to(device)
    args = call_for(op, x)
    assert_close(op, serve(op)(*args), getattr(ops, op).oracle(*args), "bfloat16")


@pytest.fixture
def few_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two groups of blocks are resident, so that each has several rows."""
    monkeypatch.setattr(
        normalization, "require_clusters", lambda kernel, columns: min(2, kernel.resident_groups())
    )
    monkeypatch.setattr(normalization, "_forwards", Plans())
    monkeypatch.setattr(normalization, "_backwards", Plans())


@pytest.mark.usefixtures("few_groups")
@pytest.mark.parametrize("columns", [1000, 4000, 4104, 8192, 12008, 20008, 33000])
@pytest.mark.parametrize("op", [*OPERATORS, "rmsnorm_bwd_add"])
def test_groups_with_several_rows(op: str, columns: int, device: str) -> None:
    assert_right(op, 7, columns, device)


@pytest.mark.usefixtures("few_groups")
@pytest.mark.parametrize("columns", [1000, 4000])
def test_groups_with_more_rows_than_are_under_way(columns: int, device: str) -> None:
    assert_right("layernorm_bwd", 27, columns, device)


@pytest.mark.parametrize("few", [False, True], ids=["many groups", "few groups"])
@pytest.mark.parametrize(
    "columns", [129, 250, 1023, 2049, 4097, 5003, 8194, 16_387, 50_257, 131_073]
)
@pytest.mark.parametrize("op", [*OPERATORS, "rmsnorm_fwd_add", "rmsnorm_bwd_add"])
def test_rows_that_begin_anywhere(
    op: str, columns: int, few: bool, device: str, request: pytest.FixtureRequest
) -> None:
    if few:
        request.getfixturevalue("few_groups")
    rows = 5 if device == "cpu" else 300
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(rows, columns, generator=generator).to(device, torch.bfloat16)
    args = call_for(op, x)
    results = serve(op)(*args)
    assert_close(op, results, getattr(ops, op).oracle(*args), "bfloat16")
    for skip, apart in ((3, 5), (1, 8), (2, 2)):

        def moved(value: Tensor, skip: int = skip, apart: int = apart) -> Tensor:
            around = torch.full((*value.shape[:-1], columns + apart), torch.nan, device=device)
            around = around.to(value.dtype)[..., skip : columns + skip]
            return around.copy_(value)

        elsewhere = serve(op)(*(moved(it) if it.shape[-1] == columns else it for it in args))
        for one, other in zip(results, elsewhere, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("columns", [64, 1000, 4000, 8192, 12008, 33000])
def test_a_row_of_one_value_says_nothing_of_gamma(columns: int, device: str) -> None:
    x = torch.full((2, columns), 2000.0, dtype=torch.bfloat16, device=device)
    _, dgamma, _ = serve("layernorm_bwd")(*call_for("layernorm_bwd", x))
    assert not dgamma.any()


@pytest.mark.usefixtures("few_groups")
@pytest.mark.parametrize("rows", [1, 3, 27])
@pytest.mark.parametrize("columns", [2056, 3072, 4104, 8000, 8192])
def test_pairs_of_blocks_add_up_gradients_of_parameters(
    rows: int, columns: int, device: str
) -> None:
    assert backward_kernel(columns, True)[0] == "backward_pairs"
    assert_right("layernorm_bwd", rows, columns, device)


@pytest.mark.parametrize("columns", [32_760, 65_528])
def test_a_residual_in_a_large_block_and_in_a_cluster(columns: int, device: str) -> None:
    assert_right("rmsnorm_fwd_add", 2, columns, device)


@pytest.mark.usefixtures("few_groups")
@pytest.mark.parametrize(
    ("op", "columns"),
    [
        ("rmsnorm_fwd_add", 131_080),
        ("rmsnorm_bwd_add", 66_000),
        ("layernorm_fwd", 65_536),
        ("layernorm_fwd", 131_072),
    ],
)
def test_groups_with_several_wide_rows(op: str, columns: int, device: str) -> None:
    assert_right(op, 5, columns, device)


@pytest.fixture
def much_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Enough multiprocessors for blocks that exchange sums through memory; emulated."""
    if reason := cuda_emulation.missing():
        pytest.skip(reason)
    limits = dataclasses.replace(cuda_emulation.LIMITS, multiprocessors=32)
    monkeypatch.setattr(cuda_emulation, "LIMITS", limits)
    monkeypatch.setattr(normalization, "_forwards", Plans())
    monkeypatch.setattr(normalization, "_backwards", Plans())
    with cuda_emulation.running():
        yield "cpu"


@pytest.mark.parametrize(
    ("op", "columns", "rows", "groups"),
    [
        ("rmsnorm_fwd", 33_000, 130, 24),  # blocks of a warp, the last one partly filled
        ("rmsnorm_fwd", 65_536, 2, 13),  # fewer rows than groups
        ("rmsnorm_fwd", 131_072, 13, 6),
        ("rmsnorm_fwd", 200_000, 5, 5),
        ("layernorm_fwd", 15_000, 101, 54),  # ten blocks, the last one partly filled
        ("layernorm_fwd", 33_000, 41, 24),
        ("layernorm_fwd", 49_152, 41, 17),  # 24 full blocks
        ("layernorm_fwd", 100_000, 5, 8),
        ("layernorm_fwd", 200_000, 3, 4),
        ("layernorm_fwd", 65_536, 41, 13),
        ("layernorm_fwd", 131_072, 11, 6),
        ("layernorm_fwd", 262_144, 2, 3),
        ("rmsnorm_fwd_add", 33_000, 41, 16),  # more rows than are in flight
        ("rmsnorm_fwd_add", 65_536, 2, 9),
        ("rmsnorm_fwd_add", 100_000, 5, 5),
        ("rmsnorm_fwd_add", 262_144, 3, 2),
        ("layernorm_bwd", 8_200, 101, 60),  # part of a block has no columns
        ("layernorm_bwd", 33_792, 5, 16),  # 33 full blocks
        ("layernorm_bwd", 33_000, 27, 16),
        ("layernorm_bwd", 65_536, 41, 8),  # more rows than are in flight
        ("layernorm_bwd", 200_000, 5, 2),
        ("layernorm_bwd", 262_144, 3, 2),
        ("rmsnorm_bwd", 10_240, 150, 54),
        ("rmsnorm_bwd", 57_344, 11, 9),
        ("rmsnorm_bwd", 120_000, 7, 4),  # lanes read the slots of four blocks, or of three
        ("rmsnorm_bwd", 151_936, 7, 3),
        ("rmsnorm_bwd_add", 20_480, 60, 19),
        ("rmsnorm_bwd_add", 33_000, 13, 11),
        ("rmsnorm_bwd_add", 262_144, 5, 1),
    ],
)
def test_blocks_that_exchange_through_memory(
    op: str, columns: int, rows: int, groups: int, much_room: str
) -> None:
    assert_right(op, rows, columns, much_room)
    (plan,) = (*normalization._forwards.values(), *normalization._backwards.values())
    assert plan.through_memory
    assert plan._resident == groups


@pytest.mark.parametrize(
    ("op", "columns"),
    [
        ("rmsnorm_fwd", 33_000),
        ("rmsnorm_fwd_add", 66_000),
        ("layernorm_fwd", 33_000),
        ("layernorm_fwd", 65_536),
        ("rmsnorm_bwd", 9_216),
        ("layernorm_bwd", 9_216),
    ],
)
def test_blocks_that_exchange_through_memory_and_badly_aligned_rows(
    op: str, columns: int, much_room: str
) -> None:
    def moved(tensor: Any) -> Any:
        if tensor.shape[-1] != columns:
            return tensor
        room = torch.zeros(*tensor.shape[:-1], columns + 6, dtype=tensor.dtype)
        room[..., 1:-5] = tensor
        return room[..., 1:-5]

    generator = torch.Generator().manual_seed(columns)
    # The mean is many deviations from 0, and differs from block to block.
    x = torch.randn(3, columns, generator=generator) + torch.linspace(40, 60, columns)
    args = call_for(op, x.to(torch.bfloat16))
    found = serve(op)(*map(moved, args))
    (plan,) = (*normalization._forwards.values(), *normalization._backwards.values())
    assert plan.through_memory
    assert_close(op, found, getattr(ops, op).oracle(*args), "bfloat16")


@pytest.mark.parametrize("columns", [15_000, 49_152, 65_536])
def test_means_of_blocks_that_exchange_through_memory(columns: int, much_room: str) -> None:
    """The blocks' means merge exactly if they are equal, and accurately if one is far off."""
    x = torch.randn(7, columns, generator=torch.Generator().manual_seed(columns))
    x[0] = 1.5 * 2**60
    x[1, :1000] += 1000
    x[2, -8:] -= 2000
    x[3] += 300
    x[4, 3] = torch.inf
    x[5, -3] = -torch.inf
    x[6, columns // 2] = torch.nan
    x = x.to(torch.bfloat16)
    args = x, torch.ones(columns).bfloat16(), torch.zeros(columns).bfloat16()
    y, mu, rsigma = normalization.layernorm_fwd(*args)
    (plan,) = normalization._forwards.values()
    assert plan.through_memory
    expected = ops.layernorm_fwd.oracle(*args)
    for one, right in zip((y, mu, rsigma), expected, strict=True):
        for row in range(4):
            assert_close("layernorm_fwd", (one[row],), (right[row],), "bfloat16")
    assert mu[0] == 1.5 * 2**60
    assert mu[4:].tolist()[:2] == [torch.inf, -torch.inf]
    assert y[4:].isnan().all()
    assert rsigma[4:].isnan().all()


@pytest.mark.parametrize("op", ["layernorm_bwd", "rmsnorm_fwd_add"])
def test_each_repeated_call_has_epochs_of_its_own(op: str, much_room: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 33_000, generator=generator).to(torch.bfloat16)
    sample = Sample("", call_for(op, x))
    repeated_calls.check(serve(op), sample)
    assert repeated_calls.is_repeat(serve(op), sample)
    (plan,) = (*normalization._forwards.values(), *normalization._backwards.values())
    assert plan.through_memory


@pytest.mark.parametrize("columns", [2560, 3000, 4096, 5120, 8192])
def test_few_rows_have_the_bits_of_many_backward(columns: int, device: str) -> None:
    """dx has the same bits with pairs of blocks, for many rows, and without, for few."""
    many = normalization.FEW_ROWS + 1
    x = torch.randn(many, columns, generator=torch.Generator().manual_seed(3)).bfloat16()
    call = call_for("layernorm_bwd", x.to(device))
    dx, *_ = normalization.layernorm_bwd(*call)
    few = tuple(it[:5] if it.shape[0] == many else it for it in call)
    dx_of_few, dgamma, dbeta = normalization.layernorm_bwd(*few)
    assert torch.equal(dx_of_few, dx[:5])
    expected = ops.layernorm_bwd.oracle(*few)
    assert_close("layernorm_bwd", (dx_of_few, dgamma, dbeta), expected, "bfloat16")


@pytest.mark.parametrize("groups", [1, 16, 35, 64, 65])
@pytest.mark.parametrize("columns", [65_536, 65_540, 8_192, 4_100, 33])
def test_partial_sums_are_added_up(columns: int, groups: int, device: str) -> None:
    generator = torch.Generator().manual_seed(groups)
    partial = torch.randn(2, groups, columns, generator=generator).to(device)
    found = torch.full((2, columns), torch.nan, device=device)
    total = SumOfGroups(columns, torch.float32, torch.float32, partial.get_device(), results=2)
    total(partial.data_ptr(), found[0].data_ptr(), found[1].data_ptr(), groups)
    torch.testing.assert_close(found.double(), partial.double().sum(1), rtol=1e-6, atol=1e-5)


@pytest.fixture(params=["sm_86", "sm_120"])
def another_device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A device without clusters, and one with them, both with little shared memory; emulated."""
    if reason := cuda_emulation.missing():
        pytest.skip(reason)
    limits = dataclasses.replace(DEVICES[request.param], multiprocessors=2)
    monkeypatch.setattr(cuda_emulation, "LIMITS", limits)
    monkeypatch.setattr(normalization, "_forwards", Plans())
    monkeypatch.setattr(normalization, "_backwards", Plans())
    with cuda_emulation.running():
        yield "cpu"


@pytest.mark.parametrize("columns", [8200, 33_000])
@pytest.mark.parametrize("op", ["rmsnorm_fwd_add", "rmsnorm_bwd_add", *OPERATORS[2:]])
def test_long_rows_where_there_is_less_room_than_on_hopper(
    op: str, columns: int, another_device: str
) -> None:
    assert_right(op, 5, columns, another_device)


@pytest.mark.parametrize("op", [*OPERATORS, "rmsnorm_fwd_add", "rmsnorm_bwd_add"])
def test_lazily_negated_tensors_are_taken_at_their_values(op: str, device: str) -> None:
    values = first_sample(op, device).args
    expected = serve(op)(*values)
    for place, value in enumerate(values):
        negated = torch._neg_view(-value)
        assert negated.is_contiguous()
        found = serve(op)(*values[:place], negated, *values[place + 1 :])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, msg=f"argument {place}")


@pytest.mark.parametrize("columns", [8, 1000, 1024, 4104, 8192, 20000])
def test_a_variance_does_not_suffer_from_a_large_mean(columns: int, device: str) -> None:
    generator = torch.Generator().manual_seed(columns)
    x = (torch.randn(3, columns, generator=generator) + 3000).to(device)
    _, mu, rsigma = normalization.layernorm_fwd(x, torch.ones(columns, device=device))
    wide = x.double()
    assert torch.allclose(mu.double(), wide.mean(-1), rtol=1e-6)
    exact = (wide.var(-1, correction=0) + 1e-5).rsqrt()
    assert torch.allclose(rsigma.double(), exact, rtol=2e-3)


@pytest.mark.parametrize("columns", [40, 1000, 3000, 7168, 14_336, 20_480, 40_008, 300_008])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_numbers_that_are_all_alike_have_no_variance(
    columns: int, dtype: torch.dtype, device: str
) -> None:
    """However large the numbers are, their mean is one of them."""
    x = torch.full((3, columns), 1.5 * 2**60, dtype=dtype, device=device)
    ones = torch.ones(columns, dtype=dtype, device=device)
    y, mu, rsigma = normalization.layernorm_fwd(x, ones, 2 * ones)
    assert torch.equal(mu, x[:, 0].to(mu.dtype))
    torch.testing.assert_close(rsigma, torch.full_like(rsigma, 1e-5).rsqrt())
    assert torch.equal(y, torch.full_like(y, 2))


def assert_close(op: str, outputs: tuple[Tensor, ...], expected: Any, dtype: str) -> None:
    tolerance = getattr(ops, op).tolerance
    for number, (output, right) in enumerate(zip(outputs, expected, strict=True)):
        wide = right.double().reshape(output.shape)
        by = tolerance[max(dtype, str(output.dtype)[6:], key=lambda name: tolerance[name].rtol)]
        rms = wide.square().mean().sqrt() if wide.numel() else wide.new_zeros(())
        error = (output.double() - wide).abs()
        allowed = by.rtol * wide.abs() + by.atol * rms
        assert bool((error <= allowed).all()), f"output {number}: {(error / allowed).max()}"


def call_for(op: str, x: Tensor, seed: int = 0) -> tuple[Any, ...]:
    """Arguments of an operator for an input."""
    generator = torch.Generator(x.device).manual_seed(seed)
    columns = x.shape[-1]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=x.device).to(x.dtype)

    gamma, beta, dy = normal(columns) * 0.5 + 1, normal(columns), normal(*x.shape)
    kind = statistics_dtype(x.dtype)
    wide = x.double()
    mu = wide.mean(-1)
    if op == "rmsnorm_fwd":
        return x, gamma
    if op == "rmsnorm_fwd_add":
        return x, dy, gamma
    if op == "layernorm_fwd":
        return x, gamma, beta
    if op.startswith("rmsnorm_bwd"):
        rsigma = (wide.square().mean(-1) + 1e-5).rsqrt().to(kind).flatten()
        return (dy, x, normal(*x.shape), rsigma, gamma) if "add" in op else (dy, x, rsigma, gamma)
    rsigma = ((wide - mu.unsqueeze(-1)).square().mean(-1) + 1e-5).rsqrt()
    return dy, x, mu.to(kind).flatten(), rsigma.to(kind).flatten(), gamma


def cuda_input(rows: int, columns: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator, device="cuda") + 0.5).to(dtype)


WIDTHS = (1, 7, 129, 1024, 1536, 2052, 4096, 5003, 5120, 8192, 12288, 16384, 20001, 32768, 65536)
VERY_WIDE = (33_000, 98_304, 131072, 151_936, 200_008, 262144, 262145)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("columns", [*WIDTHS, *VERY_WIDE])
@pytest.mark.parametrize("op", [*OPERATORS, "rmsnorm_fwd_add"])
def test_values_of_every_width(op: str, columns: int) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        args = call_for(op, cuda_input(300 if columns < 10_000 else 37, columns, dtype))
        results = serve(op)(*args)
        expected = getattr(ops, op).oracle(*args)
        if columns == 1 and op == "layernorm_bwd":  # dx is nothing but rounding errors
            results, expected = results[1:], expected[1:]
        assert_close(op, results, expected, str(dtype)[6:])


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [64, 4096, 8192, 32768])
@pytest.mark.parametrize("op", OPERATORS)
def test_a_row_does_not_depend_on_the_others(op: str, columns: int) -> None:
    args = call_for(op, cuda_input(1000, columns, torch.bfloat16))
    rows = [value.dim() == 2 or value.shape == (1000,) for value in args]
    all_rows = serve(op)(*args)
    for some in (slice(0, 1), slice(3, 20)):
        part = serve(op)(
            *(value[some] if cut else value for value, cut in zip(args, rows, strict=True))
        )
        assert torch.equal(part[0], all_rows[0][some])


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [64, 4096, 8192, 32768, 131072, 262144])
@pytest.mark.parametrize("op", [*OPERATORS, "rmsnorm_fwd_add", "rmsnorm_bwd_add"])
def test_the_same_call_gives_the_same_bits(op: str, columns: int) -> None:
    args = call_for(op, cuda_input(500, columns, torch.bfloat16))
    first = serve(op)(*args)
    for _ in range(3):
        again = serve(op)(*args)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPERATORS)
def test_it_runs_on_the_current_stream(op: str) -> None:
    args = call_for(op, cuda_input(64, 4096, torch.bfloat16))
    expected = serve(op)(*args)
    late = [torch.zeros_like(value) for value in args]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        # Only what is launched on this stream comes after a long wait on it.
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        for value, right in zip(late, args, strict=True):
            value.copy_(right)
        outputs = serve(op)(*late)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [320, 4096, 32768, 262144])
@pytest.mark.parametrize("op", [*OPERATORS, "rmsnorm_fwd_add", "rmsnorm_bwd_add"])
def test_it_can_be_captured_and_replayed(op: str, columns: int) -> None:
    x = cuda_input(50, columns, torch.bfloat16)
    args = [value.clone() for value in call_for(op, x)]
    normalization._forwards.clear()  # so the capture includes loading
    normalization._backwards.clear()
    _launch._kernels.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = serve(op)(*args)
    for seed in (2, 3):
        fresh = call_for(op, cuda_input(50, columns, torch.bfloat16, seed), seed)
        for value, new in zip(args, fresh, strict=True):
            value.copy_(new)
        graph.replay()
        expected = serve(op)(*fresh)
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


@pytest.mark.gpu
def test_it_works_in_a_thread_that_has_not_used_cuda() -> None:
    import threading

    args = call_for("rmsnorm_fwd", cuda_input(4, 64, torch.bfloat16))
    expected = normalization.rmsnorm_fwd(*args)
    found: list[tuple[Tensor, Tensor]] = []
    threads = [
        threading.Thread(target=lambda: found.append(normalization.rmsnorm_fwd(*args)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(output, expected[0]) for output, _ in found)


@pytest.mark.gpu
def test_parameters_and_plain_subclasses_are_served() -> None:
    class Named(Tensor):
        """A subclass that only adds a name."""

    x, gamma = call_for("rmsnorm_fwd", cuda_input(4, 64, torch.bfloat16))
    expected = normalization.rmsnorm_fwd(x, gamma)
    for value in (torch.nn.Parameter(x), x.as_subclass(Named)):
        output, rsigma = normalization.rmsnorm_fwd(value, torch.nn.Parameter(gamma))
        assert not output.requires_grad
        assert torch.equal(output, expected[0])
        assert torch.equal(rsigma, expected[1])


@pytest.mark.gpu
def test_a_parameter_on_another_device_is_named() -> None:
    x = cuda_input(4, 64, torch.float32)
    with pytest.raises(ArgumentError, match="'weight'"):
        normalization.rmsnorm_fwd(x, torch.ones(64))


@pytest.mark.gpu
def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    args = call_for("layernorm_bwd", cuda_input(40, 8192, torch.bfloat16))
    expected = normalization.layernorm_bwd(*args)
    there = [value.to("cuda:1") for value in args]
    outputs = normalization.layernorm_bwd(*there)
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(outputs, expected, strict=True))
