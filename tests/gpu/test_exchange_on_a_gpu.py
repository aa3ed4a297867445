"""Launches that exchange partial sums through memory, in several streams and graphs at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import functional
from transformer_engine_fl.backends import _exchange
from transformer_engine_fl.backends.flagos import normalization as flagos
from transformer_engine_fl.backends.vendor.cuda import normalization as cuda

pytestmark = pytest.mark.gpu
SETS: dict[str, Any] = {"vendor.cuda": cuda, "default.flagos": flagos}


@pytest.mark.parametrize("name", SETS)
def test_streams_and_graphs_do_not_read_each_others_slots(name: str) -> None:
    module = SETS[name]
    generator = torch.Generator("cuda").manual_seed(1)
    calls: list[Callable[[], Any]] = []
    for columns, rows in ((65_536, 300), (40_960, 500), (131_072, 90)):
        x, dy = (
            torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16, generator=generator)
            for _ in range(2)
        )
        gamma, rsigma, mu = x[0].clone(), x[:, 0].float().abs() + 0.5, x[:, 1].float()
        calls.append(lambda a=x, g=gamma: module.layernorm_fwd(a, g, g))
        calls.append(lambda a=x, d=dy, r=rsigma, g=gamma: module.rmsnorm_bwd(d, a, r, g))
        calls.append(lambda a=x, d=dy, r=rsigma, m=mu, g=gamma: module.layernorm_bwd(d, a, m, r, g))
    expected = [call() for call in calls]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [call() for call in calls]
    streams = [torch.cuda.Stream() for _ in range(3)]
    found: list[list[Any]] = []
    for turn in range(6):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if number == turn % 3:
                    graph.replay()
                else:
                    found.append([call() for call in calls])
    torch.cuda.synchronize()
    for results in (*found, captured):
        for one, right in zip(results, expected, strict=True):
            assert all(map(torch.equal, one, right))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("prefer", ["flagos", "vendor:nvidia"])
def test_slots_are_not_those_of_the_pool_of_a_compiled_graph(prefer: str) -> None:
    """The stream's slots are allocated while torch.compile allocates from its graph's pool."""
    torch._dynamo.reset()
    generator = torch.Generator("cuda").manual_seed(2)
    x, w = (
        torch.randn(size, device="cuda", generator=generator).requires_grad_()
        for size in ((200, 65_536), (65_536,))
    )

    def program(x: Tensor, w: Tensor) -> Tensor:
        normed = functional.layer_norm(functional.rms_norm(x * 2, w), w, w)
        return functional.scaled_softmax(normed, 0.5).square().sum() * 1000

    with te.with_preference("reference"):
        expected = torch.autograd.grad(program(x, w), (x, w))
    compiled = torch.compile(program, fullgraph=True, mode="reduce-overhead")
    _exchange._slots_by_stream.clear()
    with te.with_preference(prefer):
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            gradients = [it.clone() for it in torch.autograd.grad(compiled(x, w), (x, w))]
            ordinary = torch.autograd.grad(program(x, w), (x, w))
            for found in (gradients, ordinary):
                for one, right in zip(found, expected, strict=True):
                    assert (one - right).norm() <= 1e-3 * right.norm()
