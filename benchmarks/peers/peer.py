"""Peer: what somebody else offers for a workload, made ready for one call's arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_engine_fl.core.contract import Sample

__all__ = ["Peer", "Table", "Work", "autograd", "compiled"]


@dataclass(frozen=True, slots=True)
class Work:
    """Something to be timed.

    Attributes:
        run: does it.
        values: makes of what it returned the operator's outputs, and then the arguments that
            the operator writes; the first few will do, and None for what cannot be compared.
    """

    run: Callable[[], Any]
    values: Callable[[Any], Any] = lambda result: result


@dataclass(frozen=True, slots=True)
class Peer:
    """How a peer does the work of a workload.

    Attributes:
        make: takes the arguments of the workload's call and returns the work on them, or
            what does it. It may prepare what a user would have at hand. What the work writes
            besides what the operator does, it has a copy of.
        note: in what its work differs from the operator's.
    """

    make: Callable[..., Work | Callable[[], Any]]
    note: str = ""

    def work(self, sample: Sample) -> Work:
        """The work on a call."""
        made = self.make(*sample.args, **sample.kwargs)
        return made if isinstance(made, Work) else Work(made)


Table = dict[str, Peer]
"""By the name of a workload."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same by torch.compile, for the shapes of its first call."""
    torch._dynamo.reset()  # else it stops compiling after a few shapes
    result: Callable[..., Any] = torch.compile(function, dynamic=False)
    return result


def autograd(
    function: Callable[..., Any], leaves: tuple[Tensor, ...], grads: Any, *others: Any
) -> Callable[[], Any]:
    """The backward alone of ``function(*leaves, *others)``, which runs here, once."""
    leaves = tuple(it.detach().clone().requires_grad_() for it in leaves)
    output = function(*leaves, *others)
    return lambda: torch.autograd.grad(output, leaves, grads, retain_graph=True)
