"""Launching Triton kernels: the only module that knows how Triton is called.

``kernel[grid](...)`` inspects every argument again on each call, which costs more host time than a
small kernel takes on the device. A :class:`Launch` stands for one kernel with fixed constants and
fixed argument dtypes on one device. Its first call lets Triton compile and launch the kernel and
keeps the compiled kernel; later calls launch that directly, by a generated function if every
pointer is aligned, as is nearly always so. Between calls only the 16-byte alignment of each pointer
may still change what the compiled code depends on, so it is tested each time. Integers must be
declared ``do_not_specialize``: a kernel may assume nothing about them but what its constants say.

Every call goes through Triton itself if the launcher of the installed Triton version is not known
here, in the interpreter, and while a profiler has set launch hooks.

Also here: which device this Triton drives and that device's limits. What a kernel needs, its grid
and its constants belong in the kernel's own module.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import _allocation

from transformer_engine_fl.backends import _repeats
from transformer_engine_fl.backends._allocation import quickest
from transformer_engine_fl.backends._arguments import extent
from transformer_engine_fl.backends._driver import Function, Geometry, is_there
from transformer_engine_fl.backends._exchange import (
    FIRST_EPOCH,
    SLOTS,
    repeated_exchange,
    slots_for,
)
from transformer_engine_fl.core.blame import error_text
from transformer_engine_fl.core.errors import NotStartedError, NotSupportedError
from transformer_engine_fl.core.locks import ForkSafeLock

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "INTERPRETED",
    "ExchangingLaunch",
    "KernelCompileError",
    "Launch",
    "Limits",
    "has_gluon",
    "has_ptx",
    "limits",
    "ordinary_launches",
    "unsupported_device",
]

INTERPRETED: bool = not isinstance(tl.sum, triton.runtime.JITFunction)
"""Whether kernels run in Triton's interpreter, on the CPU.

Triton decides that for its own functions when it is imported. If the environment variable were set
later, kernels would run nowhere.
"""

_INTERPRETER: Final = ForkSafeLock()
"""Held during an interpreted launch, which patches Triton's language for all threads."""

_ALIGNMENT_MASK = 15
_MOST_REGISTERS = 255  # of one thread
_PARTITIONS = 4  # of an NVIDIA multiprocessor
_WARP_SIZE = 32  # of NVIDIA
_MOST_SHARED = 228 * 1024  # bytes per program; for more, Triton calls the driver differently
# In these versions a compiled kernel takes the parameters that are no constants, and the addresses
# of two scratch memories; :func:`_started` sets the other launch attributes. For AMD, compiled code
# also depends on whether a tensor is larger than 2 GB, which is not tested here: Triton launches
# there.
_UNDERSTOOD = ((3, 6), (3, 7), (3, 8))
_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
_RUNTIME = triton.knobs.runtime


class _DirectLaunches:
    """Whether compiled kernels may be launched directly; see :func:`ordinary_launches`."""

    allowed = (
        not INTERPRETED
        and torch.version.hip is None
        and _VERSION in _UNDERSTOOD
        and hasattr(torch._C, "_cuda_getCurrentRawStream")
        and hasattr(torch._C, "_cuda_getDevice")
    )


@contextlib.contextmanager
def ordinary_launches() -> Iterator[None]:
    """Within the block Triton itself does every launch (to compare the two ways)."""
    before, _DirectLaunches.allowed = _DirectLaunches.allowed, False
    try:
        yield
    finally:
        _DirectLaunches.allowed = before


# Compute capabilities whose multiprocessors run 32 programs at once.
_ROOMY: Final = (80, 90, 100, 103)


class Limits(NamedTuple):
    """What a device offers to one kernel.

    Attributes:
        multiprocessors: the number of them.
        shared_bytes: shared memory that one program may use.
        warp_size: threads of a warp.
        registers: registers of a multiprocessor, if a kernel's use of them can be limited;
            otherwise 0.
        capability: CUDA's compute capability, 90 for 9.0; 0 for other devices.
    """

    multiprocessors: int
    shared_bytes: int
    warp_size: int
    registers: int
    capability: int = 0

    @property
    def programs(self) -> int:
        """Programs that every multiprocessor can hold at once, if they are small enough.

        Source: the table of compute capabilities in NVIDIA's CUDA Programming Guide, by which no
        multiprocessor has fewer than 16 resident blocks.
        """
        return 32 if self.capability in _ROOMY else 16


@functools.cache
def limits(device: torch.device) -> Limits:
    """The limits of ``device``; the interpreter has two multiprocessors, so that loops iterate.

    The interpreter supports whatever the newest device does.
    """
    if INTERPRETED:
        return Limits(2, 1 << 16, 32, 0, 90)
    driver = triton.runtime.driver.active
    with torch.get_device_module(device).device(device.index):
        target = driver.get_current_target()
    properties = driver.utils.get_device_properties(device.index)
    return Limits(
        properties["multiprocessor_count"],
        properties["max_shared_mem"],
        target.warp_size,
        properties["max_num_regs"] if target.backend == "cuda" else 0,
        int(target.arch) if target.backend == "cuda" else 0,
    )


@functools.cache
def _driven_type() -> str | None:
    """The torch device type that this Triton drives; None if there is no such device."""
    try:
        return str(triton.runtime.driver.active.get_active_torch_device().type)
    except RuntimeError:  # no driver is active
        return None


def has_ptx() -> bool:
    """Whether kernels are compiled to PTX, so that they may contain inline PTX."""
    return not INTERPRETED and torch.version.hip is None and torch.version.cuda is not None


def has_gluon() -> bool:
    """Whether this Triton's Gluon, which may change with each version, is one known here."""
    return has_ptx() and _VERSION in _UNDERSTOOD


def unsupported_device(device: torch.device) -> str | None:
    """Why kernels cannot run on ``device``'s tensors; None if they can."""
    if INTERPRETED:
        return None if device.type == "cpu" else "Triton's interpreter takes CPU tensors only"
    driven = _driven_type()
    if driven is None:
        return "Triton finds no device that it supports on this machine"
    if device.type != driven:
        return f"Triton runs on {driven!r} devices here; the tensors are on {str(device)!r}"
    return None


class _NoCalls:
    """Stands for a chain of hooks in a Triton without any, where no kernel is launched directly."""

    calls = ()


_ENTER, _LEAVE = _RUNTIME.launch_enter_hook or _NoCalls, _RUNTIME.launch_exit_hook or _NoCalls


def _hooked() -> bool:
    """Whether a launch hook is set: added to Triton's chain, or put in place of it."""
    return bool(
        _ENTER.calls
        or _LEAVE.calls
        or _RUNTIME.launch_enter_hook is not _ENTER
        or _RUNTIME.launch_exit_hook is not _LEAVE
    )


class _Started(NamedTuple):
    """A compiled kernel that can be launched directly.

    Attributes:
        function: the function for the driver to launch.
        kinds: for each of the kernel's parameters a ``struct`` format character, or a tuple of
            such; None for a constant of the machine code.
        scratch: bytes of scratch memory that each program needs; tensor descriptors made in the
            kernel live there.
    """

    function: Function
    kinds: tuple[Any, ...]
    scratch: int

    def __call__(self, grid: tuple[int, int], memory: Tensor | None, own: tuple[Any, ...]) -> None:
        """Launch it, with scratch memory if it needs any."""
        if all(grid):
            scratch = 0 if memory is None else memory.data_ptr()
            self.function.start(*grid, *_given(self.kinds, own), scratch, 0)


# The ``struct`` format character of each Triton type.
_KINDS: Final = dict(
    zip(
        ("i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64", "fp32", "fp64"),
        "bbhiqBBHIQfd",
        strict=True,
    )
)


def _kind(type_name: Any) -> Any:
    """The kind of a parameter, as in :class:`_Started`; KeyError for an unknown type."""
    if isinstance(type_name, tuple):
        return tuple(map(_kind, type_name))
    if type_name == "constexpr":
        return None
    return "P" if type_name.startswith("*") else _KINDS[type_name]


def _given(kinds: tuple[Any, ...], values: tuple[Any, ...]) -> list[Any]:
    """The arguments of a call that the machine code takes, as a flat list."""
    given: list[Any] = []
    for kind, value in zip(kinds, values, strict=False):
        if isinstance(kind, tuple):
            given += _given(kind, value)
        elif kind is not None:
            given.append(value)
    return given


def _started(compiled: Any, device: int) -> _Started | None:
    """How to launch a compiled kernel directly; None if that is impossible.

    That is so if the device is not NVIDIA's, if Triton does more for a launch than is known here
    (to instrument it, say), or if a parameter has an unknown type.
    """
    run, target = compiled.run, compiled.metadata.target
    watched = getattr(run, "profile_scratch_size", 1) or getattr(run, "gsan_enabled", False)
    if watched or (target.backend, target.warp_size) != ("cuda", _WARP_SIZE) or not is_there():
        return None
    warps, clustered, shared = compiled.packed_metadata
    if clustered != 1 or shared > _MOST_SHARED:
        return None
    try:
        kinds = tuple(map(_kind, compiled.src.signature.values()))
    except KeyError:
        return None
    geometry = Geometry(
        warps * _WARP_SIZE,
        "".join(_given(kinds, kinds)) + "PP",  # and two scratch memories
        shared,
        dependent=bool(run.launch_pdl),
        together=2 if run.launch_cooperative_grid else 1,  # or more
    )
    handle = ctypes.c_void_p(compiled.function)
    function = Function(compiled.name, device, handle, geometry, kept=compiled)
    return _Started(function, kinds, run.global_scratch_size)


_WATCHING: Final = {
    "direct": _DirectLaunches,
    "enter": _ENTER,
    "leave": _LEAVE,
    "runtime": _RUNTIME,
}
_WATCHED: Final = """\
not {direct}.allowed
        or {enter}.calls
        or {leave}.calls
        or {runtime}.launch_enter_hook is not {enter}
        or {runtime}.launch_exit_hook is not {leave}"""
"""Whether a hook wants to see launches, or direct ones are not allowed: Triton must launch."""

_QUICK = """\
def quick(grid, tensors, numbers):
    try:
        {taken}
    except (AttributeError, RuntimeError):
        return False
    x, y = grid
    if (
        ({bits}) & {mask}
        or not x
        or not y
        or torch._cuda_getDevice() != {index}
        or {watched}
    ):
        return False
    start(x, y, {arguments}, 0, 0)
    return True
"""


def _quick(
    ready: _Started, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...], index: int
) -> Callable[..., bool] | None:
    """A function that launches a kernel if its pointers are aligned, else returns False.

    Args:
        ready: the compiled kernel.
        tensors, numbers: the arguments of a call; where it has None, every call has None.
        index: the device's index.
    """
    if ready.scratch:
        return None
    given = [place for place, tensor in enumerate(tensors) if tensor is not None]
    pointers = tuple(f"p{place}" for place in range(len(tensors)))
    source = _QUICK.format(
        taken="; ".join(
            [
                f"{', '.join(f't{place}' for place in range(len(tensors)))}, = tensors",
                *(f"p{place} = t{place}.data_ptr()" for place in given),
            ]
        ),
        bits=" | ".join(f"p{place}" for place in given) or "0",
        mask=_ALIGNMENT_MASK,
        watched=_WATCHED.format_map({name: name for name in _WATCHING}),
        index=index,
        arguments=", ".join(_given(ready.kinds, (*pointers, *_places(numbers)))),
    )
    namespace = {**_WATCHING, "torch": torch._C, "start": ready.function.start}
    exec(compile(source, "<quick launch>", "exec"), namespace)
    made: Callable[..., bool] = namespace["quick"]
    return made


def _places(numbers: tuple[Any, ...], within: str = "numbers") -> list[Any]:
    """Python expressions for the numbers; for a tuple of numbers a list of them."""
    places = [f"{within}[{place}]" for place in range(len(numbers))]
    return [
        _places(number, place) if isinstance(number, tuple) else place
        for number, place in zip(numbers, places, strict=True)
    ]


@contextlib.contextmanager
def _scratch_memory(device: torch.device) -> Iterator[None]:
    """Within the block Triton takes a kernel's scratch memory from torch's allocator."""

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty((size,), dtype=torch.uint8, device=device)

    before = _allocation._allocator.set(allocate)
    try:
        yield
    finally:
        _allocation._allocator.reset(before)


def _may_be_address(number: Any) -> bool:
    """Whether a number may be an address, as it is or as ``_numbers`` encodes it."""
    if isinstance(number, tuple):
        return any(map(_may_be_address, number))
    if isinstance(number, float):
        return False
    return bool(min(abs(number), abs(number - 2**60) >> 1) >= _repeats.LEAST_ADDRESS)


def _pointers(tensors: tuple[Tensor | None, ...]) -> list[int]:
    """The tensors' addresses; 0 for None.

    Raises:
        NotSupportedError: a tensor has no address.
    """
    try:
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    except RuntimeError as error:  # a wrapper that torch's transforms put around a tensor
        raise NotSupportedError(f"a tensor has no memory of its own: {error}") from None


def _alignment(pointers: Sequence[int]) -> object:
    """For each pointer whether it is aligned; 0 if all are."""
    bits = 0
    for pointer in pointers:
        bits |= pointer
    return tuple([not it & _ALIGNMENT_MASK for it in pointers]) if bits & _ALIGNMENT_MASK else 0


_SCRATCH: Final = _repeats.Address(1)
"""Stands for the scratch memory of a repeated launch; any address but 0."""


def _statements(
    name: Callable[[Any], str],
    ready: _Started,
    grid: tuple[int, int],
    pointers: list[_repeats.Address],
    numbers: tuple[Any, ...],
    device: torch.device,
) -> list[str]:
    """Lines of Python that launch a kernel again; see ``_repeats.note``."""
    watched = _WATCHED.format_map({it: name(value) for it, value in _WATCHING.items()})
    before, behind = [f"if ({watched}):", "    return _MISS"], []
    if not all(grid):
        return before
    if ready.scratch:
        size = (grid[0] * grid[1] * ready.scratch,)
        passed = ", ".join(map(name, (size, (1,), torch.uint8)))
        before.append(f"_its_memory = {name(quickest(device))}({passed})")
        behind = ["del _its_memory"]

    def named(value: Any) -> str:
        return "_its_memory.data_ptr()" if value is _SCRATCH else name(value)

    own = _given(ready.kinds, (*pointers, *numbers))
    scratch = _SCRATCH if ready.scratch else 0
    return [*before, *ready.function.statements(named, *grid, *own, scratch, 0), *behind]


class KernelCompileError(NotStartedError):
    """Triton cannot compile a kernel, or the device cannot load it.

    An operator that writes one of its arguments by several kernels must load all of them
    (:meth:`Launch.load`) before the first of those launches.
    """

    def __init__(self, kernel: Any, device: torch.device, error: Exception) -> None:
        name = getattr(kernel, "__name__", type(kernel).__name__)
        super().__init__(
            f"kernel {name!r} does not compile for {str(device)!r}: {error_text(error)}"
        )


def _register_share(offered: Limits, warps: int) -> int:
    """Registers per thread with which a multiprocessor can hold this many warps.

    Registers are divided among the multiprocessor's partitions. Where warps do not divide evenly,
    the threads of the fullest partition have the fewest.
    """
    most = -(-warps // _PARTITIONS)
    return offered.registers // _PARTITIONS // (most * offered.warp_size)


class Launch:
    """One kernel with its constants and the dtypes of its arguments, on one device.

    The kernel's parameters are, in this order, pointers, numbers and constants. The
    caller promises that each pointer always has one dtype (or is always None).

    Args:
        kernel: the jitted function.
        device: where it runs.
        threads: threads of a program, at least a warp; None for a device without a notion of
            threads.
        resident: programs that one multiprocessor must be able to hold at once, if the
            kernel relies on that.
        options: compiler options, besides those that follow from the above.
        constants: its constexpr parameters.
    """

    __slots__ = (
        "_constants",
        "_device",
        "_index",
        "_kernel",
        "_loaded",
        "_options",
        "_quick",
        "_ready",
    )

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        *,
        threads: int | None,
        resident: int = 0,
        options: Mapping[str, Any] = MappingProxyType({}),
        **constants: Any,
    ) -> None:
        self._kernel = kernel
        self._device = device
        self._index = device.index
        self._options = dict(options)
        if threads is not None:
            offered = limits(device)
            warps = max(1, threads // offered.warp_size)
            self._options = {"num_warps": warps, **options}
            if resident and offered.registers:
                share = _register_share(offered, warps * resident)
                self._options["maxnreg"] = min(_MOST_REGISTERS, share - share % 8)
        self._constants = {name: constants[name] for name in kernel.arg_names if name in constants}
        # alignment of the pointers (0: all are aligned) -> the compiled kernel
        self._ready: dict[object, _Started] = {}
        self._loaded: set[object] = set()  # alignments that have been compiled for
        self._quick: Callable[..., bool] | None = None

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[Any, ...],
    ) -> None:
        """Launch the kernel on the current stream of its device."""
        if _repeats.active is not None and _repeats.note(self, grid, tensors, numbers):
            # What Triton and the interpreter do with torch is not part of the recorded operator.
            with _disable_current_modes():
                return self._start(grid, tensors, numbers)
        quick = self._quick
        if quick is not None and quick(grid, tensors, numbers):
            return None
        return self._start(grid, tensors, numbers)

    @property
    def loaded_before(self) -> bool:
        """Whether the kernel has been compiled, for any alignment of pointers."""
        return bool(self._loaded)

    def load(self, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]) -> None:
        """Compile the kernel for a launch with these arguments, unless done before; launch nothing.

        Raises:
            KernelCompileError: it cannot be compiled or loaded.
            NotSupportedError: a tensor has no address.
        """
        alignment = _alignment(_pointers(tensors))
        if alignment not in self._loaded:
            with self._on_device():
                self._load(alignment, tensors, numbers)

    def loaded(
        self,
        grid: tuple[int, int],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[Any, ...],
    ) -> Callable[[], None]:
        """This launch as a function without arguments; raises what :meth:`load` does."""
        self.load(tensors, numbers)
        return functools.partial(self, grid, tensors, numbers)

    def statements(
        self,
        name: Callable[[Any], str],
        grid: tuple[int, int],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[Any, ...],
    ) -> list[str]:
        """Lines of Python that launch the kernel again, on the current device.

        That must be this launch's device, and the addresses must be aligned as now. For ``name``
        see ``_repeats.note``.
        """
        pointers = [*map(_repeats.Address, _pointers(tensors))]
        return self._repeated(name, grid, pointers, numbers)

    def _repeated(
        self,
        name: Callable[[Any], str],
        grid: tuple[int, int],
        pointers: list[_repeats.Address],
        numbers: tuple[Any, ...],
    ) -> list[str]:
        ready = self._ready.get(_alignment(pointers))
        if any(map(_may_be_address, numbers)):
            raise _repeats.UnrepeatableError("numbers that may be addresses")
        if ready is None:
            raise _repeats.UnrepeatableError("no kernel that can be started directly")
        return _statements(name, ready, grid, pointers, numbers, self._device)

    def _start(
        self,
        grid: tuple[int, int],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[Any, ...],
    ) -> None:
        """Launch the kernel, whatever the alignment of its pointers."""
        pointers = _pointers(tensors)
        alignment = _alignment(pointers)
        ready = self._ready.get(alignment)
        if ready is None or not _DirectLaunches.allowed or _hooked():
            self._ordinary(alignment, grid, tensors, numbers)
        else:
            elsewhere = torch._C._cuda_getDevice() != self._index
            with torch.cuda.device(self._index) if elsewhere else contextlib.nullcontext():
                memory = None
                if ready.scratch:
                    # May be freed before the kernel has run: whatever reuses this memory is queued
                    # behind the kernel.
                    size = (grid[0] * grid[1] * ready.scratch,)
                    memory = torch.empty(size, dtype=torch.uint8, device=self._device)
                ready(grid, memory, (*pointers, *numbers))

    def _ordinary(
        self,
        alignment: object,
        grid: tuple[int, int],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[Any, ...],
    ) -> None:
        with self._on_device():
            if alignment not in self._loaded:
                self._load(alignment, tensors, numbers)
            compiled = self._launched(grid, tensors, numbers)
        if _DirectLaunches.allowed and isinstance(compiled, triton.compiler.CompiledKernel):
            ready = _started(compiled, self._index)
            if ready is not None:
                self._ready[alignment] = ready
                if not alignment:
                    self._quick = _quick(ready, tensors, numbers, self._index)

    def _launched(
        self,
        grid: tuple[int, int],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[Any, ...],
    ) -> Any:
        """Launch by Triton; returns its result.

        Raises:
            struct.error: a number is larger than the kernel's parameter.
        """
        self._check_numbers(tensors, numbers)
        options = {**self._constants, **self._options}
        if INTERPRETED:
            import numpy  # only the interpreter needs it; no dependency

            # NumPy would warn of infinities and NaN, which no device does.
            quiet = numpy.errstate(all="ignore")
            with _INTERPRETER, _bfloat16_in_float32(tensors) as stand_ins, quiet:
                return self._kernel[grid](*stand_ins, *numbers, **options)
        with _scratch_memory(self._device):
            return self._kernel[grid](*tensors, *numbers, **options)

    def _check_numbers(self, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]) -> None:
        """Fail as a direct launch does where Triton's own launcher would cut a number off."""
        types = getattr(getattr(self._kernel, "fn", None), "__annotations__", {})
        names = self._kernel.arg_names[len(tensors) :]
        for name, number in zip(names, numbers, strict=False):
            if types.get(name) == "tl.int32":
                struct.pack("i", number)

    def _load(
        self, alignment: object, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]
    ) -> None:
        """Let Triton do, on the current device, everything that may fail before a launch."""
        if not INTERPRETED:
            options = {**self._constants, **self._options}
            try:
                compiled = self._kernel.warmup(*tensors, *numbers, grid=(1, 1), **options)
                if isinstance(compiled, triton.compiler.CompiledKernel):
                    compiled.run  # noqa: B018 - loads the machine code
            except Exception as error:  # compiler, assembler and driver raise types of their own
                raise KernelCompileError(self._kernel, self._device, error) from error
        self._loaded.add(alignment)

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        if INTERPRETED:
            return contextlib.nullcontext()
        on_device: contextlib.AbstractContextManager[object]
        on_device = torch.get_device_module(self._device).device(self._index)
        return on_device


class ExchangingLaunch(Launch):
    """A kernel whose programs exchange values through slots (``backends/_exchange.py``).

    The kernel's last pointer is that of the slots, and its last number the first epoch. A call
    passes neither: its last number is how many epochs a program posts, at most.
    """

    __slots__ = ("_slots",)

    def __init__(self, kernel: Any, device: torch.device, **options: Any) -> None:
        super().__init__(kernel, device, **options)
        self._slots = functools.partial(slots_for, device)

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[Any, ...],
    ) -> None:
        noted = _repeats.active is not None and _repeats.note(self, grid, tensors, numbers)
        *others, epochs = numbers
        first, slots = self._slots(grid[0] * grid[1], epochs)
        with _disable_current_modes() if noted else contextlib.nullcontext():
            start = self._start if noted else super().__call__
            start(grid, (*tensors, slots), (*others, first))

    def statements(
        self,
        name: Callable[[Any], str],
        grid: tuple[int, int],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[Any, ...],
    ) -> list[str]:
        *others, epochs = numbers
        named, line = repeated_exchange(name, self._slots, grid[0] * grid[1], epochs)
        pointers = [*map(_repeats.Address, _pointers(tensors)), SLOTS]
        return [line, *self._repeated(named, grid, pointers, (*others, FIRST_EPOCH))]


@contextlib.contextmanager
def _bfloat16_in_float32(tensors: tuple[Tensor | None, ...]) -> Iterator[list[Tensor | None]]:
    """The tensors with float32 memory for bfloat16; results are rounded back to nearest even.

    The interpreter truncates to bfloat16 instead of rounding, as no device does.
    """
    stand_ins: list[Tensor | None] = list(tensors)
    pairs = []
    for place, tensor in enumerate(tensors):
        if tensor is not None and tensor.dtype == torch.bfloat16 and tensor.numel():
            memory = tensor.detach().as_strided((extent(tensor),), (1,))
            stand_ins[place] = wide = memory.float()
            pairs.append((memory, wide, wide.clone()))
    yield stand_ins
    for memory, wide, before in pairs:
        # Elements that no kernel wrote keep their bits: converting a NaN to float32 and back
        # changes it.
        written = wide.view(torch.int32) != before.view(torch.int32)
        if written.any():
            memory.copy_(torch.where(written, wide.bfloat16(), memory))
