"""Rotary position embedding in CUDA C++: what the samples of the contracts do not cover."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from against_contract import checking
from some_tensors import normal_of_shape
from torch import Tensor
from wild_offsets import assert_nothing_outside_is_read

from transformer_engine_fl.backends.vendor.cuda import rope
from transformer_engine_fl.core.errors import ArgumentError, NotSupportedError

check = checking(rope)

LOW, FULL, DOUBLE = torch.bfloat16, torch.float32, torch.float64
tokens = partial(normal_of_shape, dtype=LOW)


def table(rows: int, rotated: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 1, 1, rotated, generator=generator).to(device) * 10


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"qkv_format": ["sbhd"]}, "qkv_format"),
        ({"interleaved": 1}, "interleaved"),
        ({"cp_size": 1.0}, "cp_size"),
        ({"cp_rank": 1}, "cp_rank"),
        ({"cu_seqlens": torch.zeros(3, dtype=torch.int32)}, "cu_seqlens"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        rope.fused_rope_forward(tokens(4, 2, 3, 8, device="cpu"), table(4, 8, "cpu"), **options)
    assert raised.value.argument == named


def test_wrong_options_are_named_after_right_ones(device: str) -> None:
    x, freqs = tokens(4, 2, 3, 8, device=device), table(4, 8, device)
    rope.fused_rope_forward(x, freqs)
    for options in ({"cp_size": True}, {"cp_size": 1.0}, {"interleaved": 0}, {"cp_rank": 0.0}):
        with pytest.raises(ArgumentError):
            rope.fused_rope_forward(x, freqs, **options)
    qkv, split = tokens(4, 2, 1, 24, device=device), (8, 8, 8)
    rope.fused_qkv_rope_forward(qkv, freqs, freqs, qkv_split=split)
    for wrong in ((8.0, 8, 8), (8, 8), None, "888"):
        with pytest.raises(ArgumentError):
            rope.fused_qkv_rope_forward(qkv, freqs, freqs, qkv_split=wrong)  # type: ignore[arg-type]


# ------------------------------------------------------------------- cosines and sines


@pytest.mark.parametrize("most", [4.0, 1e3, 2.0**21, 2.0**30, 1e38])
def test_cosines_and_sines_of_angles_of_every_size(most: float, device: str) -> None:
    """(1, 0) is rotated to (cos a, sin b) in float32, as exactly as the header promises."""
    generator = torch.Generator().manual_seed(3)
    random = torch.rand(16 * 128, generator=generator, dtype=torch.float64)
    half = random[1::2] / (torch.pi / 2) * (2**20 / most if most > 2**20 else 1)
    random[1::2] = (half * most).round() * torch.pi / 2 / most  # cos or sin near 0
    signs = torch.tensor([1.0, -1.0]).repeat(16 * 64)
    freqs = (random * most * signs).float().view(16, 1, 1, 128).to(device)
    x = torch.zeros(16, 128, device=device)
    x[:, :64] = 1
    turned = rope.fused_rope_forward(x.view(16, 1, 1, 128), freqs).double()
    exact = freqs.double()
    assert (turned[..., :64] - exact[..., :64].cos()).abs().max() <= 1e-7
    assert (turned[..., 64:] - exact[..., 64:].sin()).abs().max() <= 1e-7


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_beyond_the_largest_and_their_neighbours(interleaved: bool, device: str) -> None:
    freqs = table(6, 32, device)
    places = torch.arange(0, 6 * 32, 7, device=device)
    freqs.view(-1)[places] = torch.logspace(6.4, 30, len(places)).to(device)
    x = tokens(6, 2, 3, 32, device=device, dtype=FULL)
    check("fused_rope_forward", x, freqs, interleaved=interleaved)
    alone = rope.fused_rope_forward(x, freqs)
    freqs[2] = 1e9
    others = [0, 1, 3, 4, 5]
    assert torch.equal(alone[others], rope.fused_rope_forward(x, freqs)[others])


def test_an_angle_that_is_no_number_stays_with_its_own_feature(device: str) -> None:
    freqs = table(6, 32, device)
    freqs[2, 0, 0, 3] = torch.nan
    freqs[4, 0, 0, 5] = torch.inf
    x = tokens(6, 1, 3, 32, device=device, dtype=FULL)
    strange = rope.fused_rope_forward(x, freqs).isnan()
    expected = torch.zeros_like(strange)
    expected[2, :, :, 3] = expected[4, :, :, 5] = True
    assert torch.equal(strange, expected)


# -------------------------------------------------------------------------- the kernel


# d features, d2 of them rotated: a power of two, another number, all but two, a few of many,
# more than a block has threads; (1030, 1030) ends amid a block.
@pytest.mark.parametrize("dtype", [LOW, FULL, DOUBLE])
@pytest.mark.parametrize(
    "widths",
    [
        (128, 128),
        (96, 96),
        (80, 78),
        (192, 64),
        (500, 6),
        (1030, 1030),
        (1032, 1026),
        (4096, 4096),
    ],
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_features_of_every_width(
    widths: tuple[int, int], interleaved: bool, dtype: torch.dtype, device: str
) -> None:
    width, rotated = widths
    freqs = table(5, rotated, device)
    x = tokens(3, 5, 6, width, device=device, dtype=dtype)
    options = {"qkv_format": "bshd", "interleaved": interleaved}
    check("fused_rope_forward", x, freqs, **options)
    check("fused_rope_backward", x, freqs, **options)


# Heads of the tensors and features; tokens of a unit, and the blocks that have their heads.
@pytest.mark.parametrize(
    ("heads", "features", "unit", "blocks"),
    [
        ((32,), 128, 2, [1]),
        ((1,), 128, 16, [1]),
        ((9,), 128, 16, [3]),
        ((40,), 80, 5, [2]),
        ((20,), 96, 21, [5]),
        ((2,), 4096, 1, [1]),
        ((32, 8, 8), 128, 8, [4, 1, 1]),
        ((28, 4, 4), 128, 16, [7, 1, 1]),
        ((32, 1, 1), 128, 16, [8, 1, 1]),
    ],
)
def test_few_threads_are_left_without_heads(
    heads: tuple[int, ...], features: int, unit: int, blocks: list[int]
) -> None:
    packed = len(heads) > 1
    key = rope.Key(LOW, False, False, features, (features,) * (1 + packed), features * packed)
    shapes = rope.Shapes([(1, 1, it, features) for it in heads], None)
    assert rope._cut(key, shapes) == rope.Cut(unit, blocks)


@pytest.mark.parametrize("heads", [1, 5, 11, 64, 71, 130])
def test_any_number_of_heads(heads: int, device: str) -> None:
    freqs = table(37, 24, device)
    check("fused_rope_forward", tokens(37, 3, heads, 32, device=device), freqs)
    options = {"qkv_split": (128, 32, 48)}
    qkv = tokens(37, 1, heads, 208, device=device)
    check("fused_qkv_rope_forward", qkv, freqs, freqs[..., :8], **options)
    widths = ((4 * heads, 32), (heads, 32), (heads, 48))
    grads = [tokens(37, 1, *part, device=device) for part in widths]
    check("fused_qkv_rope_backward", *grads, freqs, freqs[..., :8], **options)


@pytest.mark.parametrize("dtype", [LOW, FULL, DOUBLE])
@pytest.mark.parametrize("skipped", [1, 2, 4])
def test_memory_that_is_aligned_to_less_than_a_vector(
    skipped: int, dtype: torch.dtype, device: str
) -> None:
    freqs = table(6, 36, device)[..., :32]
    x = tokens(6, 2, 3, 64 + skipped, device=device, dtype=dtype)[..., skipped:]
    check("fused_rope_forward", x, freqs)
    check("fused_qkv_rope_backward", x, x, x, freqs, freqs, qkv_split=(64, 64, 64))


def test_heads_of_more_rows_of_blocks_than_a_grid_has_are_declined(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rope, "MOST_PIECES", 1)
    x = tokens(1, 1, 1, 2048, device=device, dtype=FULL)
    with pytest.raises(NotSupportedError, match="pieces of a head"):
        rope.fused_rope_forward(x, table(1, 2048, device))


def test_tokens_of_no_sequence_keep_every_bit(device: str) -> None:
    x = torch.full((4, 1, 8), -0.0, device=device)
    x[2, 0, 1::2] = torch.inf
    offsets = torch.tensor([0, 2], dtype=torch.int32, device=device)
    thd: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens": offsets}
    found = rope.fused_rope_forward(x, table(4, 8, device), **thd)
    assert torch.equal(found[2:].view(torch.int32), x[2:].view(torch.int32))


@pytest.mark.parametrize("sequences", [1, 2, 3, 100, 257])
def test_any_number_of_sequences(sequences: int, device: str) -> None:
    chosen = torch.Generator().manual_seed(sequences)
    lengths = torch.randint(0, 4, (sequences,), generator=chosen)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    thd: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens": offsets.int().to(device)}
    x = tokens(int(offsets[-1]) + 2, 3, 16, device=device)
    check("fused_rope_forward", x, table(4, 16, device), **thd)


@pytest.mark.parametrize("seed", range(6))
def test_wrong_offsets_and_positions_read_nothing_outside(seed: int, device: str) -> None:
    assert_nothing_outside_is_read(rope.fused_rope_forward, seed, device)


def test_a_plan_serves_tensors_elsewhere(device: str) -> None:
    freqs = table(6, 32, device)
    for seed in range(3):
        x = torch.randn(6, 2, 3, 32, generator=torch.Generator().manual_seed(seed)).to(device)
        check("fused_rope_forward", x, freqs.clone())
        check("fused_rope_backward", x, freqs.clone())


@pytest.mark.gpu
def test_it_can_be_captured_and_replayed() -> None:
    x, freqs = tokens(64, 2, 8, 128, device="cuda"), table(64, 128, "cuda")
    qkv = tokens(64, 2, 2, 6 * 64, device="cuda")
    tables = freqs[..., :64], freqs[..., 64:]
    rope._plans.clear()  # so the capture includes loading
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = (
            rope.fused_rope_forward(x, freqs),
            *rope.fused_qkv_rope_forward(qkv, *tables, qkv_split=(256, 64, 64)),
        )
    for _ in range(2):
        x.normal_()
        qkv.normal_()
        graph.replay()
        expected = (
            rope.fused_rope_forward(x, freqs),
            *rope.fused_qkv_rope_forward(qkv, *tables, qkv_split=(256, 64, 64)),
        )
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
