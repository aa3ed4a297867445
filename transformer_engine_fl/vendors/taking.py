"""How kernels of other libraries take the tensors of a call: as plain memory, or not at all.

What the arguments may be is said by the contracts, whose ``check`` goes first. What is left
are tensors that are right and yet nothing to launch a kernel on: fake ones, subclasses that
handle operators themselves, other devices, no elements. Those are declined, so that the next
implementation serves.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from transformer_engine_fl.core.errors import NotSupportedError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from transformer_engine_fl.backends._arguments import Taking

__all__ = ["Taker", "differentiating", "own", "recorded"]


class Taker:
    """Takes tensors for a library's kernels.

    Args:
        kernels: whose they are, as reasons name them: ``"Liger's kernels"``.
        devices: types of the devices that they run on; any unless given.
    """

    def __init__(self, kernels: str, devices: Collection[str] | None = None) -> None:
        self._kernels = kernels
        self._devices = None if devices is None else frozenset(devices)

    @functools.cached_property
    def _taking(self) -> Taking:
        from transformer_engine_fl.backends._arguments import Taking  # with it comes torch

        return Taking(self._refusal)

    def _refusal(self, device: torch.device) -> str | None:
        if device.type == "meta":
            return "there is no data"
        if self._devices is not None and device.type not in self._devices:
            return f"{self._kernels} run on {', '.join(sorted(self._devices))}"
        return None

    def taken(self, op: str, **tensors: Tensor) -> list[Tensor]:
        """The tensors as plain memory, in any strides.

        Raises:
            NotSupportedError: one has no memory that the kernels reach, or no elements.
        """
        plain = [self._taking.plain(op, name, tensor) for name, tensor in tensors.items()]
        if not all(tensor.numel() for tensor in plain):
            raise NotSupportedError(f"{op}: {self._kernels} take no empty tensors")
        return plain

    def dense(self, op: str, **tensors: Tensor) -> list[Tensor]:
        """As :meth:`taken`, and contiguous: copied if need be."""
        return [tensor.contiguous() for tensor in self.taken(op, **tensors)]

    def same_dtype(self, op: str, **tensors: Tensor) -> None:
        """Decline tensors of several dtypes."""
        found = {name: tensor.dtype for name, tensor in tensors.items()}
        if len(set(found.values())) > 1:
            said = ", ".join(f"{name} is {dtype}" for name, dtype in found.items())
            raise NotSupportedError(f"{op}: {self._kernels} take one dtype; {said}")


def own(tensor: Tensor) -> Tensor:
    """Dense memory that may be written."""
    import torch

    return tensor.detach().clone(memory_format=torch.contiguous_format)


@contextlib.contextmanager
def differentiating() -> Iterator[None]:
    """Within the block autograd records, whatever the caller has it do."""
    import torch

    with torch.inference_mode(False), torch.enable_grad():
        yield


def recorded(tensor: Tensor) -> Tensor:
    """The tensor as autograd may keep it: a copy of one that was made in inference mode."""
    return own(tensor) if tensor.is_inference() else tensor
