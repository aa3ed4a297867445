"""Norms and activations with a quantised output, on the inputs of the plain operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transformer_engine_fl.ops.epilogue import EPILOGUES
from workloads import activation, normalization
from workloads.workload import Sample, Shape, Workload, call, fewer_rows

_BASES = {it.name: it for it in (*normalization.WORKLOADS, *activation.WORKLOADS)}

_STANDARD = {
    ("rmsnorm_fwd_quantize", "delayed scaling"),
    ("rmsnorm_fwd_quantize", "mxfp8"),
    ("rmsnorm_fwd_add_quantize", "mxfp8"),
    ("layernorm_fwd_quantize", "delayed scaling"),
    ("layernorm_fwd_quantize", "mxfp8"),
    ("swiglu_quantize", "delayed scaling"),
    ("swiglu_quantize", "mxfp8"),
    ("dbias_dgelu_quantize", "delayed scaling"),
}
# 7168 is the hidden size of DeepSeek-V3, a model that was trained in float8.
_NORM_SHAPES: tuple[Shape, ...] = ((16384, 8192), (16384, 7168))


def _options(form: str, device: str) -> dict[str, Any]:
    if form == "mxfp8":
        return {"format": "mxfp8"}
    return {"scale": torch.tensor([64.0], device=device)}


def _quantizing(
    base: Callable[[Shape, torch.dtype, str], Sample], form: str
) -> Callable[[Shape, torch.dtype, str], Sample]:
    def make(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
        return call(*base(shape, dtype, device).args, **_options(form, device))

    return make


WORKLOADS = tuple(
    Workload(
        name=f"{op} {form}",
        ops=(op,),
        make=_quantizing(_BASES[epilogue.base.name].make, form),
        shapes=_NORM_SHAPES
        if epilogue.base.family == "normalization"
        else _BASES[epilogue.base.name].shapes[-1:],
        tiny=(32, 64),
        axes=_BASES[epilogue.base.name].axes,
        standard=(op, form) in _STANDARD,
        check_shape=fewer_rows(1024),
    )
    for op, epilogue in EPILOGUES.items()
    for form in ("delayed scaling", "mxfp8")
)
