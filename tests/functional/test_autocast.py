"""Autocast does not change an operator: its dtypes are those of its contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import functional, ops
from transformer_engine_fl.testing.arguments import bits, clone, tensors


def _everything(op_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """(dtype, bits) of what the reference returns, and of its arguments afterwards."""
    args, kwargs = clone(args), clone(kwargs)
    returned = te.get_default_manager().call(op_name, *args, **kwargs)
    return [(it.dtype, bits(it).tolist()) for it in tensors([returned, args, kwargs])]


@pytest.mark.parametrize("op_name", ops.CATALOGUE)
def test_a_definition_computes_in_its_own_dtypes(op_name: str) -> None:
    contract = ops.CATALOGUE[op_name]
    for dtype in contract.dtypes:
        sample = next(contract.samples(dtype, "cpu"))
        with te.with_preference("reference"):
            expected = _everything(op_name, sample.args, sample.kwargs)
            with torch.autocast("cpu", torch.bfloat16):
                assert _everything(op_name, sample.args, sample.kwargs) == expected, dtype


def attention(x: Tensor, weight: Tensor) -> Tensor:
    q, k = x[None, :, None], weight[None, :, None]
    return functional.attention(q, k, k)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("function", [functional.linear, attention])
def test_values_and_gradients_are_those_without(
    function: Callable[..., Tensor], compiled: bool
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs = [torch.randn(6, 6, requires_grad=True) for _ in range(2)]
    run = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function

    def results(run: Callable[..., Tensor]) -> list[Tensor]:
        output = run(*inputs)
        return [output, *torch.autograd.grad(output.square().sum(), inputs)]

    expected = results(function)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(results(run), expected, rtol=1e-5, atol=1e-6)
