"""Normalization in plain PyTorch: the definitions, in float32 (float64 for float64)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer_engine_fl import ops
from transformer_engine_fl.backends.reference._values import as_output, as_written, over_rows
from transformer_engine_fl.ops.normalization import statistics_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "layernorm_bwd",
    "layernorm_fwd",
    "rmsnorm_bwd",
    "rmsnorm_bwd_add",
    "rmsnorm_fwd",
    "rmsnorm_fwd_add",
]


def _gamma(weight: Tensor, zero_centered: bool, dtype: torch.dtype) -> Tensor:
    gamma = weight.to(dtype)
    return gamma + 1 if zero_centered else gamma


@as_written
def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Root mean square normalization."""
    ops.rmsnorm_fwd.check(
        input, weight, eps, zero_centered_gamma=zero_centered_gamma, out_dtype=out_dtype
    )
    output, rsigma = _rms(input, weight, eps, zero_centered_gamma)
    return as_output(output, out_dtype or input.dtype), rsigma


@as_written
def rmsnorm_fwd_add(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Root mean square normalization of a sum."""
    ops.rmsnorm_fwd_add.check(
        input, residual, weight, eps, zero_centered_gamma=zero_centered_gamma, out_dtype=out_dtype
    )
    total = as_output(input + residual, input.dtype)
    output, rsigma = _rms(total, weight, eps, zero_centered_gamma)
    return as_output(output, out_dtype or input.dtype), total, rsigma


@as_written
def rmsnorm_bwd(
    dy: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of root mean square normalization."""
    ops.rmsnorm_bwd.check(dy, x, rsigma, gamma, zero_centered_gamma=zero_centered_gamma)
    dx, dgamma = _rms_gradients(dy, x, rsigma, gamma, zero_centered_gamma)
    return as_output(dx, x.dtype), dgamma


@as_written
def rmsnorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of root mean square normalization, with another gradient added."""
    ops.rmsnorm_bwd_add.check(dz, x, add, rsigma, gamma, zero_centered_gamma=zero_centered_gamma)
    dx, dgamma = _rms_gradients(dz, x, rsigma, gamma, zero_centered_gamma)
    return as_output(dx + add.to(dx.dtype), x.dtype), dgamma


@as_written
def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer normalization."""
    ops.layernorm_fwd.check(
        input, weight, bias, eps, zero_centered_gamma=zero_centered_gamma, out_dtype=out_dtype
    )
    x = input.to(statistics_dtype(input.dtype))
    mu = x.mean(-1, keepdim=True)
    centred = x - mu
    rsigma = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    output = centred * rsigma * _gamma(weight, zero_centered_gamma, x.dtype)
    if bias is not None:
        output = output + bias.to(x.dtype)
    return as_output(output, out_dtype or input.dtype), mu.flatten(), rsigma.flatten()


@as_written
def layernorm_bwd(
    dy: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of layer normalization."""
    ops.layernorm_bwd.check(dy, x, mu, rsigma, gamma, zero_centered_gamma=zero_centered_gamma)
    grad = dy.to(rsigma.dtype)
    rows = (*x.shape[:-1], 1)
    xhat = (x.to(rsigma.dtype) - mu.view(rows)) * rsigma.view(rows)
    u = grad * _gamma(gamma, zero_centered_gamma, rsigma.dtype)
    along = (u * xhat).mean(-1, keepdim=True)
    dx = rsigma.view(rows) * (u - u.mean(-1, keepdim=True) - xhat * along)
    dgamma = over_rows(grad * xhat).to(gamma.dtype)
    return as_output(dx, x.dtype), dgamma, over_rows(grad).to(gamma.dtype)


def _rms(input: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    x = input.to(statistics_dtype(input.dtype))
    rsigma = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * rsigma * _gamma(weight, zero_centered, x.dtype), rsigma.flatten()


def _rms_gradients(
    dy: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """dx in the dtype of the statistics, dgamma in that of gamma."""
    grad = dy.to(rsigma.dtype)
    rsigma = rsigma.view(*x.shape[:-1], 1)
    xhat = x.to(rsigma.dtype) * rsigma
    u = grad * _gamma(gamma, zero_centered, rsigma.dtype)
    dx = rsigma * (u - xhat * (u * xhat).mean(-1, keepdim=True))
    return dx, over_rows(grad * xhat).to(gamma.dtype)
