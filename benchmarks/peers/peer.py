"""Peer: another library's function for a workload, prepared for the arguments of one call."""

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
    """A call to time.

    Attributes:
        run: does the work.
        values: takes the result of ``run`` and returns the operator's outputs, followed by the
            arguments that the operator writes. A peer may return only the first few of them, and
            None for a value that cannot be compared.
    """

    run: Callable[[], Any]
    values: Callable[[Any], Any] = lambda result: result


@dataclass(frozen=True, slots=True)
class Peer:
    """How a peer does the work of a workload.

    Attributes:
        make: takes the arguments of the workload's call, and returns the work on them or a
            function that does it. It may prepare tensors that a user would have at hand. It copies
            arguments that the peer's function writes and the operator does not.
        note: how the work differs from the operator's.
    """

    make: Callable[..., Work | Callable[[], Any]]
    note: str = ""

    def work(self, sample: Sample) -> Work:
        """The work on a call."""
        made = self.make(*sample.args, **sample.kwargs)
        return made if isinstance(made, Work) else Work(made)


Table = dict[str, Peer]
"""Peers by the name of their workload."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function through torch.compile, for the shapes of its first call."""
    torch._dynamo.reset()  # otherwise torch stops compiling after a few shapes
    result: Callable[..., Any] = torch.compile(function, dynamic=False)
    return result


def autograd(
    function: Callable[..., Any], leaves: tuple[Tensor, ...], grads: Any, *others: Any
) -> Callable[[], Any]:
    """The backward of ``function(*leaves, *others)``; the forward runs once, here."""
    leaves = tuple(it.detach().clone().requires_grad_() for it in leaves)
    output = function(*leaves, *others)
    return lambda: torch.autograd.grad(output, leaves, grads, retain_graph=True)
