"""Products of two matrices, as in the forward of a linear layer: x W^T.

With block scales: 128 x 128 squares of the weight and 1 x 128 blocks of x; 1 x 128 blocks of both,
of which one operand's lie across the summed terms, as in the gradient of a weight; and MX blocks of
both.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from transformer_engine_fl.backends.flagos.tuning.calls.call import (
    Calls,
    Sample,
    Shape,
    call,
    normal,
)

__all__ = ["CALLS"]

# Few tokens, as in inference, and many, as in training.
_SHAPES: tuple[Shape, ...] = tuple(
    (rows, columns, 4096) for rows in (64, 512, 4096, 8192) for columns in (4096, 8192, 16384)
)


def _plain(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    m, n, k = shape
    return call(normal((n, k), dtype, device, 1), normal((m, k), dtype, device, 2))


def _float8(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    weight, x = (it.to(dtype) for it in _plain(shape, torch.bfloat16, device).args)
    scale = torch.full((1,), 0.5, device=device)
    return call(weight, x, A_scale_inv=scale, B_scale_inv=scale.clone())


def _steps(shape: Shape, dtype: torch.dtype, device: str, transposed: bool = False) -> Sample:
    m, n, k = shape
    weight = normal((k, n) if transposed else (n, k), torch.bfloat16, device, 1)
    x = normal((m, k), torch.bfloat16, device, 2)
    height = 1 if transposed else 128
    of_weight = _scales((weight.shape[0], height), (weight.shape[1], 128), device)
    of_x = _scales((m, 1), (k, 128), device)
    data = (it.to(dtype) for it in (weight, x))
    return call(*data, transa=not transposed, A_scale_inv=of_weight, B_scale_inv=of_x)


def _scales(rows: tuple[int, int], columns: tuple[int, int], device: str) -> Tensor:
    """Scales of blocks; for each side its number of elements and a block's."""
    shape = [-(-size // block) for size, block in (rows, columns)]
    return torch.full(shape, 0.5, device=device)


def _blocks(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    weight, x = (it.to(dtype) for it in _plain(shape, torch.bfloat16, device).args)
    of_weight, of_x = (
        _scales((it.shape[0], 1), (it.shape[1], 32), device).to(torch.float8_e8m0fnu)
        for it in (weight, x)
    )
    return call(weight, x, A_scale_inv=of_weight, B_scale_inv=of_x)


def _smaller(shape: Shape) -> Shape:
    m, n, k = shape
    return (min(m, 320), min(n, 512), min(k, 256))


CALLS = tuple(
    Calls(
        op="generic_gemm",
        choices=(choice,),
        make=make,
        shapes=_SHAPES,
        axes="rows x columns x terms",
        check_shape=_smaller,
        dtypes=dtypes,
    )
    for choice, make, dtypes in (
        ("gemm_half", _plain, ("bfloat16",)),
        ("gemm_float32", _plain, ("float32",)),
        ("gemm_float8", _float8, ("float8_e4m3fn",)),
        ("gemm_float8_steps", _steps, ("float8_e4m3fn",)),
        ("gemm_float32_blocks", partial(_steps, transposed=True), ("float8_e4m3fn",)),
        ("gemm_blocks", _blocks, ("float8_e4m3fn",)),
    )
)
