"""Launching Triton kernels: the one place that knows how Triton is called.

``kernel[grid](...)`` looks at every argument again on each call, which costs more time
on the host than a small kernel takes on the device. A :class:`Launch` stands for one
kernel with fixed constants and fixed argument dtypes on one device; its first call goes
through Triton and keeps the compiled kernel, later ones start that directly. What may
still differ between two calls, and what the compiled code depends on, is the 16-byte
alignment of each pointer, so that is looked at each time. Integers must be declared
``do_not_specialize``: a kernel may assume nothing of them but what its constants say.

Where the launcher of the installed Triton is not one that was read and understood, in
the interpreter, and while a profiler has launch hooks set, every call is the ordinary one.

Also here: which device this Triton drives and what that device offers. What a kernel
needs, its grid and its constants, is left to the kernel's own module.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from triton import knobs

from transformer_engine_fl.core.errors import NotSupportedError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["INTERPRETED", "Launch", "Limits", "limits", "ordinary_launches", "unsupported_device"]

INTERPRETED: bool = knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on the CPU."""

_ALIGNMENT_MASK = 15
# In these versions a compiled kernel is started by
# run(x, y, z, stream, function, packed, metadata, enter_hook, exit_hook, *every_argument),
# and a pointer may be passed as an integer. For AMD, compiled code also depends on whether
# a tensor is larger than 2 GB, which nothing here looks at: ordinary launches there.
_UNDERSTOOD = ((3, 6), (3, 7))


class _DirectLaunches:
    """Whether compiled kernels may be started directly; see :func:`ordinary_launches`."""

    allowed = (
        not INTERPRETED
        and torch.version.hip is None
        and tuple(int(part) for part in triton.__version__.split(".")[:2]) in _UNDERSTOOD
        and hasattr(torch._C, "_cuda_getCurrentRawStream")
        and hasattr(torch._C, "_cuda_getDevice")
    )


@contextlib.contextmanager
def ordinary_launches() -> Iterator[None]:
    """Within the block every launch is Triton's ordinary one (to compare the two)."""
    before, _DirectLaunches.allowed = _DirectLaunches.allowed, False
    try:
        yield
    finally:
        _DirectLaunches.allowed = before


class Limits(NamedTuple):
    """What a device offers to one kernel.

    Attributes:
        multiprocessors: how many there are.
        shared_bytes: shared memory that one program may use.
    """

    multiprocessors: int
    shared_bytes: int


@functools.cache
def limits(device: torch.device) -> Limits:
    """The limits of ``device``; in the interpreter two multiprocessors, so that loops turn."""
    if INTERPRETED:
        return Limits(2, 1 << 16)
    utils = triton.runtime.driver.active.utils
    properties = utils.get_device_properties(device.index)
    return Limits(properties["multiprocessor_count"], properties["max_shared_mem"])


@functools.cache
def _driven_type() -> str | None:
    """The torch device type that this Triton drives; None if there is no such device."""
    try:
        return str(triton.runtime.driver.active.get_active_torch_device().type)
    except RuntimeError:  # no driver is active
        return None


def unsupported_device(device: torch.device) -> str | None:
    """Why kernels cannot run on ``device``'s tensors; None if they can."""
    if INTERPRETED:
        return None if device.type == "cpu" else "Triton's interpreter is given CPU tensors only"
    driven = _driven_type()
    if driven is None:
        return "Triton finds no device to drive on this machine"
    if device.type != driven:
        return f"Triton drives {driven!r} devices here, the tensors are on {str(device)!r}"
    return None


def _hooked() -> bool:
    """Whether somebody wants to see each launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Launch:
    """One kernel with its constants and the dtypes of its arguments, on one device.

    The kernel's parameters are, in this order, pointers, numbers and constants. The
    caller promises that a given pointer always has one dtype (or is always None).

    Args:
        kernel: the jitted function.
        device: where it runs.
        num_warps: warps of one program.
        constants: its constexpr parameters, in order.
    """

    __slots__ = ("_constants", "_device", "_index", "_kernel", "_options", "_ready")

    def __init__(
        self, kernel: Any, device: torch.device, *, num_warps: int, **constants: Any
    ) -> None:
        self._kernel = kernel
        self._device = device
        self._index = device.index
        self._options = {"num_warps": num_warps}
        self._constants = constants
        # alignment of the pointers (0: each is aligned) -> how to start the compiled kernel
        self._ready: dict[object, Callable[..., None]] = {}

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[int | float, ...],
    ) -> None:
        """Start the kernel on the current stream of its device."""
        try:
            pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        except RuntimeError as error:  # a wrapper that torch's transforms put around a tensor
            raise NotSupportedError(f"a tensor has no memory of its own: {error}") from None
        bits = 0
        for pointer in pointers:
            bits |= pointer
        alignment: object = 0
        if bits & _ALIGNMENT_MASK:
            alignment = tuple([not pointer & _ALIGNMENT_MASK for pointer in pointers])
        start = self._ready.get(alignment)
        if start is None or not _DirectLaunches.allowed or _hooked():
            self._ordinary(alignment, grid, tensors, numbers)
        elif torch._C._cuda_getDevice() == self._index:
            start(*grid, torch._C._cuda_getCurrentRawStream(self._index), pointers, numbers)
        else:
            with torch.cuda.device(self._index):
                start(*grid, torch._C._cuda_getCurrentRawStream(self._index), pointers, numbers)

    def _ordinary(
        self,
        alignment: object,
        grid: tuple[int, int],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[int | float, ...],
    ) -> None:
        if INTERPRETED:
            self._kernel[grid](*tensors, *numbers, **self._constants, **self._options)
            return
        with torch.get_device_module(self._device).device(self._index):
            compiled = self._kernel[grid](*tensors, *numbers, **self._constants, **self._options)
        if _DirectLaunches.allowed and isinstance(compiled, triton.compiler.CompiledKernel):
            self._ready[alignment] = _starter(compiled, tuple(self._constants.values()))


def _starter(compiled: Any, constants: tuple[Any, ...]) -> Callable[..., None]:
    """How to start ``compiled``, without the looks that an ordinary launch takes."""
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata

    def start(x: int, y: int, stream: int, pointers: list[int], numbers: tuple[Any, ...]) -> None:
        run(
            x, y, 1, stream, function, packed, None, None, None, *pointers, *numbers, *constants
        )  # fmt: skip

    return start
