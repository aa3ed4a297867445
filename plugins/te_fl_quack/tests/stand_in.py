"""A stand-in for quack 0.6.5: its signatures in plain torch, as strict as its kernels.

It tests how arguments are passed and results returned; quack's own kernels are tested only on a
GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NARROW = (torch.float16, torch.bfloat16, torch.float32)


def _check(*tensors: Tensor | None, dims: int = 2) -> None:
    for tensor in tensors:
        if tensor is None:
            continue
        assert tensor.dim() == dims
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0
        assert not tensor.requires_grad
        assert tensor.dtype in NARROW
        assert tensor.numel()


def _copied(*tensors: Tensor | None) -> None:
    """Asynchronous copies to shared memory move at least 4 bytes."""
    for tensor in tensors:
        assert tensor is None or tensor.shape[-1] * tensor.element_size() % 4 == 0


def _in_wide_accesses(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.shape[-1] * tensor.element_size() % 16 == 0


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    eps: float = 1e-6,
    store_rstd: bool = False,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    _check(x, residual)
    _copied(x, residual)
    _check(weight, dims=1)
    assert weight is not None
    assert bias is residual_dtype is None
    total = x.float() if residual is None else x.float() + residual.float()
    rstd = torch.rsqrt(total.square().mean(-1) + eps)
    out = total * rstd[:, None] * (weight.float() + weight_offset)
    added = x if residual is None else total.to(residual.dtype)
    return out.to(out_dtype or x.dtype), added, rstd if store_rstd else None


def rmsnorm_bwd(
    x: Tensor,
    weight: Tensor | None,
    dout: Tensor,
    rstd: Tensor,
    dresidual_out: Tensor | None = None,
    has_bias: bool = False,
    has_residual: bool = False,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    _check(x, dout, dresidual_out)
    _copied(x, dout)
    assert x.element_size() < 4 or x.shape[-1] <= 128 * 1024
    _check(weight, rstd, dims=1)
    assert weight is not None
    assert rstd.dtype is torch.float32
    assert dresidual_out is None or dresidual_out.dtype is x.dtype
    assert not has_bias
    assert not has_residual
    x_hat, scaled = x.float() * rstd[:, None], dout.float() * (weight.float() + weight_offset)
    dx = (scaled - x_hat * (x_hat * scaled).mean(-1, keepdim=True)) * rstd[:, None]
    dx = dx if dresidual_out is None else dx + dresidual_out.float()
    return dx.to(x.dtype), (dout.float() * x_hat).sum(0).to(weight.dtype), None, None


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    return_rstd: bool = False,
    return_mean: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x)
    _copied(x)
    _check(weight, bias, dims=1)
    assert weight.dtype is torch.float32
    assert bias is None or bias.dtype is torch.float32
    assert return_rstd
    assert return_mean
    variance, mean = torch.var_mean(x.float(), -1, correction=0)
    rstd = torch.rsqrt(variance + eps)
    out = (x.float() - mean[:, None]) * rstd[:, None] * weight
    return (out if bias is None else out + bias).to(x.dtype), rstd, mean


def layernorm_bwd(
    x: Tensor, weight: Tensor, dout: Tensor, rstd: Tensor, mean: Tensor, has_bias: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    _check(x, dout)
    _copied(x, dout)
    assert x.element_size() < 4 or x.shape[-1] <= 128 * 1024
    _check(weight, rstd, mean, dims=1)
    assert has_bias
    x_hat, scaled = (x.float() - mean[:, None]) * rstd[:, None], dout.float() * weight.float()
    inner = scaled - scaled.mean(-1, keepdim=True)
    dx = (inner - x_hat * (x_hat * scaled).mean(-1, keepdim=True)) * rstd[:, None]
    dw, db = (dout.float() * x_hat).sum(0), dout.float().sum(0)
    return dx.to(x.dtype), dw.to(weight.dtype), db.to(weight.dtype)


def softmax_fwd(x: Tensor) -> Tensor:
    _check(x)
    _in_wide_accesses(x)
    return x.float().softmax(-1).to(x.dtype)


def softmax_bwd(dy: Tensor, y: Tensor) -> Tensor:
    _check(dy, y)
    _in_wide_accesses(dy, y)
    assert y.dtype == dy.dtype
    product = dy.float() * y.float()
    return (product - y.float() * product.sum(-1, keepdim=True)).to(dy.dtype)


class DSLBaseError(Exception):
    """The base of the errors of the compiler of CuTe kernels."""


class DSLRuntimeError(DSLBaseError):
    """A kernel cannot be compiled."""


class DSLCudaRuntimeError(DSLBaseError):
    """The device failed."""


COMPILER: dict[str, Any] = {
    it.__name__: it for it in (DSLBaseError, DSLCudaRuntimeError, DSLRuntimeError)
}

MODULES: dict[str, dict[str, Any]] = {
    "rmsnorm": {
        "layernorm_bwd": layernorm_bwd,
        "layernorm_fwd": layernorm_fwd,
        "rmsnorm_bwd": rmsnorm_bwd,
        "rmsnorm_fwd": rmsnorm_fwd,
    },
    "softmax": {"softmax_bwd": softmax_bwd, "softmax_fwd": softmax_fwd},
}
