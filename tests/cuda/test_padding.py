"""Padding of blocks in CUDA C++: rows of every width, and every number of blocks."""

from __future__ import annotations

import pytest
import torch
from against_contract import checking
from torch import Tensor

from transformer_engine_fl.backends.vendor.cuda import padding

_check = checking(padding)


def check(op: str, input: Tensor, rows: list[int], padded: list[int]) -> Tensor:
    found: Tensor = _check(op, input, row_list=rows, padded_row_list=padded)
    return found


# Rows of one vector for each thread and of several, also at addresses no multiple of 16.
@pytest.mark.parametrize("apart", [0, 3, 16])
@pytest.mark.parametrize("columns", [1, 24, 1000, 8192, 9001])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_rows_of_every_width(dtype: torch.dtype, columns: int, apart: int, device: str) -> None:
    generator = torch.Generator().manual_seed(columns)
    wide = torch.randint(0, 200, (21, columns + apart), generator=generator)
    x = wide.to(device, dtype)[:, :columns]
    rows, padded = [5, 0, 15, 1], [8, 2, 16, 1]
    there = check("fused_multi_row_padding", x, rows, padded)
    assert torch.equal(check("fused_multi_row_unpadding", there, rows, padded), x)


# As many as one launch has room for, one more, and enough for several launches.
@pytest.mark.parametrize("blocks", [1, 2, 3, 64, *padding.COUNTS, padding.COUNTS[-1] + 1, 1100])
def test_any_number_of_blocks(blocks: int, device: str) -> None:
    chosen = torch.Generator().manual_seed(blocks)
    rows = torch.randint(0, 4, (blocks,), generator=chosen).tolist()
    padded = [-(-it // 4) * 4 for it in rows]
    x = torch.randn(sum(rows), 8, generator=chosen).to(device)
    there = check("fused_multi_row_padding", x, rows, padded)
    assert torch.equal(check("fused_multi_row_unpadding", there, rows, padded), x)


def test_what_padding_holds_is_not_copied(device: str) -> None:
    padded = torch.full((8, 40), torch.nan, device=device)
    padded[:3] = 1.0
    padded[4:6] = 2.0
    found = check("fused_multi_row_unpadding", padded, [3, 2], [4, 4])
    assert not found.isnan().any()


def test_blocks_of_nothing_but_padding(device: str) -> None:
    check("fused_multi_row_padding", torch.empty(0, 24, device=device), [0, 0, 0], [2, 0, 3])


@pytest.mark.gpu
def test_it_can_be_captured_and_replayed() -> None:
    x = torch.randn(24, 64, device="cuda")
    lists = {"row_list": [5, 1, 15, 3], "padded_row_list": [8, 8, 16, 8]}
    padding._kernels.clear()  # so the capture includes loading
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = padding.fused_multi_row_padding(x, **lists)
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert torch.equal(output, padding.fused_multi_row_padding(x, **lists))
