"""Slots through which programs that share a row exchange its sums: which launches share them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from transformer_engine_fl.backends import _exchange, _memory
from transformer_engine_fl.backends._lists import Demand, Tiles, _Layout
from transformer_engine_fl.backends.vendor.cuda import _compile

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without slots, as in a process that has launched no kernel."""
    monkeypatch.setattr(_exchange, "_slots_by_stream", {})


def on_stream(monkeypatch: pytest.MonkeyPatch, number: int | None) -> None:
    monkeypatch.setattr(_exchange, "keeping_stream", lambda device: number)


def test_no_two_launches_of_a_stream_have_an_epoch_in_common() -> None:
    epochs = [7, 1, 30]
    firsts = [_exchange.slots_for(CPU, 4, many)[0] for many in epochs]
    assert firsts == [1, 8, 9]


def test_slots_of_a_stream_are_cleared_once_and_shared_by_its_launches() -> None:
    _, slots = _exchange.slots_for(CPU, 4, 1)
    assert slots.dtype == torch.int64
    assert not slots.any()
    slots.fill_(5)
    assert _exchange.slots_for(CPU, 100, 1)[1] is slots


def test_each_stream_has_slots_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for stream in (3, 4, 3):
        on_stream(monkeypatch, stream)
        found.append(_exchange.slots_for(CPU, 4, 2))
    assert [first for first, _ in found] == [1, 1, 3]
    assert found[0][1] is found[2][1] is not found[1][1]


def test_a_graph_has_slots_of_its_own_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    on_stream(monkeypatch, None)
    (first, slots), (other_first, other_slots) = (_exchange.slots_for(CPU, 4, 9) for _ in range(2))
    assert first == other_first == 1
    assert slots is not other_slots
    assert slots.numel() == 4 * _exchange.EPOCHS * _exchange.SUMS
    assert not _exchange._slots_by_stream


def test_there_are_as_many_slots_as_the_largest_grid_needs() -> None:
    _, few = _exchange.slots_for(CPU, 4, 1)
    programs = few.numel()
    _, many = _exchange.slots_for(CPU, programs, 1)
    assert many.numel() == programs * _exchange.EPOCHS * _exchange.SUMS
    assert not many.any()
    assert _exchange.slots_for(CPU, 4, 1)[1] is many


def test_epochs_begin_again_on_cleared_slots_when_no_slot_could_hold_the_next() -> None:
    _, slots = _exchange.slots_for(CPU, 4, _exchange.LAST_EPOCH - 10)
    slots.fill_(5)
    first, same = _exchange.slots_for(CPU, 4, 5)
    assert (first, same) == (_exchange.LAST_EPOCH - 9, slots)
    assert first + 5 <= 2**31
    first, other = _exchange.slots_for(CPU, 4, 6)
    assert first == 1
    assert other is not slots
    assert not other.any()


def test_slots_made_inside_a_transform_are_plain_tensors() -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        _exchange.slots_for(CPU, 4, 1)
        return x.sum()

    torch.func.grad(gradient)(torch.ones(3))
    _, slots = _exchange.slots_for(CPU, 4, 1)
    assert slots.data_ptr()
    assert not torch._C._functorch.is_functorch_wrapped_tensor(slots)


def test_slots_are_there_for_threads_that_outlive_the_main_one() -> None:
    program = (
        "import threading, torch\n"
        "from transformer_engine_fl.backends._exchange import slots_for\n"
        "def late():\n"
        "    threading.main_thread().join()\n"
        "    print(slots_for(torch.device('cpu'), 4, 1)[0])\n"
        "threading.Thread(target=late).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr


def test_running_out_of_memory_for_slots_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(count: int, device: torch.device) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(_exchange, "_zeros", full)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        _exchange.slots_for(CPU, 4, 1)


@pytest.mark.parametrize(
    ("current", "captured", "raw", "found"),
    [(1, False, 77, 77), (1, True, 77, None), (0, False, 77, 77), (0, True, 77, None)],
)
def test_which_stream_has_slots_of_its_own(
    monkeypatch: pytest.MonkeyPatch, current: int, captured: bool, raw: int, found: int | None
) -> None:
    capturing = {current: None, 1: captured}  # the current device's stream: no answer for another
    for name, function in (
        ("_cuda_getDevice", lambda: current),
        ("_cuda_isCurrentStreamCapturing", lambda: capturing[current]),
        ("_cuda_getCurrentRawStream", lambda index: raw + index - 1),
    ):
        monkeypatch.setattr(torch._C, name, function, raising=False)
    monkeypatch.setattr(_memory, "is_captured", lambda device: captured)
    assert _memory.keeping_stream(torch.device("cuda", 1)) == found


@pytest.fixture
def on_a_stream_of_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in (
        ("_cuda_getDevice", lambda: 0),
        ("_cuda_isCurrentStreamCapturing", lambda: False),
        ("_cuda_getCurrentRawStream", lambda index: _memory._PER_THREAD),
    ):
        monkeypatch.setattr(torch._C, name, function, raising=False)


@pytest.mark.usefixtures("on_a_stream_of_each_thread")
def test_per_thread_streams_keep_no_slots() -> None:
    assert _memory.keeping_stream(torch.device("cuda", 0)) is None


@pytest.mark.usefixtures("on_a_stream_of_each_thread")
def test_per_thread_streams_keep_no_tables_of_lists() -> None:
    tensor = torch.ones(3)
    demand = Demand(("inputs",), lambda device, elements, itemsize: Tiles(32, 32, 32))
    layout = _Layout("op", demand, [[tensor]], lambda numbers, device: torch.tensor(numbers))
    layout.device = torch.device("cuda", 0)
    pointers = ((tensor.data_ptr(),),)
    first, second = (layout.cached_tables("op", pointers, [False]) for _ in range(2))
    assert first is not second
    assert not layout._tables


def test_kernels_have_as_many_epochs_as_the_host_lets_share_a_place() -> None:
    text = (_compile.FOLDER / "include" / "memory_exchange.cuh").read_text()
    (epochs,) = re.findall(r"kEpochs = (\d+);", text)
    assert int(epochs) == _exchange.EPOCHS
