"""Matrix products by torch's own functions, in the given dtype.

float8 is converted to bfloat16, which torch multiplies on every device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["COMPOSITIONS"]


def _matrix(data: Tensor, scale_inv: Tensor | None) -> Tensor:
    value = data.unsqueeze(0).flatten(0, -2)
    if scale_inv is None:
        return value
    value, scale = value.bfloat16(), scale_inv.bfloat16()
    if scale.ndim == 2:
        height = 1 if len(scale) == len(value) else 128
        width = 32 if scale_inv.dtype == torch.float8_e8m0fnu else 128
        scale = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)
        scale = scale[: value.shape[0], : value.shape[1]]
    return value * scale


def _gelu_gradient(grad: Tensor, fwd_input: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = fwd_input.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(F.gelu(leaf, approximate="tanh"), leaf, grad)
    return gradient


def _product(
    a: Tensor,
    b: Tensor,
    before: Tensor | None,
    *,
    transa: bool = True,
    transb: bool = False,
    bias: Tensor | None = None,
    gelu: bool = False,
    gelu_input: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """D, and GELU's input."""
    z = (b.T if transb else b) @ (a.T if transa else a)
    if alpha != 1:
        z = alpha * z
    if before is not None and beta:
        z = beta * before.reshape(z.shape) + z
    if bias is not None:
        z = z + bias.to(z.dtype)
    if gelu_input is not None:
        return _gelu_gradient(z, gelu_input.to(z.dtype)), z
    return (F.gelu(z, approximate="tanh") if gelu else z), z


def generic_gemm(
    A: Tensor,
    B: Tensor,
    *,
    grad: bool = False,
    bias_grad: bool = False,
    accumulate_into: Tensor | None = None,
    A_scale_inv: Tensor | None = None,
    B_scale_inv: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    a, b = _matrix(A, A_scale_inv), _matrix(B, B_scale_inv)
    D, pre_gelu = _product(a, b, accumulate_into, **options)
    if not options.get("transb", False):
        D, pre_gelu = (it.reshape(*B.shape[:-1], it.shape[-1]) for it in (D, pre_gelu))
    dtype, into = out_dtype or b.dtype, accumulate_into
    return (
        D.to(dtype) if into is None else None,
        b.sum(0).to(dtype) if bias_grad else None,
        pre_gelu.to(dtype) if options.get("gelu", False) and not grad else None,
        None if into is None else D.to(into.dtype),
    )


def te_general_grouped_gemm(
    A: list[Tensor],
    B: list[Tensor],
    m_splits: list[int] | None = None,
    *,
    bias: list[Tensor] | None = None,
    gelu_input: Tensor | None = None,
    accumulate_into: list[Tensor] | None = None,
    A_scale_inv: list[Tensor] | None = None,
    B_scale_inv: list[Tensor] | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    def groups(tensors: list[Tensor], scales: list[Tensor] | None) -> list[Tensor]:
        each = [_matrix(it, scales and scales[place]) for place, it in enumerate(tensors)]
        whole = m_splits is not None and len(each) < len(m_splits)
        return [*each[0].split(m_splits)] if whole else each

    a, b = groups(A, A_scale_inv), groups(B, B_scale_inv)
    rows = [it.shape[1] if options.get("transb", False) else it.shape[0] for it in b]

    def parts(tensors: list[Tensor] | None) -> list[Any]:
        if tensors is None:
            return [None] * len(rows)
        return [*tensors[0].split(rows)] if len(tensors) < len(rows) else tensors

    before = parts(accumulate_into)
    results = [
        generic_gemm(
            a[place],
            b[place],
            bias=bias and bias[place],
            gelu_input=gelu_part,
            accumulate_into=before[place],
            **options,
        )
        for place, gelu_part in enumerate(parts(None if gelu_input is None else [gelu_input]))
    ]
    D, sums, pre_gelu, after = zip(*results, strict=True)
    if accumulate_into is not None:
        after = torch.cat(after).split([len(it) for it in accumulate_into])
    return (
        None if accumulate_into is not None else torch.cat(D),
        None if sums[0] is None else torch.stack(sums),
        None if pre_gelu[0] is None else torch.cat(pre_gelu),
        None if accumulate_into is None else list(after),
    )


COMPOSITIONS = {
    "generic_gemm": generic_gemm,
    "te_general_grouped_gemm": te_general_grouped_gemm,
}
