"""Bridges from Liger's functions to contracts: how arguments are converted, for each operator.

A bridge states which of a package's exports it needs; a contract without a bridge is not
served. Cross entropy has none, as Liger's does not return the log-sum-exp that the contract
promises, nor has rotary embedding, as Liger's has one angle for both features of a
pair. These are only operators under their own names.

A function of Liger's that serves a contract gets checked arguments, contiguous, and copies of
those that it may write in place. Options that it does not have are declined.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from transformer_engine_fl import ops
from transformer_engine_fl.core.errors import NotSupportedError, PluginError
from transformer_engine_fl.vendors.packages.bridge import Bridge
from transformer_engine_fl.vendors.taking import (
    Taker,
    differentiating,
    normal_tensor,
    writable_copy,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["BRIDGES", "Bridge"]

_CASTING = {"llama": 0, "gemma": 1, "none": -1}
"""Liger's numbers for where a norm rounds; "gemma" is float32 throughout."""


_LIGER: Final = Taker("Liger's kernels")


# --------------------------------------------------------------------------- gated units


def _gated(contract: Any) -> Callable[[Any], Callable[..., Any]]:
    def make(unit: Any) -> Callable[..., Any]:
        def forward(input: Tensor) -> Tensor:
            import torch

            contract.check(input)
            (input,) = _LIGER.strided(contract.name, input=input)
            with torch.no_grad():
                output: Tensor = unit.apply(*(half.contiguous() for half in input.chunk(2, -1)))
            return output

        return forward

    return make


def _gated_backward(contract: Any) -> Callable[[Any], Callable[..., Any]]:
    def make(unit: Any) -> Callable[..., Any]:
        def backward(grad: Tensor, fwd_input: Tensor) -> Tensor:
            import torch

            contract.check(grad, fwd_input)
            grad, fwd_input = _LIGER.strided(contract.name, grad=grad, fwd_input=fwd_input)
            _LIGER.same_dtype(contract.name, grad=grad, fwd_input=fwd_input)
            with differentiating():
                # Liger's backward writes the gradients over what its forward was given.
                leaves = [writable_copy(half).requires_grad_() for half in fwd_input.chunk(2, -1)]
                output = unit.apply(*leaves)
                gradients = torch.autograd.grad(output, leaves, normal_tensor(grad.contiguous()))
            return torch.cat(gradients, -1).detach()

        return backward

    return make


# ------------------------------------------------------------------------- normalization


def _rmsnorm_fwd(norm: Any) -> Callable[..., Any]:
    def rmsnorm_fwd(
        input: Tensor,
        weight: Tensor,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
    ) -> tuple[Tensor, Tensor]:
        import torch

        ops.rmsnorm_fwd.check(input, weight, eps, zero_centered_gamma=zero_centered_gamma)
        input, weight = _LIGER.strided("rmsnorm_fwd", input=input, weight=weight)
        offset = float(zero_centered_gamma)
        with torch.no_grad():
            x = input.contiguous()
            output = norm.apply(x, weight.contiguous(), eps, offset, "gemma", False)
            # Liger does not return the statistics; they are computed here.
            rsigma = x.float().square().mean(-1).add_(eps).rsqrt_()
        return output, rsigma.reshape(-1)

    return rmsnorm_fwd


def _layernorm_fwd(norm: Any) -> Callable[..., Any]:
    def layernorm_fwd(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
    ) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        ops.layernorm_fwd.check(input, weight, bias, eps)
        x, gamma = _LIGER.dense("layernorm_fwd", input=input, weight=weight)
        beta = None if bias is None else _LIGER.dense("layernorm_fwd", bias=bias)[0]
        with torch.no_grad():
            beta = torch.zeros_like(gamma) if beta is None else beta
            output = norm.apply(x, gamma, beta, eps)
            variance, mean = torch.var_mean(x.float(), -1, correction=0)
        return output, mean.reshape(-1), variance.add_(eps).rsqrt_().reshape(-1)

    return layernorm_fwd


def _rmsnorm_bwd(function: Any) -> Callable[..., Any]:
    known = _filling(function, "rmsnorm_bwd", _RMSNORM_BACKWARD)

    def rmsnorm_bwd(
        dy: Tensor,
        x: Tensor,
        rsigma: Tensor,
        gamma: Tensor,
        *,
        zero_centered_gamma: bool = False,
    ) -> tuple[Tensor, Tensor]:
        import torch

        ops.rmsnorm_bwd.check(dy, x, rsigma, gamma, zero_centered_gamma=zero_centered_gamma)
        dy, x, rsigma, gamma = _LIGER.strided("rmsnorm_bwd", dy=dy, x=x, rsigma=rsigma, gamma=gamma)
        _LIGER.same_dtype("rmsnorm_bwd", dy=dy, x=x)
        columns = x.shape[-1]
        block, warps = _settings(x.device, columns)
        with torch.no_grad():
            dx, dgamma = known(
                dY=dy.contiguous(),
                X=x.contiguous().view(-1, columns),
                W=gamma.contiguous(),
                RSTD=rsigma.contiguous(),
                offset=float(zero_centered_gamma),
                casting_mode=_CASTING["gemma"],
                BLOCK_SIZE=block,
                num_warps=warps,
                in_place=False,
                row_mode=None,
                needs_dw=True,
            )[:2]
        return dx.view(x.shape), dgamma

    return rmsnorm_bwd


def _layernorm_bwd(function: Any) -> Callable[..., Any]:
    known = _filling(function, "layernorm_bwd", _LAYERNORM_BACKWARD)

    def layernorm_bwd(
        dy: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        ops.layernorm_bwd.check(dy, x, mu, rsigma, gamma)
        g, rows, mean, rstd, weight = _LIGER.dense(
            "layernorm_bwd", dy=dy, x=x, mu=mu, rsigma=rsigma, gamma=gamma
        )
        _LIGER.same_dtype("layernorm_bwd", dy=dy, x=x)
        with torch.no_grad():
            dx, dgamma, dbeta = known(
                dY=g,
                X=rows.view(-1, x.shape[-1]),
                W=weight,
                B=torch.zeros_like(weight),
                Mean=mean,
                RSTD=rstd,
                needs_dw=True,
                needs_db=True,
            )[:3]
        return dx.view(x.shape), dgamma, dbeta

    return layernorm_bwd


_RMSNORM_BACKWARD: Final = frozenset(
    {"dY", "X", "W", "RSTD", "offset", "casting_mode", "BLOCK_SIZE", "num_warps", "in_place"}
    | {"row_mode", "needs_dw"}
)
_LAYERNORM_BACKWARD: Final = frozenset(
    {"dY", "X", "W", "B", "Mean", "RSTD", "needs_dw", "needs_db"}
)


def _filling(function: Any, op: str, known: frozenset[str]) -> Callable[..., Any]:
    """The function, called by name with those arguments of Liger's releases that it has.

    Raises:
        PluginError: it has another parameter.
    """
    asked = [it.name for it in inspect.signature(function).parameters.values()]
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise PluginError(
            f"{op}: {function.__module__}.{function.__name__} has the parameter {unknown[0]!r}, "
            "which Liger's function lacks; it is not bridged"
        )

    def call(**values: Any) -> Any:
        return function(*(values[name] for name in asked))

    return call


def _settings(device: torch.device, columns: int) -> tuple[int, int]:
    from transformer_engine_fl.vendors.info import BackendInfo, VendorInfo
    from transformer_engine_fl.vendors.registry import get_current_backend

    backend = get_current_backend(device.type) or BackendInfo(VendorInfo("any", device.type))
    return backend.calculate_settings(columns)


# ------------------------------------------------------------------------------- softmax


def _softmax(function: Any) -> Callable[..., Any]:
    def scaled_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
        import torch

        ops.scaled_softmax_forward.check(input, scale)
        (input,) = _LIGER.strided("scaled_softmax_forward", input=input)
        if scale != 1.0:
            raise NotSupportedError("scaled_softmax_forward: Liger's softmax has no scale")
        with torch.no_grad():
            output: Tensor = function.apply(input.contiguous())
        return output

    return scaled_softmax_forward


BRIDGES: Final = {
    "rmsnorm_fwd": Bridge(
        ("LigerRMSNormFunction",), _rmsnorm_fwd, "X, W, eps, offset, casting_mode, in_place"
    ),
    "rmsnorm_bwd": Bridge(("rms_norm_backward",), _rmsnorm_bwd),
    "layernorm_fwd": Bridge(("LigerLayerNormFunction",), _layernorm_fwd, "X, W, B, eps"),
    "layernorm_bwd": Bridge(("layer_norm_backward",), _layernorm_bwd),
    "geglu": Bridge(("LigerGELUMulFunction",), _gated(ops.geglu), "a, b"),
    "dgeglu": Bridge(("LigerGELUMulFunction",), _gated_backward(ops.dgeglu), "a, b"),
    "swiglu": Bridge(("LigerSiLUMulFunction",), _gated(ops.swiglu), "a, b"),
    "dswiglu": Bridge(("LigerSiLUMulFunction",), _gated_backward(ops.dswiglu), "a, b"),
    "scaled_softmax_forward": Bridge(("LigerSoftmaxFunction",), _softmax, "x"),
}
"""The bridge of each operator."""
