"""Poisoned, fenced memory for outputs: shows missing writes and writes out of bounds.

Inside a :class:`Guarded` block every allocation of uninitialised memory (``torch.empty``
and its relatives) is filled with poison and surrounded by a fence. An output that an
implementation forgets to write keeps the poison, which no comparison accepts; a write
outside breaks the fence.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from transformer_engine_fl.backends._arguments import extent

__all__ = ["FENCE", "PATTERN", "Guarded"]

FENCE: Final = 256
"""Bytes on either side; a multiple of every alignment that kernels ask for."""

PATTERN: Final = 0xA5


class Guarded(TorchFunctionMode):
    """Poisons and fences what is allocated uninitialised inside the block.

    Args:
        fence: its width in bytes; 0 where another tool detects accesses out of bounds.
    """

    def __init__(self, fence: int = FENCE) -> None:
        super().__init__()
        self._fence = fence
        self._fences: list[tuple[Tensor, int]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace the allocators; leave everything else as it is."""
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATORS and isinstance(result, Tensor) and result.device.type != "meta":
            return self._fenced(result)
        return result

    def _fenced(self, wanted: Tensor) -> Tensor:
        fence = self._fence
        with torch._C.DisableTorchFunctionSubclass():
            size = extent(wanted) * wanted.element_size()
            raw = torch.full((2 * fence + size,), PATTERN, dtype=torch.uint8, device=wanted.device)
            inside = raw[fence : fence + size].view(wanted.dtype)
            if inside.is_floating_point() and inside.numel():
                inside.fill_(float("nan"))
            self._fences.append((raw, size))
            return inside.as_strided(wanted.shape, wanted.stride(), inside.storage_offset())

    def broken(self) -> str | None:
        """What was written outside an allocation, or None."""
        for raw, size in self._fences:
            end = self._fence + size
            for side, fence in (("before", raw[: self._fence]), ("after", raw[end:])):
                wrong = int((fence != PATTERN).sum())
                if wrong:
                    return f"{wrong} bytes were written {side} a buffer of {size} bytes"
        return None


_ALLOCATORS: Final = frozenset(
    {
        torch.empty,
        torch.empty_like,
        torch.empty_strided,
        Tensor.new_empty,
        Tensor.new_empty_strided,
    }
)
