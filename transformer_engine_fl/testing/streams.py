"""Further checks of an implementation on a CUDA device.

Other streams, a device that is not the current one, CUDA graphs.
"""

from __future__ import annotations

import dataclasses

import torch

from transformer_engine_fl.core.contract import Sample
from transformer_engine_fl.testing.arguments import (
    changed,
    copy_into,
    flipped,
    tensors,
    transformed,
)
from transformer_engine_fl.testing.checks import Run
from transformer_engine_fl.testing.comparison import compare
from transformer_engine_fl.testing.outcome import PASSED, Outcome

__all__ = ["graph_safe", "other_device", "stream"]

_BUSY = 50_000_000
"""Clock cycles, some 30 ms: longer than a call takes on the host."""


def stream(run: Run) -> Outcome:
    """Right on a stream that is not the default one.

    The inputs are written late on that stream, so that work on any other stream reads zeros.
    """
    device = _device(run.sample)
    with torch.cuda.device(device):
        run.serve(run.fresh())  # compiles before the timing matters
        source = run.fresh()
        call = changed(run.fresh(), torch.zeros_like)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            torch.cuda._sleep(_BUSY)  # type: ignore[no-untyped-call]
            copy_into(call, source)
            values = run.serve(call)
        side.synchronize()
    return Outcome(run.check_values(values))


def other_device(run: Run) -> Outcome:
    """Right on a device that is not the current one."""
    current = _device(run.sample)
    other = torch.device("cuda", ((current.index or 0) + 1) % torch.cuda.device_count())
    args, kwargs = transformed((run.sample.args, run.sample.kwargs), lambda it: it.to(other))
    there = dataclasses.replace(run, sample=Sample(run.sample.label, args, kwargs))
    with torch.cuda.device(current):
        values = there.serve(there.fresh())
        torch.cuda.synchronize(other)
        return Outcome(there.check_values(values))


def graph_safe(run: Run) -> Outcome:
    """A call captured in a CUDA graph and replayed on new values gives what a new call gives."""
    with torch.cuda.device(_device(run.sample)):
        call = run.fresh()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run.serve(call)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            values = run.serve(call)
        for value in tensors(values):
            value.zero_()
        fresh = changed(run.fresh(), flipped)
        copy_into(call, fresh)
        graph.replay()
        torch.cuda.synchronize()
        expected = run.serve(fresh)
        for what, result, value in run.pairs(values, expected):
            name = str(result.dtype).removeprefix("torch.")
            error = compare(result, value, run.contract.tolerance_for(run.dtype, name))
            if error.ratio > 1:
                raise run.error(f"{what}, replayed from a graph: {error}")
    return PASSED


def _device(sample: Sample) -> torch.device:
    return next(tensors((sample.args, sample.kwargs))).device
