"""The optimizer in CUDA C++: how lists are traversed, and what the samples do not cover."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_engine_fl import testing
from transformer_engine_fl.backends._lists import Demand, Tiles, _Layout, whole_chunk
from transformer_engine_fl.backends.vendor.cuda import _numbers, optimizer
from transformer_engine_fl.core.errors import ArgumentError, NotSupportedError
from transformer_engine_fl.ops import optimizer as contracts
from transformer_engine_fl.testing.arguments import clone

THREADS, TILE, CHUNK = 64, 512, 1024
# No vector, whole vectors, a remainder; a whole tile and several chunks, and one element off.
SIZES = [0, 1, 3, 64, TILE - 1, TILE, TILE + 9, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + TILE + 5]
LOW, HALF, FULL, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small tiles, so that small tensors take every path; forget layouts before and after."""
    for name in optimizer.TILES:
        monkeypatch.setitem(optimizer.TILES, name, lambda itemsize: Tiles(THREADS, TILE, CHUNK))
    layouts = optimizer._operators._preparer.layouts
    layouts.clear()
    yield
    layouts.clear()


@pytest.mark.parametrize(
    ("dtypes", "itemsize"),
    [((LOW, LOW, FULL, FULL, FULL), 4), ((LOW, FULL), 4), ((LOW, LOW), 2), ((FULL, DOUBLE), 8)],
)
def test_chunks_are_cut_for_the_widest_tensor(
    dtypes: tuple[torch.dtype, ...], itemsize: int
) -> None:
    asked: list[int] = []

    def cut(device: torch.device, elements: int, size: int) -> Tiles:
        asked.append(size)
        return whole_chunk(THREADS)(size)

    demand = Demand(tuple("abcde"[: len(dtypes)]), cut)
    lists = [[torch.zeros(9000, dtype=dtype)] for dtype in dtypes]
    layout = _Layout("multi_tensor_adam", demand, lists, optimizer.numbers_on_device)
    assert asked == [itemsize]
    assert layout.chunk_starts == [0, -(-9000 * itemsize // 8192)]


def normal(
    sizes: list[int], device: str, dtype: torch.dtype = FULL, off: int = 0, seed: int = 0
) -> list[Tensor]:
    """Tensors that begin ``off`` elements after the start of their allocation."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size + off, generator=generator).to(device, dtype)[off:] for size in sizes]


def adam_lists(
    sizes: list[int], device: str, grads: torch.dtype, params: torch.dtype, off: int = 0
) -> tuple[list[Tensor], ...]:
    kind = DOUBLE if params == DOUBLE else FULL
    squares = [it.square() for it in normal(sizes, device, kind, seed=3)]
    return (
        normal(sizes, device, grads, off),
        normal(sizes, device, params, off, seed=1),
        normal(sizes, device, kind, off, seed=2),
        squares,
    )


def check(op: str, *args: Any, **options: Any) -> None:
    """Check the outputs, and the arguments that are written, against the contract."""
    contract = getattr(contracts, op)
    expected = contract.oracle(*clone(args), **clone(options))
    found = getattr(optimizer, op)(*args, **options)
    bound = contract.bind(*args, **options)
    outputs = [] if found is None else list(found)
    outputs += [bound[name] for name in contract.mutates]
    expected = expected if isinstance(expected, tuple) else (expected,)
    for some, right in zip(outputs, expected, strict=True):
        if right is None:
            continue
        pairs = zip(some, right, strict=True) if isinstance(some, list) else [(some, right)]
        for one, value in pairs:
            if one.numel():
                worst = testing.compare(one, value, contract.tolerance[str(one.dtype)[6:]])
                assert worst.ratio <= 1, worst


@pytest.mark.parametrize("off", [0, 1])
@pytest.mark.parametrize("kinds", [(FULL, FULL), (LOW, LOW), (HALF, FULL), (LOW, DOUBLE)])
def test_tensors_of_every_size(
    kinds: tuple[torch.dtype, torch.dtype], off: int, device: str
) -> None:
    grads, params = kinds
    inputs = normal(SIZES, device, grads, off)
    outputs = normal(SIZES, device, params if grads == params else FULL, off)
    check("multi_tensor_scale", inputs, outputs, 0.3)
    check("multi_tensor_l2norm", inputs, per_tensor=True)
    lists = adam_lists(SIZES, device, grads, params, off)
    check("multi_tensor_adam", *lists, 0.1, 3, weight_decay=0.1)
    buffers = [it.clone() for it in lists[2]]
    check("multi_tensor_sgd", lists[0], lists[1], buffers, 0.1, 0.1, 0.9)


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 63, 65, 500, 1025, 1100])
def test_a_chunk_is_found_among_any_number_of_rows(count: int, device: str) -> None:
    sizes = [1 + place % 3 * CHUNK for place in range(count)] if count < 500 else [5] * count
    check("multi_tensor_l2norm", normal(sizes, device), per_tensor=True)


@pytest.mark.parametrize("count", [0, 1, 32, 33, 480, 481, 1000])
def test_numbers_come_to_the_device(count: int, device: str) -> None:
    numbers = [(-1) ** place * (place << 40) + place for place in range(count)]
    found = _numbers.numbers_on_device(numbers, torch.device(device)).tolist()
    assert found[:count] == numbers
    assert not any(found[count:])


def test_a_second_step_makes_no_table(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = adam_lists([5, CHUNK + 1], device, FULL, FULL)
    optimizer.multi_tensor_adam(*lists, 0.1, 1)
    preparer = optimizer._operators._preparer
    (layout,) = preparer.layouts.values()
    monkeypatch.setattr(layout, "_numbers_on_device", None)
    check("multi_tensor_adam", *lists, 0.1, 2)


def test_what_inference_mode_has_made_is_refused_after_a_like_call_too(device: str) -> None:
    inputs = normal([5, 9], device)
    with torch.inference_mode():
        outputs = normal([5, 9], device)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="created in inference mode"):
            optimizer.multi_tensor_scale(inputs, outputs, 2.0)
        optimizer.multi_tensor_scale(inputs, normal([5, 9], device), 2.0)
    with torch.inference_mode():
        optimizer.multi_tensor_scale(inputs, outputs, 2.0)
        assert all(map(torch.equal, outputs, [it * 2 for it in inputs]))


def test_a_tensor_that_is_written_twice_is_declined(device: str) -> None:
    (tensor,) = normal([5], device)
    with pytest.raises(NotSupportedError, match="listed twice"):
        optimizer.multi_tensor_scale([tensor, tensor], [tensor, tensor], 2.0)


def test_an_output_may_be_its_own_input(device: str) -> None:
    tensors = normal(SIZES, device)
    check("multi_tensor_scale", tensors, tensors, 3.0)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("place", [0, TILE + 8, 3 * CHUNK + TILE + 4])
def test_what_is_not_finite_is_found_wherever_it_is(place: int, value: float, device: str) -> None:
    inputs = normal(SIZES, device)
    inputs[-1][place] = value
    outputs = [torch.zeros_like(it) for it in inputs]
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    optimizer.multi_tensor_scale(inputs, outputs, 1.0, noop_flag=flag)
    assert flag.item() == 1
    flag.zero_()
    optimizer.multi_tensor_l2norm(inputs, noop_flag=flag)
    assert flag.item() == 1


@pytest.mark.gpu
def test_a_graph_outlives_what_is_kept() -> None:
    lists = adam_lists(SIZES, "cuda", FULL, FULL)
    expected = clone(lists)
    optimizer.multi_tensor_adam(*clone(lists), 0.1, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.multi_tensor_adam(*lists, 0.1, 1)
    optimizer._operators._preparer.layouts.clear()
    torch.cuda.empty_cache()
    for _ in range(2):
        graph.replay()
        optimizer.multi_tensor_adam(*expected, 0.1, 1)
    for some, right in zip(lists, expected, strict=True):
        assert all(map(torch.equal, some, right))
