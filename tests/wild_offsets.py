"""Rotary embedding with offsets and positions out of bounds, for every set of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["assert_nothing_outside_is_read"]


def assert_nothing_outside_is_read(forward: Callable[..., Tensor], seed: int, device: str) -> None:
    """Call a set's ``fused_rope_forward`` with wrong offsets, in an order that ``seed`` gives.

    The angles are all 0, so every output element must be unchanged or NaN.
    """
    wild = torch.tensor([-(2**31), -5, 3, 2**31 - 1, 0, 7, 2**30], dtype=torch.int32)
    order = torch.randperm(len(wild), generator=torch.Generator().manual_seed(seed))
    bounds, starts = wild[order].to(device), wild[order.flip(0)][1:].to(device)
    x = torch.ones(9, 2, 8, device=device)
    # Memory around the angles holds 1e3: a read outside of them would change the output.
    freqs = torch.full((2 * 1024 + 9 * 8,), 1e3, device=device)[1024:-1024]
    freqs = freqs.zero_().view(9, 1, 1, 8)
    thd: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens": bounds}
    bshd: dict[str, Any] = {"qkv_format": "bshd", "start_positions": starts}
    for turned in (
        forward(x, freqs, **thd),
        forward(x, freqs, **thd, cp_size=3, cp_rank=2),
        forward(x, freqs, **thd, start_positions=starts),
        forward(x.expand(6, 9, 2, 8), freqs, **bshd),
    ):
        assert ((turned == 1) | turned.isnan()).all()
