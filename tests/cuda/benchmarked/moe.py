"""The kernels of moe that the benchmarks launch, without ``row_maps.cu``, which moves few bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda._launch import Limits
from transformer_engine_fl.backends.vendor.cuda.moe import (
    collecting,
    counting,
    permuting,
    spreading,
    weighting,
)


def sources(device: Limits) -> Iterator[Specialisation]:
    """The kernels for bfloat16 rows."""
    low, full = torch.bfloat16, torch.float32
    yield counting(torch.int32, device)[0]
    yield counting(64, device)[0]
    for columns in (2048, 4096, 7168):
        units = columns // 8
        yield permuting(16, units, torch.int32, 0, device)[0]
        yield permuting(16, units, None, 4, device)[0]
        for mask in (False, True):
            yield spreading(16, units, mask, device)[0]
            yield collecting(columns, 8, low, None, 0, mask, device)[0]
            yield collecting(columns, 8, low, full, 0, mask, device)[0]
            yield weighting(columns, 8, low, low, full, mask, device)[0]
        yield collecting(columns, 8, low, None, 4, True, device)[0]
