"""Quantisation in CUDA C++: what the samples of the contracts do not cover.

The reference set gives the expected bits. Without a GPU the kernels run on the CPU.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_engine_fl.backends.reference import quantization as reference
from transformer_engine_fl.backends.vendor.cuda import _casting, _launch, quantization
from transformer_engine_fl.backends.vendor.cuda._casting import Source
from transformer_engine_fl.core.errors import ArgumentError, NotSupportedError
from transformer_engine_fl.ops._formats import FORMATS

BOTH_WAYS = {"columnwise": True}


def values(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 8).to(dtype)


def assert_same_bits(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert torch.equal(one.view(torch.uint8).cpu(), other.view(torch.uint8).cpu())


@pytest.mark.parametrize(
    ("op", "args", "named"),
    [
        ("quantize", (torch.ones(4, dtype=torch.int32),), "input"),
        ("quantize", (torch.ones(4), torch.ones(2)), "scale"),
        ("split_quantize", (torch.ones(4, 4), [1, 2]), "split_sections"),
        ("group_quantize", (torch.ones(4, 4), torch.ones(2)), "group_sizes"),
        ("fp8_transpose", (torch.ones(4, 4),), "data"),
    ],
)
@pytest.mark.usefixtures("no_launch")
def test_wrong_arguments_are_named(op: str, args: tuple[object, ...], named: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        getattr(quantization, op)(*args)
    assert raised.value.argument == named


@pytest.mark.parametrize("format", FORMATS)
def test_several_tiles_with_a_rest_on_each_side(format: str, device: str) -> None:
    x = values(290, 402).to(device)
    options = {"format": format, **BOTH_WAYS}
    assert_same_bits(quantization.quantize(x, **options), reference.quantize(x, **options))


@pytest.mark.parametrize("rows", [3, 257, 259, 260, 272])
@pytest.mark.parametrize("format", FORMATS)
def test_transposed_rows_begin_anywhere(format: str, rows: int, device: str) -> None:
    dtype = torch.float32 if rows == 259 else torch.bfloat16
    packed = FORMATS[format].values_per_byte
    x = values(rows * packed, 276, dtype=dtype).to(device)
    x[-1, 275] = torch.nan
    x[rows // 2, 17] = -1000.0
    options = {"format": format, **BOTH_WAYS}
    assert_same_bits(quantization.quantize(x, **options), reference.quantize(x, **options))
    x = x[:-packed].clone()
    bias_grad, *found = quantization.bgrad_quantize(x, **options)
    assert_same_bits(found, reference.quantize(x, **options))
    sums = x.double().sum(0)
    assert bool(((bias_grad.double() - sums).abs() <= 2**-8 * sums.abs() + 0.01).all())


@pytest.mark.parametrize("format", ["per_tensor", "mxfp8"])
def test_strided_rows_of_any_alignment(format: str, device: str) -> None:
    memory = values(70, 300).to(device)
    for first, columns in ((1, 256), (4, 256), (8, 287)):
        x = memory[:, first : first + columns]
        found = quantization.quantize(x, format=format)
        assert_same_bits(found, reference.quantize(x, format=format))


@pytest.mark.parametrize("format", ["per_tensor", "nvfp4"])
def test_the_amax_of_many_rows_when_the_scale_is_given(format: str, device: str) -> None:
    x = values(3000, 48).to(device)
    x[2999, 47] = 1000.0
    x[17, 3] = torch.nan
    scale = torch.tensor([0.25], device=device)
    for options in ({}, BOTH_WAYS):
        found = quantization.quantize(x, scale, format=format, **options)
        assert_same_bits(found, reference.quantize(x, scale, format=format, **options))


@pytest.mark.parametrize("scale", [0.0, 1e-45, math.nan])
def test_scales_that_leave_blocks_no_number_leave_their_values_none(
    scale: float, device: str
) -> None:
    x = values(32, 64).to(device)
    x[:16, :16] = 0.0
    x[3, 20] = -torch.inf
    for options in ({}, BOTH_WAYS):
        given = torch.tensor([scale], device=device)
        data, *_, data_t, _ = quantization.quantize(x, given, format="nvfp4", **options)
        for codes in (data, data_t):
            assert codes is None or (codes == 0x77).all()  # code of 6, which NaN becomes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_are_under_way_together(
    format: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(_launch.limits(0), multiprocessors=1)
    monkeypatch.setattr(_launch, "limits", lambda device: small)
    for rows, columns in ((75, 512), (141, 400)):  # neither is a multiple of the rows in flight
        x = values(rows, columns, dtype=dtype).to(device)
        x[rows - 1, columns - 1] = torch.nan
        x[rows // 2, 17] = -1000.0
        found = quantization.quantize(x, format=format)
        assert_same_bits(found, reference.quantize(x, format=format))


@pytest.mark.parametrize("format", ["block_1x128", "mxfp8"])
def test_scales_that_many_tiles_stage(
    format: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_casting, "STAGED_SCALES_TILES", 1)
    options = {"format": format, **BOTH_WAYS}
    for rows, columns in ((128, 128), (384, 256), (128, 128 * 65), (128 * 65, 128)):
        x = values(rows, columns).to(device)
        x[rows - 1, columns - 1] = torch.nan
        x[127, 17] = -1000.0
        assert_same_bits(quantization.quantize(x, **options), reference.quantize(x, **options))
    found = quantization.bgrad_quantize(x, **options)[1:]
    assert_same_bits(found, reference.quantize(x, **options))


@pytest.mark.parametrize("columns", [24, 520])
def test_bias_gradients_over_many_rows_along_with_the_cast(columns: int, device: str) -> None:
    x = values(1500, columns).to(device)
    for options in ({}, BOTH_WAYS):
        bias_grad, *found = quantization.bgrad_quantize(x, format="mxfp8", **options)
        assert_same_bits(found, reference.quantize(x, format="mxfp8", **options))
        expected = x.double().sum(0)
        assert bool(((bias_grad.double() - expected).abs() <= 2**-8 * expected.abs() + 0.01).all())
        again = quantization.bgrad_quantize(x, format="mxfp8", **options)
        assert torch.equal(bias_grad, again[0])


def test_tensors_are_flattened_only_where_no_block_ends_within_a_row() -> None:
    def matrix(shape: tuple[int, ...], width: int) -> tuple[int, int]:
        x = torch.empty(shape, dtype=torch.bfloat16)
        return Source("identity", shape, x, shape[-1]).matrix(width, whole=False)[:2]

    assert matrix((64, 40), 0) == (64 * 40 // 512, 512)
    assert matrix((64, 64), 32) == (64 * 64 // 512, 512)
    assert matrix((64, 40), 32) == (64, 40)
    assert matrix((3, 7), 0) == (1, 21)
    assert matrix((3, 48), 0) == (3, 48)


@pytest.mark.parametrize("columns", [16, 100, 512, 8192, 2**20])
@pytest.mark.parametrize("rows", [1, 3, 4096])
@pytest.mark.parametrize("width", [0, 16, 32, 128])
def test_blocks_of_threads_are_whole_warps_that_hold_whole_blocks(
    rows: int, columns: int, width: int
) -> None:
    matrix = _casting.Matrix(rows, columns, columns, columns, columns)
    lanes, down = _casting._lanes(matrix, columns, width)
    assert 32 <= lanes * down <= _casting.THREADS
    assert lanes & (lanes - 1) == down & (down - 1) == 0
    assert lanes * _casting.PIECE >= width


# Rows of the transposed begin at odd and even bytes, at words, at multiples of 16 bytes, and at
# sectors; from 513 rows on, a row takes several tiles.
@pytest.mark.parametrize("rows", [3, 127, 272, 513, 518, 540, 544])
def test_bytes_are_transposed_at_any_alignment(rows: int, device: str) -> None:
    memory = torch.arange(rows * 300).remainder(251).to(torch.uint8).view(rows, 300).to(device)
    for first, columns in ((0, 300), (3, 129), (16, 256)):
        x = memory[:, first : first + columns]
        assert torch.equal(quantization.fp8_transpose(x), x.t())


@pytest.mark.parametrize(
    ("inner", "dtype"), [(1, torch.bfloat16), (3, torch.float32), (40, torch.uint8)]
)
def test_the_first_dimensions_change_places(inner: int, dtype: torch.dtype, device: str) -> None:
    x = torch.arange(70 * 130 * inner).remainder(251).view(70, 130, inner).to(device, dtype)
    for input in (x, x[3:, 5:]):
        assert torch.equal(quantization.swap_first_dims(input), input.transpose(0, 1))


@pytest.mark.parametrize("format", ["per_tensor", "mxfp8", "nvfp4"])
def test_only_a_single_row_beyond_the_limit_of_columns_is_declined(
    format: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, scales, _, factor, *_ = quantization.quantize(values(5, 512).to(device), format=format)
    expected = reference.dequantize(data, scales, factor, format=format)
    monkeypatch.setattr(quantization, "MOST_VECTORS", 700)
    found = quantization.dequantize(data, scales, factor, format=format)
    assert torch.equal(found, expected)
    with pytest.raises(NotSupportedError, match="columns exceed the kernel's limit"):
        quantization.dequantize(
            data.view(1, -1), scales.view(1, -1) if scales.dim() > 1 else scales, factor,
            format=format,
        )  # fmt: skip


def test_a_history_longer_than_a_block_of_threads(device: str) -> None:
    history = values(700, 3, dtype=torch.float32).abs().to(device)
    expected = torch.roll(history, -1, 0)
    expected[-1] = torch.tensor([5.0, 6.0, 7.0])
    scale = torch.ones(3, device=device)
    buffer = torch.tensor([5.0, 6.0, 7.0], device=device)
    largest = expected.amax(0)
    expected[0] = 0.0
    quantization.fused_amax_and_scale_update_after_reduction(buffer, [history], [scale])
    assert torch.equal(history, expected)
    assert torch.equal(scale, torch.full_like(largest, 448.0) / largest)


def test_nothing_is_written_where_a_later_history_is_declined(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "MOST", 4)
    histories = [torch.ones(rows, 3, device=device) for rows in (2, 5)]
    scales = [torch.ones(3, device=device) for _ in histories]
    buffer = torch.full((6,), 2.0, device=device)
    with pytest.raises(NotSupportedError, match="5 rows"):
        quantization.fused_amax_and_scale_update_after_reduction(buffer, histories, scales)
    assert all(bool((it == 1).all()) for it in (*histories, *scales))
