"""Quantisation: what the formats mean, and how the operators work together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import ops
from transformer_engine_fl.ops._formats import FORMATS

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ONE = torch.ones(1)


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def same(left: Tensor | None, right: Tensor | None) -> bool:
    """Whether both are equal bit by bit."""
    if left is None or right is None:
        return left is right
    same_kind = (left.shape, left.dtype) == (right.shape, right.dtype)
    return same_kind and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def dequantized(outputs: tuple[Any, ...], format: str) -> Tensor:
    data, scale_inv, _, global_scale_inv, *_ = outputs
    return ops.dequantize(data, scale_inv, global_scale_inv, format=format)


# ------------------------------------------------------------------------------ rounding


def nearest(value: Tensor, codes: Tensor) -> Tensor:
    """The code 0, 1, ... with the nearest value, by search; the even code in a tie."""
    known = codes.double()
    order = torch.searchsorted(known, value.double().contiguous()).clamp(1, len(known) - 1)
    below, above = value - known[order - 1], known[order] - value
    return torch.where((below > above) | ((below == above) & (order % 2 == 0)), order, order - 1)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_bfloat16_number_goes_to_the_nearest_code(dtype: torch.dtype) -> None:
    every = torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16)
    data = ops.quantize(every, ONE, dtype=dtype)[0]
    codes = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    codes = codes[codes.isfinite()]
    expected = nearest(every.double().clamp_max(codes[-1]), codes)
    number = ~every.isnan()
    assert torch.equal(data.view(torch.uint8)[number].long(), expected[number])
    assert bool(data.isnan()[~number].all())
    negative = ops.quantize(-every, ONE, dtype=dtype)[0].view(torch.uint8)
    assert torch.equal(negative[number], data.view(torch.uint8)[number] + 128)


def test_every_number_goes_to_the_nearest_e2m1_code() -> None:
    size = torch.arange(0, 6.0625, 1 / 128).clamp_max(6.0)
    size = torch.cat([size, size[: -len(size) % 15]])
    # With a global scale of 1, a block of amax 6 is cast without scaling.
    rows = torch.cat([torch.full((len(size) // 15, 1), 6.0), size.view(-1, 15)], 1)
    data, scale_inv, *_ = ops.quantize(rows, ONE, format="nvfp4")
    assert bool((scale_inv.float() == 1).all())
    codes = torch.stack([data & 15, data >> 4], -1).flatten(1)[:, 1:].flatten()
    assert torch.equal(codes.long(), nearest(size, torch.tensor(E2M1)))


def test_what_e2m1_has_no_code_for() -> None:
    special = torch.tensor([[-0.0, 0.0, torch.nan, torch.inf, -torch.inf, 100.0, -100.0, 6.0]])
    special = torch.cat([special, torch.tensor([[6.0] + [0.0] * 7])])
    data = ops.quantize(special, ONE, format="nvfp4")[0]
    # The first block has an infinite amax, so it gets the largest scale, 448.
    assert data[0].tolist() == [0x08, 0x77, 0x0F, 0x08]
    assert data[1, 0] == 0x07


def test_two_e2m1_values_share_a_byte_the_first_one_low() -> None:
    row = torch.tensor([[0.5, 1.0, -1.5, 6.0]])
    data, scale_inv, _, factor, *_ = ops.quantize(row, ONE, format="nvfp4")
    assert data.tolist() == [[0x21, 0x7B]]
    assert torch.equal(ops.dequantize(data, scale_inv, factor, format="nvfp4"), row)


# -------------------------------------------------------------------------------- scales


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (448.0, 1.0),
        (7.0, 64.0),
        (3.0, 149.33332824707031),  # 448 / 3 in float32
        (0.0, 1.0),
        (float("inf"), 1.0),
        (1e-38, torch.finfo(torch.float32).max),
    ],
)
def test_the_scale_of_an_amax(amax: float, scale: float) -> None:
    tensor = torch.tensor([amax, amax / 2])
    _, scale_inv, found, *_ = ops.quantize(tensor)
    assert found is not None
    assert found.item() == torch.tensor(amax).item()
    assert scale_inv.item() == (1 / torch.tensor(scale)).item()


def test_powers_of_two_are_rounded_down_to() -> None:
    for amax, scale in ((3.0, 128.0), (7.0, 64.0), (0.0, 1.0), (1e-38, 2.0**127)):
        scale_inv = ops.quantize(torch.tensor([amax]), force_pow_2_scales=True)[1]
        assert scale_inv.item() == 1 / scale


def test_the_epsilon_is_the_least_amax_that_counts_but_not_the_one_returned() -> None:
    _, scale_inv, amax, *_ = ops.quantize(torch.tensor([0.5]), amax_epsilon=7.0)
    assert amax is not None
    assert (scale_inv.item(), amax.item()) == (1 / 64, 0.5)


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_the_exponent_of_a_microscaling_block(dtype: torch.dtype, largest: float) -> None:
    above = torch.nextafter(torch.tensor(largest), torch.tensor(torch.inf)).item()
    below = torch.nextafter(torch.tensor(largest), torch.tensor(0.0)).item()
    for amax, exponent in (
        (largest, 0),
        (below, 0),
        (above, 1),
        (largest / 2, -1),
        (above / 2**20, -19),
        (0.0, -127),
        (1e-45, -127),
        (float("inf"), 127),
    ):
        block = torch.zeros(32)
        block[3] = amax
        data, scale_inv, *_ = ops.quantize(block, format="mxfp8", dtype=dtype)
        assert scale_inv.dtype == E8M0
        assert scale_inv.view(torch.uint8).item() == exponent + 127
        if 1e-30 < amax < 1e30:
            assert data[3].float().item() == pytest.approx(amax / 2.0**exponent, rel=2**-3)


def test_the_global_scale_leaves_room_for_those_of_the_blocks() -> None:
    x = values(4, 64)
    _, scale_inv, amax, factor, *_ = ops.quantize(x, format="nvfp4")
    assert amax is not None
    assert factor is not None
    assert amax.item() == x.abs().max().item()
    assert factor.item() == pytest.approx(amax.item() / 2688, rel=1e-6)
    assert scale_inv.float().max().item() == 448.0


# -------------------------------------------------------------------------------- errors

STEP = {"float8_e4m3fn": 2.0**-3, "float8_e5m2": 2.0**-2, "uint8": 2.0**-1}
"""The spacing of a data dtype, relative to the value."""


@pytest.mark.parametrize("format", FORMATS)
def test_a_value_comes_back_to_half_a_step(format: str) -> None:
    x = values(140, 200)
    for name in FORMATS[format].dtypes:
        options = {} if name == "uint8" else {"dtype": getattr(torch, name)}
        outputs = ops.quantize(x, format=format, **options)
        back = dequantized(outputs, format)
        # nvfp4 also rounds the scale of a block, which may clamp the largest value.
        allowed = STEP[name] / 2 if name != "uint8" else STEP[name] / 2 + 2**-4
        block = x.abs().max()
        error = (back - x).abs() - allowed * x.abs()
        assert error.max() <= block * STEP[name] * 2**-4
        assert (back - x).abs().max() > 0


@pytest.mark.parametrize("format", ["per_tensor", "block_1x128", "block_128x128", "mxfp8"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_is_finite_is_not_clamped(format: str, dtype: torch.dtype) -> None:
    x = values(140, 200) * 1e5
    for force in (False, True) if format != "mxfp8" else (False,):
        outputs = ops.quantize(x, format=format, dtype=dtype, force_pow_2_scales=force)
        back = dequantized(outputs, format)
        assert bool(((back - x).abs() <= x.abs().max() * 2**-2).all())
        largest = x.abs().argmax()
        assert back.flatten()[largest].item() == pytest.approx(
            x.flatten()[largest].item(), rel=0.13
        )


def test_missing_values_stay_missing_and_do_not_touch_the_others() -> None:
    x = values(4, 160)
    x[1, 3] = x[3, 150] = torch.nan
    for form in FORMATS.values():
        filled = ops.quantize(x.nan_to_num(0.0), format=form.name)
        outputs = ops.quantize(x, format=form.name)
        assert same(outputs[1], filled[1])
        assert same(outputs[2], filled[2])
        if form.values_per_byte == 1:
            assert torch.equal(outputs[0].isnan(), x.isnan())


def test_infinite_values_are_clamped_and_show_in_the_amax() -> None:
    x = torch.tensor([1.5, torch.inf, -torch.inf, 1000.0])
    data, scale_inv, amax, *_ = ops.quantize(x)
    assert amax is not None
    assert data.float().tolist() == [1.5, 448.0, -448.0, 448.0]
    assert (scale_inv.item(), amax.item()) == (1.0, float("inf"))


# ---------------------------------------------------------------- how they go together


@pytest.mark.parametrize("format", FORMATS)
def test_columnwise_is_the_transposed_tensor_quantised(format: str) -> None:
    x = values(3, 10, 200)
    outputs = ops.quantize(x, format=format, columnwise=True)
    turned = ops.quantize(x.view(30, 200).t(), format=format)
    assert same(outputs[4], turned[0])
    assert same(outputs[5], turned[1])


def test_data_and_scales_of_squares_are_only_transposed() -> None:
    x = values(130, 260)
    data, scale_inv, _, _, data_t, scale_inv_t = ops.quantize(
        x, format="block_128x128", columnwise=True
    )
    assert same(data_t, ops.fp8_transpose(data))
    assert same(scale_inv_t, scale_inv.t().contiguous())


@pytest.mark.parametrize("format", FORMATS)
def test_parts_groups_and_lists_are_each_what_quantize_gives(format: str) -> None:
    x = values(384, 64)
    sections = [128, 0, 256]
    alone = [ops.quantize(it, format=format, columnwise=True) for it in x.split(sections)]
    split = ops.split_quantize(x, sections, format=format, columnwise=True)
    listed = ops.multi_tensor_quantize(list(x.split(sections)), format=format, columnwise=True)
    for place, outputs in enumerate(zip(*alone, strict=True)):
        present = [it for it in outputs if it is not None]
        for found in (split[place], listed[place]):
            assert len(found) == len(present)
            assert all(same(one, other) for one, other in zip(found, present, strict=True))
    grouped = ops.group_quantize(x, torch.tensor(sections), format=format, columnwise=True)
    by_rows = (grouped[0], *grouped[1:4])
    for found, outputs in zip(by_rows, zip(*alone, strict=True), strict=False):
        whole = None if outputs[0] is None else torch.cat([it for it in outputs if it is not None])
        assert same(found, whole)
    assert same(grouped[4], torch.cat([it[4] for it in alone if it[4] is not None], 1))


def test_rows_after_the_last_group_are_taken_for_zeros() -> None:
    x = values(40, 64)
    x[30:] = torch.nan
    for form in FORMATS.values():
        outputs = ops.group_quantize(x, torch.tensor([10, 20]), format=form.name)
        assert not outputs[0][30:].view(torch.uint8).any()


def test_quantizing_with_the_scale_of_a_reduced_amax() -> None:
    x = values(16, 64)
    amax = torch.maximum(ops.compute_amax(x), torch.tensor([100.0]))
    data, scale_inv, found, *_ = ops.quantize(x, 448 / amax)
    assert found is not None
    assert found.item() == x.abs().max().item()
    assert torch.equal(data.float(), (x * (448 / amax)).to(E4M3).float())
    assert scale_inv.item() == pytest.approx(100 / 448, rel=1e-6)


def test_shards_of_a_weight_are_cast_as_the_whole_of_it() -> None:
    h, w = 200, 300
    weight = values(h, w)
    data, scale_inv, *_ = ops.quantize(weight, format="block_128x128")
    shards, starts = weight.flatten().split([25000, 20001, 14999]), (0, 25000, 45001)
    calls = list(zip(shards, starts, strict=True))
    amaxes = [ops.fp8_block_scaling_compute_partial_amax(it, h, w, start) for it, start in calls]
    amax = torch.stack(amaxes).amax(0)
    scale = torch.full_like(amax, 448.0) / amax
    assert torch.equal(1 / scale, scale_inv)
    cast = [ops.fp8_block_scaling_partial_cast(it, scale, h, w, start) for it, start in calls]
    assert same(torch.cat(cast), data.flatten())


@pytest.mark.parametrize(("algorithm", "expected"), [("max", 8.0), ("most_recent", 7.0)])
def test_delayed_scaling_over_some_steps(algorithm: str, expected: float) -> None:
    history, scale = torch.zeros(3, 2), torch.ones(2)
    for amax in (9.0, 8.0, 2.0, 7.0):
        reduced = torch.tensor([amax, 0.0])
        ops.fused_amax_and_scale_update_after_reduction(
            reduced, [history], [scale], amax_compute_algo=algorithm, margin=1
        )
    # Row 0 is left for the next amax.
    assert history.tolist() == [[0.0, 0.0], [2.0, 0.0], [7.0, 0.0]]
    assert scale.tolist() == [224 / expected, 1.0]


def test_without_a_reduced_amax_the_one_in_the_history_counts() -> None:
    history, scale = torch.tensor([[4.0], [1.0], [2.0]]), torch.ones(1)
    ops.fused_amax_and_scale_update_after_reduction(torch.zeros(1), [history], [scale])
    assert history.flatten().tolist() == [0.0, 2.0, 4.0]
    assert scale.item() == 112.0


def test_a_bias_gradient_is_the_sum_over_the_rows() -> None:
    grad = values(3, 50, 24).bfloat16()
    bias_grad, *outputs = ops.bgrad_quantize(grad)
    expected = grad.double().sum((0, 1))
    assert bias_grad.dtype == torch.bfloat16
    assert torch.allclose(bias_grad.double(), expected, rtol=2**-8)
    assert all(same(a, b) for a, b in zip(outputs, ops.quantize(grad), strict=True))


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ops.quantize(values(4, 5), format="nvfp4"), "'input'.*multiple of 2 columns"),
        (
            lambda: ops.quantize(values(3, 4), format="nvfp4", columnwise=True),
            "multiple of 2 rows and columns",
        ),
        (lambda: ops.quantize(values(4, 4), format="fp8"), "'format'.*per_tensor"),
        (lambda: ops.quantize(values(4, 4), ONE, format="mxfp8"), "'scale'.*each block"),
        (lambda: ops.quantize(values(4, 4), dtype=torch.uint8), "'dtype'"),
        (
            lambda: ops.quantize(values(4, 4), format="mxfp8", force_pow_2_scales=True),
            "'force_pow_2_scales'",
        ),
        (lambda: ops.split_quantize(values(4, 4), [1, 2]), "'split_sections'.*sum is 4"),
        (
            lambda: ops.split_quantize(values(4, 4), [2, 2], [ONE]),
            "'scales'.*2: one for each",
        ),
        (
            lambda: ops.dequantize(
                torch.zeros(4, 4).to(E4M3), torch.ones(2, 1), format="block_1x128"
            ),
            r"'scale_inv'.*\(4, 1\)",
        ),
        (
            lambda: ops.fp8_block_scaling_compute_partial_amax(values(9), 2, 5, 2),
            "'start_offset'.*within the 2 x 5",
        ),
    ],
)
def test_what_does_not_agree_is_named(call: Any, words: str) -> None:
    with pytest.raises(te.ArgumentError, match=words):
        call()
