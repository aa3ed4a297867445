"""The activations in torch: its own functions, products, and autograd over both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Composition = Callable[..., tuple[Any, ...]]
Function = Callable[..., Tensor]


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _srelu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _clamped_swiglu(input: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    a, b = input.chunk(2, -1)
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    return a * torch.sigmoid(alpha * a) * (b + 1)


def _gated(function: Function) -> Function:
    def gated(input: Tensor) -> Tensor:
        a, b = input.chunk(2, -1)
        return function(a) * b

    return gated


def _forward(function: Function) -> Composition:
    return lambda input, *args, **options: (function(input, *args, **options),)


def _gradient(
    function: Function, grad: Tensor, fwd_input: Tensor, *args: float, **options: float
) -> Tensor:
    leaf = fwd_input.detach().requires_grad_()
    with torch.enable_grad():
        output = function(leaf, *args, **options)
    return torch.autograd.grad(output, leaf, grad.to(output.dtype))[0]


def _backward(function: Function) -> Composition:
    return lambda *args, **options: (_gradient(function, *args, **options),)


def _bias_backward(function: Function) -> Composition:
    def backward(grad: Tensor, fwd_input: Tensor) -> tuple[Tensor, Tensor]:
        dact = _gradient(function, grad, fwd_input)
        rows = dact.shape[:-1].numel()
        return dact.reshape(rows, dact.shape[-1]).sum(0), dact

    return backward


PLAIN: dict[str, Function] = {
    "gelu": _gelu,
    "qgelu": _qgelu,
    "relu": F.relu,
    "srelu": _srelu,
    "silu": F.silu,
}
GATED: dict[str, Function] = {
    "glu": _gated(torch.sigmoid),
    "geglu": _gated(_gelu),
    "qgeglu": _gated(_qgelu),
    "reglu": _gated(F.relu),
    "sreglu": _gated(_srelu),
    "swiglu": _gated(F.silu),
}

COMPOSITIONS: dict[str, Composition] = {
    **{name: _forward(it) for name, it in (PLAIN | GATED).items()},
    **{f"d{name}": _backward(it) for name, it in (PLAIN | GATED).items()},
    **{f"dbias_d{name}": _bias_backward(it) for name, it in PLAIN.items()},
    "clamped_swiglu": _forward(_clamped_swiglu),
    "clamped_dswiglu": _backward(_clamped_swiglu),
}
