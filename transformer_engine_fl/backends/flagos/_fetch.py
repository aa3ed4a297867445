"""How kernels that are bound by memory read.

L2 is asked to give up lines that were read after those that were written. What is read once
is not found there again, and as many bytes are read; yet on an H200 it takes 1 to 5% off such a
kernel: ``docs/measured/flagos.md`` has the figures, and what other hints cost. What programs share,
as the parameters of a norm, is read so too: it would go before what they read once does.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["fetch"]


@triton.jit  # type: ignore[untyped-decorator]
def fetch(pointer: tl.tensor, mask: tl.tensor = None, other: tl.constexpr = 0) -> tl.tensor:
    """``tl.load`` with that hint.

    Where the compiler passes it through stages in shared memory, the hint is dropped, as it is
    on devices that know none.
    """
    if mask is None:
        return tl.load(pointer, eviction_policy="evict_last")
    else:
        return tl.load(pointer, mask=mask, other=other, eviction_policy="evict_last")
