"""The kernels of cross entropy that the benchmarks launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda._launch import Limits
from transformer_engine_fl.backends.vendor.cuda.loss import (
    BackwardKey,
    ForwardKey,
    backward_source,
    forward_source,
)


def sources(device: Limits) -> Iterator[Specialisation]:
    """The kernels for bfloat16 logits."""
    low = torch.bfloat16
    for vectors in (4000, 16032, 2**15):
        for summed in (False, True):
            yield forward_source(ForwardKey(vectors, 8, low, None, False, summed))[0]
        yield backward_source(BackwardKey(vectors, 8, low, low))[0]


def bits(source: Specialisation) -> tuple[int, int]:
    """Bits of a read and of a write; a kernel that only sums writes little."""
    return 128, 0 if source.kernel == "forward" else 128
