"""Normalization in torch: its own layer and RMS norm, and autograd over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SAVED_EPS = 1e-5
"""The eps of the forward that saved the samples' statistics."""


def _gamma(weight: Tensor, zero_centered: bool, dtype: torch.dtype) -> Tensor:
    gamma = weight.to(dtype)
    return gamma + 1 if zero_centered else gamma


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """``F.rms_norm``, which does not return its statistic."""
    gamma = _gamma(weight, zero_centered_gamma, input.dtype)
    return F.rms_norm(input, gamma.shape, gamma, eps).to(out_dtype or input.dtype), None


def rmsnorm_fwd_add(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5, **options: Any
) -> tuple[Any, ...]:
    """A sum, then ``F.rms_norm``."""
    total = input + residual
    output, rsigma = rmsnorm_fwd(total, weight, eps, **options)
    return output, total, rsigma


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """The function under ``F.layer_norm``, with the statistics that it saves."""
    gamma = _gamma(weight, zero_centered_gamma, input.dtype)
    beta = None if bias is None else bias.to(input.dtype)
    output, mu, rsigma = torch.native_layer_norm(input, gamma.shape, gamma, beta, eps)
    return output.to(out_dtype or input.dtype), mu.flatten(), rsigma.flatten()


def rmsnorm_bwd(
    dy: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, *, zero_centered_gamma: bool = False
) -> tuple[Any, ...]:
    """Autograd over ``F.rms_norm``, which computes the statistic again."""
    leaves = x.detach().requires_grad_(), gamma.detach().requires_grad_()
    with torch.enable_grad():
        output, _ = rmsnorm_fwd(*leaves, SAVED_EPS, zero_centered_gamma=zero_centered_gamma)
    return torch.autograd.grad(output, leaves, dy.to(output.dtype))


def rmsnorm_bwd_add(
    dz: Tensor, x: Tensor, add: Tensor, rsigma: Tensor, gamma: Tensor, **options: Any
) -> tuple[Any, ...]:
    """:func:`rmsnorm_bwd`, and a sum."""
    dx, dgamma = rmsnorm_bwd(dz, x, rsigma, gamma, **options)
    return dx + add.to(dx.dtype), dgamma


def layernorm_bwd(
    dy: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Any, ...]:
    """Autograd over ``F.layer_norm``, which computes the statistics again."""
    inputs = x, gamma, torch.zeros_like(gamma)
    leaves = [it.detach().requires_grad_() for it in inputs]
    with torch.enable_grad():
        output, *_ = layernorm_fwd(*leaves, SAVED_EPS, zero_centered_gamma=zero_centered_gamma)
    return torch.autograd.grad(output, leaves, dy.to(output.dtype))


COMPOSITIONS: dict[str, Callable[..., tuple[Any, ...]]] = {
    it.__name__: it
    for it in (
        layernorm_bwd,
        layernorm_fwd,
        rmsnorm_bwd,
        rmsnorm_bwd_add,
        rmsnorm_fwd,
        rmsnorm_fwd_add,
    )
}
