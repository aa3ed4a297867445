"""Kernels that are started directly, beside Triton's ordinary launches of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from transformer_engine_fl.backends.flagos import _launch


def check(run: Callable[[], tuple[Tensor, ...]]) -> None:
    """Both give the same bytes."""
    run()
    direct = run()
    with _launch.ordinary_launches():
        ordinary = run()
    assert all(map(torch.equal, direct, ordinary))
