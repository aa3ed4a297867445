"""Every kernel compiles for every generation of GPU, on a machine that has none.

Each specialisation is compiled for Hopper, whose code the tests inspect, and for one of the other
targets that have it; ``--every-target`` compiles all for all. The same code at other sizes and
dtypes seldom fails on one target alone, and compiling it took most of the suite's time.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import itertools
import os
import re
import struct
import subprocess
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest
import torch
from cuda_binaries import DEVICES, own_shared_bytes

from transformer_engine_fl.backends._disk_cache import DiskCache
from transformer_engine_fl.backends.vendor import cuda
from transformer_engine_fl.backends.vendor.cuda import _compile
from transformer_engine_fl.backends.vendor.cuda._launch import Geometry, Limits
from transformer_engine_fl.backends.vendor.cuda.normalization import (
    BackwardKey,
    ForwardKey,
    backward_sources,
    forward_source,
)

TARGETS = {
    "sm_80": DEVICES["sm_80"],
    "sm_90a": DEVICES["sm_90"],
    "sm_100a": DEVICES["sm_100"],
    "sm_120a": DEVICES["sm_120"],
}
HOPPER = TARGETS["sm_90a"]
MOST_PARAMETER_BYTES = 4096
Sources = dict[_compile.Specialisation, Geometry]
Case = TypeVar("Case", bound=Hashable)


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for the run and all its processes, as several tests need the same kernels."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "compiled"))


def _families() -> Iterator[tuple[str, ModuleType]]:
    """The families that have kernels; the others call libraries."""
    for family in cuda.FAMILIES:
        module = importlib.import_module(f"{cuda.__name__}.{family}")
        if hasattr(module, "representative_sources"):
            yield family, module


def _benchmarked() -> Iterator[tuple[str, ModuleType]]:
    """The modules of ``benchmarked/``: kernels that must not spill and use 16-byte accesses."""
    for path in (Path(__file__).parent / "benchmarked").glob("*.py"):
        spec = importlib.util.spec_from_file_location(f"benchmarked_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield path.stem, module


FAMILIES = dict(_families())
BENCHMARKED = dict(_benchmarked())
COPYING = {"activation", "epilogue", "normalization", "softmax"}
"""Families that copy to shared memory without going through registers (LDGSTS)."""
DEPENDENT = {
    "activation",
    "epilogue",
    "moe",
    "normalization",
    "optimizer",
    "quantization",
    "router",
}
"""Families with kernels that start before the preceding kernel has ended."""


def _sources(family: str, device: Limits) -> Sources:
    return dict(FAMILIES[family].representative_sources(device))


def in_turn(
    target: str,
    cases: Mapping[str, Sequence[Case]],
    looked_at: str,
    kernel: Callable[[Case], Hashable],
) -> list[bool]:
    """Whether to compile each case of ``target`` for it.

    All cases are compiled for the target whose code is inspected. The others take turns, but each
    compiles the first case of every kernel, and every case that the inspected target lacks.

    Args:
        target: the target in question.
        cases: the cases of every target.
        looked_at: the target whose code is inspected.
        kernel: returns the kernel of a case.
    """
    own = cases[target]
    if target == looked_at:
        return [True] * len(own)
    numbers = {case: number for number, case in enumerate(cases[looked_at])}
    have = {name: set(those) for name, those in cases.items() if name != looked_at}
    seen: set[Hashable] = set()
    chosen = []
    for case in own:
        takers = [name for name, those in have.items() if case in those]
        turn = case not in numbers or takers[numbers[case] % len(takers)] == target
        chosen.append(turn or kernel(case) not in seen)
        seen.add(kernel(case))
    return chosen


@pytest.mark.usefixtures("compiler", "cache")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_compiles(family: str, target: str, request: pytest.FixtureRequest) -> None:
    limits = TARGETS[target]
    assert _compile.architecture(limits.major, limits.minor) == target
    sources = {name: _sources(family, those) for name, those in TARGETS.items()}
    chosen = [True] * len(sources[target])
    if not request.config.getoption("--every-target"):
        lists = {name: list(those) for name, those in sources.items()}
        chosen = in_turn(target, lists, "sm_90a", lambda it: (it.source, it.kernel))
    for source, geometry in itertools.compress(sources[target].items(), chosen):
        code = _compile.cubin(source, target)
        assert code.startswith(b"\x7fELF"), source
        assert source.kernel.encode() in code
        shared = geometry.shared_bytes + own_shared_bytes(code)
        assert shared <= limits.shared_per_block, (source, shared)
        assert geometry.threads <= 1024, source


def test_targets_take_turns_and_each_has_every_kernel() -> None:
    lists = {"x": "a1 a2 b1 a3 a4 a5", "y": "a1 a2 b1 b2 a3", "z": "a2 a1 b1 a5 a6"}
    cases = {name: text.split() for name, text in lists.items()}
    of = {
        name: {*itertools.compress(those, in_turn(name, cases, "x", lambda it: it[0]))}
        for name, those in cases.items()
    }
    assert of["x"] == {*cases["x"]}
    # Each case that x has too is compiled for one of the other targets, if any has it.
    assert of["y"] == {"a1", "b1", "b2", "a3"}
    assert of["z"] == {"a2", "b1", "a5", "a6"}


def test_every_kernel_has_a_compile_case() -> None:
    compiled = {
        (source.source, source.kernel)
        for limits in TARGETS.values()
        for family in FAMILIES
        for source in _sources(family, limits)
    }
    written = {
        (file.stem, kernel)
        for file in _compile.FOLDER.glob("*.cu")
        for kernel in re.findall(r"#ifdef KERNEL_(\w+)", file.read_text())
    }
    assert compiled == written


def test_every_family_of_kernels_says_which_shapes_are_benchmarked() -> None:
    assert set(BENCHMARKED) == set(FAMILIES)


Dump = Callable[[_compile.Specialisation, str], str]


DUMPS = DiskCache("dumps", "what the disassembler says")


@pytest.fixture
def dump(cache: None, tmp_path: Path) -> Dump:
    """Compiles a kernel for Hopper and returns the disassembler's output."""
    triton = pytest.importorskip("triton", reason="its wheel has the disassembler")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this triton has no cuobjdump")
    file = tmp_path / "kernel.cubin"

    def said(source: _compile.Specialisation, what: str) -> str:
        code = _compile.cubin(source, "sm_90a")
        name = f"{hashlib.sha256(code).hexdigest()}.{what}"
        text = DUMPS.read(name)
        if text is None:
            file.write_bytes(code)
            text = subprocess.check_output([tool, f"--dump-{what}", file])
            DUMPS.write(name, text)
        return text.decode()

    return said


_PARAMETER = re.compile(r"Ordinal : (\S+)\s+Offset\s+: (\S+)\s+Size\s+: (\S+)")


@pytest.mark.usefixtures("compiler", "cache")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_launch_packs_what_the_kernel_takes(family: str, dump: Dump) -> None:
    """The driver copies each parameter from its offset, in its size; one case of each kernel."""
    kinds = {
        (source.source, source.kernel, geometry.arguments): source
        for source, geometry in _sources(family, HOPPER).items()
    }
    for (_, _, arguments), source in kinds.items():
        described = dump(source, "elf")
        found = sorted(
            tuple(int(number, 16) for number in parameter)
            for parameter in _PARAMETER.findall(described)
        )
        ends = [struct.calcsize("@" + arguments[: at + 1]) for at in range(len(arguments))]
        places = [
            (at, end - struct.calcsize(kind), struct.calcsize(kind))
            for at, (kind, end) in enumerate(zip(arguments, ends, strict=True))
        ]
        # A structure is the last parameter and takes all remaining numbers.
        last = len(found) - 1
        assert last < len(places), source
        structure = (last, places[last][1], ends[-1] - places[last][1])
        assert found == [*places[:last], structure], source
        assert ends[-1] <= MOST_PARAMETER_BYTES, source


@pytest.mark.usefixtures("compiler", "cache")
@pytest.mark.parametrize("family", BENCHMARKED)
def test_no_kernel_of_the_benchmarked_shapes_spills_registers(family: str, dump: Dump) -> None:
    for source in dict.fromkeys(BENCHMARKED[family].sources(HOPPER)):
        usage = dump(source, "resource-usage")
        assert re.search(r"STACK:0 .*LOCAL:0 ", usage), (source, usage)


@pytest.mark.usefixtures("compiler", "cache")
@pytest.mark.parametrize("family", BENCHMARKED)
def test_data_of_the_benchmarked_shapes_moves_in_16_byte_accesses(family: str, dump: Dump) -> None:
    for source in dict.fromkeys(BENCHMARKED[family].sources(HOPPER)):
        if source.source in ("row_maps", "sums"):  # these move few bytes
            continue
        code = dump(source, "sass")
        copies = re.findall(r"\bLDGSTS\S*", code)
        assert all(copy.endswith(".128") for copy in copies), (source, copies)
        reads, writes = getattr(BENCHMARKED[family], "bits", _all_of_16_bytes)(source)
        assert copies or not reads or re.search(rf"\bLDG\.E\S*\.{reads}\b", code), source
        assert not writes or re.search(rf"\bSTG\.E\S*\.{writes}\b", code), source


@pytest.mark.usefixtures("compiler", "cache")
@pytest.mark.parametrize("family", BENCHMARKED)
def test_no_copy_to_shared_memory_has_two_registers_for_its_address(
    family: str, dump: Dump
) -> None:
    """With an L2 policy that is an illegal instruction, yet CUDA 13.0's compiler emits it."""
    found = False
    for source in dict.fromkeys(BENCHMARKED[family].sources(HOPPER)):
        addresses = re.findall(r"\bLDGSTS\S* \[([^]]*)\]", dump(source, "sass"))
        assert not any("+UR" in address for address in addresses), (source, addresses)
        found |= bool(addresses)
    assert found is (family in COPYING)


def _dependent(family: str) -> list[_compile.Specialisation]:
    return [source for source, geometry in _sources(family, HOPPER).items() if geometry.dependent]


def test_the_families_whose_kernels_start_early_are_known() -> None:
    assert {family for family in FAMILIES if _dependent(family)} == DEPENDENT


@pytest.mark.usefixtures("compiler", "cache")
@pytest.mark.parametrize("family", sorted(DEPENDENT))
def test_dependent_launches_access_no_earlier_output_before_their_wait(
    family: str, dump: Dump
) -> None:
    sources = _dependent(family)
    assert sources
    for source in sources:
        code = dump(source, "sass")
        before, wait, _ = code.partition("ACQBULK")
        assert wait, source
        assert not re.search(r"\b(STG|ATOMG|RED)\b", before), source
        # Only the input of a cast or a move may be read before the wait: the preceding launch does
        # not write it.
        older = dict(source.defines).get("SOURCE") in (0, 1) or source.kernel == "permute_indices"
        assert older or not re.search(r"\b(LDG|LDGSTS)\b", before), source


@pytest.mark.usefixtures("compiler", "cache")
def test_a_sum_that_is_read_again_is_written_whole_and_first(dump: Dump) -> None:
    key = ForwardKey(2**21, 8, *(torch.bfloat16,) * 4, False, False, added=True)
    source = forward_source(key, HOPPER)[0]
    assert source.kernel == "forward_wide"
    code = dump(source, "sass")
    before, read, _ = code.partition("LDG.E.128.STRONG")
    assert read
    assert "STG.E.128.STRONG" in before
    assert not re.search(r"\bSTG\.E ", before)


@pytest.mark.usefixtures("compiler", "cache")
def test_rows_of_a_cluster_do_not_wait_for_stores_of_earlier_rows(dump: Dump) -> None:
    """A cluster's barrier is a fence for all earlier stores, a join is not."""
    same = (torch.bfloat16,) * 4
    forward = ForwardKey(131_072, 8, *same, True, False)
    added = ForwardKey(131_072, 8, *same, False, False, added=True)
    backward = BackwardKey(131_072, 8, *same[:3], False, False)
    centred = BackwardKey(32_768, 8, *same[:3], True, False)
    clusters = functools.partial(forward_source, device=HOPPER, through_memory=False)
    sources = [clusters(key)[0] for key in (forward, added)]
    sources += [backward_sources(key, HOPPER)[0][0][0] for key in (backward, centred)]
    for source in sources:
        defines = dict(source.defines)
        assert defines["EXCHANGE"], source
        fences = {}
        for mode in (0, 1):
            other = dataclasses.replace(
                source, defines=tuple({**defines, "EXCHANGE": mode}.items())
            )
            code = dump(other, "sass")
            start, there, rest = code.partition("UCGABAR_WAIT")  # all blocks run from here on
            assert "MEMBAR" not in start, source
            assert there, source
            fences[mode] = rest.count("MEMBAR")
        assert fences[0] > 0, source
        assert fences[1] == 0, source


def _all_of_16_bytes(source: _compile.Specialisation) -> tuple[int, int]:
    """Bits of a read and of a write; a family's ``bits`` may differ, with 0 for not checked."""
    return 128, 128
