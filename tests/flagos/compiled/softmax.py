"""The scaled softmax forms, and losses: several rows, one row, a row in parts and in pieces."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine_fl.backends._cross_entropy import Losses
from transformer_engine_fl.backends.flagos import softmax as flagos

MODULES = ("softmax",)
STREAMING = {"_backward_rows", "_backward_shared", "_forward_rows", "_forward_shared"}
OPERATORS = (
    "scaled_softmax",
    "scaled_masked_softmax",
    "scaled_aligned_causal_masked_softmax",
)
WIDTHS = (1024, 6144, 16384, 20480, 65536)


def single(case: dict[str, Any]) -> int:
    """Scalar accesses: two rows' target logits; in pieces also what a thread may write again."""
    if "target_ptr" not in case["tensors"]:
        return 0
    return 2 + 64 * (case["kernel"] == "_forward_shared")


def launch() -> None:
    for name in OPERATORS:
        for width in WIDTHS:
            scores = torch.zeros(3, width, dtype=torch.bfloat16)
            mask = (scores != 0,) if name == "scaled_masked_softmax" else ()
            getattr(flagos, f"{name}_forward")(scores, *mask)
            getattr(flagos, f"{name}_backward")(scores, scores)
    target, row = torch.zeros(3, dtype=torch.int64), torch.zeros(3)
    losses = Losses(target, row, row, row, -100, 0.0)
    for width in WIDTHS:
        scores = torch.zeros(3, width, dtype=torch.bfloat16)
        flagos.run_with_losses("a test's", scores, width, losses, scores)


def check(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        assert case["byte loads"] == 0, case  # masks are read by as many bytes at once as scores
