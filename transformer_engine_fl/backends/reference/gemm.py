"""Matrix products in plain PyTorch: the definitions, in float32 (float64 for float64).

Groups are multiplied one after the other. The host does not wait for the device, as the sizes of
groups are host integers. On CUDA devices float32 products follow torch's setting for TF32: the
contracts' tolerances hold while it is off, which is torch's default.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends.reference._values import as_output, as_written
from transformer_engine_fl.backends.reference.activation import GELU
from transformer_engine_fl.ops._dtypes import math_dtype

__all__ = ["generic_gemm", "te_general_grouped_gemm"]


def _matrix(tensor: Tensor) -> Tensor:
    """The tensor as a matrix: all dimensions but the last are flattened to rows."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _operand(data: Tensor, scale_inv: Tensor | None) -> Tensor:
    """The values that data and scales stand for, as a matrix in the math dtype."""
    value = _matrix(data).to(math_dtype(data.dtype))
    if scale_inv is None:
        return value
    if scale_inv.ndim == 1:
        return value * scale_inv
    height = 1 if scale_inv.shape[0] == value.shape[0] else 128
    width = 32 if scale_inv.dtype == torch.float8_e8m0fnu else 128
    # Indexed, because inductor reads repeat_interleave followed by a slice out of bounds.
    row, column = (
        torch.arange(size, device=data.device) // block
        for size, block in zip(value.shape, (height, width), strict=True)
    )
    return value * scale_inv.float()[row][:, column]


def _z(
    a: Tensor,
    b: Tensor,
    transa: bool,
    transb: bool,
    alpha: float,
    beta: float,
    accumulated: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """The product plus what is added to it, unrounded."""
    z = alpha * ((b.t() if transb else b) @ (a.t() if transa else a))
    if accumulated is not None and beta != 0:
        z = z + beta * _matrix(accumulated).to(z.dtype)
    return z if bias is None else z + bias.to(z.dtype)


def _finished(z: Tensor, gelu: bool, gelu_input: Tensor | None) -> Tensor:
    """D from z, unrounded."""
    if gelu_input is not None:
        return z * GELU.slope(_matrix(gelu_input).to(z.dtype))
    return GELU.value(z) if gelu else z


@as_written
def generic_gemm(
    A: Tensor,
    B: Tensor,
    *,
    transa: bool = True,
    transb: bool = False,
    bias: Tensor | None = None,
    gelu: bool = False,
    gelu_input: Tensor | None = None,
    grad: bool = False,
    bias_grad: bool = False,
    alpha: float = 1.0,
    beta: float = 1.0,
    accumulate_into: Tensor | None = None,
    A_scale_inv: Tensor | None = None,
    B_scale_inv: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Product of two matrices, with its epilogue."""
    ops.generic_gemm.check(
        A,
        B,
        transa=transa,
        transb=transb,
        bias=bias,
        gelu=gelu,
        gelu_input=gelu_input,
        grad=grad,
        bias_grad=bias_grad,
        alpha=alpha,
        beta=beta,
        accumulate_into=accumulate_into,
        A_scale_inv=A_scale_inv,
        B_scale_inv=B_scale_inv,
        out_dtype=out_dtype,
    )
    a, b = _operand(A, A_scale_inv), _operand(B, B_scale_inv)
    z = _z(a, b, transa, transb, alpha, beta, accumulate_into, bias)
    D = _finished(z, gelu, gelu_input)
    shape = D.shape if transb else (*B.shape[:-1], D.shape[-1])
    dtype = out_dtype or (torch.bfloat16 if B_scale_inv is not None else B.dtype)
    if accumulate_into is not None:
        accumulate_into.copy_(D.reshape(shape))
    return (
        None if accumulate_into is not None else as_output(D.reshape(shape), dtype),
        as_output(b.sum(0), dtype) if bias_grad else None,
        as_output(z.reshape(shape), dtype) if gelu and not grad else None,
    )


@as_written
def te_general_grouped_gemm(
    A: list[Tensor],
    B: list[Tensor],
    m_splits: list[int] | None = None,
    *,
    transa: bool = True,
    transb: bool = False,
    bias: list[Tensor] | None = None,
    gelu: bool = False,
    gelu_input: Tensor | None = None,
    grad: bool = False,
    bias_grad: bool = False,
    alpha: float = 1.0,
    beta: float = 1.0,
    accumulate_into: list[Tensor] | None = None,
    A_scale_inv: list[Tensor] | None = None,
    B_scale_inv: list[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Product with epilogue for each of several groups, one after the other."""
    ops.te_general_grouped_gemm.check(
        A,
        B,
        m_splits,
        transa=transa,
        transb=transb,
        bias=bias,
        gelu=gelu,
        gelu_input=gelu_input,
        grad=grad,
        bias_grad=bias_grad,
        alpha=alpha,
        beta=beta,
        accumulate_into=accumulate_into,
        A_scale_inv=A_scale_inv,
        B_scale_inv=B_scale_inv,
        out_dtype=out_dtype,
    )
    a, b = _groups(A, A_scale_inv, m_splits), _groups(B, B_scale_inv, m_splits)
    rows = [it.shape[1] if transb else it.shape[0] for it in b]
    into: list[Tensor] | None = None
    if accumulate_into is not None:
        whole = len(accumulate_into) < len(rows)
        into = list(torch.split(accumulate_into[0], rows)) if whole else list(accumulate_into)
    z = torch.cat(
        [
            _z(
                a[i],
                b[i],
                transa,
                transb,
                alpha,
                beta,
                None if into is None else into[i],
                None if bias is None else bias[i],
            )
            for i in range(len(rows))
        ]
    )
    D = _finished(z, gelu, gelu_input)
    if into is not None:
        for place, part in zip(into, torch.split(D, rows), strict=True):
            place.copy_(part)
    dtype = out_dtype or (torch.bfloat16 if B_scale_inv is not None else B[0].dtype)
    return (
        None if into is not None else as_output(D, dtype),
        as_output(torch.stack([it.sum(0) for it in b]), dtype) if bias_grad else None,
        as_output(z, dtype) if gelu and not grad else None,
    )


def _groups(
    tensors: list[Tensor], scales: list[Tensor] | None, m_splits: list[int] | None
) -> list[Tensor]:
    """The matrix of each group."""
    values = [_operand(it, None if scales is None else scales[i]) for i, it in enumerate(tensors)]
    if m_splits is None or len(values) == len(m_splits):
        return values
    return list(torch.split(values[0], m_splits))
