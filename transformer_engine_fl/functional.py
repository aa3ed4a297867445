"""Differentiable functions over the operators.

Operators compute values; gradients live here. Which implementation runs a backward is
settled when the forward runs, so that a ``with`` block may end, and autograd may use a
thread of its own, in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_engine_fl.core.manager import get_default_manager
from transformer_engine_fl.ops import CATALOGUE

__all__ = [
    "clamped_swiglu",
    "geglu",
    "gelu",
    "glu",
    "layer_norm",
    "qgeglu",
    "qgelu",
    "reglu",
    "relu",
    "rms_norm",
    "scaled_aligned_causal_masked_softmax",
    "scaled_masked_softmax",
    "scaled_softmax",
    "scaled_upper_triang_masked_softmax",
    "silu",
    "sreglu",
    "srelu",
    "swiglu",
]


class _Differentiable(torch.autograd.Function):
    """Any operator whose contract names its backward; the first output is differentiable."""

    @staticmethod
    def forward(ctx: Any, op_name: str, options: dict[str, Any], *tensors: Tensor | None) -> Tensor:
        contract = CATALOGUE[op_name]
        backward = contract.backward
        assert backward is not None  # an invariant of ours: only such operators come here
        manager = get_default_manager()
        outputs = _as_tuple(manager.call(op_name, *tensors, **options))
        named = dict(zip(contract.signature.parameters, tensors, strict=False))
        named |= {f"output[{place}]": output for place, output in enumerate(outputs)}
        ctx.save_for_backward(*(named[source] for source in backward.saves.values()))
        ctx.options = {name: options[name] for name in backward.options if name in options}
        ctx.run = manager.pin(backward.op)
        ctx.places = [list(contract.signature.parameters).index(it) for it in backward.gradients]
        ctx.count = len(tensors)
        output: Tensor = outputs[0]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _as_tuple(ctx.run(dy, *ctx.saved_tensors, **ctx.options))
        returned: list[Tensor | None] = [None] * ctx.count
        for place, gradient in zip(ctx.places, gradients, strict=True):
            if ctx.needs_input_grad[2 + place]:
                returned[place] = gradient
        return None, None, *returned


def _apply(op_name: str, options: dict[str, Any], *tensors: Tensor | None) -> Tensor:
    # What has its default is not passed on: an implementation need not know every option.
    defaults = CATALOGUE[op_name].options
    options = {name: value for name, value in options.items() if value != defaults[name]}
    wanted = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if wanted and torch.is_grad_enabled():
        result: Tensor = _Differentiable.apply(op_name, options, *tensors)  # type: ignore[no-untyped-call]
        return result
    return _as_tuple(get_default_manager().call(op_name, *tensors, **options))[0]


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


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
    return _apply("rmsnorm_fwd", options, input, weight)


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
    return _apply("layernorm_fwd", options, input, weight, bias)


def gelu(input: Tensor) -> Tensor:
    """Gaussian error linear unit, tanh form, differentiable.

    See :func:`transformer_engine_fl.ops.gelu`.
    """
    return _apply("gelu", {}, input)


def qgelu(input: Tensor) -> Tensor:
    """Gaussian error linear unit, sigmoid form, differentiable.

    See :func:`transformer_engine_fl.ops.qgelu`.
    """
    return _apply("qgelu", {}, input)


def relu(input: Tensor) -> Tensor:
    """Rectified linear unit, differentiable.

    See :func:`transformer_engine_fl.ops.relu`.
    """
    return _apply("relu", {}, input)


def srelu(input: Tensor) -> Tensor:
    """Squared rectified linear unit, differentiable.

    See :func:`transformer_engine_fl.ops.srelu`.
    """
    return _apply("srelu", {}, input)


def silu(input: Tensor) -> Tensor:
    """Sigmoid linear unit, differentiable.

    See :func:`transformer_engine_fl.ops.silu`.
    """
    return _apply("silu", {}, input)


def glu(input: Tensor) -> Tensor:
    """``sigmoid(a) * b`` of the halves of ``[..., 2H]``, differentiable.

    See :func:`transformer_engine_fl.ops.glu`.
    """
    return _apply("glu", {}, input)


def geglu(input: Tensor) -> Tensor:
    """``gelu(a) * b`` of the halves of ``[..., 2H]``, differentiable.

    See :func:`transformer_engine_fl.ops.geglu`.
    """
    return _apply("geglu", {}, input)


def qgeglu(input: Tensor) -> Tensor:
    """``qgelu(a) * b`` of the halves of ``[..., 2H]``, differentiable.

    See :func:`transformer_engine_fl.ops.qgeglu`.
    """
    return _apply("qgeglu", {}, input)


def reglu(input: Tensor) -> Tensor:
    """``relu(a) * b`` of the halves of ``[..., 2H]``, differentiable.

    See :func:`transformer_engine_fl.ops.reglu`.
    """
    return _apply("reglu", {}, input)


def sreglu(input: Tensor) -> Tensor:
    """``srelu(a) * b`` of the halves of ``[..., 2H]``, differentiable.

    See :func:`transformer_engine_fl.ops.sreglu`.
    """
    return _apply("sreglu", {}, input)


def swiglu(input: Tensor) -> Tensor:
    """``silu(a) * b`` of the halves of ``[..., 2H]``, differentiable.

    See :func:`transformer_engine_fl.ops.swiglu`.
    """
    return _apply("swiglu", {}, input)


def clamped_swiglu(input: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """Gated swish of the clamped halves of ``[..., 2H]``, differentiable.

    See :func:`transformer_engine_fl.ops.clamped_swiglu`.
    """
    return _apply("clamped_swiglu", {"limit": limit, "alpha": alpha}, input)


def scaled_softmax(input: Tensor, scale: float = 1.0) -> Tensor:
    """Softmax of ``scale * input`` over the last dimension, differentiable.

    See :func:`transformer_engine_fl.ops.scaled_softmax_forward`.
    """
    return _apply("scaled_softmax_forward", {"scale": scale}, input)


def scaled_masked_softmax(input: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
    """The same of what ``mask`` leaves visible, and 0 elsewhere, differentiable.

    See :func:`transformer_engine_fl.ops.scaled_masked_softmax_forward`.
    """
    return _apply("scaled_masked_softmax_forward", {"scale": scale}, input, mask)


def scaled_upper_triang_masked_softmax(input: Tensor, scale: float = 1.0) -> Tensor:
    """The same for causal attention, ``[..., s, s]``, differentiable.

    See :func:`transformer_engine_fl.ops.scaled_upper_triang_masked_softmax_forward`.
    """
    return _apply("scaled_upper_triang_masked_softmax_forward", {"scale": scale}, input)


def scaled_aligned_causal_masked_softmax(input: Tensor, scale: float = 1.0) -> Tensor:
    """The same for causal attention, ``[..., sq, sk]`` aligned at the end, differentiable.

    See :func:`transformer_engine_fl.ops.scaled_aligned_causal_masked_softmax_forward`.
    """
    return _apply("scaled_aligned_causal_masked_softmax_forward", {"scale": scale}, input)
