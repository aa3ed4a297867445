"""Whether torch multiplies matrices of float32 as TF32, which the contracts do not allow.

The switch is the process's, and torch refuses it to those who ask by its other name while it is
turned: so what must be exact is declined, or multiplied otherwise, and nobody turns it here.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["AS_TF32", "uses_tf32"]

AS_TF32 = "torch multiplies float32 as TF32 (torch.backends.cuda.matmul)"
"""What a set says that declines for it."""

_float32_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)  # from 2.9 on


def uses_tf32() -> bool:
    """Of products on CUDA devices, as it is set now."""
    if _float32_precision is None:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    return bool(_float32_precision("cuda", "matmul") == "tf32")
