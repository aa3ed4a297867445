"""Prepares the tensors of a call for other libraries' kernels, or declines them.

The contract's ``check`` runs first. Some tensors satisfy the contract, but no kernel can be
launched on them: fake tensors, subclasses that handle operators themselves, tensors on other
devices or without elements. These are declined, so that the next implementation serves the call.
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

    from transformer_engine_fl.backends._arguments import TensorPreparer

__all__ = ["Taker", "differentiating", "normal_tensor", "writable_copy"]


class Taker:
    """Takes tensors for a library's kernels.

    Args:
        kernels: the name of the kernels in reasons: ``"Liger's kernels"``.
        devices: types of the devices that the kernels run on; any unless given.
    """

    def __init__(self, kernels: str, devices: Collection[str] | None = None) -> None:
        self._kernels = kernels
        self._devices = None if devices is None else frozenset(devices)

    @functools.cached_property
    def _taking(self) -> TensorPreparer:
        from transformer_engine_fl.backends._arguments import TensorPreparer  # imports torch

        return TensorPreparer(self._refusal)

    def _refusal(self, device: torch.device) -> str | None:
        if device.type == "meta":
            return "a meta tensor has no data"
        if self._devices is not None and device.type not in self._devices:
            return f"{self._kernels} run on {', '.join(sorted(self._devices))}"
        return None

    def strided(self, op: str, **tensors: Tensor) -> list[Tensor]:
        """The tensors as plain strided tensors, with any strides.

        Raises:
            NotSupportedError: a tensor has no memory that the kernels can access, or no elements.
        """
        plain = [self._taking.plain(op, name, tensor) for name, tensor in tensors.items()]
        if not all(tensor.numel() for tensor in plain):
            raise NotSupportedError(f"{op}: {self._kernels} do not support empty tensors")
        return plain

    def dense(self, op: str, **tensors: Tensor) -> list[Tensor]:
        """As :meth:`strided`, and contiguous; copies where necessary."""
        return [tensor.contiguous() for tensor in self.strided(op, **tensors)]

    def same_dtype(self, op: str, **tensors: Tensor) -> None:
        """Decline tensors of different dtypes."""
        found = {name: tensor.dtype for name, tensor in tensors.items()}
        if len(set(found.values())) > 1:
            said = ", ".join(f"{name} is {dtype}" for name, dtype in found.items())
            raise NotSupportedError(f"{op}: {self._kernels} need tensors of one dtype; {said}")


def writable_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy that may be written."""
    import torch

    return tensor.detach().clone(memory_format=torch.contiguous_format)


@contextlib.contextmanager
def differentiating() -> Iterator[None]:
    """Within the block autograd records, whatever mode the caller has set."""
    import torch

    with torch.inference_mode(False), torch.enable_grad():
        yield


def normal_tensor(tensor: Tensor) -> Tensor:
    """A tensor that autograd may save: a copy if it was made in inference mode."""
    return writable_copy(tensor) if tensor.is_inference() else tensor
