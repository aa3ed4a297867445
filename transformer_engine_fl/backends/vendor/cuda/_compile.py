"""From a .cu file to machine code: NVRTC through cuda-core, behind a disk cache.

A :class:`Specialisation` names a kernel of a .cu file of this folder and the macros
that make it concrete; :func:`cubin` gives its machine code for an architecture. No
device is touched here: loading and launching is ``_launch``'s, and which
specialisation serves which call is decided beside the operators.

The cache is a folder of files that can be deleted at any time. A file's name holds the
hash of everything that its content depends on; its content is checked when it is read,
and rebuilt if it is not what was written.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformer_engine_fl.core.errors import TeFlError

__all__ = [
    "KernelCompileError",
    "Specialisation",
    "architecture",
    "cache_directory",
    "cache_entries",
    "clear_cache",
    "cubin",
    "header_directory",
    "missing",
]

FOLDER = Path(__file__).parent
INSTALL = "pip install 'transformer_engine_fl[cuda]'"
STANDARD = "c++17"
_MAGIC = b"TE-FL cubin 1\n"
_SUFFIX = ".cubin"
_DIAGNOSTIC = re.compile(r"^(?P<file>[^\n]*?)\((?P<line>\d+)\): (?:catastrophic )?error: ?", re.M)

_log = logging.getLogger("TE-FL")


class KernelCompileError(TeFlError, RuntimeError):
    """The compiler refused a .cu file.

    Attributes:
        file, line: where the first error is; None if the compiler did not say.
        log: the compiler's words.
    """

    def __init__(self, specialisation: Specialisation, arch: str, log: str) -> None:
        found = _DIAGNOSTIC.search(log)
        self.file = found["file"] if found else None
        self.line = int(found["line"]) if found else None
        self.log = log
        where = f"{self.file}:{self.line}" if found else str(specialisation.path)
        super().__init__(
            f"{where}: kernel {specialisation.kernel!r} does not compile for {arch} "
            f"with {' '.join(specialisation.macros)}:\n{log.strip()}"
        )


@dataclass(frozen=True, slots=True)
class Specialisation:
    """One kernel made concrete.

    Attributes:
        source: a .cu file of this folder, without its ending.
        kernel: the kernel's name in it; the macro ``KERNEL_<name>`` turns it on.
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

    From Hopper on the variant with that chip's own instructions.
    """
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def cubin(specialisation: Specialisation, arch: str) -> bytes:
    """Machine code of a kernel, from the cache or else from the compiler.

    Raises:
        KernelCompileError: names the file, the line and the compiler's words.
    """
    source = specialisation.path.read_text(encoding="utf-8")
    headers = header_directory()
    try:
        folder = cache_directory()
    except RuntimeError as error:  # the home of a user that the machine does not know
        _warn_once("~/.cache", error)
        return _compile(specialisation, arch, source, headers)
    path = folder / _entry_name(specialisation, arch, source, headers)
    code = _read_entry(path)
    if code is None:
        code = _compile(specialisation, arch, source, headers)
        _write_entry(path, code)
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
        if not _installed(module):
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
    from cuda.core import Program, ProgramOptions

    include = [str(FOLDER / "include"), *([str(headers)] if headers else [])]
    options = ProgramOptions(
        name=str(specialisation.path),
        arch=arch,
        std=STANDARD,
        define_macro=[_macro(macro) for macro in specialisation.macros],
        include_path=include,
    )
    try:
        code = Program(source, "c++", options).compile("cubin").code
    except Exception as error:  # the class that cuda-core raises here is not public
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


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def header_directory() -> Path | None:
    """Where CUDA's headers are: in CUDA_HOME, in CUDA_PATH, or in the wheels."""
    return next((folder for folder in _header_candidates() if _has_headers(folder)), None)


def _header_candidates() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable):
            yield Path(root) / "include"
    wheels = importlib.util.find_spec("nvidia") if _installed("nvidia") else None
    for location in (wheels and wheels.submodule_search_locations) or ():
        # cu13 and its successors share a folder; the wheels of CUDA 12 have one each.
        yield from sorted(Path(location).glob("cu[0-9]*/include"), reverse=True)
        yield Path(location) / "cuda_runtime" / "include"


def _has_headers(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("cuda_bf16.h", "cuda_fp16.h"))


# ------------------------------------------------------------------------------- cache


def cache_directory() -> Path:
    """The folder of compiled kernels; it need not exist.

    Raises:
        RuntimeError: nobody knows where the user's home is.
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "transformer_engine_fl" / "cuda"


def cache_entries() -> list[Path]:
    """The compiled kernels in the cache."""
    return sorted(cache_directory().glob(f"*{_SUFFIX}"))


def clear_cache() -> int:
    """Delete every compiled kernel; returns how many there were."""
    entries = cache_entries()
    for entry in entries:
        entry.unlink(missing_ok=True)
    return len(entries)


def _entry_name(
    specialisation: Specialisation, arch: str, source: str, headers: Path | None
) -> str:
    """A name that changes with anything that the machine code depends on."""
    digest = hashlib.sha256()
    parts = [_nvrtc_version(), arch, STANDARD, str(headers), *specialisation.macros, source]
    for header in sorted((FOLDER / "include").glob("*.cuh")):
        parts += [header.name, header.read_text(encoding="utf-8")]
    for part in parts:
        text = part.encode()
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    name = f"{specialisation.source}.{specialisation.kernel}.{arch}"
    return f"{name}.{digest.hexdigest()}{_SUFFIX}"


def _read_entry(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    head = len(_MAGIC) + hashlib.sha256().digest_size
    magic, digest, code = content[: len(_MAGIC)], content[len(_MAGIC) : head], content[head:]
    if magic != _MAGIC or hashlib.sha256(code).digest() != digest:
        _log.info("rebuilding %s: it is damaged", path)
        return None
    return code


def _write_entry(path: Path, code: bytes) -> None:
    """Put an entry in place as a whole, whoever else writes or reads it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(code).digest() + code)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        _warn_once(path.parent, error)


_warned = threading.Event()


def _warn_once(folder: Path | str, error: Exception) -> None:
    if not _warned.is_set():
        _warned.set()
        _log.warning(
            "compiled kernels cannot be kept in %s (%s): each process compiles its own; "
            "XDG_CACHE_HOME chooses another folder",
            folder,
            error,
        )
