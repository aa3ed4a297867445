"""Normalization, differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer_engine_fl.functional._differentiable import apply

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "layer_norm",
    "rms_norm",
    "rms_norm_add",
]


def layer_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Layer normalization over the last dimension, differentiable.

    See :func:`transformer_engine_fl.ops.layernorm_fwd` for the formula and the arguments.

    Returns:
        ``[..., H]``, ``out_dtype`` or the input's dtype.
    """
    options = {"eps": eps, "zero_centered_gamma": zero_centered_gamma, "out_dtype": out_dtype}
    return apply("layernorm_fwd", options, input, weight, bias)[0]


def rms_norm(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Root mean square normalization over the last dimension, differentiable.

    See :func:`transformer_engine_fl.ops.rmsnorm_fwd` for the formula and the arguments.

    Returns:
        ``[..., H]``, ``out_dtype`` or the input's dtype.
    """
    options = {"eps": eps, "zero_centered_gamma": zero_centered_gamma, "out_dtype": out_dtype}
    return apply("rmsnorm_fwd", options, input, weight)[0]


def rms_norm_add(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Root mean square normalization of ``input + residual``, differentiable.

    See :func:`transformer_engine_fl.ops.rmsnorm_fwd_add` for the formula and the arguments.

    Returns:
        output: ``[..., H]``, ``out_dtype`` or the input's dtype.
        sum: ``[..., H]``, the input's dtype; the residual of the next block.
    """
    options = {"eps": eps, "zero_centered_gamma": zero_centered_gamma, "out_dtype": out_dtype}
    output, total, *_ = apply("rmsnorm_fwd_add", options, input, residual, weight)
    return output, total
