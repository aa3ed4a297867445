"""Calls of more programs side by side than a grid's second axis has: declined, not launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_engine_fl.backends.flagos import (
    _launch,
    activation,
    attention_layout,
    context_parallel,
    gemm,
    router,
)
from transformer_engine_fl.core.errors import NotSupportedError

New = Callable[..., Tensor]


def bias_gradient(new: New) -> None:
    x = new(1, 2**26)
    activation.dbias_dgelu(x, x)


def gradient_of_a_product(new: New) -> None:
    A = new(1, 2**24)
    gemm.generic_gemm(A, A, grad=True, bias_grad=True)


def second_halves_read(new: New) -> None:
    lse, bounds = new(1, 2**24, dtype=torch.float32), new(2, dtype=torch.int32)
    context_parallel.thd_read_second_half_lse(lse, bounds, 2**23, lse_packed=True)


def second_halves_written(new: New) -> None:
    lse, step = (new(1, size, dtype=torch.float32) for size in (2**24, 2**23))
    bounds = new(2, dtype=torch.int32)
    context_parallel.thd_second_half_lse_correction(lse, step, bounds, lse_packed=True)


def cache_in_another_order(new: New) -> None:
    tokens, cache, bounds = new(0, 2**16, 1), new(1, 1, 2**16, 2)[..., :1], new(2).int()
    row = new(1).int()
    attention_layout.copy_to_kv_cache(
        tokens, tokens, cache, cache.clone(), bounds, bounds, batch_indices=row
    )


def loss_of_experts(new: New) -> None:
    router.fused_moe_aux_loss_fwd(new(1, 2**26), new(2**26, dtype=torch.int32), 1, 1, 0.1)


def gradient_of_the_loss(new: New) -> None:
    number, counts = new((), dtype=torch.float32), new(2**26, dtype=torch.int32)
    router.fused_moe_aux_loss_bwd(number, number, counts, 1)


@pytest.mark.parametrize(
    "call",
    [
        bias_gradient,
        gradient_of_a_product,
        second_halves_read,
        second_halves_written,
        cache_in_another_order,
        loss_of_experts,
        gradient_of_the_loss,
    ],
)
def test_more_programs_across_than_a_grid_has_are_declined(
    call: Callable[[New], None], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launched(*_: Any) -> None:
        raise AssertionError("something was launched")

    def new(*shape: Any, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)  # memory that nothing touches

    monkeypatch.setattr(_launch.Launch, "__call__", launched)
    with pytest.raises(NotSupportedError, match="programs across"):
        call(new)
