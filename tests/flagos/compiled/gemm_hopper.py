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
    # Fewer rows, which take other tiles.
    flagos.generic_gemm(matrix, matrix[:768], bias=bias, gelu=True)
    flagos.generic_gemm(matrix, matrix[:512])
    flagos.generic_gemm(matrix, matrix[:512], accumulate_into=total[:512])
    flagos.te_general_grouped_gemm([matrix] * 4, [matrix], splits, bias=[bias] * 4, gelu=True)
    totals = [torch.empty_like(total) for _ in splits]
    flagos.te_general_grouped_gemm([matrix], [matrix], splits, accumulate_into=totals, **wgrad)
    narrow = matrix.to(torch.float8_e4m3fn)
    one, squares = torch.empty(1), torch.empty(32, 32)
    for a_scale, height in ((one, 0), (squares, 1), (squares, 128)):
        for rows in (256, 512, 768, 4096):
            b_scale = torch.empty(rows // height, 32) if height else one
            given = narrow[:rows]
            flagos.generic_gemm(narrow, given, A_scale_inv=a_scale, B_scale_inv=b_scale)
        flagos.te_general_grouped_gemm(
            [narrow] * 4, [narrow], splits, A_scale_inv=[a_scale] * 4, B_scale_inv=[b_scale]
        )


def check(cases: list[dict[str, Any]]) -> None:
    """Whole warpgroups multiply; a float32 accumulation is stored through shared memory."""
    products = [case for case in cases if case["kernel"].endswith("product")]
    assert {case["kernel"] for case in products} == {"product", "grouped_product"}
    for case in products:
        assert case["products"] > 0, case
    assert {(*case["tile"],) for case in products} == {
        (it.rows, it.columns) for tiles in flagos._TILES.values() for it in tiles if it.specialize
    }
    # Two accumulate in float32 without a bias: 2 warpgroups store 4 quarters of a tile each.
    assert [case["bulk stores"] for case in products if case["bulk stores"]] == [2 * 4] * 2
