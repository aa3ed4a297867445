"""Compiled kernels are kept on disk, and no failure of the disk breaks a call."""

from __future__ import annotations

import logging
import os
import pwd
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from transformer_engine_fl.backends import _disk_cache
from transformer_engine_fl.backends.vendor.cuda import _compile
from transformer_engine_fl.backends.vendor.cuda._compile import (
    KernelCompileError,
    Specialisation,
    cubin,
)

pytestmark = pytest.mark.usefixtures("compiler")

ARCH = "sm_90a"
SOURCE = """
#include "value.cuh"
#ifdef KERNEL_fill
extern "C" __global__ void fill(float* to) { to[threadIdx.x] = VALUE * SCALE; }
#endif
"""
FILL = Specialisation("kernels", "fill", (("SCALE", 2),))


def entries() -> list[Path]:
    return list(_compile.CACHE.folder.glob("*.cubin"))


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source folder of this test's own, with one small kernel."""
    folder = tmp_path / "sources"
    (folder / "include").mkdir(parents=True)
    (folder / "kernels.cu").write_text(SOURCE)
    (folder / "include" / "value.cuh").write_text("#define VALUE 3.0f\n")
    monkeypatch.setattr(_compile, "FOLDER", folder)
    return folder


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Specialisation]:
    """The specialisations compiled so far."""
    seen: list[Specialisation] = []
    real = _compile._compile

    def spy(specialisation: Specialisation, arch: str, source: str, headers: Path | None) -> bytes:
        seen.append(specialisation)
        return real(specialisation, arch, source, headers)

    monkeypatch.setattr(_compile, "_compile", spy)
    return seen


@pytest.mark.usefixtures("cache", "sources")
def test_a_kernel_is_compiled_once(compiled: list[Specialisation]) -> None:
    first = cubin(FILL, ARCH)
    assert cubin(FILL, ARCH) == first
    assert len(compiled) == 1
    assert len(entries()) == 1


@pytest.mark.usefixtures("cache", "sources")
@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "foreign"])
def test_a_damaged_entry_is_rebuilt(damage: str, compiled: list[Specialisation]) -> None:
    good = cubin(FILL, ARCH)
    (entry,) = entries()
    content = entry.read_bytes()
    flipped = bytes([content[-1] ^ 1])
    entry.write_bytes(
        {
            "cut": content[: len(content) // 2],
            "changed": content[:-1] + flipped,
            "empty": b"",
            "foreign": b"not one of ours",
        }[damage]
    )
    assert cubin(FILL, ARCH) == good
    assert len(compiled) == 2
    assert entry.read_bytes() == content


@pytest.mark.usefixtures("cache")
def test_another_source_header_macro_or_architecture_is_another_entry(
    sources: Path, compiled: list[Specialisation]
) -> None:
    cubin(FILL, ARCH)
    (sources / "kernels.cu").write_text(SOURCE + "// another\n")
    cubin(FILL, ARCH)
    (sources / "include" / "value.cuh").write_text("#define VALUE 4.0f\n")
    cubin(FILL, ARCH)
    (sources / "include" / "unused.cuh").write_text("\n")
    cubin(FILL, ARCH)
    cubin(Specialisation("kernels", "fill", (("SCALE", 5),)), ARCH)
    cubin(FILL, "sm_80")
    assert len(compiled) == 6
    assert len(entries()) == 6


@pytest.mark.usefixtures("cache", "sources")
@pytest.mark.parametrize("what", ["_nvrtc_version", "_nvrtc_build"])
def test_another_compiler_is_another_entry(
    what: str, compiled: list[Specialisation], monkeypatch: pytest.MonkeyPatch
) -> None:
    cubin(FILL, ARCH)
    monkeypatch.setattr(_compile, what, lambda: "99.0")
    cubin(FILL, ARCH)
    assert len(compiled) == 2


def test_builds_of_the_compiler_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder")
    name, size = _compile._nvrtc_build().split()
    path = Path(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path).resolve()
    assert (name, int(size)) == (path.name, path.stat().st_size)

    def missing(name: str) -> None:
        raise pathfinder.DynamicLibNotFoundError(name)

    _compile._nvrtc_build.cache_clear()
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", missing)
    assert _compile._nvrtc_build() == ""
    _compile._nvrtc_build.cache_clear()


@pytest.mark.usefixtures("sources")
def test_processes_at_once_leave_one_sound_entry(cache: Path, sources: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from transformer_engine_fl.backends.vendor.cuda import _compile\n"
        f"_compile.FOLDER = Path({str(sources)!r})\n"
        "wanted = _compile.Specialisation('kernels', 'fill', (('SCALE', 2),))\n"
        f"print(len(_compile.cubin(wanted, {ARCH!r})))\n"
    )
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    running = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    sizes = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert sizes[0] == sizes[1]
    assert len(entries()) == 1
    assert [path for path in cache.iterdir() if path.suffix != ".cubin"] == []
    assert _compile.CACHE.read(entries()[0].name) is not None


@pytest.mark.usefixtures("cache", "sources")
def test_threads_at_once_get_the_same_code() -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(cubin(FILL, ARCH))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1


@pytest.mark.usefixtures("sources")
def test_a_cache_that_cannot_be_written_costs_one_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    compiled: list[Specialisation],
) -> None:
    blocked = tmp_path / "a file, not a folder"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(_compile.CACHE, "_warned", False)
    logger = logging.getLogger("TE-FL")
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.WARNING, logger="TE-FL"):
        assert cubin(FILL, ARCH)
        assert cubin(FILL, ARCH)
    assert len(compiled) == 2
    assert len(caplog.records) == 1
    assert "XDG_CACHE_HOME" in caplog.text


@pytest.mark.usefixtures("cache", "sources")
def test_an_entry_that_is_deleted_while_it_is_written_is_no_reason_to_warn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replace = os.replace

    def cleared(written: str, path: Path) -> None:
        _disk_cache.clear()
        replace(written, path)

    monkeypatch.setattr(os, "replace", cleared)
    monkeypatch.setattr(_compile.CACHE, "_warned", False)
    monkeypatch.setattr(logging.getLogger("TE-FL"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="TE-FL"):
        assert cubin(FILL, ARCH)
    assert not caplog.records
    assert not entries()


@pytest.mark.usefixtures("cache", "sources")
def test_entries_that_are_deleted_while_they_are_counted_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cubin(FILL, ARCH)
    found = Path.iterdir

    def cleared(folder: Path) -> list[Path]:
        there = list(found(folder))
        for path in filter(Path.is_file, there):
            path.unlink()
        return there

    monkeypatch.setattr(Path, "iterdir", cleared)
    assert _disk_cache.folders() == []


@pytest.mark.usefixtures("sources")
def test_without_a_home_kernels_are_compiled_and_not_kept(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    compiled: list[Specialisation],
) -> None:
    def unknown_user(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown_user)
    monkeypatch.setattr(_compile.CACHE, "_warned", False)
    monkeypatch.setattr(logging.getLogger("TE-FL"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="TE-FL"):
        assert cubin(FILL, ARCH) == cubin(FILL, ARCH)
    assert len(compiled) == 2
    assert len(caplog.records) == 1
    assert "XDG_CACHE_HOME" in caplog.text


@pytest.mark.usefixtures("cache", "sources")
def test_other_headers_of_cuda_in_the_same_place_are_another_entry(
    tmp_path: Path, compiled: list[Specialisation], monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = tmp_path / "include"
    headers.mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    for name in ("cuda_bf16.h", "cuda_fp16.h", "cuda_fp16.hpp"):
        (headers / name).write_text("")
    cubin(FILL, ARCH)
    for changed in ("cuda_fp16.h", "cuda_fp16.hpp"):
        (headers / changed).write_text("// of the next version\n")
        _compile._headers_digest.cache_clear()  # as in the next process
        cubin(FILL, ARCH)
    assert len(compiled) == 3


@pytest.mark.usefixtures("cache")
def test_a_compile_error_names_the_file_the_line_and_the_reason(sources: Path) -> None:
    file = sources / "kernels.cu"
    file.write_text(SOURCE.replace("to[threadIdx.x]", "\n  nowhere[threadIdx.x]"))
    with pytest.raises(KernelCompileError, match="nowhere") as raised:
        cubin(FILL, ARCH)
    assert raised.value.file == str(file)
    assert raised.value.line == 5
    assert f"{file}:5" in str(raised.value)
    assert "SCALE=2" in str(raised.value)
    assert entries() == []


@pytest.mark.usefixtures("cache")
def test_an_error_in_a_header_names_the_header(sources: Path) -> None:
    header = sources / "include" / "value.cuh"
    header.write_text("#define VALUE 1\nint broken = ;\n")
    with pytest.raises(KernelCompileError) as raised:
        cubin(FILL, ARCH)
    assert Path(raised.value.file or "").name == header.name
    assert raised.value.line == 2


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", ["kernels.cu", "include/value.cuh"])
def test_a_file_that_cannot_be_read_is_an_error_of_compiling(sources: Path, name: str) -> None:
    (sources / name).write_bytes(b"\xff")
    with pytest.raises(KernelCompileError, match="can't decode byte 0xff"):
        cubin(FILL, ARCH)
    (sources / "kernels.cu").unlink()
    with pytest.raises(KernelCompileError, match=r"kernels\.cu: kernel 'fill' .*\n.*No such file"):
        cubin(FILL, ARCH)


@pytest.mark.usefixtures("cache", "sources")
@pytest.mark.parametrize("name", ["Program", "ProgramOptions"])
def test_a_cuda_core_that_has_no_such_compiler_is_an_error_of_compiling(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(f"cuda.core.{name}")
    with pytest.raises(KernelCompileError, match=f"cannot import name '{name}'"):
        cubin(FILL, ARCH)


def test_headers_are_looked_for_in_cuda_home_then_cuda_path_then_the_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {}
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        folders[variable] = tmp_path / variable / "include"
        folders[variable].mkdir(parents=True)
        for name in ("cuda_bf16.h", "cuda_fp16.h"):
            (folders[variable] / name).write_text("")
        monkeypatch.setenv(variable, str(tmp_path / variable))
    assert _compile.header_directory() == folders["CUDA_HOME"]
    (folders["CUDA_HOME"] / "cuda_bf16.h").unlink()
    assert _compile.header_directory() == folders["CUDA_PATH"]
    monkeypatch.delenv("CUDA_PATH")
    assert _compile.header_directory() not in (None, *folders.values())


@pytest.mark.parametrize("module", ["cuda.core", "cuda.bindings"])
def test_a_missing_package_is_named_with_how_to_install_it(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = _compile.installed
    monkeypatch.setattr(_compile, "installed", lambda name: name != module and installed(name))
    reason = _compile.missing_compiler()
    assert reason is not None
    assert module.replace(".", "-") in reason
    assert "transformer_engine_fl[cuda]" in reason
