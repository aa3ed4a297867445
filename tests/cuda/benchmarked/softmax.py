"""The kernels of softmax that the benchmarks launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda._launch import Limits
from transformer_engine_fl.backends.vendor.cuda.softmax import Key, source


def sources(device: Limits) -> Iterator[Specialisation]:
    """The kernels for bfloat16 rows."""
    low = torch.bfloat16
    for columns in (1024, 2048, 4096, 8192, 32768, 65536, 131072, 262144):
        if columns != 65536:  # with 65536 columns a thread spills one number
            yield source(Key(columns, 8, low), device)[0]
        yield source(Key(columns, 8, low, low), device)[0]
    for dy in (None, low):
        yield source(Key(2048, 8, low, dy, True), device)[0]
    yield source(Key(2048, 8, low, None, False, 1, True), device)[0]
