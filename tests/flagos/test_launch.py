"""Launching Triton's kernels: what the driver is given, and when Triton launches instead."""

from __future__ import annotations

import gc
import os
import signal
import struct
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

import direct_launches
import pytest
import torch
import triton
import triton.language as tl
from stub_driver import StubDriver
from torch import Tensor
from triton.backends.compiler import GPUTarget

from transformer_engine_fl.backends import _driver, _repeats
from transformer_engine_fl.backends.flagos import _launch, _rows
from transformer_engine_fl.backends.flagos import normalization as flagos


class Launcher:
    """Triton's launcher of a compiled kernel that needs no scratch memory."""

    launch_cooperative_grid, launch_pdl = False, True
    global_scratch_size = profile_scratch_size = 0


class LauncherWithScratch(Launcher):
    """The launcher of a kernel whose programs need 128 bytes of scratch memory each."""

    global_scratch_size = 128


class LauncherThatWatches(Launcher):
    """The launcher of a kernel that is profiled."""

    profile_scratch_size = 128


class LauncherOfAll(Launcher):
    """The launcher of a kernel whose programs wait for each other."""

    launch_cooperative_grid, launch_pdl = True, False


def started(x: int, y: int, *own: Any, scratch: int = 0, together: bool = False) -> tuple[Any, ...]:
    """The driver's arguments for a launch on device 1; ``own[-1]`` is the kernel's handle."""
    way = _driver._COOPERATIVE if together else _driver._PROGRAMMATIC_STREAM_SERIALIZATION
    how = (own[-1], (x, y, 1), (128, 1, 1), 1024, 501, {way: (1, 0, 0)})
    return how, (*own[:-1], scratch, 0)


class Log(list[Any]):
    """Events in order; the driver adds launches."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = StubDriver()
        self.driver.noting = self.append


TYPES = {"P": "*fp32", "q": "i64", "f": "fp32"}


def kind(argument: Any) -> Any:
    """The code of an argument's type in the launch's memory; None for None."""
    if isinstance(argument, tuple):
        return tuple(map(kind, argument))
    if isinstance(argument, Tensor):
        return "P"
    return None if argument is None else "f" if isinstance(argument, float) else "q"


def signature(kind: Any) -> Any:
    """The type's name in Triton."""
    if isinstance(kind, tuple):
        return tuple(map(signature, kind))
    return TYPES.get(kind, "constexpr")


class StubKernel:
    """A kernel that records how it is launched; its handle is its constant BLOCK.

    Attributes:
        packed_metadata: warps, programs of a cluster, and bytes of shared memory.
        target: the target that it is compiled for.
        types: by parameter position, Triton's type where it differs from :func:`signature`.
    """

    arg_names: tuple[str, ...] = ("a_ptr", "b_ptr", "n", "BLOCK")
    packed_metadata: tuple[int, ...] = (4, 1, 1024)
    target = GPUTarget("cuda", 90, 32)
    types: Mapping[str, str] = MappingProxyType({})

    def __init__(self, log: Log, launcher: type[Launcher] = Launcher) -> None:
        self.log, self.launcher = log, launcher

    def warmup(self, *args: Any, **options: Any) -> None:
        """Compiles the kernel without a launch."""

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            self.log.append("ordinary")
            compiled = object.__new__(triton.compiler.CompiledKernel)
            compiled.module = None  # nothing to unload
            compiled._run, compiled.name = self.launcher(), "stub"
            compiled.function, compiled.packed_metadata = options["BLOCK"], self.packed_metadata
            compiled.metadata = types.SimpleNamespace(target=self.target)
            kinds = [*map(kind, args), None]
            types_of = {str(place): signature(it) for place, it in enumerate(kinds)}
            compiled.src = types.SimpleNamespace(signature=types_of | self.types)
            known = [one for it in kinds if it for one in it]
            self.log.driver.arguments[compiled.function] = "".join([*known, "PP"])
            return compiled

        return launch


def make_known(operator: Any, *arguments: Any) -> None:
    """Call the operator until such calls are repeated."""
    for _ in range(_repeats.CALLS_BEFORE):
        operator(*arguments)
    assert operator.calls.last(*arguments) is not _repeats.MISS, operator.calls.refusal


class OnDevice:
    """Records that the current device is switched, and switched back."""

    def __init__(self, log: Log, index: int) -> None:
        self.log, self.index = log, index

    def __enter__(self) -> None:
        self.log.append(f"on {self.index}")

    def __exit__(self, *error: object) -> None:
        self.log.append("back")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Events of launches on device 1, on a machine that cannot launch anything."""
    noted = Log()
    found = types.SimpleNamespace(cuLaunchKernelEx=noted.driver.launch)
    monkeypatch.setattr(_driver, "_driver", lambda: found)
    monkeypatch.setattr(_launch, "is_there", lambda: True)
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    monkeypatch.setattr(_launch._DirectLaunches, "allowed", True)
    monkeypatch.setattr(_launch, "limits", lambda device: _launch.Limits(2, 1 << 16, 32, 65536))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: 500 + index, raising=False
    )
    monkeypatch.setattr(torch.cuda, "device", lambda index: OnDevice(noted, index))
    return noted


@pytest.mark.parametrize(
    ("threads", "resident", "registers"),
    [
        (128, 4, 128),
        (128, 5, 96),
        (1024, 1, 64),
        (64, 6, 168),
        (64, 5, 168),
        (32, 10, 168),
        (32, 4, 255),
    ],
)
def test_registers_suffice_on_every_partition(
    threads: int, resident: int, registers: int, log: Log
) -> None:
    launch = _launch.Launch(
        StubKernel(log), torch.device("cuda:1"), threads=threads, resident=resident, BLOCK=8
    )
    assert launch._options["maxnreg"] == registers
    warps = -(-threads * resident // 32 // 4)  # of the fullest partition
    assert warps * 32 * (-(-registers // 8) * 8) <= 65_536 // 4


@pytest.mark.parametrize(("capability", "programs"), [(90, 20), (86, 16), (0, 16)])
def test_no_more_programs_share_rows_than_a_multiprocessor_runs(
    capability: int, programs: int, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = _launch.Limits(10, 1 << 17, 32, 65_536, capability)
    monkeypatch.setattr(_launch, "limits", lambda device: offered)
    cut = _rows.Cut(threads=32, width=1024, programs=20, stages=3, shared=True)
    rows = _rows.SharedRows(StubKernel(log), torch.device("cuda:1"), cut, 4096, 1, torch.float32, 2)
    groups = programs * 10 // 4  # four pieces per row, ten multiprocessors
    assert rows.groups(100 * groups) == groups


@pytest.mark.parametrize(("stages_in_use", "stages"), [(0, 4), (1, 3)])
def test_stages_are_limited_by_the_shared_memory_of_programs(
    stages_in_use: int, stages: int, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 4 * (_rows._SUMS_BYTES + 3 * 1024 * 2)  # four programs, each with sums and three stages
    monkeypatch.setattr(_launch, "limits", lambda device: _launch.Limits(10, room, 32, 65_536, 90))
    monkeypatch.setattr(_launch, "has_ptx", lambda: True)
    cut = _rows.Cut(threads=32, width=1024, programs=4, stages=8, shared=True)
    kernel = StubKernel(log)
    kernel.arg_names = ("STAGES",)
    rows = _rows.SharedRows(
        kernel, torch.device("cuda:1"), cut, 4096, 1, torch.float32, 2, stages_in_use
    )
    assert [launch._constants for launch in rows._launches] == [{"STAGES": stages}]


def test_a_kernel_is_started_directly_once_it_is_compiled(log: Log) -> None:
    launch = _launch.Launch(StubKernel(log), torch.device("cuda:1"), threads=128, BLOCK=8)
    a, b = torch.zeros(64), torch.zeros(64)
    launch((5, 1), (a, b), (3,))
    assert log == ["on 1", "ordinary", "back"]
    log.clear()
    launch((5, 2), (a, b), (3,))
    assert log == [started(5, 2, a.data_ptr(), b.data_ptr(), 3, 8)]


def test_programs_that_wait_for_each_other_are_started_together(log: Log) -> None:
    kernel, a = StubKernel(log, LauncherOfAll), torch.zeros(64)
    launch = _launch.Launch(kernel, torch.device("cuda:1"), threads=128, BLOCK=8)
    for _ in range(2):
        launch((5, 1), (a, a), (3,))
    assert log[-1] == started(5, 1, a.data_ptr(), a.data_ptr(), 3, 8, together=True)


@pytest.mark.parametrize("quickly", [True, False])
def test_numbers_of_a_tuple_are_arguments_of_their_own(quickly: bool, log: Log) -> None:
    launch = _launch.Launch(StubKernel(log), torch.device("cuda:1"), threads=128, BLOCK=8)
    a, start = torch.zeros(64), int(not quickly)
    for numbers in (((3, 5), 2.5, (7,)), ((4, -6), 0.5, (8,))):
        launch((5, 1), (a[start:], a), numbers)
    assert log[-1] == started(5, 1, a.data_ptr() + 4 * start, a.data_ptr(), 4, -6, 0.5, 8, 8)


@pytest.mark.parametrize("grid", [(0, 1), (5, 0)])
def test_a_grid_of_no_programs_starts_nothing(grid: tuple[int, int], log: Log) -> None:
    launch = _launch.Launch(StubKernel(log), torch.device("cuda:1"), threads=128, BLOCK=8)
    a = torch.zeros(64)
    for _ in range(3):
        launch(grid, (a, a), (3,))
    assert log == ["on 1", "ordinary", "back"]

    @_repeats.repeating
    def operator(input: Tensor) -> Tensor:
        output = torch.empty((16,), device=input.device)
        launch(grid, (input, output), (3,))
        return output

    log.clear()
    make_known(operator, a)
    assert not log


def test_each_alignment_is_compiled_for_itself(log: Log) -> None:
    launch = _launch.Launch(StubKernel(log), torch.device("cuda:1"), threads=128, BLOCK=8)
    a, b = torch.zeros(64), torch.zeros(64)
    for tensors in ((a, b), (a[1:], b), (a, b[1:]), (a[1:], b[1:]), (a, None)):
        log.clear()
        launch((5, 1), tensors, (3,))
        # None is no pointer and a caller always or never gives it, so it counts as aligned.
        assert ("ordinary" in log) is (tensors[1] is not None)
    log.clear()
    launch((5, 1), (a[4:], b[8:]), (3,))
    assert "ordinary" not in log


def test_the_current_device_is_switched_for_the_launch(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = _launch.Launch(StubKernel(log), torch.device("cuda:1"), threads=128, BLOCK=8)
    a = torch.zeros(64)
    launch((5, 1), (a, a), (3,))
    log.clear()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0)
    launch((5, 1), (a, a), (3,))
    assert log[0] == "on 1"
    assert log[-1] == "back"
    assert len(log) == 3


def repeated(launch: _launch.Launch, numbers: tuple[Any, ...] = (3, 2.5)) -> Any:
    """An operator with one launch, called until its calls are repeated."""

    @_repeats.repeating
    def operator(input: Tensor, other: Tensor | None = None) -> Tensor:
        output = torch.empty((16,), device=input.device)
        launch((5, 2), (input[4:], other, output), numbers)
        return output

    a = torch.zeros(64)
    for _ in range(_repeats.CALLS_BEFORE):
        operator(a)
    return operator


def test_a_repeated_call_starts_what_its_launch_does(log: Log) -> None:
    launch = _launch.Launch(StubKernel(log), torch.device("cuda:1"), threads=128, BLOCK=8)
    operator, a = repeated(launch), torch.zeros(64)
    assert operator.calls.last(a, None) is not _repeats.MISS, operator.calls.refusal
    log.clear()
    results = [operator(a), operator(a)]
    assert log == [started(5, 2, a.data_ptr() + 16, it.data_ptr(), 3, 2.5, 8) for it in results]


def test_an_exchanging_launch_has_new_epochs_each_time_and_the_same_slots(log: Log) -> None:
    launch = _launch.ExchangingLaunch(
        StubKernel(log, LauncherOfAll), torch.device("cuda:1"), threads=128, BLOCK=8
    )
    slots = torch.zeros(64, dtype=torch.int64)
    asked: list[tuple[int, int]] = []

    def slots_for(programs: int, epochs: int) -> tuple[int, Tensor]:
        asked.append((programs, epochs))
        return 1000 * len(asked), slots

    launch._slots = slots_for
    operator, a = repeated(launch, (2.5, 7)), torch.zeros(64)
    assert operator.calls.last(a, None) is not _repeats.MISS, operator.calls.refusal
    log.clear()
    asked.clear()
    results = [operator(a), operator(a), operator.__wrapped__(a)]
    assert asked == [(10, 7)] * 3
    given = [(a.data_ptr() + 16, it.data_ptr(), slots.data_ptr(), 2.5) for it in results]
    assert log == [
        started(5, 2, *own, 1000 * epoch, 8, together=True)
        for epoch, own in enumerate(given, start=1)
    ]


@pytest.mark.parametrize("starts", ["a repeated call", "a quick launch"])
def test_machine_code_stays_loaded_as_long_as_something_starts_it(
    starts: str, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Triton 3.8 on, a compiled kernel unloads its machine code when it is freed."""
    seen: list[weakref.ref[Any]] = []
    known = _launch._started

    def noting(compiled: Any, device: int) -> Any:
        seen.append(weakref.ref(compiled))
        return known(compiled, device)

    monkeypatch.setattr(_launch, "_started", noting)
    launch = _launch.Launch(StubKernel(log), torch.device("cuda:1"), threads=128, BLOCK=8)
    operator = repeated(launch)
    assert operator.calls.last(torch.zeros(64), None) is not _repeats.MISS, operator.calls.refusal
    (compiled,) = seen
    quick, launch._quick = launch._quick, None
    launch._ready.clear()
    if starts == "a repeated call":
        del quick
    else:
        _repeats.forget()
    gc.collect()
    assert compiled() is not None
    quick = None
    _repeats.forget()
    gc.collect()
    assert compiled() is None


def test_a_repeated_call_goes_the_ordinary_way_where_a_launch_must(log: Log) -> None:
    launch = _launch.Launch(StubKernel(log), torch.device("cuda:1"), threads=128, BLOCK=8)
    operator, a = repeated(launch), torch.zeros(80)[:64]
    log.clear()
    with _launch.ordinary_launches():
        operator(a)
    assert log == ["on 1", "ordinary", "back"]
    log.clear()
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(print)
    try:
        operator(a)
    finally:
        hook.remove(print)
    assert "ordinary" in log
    log.clear()
    operator(torch.zeros(65)[1:])
    assert "ordinary" in log


def test_several_launches_of_a_call_are_each_repeated(log: Log) -> None:
    device = torch.device("cuda:1")
    launches = [_launch.Launch(StubKernel(log), device, threads=128, BLOCK=it) for it in (8, 16)]

    @_repeats.repeating
    def operator(input: Tensor) -> Tensor:
        output = torch.empty((16,), device=input.device)
        launches[0]((5, 2), (input, output[4:]), (3,))
        launches[1]((7, 1), (output, None), (2.5,))
        return output

    a = torch.zeros(64)
    make_known(operator, a)
    log.clear()
    output = operator(a)
    start = output.data_ptr()
    first = started(5, 2, a.data_ptr(), start + 16, 3, 8)
    assert log == [first, started(7, 1, start, 2.5, 16)]


def test_a_call_whose_second_launch_must_be_ordinary_is_so_from_its_start(
    log: Log,
) -> None:
    watched = False

    def start(launched: tuple[Any, ...]) -> None:
        log.append(launched)
        if watched:  # launches are watched from now on
            _launch._DirectLaunches.allowed = False

    log.driver.noting = start
    launch = _launch.Launch(StubKernel(log), torch.device("cuda:1"), threads=128, BLOCK=8)

    @_repeats.repeating
    def operator(input: Tensor) -> Tensor:
        output = torch.empty((16,), device=input.device)
        launch((5, 2), (input, output), (3,))
        launch((5, 2), (output, output[4:]), (3,))
        return output

    a = torch.zeros(64)
    make_known(operator, a)
    log.clear()
    watched = True
    operator(a)
    assert log[0] == started(5, 2, a.data_ptr(), mock.ANY, 3, 8)
    assert log[1:] == 2 * ["on 1", "ordinary", "back"]


@pytest.mark.parametrize("numbers", [(2**40, 1), (3, 2**60 + 2**41)])
def test_numbers_that_may_be_addresses_are_not_repeated(log: Log, numbers: tuple[Any, ...]) -> None:
    launch = _launch.Launch(StubKernel(log), torch.device("cuda:1"), threads=128, BLOCK=8)
    operator = repeated(launch, numbers)
    assert operator.calls.last(torch.zeros(64), None) is _repeats.MISS


@pytest.mark.parametrize("from_starts", [True, False])
@pytest.mark.parametrize("skipped", [0, 4])
def test_arguments_that_overlap_are_known_by_where_they_start(
    from_starts: bool, skipped: int, log: Log
) -> None:
    launch = _launch.Launch(StubKernel(log), torch.device("cuda:1"), threads=128, BLOCK=8)
    decorate = _repeats.repeating_from_starts if from_starts else _repeats.repeating

    @decorate
    def operator(query: Tensor, key: Tensor) -> Tensor:
        output = torch.empty((16,), device=query.device)
        launch((5, 2), (query[:, skipped:], key, output[4:]), (3,))
        return output

    both = torch.zeros(4, 48)
    for _ in range(_repeats.CALLS_BEFORE):
        operator(both[:, :16], both[:, 16:32])
    query, key = both[:, 32:], both[:, :16]
    assert (operator.calls.last(query, key) is not _repeats.MISS) is (from_starts and not skipped)
    log.clear()
    output = operator(query, key)
    pointers = [it.data_ptr() for it in (query[:, skipped:], key, output[4:])]
    assert log[-1] == started(5, 2, *pointers, 3, 8)


def test_autograd_is_notified_of_what_a_repeated_call_writes(log: Log) -> None:
    launch = _launch.Launch(StubKernel(log), torch.device("cuda:1"), threads=128, BLOCK=8)

    @_repeats.repeating
    def operator(total: Tensor, step: Tensor, *, inside: bool = False) -> None:
        launch((5, 2), (total, step), (3,))
        _repeats.written(total[4:] if inside else total)

    total, step = torch.zeros(64), torch.zeros(64)
    for _ in range(_repeats.CALLS_BEFORE):
        operator(total, step)
        operator(total, step, inside=True)
    assert operator.calls.last(total, step, inside=True) is _repeats.MISS
    assert operator.calls.last(total, step, inside=False) is not _repeats.MISS
    other, before = torch.zeros(64), total._version
    log.clear()
    operator(other, step)
    assert (other._version, total._version) == (1, before)
    assert log[-1] == started(5, 2, other.data_ptr(), step.data_ptr(), 3, 8)


def test_what_was_made_in_inference_mode_is_known_there_only(log: Log) -> None:
    launch = _launch.Launch(StubKernel(log), torch.device("cuda:1"), threads=128, BLOCK=8)

    @_repeats.repeating
    def operator(total: Tensor) -> None:
        launch((5, 2), (total,), (3,))
        _repeats.written(total)

    with torch.inference_mode():
        total = torch.zeros(64)
        for _ in range(_repeats.CALLS_BEFORE):
            operator(total)
        assert operator.calls.last(total) is not _repeats.MISS
    assert operator.calls.last(total) is _repeats.MISS
    assert operator.calls.last(torch.zeros(64)) is _repeats.MISS


def test_a_repeated_call_has_scratch_memory_of_its_own(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Tensor] = []

    def allocate(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made.append(torch.empty_strided(size, stride, dtype=dtype))
        return made[-1]

    def on_the_cpu(*arguments: Any, **options: Any) -> Tensor:
        return empty(*arguments, **{**options, "device": "cpu"})

    empty = torch.empty
    monkeypatch.setattr(_launch, "quickest", lambda device: allocate)
    monkeypatch.setattr(torch, "empty", on_the_cpu)
    kernel = StubKernel(log, LauncherWithScratch)
    launch = _launch.Launch(kernel, torch.device("cuda:1"), threads=128, BLOCK=8)
    operator, a = repeated(launch), torch.zeros(64)
    assert operator.calls.last(a, None) is not _repeats.MISS, operator.calls.refusal
    log.clear()
    made.clear()
    results = [operator(a), operator(a)]
    assert [it.numel() for it in made] == 2 * [5 * 2 * 128]
    assert log == [
        started(5, 2, a.data_ptr() + 16, it.data_ptr(), 3, 2.5, 8, scratch=memory.data_ptr())
        for it, memory in zip(results, made, strict=True)
    ]


def test_a_launch_that_is_not_repeated_has_scratch_memory_too(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Tensor] = []

    def noting(*arguments: Any, **options: Any) -> Tensor:
        made.append(empty(*arguments, **{**options, "device": "cpu"}))
        return made[-1]

    a, empty = torch.zeros(64), torch.empty
    monkeypatch.setattr(torch, "empty", noting)
    kernel = StubKernel(log, LauncherWithScratch)
    launch = _launch.Launch(kernel, torch.device("cuda:1"), threads=128, BLOCK=8)
    launch((5, 2), (a, a), (3,))
    log.clear()
    launch((5, 2), (a, a), (3,))
    (memory,) = made
    assert memory.shape == (5 * 2 * 128,)
    assert log == [started(5, 2, a.data_ptr(), a.data_ptr(), 3, 8, scratch=memory.data_ptr())]


def test_launches_that_triton_does_more_for_stay_ordinary(log: Log) -> None:
    kernel = StubKernel(log, LauncherThatWatches)
    launch = _launch.Launch(kernel, torch.device("cuda:1"), threads=128, BLOCK=8)
    operator, a = repeated(launch), torch.zeros(64)
    assert operator.calls.last(a, None) is _repeats.MISS
    log.clear()
    operator(a)
    assert log == ["on 1", "ordinary", "back"]


@pytest.mark.parametrize(
    ("metadata", "types"),
    [
        ((4, 2, 1024), {}),
        ((4, 1, 1 << 18), {}),
        ((4, 1, 1024), {"2": "fp16"}),
        ((4, 1, 1024), {"0": "tensordesc<fp32[8]>"}),
    ],
    ids=["clusters", "much shared memory", "half precision", "a descriptor"],
)
def test_what_the_driver_is_not_known_to_take_stays_tritons(
    metadata: tuple[int, int, int], types: dict[str, str], log: Log
) -> None:
    kernel, a = StubKernel(log), torch.zeros(64)
    kernel.packed_metadata, kernel.types = metadata, types
    launch = _launch.Launch(kernel, torch.device("cuda:1"), threads=128, BLOCK=8)
    for _ in range(2):
        launch((5, 1), (a, a), (3,))
    assert log == 2 * ["on 1", "ordinary", "back"]


@pytest.mark.parametrize("target", [GPUTarget("cuda", 90, 64), GPUTarget("other", 1, 32)], ids=str)
def test_kernels_compiled_for_other_targets_are_launched_by_triton(
    target: GPUTarget, log: Log
) -> None:
    kernel, a = StubKernel(log), torch.zeros(64)
    kernel.target, kernel.packed_metadata = target, (4, 1, 1024, 7)
    launch = _launch.Launch(kernel, torch.device("cuda:1"), threads=128, BLOCK=8)
    for _ in range(2):
        launch((5, 1), (a, a), (3,))
    assert log == 2 * ["on 1", "ordinary", "back"]


def test_without_nvidias_driver_triton_launches(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "is_there", lambda: False)
    launch = _launch.Launch(StubKernel(log), torch.device("cuda:1"), threads=128, BLOCK=8)
    a = torch.zeros(64)
    for _ in range(2):
        launch((5, 1), (a, a), (3,))
    assert log == 2 * ["on 1", "ordinary", "back"]


def test_a_number_that_is_too_large_is_no_reason_to_run_another_kernel(log: Log) -> None:
    """The error is final, as an operator that mutates may have launched another kernel before."""
    launch = _launch.Launch(StubKernel(log), torch.device("cuda:1"), threads=128, BLOCK=8)
    a = torch.zeros(64)
    launch((5, 1), (a, a), (3,))
    with pytest.raises(struct.error):
        launch((5, 1), (a, a), (2**64,))
    with pytest.raises(struct.error):
        launch((2**32, 1), (a, a), (3,))


def test_a_number_that_is_too_large_is_not_cut_off_by_tritons_launcher(log: Log) -> None:
    """Triton's launcher would silently take the lowest 32 bits."""

    def annotated(n: tl.int32) -> None: ...

    kernel = StubKernel(log)
    kernel.fn = annotated  # type: ignore[attr-defined]
    launch = _launch.Launch(kernel, torch.device("cuda:1"), threads=128, BLOCK=8)
    a = torch.zeros(64)
    for number in (2**31, -(2**31) - 1):
        with pytest.raises(struct.error):
            launch((5, 1), (a, a), (number,))
    assert "ordinary" not in log
    launch((5, 1), (a, a), (2**31 - 1,))
    assert "ordinary" in log


def test_launches_are_ordinary_on_request_or_with_a_launch_hook(log: Log) -> None:
    launch = _launch.Launch(StubKernel(log), torch.device("cuda:1"), threads=128, BLOCK=8)
    a = torch.zeros(64)
    launch((5, 1), (a, a), (3,))
    log.clear()
    with _launch.ordinary_launches():
        launch((5, 1), (a, a), (3,))
    assert "ordinary" in log
    log.clear()
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(print)
    try:
        launch((5, 1), (a, a), (3,))
    finally:
        hook.remove(print)
    assert "ordinary" in log


# --------------------------------------------------------------------------- interpreted


class OthersWait:
    """A kernel that takes ``seconds`` in all threads but the one that has created it.

    Attributes:
        running: launches in progress.
        most: the largest number of launches in progress at once.
        begun: set once a launch has begun.
        end: ends the wait early.
    """

    arg_names = ("a_ptr",)

    def __init__(self, seconds: float) -> None:
        self.seconds, self.home = seconds, threading.current_thread()
        self.running = self.most = 0
        self.begun, self.end = threading.Event(), threading.Event()

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.running += 1
            self.most = max(self.most, self.running)
            self.begun.set()
            if threading.current_thread() is not self.home:
                self.end.wait(self.seconds)
            self.running -= 1

        return launch


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Callable[[OthersWait], None]:
    """Launches a kernel as interpreted kernels are."""
    monkeypatch.setattr(_launch, "INTERPRETED", True)

    def start(kernel: OthersWait) -> None:
        launch = _launch.Launch(kernel, torch.device("cpu"), threads=None)
        launch((1, 1), (torch.zeros(4),), ())

    return start


def test_interpreted_kernels_of_several_threads_run_one_after_another(
    interpreted: Callable[[OthersWait], None],
) -> None:
    kernel = OthersWait(0.1)
    threads = [threading.Thread(target=interpreted, args=(kernel,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (kernel.most, kernel.running) == (1, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_interprets_while_another_thread_of_its_parent_did(
    interpreted: Callable[[OthersWait], None],
) -> None:
    kernel = OthersWait(60)
    thread = threading.Thread(target=interpreted, args=(kernel,))
    thread.start()
    assert kernel.begun.wait(20)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends the child if it hangs
        try:
            interpreted(kernel)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    kernel.end.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_direct_and_ordinary_launches_give_the_same_bytes(offset: int, device: str) -> None:
    rows, columns = 37, 256
    memory = torch.randn(rows * columns + offset, device=device).bfloat16()
    x = memory[offset:].view(rows, columns)
    gamma = torch.randn(columns + offset, device=device).bfloat16()[offset:]
    dz = torch.randn_like(x)

    def run() -> tuple[Tensor, ...]:
        forward = flagos.layernorm_fwd(x, gamma, gamma)
        backward = flagos.layernorm_bwd(dz, x, *forward[1:], gamma)
        return *forward, *backward, *flagos.rmsnorm_fwd(x, gamma)

    direct_launches.check(run)


@pytest.mark.gpu
def test_a_launch_is_on_the_current_stream_and_can_be_captured(device: str) -> None:
    x = torch.randn(64, 512, device=device)
    weight = torch.randn(512, device=device)
    flagos.rmsnorm_fwd(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, _ = flagos.rmsnorm_fwd(x, weight)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, flagos.rmsnorm_fwd(x, weight)[0])


@pytest.mark.gpu
def test_a_thread_that_has_not_used_the_device_starts_kernels(device: str) -> None:
    x, weight = torch.randn(64, 512, device=device), torch.randn(512, device=device)
    for _ in range(_repeats.CALLS_BEFORE + 1):
        expected, _ = flagos.rmsnorm_fwd(x, weight)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(flagos.rmsnorm_fwd(x, weight)[0]))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(found[0], expected)
