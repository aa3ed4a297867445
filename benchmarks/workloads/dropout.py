"""Dropout with a mask of one bit for each element."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workloads.workload import Random, Sample, Shape, Workload, call, fewer_rows, reference

if TYPE_CHECKING:
    import torch

PROBABILITY = 0.1


def _forward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(Random(dtype, device).normal(*shape), PROBABILITY, seed=1234)


def _backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    grad = Random(dtype, device).normal(*shape)
    _, mask = reference("dropout_fwd", grad, PROBABILITY, seed=1234)
    return call(grad, mask, PROBABILITY)


WORKLOADS = tuple(
    Workload(
        name=name,
        make=make,
        shapes=((16384, 8192),),
        tiny=(6, 40),
        axes="rows x columns",
        check_shape=fewer_rows(1024),
    )
    for name, make in (("dropout_fwd", _forward), ("dropout_bwd", _backward))
)
