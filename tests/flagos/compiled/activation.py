"""Activations: one operator for each path through the kernels that many operators share."""

from __future__ import annotations

import torch

from transformer_engine_fl import ops
from transformer_engine_fl.backends.flagos import activation as flagos

MODULES = ("activation",)
STREAMING = {"_elementwise", "_with_bias"}
OPERATORS = (
    "gelu", "qgelu", "srelu", "swiglu", "glu", "clamped_swiglu",
    "dgelu", "dreglu", "dswiglu", "dglu", "clamped_dswiglu", "dbias_dgelu", "dbias_dsrelu",
)  # fmt: skip


def launch() -> None:
    for name in OPERATORS:
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.zeros(3, 8192, dtype=dtype)
            if ops.CATALOGUE[name].backward is not None:
                getattr(flagos, name)(x)
            else:
                half = x[:, :4096].contiguous()
                getattr(flagos, name)(half if "glu" in name else x, x)
