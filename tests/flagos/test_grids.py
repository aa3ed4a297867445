"""Calls that are declined before any launch: counts too large for a kernel or for a grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_engine_fl.backends.flagos import (
    _arguments,
    _launch,
    activation,
    attention_layout,
    context_parallel,
    epilogue,
    gemm,
    moe,
    quantization,
    rope,
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
        cache_in_another_order,
        loss_of_experts,
        gradient_of_the_loss,
    ],
)
def test_more_programs_across_than_a_grid_has_are_declined(
    call: Callable[[New], None], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    declined(call, "programs in a grid's second dimension", device, monkeypatch)


def declined(
    call: Callable[[New], None], what: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launched(*_: Any) -> None:
        raise AssertionError("something was launched")

    def new(*shape: Any, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)  # never touched

    monkeypatch.setattr(_launch.Launch, "__call__", launched)
    with pytest.raises(NotSupportedError, match=what):
        call(new)


MOST, MORE = 64, 66  # in place of an int32's limit

COUNTED: dict[str, tuple[str, Callable[[New], Any]]] = {
    "rows of an activation": ("rows", lambda new: activation.gelu(new(MORE, 4)[:, :3])),
    "rows of a gated activation": ("rows", lambda new: activation.swiglu(new(MORE, 2))),
    "rows of a gated gradient": ("rows", lambda new: activation.dglu(new(MORE, 1), new(MORE, 2))),
    "rows of an amax": ("rows", lambda new: quantization.compute_amax(new(MORE, 4)[:, :3])),
    "columns of a bias gradient": (
        "columns",
        lambda new: quantization.bgrad_quantize(new(1, MORE)),
    ),
    "columns of a bias gradient and a slope": (
        "columns",
        lambda new: epilogue.dbias_dgelu_quantize(new(1, MORE), new(1, MORE)),
    ),
    "heads that turn": ("heads", lambda new: turned(new, heads=MORE // 2)),
    "positions of a table": ("positions", lambda new: turned(new, positions=MORE)),
    "ranks": ("ranks", lambda new: turned(new, ranks=MORE)),
    "tokens of padded sequences": (
        "tokens",
        lambda new: attention_layout.convert_bshd_to_thd(new(1, MORE, 1, 1), bounds(new), 1),
    ),
    "tokens of packed sequences": (
        "tokens",
        lambda new: attention_layout.convert_thd_to_bshd(new(MORE, 1, 1), bounds(new), 1),
    ),
    "pages of a cache": ("pages", lambda new: cached(new, pages=MORE)),
    "pages of a sequence": ("pages", lambda new: cached(new, listed=MORE)),
    "slots of a page": ("slots of a page", lambda new: cached(new, places=MORE)),
    "tokens of halves that are read": (
        "tokens",
        lambda new: context_parallel.thd_read_half_tensor(new(MORE, 1, 1), bounds(new), 0),
    ),
    "tokens of halves that are added": (
        "tokens",
        lambda new: context_parallel.thd_grad_correction(
            new(MORE, 1, 1), new(MORE // 2, 1, 1), bounds(new), first_half="none", second_half="add"
        ),
    ),
    "tokens of shares": ("tokens", lambda new: shared(new, tokens=MORE)),
    "columns of shares": ("tokens", lambda new: shared(new, columns=MORE)),
    "sequences whose tokens turn": (
        "sequences",
        lambda new: rope.fused_rope_forward(
            new(1, 1, 2),
            new(1, 1, 1, 2, dtype=torch.float32),
            qkv_format="thd",
            cu_seqlens=bounds(new, MORE),
        ),
    ),
    "sequences that are packed": (
        "sequences",
        lambda new: attention_layout.convert_bshd_to_thd(new(MORE, 1, 1, 1), bounds(new, MORE), 1),
    ),
    "sequences of a cache": (
        "sequences",
        lambda new: attention_layout.copy_to_kv_cache(
            *(new(1, 1, 1) for _ in range(2)),
            *(new(1, 1, 1, 1) for _ in range(2)),
            bounds(new, MORE),
            bounds(new, MORE),
            page_table=new(MORE, 1, dtype=torch.int32),
        ),
    ),
    "sequences in halves": (
        "sequences",
        lambda new: context_parallel.thd_read_half_tensor(new(2, 1, 1), bounds(new, MORE), 0),
    ),
    "columns of which a half is read": (
        "tokens",
        lambda new: context_parallel.thd_read_second_half_lse(
            new(1, MORE, dtype=torch.float32), bounds(new), MORE // 2, lse_packed=True
        ),
    ),
    # These programs count past the last row: each adds its stride once more before it ends.
    "tokens of a loss, and those beyond": (
        "tokens, padded to whole tiles,",
        lambda new: router.fused_moe_aux_loss_fwd(
            new(MOST - 1, 16), new(16, dtype=torch.int32), 1, 1, 0.1
        ),
    ),
    "rows of experts, and those beyond": (
        "rows, padded to whole tiles,",
        lambda new: moe.moe_permute_mask_fwd(
            new(2, 1), new(2, 2, dtype=torch.bool), new(2, 2), num_out_tokens=MOST - 1
        ),
    ),
}


def bounds(new: New, sequences: int = 1) -> Tensor:
    return new(sequences + 1, dtype=torch.int32)


def turned(new: New, heads: int = 1, positions: int = 1, ranks: int = 1) -> None:
    freqs = new(positions, 1, 1, 2, dtype=torch.float32)
    rope.fused_rope_forward(
        new(1, heads, 2), freqs, qkv_format="thd", cu_seqlens=bounds(new), cp_size=ranks
    )


def cached(new: New, pages: int = 1, places: int = 1, listed: int = 1) -> None:
    tokens, cache = new(1, 1, 1), new(2, pages, places, 1, 1)
    table = new(1, listed, dtype=torch.int32)
    attention_layout.copy_to_kv_cache(
        tokens, tokens, cache[0], cache[1], bounds(new), bounds(new), page_table=table
    )


def shared(new: New, tokens: int = 2, columns: int = 2) -> None:
    lse, step = new(2, 1, 1, columns, dtype=torch.float32)
    context_parallel.thd_out_correction(
        new(tokens, 1, 1), new(tokens // 2, 1, 1), lse, step, bounds(new), only_second_half=True
    )


@pytest.mark.parametrize("name", COUNTED)
def test_more_than_a_kernel_counts_is_declined(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    what, call = COUNTED[name]
    monkeypatch.setattr(_arguments, "MOST", MOST)
    declined(call, rf"\d+ {what}.* exceed the kernel's limit", device, monkeypatch)
