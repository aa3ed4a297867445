"""Tests FlagGems' own functions under ATen's signatures, which no contract covers, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import te_fl_flaggems
import torch
from te_fl_flaggems import untuned
from torch import Tensor

HERE = te_fl_flaggems.is_available()
# Importing FlagGems and compiling its kernels emits many warnings.
pytestmark = [
    pytest.mark.skipif(HERE is not True, reason=str(HERE)),
    pytest.mark.filterwarnings("default"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def arguments(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments in float64; for a softmax's gradient, the output is a real softmax."""
    torch.manual_seed(0)
    x, dy = (torch.randn(33, 65, dtype=torch.float64, device="cuda") for _ in range(2))
    matrix = torch.randn(65, 40, dtype=torch.float64, device="cuda")
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "_log_softmax": ((x, -1, False), {}),
        "_log_softmax_backward_data": ((dy, x.log_softmax(-1), -1, torch.float64), {}),
        "_softmax": ((x, -1, False), {}),
        "_softmax_backward_data": ((dy, x.softmax(-1), -1, torch.float64), {}),
        "addmm": ((matrix[0], x, matrix), {"beta": 2, "alpha": 3}),
        "bmm": ((x.expand(3, -1, -1), matrix.expand(3, -1, -1)), {}),
        "gelu": ((x,), {"approximate": "tanh"}),
        "gelu_backward": ((dy, x), {"approximate": "tanh"}),
        "mm": ((x, matrix), {}),
        "native_dropout_backward": ((dy, x > 0, 2.0), {}),
        "relu": ((x,), {}),
        "silu": ((x,), {}),
        "silu_backward": ((dy, x), {}),
    }
    return calls[name]


def of(dtype: torch.dtype, value: Any) -> Any:
    """An argument with float64, of a tensor or as a dtype, replaced by ``dtype``."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype is torch.float64 else value
    return dtype if value is torch.float64 else value


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda it: str(it).removeprefix("torch."))
@pytest.mark.parametrize("name", sorted(set(te_fl_flaggems.ATEN) - {"native_dropout"}))
def test_it_gives_what_float64_does(name: str, dtype: torch.dtype) -> None:
    args, kwargs = arguments(name)
    args = tuple(of(dtype, it) for it in args)
    given = getattr(untuned.aten, name)(*args, **kwargs)
    exact = tuple(it.double() if getattr(it, "dtype", None) is dtype else it for it in args)
    exact = tuple(torch.float64 if it is dtype else it for it in exact)
    expected = getattr(torch.ops.aten, name)(*exact, **kwargs)
    assert given.dtype is dtype
    bound = 4 * torch.finfo(dtype).eps
    scale = expected.square().mean().sqrt().item()
    torch.testing.assert_close(given.double(), expected, rtol=bound, atol=bound * scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda it: str(it).removeprefix("torch."))
def test_a_product_takes_operands_of_any_strides(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(size, dtype=dtype, device="cuda") for size in ((64, 7), (64 * 40 + 1,)))
    b = b[1:].view(64, 40)
    for left in (a.t(), a[:1, :1].expand(16, 64), a[:, :1].t().expand(16, 64)):
        expected = left.double() @ b.double()
        bound = 4 * torch.finfo(dtype).eps
        scale = expected.square().mean().sqrt().item()
        given = untuned.aten.mm(left, b)
        torch.testing.assert_close(given.double(), expected, rtol=bound, atol=bound * scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda it: str(it).removeprefix("torch."))
def test_dropout_keeps_its_mask_its_share_and_the_mean(dtype: torch.dtype) -> None:
    x = torch.rand(1 << 18, dtype=dtype, device="cuda") + 1
    output, kept = untuned.aten.native_dropout(x, 0.25, True)
    assert kept.dtype is torch.bool
    assert abs(kept.double().mean().item() - 0.75) < 0.01
    expected = x.double() * kept / 0.75
    bound = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, rtol=bound, atol=bound)
