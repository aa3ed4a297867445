"""Linear layers, differentiable: a single layer, and a layer for each of several groups.

A backward here is two products, after the derivative of GELU if there is one. As it is several
operators, no contract names it as its backward. The forward fixes which implementation of each
of them the backward calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.core.manager import get_default_manager
from transformer_engine_fl.functional._differentiable import (
    Gradients,
    checked_outputs,
    first_derivative,
    records,
    witness,
)
from transformer_engine_fl.ops import _checks as check

__all__ = ["grouped_linear", "linear"]


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gelu: bool = False,
    main_grad: Tensor | None = None,
) -> Tensor:
    """``input @ weight.T + bias``, or GELU (tanh form) of it, differentiable.

    See :func:`transformer_engine_fl.ops.generic_gemm`.

    Args:
        input: ``[..., in]``.
        weight: ``[out, in]``, dtype of ``input``.
        bias: ``[out]``.
        gelu: apply GELU as well; its input is saved for the backward.
        main_grad: ``[out, in]``, usually float32. The backward adds the weight's gradient
            to it, not rounded to the weight's dtype, and leaves ``weight.grad`` alone.

    Returns:
        ``[..., out]``, dtype of ``input``.

    Raises:
        ArgumentError: the weight is not a matrix of the input's dtype with as many columns as the
            input's last dimension. Errors of the product call the weight ``A`` and the input
            ``B``.
    """
    if not _fits(input, weight):
        for name, value in (("input", input), ("weight", weight)):
            if not isinstance(value, Tensor):
                raise ArgumentError("linear", name, check.describe(value), "a tensor")
        expected = f"[out, in], dtype of the input, which ends with in: {check.describe(input)}"
        raise ArgumentError("linear", "weight", check.describe(weight), expected)
    if not records("linear", input, weight, bias):
        options = _without_none(bias=bias, gelu=gelu or None)
        output: Tensor = checked_outputs("generic_gemm", 3, (0,), (weight, input), options)[0]
        return output
    given = _distinct_tensors(input, weight, bias)
    output, *_ = _Linear.apply(gelu, main_grad, *given)  # type: ignore[no-untyped-call]
    return output


def grouped_linear(
    input: Tensor,
    weights: Sequence[Tensor],
    m_splits: Sequence[int],
    biases: Sequence[Tensor] | None = None,
    *,
    gelu: bool = False,
    main_grads: Sequence[Tensor] | None = None,
) -> Tensor:
    """:func:`linear` for groups of rows, each group with its own weight, differentiable.

    See :func:`transformer_engine_fl.ops.te_general_grouped_gemm`.

    Args:
        input: ``[rows, in]``, one group after the other.
        weights: ``[out, in]`` for each group, dtype of ``input``.
        m_splits: the number of rows of each group, on the host; 0 for an empty group.
        biases: ``[out]`` for each group.
        gelu: as in :func:`linear`.
        main_grads: as in :func:`linear`, for each group.

    Returns:
        ``[rows, out]``, dtype of ``input``.
    """
    lists = {"m_splits": m_splits, "weights": weights}
    if main_grads is not None:
        lists["main_grads"] = main_grads
    for name, value in lists.items():
        if not hasattr(value, "__len__"):
            raise ArgumentError("grouped_linear", name, check.describe(value), "a sequence")
        if len(value) != len(m_splits):
            expected = f"{len(m_splits)}, one for each of m_splits"
            raise ArgumentError("grouped_linear", name, f"{len(value)} tensors", expected)
    added = () if biases is None else tuple(biases)
    if not records("grouped_linear", input, *weights, *added):
        options = _without_none(bias=list(added) or None, gelu=gelu or None)
        call = list(weights), [input], list(m_splits)
        output: Tensor = checked_outputs("te_general_grouped_gemm", 3, (0,), call, options)[0]
        return output
    into = None if main_grads is None else list(main_grads)
    output, *_ = _GroupedLinear.apply(  # type: ignore[no-untyped-call]
        gelu, into, list(m_splits), *_distinct_tensors(input, *weights, *added)
    )
    return output


def _distinct_tensors(*tensors: Tensor | None) -> Sequence[Tensor | None]:
    """The tensors; a view for each repeated one under torch.compile, which accepts each once."""
    if not torch.compiler.is_compiling():
        return tensors
    given: list[Tensor | None] = []
    for tensor in tensors:
        if tensor is not None and any(it is tensor for it in given):
            given.append(tensor.view_as(tensor))
        else:
            given.append(tensor)
    return given


def _fits(input: Tensor, weight: Tensor) -> bool:
    try:
        return (
            weight.ndim == 2
            and weight.shape[1:] == input.shape[-1:]
            and weight.dtype is input.dtype
        )
    except AttributeError:  # one of them is not a tensor
        return False


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gelu: bool,
        main_grad: Tensor | None,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, ...]:
        options = _without_none(bias=bias, gelu=gelu or None)
        output, pre_gelu = _forward(ctx, "generic_gemm", (weight, input), options)
        _, _, of_input, of_weight, _ = ctx.needs_input_grad
        kept = input if of_weight else None, weight if of_input else None
        hidden = _witness(pre_gelu)
        ctx.save_for_backward(*kept, pre_gelu, *hidden)
        ctx.main_grad = main_grad
        return output, *hidden

    @staticmethod
    @first_derivative
    def backward(ctx: Any, saved: Gradients, grad: Tensor, *_: Tensor) -> Gradients:
        input, weight, pre_gelu = saved[:3]
        _, _, of_input, of_weight, of_bias = ctx.needs_input_grad
        grad = _before_gelu(ctx, grad, pre_gelu)
        dx = dw = db = None
        if of_input:
            dx, _ = _product(ctx, (weight, grad), {"transa": False})
        if of_weight:
            dw, db = _product(ctx, (input, grad), _wgrad(of_bias, ctx.main_grad))
        elif of_bias:
            db = _sum_of_rows(grad)
        return None, None, dx, dw, db


class _GroupedLinear(torch.autograd.Function):
    """Its last arguments are the weights, then the biases if there are any."""

    @staticmethod
    def forward(
        ctx: Any,
        gelu: bool,
        main_grads: list[Tensor] | None,
        m_splits: list[int],
        input: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        groups = len(m_splits)
        weights, biases = list(parameters[:groups]), list(parameters[groups:])
        options = _without_none(bias=biases or None, gelu=gelu or None)
        call = weights, [input], m_splits
        output, pre_gelu = _forward(ctx, "te_general_grouped_gemm", call, options)
        of_input, *wanted = ctx.needs_input_grad[3:]
        kept = input if any(wanted[:groups]) else None
        hidden = _witness(pre_gelu)
        ctx.save_for_backward(pre_gelu, kept, *(weights if of_input else ()), *hidden)
        ctx.main_grads = main_grads
        ctx.m_splits = m_splits
        return output, *hidden

    @staticmethod
    @first_derivative
    def backward(ctx: Any, saved: Gradients, grad: Tensor, *_: Tensor) -> Gradients:
        groups = len(ctx.m_splits)
        pre_gelu, input, *weights = saved
        of_input, *wanted = ctx.needs_input_grad[3:]
        of_groups = wanted[:groups]
        of_weights, of_biases = any(of_groups), any(wanted[groups:])
        grad = _before_gelu(ctx, grad, pre_gelu)
        dx = dw = db = None
        if of_input:
            call = weights[:groups], [grad], ctx.m_splits
            dx, _ = _product(ctx, call, {"transa": False})
        if of_weights:
            into = ctx.main_grads and [
                it if used else torch.empty_like(it)  # scratch: a frozen weight keeps its own
                for it, used in zip(ctx.main_grads, of_groups, strict=True)
            ]
            dw, db = _product(ctx, ([input], [grad], ctx.m_splits), _wgrad(of_biases, into))
        elif of_biases:
            db = [_sum_of_rows(it) for it in torch.split(grad, ctx.m_splits)]
        gradients = [None] * groups if dw is None else [*dw.view(groups, -1, dw.shape[-1])]
        if len(wanted) > groups:
            gradients += [None] * groups if db is None else [*db]
        return None, None, None, dx, *gradients


def _forward(
    ctx: Any, op_name: str, tensors: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """The output and the input of GELU; fixes which implementations run the backward."""
    manager = get_default_manager()
    required = (0, 2) if "gelu" in options else (0,)
    output, _, pre_gelu = checked_outputs(op_name, 3, required, tensors, options)
    ctx.op_name = op_name
    ctx.gemm = manager.pin(op_name)
    ctx.dgelu = manager.pin("dgelu") if "gelu" in options else None
    return output, pre_gelu


def _product(
    ctx: Any, tensors: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Tensor | None, Any]:
    """A product of the backward (None if it is accumulated), and the bias's gradient if wanted."""
    required = [0] * ("accumulate_into" not in options) + [1] * ("bias_grad" in options)
    product, of_bias, _ = checked_outputs(ctx.op_name, 3, required, tensors, options, ctx.gemm)
    return product, of_bias


def _witness(pre_gelu: Tensor | None) -> tuple[Tensor, ...]:
    """A witness if GELU's input is saved: it is not an output, so autograd would not track it."""
    return () if pre_gelu is None else (witness(pre_gelu),)


def _before_gelu(ctx: Any, grad: Tensor, pre_gelu: Tensor | None) -> Tensor:
    return grad if pre_gelu is None else ctx.dgelu(grad, pre_gelu)


def _sum_of_rows(grad: Tensor) -> Tensor:
    return grad.unsqueeze(0).sum(tuple(range(grad.ndim)))


def _wgrad(bias_grad: bool, main_grad: Any) -> dict[str, Any]:
    """The options of the product that computes the weight's gradient."""
    flags = {"transa": False, "transb": True}
    return flags | _without_none(
        grad=bias_grad or None, bias_grad=bias_grad or None, accumulate_into=main_grad
    )


def _without_none(**options: Any) -> dict[str, Any]:
    """The options that are not None: an implementation need not have every option."""
    return {name: value for name, value in options.items() if value is not None}
