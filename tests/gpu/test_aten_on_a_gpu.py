"""ATen operators of an unmodified model on a real GPU: serving sets, values and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_engine_fl as te
from transformer_engine_fl.integrations.aten import use_aten_ops

pytestmark = pytest.mark.gpu
SETS = {"flagos": "default.flagos", "vendor:nvidia": "vendor.cuda"}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
"""Bound of the error's norm, relative to the norm of the expected result."""


class Model(nn.Module):
    """A layer that calls each kind of operator that is routed."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.layer_norm, self.rms_norm = nn.LayerNorm(width), nn.RMSNorm(width, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.layer_norm(x).unflatten(-1, (4, -1)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)
        hidden = F.gelu(self.first(self.rms_norm(x)), approximate="tanh")
        return self.second(hidden) * F.softmax(x, -1)


def results(model: Callable[[Tensor], Tensor], x: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    output = model(x)
    loss = output.square().sum() + F.cross_entropy(output.flatten(0, 1), x.new_zeros(64).long())
    return [output, *torch.autograd.grad(loss, parameters)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda it: str(it).removeprefix("torch."))
@pytest.mark.parametrize("prefer", SETS)
def test_an_unmodified_model_is_served_and_right(
    prefer: str, dtype: torch.dtype, compiled: bool
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model().to("cuda", dtype)
    x = torch.randn(4, 16, 64, device="cuda", dtype=dtype)
    exact = copy.deepcopy(model).double()
    expected = results(exact, x.double(), list(exact.parameters()))
    ran: set[tuple[str, str]] = set()
    undo = te.get_default_manager().monitor(lambda name, impl: ran.add((name, impl.impl_id)))
    try:
        called = torch.compile(model, backend="aot_eager") if compiled else model
        with use_aten_ops(), te.with_preference(prefer):
            given = results(called, x, list(model.parameters()))
    finally:
        undo()
    for tensor, reference in zip(given, expected, strict=True):
        error = (tensor.double() - reference).norm() / reference.norm()
        assert error < TOLERANCE[dtype]
    if not compiled:
        served = {name for name, impl in ran if impl == SETS[prefer]}
        names = ("gelu", "gelu_backward", "_softmax", "native_layer_norm", "rms_norm", "addmm")
        assert {f"aten::{name}" for name in names} <= served, sorted(ran)


@pytest.mark.parametrize("prefer", SETS)
def test_outside_of_a_block_torch_serves_and_a_block_is_left_as_it_was_entered(prefer: str) -> None:
    x = torch.randn(8, 64, device="cuda")
    ran = []
    undo = te.get_default_manager().monitor(lambda name, impl: ran.append((name, impl.impl_id)))
    try:
        F.silu(x)
        assert not ran
        with use_aten_ops(), te.with_preference(prefer):
            torch.testing.assert_close(F.silu(x), x * x.sigmoid())
        assert ("aten::silu", SETS[prefer]) in ran
        ran.clear()
        F.silu(x)
        assert not ran
    finally:
        undo()
