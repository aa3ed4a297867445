"""The kernel sets on a real GPU: compiled code, CUDA graphs, streams, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import functional, ops, testing

pytestmark = pytest.mark.gpu
SETS = ["flagos", "vendor:nvidia"]


def inputs(rows: int = 64, columns: int = 512) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    return x, torch.randn(columns, device="cuda", dtype=torch.bfloat16)


def check_rms(results: tuple[Tensor, ...], x: Tensor, w: Tensor) -> None:
    contract = ops.rmsnorm_fwd
    for result, expected in zip(results, contract.oracle(x, w), strict=True):
        name = str(result.dtype).removeprefix("torch.")
        worst = testing.compare(result, expected, contract.tolerance_for("bfloat16", name))
        assert worst.ratio <= 1, worst


@pytest.mark.parametrize("prefer", SETS)
def test_a_cuda_graph_captures_a_dispatch_and_replays_it_on_new_values(prefer: str) -> None:
    manager = te.get_default_manager()
    x, w = inputs()
    with te.policy_context(prefer=prefer, strict=True, require=["graph_safe"]):
        manager.call("rmsnorm_fwd", x, w)  # compile, load and plan before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = manager.call("rmsnorm_fwd", x, w)
    for seed in (4, 5):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        check_rms(results, x, w)


@pytest.mark.parametrize("prefer", SETS)
def test_a_kernel_runs_on_the_stream_that_is_current(prefer: str) -> None:
    manager = te.get_default_manager()
    x, w = inputs(8192, 4096)
    stream = torch.cuda.Stream()
    with te.policy_context(prefer=prefer, strict=True):
        manager.call("rmsnorm_fwd", x, w)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            x.fill_(2.0)  # queued after the sleep: a launch on another stream would not see it
            results = manager.call("rmsnorm_fwd", x, w)
    stream.synchronize()
    check_rms(results, x, w)


# A warning of torch's, whose CUDA graphs begin with an empty one.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("prefer", SETS)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_forward_and_backward_compile_without_a_break(prefer: str, mode: str) -> None:
    torch._dynamo.reset()
    x, w = inputs()
    x, w = x.float().requires_grad_(), w.float().requires_grad_()

    def program(x: Tensor, w: Tensor) -> Tensor:
        return functional.rms_norm(x * 2, w).square().mean() * 1000

    with te.with_preference("reference"):
        expected = torch.autograd.grad(program(x, w), (x, w))
    compiled = torch.compile(program, fullgraph=True, mode=mode)
    with te.with_preference(prefer):
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            gradients = torch.autograd.grad(compiled(x, w), (x, w))
            torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("forward", [*SETS, "reference"])
@pytest.mark.parametrize("backward", [*SETS, "reference"])
def test_any_forward_goes_with_any_backward(forward: str, backward: str) -> None:
    x, w = (tensor.double().requires_grad_() for tensor in inputs(6, 33))
    b = torch.zeros_like(w, requires_grad=True)
    order = {}
    for op in ("rmsnorm", "layernorm"):
        order |= {f"{op}_fwd": [forward], f"{op}_bwd": [backward]}
    with te.policy_context(per_op_order=order):
        assert torch.autograd.gradcheck(lambda *args: functional.rms_norm(*args), (x, w))
        assert torch.autograd.gradcheck(lambda *args: functional.layer_norm(*args), (x, w, b))


@pytest.mark.parametrize("prefer", SETS)
def test_a_row_does_not_depend_on_the_other_rows_of_the_call(prefer: str) -> None:
    manager = te.get_default_manager()
    for columns in (64, 1000, 4096, 20000, 70000):
        x, w = inputs(300, columns)
        with te.policy_context(prefer=prefer, strict=True):
            many = manager.call("rmsnorm_fwd", x, w)[0]
            few = manager.call("rmsnorm_fwd", x[5:7], w)[0]
        assert torch.equal(many[5:7], few)
