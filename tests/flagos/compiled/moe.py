"""Tokens to experts and back: both maps, narrow rows, and rows wider than a tile."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine_fl.backends.flagos import moe as flagos

MODULES = ("moe", "_row_maps")
STREAMING = {"_spread", "_collect", "_spread_weighted"}
PLAIN = {"_spread"}
WIDTHS = {"bfloat16": (128, 4096, 16384), "float64": (4096,)}


def launch() -> None:
    chosen = torch.zeros(6, 2, dtype=torch.int32)
    for name, widths in WIDTHS.items():
        for width in widths:
            x = torch.zeros(6, width, dtype=getattr(torch, name))
            rows, by_index = flagos.moe_permute_fwd(x, chosen)
            flagos.moe_permute_fwd(x, chosen.long())
            probs = torch.zeros(6, 2)
            dy = flagos.moe_unpermute_fwd(rows, by_index, probs)
            flagos.moe_unpermute_bwd(dy, by_index, rows, probs, num_rows=12)
            flagos.moe_unpermute_bwd(dy, by_index, num_rows=12)
            flagos.moe_permute_bwd(rows, by_index)
            routed, probs = torch.zeros(6, 64, dtype=torch.bool), torch.zeros(6, 64)
            for weights in (probs, None):
                rows, moved, by_mask = flagos.moe_permute_mask_fwd(
                    x, routed, weights, num_out_tokens=12
                )
                flagos.moe_permute_mask_bwd(rows, by_mask, moved)
                flagos.moe_unpermute_mask_fwd(rows, by_mask, weights)
            flagos.moe_unpermute_mask_bwd(dy, by_mask, rows, probs, num_rows=12)
    for tokens in (20_000, 70_000):  # more tiles than a program sums up, or than programs
        x = torch.zeros(tokens, 8)
        flagos.moe_permute_fwd(x, torch.zeros(tokens, 2, dtype=torch.int32))
        routed = torch.zeros(tokens, 64, dtype=torch.bool)
        flagos.moe_permute_mask_fwd(x, routed, num_out_tokens=12)
        flagos.moe_permute_mask_fwd(x, routed[:, ::2], num_out_tokens=12)


def check(cases: list[dict[str, Any]]) -> None:
    """Every kernel of an operator but the first waits for the preceding one, once."""
    first = {"_count_indices", "_count_mask"}
    last = {"_place_indices", "_place_mask", "_add_up"}
    for case in cases:
        if case["kernel"] in first | last:
            assert case["waits"] == (case["kernel"] in last), case
    assert {case["waits"] for case in cases if case["kernel"] == "_spread"} == {0, 1}
