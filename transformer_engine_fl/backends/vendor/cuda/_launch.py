"""Loading compiled kernels onto a device and launching them: the only place that does.

:func:`load` gives a :class:`Kernel`, once per device and specialisation; ``launch`` puts
it on torch's current stream of that device. The kernel's arguments are plain numbers
here: whose memory they point to, and that it is big enough, is the caller's concern.

Launching goes through the driver's ``cuLaunchKernelEx`` with buffers that are prepared
once, because the host's time per call counts: for a small tensor it is all there is.
cuda-core's ``launch`` does the same with more checks.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from transformer_engine_fl.backends import _repeats
from transformer_engine_fl.backends.vendor.cuda._compile import (
    Specialisation,
    architecture,
    cubin,
)
from transformer_engine_fl.core.errors import NotSupportedError, TeFlError
from transformer_engine_fl.core.locks import ForkSafeLock

__all__ = ["Geometry", "Kernel", "LaunchError", "Limits", "limits", "load"]


class LaunchError(TeFlError, RuntimeError):
    """The CUDA driver refused a call.

    Attributes:
        code: the driver's number for the reason.
    """

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"CUDA error: {_describe(code)}, in {what}")
        self.code = code


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


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a kernel is launched, but for the size of its grid.

    Attributes:
        threads: threads per block.
        arguments: the kernel's parameters, as ``struct`` format characters.
        shared_bytes: dynamic shared memory per block.
        cluster: blocks per cluster.
        together: blocks that wait for each other and are no cluster; if there are several, the
            launch is cooperative: all blocks of the grid run at once.
        dependent: may start while the kernel before it is finishing (it waits itself).
        carveout: percent of a multiprocessor's memory that should be shared memory rather
            than L1 cache; None leaves it to the driver.
    """

    threads: int
    arguments: str
    shared_bytes: int = 0
    cluster: int = 1
    dependent: bool = False
    carveout: int | None = None
    together: int = 1


# ------------------------------------------------------------------- the driver's types

_INVALID_CONTEXT: Final = 201
# Device attributes in the order of Limits: the compute capability's two numbers, the
# count of multiprocessors, the most shared memory of a block and of a multiprocessor.
_LIMITS: Final = (75, 76, 16, 97, 81)
_MAX_DYNAMIC_SHARED_BYTES: Final = 8
_SHARED_CARVEOUT: Final = 9
_LARGE_CLUSTERS: Final = 14  # of more blocks than every device of the architecture can run
_RUNS_COOPERATIVE: Final = 95  # a device attribute
_COOPERATIVE: Final = 2
_CLUSTER_DIMENSION: Final = 4
_PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6
_CAPTURE_MODE_RELAXED: Final = 2


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute; the value's union is 64 bytes."""

    _fields_ = [("id", ctypes.c_uint64), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid_x", ctypes.c_uint32),
        ("grid_y", ctypes.c_uint32),
        ("grid_z", ctypes.c_uint32),
        ("block_x", ctypes.c_uint32),
        ("block_y", ctypes.c_uint32),
        ("block_z", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    ]


@functools.cache
def _driver() -> ctypes.CDLL:
    """The CUDA driver. Torch has initialised it: there is a tensor on a device."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        library = ctypes.CDLL("nvcuda.dll")
    return library


def _device_attribute(attribute: int, device: int) -> int:
    number, value = ctypes.c_int(), ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(number), device)
    _call("cuDeviceGetAttribute", ctypes.byref(value), attribute, number)
    return value.value


def _describe(code: int) -> str:
    texts = []
    for function in (_driver().cuGetErrorName, _driver().cuGetErrorString):
        text = ctypes.c_char_p()
        function(code, ctypes.byref(text))
        texts.append((text.value or b"unknown").decode())
    return f"{texts[1]} ({texts[0]}, {code})"


def _call(function: str, *arguments: Any) -> None:
    code = getattr(_driver(), function)(*arguments)
    if code:
        raise LaunchError(code, function)


# ------------------------------------------------------------------------------ kernels


class Kernel:
    """A kernel on a device, ready to launch."""

    __slots__ = (
        "_device_now",
        "_function",
        "_geometry",
        "_idle",
        "_launch",
        "_stream",
        "device",
        "name",
    )

    def __init__(self, name: str, device: int, code: bytes, geometry: Geometry) -> None:
        self.name = name
        self.device = device
        self._geometry = geometry
        # Prepared buffers that no launch is using: taken and given back by single
        # operations on a list, so that threads need no lock and never share one.
        self._idle: list[_Prepared] = []
        self._launch = _driver().cuLaunchKernelEx
        self._stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._device_now: Callable[[], int] = torch._C._cuda_getDevice
        with torch.cuda.device(device):
            _bind_context(device)
            self._function = _load_function(code, name)
            for attribute, value in (
                (_MAX_DYNAMIC_SHARED_BYTES, geometry.shared_bytes or None),
                (_SHARED_CARVEOUT, geometry.carveout),
                (_LARGE_CLUSTERS, 1 if geometry.cluster > 8 else None),
            ):
                if value is not None:
                    _call("cuFuncSetAttribute", self._function, attribute, value)

    def statements(
        self, name: Callable[[Any], str], blocks: int, rows_of_blocks: int, *values: Any
    ) -> list[str]:
        """What launches with these numbers, on the current device, as lines of Python.

        The device must be this kernel's. For ``name`` see ``_repeats.note``.
        """
        kinds = self._geometry.arguments
        if any(
            kind != "P" and type(it) is not float and not abs(it) < _repeats.LEAST_ADDRESS
            for kind, it in zip(kinds, values, strict=True)
        ):
            raise _repeats.UnrepeatableError("numbers that may be addresses")
        # An address that is 0 stands for what is not there, in each of these launches.
        given = [at for at, kind in enumerate(kinds) if kind == "P" and values[at]]

        def new() -> tuple[ctypes.Array[ctypes.c_char], tuple[Any, ...], _Prepared]:
            made = _Prepared(self._geometry, self._function, given)
            made.pack_into(made.buffer, made.start, *values)
            made.config.grid_x, made.config.grid_y = blocks, rows_of_blocks
            return made.buffer, made.arguments, made

        idle = [new()]
        before_stream = bytes(idle[0][-1].config)[: _Config.stream.offset]
        pack = struct.Struct(f"@{len(given)}P{len(before_stream)}sP").pack_into
        addresses = "".join(f"{name(values[at])}, " for at in given)
        stream = f"{name(self._stream)}({self.device})"
        return [
            "try:",
            f"    _its_buffer, _its_arguments, _its_made = _its_all = {name(idle.pop)}()",
            "except IndexError:",
            f"    _its_buffer, _its_arguments, _its_made = _its_all = {name(new)}()",
            f"{name(pack)}(_its_buffer, 0, {addresses}{name(before_stream)}, {stream})",
            f"if _its_code := {name(self._launch)}(*_its_arguments):",
            f"    {name(self._settle)}(_its_code, _its_made)",
            f"{name(idle.append)}(_its_all)",
        ]

    def launch(self, blocks: int, rows_of_blocks: int, *values: Any) -> None:
        """Put the kernel on torch's current stream of its device.

        Args:
            blocks, rows_of_blocks: the grid, in blocks (also if they form clusters).
            values: the kernel's arguments: addresses and numbers.

        Raises:
            NotSupportedError: a number is larger than the kernel's parameter.
            LaunchError: the driver refused.
        """
        if self._device_now() != self.device:
            with torch.cuda.device(self.device):
                return self.launch(blocks, rows_of_blocks, *values)
        if _repeats.active is not None:
            told = map(_told, self._geometry.arguments, values)
            _repeats.note(self, blocks, rows_of_blocks, *told)
        try:
            prepared = self._idle.pop()
        except IndexError:
            prepared = _Prepared(self._geometry, self._function)
        try:
            prepared.pack_into(prepared.buffer, prepared.start, *values)
        except struct.error as error:
            raise NotSupportedError(f"{self.name}: a size is too large: {error}") from error
        config = prepared.config
        config.grid_x = blocks
        config.grid_y = rows_of_blocks
        config.stream = self._stream(self.device)
        if code := self._launch(*prepared.arguments):
            self._settle(code, prepared)
        self._idle.append(prepared)
        return None

    def _settle(self, code: int, prepared: _Prepared) -> None:
        """Launch once more if this thread has not used CUDA yet; raise what the driver refuses."""
        if code == _INVALID_CONTEXT:
            _bind_context(self.device)
            code = self._launch(*prepared.arguments)
        if code:
            raise LaunchError(code, f"the launch of {self.name}")

    @property
    def cluster(self) -> int:
        """Blocks per cluster; grids are multiples of it."""
        return self._geometry.cluster

    def resident_groups(self) -> int:
        """How many groups (blocks, clusters or others) the device can run at once."""
        geometry = self._geometry
        count = ctypes.c_int()
        with torch.cuda.device(self.device):
            if geometry.together > 1 and not _device_attribute(_RUNS_COOPERATIVE, self.device):
                return 0
            if geometry.cluster > 1:
                prepared = _Prepared(geometry, self._function)
                prepared.config.grid_x = geometry.cluster
                _call(
                    "cuOccupancyMaxActiveClusters",
                    ctypes.byref(count),
                    self._function,
                    ctypes.byref(prepared.config),
                )
                return count.value
            _call(
                "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                ctypes.byref(count),
                self._function,
                geometry.threads,
                ctypes.c_size_t(geometry.shared_bytes),
            )
            return count.value * limits(self.device).multiprocessors // geometry.together


def _told(kind: str, value: Any) -> Any:
    return _repeats.Address(value) if kind == "P" else value


class _Prepared:
    """The memory of one launch: its configuration, its parameters and where each lies.

    Args:
        geometry, function: the kernel's.
        first: places of addresses among the parameters that lie in a row, right before the
            configuration. So these, what the configuration begins with and its stream can
            all be written at once.

    Attributes:
        start: where in the buffer ``pack_into`` writes the other parameters, or all.
        arguments: what the driver's function takes, in the form in which ctypes has the least
            to do: its own pointers, in a tuple, for a function without ``argtypes``.
    """

    __slots__ = ("arguments", "attributes", "buffer", "config", "pack_into", "parameters", "start")

    def __init__(
        self, geometry: Geometry, function: ctypes.c_void_p, first: Sequence[int] = ()
    ) -> None:
        kinds, word = geometry.arguments, struct.calcsize("@P")
        packer = struct.Struct("@" + kinds)
        self.pack_into = packer.pack_into
        self.start = len(first) * word + ctypes.sizeof(_Config)
        self.buffer = ctypes.create_string_buffer(self.start + packer.size)
        offsets = [
            self.start + struct.calcsize("@" + kinds[: at + 1]) - struct.calcsize("@" + kind)
            for at, kind in enumerate(kinds)
        ]
        for turn, place in enumerate(first):
            offsets[place] = turn * word
        start = ctypes.addressof(self.buffer)
        self.parameters = (ctypes.c_void_p * max(len(offsets), 1))(*(start + at for at in offsets))
        self.attributes = (_Attribute * 3)()
        count = 0
        if geometry.cluster > 1:
            self.attributes[count].id = _CLUSTER_DIMENSION
            self.attributes[count].value[0:3] = (geometry.cluster, 1, 1)
            count += 1
        if geometry.together > 1:
            self.attributes[count].id = _COOPERATIVE
            self.attributes[count].value[0] = 1
            count += 1
        if geometry.dependent:
            self.attributes[count].id = _PROGRAMMATIC_STREAM_SERIALIZATION
            self.attributes[count].value[0] = 1
            count += 1
        self.config = config = _Config.from_buffer(self.buffer, len(first) * word)
        config.grid_x = config.grid_y = config.grid_z = 1
        config.block_x, config.block_y, config.block_z = geometry.threads, 1, 1
        config.shared_bytes = geometry.shared_bytes
        config.attributes = ctypes.addressof(self.attributes) if count else None
        config.attribute_count = count
        self.arguments = (
            ctypes.byref(config),
            ctypes.c_void_p.from_param(function.value),
            ctypes.byref(self.parameters),
            None,
        )


def _load_function(code: bytes, name: str) -> ctypes.c_void_p:
    """The kernel's function in the current context; loaded for good."""
    library, kernel, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    # A first call may come while a stream is being captured, when loading counts as
    # unsafe unless this thread says that it is not part of the capture.
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        nothing: tuple[Any, ...] = (None, None, 0, None, None, 0)
        _call("cuLibraryLoadData", ctypes.byref(library), code, *nothing)
        _call("cuLibraryGetKernel", ctypes.byref(kernel), library, name.encode())
        _call("cuKernelGetFunction", ctypes.byref(function), kernel)
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    return function


def _bind_context(device: int) -> None:
    """Make the device's primary context (torch's) the current one of this thread."""
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(number), device)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    try:
        _call("cuCtxSetCurrent", context)
    finally:
        _call("cuDevicePrimaryCtxRelease_v2", number)


_kernels: dict[tuple[int, Specialisation, Geometry], Kernel] = {}
_loading = ForkSafeLock()


def load(specialisation: Specialisation, geometry: Geometry, device: int) -> Kernel:
    """The kernel on that device; compiled and loaded by the first who asks."""
    key = (device, specialisation, geometry)
    kernel = _kernels.get(key)
    if kernel is None:
        with _loading:
            kernel = _kernels.get(key)
            if kernel is None:
                found = limits(device)
                code = cubin(specialisation, architecture(found.major, found.minor))
                kernel = Kernel(specialisation.kernel, device, code, geometry)
                _kernels[key] = kernel
    return kernel
