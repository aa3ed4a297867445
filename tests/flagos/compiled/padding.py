"""Padding: rows of whole vectors, of 2-byte and of 1-byte elements."""

from __future__ import annotations

import torch

from transformer_engine_fl.backends.flagos import padding as flagos

MODULES = ("padding",)
STREAMING = {"_move_blocks"}


def launch() -> None:
    blocks = {"row_list": [3, 5], "padded_row_list": [4, 8]}
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for columns in (128, 4096):
            rows = torch.zeros(8, columns, dtype=dtype)
            padded = flagos.fused_multi_row_padding(rows, **blocks)
            flagos.fused_multi_row_unpadding(padded, **blocks)
