"""Activations in plain PyTorch, in float32 (float64 for float64).

A table defines each activation once, by its value and its derivative. The elementwise operators,
the gated ones and those with a bias gradient are derived from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends.reference._values import as_output, as_written, over_rows
from transformer_engine_fl.core.contract import Contract
from transformer_engine_fl.ops._dtypes import math_dtype

__all__ = [
    "clamped_dswiglu",
    "clamped_swiglu",
    "dbias_dgelu",
    "dbias_dqgelu",
    "dbias_drelu",
    "dbias_dsilu",
    "dbias_dsrelu",
    "dgeglu",
    "dgelu",
    "dglu",
    "dqgeglu",
    "dqgelu",
    "dreglu",
    "drelu",
    "dsilu",
    "dsreglu",
    "dsrelu",
    "dswiglu",
    "geglu",
    "gelu",
    "glu",
    "qgeglu",
    "qgelu",
    "reglu",
    "relu",
    "silu",
    "sreglu",
    "srelu",
    "swiglu",
]

Elementwise = Callable[[Tensor], Tensor]


# --------------------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class Activation:
    """An elementwise function and its derivative."""

    value: Elementwise
    slope: Elementwise


def _swish(logit: Elementwise, logit_slope: Elementwise) -> Activation:
    """``x * sigmoid(logit(x))``, without cancellation, and without 0 * inf for large x."""

    def value(x: Tensor) -> Tensor:
        z = logit(x)
        # sigmoid(z) = 1 - sigmoid(-z): the subtracted term is small, and so is its error.
        taken_from = (x > 0) & x.isfinite()
        return torch.where(taken_from, x - x * (-z).sigmoid(), x * z.sigmoid())

    def slope(x: Tensor) -> Tensor:
        z = logit(x)
        return z.sigmoid() + x * z.sigmoid() * (-z).sigmoid() * logit_slope(x)

    return Activation(value, slope)


def _scaled_swish(alpha: float) -> Activation:
    # As a product, in which an alpha beyond the dtype becomes infinite; full_like would raise.
    return _swish(lambda x: alpha * x, lambda x: alpha * torch.ones_like(x))


# (1 + tanh(u)) / 2 is sigmoid(2 * u), which is precise even where tanh is near -1.
# At |x| = 32 it is 0 or 1 even in float64; for larger x, x ** 3 could only overflow.
_TWO_C = 2 * math.sqrt(2 / math.pi)
_FAR = 32.0


def _gelu_logit(x: Tensor) -> Tensor:
    x = x.clamp(-_FAR, _FAR)
    return _TWO_C * (x + 0.044715 * x**3)


def _gelu_logit_slope(x: Tensor) -> Tensor:
    x = x.clamp(-_FAR, _FAR)
    return _TWO_C * (1 + 3 * 0.044715 * x**2)


GELU = _swish(_gelu_logit, _gelu_logit_slope)
QGELU = _scaled_swish(1.702)
SILU = _scaled_swish(1.0)
RELU = Activation(lambda x: x.relu(), lambda x: (x <= 0).logical_not().to(x.dtype))
SRELU = Activation(lambda x: x.relu().square(), lambda x: 2 * x.relu())
SIGMOID = Activation(lambda x: x.sigmoid(), lambda x: x.sigmoid() * (-x).sigmoid())


# ----------------------------------------------------------------------- the operators


def _math(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(math_dtype(like.dtype))


def _gated_slopes(activation: Activation, grad: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    """The gradients of both halves of ``activation(a) * b``."""
    return [grad * b * activation.slope(a), grad * activation.value(a)]


Forward = Callable[[Tensor], Tensor]
Backward = Callable[[Tensor, Tensor], Tensor]
BiasBackward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Function = TypeVar("Function", bound=Callable[..., Any])


def _implementing(contract: Contract[..., Any]) -> Callable[[Function], Function]:
    """Decorate a function: its operator's name and first docstring line, and :func:`as_written`."""

    def decorate(function: Function) -> Function:
        function.__name__ = function.__qualname__ = contract.name
        function.__doc__ = (contract.__doc__ or "").partition("\n")[0]
        return as_written(function)

    return decorate


def _forward(contract: Contract[..., Tensor], activation: Activation) -> Forward:
    @_implementing(contract)
    def forward(input: Tensor) -> Tensor:
        contract.check(input)
        return as_output(activation.value(_math(input, input)), input.dtype)

    return forward


def _backward(contract: Contract[..., Tensor], activation: Activation) -> Backward:
    @_implementing(contract)
    def backward(grad: Tensor, fwd_input: Tensor) -> Tensor:
        contract.check(grad, fwd_input)
        dx = _math(grad, fwd_input) * activation.slope(_math(fwd_input, fwd_input))
        return as_output(dx, fwd_input.dtype)

    return backward


def _bias_backward(
    contract: Contract[..., tuple[Tensor, Tensor]], activation: Activation
) -> BiasBackward:
    @_implementing(contract)
    def backward(grad: Tensor, fwd_input: Tensor) -> tuple[Tensor, Tensor]:
        contract.check(grad, fwd_input)
        dact = _math(grad, fwd_input) * activation.slope(_math(fwd_input, fwd_input))
        return over_rows(dact).to(grad.dtype), as_output(dact, fwd_input.dtype)

    return backward


def _gated_forward(contract: Contract[..., Tensor], activation: Activation) -> Forward:
    @_implementing(contract)
    def forward(input: Tensor) -> Tensor:
        contract.check(input)
        a, b = _math(input, input).chunk(2, -1)
        return as_output(activation.value(a) * b, input.dtype)

    return forward


def _gated_backward(contract: Contract[..., Tensor], activation: Activation) -> Backward:
    @_implementing(contract)
    def backward(grad: Tensor, fwd_input: Tensor) -> Tensor:
        contract.check(grad, fwd_input)
        a, b = _math(fwd_input, fwd_input).chunk(2, -1)
        halves = _gated_slopes(activation, _math(grad, fwd_input), a, b)
        return as_output(torch.cat(halves, -1), fwd_input.dtype)

    return backward


gelu = _forward(ops.gelu, GELU)
qgelu = _forward(ops.qgelu, QGELU)
relu = _forward(ops.relu, RELU)
srelu = _forward(ops.srelu, SRELU)
silu = _forward(ops.silu, SILU)

dgelu = _backward(ops.dgelu, GELU)
dqgelu = _backward(ops.dqgelu, QGELU)
drelu = _backward(ops.drelu, RELU)
dsrelu = _backward(ops.dsrelu, SRELU)
dsilu = _backward(ops.dsilu, SILU)

dbias_dgelu = _bias_backward(ops.dbias_dgelu, GELU)
dbias_dqgelu = _bias_backward(ops.dbias_dqgelu, QGELU)
dbias_drelu = _bias_backward(ops.dbias_drelu, RELU)
dbias_dsrelu = _bias_backward(ops.dbias_dsrelu, SRELU)
dbias_dsilu = _bias_backward(ops.dbias_dsilu, SILU)

glu = _gated_forward(ops.glu, SIGMOID)
geglu = _gated_forward(ops.geglu, GELU)
qgeglu = _gated_forward(ops.qgeglu, QGELU)
reglu = _gated_forward(ops.reglu, RELU)
sreglu = _gated_forward(ops.sreglu, SRELU)
swiglu = _gated_forward(ops.swiglu, SILU)

dglu = _gated_backward(ops.dglu, SIGMOID)
dgeglu = _gated_backward(ops.dgeglu, GELU)
dqgeglu = _gated_backward(ops.dqgeglu, QGELU)
dreglu = _gated_backward(ops.dreglu, RELU)
dsreglu = _gated_backward(ops.dsreglu, SRELU)
dswiglu = _gated_backward(ops.dswiglu, SILU)


@as_written
def clamped_swiglu(input: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """Gated swish of clamped values, with 1 added to the gate."""
    ops.clamped_swiglu.check(input, limit, alpha)
    a, b = _math(input, input).chunk(2, -1)
    gate = b.clamp(-limit, limit) + 1
    return as_output(_scaled_swish(alpha).value(a.clamp(max=limit)) * gate, input.dtype)


@as_written
def clamped_dswiglu(
    grad: Tensor, fwd_input: Tensor, limit: float = 7.0, alpha: float = 1.702
) -> Tensor:
    """Gradient of :func:`clamped_swiglu`: 0 for values that were clamped."""
    ops.clamped_dswiglu.check(grad, fwd_input, limit, alpha)
    a, b = _math(fwd_input, fwd_input).chunk(2, -1)
    gate = b.clamp(-limit, limit) + 1
    da, db = _gated_slopes(_scaled_swish(alpha), _math(grad, fwd_input), a.clamp(max=limit), gate)
    halves = [da.masked_fill(a > limit, 0), db.masked_fill(b.abs() > limit, 0)]
    return as_output(torch.cat(halves, -1), fwd_input.dtype)
