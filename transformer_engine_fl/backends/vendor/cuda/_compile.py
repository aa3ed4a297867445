"""From a .cu file to machine code: NVRTC through cuda-core, behind a disk cache.

A :class:`Specialisation` names a kernel in a .cu file of this folder and the macros that
specialise it; :func:`cubin` returns its machine code for an architecture. This module needs
no device: ``_launch`` loads and launches, and the operators' modules choose the
specialisation for a call.

The name of a cache entry holds a hash of everything that the machine code depends on.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformer_engine_fl.backends._disk_cache import DiskCache
from transformer_engine_fl.core.errors import NotStartedError
from transformer_engine_fl.core.late import installed

__all__ = [
    "CACHE",
    "KernelCompileError",
    "Specialisation",
    "architecture",
    "cubin",
    "header_directory",
    "missing",
]

FOLDER = Path(__file__).parent
INSTALL = "pip install 'transformer_engine_fl[cuda]'"
STANDARD = "c++17"
CACHE = DiskCache("cuda", "compiled kernels")
_HEADERS = ("cuda_bf16.h", "cuda_fp16.h")
"""The CUDA headers that the kernels include; each includes a ``.hpp`` of the same name."""
_DIAGNOSTIC = re.compile(r"^(?P<file>[^\n]*?)\((?P<line>\d+)\): (?:catastrophic )?error: ?", re.M)


class KernelCompileError(NotStartedError):
    """A .cu file does not compile, or cannot be read.

    An operator that writes to an argument loads all kernels of the call before the first launch,
    so this error leaves the arguments unchanged.

    Attributes:
        file, line: where the first error is; None if the compiler did not say.
        log: the compiler's output.
    """

    def __init__(self, specialisation: Specialisation, arch: str, log: str) -> None:
        found = _DIAGNOSTIC.search(log)
        self.file = found["file"] if found else None
        self.line = int(found["line"]) if found else None
        self.log = log
        where = f"{self.file}:{self.line}" if found else str(specialisation.path)
        super().__init__(
            f"{where}: kernel {specialisation.kernel!r} does not compile for {arch}:\n"
            f"{log.strip()}\nwith {' '.join(specialisation.macros)}"
        )


@dataclass(frozen=True, slots=True)
class Specialisation:
    """One kernel with the macros that specialise it.

    Attributes:
        source: a .cu file of this folder, without its suffix.
        kernel: the kernel's name in the file; the macro ``KERNEL_<name>`` enables it.
        defines: the other macros, by name.
    """

    source: str
    kernel: str
    defines: tuple[tuple[str, str | int], ...] = ()

    @property
    def path(self) -> Path:
        """The source file."""
        return FOLDER / f"{self.source}.cu"

    @property
    def macros(self) -> tuple[str, ...]:
        """Every macro as ``NAME=value``."""
        return (f"KERNEL_{self.kernel}=1", *(f"{name}={value}" for name, value in self.defines))


def architecture(major: int, minor: int) -> str:
    """The compiler's name of a compute capability.

    From Hopper on it is the variant with architecture-specific instructions (``sm_90a``).
    """
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def cubin(specialisation: Specialisation, arch: str) -> bytes:
    """Machine code of a kernel, from the cache or else from the compiler.

    Raises:
        KernelCompileError: with the file, the line and the compiler's output.
    """
    headers = header_directory()
    try:
        source = specialisation.path.read_text(encoding="utf-8")
        name = _entry_name(specialisation, arch, source, headers)
    except (OSError, UnicodeDecodeError) as error:
        raise KernelCompileError(specialisation, arch, str(error)) from error
    code = CACHE.read(name)
    if code is None:
        code = _compile(specialisation, arch, source, headers)
        CACHE.write(name, code)
    return code


def missing() -> str | None:
    """Why kernels of this set cannot be compiled and run here; None if they can."""
    import torch

    if torch.version.cuda is None:
        return "this build of torch has no CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return missing_compiler()


def missing_compiler() -> str | None:
    """Why kernels cannot be compiled here; None if they can. Needs no device."""
    for package, module in (("cuda-core", "cuda.core"), ("cuda-bindings", "cuda.bindings")):
        if not installed(module):
            return f"{package} is not installed: {INSTALL}"
    try:
        _nvrtc_version()
    except (ImportError, RuntimeError) as error:
        return f"NVRTC, CUDA's run-time compiler, was not found ({error}): {INSTALL}"
    if header_directory() is None:
        return f"CUDA's headers were not found: set CUDA_HOME, or {INSTALL}"
    return None


# --------------------------------------------------------------------------- compiling


def _compile(specialisation: Specialisation, arch: str, source: str, headers: Path | None) -> bytes:
    include = [str(FOLDER / "include"), *([str(headers)] if headers else [])]
    try:
        from cuda.core import Program, ProgramOptions

        options = ProgramOptions(
            name=str(specialisation.path),
            arch=arch,
            std=STANDARD,
            define_macro=[_macro(macro) for macro in specialisation.macros],
            include_path=include,
        )
        code = Program(source, "c++", options).compile("cubin").code
    except Exception as error:  # cuda-core does not document its errors here; others may come up
        raise KernelCompileError(specialisation, arch, str(error)) from error
    return bytes(code)


def _macro(macro: str) -> tuple[str, str]:
    name, _, value = macro.partition("=")
    return name, value


@functools.cache
def _nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"nvrtcVersion: {status}")
    return f"{major}.{minor}"


@functools.cache
def _nvrtc_build() -> str:
    """Distinguishes builds of one version of NVRTC, which does not report its patch version."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("nvrtc").abs_path
        # A toolkit's library has the full version in its name; a wheel's differs by its size.
        library = Path(path or "").resolve(strict=True)
        return f"{library.name} {library.stat().st_size}"
    except (ImportError, RuntimeError, OSError):  # cuda-bindings found it some other way
        return ""


def header_directory() -> Path | None:
    """Where CUDA's headers are: in CUDA_HOME, in CUDA_PATH, or in the wheels."""
    return next((folder for folder in _header_candidates() if _has_headers(folder)), None)


def _header_candidates() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable):
            yield Path(root) / "include"
    wheels = importlib.util.find_spec("nvidia") if installed("nvidia") else None
    for location in (wheels and wheels.submodule_search_locations) or ():
        # From CUDA 13 on all wheels share one folder (cu13); each wheel of CUDA 12 has its own.
        yield from sorted(Path(location).glob("cu[0-9]*/include"), reverse=True)
        yield Path(location) / "cuda_runtime" / "include"


def _has_headers(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _HEADERS)


@functools.cache
def _headers_digest(folder: Path) -> str:
    """Hash of the CUDA headers that the kernels include: an update may replace them in place."""
    digest = hashlib.sha256()
    for name in _HEADERS:
        for part in (folder / name, (folder / name).with_suffix(".hpp")):
            if part.is_file():
                digest.update(part.read_bytes())
    return digest.hexdigest()


# --------------------------------------------------------------------------- the cache


def _entry_name(
    specialisation: Specialisation, arch: str, source: str, headers: Path | None
) -> str:
    """A name that changes with anything that the machine code depends on."""
    digest = hashlib.sha256()
    theirs = "" if headers is None else _headers_digest(headers)
    nvrtc = (_nvrtc_version(), _nvrtc_build())
    parts = [*nvrtc, arch, STANDARD, theirs, *specialisation.macros, source]
    for header in sorted((FOLDER / "include").glob("*.cuh")):
        parts += [header.name, header.read_text(encoding="utf-8")]
    for part in parts:
        text = part.encode()
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    name = f"{specialisation.source}.{specialisation.kernel}.{arch}"
    return f"{name}.{digest.hexdigest()}.cubin"
