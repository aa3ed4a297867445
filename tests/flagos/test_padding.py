"""Triton's padding of blocks: rows of every width, and every number of blocks."""

from __future__ import annotations

import pytest
import torch
from against_contract import checking
from torch import Tensor

from transformer_engine_fl.backends.flagos import padding as flagos

_check = checking(flagos)


def check(op: str, input: Tensor, rows: list[int], padded: list[int]) -> Tensor:
    found: Tensor = _check(op, input, row_list=rows, padded_row_list=padded)
    return found


# Rows that fit into a tile, rows cut into pieces, and rows at addresses no multiple of 16 bytes.
@pytest.mark.parametrize("apart", [0, 3, 16])
@pytest.mark.parametrize("columns", [1, 24, 1000, 8192, 9001])
def test_rows_of_every_width(columns: int, apart: int, device: str) -> None:
    x = torch.randn(21, columns + apart).to(device, torch.bfloat16)[:, :columns]
    rows, padded = [5, 0, 15, 1], [8, 2, 16, 1]
    assert torch.equal(check("fused_multi_row_unpadding", check(
        "fused_multi_row_padding", x, rows, padded
    ), rows, padded), x)  # fmt: skip


@pytest.mark.parametrize("blocks", [1, 2, 3, 64, 300])
def test_any_number_of_blocks(blocks: int, device: str) -> None:
    chosen = torch.Generator().manual_seed(blocks)
    rows = torch.randint(0, 4, (blocks,), generator=chosen).tolist()
    padded = [-(-it // 4) * 4 for it in rows]
    x = torch.randn(sum(rows), 8, generator=chosen).to(device)
    assert torch.equal(check("fused_multi_row_unpadding", check(
        "fused_multi_row_padding", x, rows, padded
    ), rows, padded), x)  # fmt: skip


def test_what_padding_holds_is_not_copied(device: str) -> None:
    padded = torch.full((8, 40), torch.nan, device=device)
    padded[:3] = 1.0
    padded[4:6] = 2.0
    found = check("fused_multi_row_unpadding", padded, [3, 2], [4, 4])
    assert not found.isnan().any()


def test_blocks_of_nothing_but_padding(device: str) -> None:
    check("fused_multi_row_padding", torch.empty(0, 24, device=device), [0, 0, 0], [2, 0, 3])
