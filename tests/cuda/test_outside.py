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
from transformer_engine_fl.testing.arguments import tensors, transformed

MISSING = cuda_emulation.missing()
PIECE = 16
"""Bytes of the largest piece that is copied at once."""
WIDE_ODD = 5003
"""Columns of rows among the samples."""
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


def _wider(value: Tensor, columns: int) -> Tensor:
    """Of wide odd rows, the values again and again."""
    if value.shape[-1:] != (WIDE_ODD,):
        return value
    return torch.cat([value] * -(-columns // WIDE_ODD), -1)[..., :columns]


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("columns", [None, 8193, 50_257])
@pytest.mark.parametrize(("family", "op"), [pytest.param(*it, id=it[1]) for it in _operators()])
def test_copies_stay_within_tensors(family: ModuleType, op: str, columns: int | None) -> None:
    outside: list[tuple[int, int]] = []

    def with_nothing_around(value: Tensor) -> Tensor:
        size, count = value.element_size(), extent(value)
        around = torch.zeros(count + 2 * PIECE // size, dtype=value.dtype)
        flat = around[PIECE // size :][:count]
        flat.copy_(value.as_strided((count,), (1,)))
        start = flat.data_ptr()
        outside.extend(((start - PIECE, PIECE), (start + count * size, PIECE)))
        return flat.as_strided(value.shape, value.stride(), flat.storage_offset())

    samples = [(it.args, it.kwargs) for it in CATALOGUE[op].samples(DTYPE, "cpu")]
    if columns is not None:
        wide = [it for it in samples if any(t.shape[-1:] == (WIDE_ODD,) for t in tensors(it))]
        samples = transformed(wide, lambda value: _wider(value, columns))
        if not samples:
            pytest.skip(f"no sample of {WIDE_ODD} columns")
    with cuda_emulation.running():
        for sample in samples:
            outside.clear()
            args, options = transformed(sample, with_nothing_around)
            with cuda_emulation.forbidden(outside):
                getattr(family, op)(*args, **options)
