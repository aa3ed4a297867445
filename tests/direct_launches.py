"""Compares direct launches of kernels with Triton's ordinary launches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from transformer_engine_fl.backends.flagos import _launch


def check(run: Callable[[], tuple[Tensor, ...]]) -> None:
    """Assert that a repeated, direct launch and an ordinary one return equal tensors."""
    run()
    direct = run()
    with _launch.ordinary_launches():
        ordinary = run()
    assert all(map(torch.equal, direct, ordinary))
