"""Writing host integers into device memory, without a copy that the host waits for.

The integers travel as a kernel's arguments. So a CUDA graph replays those of the captured call, and
no host memory must outlive the launch. Many integers cost much host time this way; if no graph is
captured they are copied from page-locked memory, which torch does not reuse before the copy is
done.
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

_COUNTS = (32, 256)  # per launch; every device allows 4 KB of arguments
# Triton would compile a variant for 1, for multiples of 16 and for what fits in 32 bits: encoded
# with this, no number is any of these.
_ODD = tl.constexpr((1 << 60) + 1)


@triton.jit  # type: ignore[untyped-decorator]
def _write_numbers(out_ptr: tl.tensor, numbers: tl.tuple, COUNT: tl.constexpr) -> None:
    """Each number was passed as _ODD plus twice the number."""
    for place in tl.static_range(COUNT):
        tl.store(out_ptr + place, (numbers[place] - _ODD) >> 1)


def numbers_on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """A new int64 tensor of at least that length: the numbers, then perhaps zeros.

    Args:
        numbers: each between ``-2**58`` and ``2**58``.
        device: where the tensor is.
    """
    if len(numbers) > _COUNTS[0] and _can_be_copied(device):
        pinned = torch.empty(len(numbers), dtype=torch.int64, pin_memory=True)
        pinned.copy_(torch.frombuffer(array.array("q", numbers), dtype=torch.int64))
        return pinned.to(device, non_blocking=True)
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
    """Whether a copy from page-locked memory may be used: it must not be captured or recorded."""
    return (
        device.type == "cuda"
        and not _launch.INTERPRETED
        and _repeats.active is None
        and not sees_allocations()
        and not is_captured(device)
    )
