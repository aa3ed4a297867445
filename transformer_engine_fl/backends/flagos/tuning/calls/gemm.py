"""Products of two matrices, as the forward of a linear layer has them: x W^T."""

from __future__ import annotations

import torch

from transformer_engine_fl.backends.flagos.tuning.calls.call import (
    Calls,
    Sample,
    Shape,
    call,
    normal,
)

__all__ = ["CALLS"]

# Few tokens, as when a model is used, and many, as when it is trained.
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
    )
)
