"""liger-kernel's functions under the contracts' signatures.

Each function checks the arguments against the contract, makes them contiguous as liger-kernel
expects, and calls it. Options that liger-kernel does not have, or gets wrong, are declined.
"""

from __future__ import annotations

import torch
from liger_kernel import ops as liger
from liger_kernel.ops.softmax import _softmax_backward, _softmax_forward
from liger_kernel.ops.swiglu import swiglu_fused_gate_up_backward, swiglu_fused_gate_up_forward
from liger_kernel.ops.utils import calculate_settings, device_context
from torch import Tensor

from te_fl_liger import OPERATORS, interpreted
from te_fl_liger.interpreted import number
from transformer_engine_fl import NotSupportedError, ops
from transformer_engine_fl.vendors.taking import Taker, writable_copy

__all__ = list(OPERATORS)

MOST_COLUMNS = 65536
"""The widest row, as a program holds a whole row in one block."""

CASTING, CASTING_MODE = "gemma", 1
"""The casting mode in which norms are float32 throughout, as in the contracts, and its number."""

TAKER = Taker("liger-kernel's kernels")

interpreted.fill_in()


def _block(op: str, columns: int) -> tuple[int, int]:
    """(block size, warps) of a program that holds a row."""
    if columns > MOST_COLUMNS:
        raise NotSupportedError(
            f"{op}: {columns} columns; a block of liger-kernel's holds {MOST_COLUMNS}"
        )
    block, warps = calculate_settings(columns)
    return block, warps


def _norm_inputs(op: str, **tensors: Tensor) -> list[Tensor]:
    """The tensors of a norm, contiguous; the first has the rows."""
    dense = TAKER.dense(op, **tensors)
    _block(op, dense[0].shape[-1])
    return dense


# ------------------------------------------------------------------------- normalization


def rmsnorm_fwd(
    input: Tensor, weight: Tensor, eps: float = 1e-5, *, zero_centered_gamma: bool = False
) -> tuple[Tensor, Tensor]:
    """``rmsnorm_fwd`` of the contract."""
    ops.rmsnorm_fwd.check(input, weight, eps, zero_centered_gamma=zero_centered_gamma)
    x, w = _norm_inputs("rmsnorm_fwd", input=input, weight=weight)
    output, _, rsigma, *_ = liger.rms_norm_forward(
        x, w, number(eps), number(zero_centered_gamma), CASTING, None
    )
    return output, rsigma


def rmsnorm_bwd(
    dy: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, *, zero_centered_gamma: bool = False
) -> tuple[Tensor, Tensor]:
    """``rmsnorm_bwd`` of the contract."""
    op = "rmsnorm_bwd"
    ops.rmsnorm_bwd.check(dy, x, rsigma, gamma, zero_centered_gamma=zero_centered_gamma)
    x, dy, rsigma, gamma = _norm_inputs(op, x=x, dy=dy, rsigma=rsigma, gamma=gamma)
    TAKER.same_dtype(op, dy=dy, x=x)  # liger-kernel allocates dx like dy
    columns = x.shape[-1]
    block, warps = _block(op, columns)
    dx, dgamma = liger.rms_norm_backward(
        dy,
        x.view(-1, columns),
        gamma,
        rsigma,
        number(zero_centered_gamma),
        CASTING_MODE,
        block,
        warps,
        False,
        None,
    )
    return dx, dgamma


def rmsnorm_fwd_add(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``rmsnorm_fwd_add`` of the contract."""
    op = "rmsnorm_fwd_add"
    ops.rmsnorm_fwd_add.check(input, residual, weight, eps, zero_centered_gamma=zero_centered_gamma)
    x, add, w = _norm_inputs(op, input=input, residual=residual, weight=weight)
    with device_context(x.device):
        output, total, rsigma, *_ = liger.fused_add_rms_norm_forward(
            x, add, w, number(eps), number(zero_centered_gamma), CASTING
        )
    return output, total, rsigma


def rmsnorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """``rmsnorm_bwd_add`` of the contract."""
    op = "rmsnorm_bwd_add"
    ops.rmsnorm_bwd_add.check(dz, x, add, rsigma, gamma, zero_centered_gamma=zero_centered_gamma)
    x, dz, add, rsigma, gamma = _norm_inputs(op, x=x, dz=dz, add=add, rsigma=rsigma, gamma=gamma)
    TAKER.same_dtype(op, dz=dz, x=x)
    block, warps = _block(op, x.shape[-1])
    with device_context(x.device):
        dx, _, dgamma = liger.fused_add_rms_norm_backward(
            dz,
            add,
            x,
            gamma,
            rsigma,
            number(zero_centered_gamma),
            CASTING_MODE,
            block,
            warps,
            2,
            False,
        )
    return dx, dgamma


def layernorm_fwd(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """``layernorm_fwd`` of the contract."""
    ops.layernorm_fwd.check(input, weight, bias, eps)
    x, w = _norm_inputs("layernorm_fwd", input=input, weight=weight)
    (b,) = (torch.zeros_like(w),) if bias is None else TAKER.dense("layernorm_fwd", bias=bias)
    with device_context(x.device):
        output, _, mu, rsigma, *_ = liger.layer_norm_forward(x, w, b, number(eps))
    return output, mu, rsigma


def layernorm_bwd(
    dy: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``layernorm_bwd`` of the contract."""
    op = "layernorm_bwd"
    ops.layernorm_bwd.check(dy, x, mu, rsigma, gamma)
    x, dy, mu, rsigma, gamma = _norm_inputs(op, x=x, dy=dy, mu=mu, rsigma=rsigma, gamma=gamma)
    with device_context(x.device):
        dx, dgamma, dbeta = liger.layer_norm_backward(
            dy, x.view(-1, x.shape[-1]), gamma, gamma, mu, rsigma
        )
    return dx, dgamma, dbeta


# -------------------------------------------------------------------------- activations


def _halves(op: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of the two halves of a gated input: liger-kernel's backward writes over them."""
    _block(op, tensor.shape[-1] // 2)
    first, second = tensor.chunk(2, -1)
    return writable_copy(first), writable_copy(second)


def geglu(input: Tensor) -> Tensor:
    """``geglu`` of the contract."""
    ops.geglu.check(input)
    (x,) = TAKER.strided("geglu", input=input)
    return liger.geglu_forward(*_halves("geglu", x))[2]


def dgeglu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """``dgeglu`` of the contract."""
    ops.dgeglu.check(grad, fwd_input)
    x, dy = TAKER.strided("dgeglu", fwd_input=fwd_input, grad=grad)
    TAKER.same_dtype("dgeglu", grad=dy, fwd_input=x)
    return torch.cat(liger.geglu_backward(*_halves("dgeglu", x), dy.contiguous()), -1)


def swiglu(input: Tensor) -> Tensor:
    """``swiglu`` of the contract."""
    ops.swiglu.check(input)
    (x,) = TAKER.dense("swiglu", input=input)
    _block("swiglu", x.shape[-1] // 2)
    with device_context(x.device):
        return swiglu_fused_gate_up_forward(x)[1]


def dswiglu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """``dswiglu`` of the contract."""
    ops.dswiglu.check(grad, fwd_input)
    x, dy = TAKER.dense("dswiglu", fwd_input=fwd_input, grad=grad)
    _block("dswiglu", x.shape[-1] // 2)
    with device_context(x.device):
        return swiglu_fused_gate_up_backward(x, dy).view(x.shape)


def _rows(op: str, tensor: Tensor) -> Tensor:
    """The tensor as rows; a tensor without dimensions is one row of one element."""
    columns = tensor.shape[-1] if tensor.dim() else 1
    _block(op, columns)
    return tensor.view(-1, columns)


def srelu(input: Tensor) -> Tensor:
    """``srelu`` of the contract."""
    ops.srelu.check(input)
    (x,) = TAKER.dense("srelu", input=input)
    with device_context(x.device):
        return liger.relu_squared_forward(_rows("srelu", x)).view(x.shape)


def dsrelu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """``dsrelu`` of the contract."""
    ops.dsrelu.check(grad, fwd_input)
    x, dy = TAKER.dense("dsrelu", fwd_input=fwd_input, grad=grad)
    TAKER.same_dtype("dsrelu", grad=dy, fwd_input=x)
    with device_context(x.device):
        dx = liger.relu_squared_backward(_rows("dsrelu", x), _rows("dsrelu", dy))
    return dx.view(x.shape)


# ------------------------------------------------------------------------------- softmax


def scaled_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
    """``scaled_softmax_forward`` of the contract, with a scale of 1."""
    op = "scaled_softmax_forward"
    ops.scaled_softmax_forward.check(input, scale)
    (x,) = TAKER.dense(op, input=input)
    _no_scale(op, scale)
    _block(op, x.shape[-1])
    with device_context(x.device):
        return _softmax_forward(x)[0]


def scaled_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """``scaled_softmax_backward`` of the contract, with a scale of 1."""
    op = "scaled_softmax_backward"
    ops.scaled_softmax_backward.check(output_grad, softmax_output, scale)
    y, dy = TAKER.dense(op, softmax_output=softmax_output, output_grad=output_grad)
    TAKER.same_dtype(op, output_grad=dy, softmax_output=y)
    _no_scale(op, scale)
    block, warps = _block(op, y.shape[-1])
    with device_context(y.device):
        return _softmax_backward(dy, y, block, warps, False)


def _no_scale(op: str, scale: float) -> None:
    if scale != 1.0:
        raise NotSupportedError(f"{op}: liger-kernel's softmax has no scale")
