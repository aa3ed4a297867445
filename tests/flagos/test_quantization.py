"""Quantisation in Triton: what the samples of the contract do not cover."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_engine_fl.backends.flagos import _casting
from transformer_engine_fl.backends.flagos import quantization as flagos
from transformer_engine_fl.backends.flagos._launch import has_ptx
from transformer_engine_fl.backends.flagos._narrow import quotient_of
from transformer_engine_fl.backends.flagos._tiles import Block
from transformer_engine_fl.backends.reference import quantization as reference


def in_bytes(outputs: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    return [None if it is None else it.view(torch.uint8).cpu() for it in outputs]


def differing(x: Tensor, **options: object) -> list[int]:
    """The places of the outputs that differ from the reference's in any bit."""
    pairs = zip(
        in_bytes(flagos.quantize(x, columnwise=True, **options)),
        in_bytes(reference.quantize(x, columnwise=True, **options)),
        strict=True,
    )
    return [
        place
        for place, (found, expected) in enumerate(pairs)
        if (found is not None or expected is not None) and not torch.equal(found, expected)
    ]


@pytest.mark.parametrize(
    ("form", "dtype", "tile"),
    [
        ("mxfp8", torch.float8_e4m3fn, (128, 64)),
        ("mxfp8", torch.float8_e5m2, (64, 128)),
        ("block_1x128", torch.float8_e4m3fn, (128, 128)),
        ("block_1x128", torch.float8_e5m2, (128, 256)),
    ],
)
def test_scales_that_tiles_stage(
    form: str,
    dtype: torch.dtype,
    tile: tuple[int, int],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = []
    ordinary = _casting._run_staged
    monkeypatch.setattr(_casting, "_STAGED_FROM", {32: 1, 128: 1})
    monkeypatch.setattr(_casting, "_SQUARES", lambda *kind: Block(128, *tile))
    monkeypatch.setattr(
        _casting, "_run_staged", lambda *given: called.append(1) or ordinary(*given)
    )
    monkeypatch.setattr(_casting, "_ORDER", Block(128, 16, 64))
    monkeypatch.setattr(_casting, "_PLANS", {})
    shapes = ((384, 256), (128, 768), (640, 256), (128, 640), (640, 128))  # several tiles of scales
    shapes = tuple(it for it in shapes if it[1] % tile[1] == 0)
    for rows, columns in shapes:
        x = (torch.randn(rows, columns + 8) * 8).to(device, torch.bfloat16)[:, :columns]
        x[rows - 1, columns - 1] = torch.nan
        x[127, 17] = -1000.0
        for part in (x[8:16], x[:, :16]):
            part *= 2.0**-130  # below the scales of float32
        x[5] = 0.0
        x[6, columns // 2 :] = torch.inf
        assert differing(x, format=form, dtype=dtype) == []
    several = (
        ({"amax_epsilon": 0.5}, {"force_pow_2_scales": True}) if form == "block_1x128" else ({},)
    )
    for given in (x.float(), x.half()):
        for options in several:
            assert differing(given, format=form, dtype=dtype, **options) == []
            called.pop()
    assert len(called) == len(shapes)
    assert differing(x[:, :96], format=form, dtype=dtype) == []  # partial tiles
    assert len(called) == len(shapes)


@triton.jit
def _divide(amax_ptr: tl.tensor, out_ptr: tl.tensor, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + place, quotient_of(LARGEST, tl.load(amax_ptr + place), True))


@pytest.mark.gpu
@pytest.mark.skipif(not has_ptx(), reason="written in PTX")
@pytest.mark.parametrize("largest", [448.0, 57344.0])
def test_quotients_without_a_branch_round_once(largest: float) -> None:
    every = torch.arange(1 << 23, dtype=torch.int32, device="cuda")  # mantissas
    some = every[:: (1 << 23) // (1 << 15)]
    bits = [every | 127 << 23, every]
    bits += [some | exponent << 23 for exponent in range(1, 255)]
    amax = torch.cat(bits).view(torch.float32)
    amax = torch.nn.functional.pad(amax, (0, -amax.numel() % 1024), value=1.0)
    found = torch.empty_like(amax)
    _divide[(amax.numel() // 1024,)](amax, found, largest, 1024)
    expected = (largest / amax.double()).float().clamp(max=torch.finfo(torch.float32).max)
    assert found.equal(expected)
