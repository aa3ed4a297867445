"""Padding of each expert's rows with zeros. A shape is rows x columns x experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workloads.gemm import splits
from workloads.workload import Random, Sample, Shape, Workload, call

if TYPE_CHECKING:
    import torch

_MULTIPLE = 32


def _blocks(shape: Shape) -> dict[str, list[int]]:
    rows, _, experts = shape
    # Odd numbers of rows, so that there is something to pad.
    sizes = [size - size % 2 + place % 2 for place, size in enumerate(splits(experts, rows))]
    padded = [-(-size // _MULTIPLE) * _MULTIPLE for size in sizes]
    return {"row_list": sizes, "padded_row_list": padded}


def _pad(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    blocks = _blocks(shape)
    return call(Random(dtype, device).normal(sum(blocks["row_list"]), shape[1]), **blocks)


def _unpad(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    blocks = _blocks(shape)
    return call(Random(dtype, device).normal(sum(blocks["padded_row_list"]), shape[1]), **blocks)


WORKLOADS = (
    Workload(
        name="fused_multi_row_padding",
        make=_pad,
        shapes=((32768, 4096, 64),),
        tiny=(50, 8, 4),
        axes="rows (about) x columns x experts",
    ),
    Workload(
        name="fused_multi_row_unpadding",
        make=_unpad,
        shapes=((32768, 4096, 64),),
        tiny=(50, 8, 4),
        axes="rows (about) x columns x experts",
        counted="the input with its padding, which is read too",
        standard=False,
    ),
)
