"""Integers of the host in a device's memory, without a copy that the host waits for.

They travel as a kernel's arguments, so they are those of the call wherever a CUDA graph
replays it, and there is no memory of the host that must outlive it. Many numbers take the host
long so; where no graph is captured they are copied from page-locked memory, which torch lends
to nobody else before the copy is done.
"""

from __future__ import annotations

import array
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from transformer_engine_fl.backends import _repeats
from transformer_engine_fl.backends._allocation import sees_allocations
from transformer_engine_fl.backends._memory import is_captured
from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import launch_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["numbers_on_device"]

_COUNTS = (32, 256)  # of one launch; at most 4 KB of arguments are allowed everywhere
# Triton would compile anew for 1, for multiples of 16 and for what fits in 32 bits: with
# this none of them does.
_ODD = tl.constexpr((1 << 60) + 1)


@triton.jit  # type: ignore[untyped-decorator]
def _write_numbers(out_ptr: tl.tensor, numbers: tl.tuple, COUNT: tl.constexpr) -> None:
    """Each number: twice its distance from _ODD was passed."""
    for place in tl.static_range(COUNT):
        tl.store(out_ptr + place, (numbers[place] - _ODD) >> 1)


def numbers_on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """A new int64 tensor of at least that length, the numbers and then perhaps zeros.

    Args:
        numbers: each between ``-2**58`` and ``2**58``.
        device: where the tensor is.
    """
    if len(numbers) > _COUNTS[0] and _can_be_copied(device):
        told = torch.empty(len(numbers), dtype=torch.int64, pin_memory=True)
        told.copy_(torch.frombuffer(array.array("q", numbers), dtype=torch.int64))
        return told.to(device, non_blocking=True)
    count = next((it for it in _COUNTS if it >= len(numbers)), _COUNTS[-1])
    calls = -(-len(numbers) // count)
    memory = torch.empty((calls * count,), dtype=torch.int64, device=device)
    warp = _launch.limits(device).warp_size
    launch = launch_of(_write_numbers, device, (), threads=warp, COUNT=count)
    odd = [2 * it + _ODD.value for it in numbers]
    odd += [_ODD.value] * (calls * count - len(odd))
    for place in range(0, len(odd), count):
        part = memory[place : place + count]
        launch((1, 1), (part,), (tuple(odd[place : place + count]),))
    return memory


def _can_be_copied(device: torch.device) -> bool:
    """Whether a copy from page-locked memory does, and nobody watches what is launched."""
    return (
        device.type == "cuda"
        and not _launch.INTERPRETED
        and _repeats.active is None
        and not sees_allocations()
        and not is_captured(device)
    )
