"""What others offer for an operator, where it is installed: the peers of a measurement.

Each maker takes the operator's inputs (a list of tensors, in the contract's order) and
returns a function without arguments that does the same work, and whose result can be
compared with the operator's: its outputs in the contract's order, or the first few of
them. A peer that is not installed, or that refuses these inputs, is left out and named.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5
Work = Callable[[], Any]
Maker = Callable[[list[Tensor]], Work]


def _eager_rmsnorm_fwd(inputs: list[Tensor]) -> Work:
    x, weight = inputs
    return lambda: (F.rms_norm(x, weight.shape, weight, EPS),)


def _rms_formula(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()).to(x.dtype) * weight


def _compiled(formula: Callable[..., Tensor], inputs: list[Tensor]) -> Work:
    torch._dynamo.reset()  # else it stops compiling after a few shapes
    compiled = torch.compile(formula, dynamic=False)
    return lambda: (compiled(*inputs),)


def _compiled_autograd(formula: Callable[..., Tensor], dy: Tensor, leaves: list[Tensor]) -> Work:
    torch._dynamo.reset()
    return _autograd(torch.compile(formula, dynamic=False), dy, leaves)


def _autograd(formula: Callable[..., Tensor], dy: Tensor, leaves: list[Tensor]) -> Work:
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    output = formula(*leaves)
    return lambda: torch.autograd.grad(output, leaves, dy, retain_graph=True)


def _layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _rmsnorm_bwd_parts(inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    dy, x, _, gamma = inputs
    return dy, [x, gamma]


def _layernorm_bwd_parts(inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    dy, x, _, _, gamma = inputs
    return dy, [x, gamma, torch.zeros_like(gamma)]


def _torch_peers(op: str) -> Iterator[tuple[str, Maker]]:
    if op == "rmsnorm_fwd":
        yield "torch.eager", _eager_rmsnorm_fwd
        yield "torch.compile", lambda inputs: _compiled(_rms_formula, inputs)
    elif op == "layernorm_fwd":
        yield "torch.eager", lambda inputs: lambda: (_layer(*inputs),)
        yield "torch.compile", lambda inputs: _compiled(_layer, inputs)
    elif op == "rmsnorm_bwd":
        yield "torch.eager", lambda inputs: _autograd(_rms, *_rmsnorm_bwd_parts(inputs))
        yield (
            "torch.compile",
            lambda inputs: _compiled_autograd(_rms_formula, *_rmsnorm_bwd_parts(inputs)),
        )
    elif op == "layernorm_bwd":
        yield "torch.eager", lambda inputs: _autograd(_layer, *_layernorm_bwd_parts(inputs))
        yield (
            "torch.compile",
            lambda inputs: _compiled_autograd(_layer, *_layernorm_bwd_parts(inputs)),
        )


# Two of these packages hide a module behind a function of its name: hence import_module.


def _liger_peers(op: str) -> Iterator[tuple[str, Maker]]:
    from liger_kernel.ops import layer_norm, rms_norm

    def rms_bwd(inputs: list[Tensor]) -> Work:
        dy, x, _, gamma = inputs
        _, saved_x, rstd, block, warps, mode = rms_norm.rms_norm_forward(
            x, gamma, EPS, 0.0, "llama", None
        )
        return lambda: rms_norm.rms_norm_backward(
            dy, saved_x, gamma, rstd, 0.0, mode, block, warps, False, None
        )

    def layer_bwd(inputs: list[Tensor]) -> Work:
        dy, x, _, _, gamma = inputs
        bias = torch.zeros_like(gamma)
        _, saved_x, mean, rstd, *_ = layer_norm.layer_norm_forward(x, gamma, bias, EPS)
        return lambda: layer_norm.layer_norm_backward(dy, saved_x, gamma, bias, mean, rstd)

    makers: dict[str, Maker] = {
        "rmsnorm_fwd": lambda inputs: (
            lambda: rms_norm.rms_norm_forward(*inputs, EPS, 0.0, "llama", None)[:1]
        ),
        "layernorm_fwd": lambda inputs: lambda: layer_norm.layer_norm_forward(*inputs, EPS)[:1],
        "rmsnorm_bwd": rms_bwd,
        "layernorm_bwd": layer_bwd,
    }
    if op in makers:
        yield "liger-kernel", makers[op]


def _quack_peers(op: str) -> Iterator[tuple[str, Maker]]:
    rmsnorm = importlib.import_module("quack.rmsnorm")

    def layer_fwd(inputs: list[Tensor]) -> Work:
        x, weight, bias = inputs
        wide = weight.float(), bias.float()  # it takes float32 parameters only
        return lambda: (rmsnorm.layernorm_fwd(x, *wide, eps=EPS),)

    def rms_bwd(inputs: list[Tensor]) -> Work:
        dy, x, rsigma, gamma = inputs
        return lambda: rmsnorm.rmsnorm_bwd(x, gamma, dy, rsigma)[:2]

    makers: dict[str, Maker] = {
        "rmsnorm_fwd": lambda inputs: (
            lambda: rmsnorm.rmsnorm_fwd(*inputs, eps=EPS, store_rstd=True)[:1]
        ),
        "layernorm_fwd": layer_fwd,
        "rmsnorm_bwd": rms_bwd,
    }
    if op in makers:
        yield "quack", makers[op]


def _flag_gems_peers(op: str) -> Iterator[tuple[str, Maker]]:
    rms_norm = importlib.import_module("flag_gems.ops.rms_norm")

    def bwd(inputs: list[Tensor]) -> Work:
        dy, x, rsigma, gamma = inputs
        return lambda: rms_norm.rms_norm_backward(dy, x, rsigma, gamma.shape, gamma, EPS)

    makers: dict[str, Maker] = {
        "rmsnorm_fwd": lambda inputs: (
            lambda: rms_norm.rms_norm_forward(inputs[0], inputs[1].shape, inputs[1], EPS)[:1]
        ),
        "rmsnorm_bwd": bwd,
    }
    if op in makers:
        yield "flag_gems", makers[op]


FAMILIES = {
    "torch": _torch_peers,
    "liger-kernel": _liger_peers,
    "quack": _quack_peers,
    "flag_gems": _flag_gems_peers,
}


def peers(op: str, absent: dict[str, str]) -> Iterator[tuple[str, Maker]]:
    """Every peer of an operator; the absent ones are noted with the reason."""
    for name, family in FAMILIES.items():
        try:
            yield from list(family(op))
        except Exception as error:  # noqa: BLE001 - whatever keeps a peer out is reported
            absent[name] = f"{type(error).__name__}: {error}"
