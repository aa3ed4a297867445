"""Quantised epilogues: rows cast by the norm's kernel, and kernels that only leave statistics."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine_fl.backends.flagos import epilogue
from transformer_engine_fl.ops._formats import FORMATS

MODULES = ("epilogue",)


def _operator(name: str, *args: object, **kwargs: object) -> None:
    getattr(epilogue, name)(*args, **kwargs)


def launch() -> None:
    scale = torch.ones(1)
    for columns in (2880, 8192, 65536):  # in three parts, in one part, and read twice
        x = torch.zeros(8, columns, dtype=torch.bfloat16)
        w = torch.zeros(columns, dtype=torch.bfloat16)
        _operator("rmsnorm_fwd_quantize", x, w, scale=scale)
        _operator("rmsnorm_fwd_quantize", x, w)
        _operator("layernorm_fwd_quantize", x, w, w, format="mxfp8")
        _operator("rmsnorm_fwd_add_quantize", x, x, w, format="block_1x128")
        _operator("rmsnorm_fwd_add_quantize", x, x, w, format="mxfp8", columnwise=True)
    # As many pipeline stages as fit into shared memory.
    _operator("rmsnorm_fwd_quantize", x[:, :20480].contiguous(), w[:20480], format="mxfp8")
    wide = x[:, :16384].float()
    _operator("rmsnorm_fwd_add_quantize", wide, wide, w[:16384].float(), format="mxfp8")
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


def check(cases: list[dict[str, Any]]) -> None:
    """Parts of a row are summed and cast in their layout: only sums and scales change threads."""
    looped = f"({epilogue._norm_rows.arg_names.index('LOOPED')},): True"
    parts = [
        case
        for case in cases
        if case["kernel"] == "_norm_rows"
        and "(1024, 1024, 1024)" in case["constants"]
        and looped not in case["constants"]
        and "residual_ptr" not in case["tensors"]  # its sum is stored by accesses of its own
    ]
    assert len(parts) == 2  # with one scale, and mxfp8 with centring
    for case in parts:
        assert case["shared"] < 256, case
