"""Calls that come again: what they give, and what makes a call another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cuda_emulation
import pytest
import torch
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends import _repeats
from transformer_engine_fl.backends.vendor.cuda import moe, normalization, quantization
from transformer_engine_fl.testing import Guarded


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    reason = cuda_emulation.missing()
    if reason:
        pytest.skip(reason)
    _repeats.forget()
    with cuda_emulation.running():
        yield
    _repeats.forget()


def _rows(rows: int = 3, columns: int = 64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, columns), generator=generator)


def _repeated(call: Callable[[], Any]) -> None:
    for _ in range(_repeats.CALLS_BEFORE):
        call()


def _is_repeat(operator: Any, *arguments: Any) -> bool:
    return operator.calls.last(*arguments) is not _repeats._MISS


def test_a_repeated_call_gives_what_its_own_arguments_make() -> None:
    gamma = _rows(1, 64, 1)[0]
    _repeated(lambda: normalization.rmsnorm_fwd(_rows(), gamma))
    x = _rows(seed=2)
    assert _is_repeat(normalization.rmsnorm_fwd, x, gamma, 1e-5, False, None)
    output, rsigma = normalization.rmsnorm_fwd(x, gamma)
    wide = x.double()
    expected = (wide.square().mean(-1) + 1e-5).rsqrt()
    torch.testing.assert_close(rsigma.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        output.double(), wide * expected[:, None] * gamma, rtol=1e-5, atol=1e-6
    )


def test_outputs_are_new_at_each_call() -> None:
    x, gamma = _rows(), torch.ones(64)
    _repeated(lambda: normalization.rmsnorm_fwd(x, gamma))
    first, second = normalization.rmsnorm_fwd(x, gamma), normalization.rmsnorm_fwd(x, gamma)
    assert first[0].data_ptr() != second[0].data_ptr()


@pytest.mark.parametrize(
    "other",
    [
        lambda x, gamma: (x[:2], gamma, 1e-5, False, None),
        lambda x, gamma: (x.bfloat16(), gamma, 1e-5, False, None),
        lambda x, gamma: (x.t().contiguous().t(), gamma, 1e-5, False, None),
        lambda x, gamma: (x, torch.nn.Parameter(gamma), 1e-5, False, None),
        lambda x, gamma: (x, gamma.clone().requires_grad_(), 1e-5, False, None),
        lambda x, gamma: (x, gamma, 1e-6, False, None),
        lambda x, gamma: (x, gamma, 1e-5, True, None),
        lambda x, gamma: (x, gamma, 1e-5, 0, None),
        lambda x, gamma: (x, gamma, 1e-5, False, torch.bfloat16),
        lambda x, gamma: (torch._neg_view(x), gamma, 1e-5, False, None),
        lambda x, gamma: (torch.zeros(193)[1:].view(3, 64), gamma, 1e-5, False, None),
        lambda x, gamma: (x.to("meta"), gamma, 1e-5, False, None),
        lambda x, gamma: (None, gamma, 1e-5, False, None),
    ],
    ids=[
        "fewer rows",
        "another dtype",
        "other strides",
        "a parameter",
        "requires grad",
        "another eps",
        "another option",
        "an option of another type",
        "another output dtype",
        "a sign kept apart",
        "unaligned",
        "another device",
        "no tensor",
    ],
)
def test_another_call_goes_the_ordinary_way(other: Callable[..., Any]) -> None:
    x, gamma = _rows(), torch.ones(64)
    _repeated(lambda: normalization.rmsnorm_fwd(x, gamma))
    assert _is_repeat(normalization.rmsnorm_fwd, x, gamma, 1e-5, False, None)
    assert not _is_repeat(normalization.rmsnorm_fwd, *other(x, gamma))


def test_modes_see_every_allocation() -> None:
    x, gamma = _rows(), torch.ones(64)
    _repeated(lambda: normalization.rmsnorm_fwd(x, gamma))
    with Guarded():
        assert not _is_repeat(normalization.rmsnorm_fwd, x, gamma, 1e-5, False, None)


def test_arguments_that_share_memory_are_not_taken_for_others() -> None:
    x, gamma = _rows(), torch.ones(64)
    _repeated(lambda: normalization.rmsnorm_bwd(x, x, torch.ones(3), gamma))
    assert not _is_repeat(normalization.rmsnorm_bwd, x, _rows(seed=3), torch.ones(3), gamma, False)


def test_several_kinds_of_calls_are_at_hand() -> None:
    gamma = torch.ones(64)
    for rows in (2, 3):
        _repeated(lambda rows=rows: normalization.rmsnorm_fwd(_rows(rows), gamma))
    for rows in (2, 3, 2):
        output, _ = normalization.rmsnorm_fwd(_rows(rows), gamma)
        assert output.shape == (rows, 64)
        assert _is_repeat(normalization.rmsnorm_fwd, _rows(rows), gamma, 1e-5, False, None)


def test_clearing_plans_forgets_calls() -> None:
    x, gamma = _rows(), torch.ones(64)
    _repeated(lambda: normalization.rmsnorm_fwd(x, gamma))
    normalization._forwards.clear()
    assert not _is_repeat(normalization.rmsnorm_fwd, x, gamma, 1e-5, False, None)


def test_a_repeated_quantization_is_the_contracts() -> None:
    x = _rows(32, 64)
    _repeated(lambda: quantization.quantize(x, format="mxfp8"))
    values = _rows(32, 64, 5) * 100
    found = quantization.quantize(values, format="mxfp8")
    _repeats.forget()
    expected = quantization.quantize(values, format="mxfp8")
    for one, other in zip(found, expected, strict=True):
        assert (one is None) is (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert one.stride() == other.stride()
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_a_repeated_permutation_follows_its_indices() -> None:
    rows = _rows(6, 16)

    def call(indices: Tensor) -> Any:
        return moe.moe_permute_fwd(rows, indices)

    start = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0], [2, 1]], dtype=torch.int32)
    _repeated(lambda: call(start))
    turned = start.flip(0).contiguous()
    found = call(turned)
    _repeats.forget()
    for one, other in zip(found, call(turned), strict=True):
        assert torch.equal(one, other)


def test_errors_are_the_operators_own() -> None:
    x, gamma = _rows(), torch.ones(64)
    _repeated(lambda: normalization.rmsnorm_fwd(x, gamma))
    with pytest.raises(TypeError):
        normalization.rmsnorm_fwd(x)  # type: ignore[call-arg]
    assert ops.rmsnorm_fwd.name == normalization.rmsnorm_fwd.__name__
