"""Layouts of attention: what is regrouped, converted and appended."""

from __future__ import annotations

import torch

from transformer_engine_fl.backends.flagos import attention_layout as flagos

MODULES = ("attention_layout",)
STREAMING = {"_append", "_convert", "_regroup"}


def launch() -> None:
    lengths = torch.tensor([0, 2, 6], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        tokens = torch.zeros(6, 8, 128, dtype=dtype)
        qkv = torch.zeros(6, 2, 8, 384, dtype=dtype)
        flagos.fa_prepare_bwd(*flagos.fa_prepare_fwd(qkv).unbind())
        flagos.convert_bshd_to_thd(flagos.convert_thd_to_bshd(tokens, lengths, 4), lengths, 6)
        # Caches of contiguous heads, and caches side by side in one tensor, whose heads are apart.
        caches = torch.zeros(2, 2, 8, 8, 128, dtype=dtype)
        beside = torch.zeros(2, 8, 8, 256, dtype=dtype)
        for cache in (caches.unbind(), beside.chunk(2, -1)):
            for options in ({"page_table": lengths[:2, None]}, {"batch_indices": lengths[1:]}):
                flagos.copy_to_kv_cache(tokens, tokens, *cache, lengths, lengths, **options)
        padded = tokens.view(3, 2, 8, 128)
        flagos.copy_to_kv_cache(
            padded, padded, *caches.unbind(), lengths, lengths, qkv_format="sbhd"
        )
