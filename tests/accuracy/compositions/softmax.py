"""Scaled softmax in torch: a product, ``masked_fill``, ``softmax`` and its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _softmax(input: Tensor, scale: float, hidden: Tensor | None = None) -> tuple[Tensor]:
    scores = input * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return (torch.softmax(scores, -1),)


def _plain(input: Tensor, scale: float = 1.0) -> tuple[Tensor]:
    return _softmax(input, scale)


def _masked(input: Tensor, mask: Tensor, scale: float = 1.0) -> tuple[Tensor]:
    return _softmax(input, scale, mask != 0)


def _causal(input: Tensor, scale: float = 1.0) -> tuple[Tensor]:
    queries, keys = input.shape[-2:]
    ones = torch.ones(queries, keys, dtype=torch.bool, device=input.device)
    return _softmax(input, scale, ones.triu(1 + keys - queries))


def _backward(output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0) -> tuple[Tensor]:
    dtype = softmax_output.dtype
    grad = output_grad.to(dtype)
    return (torch._softmax_backward_data(grad, softmax_output, -1, dtype) * scale,)


FORWARDS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "scaled_softmax": _plain,
    "scaled_masked_softmax": _masked,
    "scaled_upper_triang_masked_softmax": _causal,
    "scaled_aligned_causal_masked_softmax": _causal,
}

COMPOSITIONS: dict[str, Callable[..., tuple[Any, ...]]] = {
    **{f"{name}_forward": forward for name, forward in FORWARDS.items()},
    **{f"{name}_backward": _backward for name in FORWARDS},
}
