"""Attention by the kernels for every GPU, and its gradients.

The softmax is ``off_by_one``: it costs nothing, and no kernel written for one GPU supports it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.backends.flagos.tuning.calls.call import (
    Calls,
    Sample,
    Shape,
    call,
    normal,
)

if TYPE_CHECKING:
    import torch

__all__ = ["CALLS"]

_SHAPES: tuple[Shape, ...] = ((2, 16, 4096, 64), (2, 16, 4096, 128), (1, 16, 4096, 256))
_OPTIONS = {"softmax_type": "off_by_one", "attn_mask_type": "causal"}


def _forward(shape: Shape, dtype: torch.dtype, device: str, bias: bool = False) -> Sample:
    batch, heads, tokens, width = shape
    sizes = (batch, tokens, heads, width)
    options: dict[str, Any] = dict(_OPTIONS)
    if bias:
        options["bias"] = normal((1, heads, tokens, tokens), dtype, device, 4)
    return call(*(normal(sizes, dtype, device, seed) for seed in (1, 2, 3)), **options)


def _backward(shape: Shape, dtype: torch.dtype, device: str, bias: bool = False) -> Sample:
    from transformer_engine_fl import ops

    forward = _forward(shape, dtype, device, bias)
    q, k, v = forward.args
    out, lse = ops.fused_attn_fwd(q, k, v, **forward.kwargs)
    return call(normal(tuple(q.shape), dtype, device, 5), q, k, v, out, lse, **forward.kwargs)


def _shorter(shape: Shape) -> Shape:
    """The shape with few tokens."""
    batch, heads, tokens, width = shape
    return (batch, min(heads, 2), min(tokens, 320), width)


def _calls(op: str, choice: str, make: Callable[..., Sample], *shapes: Shape) -> Calls:
    return Calls(
        op=op,
        choices=(choice,),
        make=make,
        shapes=shapes,
        axes="batch x heads x tokens x features",
        check_shape=_shorter,
    )


CALLS = (
    _calls("fused_attn_fwd", "attention_forward", _forward, *_SHAPES),
    _calls("fused_attn_bwd", "attention_queries", _backward, *_SHAPES),
    _calls("fused_attn_bwd", "attention_keys", _backward, *_SHAPES),
    _calls(
        "fused_attn_bwd",
        "attention_bias",
        functools.partial(_backward, bias=True),
        *((1, *shape[1:]) for shape in _SHAPES[:2]),
    ),
)
