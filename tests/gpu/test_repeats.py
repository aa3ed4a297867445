"""Repeated calls of every operator on a real GPU: values, streams, CUDA graphs, threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import repeated_calls
import torch
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl.backends import _repeats
from transformer_engine_fl.core.contract import Sample

pytestmark = pytest.mark.gpu
SETS = ("default.flagos", "vendor.cuda")
DTYPES = ("bfloat16", "float32")
"""Dtypes of the samples; an operator that takes neither is called with its first two."""
MOST_SAMPLES = 2
SLEEP = 5_000_000  # cycles, some milliseconds


@functools.cache
def registry() -> te.OpRegistry:
    made = te.OpRegistry()
    te.OpManager(made, plugins=False).ensure_initialized()
    return made


def operators() -> list[tuple[str, str]]:
    found = registry()
    return [
        (impl.impl_id, name)
        for name in found.list_operators()
        if name in found.contracts and not found.contracts[name].mutates
        for impl in found.get_implementations(name)
        if impl.impl_id in SETS
    ]


@functools.cache
def operator_of(impl: str, name: str) -> Any:
    entry = next(it for it in registry().entries(name) if it.impl.impl_id == impl)
    assert entry.load() is None
    return entry.fn


@functools.cache
def samples_of(impl: str, name: str) -> list[Sample]:
    """Samples that the operator serves; the first is the typical one of its first dtype."""
    contract, operator = registry().contracts[name], operator_of(impl, name)
    chosen = [it for it in DTYPES if it in contract.dtypes] or list(contract.dtypes)[:2]
    found = []
    for place, dtype in enumerate(chosen):
        of_dtype = list(contract.samples(dtype, "cuda"))
        others = [it for it in of_dtype[1:] if it.kwargs] or of_dtype[1:]
        wanted = of_dtype[:1] + (others[: MOST_SAMPLES - 1] if not place else [])
        found += [it for it in wanted if repeated_calls.serves(operator, it)]
    return found


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    _repeats.forget()
    yield
    _repeats.forget()


@pytest.mark.parametrize(("impl", "name"), operators())
def test_a_repeated_call_does_what_the_ordinary_way_does(impl: str, name: str) -> None:
    operator = operator_of(impl, name)
    if not hasattr(operator, "calls"):
        pytest.skip("is never repeated")
    samples = samples_of(impl, name)
    if not samples:
        pytest.skip("serves no sample here")
    for sample in samples:
        repeated_calls.check(operator, sample)
    sample = samples[0]
    repeated_calls.repeat(operator, sample)
    repeated_calls.check_same(operator, repeated_calls.renewed(sample, 20, shift=1))
    repeated_calls.check_same(operator, repeated_calls.renewed(sample, 21, apart=8))
    repeated_calls.check_same(operator, repeated_calls.renewed(sample, 22, shift=3, apart=1))
    repeated_calls.check_same(operator, repeated_calls.renewed(sample, 23))
    if repeated_calls.is_repeat(operator, sample):
        check_stream(operator, sample)
        check_graph(operator, sample)
        check_threads(operator, sample)


@pytest.mark.parametrize("name", repeated_calls.WRITING)
def test_a_repeated_call_writes_what_the_ordinary_way_does(name: str) -> None:
    operator = operator_of("default.flagos", name)
    samples = samples_of("default.flagos", name)
    known = 0
    for sample in samples:
        repeated_calls.check_written(operator, sample)
        known += repeated_calls.is_repeat(operator, repeated_calls.renewed(sample, 20))
    assert known


@pytest.mark.parametrize("columns", [65_536, 262_144])
def test_blocks_that_exchange_through_memory_do_so_when_a_call_is_repeated(columns: int) -> None:
    """Launches are cooperative, with rows wider than those of any sample."""
    operator = operator_of("vendor.cuda", "layernorm_bwd")
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    rows = 40
    values = [normal(*shape).bfloat16() for shape in ((rows, columns), (rows, columns), (columns,))]
    sample = Sample("wide", (*values[:2], normal(rows), normal(rows).abs(), values[2]))
    repeated_calls.check(operator, sample)
    assert repeated_calls.is_repeat(operator, sample)
    check_stream(operator, sample)
    check_graph(operator, sample)
    check_threads(operator, sample)


def tensors(call: Sample) -> list[Tensor]:
    values = [*call.args, *call.kwargs.values()]
    return [it for it in values if isinstance(it, Tensor)]


def check_stream(operator: Any, sample: Sample) -> None:
    """On another stream the call comes after the work there that fills its arguments."""
    new = repeated_calls.renewed(sample, 30)
    call = repeated_calls.renewed(sample, 31)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        for tensor, value in zip(tensors(call), tensors(new), strict=True):
            tensor.copy_(value)
        found = operator(*call.args, **call.kwargs)
    stream.synchronize()
    repeated_calls.check_same(operator, new, found)


def check_graph(operator: Any, sample: Sample) -> None:
    """A captured call reads the values that are present at each replay."""
    call = repeated_calls.renewed(sample, 40)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = operator(*call.args, **call.kwargs)
    for seed in (41, 42):
        new = repeated_calls.renewed(sample, seed)
        for tensor, value in zip(tensors(call), tensors(new), strict=True):
            tensor.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        repeated_calls.check_same(operator, new, found)


def check_threads(operator: Any, sample: Sample) -> None:
    """Calls of two threads, each on its own stream, do not affect each other."""
    calls = [[repeated_calls.renewed(sample, 50 + 10 * n + it) for it in range(4)] for n in (0, 1)]
    torch.cuda.synchronize()
    start = threading.Barrier(2)

    def work(mine: list[Sample]) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            start.wait()
            found = [operator(*it.args, **it.kwargs) for it in mine * 4]
            stream.synchronize()
            for call, results in zip(mine * 4, found, strict=True):
                repeated_calls.check_same(operator, call, results)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(work, mine) for mine in calls]:
            done.result()
