"""Loading compiled kernels onto a device and launching them; no other module of the set does.

:func:`load` returns a :class:`Kernel`, once per device and specialisation. Its ``launch`` puts it
on torch's current stream of that device through ``_driver.Function`` (cuda-core's ``launch`` does
the same with more checks).
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from transformer_engine_fl.backends import _repeats
from transformer_engine_fl.backends._driver import (
    Function,
    Geometry,
    LaunchError,
    Prepared,
    bind_context,
    call,
)
from transformer_engine_fl.backends._exchange import (
    FIRST_EPOCH,
    SLOTS,
    repeated_exchange,
    slots_for,
)
from transformer_engine_fl.backends.vendor.cuda._compile import (
    Specialisation,
    architecture,
    cubin,
)
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.core.locks import ForkSafeLock

__all__ = ["ExchangingKernel", "Geometry", "Kernel", "LaunchError", "Limits", "limits", "load"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a kernel may use of a device.

    Attributes:
        major, minor: the compute capability.
        multiprocessors: how many there are.
        shared_per_block, shared_per_multiprocessor: shared memory in bytes.
    """

    major: int
    minor: int
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int

    @property
    def has_clusters(self) -> bool:
        """Whether blocks can form clusters and launches can overlap."""
        return self.major >= 9


@functools.cache
def limits(device: int) -> Limits:
    """The limits of a CUDA device."""
    return Limits(*(_device_attribute(attribute, device) for attribute in _LIMITS))


# The driver's device attributes in the order of Limits: major and minor compute capability, the
# number of multiprocessors, the maximum shared memory of a block and of a multiprocessor.
_LIMITS: Final = (75, 76, 16, 97, 81)
_RUNS_COOPERATIVE: Final = 95  # a device attribute, too
_MAX_DYNAMIC_SHARED_BYTES: Final = 8
_SHARED_CARVEOUT: Final = 9
_LARGE_CLUSTERS: Final = 14  # allows sizes that not every device of an architecture supports
_CAPTURE_MODE_RELAXED: Final = 2


def _device_attribute(attribute: int, device: int) -> int:
    number, value = ctypes.c_int(), ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(number), device)
    call("cuDeviceGetAttribute", ctypes.byref(value), attribute, number)
    return value.value


class Kernel(Function):
    """A kernel on a device, ready to launch."""

    __slots__ = ("_device_now",)

    def __init__(self, name: str, device: int, code: bytes, geometry: Geometry) -> None:
        self._device_now: Callable[[], int] = torch._C._cuda_getDevice
        with torch.cuda.device(device):
            bind_context(device)
            function = _load_function(code, name)
            for attribute, value in (
                (_MAX_DYNAMIC_SHARED_BYTES, geometry.shared_bytes or None),
                (_SHARED_CARVEOUT, geometry.carveout),
                (_LARGE_CLUSTERS, 1 if geometry.cluster > 8 else None),
            ):
                if value is not None:
                    call("cuFuncSetAttribute", function, attribute, value)
        super().__init__(name, device, function, geometry)

    def launch(self, blocks: int, rows_of_blocks: int, *values: Any) -> None:
        """Put the kernel on torch's current stream of its device.

        The same arguments as :meth:`start`.

        Raises:
            NotSupportedError: a number is larger than the kernel's parameter.
            LaunchError: the driver refused.
        """
        if self._device_now() != self.device:
            with torch.cuda.device(self.device):
                return self.launch(blocks, rows_of_blocks, *values)
        if _repeats.active is not None:
            _repeats.note(self, blocks, rows_of_blocks, *self._noted(values))
        try:
            return self.start(blocks, rows_of_blocks, *values)
        except struct.error as error:
            raise NotSupportedError(f"{self.name}: a size is too large: {error}") from error

    def _noted(self, values: tuple[Any, ...]) -> Iterator[Any]:
        """The launch's values as ``_repeats.note`` takes them, pointers marked as addresses."""
        for kind, value in zip(self._geometry.arguments, values, strict=False):
            yield _repeats.Address(value) if kind == "P" else value

    def statements(
        self, name: Callable[[Any], str], blocks: int, rows_of_blocks: int, *values: Any
    ) -> list[str]:
        kinds = self._geometry.arguments
        if any(
            kind != "P" and type(it) is not float and not abs(it) < _repeats.LEAST_ADDRESS
            for kind, it in zip(kinds, values, strict=True)
        ):
            raise _repeats.UnrepeatableError("numbers that may be addresses")
        return super().statements(name, blocks, rows_of_blocks, *values)

    @property
    def cluster(self) -> int:
        """Blocks per cluster; grids are multiples of it."""
        return self._geometry.cluster

    def resident_groups(self) -> int:
        """How many groups (blocks, clusters or cooperating blocks) are resident at once."""
        geometry = self._geometry
        count = ctypes.c_int()
        with torch.cuda.device(self.device):
            if geometry.together > 1 and not _device_attribute(_RUNS_COOPERATIVE, self.device):
                return 0
            if geometry.cluster > 1:
                prepared = Prepared(geometry, self._function)
                prepared.config.grid_x = geometry.cluster
                call(
                    "cuOccupancyMaxActiveClusters",
                    ctypes.byref(count),
                    self._function,
                    ctypes.byref(prepared.config),
                )
                return count.value
            call(
                "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                ctypes.byref(count),
                self._function,
                geometry.threads,
                ctypes.c_size_t(geometry.shared_bytes),
            )
            return count.value * limits(self.device).multiprocessors // geometry.together


class ExchangingKernel(Kernel):
    """A kernel whose blocks form no cluster, but exchange values through slots in memory.

    Its last two parameters are the first epoch and the slots (``backends/_exchange.py``). In their
    place ``launch`` takes how many epochs a block posts, at most.
    """

    __slots__ = ("_slots",)

    def __init__(self, name: str, device: int, code: bytes, geometry: Geometry) -> None:
        super().__init__(name, device, code, geometry)
        self._slots = functools.partial(slots_for, torch.device("cuda", device))

    def start(self, blocks: int, rows_of_blocks: int, *values: Any) -> None:
        *others, epochs = values
        first, slots = self._slots(blocks, epochs)
        super().start(blocks, rows_of_blocks, *others, first, slots.data_ptr())

    def _noted(self, values: tuple[Any, ...]) -> Iterator[Any]:
        *others, epochs = values
        yield from super()._noted(tuple(others))
        yield epochs

    def statements(
        self, name: Callable[[Any], str], blocks: int, rows_of_blocks: int, *values: Any
    ) -> list[str]:
        *others, epochs = values
        named, line = repeated_exchange(name, self._slots, blocks, epochs)
        lines = super().statements(named, blocks, rows_of_blocks, *others, FIRST_EPOCH, SLOTS)
        return [line, *lines]


def _load_function(code: bytes, name: str) -> ctypes.c_void_p:
    """The kernel's function in the current context; it is never unloaded."""
    library, kernel, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    # A first call may come during stream capture, when loading is an unsafe call unless this
    # thread's capture mode is relaxed.
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        nothing: tuple[Any, ...] = (None, None, 0, None, None, 0)
        call("cuLibraryLoadData", ctypes.byref(library), code, *nothing)
        call("cuLibraryGetKernel", ctypes.byref(kernel), library, name.encode())
        call("cuKernelGetFunction", ctypes.byref(function), kernel)
    finally:
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    return function


_kernels: dict[tuple[int, Specialisation, Geometry], Kernel] = {}
_loading = ForkSafeLock()


def load(specialisation: Specialisation, geometry: Geometry, device: int) -> Kernel:
    """The kernel on that device; compiled and loaded by the first call."""
    key = (device, specialisation, geometry)
    kernel = _kernels.get(key)
    if kernel is None:
        with _loading:
            kernel = _kernels.get(key)
            if kernel is None:
                found = limits(device)
                code = cubin(specialisation, architecture(found.major, found.minor))
                kind = ExchangingKernel if geometry.together > 1 else Kernel
                kernel = kind(specialisation.kernel, device, code, geometry)
                _kernels[key] = kernel
    return kernel
