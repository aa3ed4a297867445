"""The norm of a sum: two outputs, two gradients in, one gradient for two inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from transformer_engine_fl import functional, ops
from transformer_engine_fl.core.errors import ArgumentError


def leaves(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(8)
    x, residual = torch.randn(5, 6, dtype=dtype), torch.randn(5, 6, dtype=dtype)
    weight = torch.randn(6, dtype=dtype)
    return x.requires_grad_(), residual.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize("zero_centered", [False, True])
def test_gradients_pass_gradcheck(zero_centered: bool) -> None:
    assert torch.autograd.gradcheck(
        lambda *args: functional.rms_norm_add(*args, zero_centered_gamma=zero_centered), leaves()
    )


@pytest.mark.parametrize("used", [0, 1])
def test_gradients_pass_gradcheck_where_only_one_output_is_used(used: int) -> None:
    assert torch.autograd.gradcheck(lambda *args: functional.rms_norm_add(*args)[used], leaves())


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_only_the_gradients_that_are_wanted_are_returned(wanted: int) -> None:
    inputs = [tensor.detach() for tensor in leaves()]
    inputs[wanted].requires_grad_()
    output, total = functional.rms_norm_add(*inputs)
    (output.sum() + total.sum()).backward()
    assert [tensor.grad is not None for tensor in inputs] == [i == wanted for i in range(3)]


def test_the_two_inputs_do_not_share_their_gradients_memory() -> None:
    x, residual, weight = leaves()
    output, total = functional.rms_norm_add(x, residual, weight)
    (output.square().sum() + total.sum()).backward()
    assert x.grad is not None
    assert residual.grad is not None
    assert torch.equal(x.grad, residual.grad)
    x.grad.zero_()
    assert bool(residual.grad.any())


def test_a_tensor_that_is_added_to_itself_has_both_gradients() -> None:
    x, _, weight = leaves()
    assert torch.autograd.gradcheck(lambda x, w: functional.rms_norm_add(x, x, w), (x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_that_of_the_sum_as_it_is_stored(dtype: torch.dtype) -> None:
    torch.manual_seed(9)
    x, residual, weight = torch.randn(64, 96), torch.randn(64, 96), torch.randn(96)
    x, residual, weight = x.to(dtype), residual.to(dtype), weight.to(dtype)
    output, total, rsigma = ops.rmsnorm_fwd_add(x, residual, weight)
    assert torch.equal(total, x + residual)
    expected, expected_rsigma = ops.rmsnorm_fwd(total, weight)
    assert torch.equal(output, expected)
    assert torch.equal(rsigma, expected_rsigma)


def test_the_backward_rounds_once() -> None:
    # In bfloat16 it shows if dx is rounded before the other gradient is added.
    torch.manual_seed(10)
    x, add, dz = (torch.randn(64, 96).bfloat16() for _ in range(3))
    weight = torch.randn(96).bfloat16()
    _, rsigma = ops.rmsnorm_fwd(x, weight)
    dx, dgamma = ops.rmsnorm_bwd_add(dz, x, add, rsigma, weight)
    wide, _ = ops.rmsnorm_bwd(dz.float(), x.float(), rsigma, weight.float())
    assert torch.equal(dx, (wide + add.float()).bfloat16())
    assert torch.equal(dgamma, ops.rmsnorm_bwd(dz, x, rsigma, weight)[1])
    twice = ops.rmsnorm_bwd(dz, x, rsigma, weight)[0] + add
    assert not torch.equal(dx, twice)


def test_it_is_compiled_with_its_gradient() -> None:
    torch._dynamo.reset()

    def program(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        output, total = functional.rms_norm_add(x, residual, weight)
        return (output.square() + total).sum()

    found = []
    for run in (program, torch.compile(program, fullgraph=True, backend="aot_eager")):
        inputs = leaves()
        run(*inputs).backward()
        found.append([tensor.grad for tensor in inputs])
    torch.testing.assert_close(*found)


def test_what_does_not_agree_is_refused() -> None:
    x, residual, weight = (tensor.detach() for tensor in leaves())
    with pytest.raises(ArgumentError, match="residual"):
        ops.rmsnorm_fwd_add(x, residual.float(), weight)
    with pytest.raises(ArgumentError, match="residual"):
        ops.rmsnorm_fwd_add(x, residual[:1], weight)
    rsigma = torch.ones(5, dtype=torch.float64)
    with pytest.raises(ArgumentError, match="add"):
        ops.rmsnorm_bwd_add(x, x, residual[:1], rsigma, weight)
    with pytest.raises(ArgumentError, match="dz"):
        ops.rmsnorm_bwd_add(x[:1], x, residual, rsigma, weight)
