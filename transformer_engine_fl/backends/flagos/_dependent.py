"""Programmatic dependent launches: a kernel that may start while the one before it ends.

FOLLOWS: a kernel is launched so, and waits itself for the results of the one before. An
operator's first kernel is launched the ordinary way, so that all that was before it has
ended; each of the others waits, so that what waits for it has waited for all. A kernel that
does not let the next one start is followed when it ends, which still saves some of a launch.
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
    """Whether there are such launches on the device."""
    return _launch.has_ptx() and _launch.limits(device).capability >= _FOLLOWS_FROM


def following(follows: bool) -> dict[str, Any]:
    """The constant and the options of a launch that may be one of them."""
    return {"FOLLOWS": follows, "options": {"launch_pdl": True} if follows else {}}


@triton.jit  # type: ignore[untyped-decorator]
def let_follow(FOLLOWED: tl.constexpr) -> None:
    """The next kernel may start as soon as all programs of this one have."""
    if FOLLOWED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def wait_for_last(FOLLOWS: tl.constexpr) -> None:
    """Wait until the kernel before has ended."""
    if FOLLOWS:
        tl.extra.cuda.gdc_wait()
