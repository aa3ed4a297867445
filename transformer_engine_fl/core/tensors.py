"""What dispatch must know of tensors, as an interface.

Core does not import torch. The manager is given a :class:`Tensors`; the one for torch is
named here, and imported when a question first comes up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from transformer_engine_fl.core.registry import Entry

__all__ = ["ALL_FACTS", "TORCH", "Facts", "Tensors"]

TORCH: Final = "transformer_engine_fl.ops._tensors:TorchTensors"
"""Where the answers for torch are; named, not imported, because it builds on core."""


ALL_FACTS: Final = frozenset({"device", "dtype", "arch"})
"""What a candidate is judged by once there is a call."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a call's dispatch tensor; None where nothing is known.

    Attributes:
        device: device type, ``"cuda"``.
        dtype: dtype name, ``"bfloat16"``.
        arch: architecture of the device, ``"sm_90"``; None also if it has no name for it.
        unusual: why only plain tensor operations can take it, or None.
        fake: it has no data; an operator with a shape rule stands in for a raw kernel.
        judged: which of device, dtype and arch a candidate is judged by; a condition on
            any other is left open instead of being refused.
    """

    device: str | None = None
    dtype: str | None = None
    arch: str | None = None
    unusual: str | None = None
    fake: bool = False
    judged: frozenset[str] = frozenset()


class Tensors(Protocol):
    """The questions that dispatch asks about tensors."""

    def key(self, value: Any, /) -> tuple[Any, ...]:
        """A cheap hashable key on which :meth:`facts` depends; AttributeError for no tensor."""
        ...

    def facts(self, value: Any) -> Facts:
        """What is known of a tensor."""
        ...

    def opaque(self, entry: Entry) -> Callable[..., Any] | None:
        """An operator that stands in for a raw kernel on fake tensors; None if there is none."""
        ...

    def is_tensor(self, value: object) -> bool:
        """Whether the value is a tensor."""
        ...

    def is_ordinary(self, value: Any, /) -> bool:
        """Whether a fault on this tensor is one on every tensor of its device and dtype."""
        ...

    def is_fatal(self, error: Exception) -> bool:
        """Whether the device is lost or memory ran out, so that nothing else may run."""
        ...

    def no_fallback(self, tensors: Iterable[Any]) -> str | None:
        """Why nothing may fall back now (capture, tracing, fake tensors), or None."""
        ...
