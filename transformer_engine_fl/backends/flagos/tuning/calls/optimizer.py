"""Steps over the parameters of a model: for each layer 4 matrices and 12 vectors."""

from __future__ import annotations

from collections.abc import Callable

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

_SHAPES: tuple[Shape, ...] = ((2, 1024), (4, 2048), (10, 4096))


def _tensors(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> list[Tensor]:
    layers, width = shape
    sizes = (((width, width),) * 4 + ((width,),) * 12) * layers
    return [normal(size, dtype, device, seed + place) for place, size in enumerate(sizes)]


def _adam(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    grads, params = (_tensors(shape, dtype, device, seed) for seed in (1, 1001))
    first, second = (_tensors(shape, torch.float32, device, seed) for seed in (2001, 3001))
    second = [it.square_() for it in second]
    return call(grads, params, first, second, 1e-3, 7, weight_decay=0.01)


def _sgd(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    lists = [_tensors(shape, dtype, device, seed) for seed in (1, 1001, 2001)]
    return call(*lists, 1e-3, 0.01, 0.9)


def _scale(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    inputs = _tensors(shape, dtype, device, 1)
    return call(inputs, [torch.empty_like(it) for it in inputs], 0.5)


def _l2norm(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(_tensors(shape, dtype, device, 1))


def _e8m0(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    """An amax for each block of 32 elements."""
    amaxes = [it[..., ::32].abs() for it in _tensors(shape, dtype, device, 1)]
    return call(amaxes, [torch.empty_like(it, dtype=torch.uint8) for it in amaxes])


def _smaller(shape: Shape) -> Shape:
    return min(shape[0], 2), min(shape[1], 512)


def _calls(
    op: str,
    make: Callable[[Shape, torch.dtype, str], Sample],
    choice: str | None = None,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
) -> Calls:
    return Calls(
        op=op,
        choices=(choice or op,),
        make=make,
        shapes=_SHAPES,
        axes="layers x width: for each layer 4 matrices of width x width and 12 vectors",
        check_shape=_smaller,
        dtypes=dtypes,
    )


CALLS = (
    _calls("multi_tensor_adam", _adam),
    _calls("multi_tensor_sgd", _sgd),
    _calls("multi_tensor_scale", _scale),
    _calls("multi_tensor_l2norm", _l2norm),
    _calls(
        "multi_tensor_compute_scale_inv_e8m0", _e8m0, "multi_tensor_compute_scale", ("bfloat16",)
    ),
)
