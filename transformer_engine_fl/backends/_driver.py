"""Launching kernels through the CUDA driver with the least work on the host.

A :class:`Function` is a loaded kernel and its launch geometry. Its arguments are plain numbers
here: the caller makes sure that addresses are valid, that the memory is large enough, and that the
kernel's device is the current one.

The driver's ``cuLaunchKernelEx`` is called with buffers that are prepared once, because host time
per call counts: for a small tensor it is the whole cost. Nothing here waits for the device.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from transformer_engine_fl.backends._repeats import Address
from transformer_engine_fl.core.errors import TeFlError

__all__ = ["Function", "Geometry", "LaunchError", "Prepared", "bind_context", "call", "is_there"]


class LaunchError(TeFlError, RuntimeError):
    """The CUDA driver refused a call.

    Attributes:
        code: the driver's number for the reason.
    """

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"CUDA error: {_describe(code)}, in {what}")
        self.code = code


@dataclass(frozen=True, slots=True)
class Geometry:
    """The launch configuration of a kernel, except the size of its grid.

    Attributes:
        threads: threads per block.
        arguments: the kernel's parameters, as ``struct`` format characters.
        shared_bytes: dynamic shared memory per block.
        cluster: blocks per cluster.
        dependent: programmatic dependent launch: the kernel may start while the previous one is
            finishing (the kernel itself waits where it must).
        carveout: percent of a multiprocessor's memory that should be shared memory rather
            than L1 cache; None leaves it to the driver. The code that loads a kernel applies it.
        together: blocks that wait for each other without forming a cluster; if more than one, the
            launch is cooperative: all blocks of the grid are resident at once.
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
_COOPERATIVE: Final = 2
_CLUSTER_DIMENSION: Final = 4
_PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6


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


_GRID: Final = struct.Struct("@II")
_BEHIND_GRID: Final = _Config.stream.offset - _GRID.size
_BEGIN: Final = struct.Struct(f"@II{_BEHIND_GRID}sP").pack_into
"""Packs the start of a configuration: the grid, the bytes before the stream, and the stream."""


@functools.cache
def _driver() -> ctypes.CDLL:
    """The CUDA driver. Torch has already initialised it, since a tensor is on a device."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        library = ctypes.CDLL("nvcuda.dll")
    return library


@functools.cache
def is_there() -> bool:
    """Whether this machine has a driver with NVIDIA's ``cuLaunchKernelEx``."""
    try:
        return hasattr(_driver(), "cuLaunchKernelEx")
    except OSError:
        return False


def _describe(code: int) -> str:
    texts = []
    for function in (_driver().cuGetErrorName, _driver().cuGetErrorString):
        text = ctypes.c_char_p()
        function(code, ctypes.byref(text))
        texts.append((text.value or b"unknown").decode())
    return f"{texts[1]} ({texts[0]}, {code})"


def call(function: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises:
        LaunchError: the function returned an error.
    """
    code = getattr(_driver(), function)(*arguments)
    if code:
        raise LaunchError(code, function)


# ---------------------------------------------------------------------------- functions


class Function:
    """A kernel on a device, ready to be launched.

    Args:
        name: the kernel's name, for messages.
        device: its device.
        function: the driver's handle.
        geometry: its launch configuration.
        kept: an object that must live as long as the handle is used.
    """

    __slots__ = ("_function", "_geometry", "_idle", "_kept", "_launch", "_stream", "device", "name")

    def __init__(
        self,
        name: str,
        device: int,
        function: ctypes.c_void_p,
        geometry: Geometry,
        kept: Any = None,
    ) -> None:
        self.name = name
        self.device = device
        self._function = function
        self._geometry = geometry
        self._kept = kept
        # Prepared buffers that no launch is using. They are taken and returned by single list
        # operations, so threads need no lock and never share a buffer.
        self._idle: list[Prepared] = []
        self._launch = _driver().cuLaunchKernelEx
        self._stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream

    def statements(
        self, name: Callable[[Any], str], blocks: int, rows_of_blocks: int, *values: Any
    ) -> list[str]:
        """Lines of Python that launch the kernel with these numbers and with new addresses.

        A 64-bit integer may stand in an address's place; the lines contain what ``name`` makes of
        it. The current device must be this kernel's. For ``name`` see ``_repeats.note``.
        """
        kinds = self._geometry.arguments
        # A zero address means an absent argument, in every launch by these lines.
        given = [
            at
            for at, kind in enumerate(kinds)
            if (kind == "P" or type(values[at]) is Address) and values[at]
        ]

        def new() -> tuple[ctypes.Array[ctypes.c_char], tuple[Any, ...], Prepared]:
            made = Prepared(self._geometry, self._function, given)
            made.pack_into(made.buffer, made.start, *values)
            return made.buffer, made.arguments, made

        idle = [new()]
        before_stream = _GRID.pack(blocks, rows_of_blocks) + idle[0][-1].behind_grid
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

    def start(self, blocks: int, rows_of_blocks: int, *values: Any) -> None:
        """Launch the kernel on torch's current stream of its device, which must be the current one.

        Args:
            blocks, rows_of_blocks: the grid, in blocks (also if they form clusters).
            values: the kernel's arguments: addresses and numbers.

        Raises:
            struct.error: a number exceeds the kernel's parameter, or the grid its field.
            LaunchError: the driver refused the launch.
        """
        try:
            prepared = self._idle.pop()
        except IndexError:
            prepared = Prepared(self._geometry, self._function)
        prepared.pack_into(prepared.buffer, prepared.start, *values)
        stream = self._stream(self.device)
        _BEGIN(prepared.buffer, 0, blocks, rows_of_blocks, prepared.behind_grid, stream)
        if code := self._launch(*prepared.arguments):
            self._settle(code, prepared)
        self._idle.append(prepared)

    def _settle(self, code: int, prepared: Prepared) -> None:
        """Launch once more if this thread has not used CUDA yet; raise what the driver refuses."""
        if code == _INVALID_CONTEXT:
            bind_context(self.device)
            code = self._launch(*prepared.arguments)
        if code:
            raise LaunchError(code, f"the launch of {self.name}")


class Prepared:
    """The host memory of one launch: its configuration, its parameters and their addresses.

    Args:
        geometry, function: the kernel's.
        first: indices of address parameters that are placed side by side right before the
            configuration, so that one ``pack`` writes them, the grid and the stream.

    Attributes:
        start: where in the buffer ``pack_into`` writes the other parameters, or all of them.
        behind_grid: the bytes of the configuration between the grid and the stream.
        arguments: the arguments of the driver's function in the form that costs ctypes least:
            its own pointers, in a tuple, for a function without ``argtypes``.
    """

    __slots__ = (
        "arguments",
        "attributes",
        "behind_grid",
        "buffer",
        "config",
        "pack_into",
        "parameters",
        "start",
    )

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
        for index, place in enumerate(first):
            offsets[place] = index * word
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
        self.behind_grid = bytes(config)[_GRID.size : _Config.stream.offset]
        self.arguments = (
            ctypes.byref(config),
            ctypes.c_void_p.from_param(function.value),
            ctypes.byref(self.parameters),
            None,
        )


def bind_context(device: int) -> None:
    """Make the device's primary context (torch's) the current one of this thread."""
    number, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuDeviceGet", ctypes.byref(number), device)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    try:
        call("cuCtxSetCurrent", context)
    finally:
        call("cuDevicePrimaryCtxRelease_v2", number)
