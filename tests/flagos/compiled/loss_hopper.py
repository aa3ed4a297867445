"""Cross entropy of a linear layer on Hopper: both directions, with a bias and without."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine_fl.backends.flagos import loss as flagos

MODULES = ("_loss_hopper",)
TARGETS = ("sm_90",)


def launch() -> None:
    target, row = torch.zeros(128, dtype=torch.int64), torch.zeros(128)
    for words in (8192, 8193):
        input = torch.zeros(128, 1024, dtype=torch.bfloat16)
        weight = torch.zeros(words, 1024, dtype=torch.bfloat16)
        for bias in (None, torch.zeros(words, dtype=torch.bfloat16)):
            flagos.fused_linear_cross_entropy_fwd(input, weight, target, bias)
            flagos.fused_linear_cross_entropy_bwd(row, input, weight, target, row, bias)


def check(cases: list[dict[str, Any]]) -> None:
    products = [case for case in cases if case["kernel"] == "_linear_logits"]
    assert products
    for case in products:
        assert case["products"] > 0, case
    # The gradients for a vocabulary of whole vectors, with a bias and without.
    assert sum(case["wide stores"] > 0 for case in products) == 2
