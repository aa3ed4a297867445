"""Every kernel compiles for every generation of GPU, on a machine that has none."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from transformer_engine_fl.backends.vendor.cuda import _compile, normalization
from transformer_engine_fl.backends.vendor.cuda._launch import Limits

# Multiprocessors, and shared memory of a block and of a multiprocessor.
TARGETS = {
    "sm_80": Limits(8, 0, 108, 166_912, 167_936),
    "sm_90a": Limits(9, 0, 132, 232_448, 233_472),
    "sm_100a": Limits(10, 0, 148, 232_448, 233_472),
    "sm_120a": Limits(12, 0, 170, 101_376, 102_400),
}
HOPPER = TARGETS["sm_90a"]
BENCHMARKED = (1024, 4096, 8192, 32768)


@pytest.mark.usefixtures("compiler", "cache")
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target: str) -> None:
    limits = TARGETS[target]
    assert _compile.architecture(limits.major, limits.minor) == target
    for source, geometry in dict(normalization.representative_sources(limits)).items():
        code = _compile.cubin(source, target)
        assert code.startswith(b"\x7fELF"), source
        assert source.kernel.encode() in code
        assert geometry.shared_bytes <= limits.shared_per_block, source


def test_every_kernel_has_a_compile_case() -> None:
    for file in _compile.FOLDER.glob("*.cu"):
        written = set(re.findall(r"#ifdef KERNEL_(\w+)", file.read_text()))
        compiled = {
            source.kernel
            for limits in TARGETS.values()
            for source, _ in normalization.representative_sources(limits)
            if source.source == file.stem
        }
        assert compiled == written, file.name


def _disassembler() -> Path:
    triton = pytest.importorskip("triton", reason="its wheel has the disassembler")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this triton has no cuobjdump")
    return tool


def _benchmarked_sources() -> list[_compile.Specialisation]:
    low = torch.bfloat16
    sources = []
    for columns in BENCHMARKED:
        for centred in (False, True):
            forward = normalization.ForwardKey(columns, 8, low, low, low, low, centred, False)
            backward = normalization.BackwardKey(columns, 8, low, low, low, centred, False)
            sources.append(normalization.forward_source(forward, HOPPER)[0])
            sources += [source for source, _ in normalization.backward_sources(backward, HOPPER)[0]]
    return list(dict.fromkeys(sources))


@pytest.mark.usefixtures("compiler", "cache")
def test_no_kernel_of_the_benchmarked_shapes_spills_registers(tmp_path: Path) -> None:
    tool = _disassembler()
    file = tmp_path / "kernel.cubin"
    for source in _benchmarked_sources():
        file.write_bytes(_compile.cubin(source, "sm_90a"))
        usage = subprocess.check_output([tool, "--dump-resource-usage", file], text=True)
        assert re.search(r"STACK:0 .*LOCAL:0 ", usage), (source, usage)


@pytest.mark.usefixtures("compiler", "cache")
def test_rows_of_the_benchmarked_shapes_move_in_16_byte_accesses(tmp_path: Path) -> None:
    tool = _disassembler()
    file = tmp_path / "kernel.cubin"
    for source in _benchmarked_sources():
        if source.kernel == "parameters":
            continue
        file.write_bytes(_compile.cubin(source, "sm_90a"))
        code = subprocess.check_output([tool, "--dump-sass", file], text=True)
        copies = re.findall(r"\b(LDGSTS\S*)", code)
        assert copies, source
        assert all(copy.endswith(".128") for copy in copies), (source, copies)
        assert re.search(r"\bSTG\.E\.128\b", code), source
