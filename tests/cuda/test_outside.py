"""No kernel reads outside a tensor, not even values that it discards: a memcheck without a GPU.

Single numbers that plain C++ reads are not seen here; copies and vectorised reads are.
"""

from __future__ import annotations

import contextlib
import itertools
import pkgutil
from collections.abc import Iterable, Iterator
from functools import partial

import cuda_emulation
import pytest
import torch
from operator_names import EPILOGUES_OF_EACH_KIND
from torch import Tensor

from transformer_engine_fl.backends._arguments import extent
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.ops import CATALOGUE
from transformer_engine_fl.ops.epilogue import EPILOGUES
from transformer_engine_fl.testing.arguments import tensors, transformed

MISSING = cuda_emulation.missing()
PIECE = 16
"""Bytes of the widest access."""
WIDE_ODD = 5003
"""Columns of the wide, odd rows among the samples."""
BY_ROWS = ("loss", "normalization", "softmax")
"""Families that copy rows to shared memory in pieces; wider rows have other kernels."""


def _operators() -> Iterator[str]:
    if MISSING is None:
        for op in cuda_emulation.registry_for_any_device().list_operators():
            if op not in EPILOGUES or op in EPILOGUES_OF_EACH_KIND:
                yield op


def _samples(op: str) -> list[tuple[object, object]]:
    dtypes = CATALOGUE[op].dtypes
    dtype = "bfloat16" if "bfloat16" in dtypes else min(dtypes)
    return [(it.args, it.kwargs) for it in CATALOGUE[op].samples(dtype, "cpu")]


def _call(op: str, samples: list[tuple[object, object]], skips: Iterable[int] = (0,)) -> None:
    """Make these calls with tensors around which nothing may be read.

    Tensors begin ``skip`` elements after a multiple of PIECE bytes, so their ends vary, too.
    """
    (impl,) = cuda_emulation.registry_for_any_device().get_implementations(op)
    assert isinstance(impl.fn, str)
    call = pkgutil.resolve_name(impl.fn)
    outside: list[tuple[int, int]] = []

    def with_nothing_around(skip: int, value: Tensor) -> Tensor:
        count = extent(value)
        size = count * value.element_size()
        before = PIECE + skip * value.element_size()
        around = torch.zeros(before + size + PIECE, dtype=torch.uint8)
        flat = around[before : before + size].view(value.dtype)
        flat.copy_(value.as_strided((count,), (1,)))
        # Bytes before it in the same piece belong to its storage and may be read.
        outside.extend(((around.data_ptr(), PIECE), (flat.data_ptr() + size, PIECE)))
        return flat.as_strided(value.shape, value.stride(), flat.storage_offset())

    served = 0
    with cuda_emulation.running():
        for sample, skip in itertools.product(samples, skips):
            outside.clear()
            args, options = transformed(sample, partial(with_nothing_around, skip))
            with cuda_emulation.forbidden(outside), contextlib.suppress(NotSupportedError):
                call(*args, **options)
                served += 1
    assert served


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("op", list(_operators()))
def test_reads_stay_within_tensors(op: str) -> None:
    _call(op, _samples(op), range(8) if CATALOGUE[op].family in BY_ROWS else (0,))


def _has_wide_rows(op: str) -> bool:
    square = "upper_triang" in op
    made_of_rows = op.startswith("fused_linear") or op == "cross_entropy_merge"
    return CATALOGUE[op].family in BY_ROWS and not (square or made_of_rows)


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("columns", [8193, 50_257])
@pytest.mark.parametrize("op", [op for op in _operators() if _has_wide_rows(op)])
def test_reads_stay_within_wider_rows(op: str, columns: int) -> None:
    def is_wide(value: Tensor) -> bool:
        return value.shape[-1:] == (WIDE_ODD,)

    def wider(value: Tensor) -> Tensor:
        times = -(-columns // WIDE_ODD)
        return torch.cat([value] * times, -1)[..., :columns] if is_wide(value) else value

    rows = [it for it in _samples(op) if any(map(is_wide, tensors(it)))]
    _call(op, transformed(rows, wider), (0, 1, 2, 3))
