"""The kernels of rotary position embedding that the benchmarks launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda._launch import Limits
from transformer_engine_fl.backends.vendor.cuda.rope import Key, source


def sources(device: Limits) -> Iterator[Specialisation]:
    """The kernels for bfloat16 heads, the same on every device."""
    low = torch.bfloat16
    for back in (False, True):
        for interleaved in (False, True):
            for width, rotated in ((64, 64), (128, 128), (128, 64)):
                yield source(Key(low, interleaved, back, width, (rotated,)))[0]
            yield source(Key(low, interleaved, back, 128, (128, 128), 128, 4))[0]
