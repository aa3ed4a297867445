"""Programmatic dependent launches: a kernel may start while the one before it ends.

FOLLOWS: the kernel is launched as a dependent one, and itself waits for the results of the one
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

__all__ = ["following", "follows", "let_follow", "wait_for_last"]

_FOLLOWS_FROM = 90  # the compute capability


def follows(device: torch.device) -> bool:
    """Whether the device has dependent launches."""
    return _launch.has_ptx() and _launch.limits(device).capability >= _FOLLOWS_FROM


def following(follows: bool) -> dict[str, Any]:
    """The constant and the options of a launch that is a dependent one if it ``follows``."""
    return {"FOLLOWS": follows, "options": {"launch_pdl": True} if follows else {}}


@triton.jit  # type: ignore[untyped-decorator]
def let_follow(FOLLOWED: tl.constexpr) -> None:
    """Let the next kernel start as soon as all programs of this one have called this."""
    if FOLLOWED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def wait_for_last(FOLLOWS: tl.constexpr) -> None:
    """Wait until the kernel before has ended and its writes are visible."""
    if FOLLOWS:
        tl.extra.cuda.gdc_wait()
