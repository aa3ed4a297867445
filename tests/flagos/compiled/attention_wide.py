"""Attention with heads so wide that few tiles fit, on a GPU with little shared memory."""

from __future__ import annotations

import contextlib

import torch

from transformer_engine_fl.backends.flagos import attention as flagos
from transformer_engine_fl.core.errors import NotSupportedError

MODULES = ("_attention",)
TARGETS = ("sm_120",)


def launch() -> None:
    def attend(dtype: torch.dtype, width: int, v_width: int, *bias: torch.Tensor) -> None:
        q = torch.empty(2, 256, 8, width, dtype=dtype)
        k = torch.empty(2, 256, 2, width, dtype=dtype)
        v = torch.empty(2, 256, 2, v_width, dtype=dtype)
        with contextlib.suppress(NotSupportedError):
            out, lse = flagos.fused_attn_fwd(q, k, v, *bias)
            flagos.fused_attn_bwd(out, q, k, v, out, lse, *bias)

    for widths in ((512, 512), (512, 64), (64, 512)):
        attend(torch.bfloat16, *widths)
    attend(torch.bfloat16, 256, 256, torch.empty(1, 8, 256, 256))
    attend(torch.float32, 256, 256)
    attend(torch.float32, 64, 512)
