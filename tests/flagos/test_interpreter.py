"""The interpreter that patches Triton once per launch gives the results of Triton's own."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton_interpreter import as_triton_does

from transformer_engine_fl.backends.flagos import _launch, normalization

pytestmark = pytest.mark.skipif(not _launch.INTERPRETED, reason="looks at the interpreter")


@triton.jit  # type: ignore[untyped-decorator]
def _fails(x_ptr: tl.tensor) -> None:
    tl.sum(tl.load(x_ptr + tl.arange(0, 4)), axis=3)


def test_it_gives_the_bits_that_triton_gives() -> None:
    x, weight = torch.randn(3, 5000).to(torch.bfloat16), torch.randn(5000).to(torch.bfloat16)
    found = normalization.layernorm_fwd(x, weight, weight)
    with as_triton_does():
        expected = normalization.layernorm_fwd(x, weight, weight)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_it_restores_triton_after_a_launch_even_if_it_fails() -> None:
    x, weight = torch.randn(3, 64), torch.ones(64)
    before = tl.load, hasattr(tl.tensor, "__index__")
    normalization.rmsnorm_fwd(x, weight)
    assert (tl.load, hasattr(tl.tensor, "__index__")) == before
    with pytest.raises(Exception, match="axis"):
        _fails[(1,)](x)
    assert (tl.load, hasattr(tl.tensor, "__index__")) == before
    normalization.rmsnorm_fwd(x, weight)
