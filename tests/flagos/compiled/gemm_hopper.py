"""Matrix products on Hopper, also grouped: each kind of operand, scale and epilogue."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine_fl.backends.flagos import gemm as flagos

MODULES = ("_products_hopper",)
TARGETS = ("sm_90",)


def launch() -> None:
    matrix = torch.empty(4096, 4096, dtype=torch.bfloat16)
    bias, total = torch.empty(4096), torch.empty(4096, 4096)
    splits = [1000, 24, 3000, 72]
    wgrad = {"transa": False, "transb": True}
    for options in (
        {"bias": bias, "gelu": True},
        {"transa": False},
        {"accumulate_into": total, **wgrad},
        {"accumulate_into": total, "bias": bias},
        {"accumulate_into": total.bfloat16()},
    ):
        flagos.generic_gemm(matrix, matrix, **options)  # type: ignore[arg-type]
    flagos.te_general_grouped_gemm([matrix] * 4, [matrix], splits, bias=[bias] * 4, gelu=True)
    totals = [torch.empty_like(total) for _ in splits]
    flagos.te_general_grouped_gemm([matrix], [matrix], splits, accumulate_into=totals, **wgrad)
    narrow = matrix.to(torch.float8_e4m3fn)
    one, squares, rows = torch.empty(1), torch.empty(32, 32), torch.empty(4096, 32)
    for a_scale, b_scale in ((one, one), (squares, rows), (squares, squares)):
        flagos.generic_gemm(narrow, narrow, A_scale_inv=a_scale, B_scale_inv=b_scale)
        flagos.te_general_grouped_gemm(
            [narrow] * 4, [narrow], splits, A_scale_inv=[a_scale] * 4, B_scale_inv=[b_scale]
        )


def check(cases: list[dict[str, Any]]) -> None:
    """Whole warpgroups multiply; a float32 accumulation is stored through shared memory."""
    products = [case for case in cases if case["kernel"].endswith("product")]
    assert {case["kernel"] for case in products} == {"product", "grouped_product"}
    for case in products:
        assert case["products"] > 0, case
    # One case accumulates in float32 without a bias: 2 warpgroups store 4 quarters of a tile each.
    assert sorted(case["bulk stores"] for case in products if case["bulk stores"]) == [2 * 4]
