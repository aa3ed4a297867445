"""The parts of ``liger_kernel.ops.utils`` that need Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["element_mul_kernel", "torch_to_triton_dtype"]

torch_to_triton_dtype = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit  # type: ignore[untyped-decorator]
def element_mul_kernel(
    X_ptr: tl.tensor,
    X_stride: tl.int64,
    grad_output_ptr: tl.tensor,
    n_cols: tl.int32,
    BLOCK_SIZE: tl.constexpr,
    X_col_stride: tl.constexpr = 1,
) -> None:
    """Multiply a row, in place, by the scalar at ``grad_output_ptr``."""
    factor = tl.load(grad_output_ptr)
    row = X_ptr + tl.program_id(0).to(tl.int64) * X_stride
    for start in range(0, n_cols, BLOCK_SIZE):
        column = start + tl.arange(0, BLOCK_SIZE)
        inside = column < n_cols
        element = row + column.to(tl.int64) * X_col_stride
        tl.store(element, tl.load(element, mask=inside) * factor, mask=inside)
