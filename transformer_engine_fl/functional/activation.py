"""Activations, differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer_engine_fl.functional._differentiable import apply

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "clamped_swiglu",
    "geglu",
    "gelu",
    "glu",
    "qgeglu",
    "qgelu",
    "reglu",
    "relu",
    "silu",
    "sreglu",
    "srelu",
    "swiglu",
]


def gelu(input: Tensor) -> Tensor:
    """Gaussian error linear unit, tanh form, differentiable.

    See :func:`transformer_engine_fl.ops.gelu`.
    """
    return apply("gelu", {}, input)[0]


def qgelu(input: Tensor) -> Tensor:
    """Gaussian error linear unit, sigmoid form, differentiable.

    See :func:`transformer_engine_fl.ops.qgelu`.
    """
    return apply("qgelu", {}, input)[0]


def relu(input: Tensor) -> Tensor:
    """Rectified linear unit, differentiable.

    See :func:`transformer_engine_fl.ops.relu`.
    """
    return apply("relu", {}, input)[0]


def srelu(input: Tensor) -> Tensor:
    """Squared rectified linear unit, differentiable.

    See :func:`transformer_engine_fl.ops.srelu`.
    """
    return apply("srelu", {}, input)[0]


def silu(input: Tensor) -> Tensor:
    """Sigmoid linear unit, differentiable.

    See :func:`transformer_engine_fl.ops.silu`.
    """
    return apply("silu", {}, input)[0]


def glu(input: Tensor) -> Tensor:
    """``sigmoid(a) * b`` of the halves of ``[..., 2H]``, differentiable.

    See :func:`transformer_engine_fl.ops.glu`.
    """
    return apply("glu", {}, input)[0]


def geglu(input: Tensor) -> Tensor:
    """``gelu(a) * b`` of the halves of ``[..., 2H]``, differentiable.

    See :func:`transformer_engine_fl.ops.geglu`.
    """
    return apply("geglu", {}, input)[0]


def qgeglu(input: Tensor) -> Tensor:
    """``qgelu(a) * b`` of the halves of ``[..., 2H]``, differentiable.

    See :func:`transformer_engine_fl.ops.qgeglu`.
    """
    return apply("qgeglu", {}, input)[0]


def reglu(input: Tensor) -> Tensor:
    """``relu(a) * b`` of the halves of ``[..., 2H]``, differentiable.

    See :func:`transformer_engine_fl.ops.reglu`.
    """
    return apply("reglu", {}, input)[0]


def sreglu(input: Tensor) -> Tensor:
    """``srelu(a) * b`` of the halves of ``[..., 2H]``, differentiable.

    See :func:`transformer_engine_fl.ops.sreglu`.
    """
    return apply("sreglu", {}, input)[0]


def swiglu(input: Tensor) -> Tensor:
    """``silu(a) * b`` of the halves of ``[..., 2H]``, differentiable.

    See :func:`transformer_engine_fl.ops.swiglu`.
    """
    return apply("swiglu", {}, input)[0]


def clamped_swiglu(input: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """Gated swish of the clamped halves of ``[..., 2H]``, differentiable.

    See :func:`transformer_engine_fl.ops.clamped_swiglu`.
    """
    return apply("clamped_swiglu", {"limit": limit, "alpha": alpha}, input)[0]
