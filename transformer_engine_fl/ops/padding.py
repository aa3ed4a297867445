"""Rows of zeros between blocks of rows, such as the rows of each expert.

A matrix product in a narrow dtype needs a number of rows that is a multiple of 8, 16 or 32.
The numbers of rows of the blocks are known on the host and passed as lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.core.contract import Backward, Sample, Tolerance, contract
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.ops import _checks as check
from transformer_engine_fl.ops._dtypes import COPIED
from transformer_engine_fl.ops._samples import layouts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["fused_multi_row_padding", "fused_multi_row_unpadding"]

TOLERANCE = {dtype: Tolerance(rtol=0.0, atol=0.0) for dtype in COPIED}


# ------------------------------------------------------------------------------ checks


def _check_row_list(op: str, name: str, value: Any) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ArgumentError(op, name, check.describe(value), "a list of row counts")
    # Lists are long, and a call for each entry takes longer than a small kernel.
    if not all(type(rows) is int and 0 <= rows < 2**63 for rows in value):
        for rows in value:
            check.is_integer(op, name, rows)
    return list(value)


def _check_padding(op: str, input: Any, row_list: Any, padded_row_list: Any, padded: bool) -> None:
    rows = _check_row_list(op, "row_list", row_list)
    padded_rows = _check_row_list(op, "padded_row_list", padded_row_list)
    enough = len(rows) == len(padded_rows) and all(
        few <= many for few, many in zip(rows, padded_rows, strict=True)
    )
    if not enough:
        expected = f"an entry for each of 'row_list', at least as large: {rows}"
        raise ArgumentError(op, "padded_row_list", check.describe(padded_row_list), expected)
    tensor = check.is_tensor(op, "input", input, dtypes=COPIED)
    check.has_axes(op, "input", tensor, "[rows, C]")
    total, name = sum(padded_rows if padded else rows), "padded_row_list" if padded else "row_list"
    if tensor.shape[0] != total:
        raise ArgumentError(
            op, "input", check.describe(input), f"{total} rows, the sum of {name!r}"
        )


def _check_pad(op: str, input: Any, row_list: Any, padded_row_list: Any) -> None:
    _check_padding(op, input, row_list, padded_row_list, padded=False)


def _check_unpad(op: str, input: Any, row_list: Any, padded_row_list: Any) -> None:
    _check_padding(op, input, row_list, padded_row_list, padded=True)


# ------------------------------------------------------------------------------ oracles


def _padding_oracle(
    input: Tensor, *, row_list: Sequence[int], padded_row_list: Sequence[int]
) -> Tensor:
    output = input.new_zeros((sum(padded_row_list), input.shape[1])).double()
    start = place = 0
    for rows, padded in zip(row_list, padded_row_list, strict=True):
        output[place : place + rows] = input[start : start + rows].double()
        start, place = start + rows, place + padded
    return output


def _unpadding_oracle(
    input: Tensor, *, row_list: Sequence[int], padded_row_list: Sequence[int]
) -> Tensor:
    kept: list[int] = []
    start = 0
    for rows, padded in zip(row_list, padded_row_list, strict=True):
        kept += range(start, start + rows)
        start += padded
    return input.double()[kept]


# ------------------------------------------------------------------------------ samples

_SHAPES = {
    "typical": (16, 32),
    "odd sizes": (13, 37),
    "many rows": (301, 5),
    "wide rows": (3, 2051),
    "one row": (1, 8),
    "no rows": (0, 8),
    "no columns": (4, 0),
}

_ROW_LISTS: dict[str, tuple[list[int], list[int]]] = {
    "typical": ([5, 1, 7, 3], [16, 16, 16, 16]),
    "a multiple of four": ([5, 1, 7, 3], [8, 4, 8, 4]),
    "an expert without rows": ([0, 9, 0, 7], [0, 16, 16, 8]),
    "no padding": ([9, 7], [9, 7]),
    "one block": ([16], [32]),
    "many blocks": ([2, 0] * 8, [3, 1] * 8),
}


def _row_lists(rows: int, label: str) -> dict[str, tuple[list[int], list[int]]]:
    if label == "typical":
        return _ROW_LISTS
    return {label: ([rows // 3, rows - rows // 3], [rows // 3 + 2, rows])}


def _pad_samples(dtype: str, device: str) -> Iterator[Sample]:
    for label, input in layouts(_SHAPES, 12, 24, dtype, device):
        for name, (rows, padded) in _row_lists(input.shape[0], label).items():
            yield Sample(name, (input,), {"row_list": rows, "padded_row_list": padded})
        if label == "no rows":
            yield Sample("no blocks", (input,), {"row_list": [], "padded_row_list": []})


def _unpad_samples(dtype: str, device: str) -> Iterator[Sample]:
    for label, input in layouts(_SHAPES, 12, 24, dtype, device):
        if label == "typical":
            for name, (rows, padded) in _ROW_LISTS.items():
                tall = input.repeat(4, 1)[: sum(padded)]
                yield Sample(name, (tall,), {"row_list": rows, "padded_row_list": padded})
            continue
        half = input.shape[0] // 2
        options = {
            "row_list": [half // 2, half],
            "padded_row_list": [half, input.shape[0] - half],
        }
        yield Sample(label, (input,), options)
        if label == "no rows":
            yield Sample("no blocks", (input,), {"row_list": [], "padded_row_list": []})


# ---------------------------------------------------------------------------- contracts


@contract(
    family="padding",
    check=_check_pad,
    samples=_pad_samples,
    tolerance=TOLERANCE,
    oracle=_padding_oracle,
    backward=Backward(
        "fused_multi_row_unpadding",
        saves={},
        gradients=("input",),
        options=("row_list", "padded_row_list"),
    ),
)
def fused_multi_row_padding(
    input: Tensor, *, row_list: Sequence[int], padded_row_list: Sequence[int]
) -> Tensor:
    """Adds rows of zeros after each block of rows.

    Block i of the input has ``row_list[i]`` rows, and blocks follow one another. Block i of the
    output has ``padded_row_list[i]`` rows: those of the input, then rows of zeros. This gives each
    expert the number of rows that a matrix product in its dtype needs. The gradient is
    :func:`fused_multi_row_unpadding`, and the other way round.

    Args:
        input: ``[sum of row_list, C]``, of any dtype of the contract: values are copied bit
            by bit.
        row_list: the rows of each block.
        padded_row_list: the rows of each padded block, at least as many.

    Returns:
        output: ``[sum of padded_row_list, C]``, dtype of ``input``, contiguous.

    Raises:
        ArgumentError: a shape or dtype, or the number of rows, does not agree.
    """
    return input.new_empty((sum(padded_row_list), input.shape[1]))


@contract(
    family="padding",
    check=_check_unpad,
    samples=_unpad_samples,
    tolerance=TOLERANCE,
    oracle=_unpadding_oracle,
    backward=Backward(
        "fused_multi_row_padding",
        saves={},
        gradients=("input",),
        options=("row_list", "padded_row_list"),
    ),
)
def fused_multi_row_unpadding(
    input: Tensor, *, row_list: Sequence[int], padded_row_list: Sequence[int]
) -> Tensor:
    """Takes away the rows that :func:`fused_multi_row_padding` added, whatever they hold.

    Args:
        input: ``[sum of padded_row_list, C]``, of any dtype of the contract: values are
            copied bit by bit.
        row_list: the rows of each block without padding.
        padded_row_list: the rows of each padded block, at least as many.

    Returns:
        output: ``[sum of row_list, C]``, dtype of ``input``, contiguous.

    Raises:
        ArgumentError: a shape or dtype, or the number of rows, does not agree.
    """
    return input.new_empty((sum(row_list), input.shape[1]))
