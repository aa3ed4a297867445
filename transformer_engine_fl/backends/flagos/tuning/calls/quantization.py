"""Casts to the scaling formats and back, and the byte moves around them.

Casts along rows alone, along both axes, and with column sums use different kernels; so do half-byte
formats, and casts of values that are calculated in the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transformer_engine_fl.backends.flagos.tuning.calls.activation import CALLS as ACTIVATIONS
from transformer_engine_fl.backends.flagos.tuning.calls.call import (
    Calls,
    Sample,
    Shape,
    call,
    fewer_rows,
    normal,
)
from transformer_engine_fl.ops._formats import FORMATS

__all__ = ["CALLS"]

Maker = Callable[[Shape, torch.dtype, str], Sample]

_FLOATS, _NARROW = ("bfloat16", "float32"), ("float8_e4m3fn",)
_SHAPES: tuple[Shape, ...] = ((16384, 8192),)
_MAKERS = {it.op: it.make for it in ACTIVATIONS}


def _plain(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(normal(shape, dtype, device, 1))


def _cast(base: Maker = _plain, **options: Any) -> Maker:
    return lambda *of: call(*base(*of).args, **options)


def _delayed_both_ways(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    scale = torch.full((1,), 64.0, device=device)
    return call(normal(shape, dtype, device, 1), scale, columnwise=True)


def _float8(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(normal(shape, torch.bfloat16, device, 1).to(dtype))


def _dequantize(format: str, out_dtype: torch.dtype) -> Maker:
    """The call on any codes, with scales of 1."""
    form = FORMATS[format]

    def make(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
        rows, columns = shape
        data = _float8((rows, columns // form.values_per_byte), torch.float8_e4m3fn, device).args[0]
        scales = torch.ones(form.scale_shape(rows, columns), device=device)
        scale_inv = scales.to(getattr(torch, form.scale_dtype))
        whole = torch.ones(1, device=device) if form.global_scale else None
        return call(data.view(dtype), scale_inv, whole, format=format, out_dtype=out_dtype)

    return make


def _calls(
    op: str,
    choice: str,
    make: Maker,
    shapes: tuple[Shape, ...] = _SHAPES,
    dtypes: tuple[str, ...] = _FLOATS,
) -> Calls:
    return Calls(
        op=op,
        choices=(choice,),
        make=make,
        shapes=shapes,
        axes="rows x columns" if len(shapes[0]) == 2 else "tokens x batch x columns",
        check_shape=fewer_rows,
        dtypes=dtypes,
    )


CALLS = (
    _calls("quantize", "cast_rows", _cast(format="mxfp8")),
    _calls("quantize", "cast_rows_e2m1", _cast(format="nvfp4")),
    _calls("swiglu_quantize", "cast_rows_calculated", _cast(_MAKERS["swiglu"], format="mxfp8")),
    _calls("quantize", "cast_squares", _delayed_both_ways),
    *(
        _calls("quantize", "cast_squares", _cast(format=name, columnwise=True))
        for name in ("nvfp4", "mxfp8", "block_1x128")
    ),
    *(
        _calls(
            "swiglu_quantize",
            "cast_squares_calculated",
            _cast(_MAKERS["swiglu"], format=name, columnwise=True),
        )
        for name in ("nvfp4", "mxfp8", "block_1x128")
    ),
    _calls("bgrad_quantize", "cast_strips", _cast(format="mxfp8")),
    _calls("dswiglu_quantize", "cast_strips", _cast(_MAKERS["dswiglu"], format="mxfp8")),
    _calls("compute_amax", "amax", _plain),
    *(
        _calls("dequantize", choice, _dequantize(format, out_dtype), dtypes=dtypes)
        for choice, format, dtypes in (
            ("dequantize", "mxfp8", _NARROW),
            ("dequantize_e2m1", "nvfp4", ("uint8",)),
        )
        for out_dtype in (torch.bfloat16, torch.float32)
    ),
    _calls("fp8_transpose", "fp8_transpose", _float8, dtypes=_NARROW),
    _calls("swap_first_dims", "swap_first_dims", _plain, ((4096, 4, 4096),)),
)
