"""The kernels of normalization that the benchmarks launch, and some for widths in between."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda._launch import Limits
from transformer_engine_fl.backends.vendor.cuda._sums import sum_source
from transformer_engine_fl.backends.vendor.cuda.normalization import (
    BackwardKey,
    ForwardKey,
    backward_sources,
    forward_source,
)


def sources(device: Limits) -> Iterator[Specialisation]:
    """The kernels for bfloat16 rows."""
    low = torch.bfloat16
    for columns in (1024, 4096, 7168, 8192, 12288, 16384, 32768, 65536, 131072, 262144):
        for centred in (False, True):
            forward = ForwardKey(columns, 8, low, low, low, low, centred, False)
            yield forward_source(forward, device)[0]
            for few in (False, True):
                backward = BackwardKey(columns, 8, low, low, low, centred, False, None, few)
                yield from (source for source, _ in backward_sources(backward, device)[0])
                yield sum_source(columns, torch.float32, low, device, 1 + centred, few)[0]
        forward = ForwardKey(columns, 8, low, low, low, low, False, False, True)
        backward = BackwardKey(columns, 8, low, low, low, False, False, low)
        yield forward_source(forward, device)[0]
        yield from (source for source, _ in backward_sources(backward, device)[0])
