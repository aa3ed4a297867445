"""A device of another make, in Python: PrivateUse1 under the name ``chip``, computed on the CPU.

torch's own support for such backends gives tensors their device, its module and its guards;
every operator that reaches the device's key runs on the CPU tensor behind each tensor of the
device. A raw kernel has nothing there to point at, as with a chip that it was not written for.
A process can have one such device, and keeps it; autograd counts on it only if it came before the
first backward, and can then do no more in a forked child. So it has a process of its own.
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
    """What becomes ``torch.chip``.

    Attributes:
        asked: how often its properties were read, for which a device must be running.
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
"""What is behind each storage of the device, by the storage's address."""


def is_chip(value: Any) -> bool:
    """Whether the value is a tensor of the device."""
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def _on_cpu(value: Any) -> Any:
    """The CPU tensor with the memory of a tensor of the device."""
    if is_chip(value):
        memory = _memory[value.untyped_storage()._cdata]
        cpu = torch.empty(0, dtype=value.dtype)
        return cpu.set_(memory, value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]
    is_device = isinstance(value, torch.device) and value.type == NAME
    return torch.device("cpu") if is_device else value


def _on_chip(held: torch.Tensor, given: dict[tuple[int, torch.dtype], torch.Tensor]) -> Any:
    """The tensor of the device with a CPU tensor's memory; a view of what was given, if it is."""
    memory = held.untyped_storage()
    shell = given.get((memory._cdata, held.dtype))
    if shell is None:
        shell = torch._C._acc.create_empty_tensor(held.shape, held.dtype)
        _memory[shell.untyped_storage()._cdata] = memory
    # What compiled code uses: it asks nothing of the memory, of which the shell has none.
    sizes = (held.shape, held.stride(), held.storage_offset())
    return torch.ops.inductor._reinterpret_tensor(shell, *sizes)


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator on the memory of its arguments."""
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
        if written.shape != value.shape:  # an output that the operator has given its size
            written.data = _on_chip(value, {})
        return written

    args, kwargs = _pytree.tree_map(lambda it: on_cpu.get(id(it), _on_cpu(it)), (args, kwargs))
    return _pytree.tree_map(wrapped, op(*args, **kwargs))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
    _on_cpu(target).copy_(_on_cpu(source))
    return target


@functools.cache
def bring_up() -> tuple[torch.library.Library, ...]:
    """Make the device known to torch; what is returned keeps it so."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Chip())
    every = torch.library.Library("_", "IMPL")
    every.fallback(_run, DISPATCH_KEY)
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("_copy_from", _copy_from, DISPATCH_KEY)
    return every, aten
