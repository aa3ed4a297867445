"""Dropout: rows of whole bytes of mask, and rows that end within a byte."""

from __future__ import annotations

import torch

from transformer_engine_fl.backends.flagos import dropout as flagos

MODULES = ("dropout",)


def launch() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        for width in (4096, 4097):
            x = torch.zeros(3, width, dtype=dtype)
            _, mask = flagos.dropout_fwd(x, 0.1, seed=1)
            flagos.dropout_bwd(x, mask, 0.1)
