"""Programmatic dependent launches: a kernel may start while the one before it ends.

DEPENDENT: the kernel is launched as a dependent one, and itself waits for the results of the one
before. An operator's first kernel is launched the ordinary way, after all earlier kernels have
ended. Each later kernel waits for its predecessor, so whatever waits for it has waited for all of
them. If a kernel does not release its dependents, the next one starts when it ends, which still
saves part of the launch latency.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from transformer_engine_fl.backends.flagos import _launch

if TYPE_CHECKING:
    import torch

__all__ = [
    "dependent_launch",
    "has_dependent_launches",
    "release_dependents",
    "wait_for_predecessor",
]

_DEPENDENT_LAUNCHES_FROM = 90  # the compute capability


def has_dependent_launches(device: torch.device) -> bool:
    """Whether the device has dependent launches."""
    return _launch.has_ptx() and _launch.limits(device).capability >= _DEPENDENT_LAUNCHES_FROM


def dependent_launch(dependent: bool) -> dict[str, Any]:
    """The constant and the options of a launch, which may be a dependent one."""
    return {"DEPENDENT": dependent, "options": {"launch_pdl": True} if dependent else {}}


@triton.jit  # type: ignore[untyped-decorator]
def release_dependents(HAS_DEPENDENT: tl.constexpr) -> None:
    """Let the next kernel start as soon as all programs of this one have called this."""
    if HAS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def wait_for_predecessor(DEPENDENT: tl.constexpr) -> None:
    """Wait until the kernel before has ended and its writes are visible."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
