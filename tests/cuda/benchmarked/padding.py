"""The kernels of padding that the benchmarks launch."""

from __future__ import annotations

from collections.abc import Iterator

from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda._launch import Limits
from transformer_engine_fl.backends.vendor.cuda.padding import row_key, source


def sources(device: Limits) -> Iterator[Specialisation]:
    """The kernels for bfloat16 rows, the same on every device."""
    for columns in (1024, 4096, 7168):
        yield source(row_key(2 * columns, 16, 64))[0]
