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

__all__ = ["layer_norm", "rms_norm"]


class _Differentiable(torch.autograd.Function):
    """Any operator whose contract names its backward; the first output is differentiable."""

    @staticmethod
    def forward(ctx: Any, op_name: str, options: dict[str, Any], *tensors: Tensor | None) -> Tensor:
        contract = CATALOGUE[op_name]
        backward = contract.backward
        assert backward is not None  # an invariant of ours: only such operators come here
        manager = get_default_manager()
        outputs = manager.call(op_name, *tensors, **options)
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
        gradients = ctx.run(dy, *ctx.saved_tensors, **ctx.options)
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
    output: Tensor = get_default_manager().call(op_name, *tensors, **options)[0]
    return output


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
