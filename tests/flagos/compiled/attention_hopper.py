"""Attention on Hopper: heads of each width, with a mask and without."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine_fl.backends.flagos.attention import fused_attn_bwd, fused_attn_fwd

MODULES = ("_attention_hopper",)
TARGETS = ("sm_90",)


def launch() -> None:
    for dtype, width, mask in (
        (torch.bfloat16, 128, "causal"),
        (torch.float16, 128, "no_mask"),
        (torch.bfloat16, 64, "causal_bottom_right"),
    ):
        q = torch.empty(2, 256, 8, width, dtype=dtype)
        k = torch.empty(2, 256, 2, width, dtype=dtype)
        out, lse = fused_attn_fwd(q, k, k, attn_mask_type=mask)
        fused_attn_bwd(out, q, k, k, out, lse, attn_mask_type=mask)


def check(cases: list[dict[str, Any]]) -> None:
    """Whole warpgroups multiply (wgmma)."""
    for case in cases:
        assert case["products"] > 0, case
