"""Norms of rows, with a residual and without, and their gradients."""

from __future__ import annotations

import torch

from transformer_engine_fl.backends.flagos.tuning.calls.call import (
    Calls,
    Sample,
    Shape,
    call,
    fewer_rows,
    normal,
)
from transformer_engine_fl.ops._dtypes import math_dtype

__all__ = ["CALLS", "ODD_WIDTHS", "WIDTHS"]

# Each power of two has its kernel, and so have its quarter steps; 32 to 128 MiB in bfloat16.
WIDTHS: tuple[Shape, ...] = (
    (32768, 1024),
    (16384, 2048),
    (8192, 4096),
    (13107, 5120),
    (8192, 8192),
    (5461, 12288),
    (4096, 16384),
    (3276, 20480),
    (2048, 32768),
    (1024, 65536),
    (512, 131072),
)
ODD_WIDTHS: tuple[Shape, ...] = (
    (8190, 4097),
    (2580, 13001),
    (2048, 16383),
    (1398, 24001),
    (667, 50257),
    (256, 131073),
)


def _weight(shape: Shape, dtype: torch.dtype, device: str) -> torch.Tensor:
    return normal(shape[1:], dtype, device, 3)


def _rms(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(normal(shape, dtype, device, 1), _weight(shape, dtype, device))


def _residual(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    x, residual = (normal(shape, dtype, device, seed) for seed in (1, 2))
    return call(x, residual, _weight(shape, dtype, device))


def _layer(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(*_rms(shape, dtype, device).args, normal(shape[1:], dtype, device, 4))


_EPS = 1e-5


def _rms_backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    dy, x = (normal(shape, dtype, device, seed) for seed in (1, 2))
    rsigma = torch.rsqrt(x.to(math_dtype(dtype)).square().mean(-1) + _EPS)
    return call(dy, x, rsigma, _weight(shape, dtype, device))


def _residual_backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    dy, x, rsigma, gamma = _rms_backward(shape, dtype, device).args
    return call(dy, x, normal(shape, dtype, device, 5), rsigma, gamma)


def _layer_backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    dy, x, _, gamma = _rms_backward(shape, dtype, device).args
    variance, mu = torch.var_mean(x.to(math_dtype(dtype)), -1, correction=0)
    return call(dy, x, mu, torch.rsqrt(variance + _EPS), gamma)


CALLS = tuple(
    Calls(
        op=op,
        choices=(op,),
        make=make,
        shapes=WIDTHS,
        odd_shapes=ODD_WIDTHS,
        axes="rows x columns",
        check_shape=fewer_rows,
    )
    for op, make in (
        ("rmsnorm_fwd", _rms),
        ("rmsnorm_fwd_add", _residual),
        ("layernorm_fwd", _layer),
        ("rmsnorm_bwd", _rms_backward),
        ("rmsnorm_bwd_add", _residual_backward),
        ("layernorm_bwd", _layer_backward),
    )
)
