"""Integers of the host written to a device's memory, without a copy that the host waits for.

They are passed as kernel arguments (``numbers.cu``). A CUDA graph therefore replays the call
with the integers that it captured, and no host memory has to outlive the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from transformer_engine_fl.backends.vendor.cuda import _launch
from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation

__all__ = ["numbers_on_device", "numbers_sources"]

COUNTS: Final = (32, 480)
"""Numbers that one launch may write: every device accepts 4 KB of kernel arguments."""
THREADS: Final = 128


def _source(count: int) -> tuple[Specialisation, _launch.Geometry]:
    geometry = _launch.Geometry(THREADS, "P" + "q" * count)
    return Specialisation("numbers", "write_numbers", (("COUNT", count),)), geometry


def numbers_sources() -> Iterator[tuple[Specialisation, _launch.Geometry]]:
    """The kernels that write numbers, one for each of :data:`COUNTS`."""
    return map(_source, COUNTS)


def numbers_on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """A new int64 tensor that holds the numbers, padded with zeros."""
    count = next((it for it in COUNTS if it >= len(numbers)), COUNTS[-1])
    calls = max(1, -(-len(numbers) // count))
    memory = torch.empty((calls * count,), dtype=torch.int64, device=device)
    kernel = _launch.load(*_source(count), memory.get_device())
    padded = [*numbers, *[0] * (calls * count - len(numbers))]
    for place in range(0, len(padded), count):
        kernel.launch(1, 1, memory.data_ptr() + 8 * place, *padded[place : place + count])
    return memory
