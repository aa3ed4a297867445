"""A PrivateUse1 device in Python under the name ``chip``, which calculates on the CPU.

torch's support for such backends provides the tensors' device, its module and its guards. An
operator that is dispatched to the device's key runs on CPU tensors: each ``chip`` tensor is a
shell over the memory of one, so a raw kernel finds no address in it. A process can have one such
device and cannot remove it. Autograd supports it only if it was registered before the first
backward, and then no longer works in a forked child. Tests on it therefore run in a separate
process.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["DISPATCH_KEY", "MULTIPROCESSORS", "NAME", "Chip", "bring_up", "is_chip"]

NAME = "chip"
DISPATCH_KEY = "PrivateUse1"
MULTIPROCESSORS = 24


class Chip:
    """The module that torch exposes as ``torch.chip``.

    Attributes:
        asked: how often the device's properties were read, which initialises a device.
    """

    asked = 0

    def is_initialized(self) -> bool:
        return self.asked > 0

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, device: Any = None) -> Any:
        Chip.asked += 1
        return type("Properties", (), {"multi_processor_count": MULTIPROCESSORS})

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass


_memory: dict[int, torch.UntypedStorage] = {}
"""The CPU memory of each of the device's storages, by the address of the storage object."""


def is_chip(value: Any) -> bool:
    """Whether the value is a tensor of the device."""
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def _on_cpu(value: Any) -> Any:
    """The CPU tensor over a ``chip`` tensor's memory, the CPU for the device, others unchanged."""
    if is_chip(value):
        memory = _memory[value.untyped_storage()._cdata]
        cpu = torch.empty(0, dtype=value.dtype)
        return cpu.set_(memory, value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]
    is_device = isinstance(value, torch.device) and value.type == NAME
    return torch.device("cpu") if is_device else value


def _on_chip(held: torch.Tensor, given: dict[tuple[int, torch.dtype], torch.Tensor]) -> Any:
    """The ``chip`` tensor over a CPU tensor's memory; a view of the argument in ``given`` that has
    the same storage and dtype, if there is one.
    """
    memory = held.untyped_storage()
    shell = given.get((memory._cdata, held.dtype))
    if shell is None:
        shell = torch._C._acc.create_empty_tensor(held.shape, held.dtype)
        _memory[shell.untyped_storage()._cdata] = memory
    # The operator that compiled code uses: it does not look at the memory, and the shell has none.
    sizes = (held.shape, held.stride(), held.storage_offset())
    return torch.ops.inductor._reinterpret_tensor(shell, *sizes)


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the CPU tensors of its arguments."""
    tensors = [it for it in _pytree.tree_leaves((args, kwargs)) if is_chip(it)]
    on_cpu = {id(it): _on_cpu(it) for it in tensors}
    same = {id(on_cpu[id(it)]): it for it in tensors}
    given = {(cpu.untyped_storage()._cdata, cpu.dtype): same[id(cpu)] for cpu in on_cpu.values()}

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        written = same.get(id(value))
        if written is None:
            return _on_chip(value, given)
        if written.shape != value.shape:  # an output argument that the operator has resized
            written.data = _on_chip(value, {})
        return written

    args, kwargs = _pytree.tree_map(lambda it: on_cpu.get(id(it), _on_cpu(it)), (args, kwargs))
    return _pytree.tree_map(wrapped, op(*args, **kwargs))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
    _on_cpu(target).copy_(_on_cpu(source))
    return target


@functools.cache
def bring_up() -> tuple[torch.library.Library, ...]:
    """Register the device with torch, for as long as the returned libraries are kept."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Chip())
    every = torch.library.Library("_", "IMPL")
    every.fallback(_run, DISPATCH_KEY)
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("_copy_from", _copy_from, DISPATCH_KEY)
    return every, aten
