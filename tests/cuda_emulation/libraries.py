"""In place of library functions that torch has for CUDA alone: what they are said to do.

They refuse what torch refuses on CUDA, as far as that is written down.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["STAND_INS"]

_NARROW = (torch.bfloat16, torch.float16)


def _mm_wide(left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> None:
    """``aten::mm.dtype_out``: products of a narrow dtype, stored as they were summed up."""
    assert left.dtype == right.dtype
    assert left.dtype in _NARROW
    assert out_dtype == out.dtype == torch.float32
    out.copy_(left.float() @ right.float())


def _addmm_wide(
    added: Tensor,
    left: Tensor,
    right: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float,
    alpha: float,
    out: Tensor,
) -> None:
    """``aten::addmm.dtype_out``."""
    assert added.dtype in (left.dtype, out_dtype)
    assert left.dtype == right.dtype
    assert left.dtype in _NARROW
    assert out_dtype == out.dtype == torch.float32
    torch.addmm(added.float(), left.float(), right.float(), beta=beta, alpha=alpha, out=out)


STAND_INS: dict[str, dict[str, Any]] = {
    "gemm": {"_mm_wide": _mm_wide, "_addmm_wide": _addmm_wide},
}
"""By the module that calls them, and by the name it has for them."""
