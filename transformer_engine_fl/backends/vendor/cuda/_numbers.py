"""Integers of the host in a device's memory, without a copy that the host waits for.

They travel as a kernel's arguments (``numbers.cu``), so they are those of the call wherever a
CUDA graph replays it, and there is no memory of the host that must outlive it.
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
"""Numbers of one launch: every device takes 4 KB of arguments."""
THREADS: Final = 128


def _source(count: int) -> tuple[Specialisation, _launch.Geometry]:
    geometry = _launch.Geometry(THREADS, "P" + "q" * count)
    return Specialisation("numbers", "write_numbers", (("COUNT", count),)), geometry


def numbers_sources() -> Iterator[tuple[Specialisation, _launch.Geometry]]:
    """The kernels that write numbers."""
    return map(_source, COUNTS)


def numbers_on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """A new int64 tensor of at least that length: the numbers, and then zeros."""
    count = next((it for it in COUNTS if it >= len(numbers)), COUNTS[-1])
    calls = max(1, -(-len(numbers) // count))
    memory = torch.empty((calls * count,), dtype=torch.int64, device=device)
    kernel = _launch.load(*_source(count), memory.get_device())
    padded = [*numbers, *[0] * (calls * count - len(numbers))]
    for place in range(0, len(padded), count):
        kernel.launch(1, 1, memory.data_ptr() + 8 * place, *padded[place : place + count])
    return memory
