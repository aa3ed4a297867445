"""Rotary embeddings: each layout, each way to pair, and parts of one tensor."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine_fl.backends.flagos import rope as flagos

MODULES = ("rope",)


def launch() -> None:
    freqs = torch.zeros(6, 1, 1, 128)
    lengths = torch.tensor([0, 2, 6], dtype=torch.int32)
    x = torch.zeros(6, 2, 8, 128, dtype=torch.bfloat16)
    flagos.fused_rope_forward(x, freqs, start_positions=lengths[1:])
    flagos.fused_rope_backward(x, freqs[..., :64], interleaved=True)
    flagos.fused_rope_forward(x[:, 0], freqs, qkv_format="thd", cu_seqlens=lengths)
    flagos.fused_rope_forward(x.double(), freqs)
    split = (512, 128, 128)
    qkv = torch.zeros(6, 2, 4, sum(split), dtype=torch.bfloat16)
    parts = flagos.fused_qkv_rope_forward(qkv, freqs, freqs, qkv_split=split)
    flagos.fused_qkv_rope_forward(qkv[:, :, :1], freqs, freqs, qkv_split=split)
    flagos.fused_qkv_rope_backward(
        *parts, freqs, freqs[..., :64], qkv_split=split, interleaved=True
    )


def check(cases: list[dict[str, Any]]) -> None:
    """Tokens of 2 bytes a feature are read and written 16 bytes at a time."""
    for case in cases:
        if case["dtype"] == "bf16":
            assert case["wide loads"] >= 2, case
            assert case["wide stores"] >= 2, case
            assert case["narrow accesses"] == 0, case
