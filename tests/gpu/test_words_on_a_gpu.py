"""Launches that tell each other sums through memory, on several streams and in graphs at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from transformer_engine_fl.backends.flagos import normalization as flagos
from transformer_engine_fl.backends.vendor.cuda import normalization as cuda

pytestmark = pytest.mark.gpu
SETS: dict[str, Any] = {"vendor.cuda": cuda, "default.flagos": flagos}


@pytest.mark.parametrize("name", SETS)
def test_streams_and_graphs_do_not_hear_each_other(name: str) -> None:
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
