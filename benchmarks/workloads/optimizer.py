"""Optimizer steps over the parameters of a model: large matrices and small vectors.

A shape is layers x width; a layer has four matrices of width x width and twelve vectors. 10 x
4096 is 671,580,160 elements in 160 tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workloads.workload import Random, Sample, Shape, Workload, call

LR, STEP = 1e-3, 7
SCALE = 0.5

_MATRICES, _VECTORS = 4, 12


def _tensors(random: Random, shape: Shape, dtype: torch.dtype | None = None) -> list[Tensor]:
    layers, width = shape
    return [
        random.normal(*size, dtype=dtype)
        for _ in range(layers)
        for size in (*((width, width),) * _MATRICES, *((width,),) * _VECTORS)
    ]


def _adam_lists(shape: Shape, dtype: torch.dtype, device: str) -> tuple[list[Tensor], ...]:
    """Gradients and parameters in a dtype, moments in float32."""
    random = Random(dtype, device)
    grads, params, first = _tensors(random, shape), _tensors(random, shape), _tensors(random, shape)
    first = [it.float() * 0.1 for it in first]
    second = [it.float().square() for it in _tensors(random, shape)]
    return grads, params, first, second


def _adam(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(*_adam_lists(shape, dtype, device), LR, STEP, weight_decay=0.01)


def _adam_master(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    lists = _adam_lists(shape, torch.bfloat16, device)
    masters = [it.float() for it in lists[1]]
    return call(*lists, LR, STEP, weight_decay=0.01, master_params=masters)


def _adam_capturable(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    lr = torch.tensor([LR], device=device)
    step = torch.tensor([STEP], device=device, dtype=torch.int32)
    return call(*_adam_lists(shape, dtype, device), lr, step, weight_decay=0.01)


def _adam_capturable_master(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    *lists, lr, step = _adam_capturable(shape, torch.bfloat16, device).args
    masters = [it.float() for it in lists[1]]
    return call(*lists, masters, lr, step, weight_decay=0.01)


def _adam_param_remainder(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    lists = _adam_lists(shape, torch.bfloat16, device)
    remainders = [torch.zeros_like(it, dtype=torch.int16) for it in lists[1]]
    return call(*lists, remainders, LR, STEP, weight_decay=0.01)


def _sgd(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    random = Random(dtype, device)
    grads, params, buffers = (_tensors(random, shape) for _ in range(3))
    return call(grads, params, buffers, LR, 0.01, 0.9)


def _l2norm(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(_tensors(Random(dtype, device), shape))


def _unscale_l2norm(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(_tensors(Random(dtype, device), shape), torch.tensor([SCALE], device=device))


def _scale(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    inputs = _tensors(Random(dtype, device), shape)
    return call(inputs, [torch.empty_like(it) for it in inputs], SCALE)


def _scale_tensor(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    inputs, outputs, scale = _scale(shape, dtype, device).args
    return call(inputs, outputs, torch.tensor([scale], device=device))


def _workload(name: str, make: object, unread: tuple[str, ...] = (), **options: object) -> Workload:
    return Workload(
        name=name,
        make=make,  # type: ignore[arg-type]
        shapes=((10, 4096),),
        tiny=(1, 8),
        axes="layers x width: for each layer 4 matrices of width x width and 12 vectors",
        dtype="float32",
        unread=unread,
        check_shape=lambda shape: (min(shape[0], 2), min(shape[1], 512)),
        **options,  # type: ignore[arg-type]
    )


WORKLOADS = (
    _workload("multi_tensor_adam", _adam),
    _workload(
        "multi_tensor_adam bfloat16, float32 masters",
        _adam_master,
        ("params",),
        ops=("multi_tensor_adam",),
        counted="bfloat16 parameters are written and not read",
    ),
    _workload("multi_tensor_adam_capturable", _adam_capturable, standard=False),
    _workload(
        "multi_tensor_adam_capturable_master",
        _adam_capturable_master,
        ("params",),
        counted="bfloat16 parameters are written and not read",
        standard=False,
    ),
    _workload("multi_tensor_adam_param_remainder", _adam_param_remainder, standard=False),
    _workload("multi_tensor_sgd", _sgd, standard=False),
    _workload("multi_tensor_l2norm", _l2norm),
    _workload("multi_tensor_unscale_l2norm", _unscale_l2norm, standard=False),
    _workload("multi_tensor_scale", _scale, ("outputs",)),
    _workload("multi_tensor_scale_tensor", _scale_tensor, ("outputs",), standard=False),
)
