"""Triton's rotary embedding: its cosines and sines, and each path through its kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from against_contract import checking
from torch import Tensor
from wild_offsets import assert_nothing_outside_is_read

from transformer_engine_fl.backends.flagos import rope as flagos

check = checking(flagos)

LARGEST = flagos._LARGEST_ANGLE.value


def tokens(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(device, dtype)


def table(rows: int, rotated: int, device: str) -> Tensor:
    return torch.randn(rows, 1, 1, rotated).to(device) * 10


# ------------------------------------------------------------------- cosines and sines


def angles(kind: str) -> Tensor:
    """32768 float32 angles."""
    count = 32768
    random = torch.rand(count, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    whole = torch.arange(count, dtype=torch.float64)
    found = {
        "around 0": (random - 0.5) * 4,
        "tiny": torch.pi * 2.0 ** (-1 - 120 * random),
        "positions": whole * 4,
        "slow": whole / 7,
        "large": (random - 0.5) * 2 * LARGEST,
        "the largest": LARGEST - whole / 8,
        "quarter turns": (whole * 40 + 1) * torch.pi / 2,
        "eighths of a turn": -(whole * 40 + 0.5) * torch.pi / 2,
    }[kind]
    return found.float()


@pytest.mark.parametrize(
    "kind",
    ["around 0", "tiny", "positions", "slow", "large", "the largest", "quarter turns",
     "eighths of a turn"],
)  # fmt: skip
def test_cosines_and_sines(kind: str, device: str) -> None:
    """(1, 0) is rotated to (cos a, sin b) in float32, as exactly as the kernel promises."""
    freqs = angles(kind).view(256, 1, 1, 128).to(device)
    x = torch.zeros(256, 1, 1, 128, device=device)
    x[..., :64] = 1
    turned = flagos.fused_rope_forward(x, freqs).double()
    exact = freqs.double()
    error = (turned[..., :64] - exact[..., :64].cos()).abs().max()
    error = error.maximum((turned[..., 64:] - exact[..., 64:].sin()).abs().max())
    assert error <= 1e-7


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_beyond_the_largest_and_their_neighbours(interleaved: bool, device: str) -> None:
    freqs = table(6, 32, device)
    places = torch.arange(0, 6 * 32, 7, device=device)
    freqs.view(-1)[places] = torch.logspace(6.4, 30, len(places)).to(device)
    x = tokens(6, 2, 3, 32, device=device, dtype=torch.float32)
    check("fused_rope_forward", x, freqs, interleaved=interleaved)


def test_an_angle_beyond_the_largest_changes_no_bit_of_another_token(device: str) -> None:
    freqs = table(6, 32, device)
    x = tokens(6, 1, 3, 32, device=device, dtype=torch.float32)
    alone = flagos.fused_rope_forward(x, freqs)
    freqs[2] = 1e9
    beside = flagos.fused_rope_forward(x, freqs)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(alone[others], beside[others])


def test_an_angle_that_is_no_number_stays_with_its_own_feature(device: str) -> None:
    freqs = table(6, 32, device)
    freqs[2, 0, 0, 3] = torch.nan
    freqs[4, 0, 0, 5] = torch.inf
    x = tokens(6, 1, 3, 32, device=device, dtype=torch.float32)
    strange = flagos.fused_rope_forward(x, freqs).isnan()
    expected = torch.zeros_like(strange)
    expected[2, :, :, 3] = expected[4, :, :, 5] = True
    assert torch.equal(strange, expected)


# -------------------------------------------------------------------------- the kernel


@pytest.mark.parametrize("cut", [(32, 512, 1), (64, 2048, 4), (64, 4096, 64), (128, 16384, 8)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_tokens_and_heads_divided_in_any_way(
    cut: tuple[int, int, int], interleaved: bool, device: str
) -> None:
    freqs, options = table(40, 24, device), {"interleaved": interleaved}
    with flagos._CUT.trial(flagos._Cut(*cut)):
        x = tokens(40, 1, 11, 32, device=device)
        check("fused_rope_forward", x, freqs, **options)
        options["qkv_split"] = (128, 32, 48)
        for groups in (1, 3):
            qkv = tokens(40, 1, groups, 4 * 32 + 32 + 48, device=device)
            check("fused_qkv_rope_forward", qkv, freqs, freqs[..., :8], **options)
            shapes = (4 * groups, 32), (groups, 32), (groups, 48)
            grads = [tokens(40, 1, *it, device=device) for it in shapes]
            check("fused_qkv_rope_backward", *grads, freqs, freqs[..., :8], **options)


# Heads of the tensors, features, whether pairs are neighbours, dtype; threads, and TOKENS and HEADS
# for each tensor: what was fastest on an H200 (docs/measured/flagos.md).
@pytest.mark.parametrize(
    ("heads", "features", "interleaved", "dtype", "threads", "sizes"),
    [
        ((32,), 128, False, torch.bfloat16, 32, [(1, 8)]),
        ((28,), 128, False, torch.bfloat16, 32, [(1, 8)]),
        ((32,), 128, True, torch.bfloat16, 64, [(1, 16)]),
        ((32,), 64, False, torch.bfloat16, 32, [(1, 16)]),
        ((32,), 256, False, torch.bfloat16, 64, [(1, 8)]),
        ((8,), 512, False, torch.bfloat16, 128, [(1, 8)]),
        ((2,), 4096, False, torch.bfloat16, 128, [(1, 1)]),
        ((16,), 128, False, torch.float32, 32, [(1, 4)]),
        ((16,), 64, False, torch.float32, 32, [(2, 4)]),
        ((4,), 128, False, torch.bfloat16, 32, [(1, 4)]),
        ((3,), 128, False, torch.bfloat16, 32, [(1, 4)]),
        ((2,), 128, False, torch.bfloat16, 32, [(2, 2)]),
        ((1,), 128, False, torch.bfloat16, 32, [(4, 1)]),
        ((32, 8, 8), 128, False, torch.bfloat16, 32, [(1, 8), (1, 8), (1, 8)]),
        ((28, 4, 4), 128, False, torch.bfloat16, 32, [(1, 8), (1, 4), (2, 4)]),
        ((32, 1, 1), 128, False, torch.bfloat16, 32, [(1, 8), (2, 1), (8, 1)]),
        ((2, 2, 2), 128, False, torch.bfloat16, 32, [(2, 2), (2, 2), (4, 2)]),
    ],
)
def test_how_the_rule_divides_tokens_and_heads(
    heads: tuple[int, ...],
    features: int,
    interleaved: bool,
    dtype: torch.dtype,
    threads: int,
    sizes: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(flagos, "_PLANS", {})
    monkeypatch.setattr(flagos._launch, "Launch", lambda *_, **options: made.update(options))
    freqs = torch.empty(1, features, device="meta")
    of_heads = [torch.empty(1, 1, it, 1, features, dtype=dtype, device="meta") for it in heads]
    tables = (freqs, freqs, None)
    parts = [flagos._Part(x, x, it) for x, it in zip(of_heads, tables, strict=False)]
    places = flagos._Places(None, "sbhd", None, interleaved, 1, 0, False)
    constants = tuple([it.constants() for it in parts])
    flagos._plan_of(torch.empty(0, dtype=dtype), heads, constants, places, (8, 4))
    assert made["threads"] == threads
    assert [(made[f"{it}_TOKENS"], made[f"{it}_HEADS"]) for it in "QKV"[: len(heads)]] == sizes


# d features, d2 of them rotated: a power of two, another number, all but two, a few of many.
@pytest.mark.parametrize("widths", [(128, 128), (96, 96), (80, 78), (192, 64), (500, 6)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_features_of_every_width(widths: tuple[int, int], interleaved: bool, device: str) -> None:
    width, rotated = widths
    freqs = table(5, rotated, device)
    x = tokens(3, 5, 6, width, device=device)
    options = {"qkv_format": "bshd", "interleaved": interleaved}
    check("fused_rope_forward", x, freqs, **options)
    check("fused_rope_backward", x, freqs, **options)


@pytest.mark.parametrize("seed", range(6))
def test_wrong_offsets_and_positions_read_nothing_outside(seed: int, device: str) -> None:
    assert_nothing_outside_is_read(flagos.fused_rope_forward, seed, device)
