"""Runs the CUDA set's kernels on the CPU, for machines without a GPU.

g++ compiles the .cu files, with ``device.h`` in place of NVRTC's built-ins, and with C++ versions
of the two headers that contain PTX; ``engine.cpp`` runs their threads. In a :func:`running` block
the set accepts CPU tensors, and sees an H200 with few multiprocessors.

This checks values, the bounds of shared memory, alignment, that all threads reach barriers, and
that results do not depend on the order in which threads run. It does not detect races between
threads that run at once, nor effects of the hardware (fences, visibility between blocks), and
does not measure performance.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib
import itertools
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cuda_emulation.libraries import STAND_INS
from transformer_engine_fl.backends import _repeats
from transformer_engine_fl.backends._exchange import slots_for
from transformer_engine_fl.backends.vendor import cuda
from transformer_engine_fl.backends.vendor.cuda import (
    _arguments,
    _compile,
    _launch,
    attention,
    gemm,
    optimizer,
)
from transformer_engine_fl.core.registry import OpRegistry

__all__ = [
    "LIMITS",
    "EmulationError",
    "Kernel",
    "forbidden",
    "fuses",
    "missing",
    "prepare",
    "registry_for_any_device",
    "running",
    "uses_assembly",
]

HERE = Path(__file__).parent
LIMITS = _launch.Limits(9, 0, 2, 232_448, 233_472)
"""An H200 with 2 multiprocessors instead of 132, so that grids take several waves."""
MOST_THREADS = 2048
"""The most threads of a multiprocessor."""
MOST_BLOCKS = 32
A_WEEK = 7 * 24 * 3600.0
DEVICE = -1
"""torch's index of the CPU."""

FLAGS = (
    f"-std={_compile.STANDARD}",
    "-O1",
    "-fPIC",
    "-ffp-contract=fast",
    "-fexpensive-optimizations",  # contraction of products and sums is one of these
    "-w",
    "-fno-threadsafe-statics",
    "-fno-gnu-unique",  # each kernel has its own addresses in shared memory
    "-U_FORTIFY_SOURCE",
)
CHECKED = ("-fsanitize=alignment,bounds", "-fno-sanitize-recover=all")


class EmulationError(AssertionError):
    """A kernel does something that CUDA forbids, or does not compile for the CPU."""


def registry_for_any_device() -> OpRegistry:
    """A registry with the set as it registers itself, without its requirements on devices."""
    registered, here = OpRegistry(), OpRegistry()
    cuda.register(registered)
    for op in registered.list_operators():
        for impl in registered.get_implementations(op):
            here.register_impl(
                dataclasses.replace(impl, devices=None, min_arch=None, is_available=None)
            )
    return here


def missing() -> str | None:
    """Why kernels cannot be emulated here; None if they can."""
    if sys.platform != "linux":
        return f"kernels are emulated on Linux, not on {sys.platform}"
    if shutil.which("g++") is None:
        return "there is no g++"
    if _compile.header_directory() is None:
        return f"CUDA's headers were not found: {_compile.INSTALL}"
    return None


def uses_assembly() -> list[str]:
    """The set's files with inline assembly, which g++ cannot compile, and without a twin here."""
    twins = {path.name for path in HERE.glob("*.cuh")}
    return [
        path.name
        for path in (*_compile.FOLDER.glob("*.cu"), *_compile.FOLDER.glob("include/*.cuh"))
        if path.name not in twins and re.search(r"\basm\b", path.read_text())
    ]


# --------------------------------------------------------------------------- compiling


def _plain_cpp(text: str) -> str:
    """CUDA C++ as C++: shared variables become references into the engine's shared memory."""
    text = re.sub(
        r"\bextern\s+__shared__\s+(?:__align__\(\d+\)|alignas\(\d+\))?\s*([\w ]+?)\s+(\w+)\[\];",
        r"\1* const \2 = reinterpret_cast<\1*>(emulation::shared_memory() + "
        r"emulation::kStaticBytes);",
        text,
    )
    text = re.sub(
        r"\b__shared__\s+(?P<align>__align__\([^()]*\)|alignas\([^()]*\))?\s*"
        r"(?P<type>[\w:]+(?:<[^;]*?>)?(?:\s\w+)?)\s+(?P<name>\w+)\s*(?P<sizes>(?:\[[^;]*\])?);",
        r"auto& \g<name> = []() -> auto& {"
        r" using Kind = \g<type>\g<sizes>;"
        r" static const int at = emulation::reserve(sizeof(Kind), 16);"
        r" return *reinterpret_cast<Kind*>(emulation::shared_memory() + at); }();",
        text,
    )
    # Comments may contain the word; all declarations must have been replaced.
    rest = [line for line in text.splitlines() if "__shared__" in line.partition("//")[0]]
    if rest:
        raise EmulationError(f"a declaration that the emulation does not read: {rest[0].strip()}")
    return text


@functools.cache
def _workshop() -> Path:
    """A folder with the engine, the headers as C++, and the compiled kernels."""
    headers = {path.name: path for path in _compile.FOLDER.glob("include/*.cuh")}
    own = {path.name: path for path in HERE.iterdir() if path.suffix in (".cuh", ".h", ".cpp")}
    texts = {name: _plain_cpp(path.read_text()) for name, path in headers.items()}
    texts |= {name: path.read_text() for name, path in own.items()}
    version = subprocess.check_output(["g++", "--version"], text=True)
    flags = (*FLAGS, *CHECKED, *_processor_flags())
    digest = _digest(version, *flags, *itertools.chain(*sorted(texts.items())))
    root = Path(tempfile.gettempdir()) / f"te_fl_cuda_emulation_{os.getuid()}"
    folder = root / digest
    if folder.exists():
        return folder
    root.mkdir(mode=0o700, exist_ok=True)
    for other in root.iterdir():  # folders of old sources
        if time.time() - other.stat().st_mtime > A_WEEK:
            shutil.rmtree(other, ignore_errors=True)
    making = Path(tempfile.mkdtemp(dir=root, prefix=".making_"))
    for name, text in texts.items():
        (making / name).write_text(text)
    try:
        _run_compiler(making, *CHECKED, "-x", "c++-header", "device.h", "-o", "device.h.gch")
        _run_compiler(making, "-shared", "-O2", "engine.cpp", "-o", "engine.so")
        # If another process has made the folder meanwhile, its folder is used.
        with contextlib.suppress(OSError):
            making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


@functools.cache
def _processor_flags() -> tuple[str, ...]:
    """Flags for fused multiply-add, which CUDA's compilers use, if this CPU has it."""
    try:
        found = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    return ("-mfma",) if " fma " in found else ()


def fuses() -> bool:
    """Whether products are fused with additions."""
    return bool(_processor_flags())


def prepare() -> None:
    """Compile the parts that all kernels share."""
    _engine()


def _run_compiler(folder: Path, *arguments: str) -> None:
    command = ["g++", *FLAGS, *_processor_flags(), f"-I{_compile.header_directory()}", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulationError(f"{' '.join(command)}:\n{done.stderr[:6000]}")


def _library(specialisation: _compile.Specialisation) -> Path:
    """The compiled kernel, from the folder or else from the compiler."""
    text = _plain_cpp(specialisation.path.read_text())
    macros = [f"#define {macro.replace('=', ' ', 1)}" for macro in specialisation.macros]
    source = "\n".join(
        (
            '#include "device.h"',
            *macros,
            f'#line 1 "{specialisation.path.name}"',
            text,
            f'extern "C" void entry(void** a) {{ emulation::call({specialisation.kernel}, a); }}',
            'extern "C" const int* sizes() {'
            f" return emulation::sizes({specialisation.kernel}); }}",
        )
    )
    folder = _workshop()
    library = folder / f"{specialisation.source}.{specialisation.kernel}.{_digest(source)}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as making:
            (Path(making) / "kernel.cpp").write_text(source)
            files = (f"{making}/kernel.cpp", "-o", f"{making}/kernel.so")
            # The functions that the sanitizer's checks call are the engine's, not a library's.
            libraries = ("-nodefaultlibs", "-lstdc++", "-lm", "-lc")
            try:
                _run_compiler(folder, *CHECKED, "-I.", "-shared", *files, *libraries)
            except EmulationError as error:
                macros = " ".join(specialisation.macros)
                raise EmulationError(f"{specialisation.path.name} with {macros}: {error}") from None
            os.replace(f"{making}/kernel.so", library)
    return library


# ----------------------------------------------------------------------------- running

_one_at_a_time = threading.Lock()
_launches = itertools.count()


@functools.cache
def _engine() -> Any:
    engine = ctypes.CDLL(str(_workshop() / "engine.so"), mode=ctypes.RTLD_GLOBAL)
    launch = engine.emulation_launch
    launch.restype = ctypes.c_char_p
    launch.argtypes = (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint,
        ctypes.c_uint,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
    )
    engine.emulation_forbid.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    engine.emulation_forbid.restype = None
    return engine


class Kernel:
    """The counterpart of ``_launch.Kernel`` on the CPU."""

    def __init__(self, specialisation: _compile.Specialisation, geometry: _launch.Geometry) -> None:
        self.name = specialisation.kernel
        self.device = DEVICE
        self._of = specialisation
        self._geometry = geometry
        self._launch = _engine().emulation_launch
        library = ctypes.CDLL(str(_library(specialisation)))
        self._entry = ctypes.cast(library.entry, ctypes.c_void_p)
        library.sizes.restype = ctypes.POINTER(ctypes.c_int)
        sizes = list(itertools.takewhile(bool, iter(library.sizes())))
        # The last parameter may be a struct that takes all remaining arguments.
        self._parameters = len(sizes)
        kinds = [struct.calcsize(kind) for kind in geometry.arguments]
        if sizes and sizes != [*kinds[: len(sizes) - 1], sum(kinds[len(sizes) - 1 :])]:
            raise EmulationError(
                f"{self} has parameters of {sizes} bytes, not {geometry.arguments!r}"
            )
        if geometry.shared_bytes > LIMITS.shared_per_block or geometry.threads > 1024:
            raise EmulationError(f"{self} asks for more than a block has: {geometry}")

    def __str__(self) -> str:
        return f"{self._of.path.name}: {self.name} with {' '.join(self._of.macros[1:])}"

    def launch(self, blocks: int, rows_of_blocks: int, *values: Any) -> None:
        """Run the kernel."""
        geometry = self._geometry
        through_memory = geometry.together > 1
        kinds = geometry.arguments
        others, epochs = values, ()
        if through_memory:  # as _launch.ExchangingKernel is called
            kinds, others, epochs = kinds[:-2], values[:-1], values[-1:]
        if _repeats.active is not None:
            noted = (
                _repeats.Address(value) if kind == "P" else value
                for kind, value in zip(kinds, others, strict=True)
            )
            _repeats.note(self.launch, blocks, rows_of_blocks, *noted, *epochs)
        if not (0 < blocks < 2**31 and 0 < rows_of_blocks < 2**16):
            raise EmulationError(f"{self}: no grid of {blocks} x {rows_of_blocks} blocks")
        if geometry.together > 1 and (
            rows_of_blocks > 1 or blocks > self.resident_groups() * geometry.together
        ):
            raise EmulationError(f"{self}: {blocks} blocks do not run at once")
        if through_memory:
            first, slots = slots_for(torch.device("cpu"), blocks, *epochs)
            values = (*others, first, slots.data_ptr())
        # Packed as for a launch on a device: values that do not fit are errors.
        packed = struct.pack("@" + geometry.arguments, *values)
        held = ctypes.create_string_buffer(packed, max(1, len(packed)))
        offsets = [
            struct.calcsize("@" + geometry.arguments[: at + 1]) - struct.calcsize(kind)
            for at, kind in enumerate(geometry.arguments[: self._parameters])
        ]
        start = ctypes.addressof(held)
        addresses = (ctypes.c_void_p * max(1, len(offsets)))(*(start + at for at in offsets))
        with _one_at_a_time:
            wrong = self._launch(
                self._entry,
                addresses,
                (ctypes.c_uint * 3)(blocks, rows_of_blocks, 1),
                geometry.threads,
                blocks if geometry.together > 1 else geometry.cluster,
                geometry.shared_bytes,
                geometry.dependent,
                next(_launches) % 2,
            )
        if wrong:
            raise EmulationError(f"{self}: {wrong.decode()}")

    @property
    def cluster(self) -> int:
        """Blocks per cluster."""
        return self._geometry.cluster

    def resident_groups(self) -> int:
        """How many blocks, or clusters or groups of them, run at once."""
        geometry = self._geometry
        shared = LIMITS.shared_per_multiprocessor // (geometry.shared_bytes + 1024)
        per_multiprocessor = min(MOST_BLOCKS, MOST_THREADS // geometry.threads, shared)
        running = per_multiprocessor * LIMITS.multiprocessors
        if geometry.together > 1:
            return running // geometry.together
        return max(1, running // geometry.cluster)


@functools.cache
def load(
    specialisation: _compile.Specialisation, geometry: _launch.Geometry, device: int
) -> Kernel:
    """The replacement of ``_launch.load``."""
    assert device == DEVICE
    return Kernel(specialisation, geometry)


@contextlib.contextmanager
def running() -> Iterator[None]:
    """A context in which the set runs on the CPU."""
    with contextlib.ExitStack() as stack:
        for where, name, value in (
            (_launch, "load", load),
            (_launch, "limits", lambda device: LIMITS),
            (_arguments, "DEVICE_TYPE", "cpu"),
            (_arguments, "IS_THERE", "is_cpu"),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        for family, functions in STAND_INS.items():
            module = importlib.import_module(f"{cuda.__name__}.{family}")
            for name, value in functions.items():
                stack.enter_context(mock.patch.object(module, name, value))
        stack.callback(_forget)
        yield


@contextlib.contextmanager
def forbidden(ranges: Iterable[tuple[int, int]]) -> Iterator[None]:
    """Make reads of these (address, bytes) errors, except reads by plain C++ expressions."""
    forbid = _engine().emulation_forbid
    try:
        for address, size in ranges:
            forbid(address, size)
        yield
    finally:
        forbid(None, 0)


def _forget() -> None:
    """Forget calls that were accepted here, for CPU tensors: outside they must be checked again."""
    _repeats.forget()
    for known in (gemm._known, attention._known):
        known._seen.clear()
    gemm._known_groups._found.clear()
    optimizer._operators._preparer.layouts.clear()
