"""quack's functions under the contracts' signatures.

Each function checks the arguments by the contract, takes them as what quack's kernels expect
(rows, dense, starting where a wide access may), and calls it. What quack has no word for is
declined.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from te_fl_quack import OPERATORS
from transformer_engine_fl import NotSupportedError, ops
from transformer_engine_fl.vendors.taking import Taker

__all__ = list(OPERATORS)

ALIGNMENT = 16
"""Bytes: the widest access."""

NARROW = (torch.float32, torch.bfloat16, torch.float16)

TAKER = Taker("quack's kernels", {"cuda"})


def _module(name: str) -> Any:
    return importlib.import_module(f"quack.{name}")  # a function of the same name hides some


RMSNORM, SOFTMAX = _module("rmsnorm"), _module("softmax")


def _taken(op: str, **tensors: Tensor) -> list[Tensor]:
    """The tensors dense, aligned, and of a dtype that quack knows."""
    taken = TAKER.dense(op, **tensors)
    for name, tensor in zip(tensors, taken, strict=True):
        if tensor.dtype not in NARROW:
            raise NotSupportedError(f"{op}: {name!r} is {tensor.dtype}, which quack has not")
    return [it if it.data_ptr() % ALIGNMENT == 0 else it.clone() for it in taken]


def _rows(tensor: Tensor) -> Tensor:
    return tensor.view(-1, tensor.shape[-1])


def _on(tensor: Tensor) -> torch.cuda.device:
    """Launches go to the current device; within the block it is the tensor's."""
    return torch.cuda.device(tensor.get_device())


# ------------------------------------------------------------------------- normalization


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``rmsnorm_fwd`` of the contract."""
    op = "rmsnorm_fwd"
    ops.rmsnorm_fwd.check(
        input, weight, eps, zero_centered_gamma=zero_centered_gamma, out_dtype=out_dtype
    )
    x, w = _taken(op, input=input, weight=weight)
    if out_dtype not in (None, *NARROW):
        raise NotSupportedError(f"{op}: quack writes no {out_dtype}")
    with _on(x):
        output, _, rsigma = RMSNORM.rmsnorm_fwd(
            _rows(x),
            w,
            out_dtype=out_dtype,
            eps=eps,
            store_rstd=True,
            weight_offset=float(zero_centered_gamma),
        )
    return output.view(x.shape), rsigma


def rmsnorm_bwd(
    dy: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, *, zero_centered_gamma: bool = False
) -> tuple[Tensor, Tensor]:
    """``rmsnorm_bwd`` of the contract."""
    ops.rmsnorm_bwd.check(dy, x, rsigma, gamma, zero_centered_gamma=zero_centered_gamma)
    dy, x, rsigma, gamma = _taken("rmsnorm_bwd", dy=dy, x=x, rsigma=rsigma, gamma=gamma)
    with _on(x):
        dx, dgamma, *_ = RMSNORM.rmsnorm_bwd(
            _rows(x), gamma, _rows(dy), rsigma, weight_offset=float(zero_centered_gamma)
        )
    return dx.view(x.shape), dgamma


def rmsnorm_fwd_add(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``rmsnorm_fwd_add`` of the contract."""
    op = "rmsnorm_fwd_add"
    ops.rmsnorm_fwd_add.check(
        input,
        residual,
        weight,
        eps,
        zero_centered_gamma=zero_centered_gamma,
        out_dtype=out_dtype,
    )
    x, add, w = _taken(op, input=input, residual=residual, weight=weight)
    if out_dtype not in (None, *NARROW):
        raise NotSupportedError(f"{op}: quack writes no {out_dtype}")
    with _on(x):
        output, total, rsigma = RMSNORM.rmsnorm_fwd(
            _rows(x),
            w,
            residual=_rows(add),
            out_dtype=out_dtype,
            eps=eps,
            store_rstd=True,
            weight_offset=float(zero_centered_gamma),
        )
    return output.view(x.shape), total.view(x.shape), rsigma


def rmsnorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """``rmsnorm_bwd_add`` of the contract."""
    op = "rmsnorm_bwd_add"
    ops.rmsnorm_bwd_add.check(dz, x, add, rsigma, gamma, zero_centered_gamma=zero_centered_gamma)
    TAKER.same_dtype(op, x=x, add=add)  # for another it makes a gradient of each
    dz, x, add, rsigma, gamma = _taken(op, dz=dz, x=x, add=add, rsigma=rsigma, gamma=gamma)
    with _on(x):
        dx, dgamma, *_ = RMSNORM.rmsnorm_bwd(
            _rows(x),
            gamma,
            _rows(dz),
            rsigma,
            dresidual_out=_rows(add),
            weight_offset=float(zero_centered_gamma),
        )
    return dx.view(x.shape), dgamma


def layernorm_fwd(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """``layernorm_fwd`` of the contract."""
    ops.layernorm_fwd.check(input, weight, bias, eps)
    x, w = _taken("layernorm_fwd", input=input, weight=weight)
    b = None if bias is None else _taken("layernorm_fwd", bias=bias)[0].float()
    with _on(x):
        output, rsigma, mu = RMSNORM.layernorm_fwd(
            _rows(x), w.float(), b, eps, return_rstd=True, return_mean=True
        )
    return output.view(x.shape), mu, rsigma


def layernorm_bwd(
    dy: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``layernorm_bwd`` of the contract."""
    op = "layernorm_bwd"
    ops.layernorm_bwd.check(dy, x, mu, rsigma, gamma)
    dy, x, mu, rsigma, gamma = _taken(op, dy=dy, x=x, mu=mu, rsigma=rsigma, gamma=gamma)
    with _on(x):
        dx, dgamma, dbeta = RMSNORM.layernorm_bwd(_rows(x), gamma, _rows(dy), rsigma, mu)
    return dx.view(x.shape), dgamma, dbeta


# ------------------------------------------------------------------------------- softmax


def scaled_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
    """``scaled_softmax_forward`` of the contract, with a scale of 1."""
    op = "scaled_softmax_forward"
    ops.scaled_softmax_forward.check(input, scale)
    _no_scale(op, scale)
    (x,) = _taken(op, input=input)
    with _on(x):
        output: Tensor = SOFTMAX.softmax_fwd(_rows(x))
    return output.view(x.shape)


def scaled_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """``scaled_softmax_backward`` of the contract, with a scale of 1."""
    op = "scaled_softmax_backward"
    ops.scaled_softmax_backward.check(output_grad, softmax_output, scale)
    _no_scale(op, scale)
    TAKER.same_dtype(op, output_grad=output_grad, softmax_output=softmax_output)
    dy, y = _taken(op, output_grad=output_grad, softmax_output=softmax_output)
    with _on(y):
        dx: Tensor = SOFTMAX.softmax_bwd(_rows(dy), _rows(y))
    return dx.view(y.shape)


def _no_scale(op: str, scale: float) -> None:
    if scale != 1.0:
        raise NotSupportedError(f"{op}: quack's softmax has no scale")
