"""Padding of blocks of rows: gradients, and what blocks become."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import functional, ops
from transformer_engine_fl.core.errors import ArgumentError

LISTS = {"row_list": [3, 0, 1, 4], "padded_row_list": [4, 4, 1, 8]}
ROWS, PADDED = 8, 17


def values(rows: int) -> Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def test_both_pass_gradcheck() -> None:
    pad, unpad = functional.multi_row_padding, functional.multi_row_unpadding
    assert torch.autograd.gradcheck(lambda x: pad(x, **LISTS), (values(ROWS).requires_grad_(),))
    assert torch.autograd.gradcheck(lambda x: unpad(x, **LISTS), (values(PADDED).requires_grad_(),))


def test_each_block_is_padded_with_zeros() -> None:
    x = values(ROWS)
    blocks = zip(x.split(LISTS["row_list"]), LISTS["padded_row_list"], strict=True)
    expected = [F.pad(block, (0, 0, 0, padded - len(block))) for block, padded in blocks]
    assert torch.equal(functional.multi_row_padding(x, **LISTS), torch.cat(expected))


def test_there_and_back_is_the_identity_whatever_the_padding_holds() -> None:
    x = values(ROWS)
    padded = functional.multi_row_padding(x, **LISTS)
    padded[padded == 0] = torch.nan
    assert torch.equal(functional.multi_row_unpadding(padded, **LISTS), x)


def test_no_output_is_the_input_even_where_nothing_is_padded() -> None:
    x = values(ROWS)
    for op in (ops.fused_multi_row_padding, ops.fused_multi_row_unpadding):
        output = op(x, row_list=[ROWS], padded_row_list=[ROWS])
        assert output.data_ptr() != x.data_ptr()
        assert torch.equal(output, x)


def test_the_bytes_of_a_quantised_tensor_may_be_padded() -> None:
    x = values(ROWS).to(torch.float8_e4m3fn)
    padded = functional.multi_row_padding(x, **LISTS)
    assert padded.dtype == x.dtype
    assert torch.equal(padded.double(), functional.multi_row_padding(x.double(), **LISTS))


def test_padding_compiles_with_its_gradient() -> None:
    torch._dynamo.reset()

    def program(x: Tensor) -> Tensor:
        padded = functional.multi_row_padding(x, **LISTS).square()
        return (functional.multi_row_unpadding(padded, **LISTS) * x).sum()

    x = values(ROWS).requires_grad_()
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    gradients = [torch.autograd.grad(run(x), x) for run in (program, compiled)]
    torch.testing.assert_close(*gradients)


def test_no_values_are_read_back() -> None:
    with te.with_preference("reference"):
        padded = ops.fused_multi_row_padding(values(ROWS).to("meta"), **LISTS)
        assert padded.shape == (PADDED, 3)
        assert ops.fused_multi_row_unpadding(padded, **LISTS).shape == (ROWS, 3)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other rows than the blocks have": ({"row_list": [3, 0, 1, 3]}, "input"),
    "fewer padded blocks": ({"padded_row_list": [4, 4, 9]}, "padded_row_list"),
    "a block that shrinks": ({"padded_row_list": [4, 4, 1, 3]}, "padded_row_list"),
    "rows below 0": ({"row_list": [3, -1, 2, 4]}, "row_list"),
    "rows that are no integers": ({"row_list": [3, 0, 1.0, 4]}, "row_list"),
    "no list": ({"row_list": 8}, "row_list"),
    "a text": ({"padded_row_list": "4418"}, "padded_row_list"),
    "more rows than int64 counts": ({"padded_row_list": [4, 4, 1, 2**63]}, "padded_row_list"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_call_that_breaks_the_contract_names_the_argument(what: str) -> None:
    change, argument = REFUSED[what]
    with pytest.raises(ArgumentError) as raised:
        ops.fused_multi_row_padding(values(ROWS), **{**LISTS, **change})
    assert raised.value.argument == argument


def test_unpadding_wants_the_padded_rows() -> None:
    with pytest.raises(ArgumentError, match="17 rows, the sum of 'padded_row_list'"):
        ops.fused_multi_row_unpadding(values(ROWS), **LISTS)
