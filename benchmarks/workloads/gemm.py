"""Matrix products and grouped products with their epilogues. A shape is M x N x K."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workloads.workload import Random, Sample, Shape, Workload, call, reference

_SIZES: tuple[Shape, ...] = ((8192, 8192, 8192), (8192, 14336, 4096), (4096, 4096, 4096))
# As in inference: of few tokens, which are bound by memory, and of as many as one prompt has.
_FEW: tuple[Shape, ...] = (
    (16, 14336, 4096),
    (64, 4096, 14336),
    (256, 4096, 4096),
    (768, 8192, 8192),
)


def _plain(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    m, n, k = shape
    random = Random(dtype, device)
    return call(random.normal(n, k), random.normal(m, k))


def _bias(**options: Any) -> Callable[[Shape, torch.dtype, str], Sample]:
    def make(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
        weight, input = _plain(shape, dtype, device).args
        bias = Random(dtype, device).normal(shape[1])
        return call(weight * shape[2] ** -0.5, input, bias=bias, **options)

    return make


def _float8(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    weight, input = _plain(shape, torch.float8_e4m3fn, device).args
    scales = {f"{name}_scale_inv": torch.tensor([0.5], device=device) for name in "AB"}
    return call(weight, input, **scales)


def _mxfp8(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    operands = [
        reference("quantize", it, format="mxfp8") for it in _plain(shape, dtype, device).args
    ]
    (weight, weight_scales, *_), (input, input_scales, *_) = operands
    return call(weight, input, A_scale_inv=weight_scales, B_scale_inv=input_scales)


def _dgrad(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    m, n, k = shape
    random = Random(dtype, device)
    return call(random.normal(k, n), random.normal(m, k), transa=False, grad=True)


def _wgrad(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    m, n, k = shape
    random = Random(dtype, device)
    main_grad = random.normal(m, n, dtype=torch.float32)
    return call(
        random.normal(k, n),
        random.normal(k, m),
        transa=False,
        transb=True,
        grad=True,
        accumulate_into=main_grad,
    )


def splits(groups: int, rows: int) -> list[int]:
    """The rows of each group, uneven where there are several."""
    if groups == 1:
        return [rows]
    even = rows // groups
    sizes = [even + (even // 4 if place % 2 else -(even // 4)) for place in range(groups)]
    return [*sizes[:-1], rows - sum(sizes[:-1])]


def _flops(shape: Shape) -> float:
    m, n, k = shape[-3:]
    return 2.0 * m * n * k


def _workload(
    variant: str, make: Callable[[Shape, torch.dtype, str], Sample], **options: Any
) -> Any:
    given: dict[str, Any] = {"shapes": _SIZES, "tiny": (16, 32, 48), "axes": "M x N x K"}
    given |= {"flops": _flops, "roof": "matmul", "counted": "2 M N K"}
    return Workload(
        name=f"generic_gemm {variant}".strip(), ops=("generic_gemm",), make=make, **given | options
    )


def _grouped(*, stacked: bool) -> Callable[[Shape, torch.dtype, str], Sample]:
    """Grouped products; the weights are views of one tensor if stacked, else separate tensors."""

    def make(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
        groups, m, n, k = shape
        random = Random(dtype, device)
        weights: list[Tensor]
        if stacked:
            weights = [*random.normal(groups, n, k).unbind()]
        else:
            weights = [random.normal(n, k) for _ in range(groups)]
        return call(weights, [random.normal(m, k)], splits(groups, m))

    return make


def _groups(variant: str, *shapes: Shape, stacked: bool) -> Workload:
    return Workload(
        name=f"te_general_grouped_gemm {variant}".strip(),
        ops=("te_general_grouped_gemm",),
        make=_grouped(stacked=stacked),
        shapes=shapes,
        tiny=(4, 64, 16, 32),
        axes="groups x M of all groups x N x K, uneven groups",
        flops=_flops,
        roof="matmul",
        counted="2 M N K",
    )


WORKLOADS = (
    _workload("", _plain, shapes=_SIZES + _FEW),
    _workload("bias", _bias()),
    _workload("bias gelu", _bias(gelu=True)),
    _workload("float8", _float8, roof="scaled_mm", shapes=_SIZES + _FEW),
    _workload("mxfp8", _mxfp8, roof="scaled_mm", shapes=_SIZES[:1], standard=False),
    _workload("dgrad", _dgrad, shapes=((8192, 4096, 14336),)),
    _workload("wgrad, accumulated in float32", _wgrad, shapes=((14336, 4096, 8192),)),
    _groups("", (8, 16384, 4096, 4096), (64, 32768, 2048, 4096), stacked=False),
    _groups(
        "weights of one tensor", (64, 32768, 2048, 4096), (128, 32768, 1536, 2048), stacked=True
    ),
)
