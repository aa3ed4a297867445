"""The kernels of dropout that the benchmarks launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda._launch import Limits
from transformer_engine_fl.backends.vendor.cuda.dropout import source


def sources(device: Limits) -> Iterator[Specialisation]:
    """The kernels for bfloat16 tensors, the same on every device."""
    for kernel in ("forward", "backward"):
        yield source(torch.bfloat16, 8, kernel)[0]
