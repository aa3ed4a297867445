"""Loads of memory-bound kernels, with an L2 eviction hint.

The hint makes L2 evict lines that were read after lines that were written. Data that is read once
never hits, and as many bytes are read; yet on an H200 the hint takes 1 to 5% off such a kernel:
``docs/measured/flagos.md`` has the figures, and what other hints cost. Data that programs share,
as the parameters of a norm, is loaded with the hint too, or it would be evicted before the data
that is read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["fetch"]


@triton.jit  # type: ignore[untyped-decorator]
def fetch(pointer: tl.tensor, mask: tl.tensor = None, other: tl.constexpr = 0) -> tl.tensor:
    """``tl.load`` with that hint.

    The hint is dropped where the compiler pipelines the load through shared memory, and on devices
    that have no such hint.
    """
    if mask is None:
        return tl.load(pointer, eviction_policy="evict_last")
    else:
        return tl.load(pointer, mask=mask, other=other, eviction_policy="evict_last")
