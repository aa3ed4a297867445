"""Whether torch multiplies matrices of float32 as TF32, which the contracts do not allow.

The setting is process-wide, and while it is changed torch refuses to read it through its other API.
So calls that must be exact are declined, or computed otherwise, and it is never changed here.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["AS_TF32", "uses_tf32"]

AS_TF32 = "torch multiplies float32 in TF32 (torch.backends.cuda.matmul)"
"""The reason that a set gives when it declines."""

_float32_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)  # from 2.9 on


def uses_tf32() -> bool:
    """Whether products on CUDA devices use TF32, by the current setting."""
    if _float32_precision is None:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    return bool(_float32_precision("cuda", "matmul") == "tf32")
