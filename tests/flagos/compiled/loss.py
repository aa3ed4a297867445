"""Cross entropy: several rows in a tile, one row in chunks, and a row at any alignment."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine_fl.backends._cross_entropy import Options, Rows
from transformer_engine_fl.backends.flagos import loss as flagos

MODULES = ("loss",)
WIDTHS = (96, 32000, 50257)


def launch() -> None:
    # The kernel for Hopper is in loss_hopper.
    flagos._for_hopper = lambda *_: None
    target, row = torch.zeros(3, dtype=torch.int64), torch.zeros(3)
    for width in WIDTHS:
        logits = torch.zeros(3, width, dtype=torch.bfloat16)
        for options in ({}, {"softcap": 30.0, "label_smoothing": 0.1}):
            flagos.cross_entropy_fwd(logits, target, **options)
            flagos.cross_entropy_bwd(row, logits, target, row, row, **options)
    flagos.cross_entropy_partial_fwd(logits.float(), target)
    flagos.cross_entropy_bwd(row.double(), logits.double(), target, row.double())
    flagos.cross_entropy_merge(torch.zeros(2, 3, 4), target, vocab_size=8, label_smoothing=0.1)
    for dtype in (torch.bfloat16, torch.float16):
        input, weight = torch.zeros(3, 16, dtype=dtype), torch.zeros(5001, 16, dtype=dtype)
        bias = torch.zeros(5001, dtype=dtype)
        flagos.fused_linear_cross_entropy_fwd(input, weight, target, bias)
        flagos.fused_linear_cross_entropy_bwd(row, input, weight, target, row, bias)
        flagos.fused_linear_cross_entropy_fwd_bwd(input, weight, target, row, bias)
    for rows in (Rows(target, row, row, None), Rows(target, row, row, row, row[0])):
        flagos._factors_of_rows("a test's", rows, 5001, Options(0.1, -100, 0.01, None))


def check(cases: list[dict[str, Any]]) -> None:
    loss = [case for case in cases if case["vector"] == 8]
    assert {case["kernel"] for case in loss} == {"_forward", "_backward"}
    for case in loss:
        assert case["wide loads"] >= 2, case
        assert case["wide stores"] >= (case["kernel"] == "_backward"), case
