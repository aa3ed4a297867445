"""Scaled softmax in plain PyTorch: the definitions, in float32 (float64 for float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends.reference._values import as_output, as_written
from transformer_engine_fl.ops._dtypes import math_dtype

__all__ = [
    "scaled_aligned_causal_masked_softmax_backward",
    "scaled_aligned_causal_masked_softmax_forward",
    "scaled_masked_softmax_backward",
    "scaled_masked_softmax_forward",
    "scaled_softmax_backward",
    "scaled_softmax_forward",
    "scaled_upper_triang_masked_softmax_backward",
    "scaled_upper_triang_masked_softmax_forward",
]


def _softmax(input: Tensor, scale: float, hidden: Tensor | None = None) -> Tensor:
    scores = input.to(math_dtype(input.dtype)) * scale
    if hidden is None:
        return as_output(scores.softmax(-1), input.dtype)
    scores = scores.masked_fill(hidden, -torch.inf)
    # In a row without any score above -inf softmax is 0 / 0.
    empty = scores.isneginf().all(-1, keepdim=True)
    return as_output(scores.softmax(-1).masked_fill(hidden | empty, 0), input.dtype)


def _gradient(output_grad: Tensor, softmax_output: Tensor, scale: float) -> Tensor:
    y = softmax_output.to(math_dtype(softmax_output.dtype))
    dy = output_grad.to(y.dtype)
    dx = scale * y * (dy - (y * dy).sum(-1, keepdim=True))
    return as_output(dx, softmax_output.dtype)


def _future(input: Tensor) -> Tensor:
    """``[sq, sk]``: true for keys after the query, with the last key aligned to the last query."""
    queries, keys = input.shape[-2:]
    everywhere = input.new_ones((queries, keys), dtype=torch.bool)
    return everywhere.triu(keys - queries + 1)


@as_written
def scaled_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
    """Softmax of scaled scores."""
    ops.scaled_softmax_forward.check(input, scale)
    return _softmax(input, scale)


@as_written
def scaled_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """Gradient of :func:`scaled_softmax_forward`."""
    ops.scaled_softmax_backward.check(output_grad, softmax_output, scale)
    return _gradient(output_grad, softmax_output, scale)


@as_written
def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
    """Softmax of the scaled scores that a mask leaves visible."""
    ops.scaled_masked_softmax_forward.check(input, mask, scale)
    return _softmax(input, scale, mask.to(torch.bool))


@as_written
def scaled_masked_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """Gradient of :func:`scaled_masked_softmax_forward`."""
    ops.scaled_masked_softmax_backward.check(output_grad, softmax_output, scale)
    return _gradient(output_grad, softmax_output, scale)


@as_written
def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
    """Causal softmax of square scores."""
    ops.scaled_upper_triang_masked_softmax_forward.check(input, scale)
    return _softmax(input, scale, _future(input))


@as_written
def scaled_upper_triang_masked_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """Gradient of :func:`scaled_upper_triang_masked_softmax_forward`."""
    ops.scaled_upper_triang_masked_softmax_backward.check(output_grad, softmax_output, scale)
    return _gradient(output_grad, softmax_output, scale)


@as_written
def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
    """Causal softmax, the last query aligned with the last key."""
    ops.scaled_aligned_causal_masked_softmax_forward.check(input, scale)
    return _softmax(input, scale, _future(input))


@as_written
def scaled_aligned_causal_masked_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """Gradient of :func:`scaled_aligned_causal_masked_softmax_forward`."""
    ops.scaled_aligned_causal_masked_softmax_backward.check(output_grad, softmax_output, scale)
    return _gradient(output_grad, softmax_output, scale)
