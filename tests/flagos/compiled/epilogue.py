"""Quantised epilogues: rows cast where they are normalized, and what only leaves statistics."""

from __future__ import annotations

import torch

from transformer_engine_fl.backends.flagos import epilogue
from transformer_engine_fl.ops._formats import FORMATS

MODULES = ("epilogue",)


def _operator(name: str, *args: object, **kwargs: object) -> None:
    getattr(epilogue, name)(*args, **kwargs)


def launch() -> None:
    scale = torch.ones(1)
    for columns in (2880, 8192, 65536):  # in three parts, in one, and read twice
        x = torch.zeros(8, columns, dtype=torch.bfloat16)
        w = torch.zeros(columns, dtype=torch.bfloat16)
        _operator("rmsnorm_fwd_quantize", x, w, scale=scale)
        _operator("rmsnorm_fwd_quantize", x, w)
        _operator("layernorm_fwd_quantize", x, w, w, format="mxfp8")
        _operator("rmsnorm_fwd_add_quantize", x, x, w, format="block_1x128")
        _operator("rmsnorm_fwd_add_quantize", x, x, w, format="mxfp8", columnwise=True)
    x, w = x[:, :8192].contiguous(), w[:8192]
    _operator("rmsnorm_fwd_quantize", x.float(), w.float(), format="mxfp8")
    _operator("rmsnorm_fwd_quantize", x, w, scale=scale, format="nvfp4")
    _operator("rmsnorm_fwd_quantize", x[:, :8191], w[:8191], format="block_1x128")
    for name, form in FORMATS.items():
        given = scale if form.by_tensor else None
        _operator("swiglu_quantize", x, scale=given, format=name)
        _operator("dbias_dgelu_quantize", x, x, scale=given, format=name)
    _operator("gelu_quantize", x, columnwise=True)
    _operator("dswiglu_quantize", x[:, :4096].contiguous(), x, format="mxfp8", columnwise=True)
    _operator("clamped_dswiglu_quantize", x[:, :4096].contiguous(), x)
