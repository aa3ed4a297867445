"""Norms over rows; a backward takes the statistics that the reference forward saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workloads.workload import COLUMNS, ROWS, Random, Sample, Shape, Workload, call, reference

if TYPE_CHECKING:
    import torch


def _rmsnorm_fwd(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    random = Random(dtype, device)
    return call(random.normal(*shape), random.normal(shape[-1]))


def _rmsnorm_fwd_add(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    random = Random(dtype, device)
    return call(random.normal(*shape), random.normal(*shape), random.normal(shape[-1]))


def _layernorm_fwd(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    random = Random(dtype, device)
    return call(random.normal(*shape), random.normal(shape[-1]), random.normal(shape[-1]))


def _rmsnorm_bwd(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    x, weight = _rmsnorm_fwd(shape, dtype, device).args
    dy = Random(dtype, device).normal(*shape)
    return call(dy.flip(0), x, reference("rmsnorm_fwd", x, weight)[1], weight)


def _rmsnorm_bwd_add(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    dz, x, rsigma, weight = _rmsnorm_bwd(shape, dtype, device).args
    return call(dz, x, dz.flip(1), rsigma, weight)


def _layernorm_bwd(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    x, weight, bias = _layernorm_fwd(shape, dtype, device).args
    dy = Random(dtype, device).normal(*shape)
    _, mu, rsigma = reference("layernorm_fwd", x, weight, bias)
    return call(dy.flip(0), x, mu, rsigma, weight)


_RESIDUAL: tuple[Shape, ...] = ((16384, 8192),)

WORKLOADS = tuple(
    Workload(name=name, make=make, shapes=shapes, wide=COLUMNS, tiny=(6, 40), axes="rows x columns")
    for name, make, shapes in (
        ("rmsnorm_fwd", _rmsnorm_fwd, ROWS),
        ("rmsnorm_bwd", _rmsnorm_bwd, ROWS),
        ("rmsnorm_fwd_add", _rmsnorm_fwd_add, _RESIDUAL),
        ("rmsnorm_bwd_add", _rmsnorm_bwd_add, _RESIDUAL),
        ("layernorm_fwd", _layernorm_fwd, ROWS),
        ("layernorm_bwd", _layernorm_bwd, ROWS),
    )
)
