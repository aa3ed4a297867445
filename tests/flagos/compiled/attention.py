"""Attention: each format, mask and option, and heads of several widths and dtypes."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from transformer_engine_fl.backends.flagos import attention as flagos
from transformer_engine_fl.core.errors import NotSupportedError

MODULES = ("_attention",)


def launch() -> None:
    def attend(
        dtype: torch.dtype, width: int, *rest: Any, v_width: int = 0, **options: Any
    ) -> None:
        thd = options.get("qkv_format") == "thd"
        shape = (512,) if thd else (2, 256)
        q = torch.empty(*shape, 8, width, dtype=dtype)
        k = torch.empty(*shape, 2, width, dtype=dtype)
        v = torch.empty(*shape, 2, v_width or width, dtype=dtype)
        with contextlib.suppress(NotSupportedError):  # where there is little shared memory
            out, lse = flagos.fused_attn_fwd(q, k, v, *rest, **options)
            flagos.fused_attn_bwd(out, q, k, v, out, lse, *rest, **options)

    # Hopper's kernels have a file of their own; the portable ones serve what those decline.
    flagos._for_hopper = lambda it: None
    bfloat16 = torch.bfloat16
    causal: dict[str, Any] = {"attn_mask_type": "causal"}
    ends = torch.tensor([0, 300, 512], dtype=torch.int32)
    packed: dict[str, Any] = {
        "qkv_format": "thd",
        "attn_mask_type": "padding_causal_bottom_right",
        "cu_seqlens_q": ends,
        "cu_seqlens_kv": ends,
        "cu_seqlens_q_padded": ends,
        "max_seqlen_q": 512,
        "max_seqlen_kv": 512,
    }
    attend(bfloat16, 128, **causal)
    attend(bfloat16, 64)
    attend(bfloat16, 192, v_width=128, **causal)
    attend(bfloat16, 80, window_size_left=100, window_size_right=7)
    attend(bfloat16, 512)
    attend(bfloat16, 128, **packed)
    bias, sink = torch.empty(1, 8, 256, 256), torch.empty(8)
    options: dict[str, Any] = {"dropout_p": 0.1, "softmax_type": "learnable"}
    attend(torch.float16, 128, bias, sink, **causal, **options)
    attend(torch.float16, 64, bias[:, :1, :1])
    attend(torch.float32, 128, bias[..., :1], **causal)
    attend(torch.float32, 256)
    attend(torch.float64, 128)
