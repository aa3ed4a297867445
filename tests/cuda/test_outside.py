"""Nothing outside of a tensor is read, not even to be let go: what memcheck sees on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import cuda_emulation
import pytest
import torch
from torch import Tensor

from transformer_engine_fl.backends._arguments import extent
from transformer_engine_fl.backends.vendor.cuda import loss, normalization, softmax
from transformer_engine_fl.ops import CATALOGUE
from transformer_engine_fl.testing.arguments import transformed

MISSING = cuda_emulation.missing()
PIECE = 16
"""Bytes of the largest piece that is copied at once."""
DTYPE = "bfloat16"
"""Its rows may begin at any two bytes."""
FAMILIES = {"softmax": softmax, "normalization": normalization, "loss": loss}
"""Those whose rows come to shared memory in such pieces."""


def _operators() -> Iterator[tuple[ModuleType, str]]:
    if MISSING is None:
        here = cuda_emulation.registry_for_any_device()
        for op in here.list_operators():
            family = FAMILIES.get(CATALOGUE[op].family)
            if family and DTYPE in CATALOGUE[op].dtypes:
                yield family, op


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(("family", "op"), [pytest.param(*it, id=it[1]) for it in _operators()])
def test_copies_stay_within_tensors(family: ModuleType, op: str) -> None:
    outside: list[tuple[int, int]] = []

    def with_nothing_around(value: Tensor) -> Tensor:
        size, count = value.element_size(), extent(value)
        around = torch.zeros(count + 2 * PIECE // size, dtype=value.dtype)
        flat = around[PIECE // size :][:count]
        flat.copy_(value.as_strided((count,), (1,)))
        start = flat.data_ptr()
        outside.extend(((start - PIECE, PIECE), (start + count * size, PIECE)))
        return flat.as_strided(value.shape, value.stride(), flat.storage_offset())

    with cuda_emulation.running():
        for sample in CATALOGUE[op].samples(DTYPE, "cpu"):
            outside.clear()
            args, options = transformed((sample.args, sample.kwargs), with_nothing_around)
            with cuda_emulation.forbidden(outside):
                getattr(family, op)(*args, **options)
