"""The tolerance of attention allows for rounded weights, in long sequences as in short ones.

Every implementation for tensor cores rounds the weights, and their gradients, before the products
that follow. The resulting error must not exceed the tolerance as the length grows.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from transformer_engine_fl import testing
from transformer_engine_fl.ops.attention import BACKWARD_TOLERANCE, FORWARD_TOLERANCE

WIDTH = 64
LENGTHS = (128, 512, 2048)


def attention(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, rounded: torch.dtype | None
) -> tuple[Tensor, ...]:
    """Causal attention and its gradients, in the inputs' dtype except for what is rounded."""

    def as_multiplied(weights: Tensor) -> Tensor:
        return weights if rounded is None else weights.to(rounded).to(weights.dtype)

    scale = 1 / math.sqrt(WIDTH)
    scores = q @ k.mT * scale
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    y = as_multiplied(weights) @ v
    inner = weights * (dy @ v.mT - (dy * y).sum(-1, keepdim=True))
    dq = as_multiplied(inner) @ k * scale
    dk = as_multiplied(inner).mT @ q * scale
    return y, dq, dk, as_multiplied(weights).mT @ dy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_weights_stay_within_at_every_length(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    tolerances = (FORWARD_TOLERANCE[name], *3 * (BACKWARD_TOLERANCE[name],))
    generator = torch.Generator().manual_seed(0)
    worst = []
    for length in LENGTHS:
        given = [torch.randn(length, WIDTH, generator=generator).to(dtype) for _ in range(4)]
        right = attention(*(it.double() for it in given), None)
        found = attention(*(it.float() for it in given), dtype)
        ratios = [
            testing.compare(got.to(dtype), want, tolerance).ratio
            for got, want, tolerance in zip(found, right, tolerances, strict=True)
        ]
        worst.append(max(ratios))
    assert max(worst) < 0.75, worst
    assert max(worst) < 1.5 * min(worst), worst
