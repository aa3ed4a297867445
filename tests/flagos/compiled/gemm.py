"""Matrix products: each kind of operand, tile and epilogue."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from transformer_engine_fl.backends.flagos import gemm as flagos
from transformer_engine_fl.core.errors import NotSupportedError

MODULES = ("_products",)


def launch() -> None:
    # Hopper's kernels are in gemm_hopper; these also serve Hopper with a Triton without Gluon.
    flagos._is_for_hopper = lambda *_: False

    def product(dtype: torch.dtype, m: int, n: int, k: int, **options: Any) -> None:
        a = torch.empty((n, k) if options.get("transa", True) else (k, n), dtype=dtype)
        b = torch.empty((k, m) if options.get("transb", False) else (m, k), dtype=dtype)
        flagos.generic_gemm(a, b, **options)

    wgrad = {"transa": False, "transb": True}
    grad = {"grad": True, "bias_grad": True}
    bfloat16, float8 = torch.bfloat16, torch.float8_e4m3fn
    bias, total = torch.empty(4096, dtype=bfloat16), torch.empty(4096, 4096)
    saved = torch.empty(4096, 4096, dtype=bfloat16)
    product(bfloat16, 4096, 4096, 4096, bias=bias, gelu=True)
    product(bfloat16, 4096, 4096, 4096, transa=False)
    product(bfloat16, 4096, 4096, 4096, transa=False, gelu=True, gelu_input=saved, **grad)
    product(bfloat16, 4096, 4096, 4096, accumulate_into=total, **wgrad)
    for rows in (1024, 256, 16):
        product(bfloat16, rows, 2048, 4096)
    product(bfloat16, 4095, 4095, 4095, **wgrad)
    for rows in (4096, 16):
        product(torch.float32, rows, 4096, 1024)
    one, matrix = torch.empty(1), torch.empty(4096, 4096).to(float8)
    rows_scale, blocks_scale = torch.empty(4096, 32), torch.empty(32, 32)
    exponents = torch.empty(4096, 128, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    for a_scale, b_scale, options in (
        (one, one, {}),
        (blocks_scale, rows_scale, {}),
        (exponents, exponents, {}),
        (blocks_scale, rows_scale, {**wgrad, **grad}),
    ):
        scales = {"A_scale_inv": a_scale, "B_scale_inv": b_scale}
        with contextlib.suppress(NotSupportedError):  # old devices lack float8
            flagos.generic_gemm(matrix, matrix, **scales, **options)  # type: ignore[arg-type]
    weights = [torch.empty(4096, 4096, dtype=bfloat16) for _ in range(4)]
    flagos.te_general_grouped_gemm(weights, [saved], [1024] * 4, bias=[bias] * 4, gelu=True)
    totals = [torch.empty_like(total) for _ in range(4)]
    flagos.te_general_grouped_gemm(
        [saved], [saved], [1000, 24, 3000, 72], accumulate_into=totals, **wgrad
    )
