"""The kernels of activations that the benchmarks launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda._launch import Limits
from transformer_engine_fl.backends.vendor.cuda._sums import sum_source
from transformer_engine_fl.backends.vendor.cuda.activation import Key, bias_source, source


def sources(device: Limits) -> Iterator[Specialisation]:
    """The kernels for bfloat16 tensors."""
    low = torch.bfloat16
    for kind, gated in (("Gelu", False), ("Silu", True), ("Gelu", True)):
        for backward in (False, True):
            yield source(Key(kind, gated, backward, low, low, not gated, 8, 8))[0]
    for columns in (1024, 4096, 14336):
        yield bias_source(Key("Gelu", False, True, low, low, False, 8, 8), columns)[0]
        yield sum_source(columns, torch.float32, low, device)[0]
