"""Acme's implementations for transformer_engine_fl: what they compute and what they need.

The entry point in pyproject.toml names this module; ``register`` is called once for each
registry. The framework chooses which implementation serves a call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_engine_fl import BackendImplKind, OpImpl, OpRegistry, ops

__all__ = ["TE_FL_PLUGIN_API", "register", "rmsnorm_bwd", "rmsnorm_fwd"]

TE_FL_PLUGIN_API = 1
VENDOR = "acme"


def register(registry: OpRegistry) -> None:
    """Register every implementation of this package."""
    registry.register_many(
        OpImpl(
            op_name=fn.__name__,
            impl_id="vendor.acme",
            kind=BackendImplKind.VENDOR,
            vendor=VENDOR,
            fn=fn,
            priority=100,
            supported_dtypes=frozenset({"float32", "bfloat16"}),
            devices=frozenset({"cpu", "cuda"}),
            traits=frozenset({"deterministic", "traceable"}),
        )
        for fn in (rmsnorm_fwd, rmsnorm_bwd)
    )


@torch.no_grad()
def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``rmsnorm_fwd`` of the contract."""
    # Check the arguments first: a kernel must refuse wrong ones, not read out of bounds. Your
    # kernel's own limits go here too: raise NotSupportedError before writing anything, and the
    # next implementation serves the call.
    ops.rmsnorm_fwd.check(
        input, weight, eps, zero_centered_gamma=zero_centered_gamma, out_dtype=out_dtype
    )
    x = input.float()
    rsigma = torch.rsqrt(x.square().mean(-1) + eps)
    output = x * rsigma.unsqueeze(-1) * (weight.float() + zero_centered_gamma)
    return output.to(out_dtype or input.dtype).contiguous(), rsigma.reshape(-1)


@torch.no_grad()
def rmsnorm_bwd(
    dy: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """``rmsnorm_bwd`` of the contract."""
    ops.rmsnorm_bwd.check(dy, x, rsigma, gamma, zero_centered_gamma=zero_centered_gamma)
    scale = rsigma.view(*x.shape[:-1], 1)
    xhat = x.float() * scale
    u = dy.float() * (gamma.float() + zero_centered_gamma)
    dx = (u - xhat * (u * xhat).mean(-1, keepdim=True)) * scale
    dgamma = (dy.float() * xhat).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype).contiguous(), dgamma.to(gamma.dtype)
