"""Quantisation in Triton: what the samples of the contract do not cover."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from transformer_engine_fl.backends.flagos import _casting
from transformer_engine_fl.backends.flagos import quantization as flagos
from transformer_engine_fl.backends.flagos._tiles import Block
from transformer_engine_fl.backends.reference import quantization as reference


def in_bytes(outputs: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    return [None if it is None else it.view(torch.uint8).cpu() for it in outputs]


def differing(x: Tensor, **options: object) -> list[int]:
    """The outputs that are not those of the reference, bit by bit."""
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
    ("dtype", "tile"), [(torch.float8_e4m3fn, (128, 64)), (torch.float8_e5m2, (64, 128))]
)
def test_scales_that_tiles_leave_aside(
    dtype: torch.dtype, tile: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    ordinary = _casting._run_aside
    monkeypatch.setattr(_casting, "_ASIDE_FROM", 1)
    monkeypatch.setattr(_casting, "_SQUARES", lambda *kind: Block(128, *tile))
    monkeypatch.setattr(_casting, "_run_aside", lambda *given: called.append(1) or ordinary(*given))
    monkeypatch.setattr(_casting, "_ORDER", Block(128, 16, 64))
    monkeypatch.setattr(_casting, "_PLANS", {})
    shapes = ((384, 256), (128, 640), (640, 128))  # the scales in several tiles
    for rows, columns in shapes:
        x = (torch.randn(rows, columns + 8) * 8).to(device, torch.bfloat16)[:, :columns]
        x[rows - 1, columns - 1] = torch.nan
        x[127, 17] = -1000.0
        assert differing(x, format="mxfp8", dtype=dtype) == []
    assert len(called) == len(shapes)
    assert differing(x[:, :96], format="mxfp8", dtype=dtype) == []  # in no whole tiles
    assert len(called) == len(shapes)
