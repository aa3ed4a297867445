"""Triton's quantised epilogues beyond the samples: cuts, strides, extremes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from against_contract import checking
from some_tensors import normal_of_shape
from torch import Tensor

from transformer_engine_fl.backends.flagos import _casting
from transformer_engine_fl.backends.flagos import epilogue as flagos
from transformer_engine_fl.ops._formats import FORMATS

check = checking(flagos)
numbers = partial(normal_of_shape, dtype=torch.bfloat16)

NORMS = ("rmsnorm_fwd_quantize", "rmsnorm_fwd_add_quantize", "layernorm_fwd_quantize")


def cuts_of(op: str, cast: bool, dtype: torch.dtype) -> dict[int, Any]:
    """The operator's cuts of rows, each by the widest row that it serves."""
    added, centred = op == "rmsnorm_fwd_add_quantize", op == "layernorm_fwd_quantize"
    return flagos._cuts(dtype.itemsize == 2, added, centred, cast)


def inputs(
    op: str, rows: int, columns: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    x = numbers(rows, columns, device=device, dtype=dtype)
    weight = numbers(columns, device=device, dtype=dtype)
    if op == "rmsnorm_fwd_add_quantize":
        return x, numbers(rows, columns, device=device, dtype=dtype).flip(0), weight
    return (x, weight, weight) if op == "layernorm_fwd_quantize" else (x, weight)


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is too wide for registers."""
    monkeypatch.setattr(flagos, "_cut", lambda norm, cast_here: None)
    monkeypatch.setattr(flagos, "_CHUNK", (128, 128))
    monkeypatch.setattr(flagos, "_PLANS", {})


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("columnwise", [False, True], ids=["rows", "both ways"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("op", NORMS)
def test_rows_too_wide_for_registers(op: str, form: str, columnwise: bool, device: str) -> None:
    check(op, *inputs(op, 6, 1000, device), format=form, columnwise=columnwise)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("form", ["per_tensor", "nvfp4"])
def test_wide_rows_with_a_given_scale(form: str, device: str) -> None:
    scale = torch.tensor([3.0], device=device)
    for op in NORMS:
        check(op, *inputs(op, 5, 514, device), scale=scale, format=form)


@pytest.mark.parametrize("columns", [1, 15, 33, 129, 1000, 2049])
def test_rows_that_end_within_a_block(columns: int, device: str) -> None:
    for op in NORMS:
        for form in ("per_tensor", "block_1x128", "mxfp8"):
            check(op, *inputs(op, 7, columns, device), format=form)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cast", [False, True], ids=["statistics", "cast"])
@pytest.mark.parametrize("op", NORMS)
def test_every_cut_of_rows(op: str, cast: bool, dtype: torch.dtype, device: str) -> None:
    """The widest row of each cut, and a row that ends within a part and a block of values."""
    for widest in cuts_of(op, cast, dtype):
        for columns in (widest, widest - 72):
            given = inputs(op, 3, columns, device, dtype)
            scale = torch.full((1,), 3.0, device=device) if cast else None
            check(op, *given, scale=scale)
            check(op, *given, format="mxfp8", columnwise=not cast)


@pytest.mark.parametrize("columns", [1280, 2880, 5000])
def test_the_spread_of_rows_in_parts_far_from_zero(columns: int, device: str) -> None:
    x, weight, bias = inputs("layernorm_fwd_quantize", 4, columns, device)
    x = x + 200
    found = flagos.layernorm_fwd_quantize(x, weight, bias, format="mxfp8")  # type: ignore[attr-defined]
    exact = x.double()
    mean, spread = exact.mean(1), (exact.var(1, correction=0) + 1e-5).rsqrt()
    torch.testing.assert_close(found[-2].double(), mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(found[-1].double(), spread, rtol=1e-5, atol=0)


@pytest.mark.parametrize("columns", [64, 1280, 70000])
def test_no_rows_have_an_amax_of_0(columns: int, device: str) -> None:
    scale = torch.full((1,), 4.0, device=device)
    for op in NORMS:
        for given in (None, scale):
            found = check(op, *inputs(op, 0, columns, device), scale=given)
            assert found[2] is not None
            assert found[2].item() == 0


@pytest.mark.parametrize("op", NORMS)
def test_programs_with_several_tiles_find_the_amax_of_all(op: str, device: str) -> None:
    x, *others = inputs(op, 4000, 24, device)
    x[0, 3] = x[3999, 5] = 16.0
    found = check(op, x, *others)
    given = check(op, x, *others, scale=torch.ones(1, device=device))
    assert found[2] is not None
    assert given[2] is not None
    assert found[2].equal(given[2])


@pytest.mark.parametrize("columns", [64, 2880, 40000])
@pytest.mark.parametrize("op", NORMS)
def test_zeros_have_the_same_sign_whatever_casts_them(op: str, columns: int, device: str) -> None:
    given = list(inputs(op, 4, columns, device))
    given[-1] = torch.full_like(given[-1], -0.0)
    if op == "layernorm_fwd_quantize":
        given[-2] = given[-1]
    scale = torch.ones(1, device=device)
    once, both = (check(op, *given, scale=scale, columnwise=it) for it in (False, True))
    assert once[0].view(torch.uint8).equal(both[0].view(torch.uint8))
    assert once[0].view(torch.uint8).unique().tolist() == [0, 128]


@pytest.mark.parametrize("columnwise", [False, True], ids=["rows", "both ways"])
def test_rows_of_a_wider_matrix(columnwise: bool, device: str) -> None:
    wide = numbers(8, 3 * 72, device=device)
    x, residual, weight = wide[:, :72], wide[:, 100:172], numbers(72, device=device)
    options = {"format": "mxfp8", "columnwise": columnwise}
    check("rmsnorm_fwd_add_quantize", x, residual, weight, **options)
    check("swiglu_quantize", x, **options)
    check("dbias_dgelu_quantize", residual, x, **options)
    check("dswiglu_quantize", residual[:, :36], x, **options)


@pytest.mark.parametrize("op", ["gelu_quantize", "swiglu_quantize", "dbias_dsilu_quantize"])
@pytest.mark.parametrize("rows", [65, 130])
def test_activations_of_more_rows_than_a_tile(op: str, rows: int, device: str) -> None:
    x = numbers(rows, 300, device=device)
    args = (x.flip(0), x) if op.startswith("d") else (x,)
    for form in FORMATS:
        check(op, *args, format=form)


@pytest.mark.parametrize("op", ["dbias_dgelu_quantize", "dswiglu_quantize"])
@pytest.mark.parametrize("form", FORMATS)
def test_programs_with_several_tiles_sum_and_cast_all_of_them(
    op: str, form: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_casting, "_STRIP_PROGRAMS", 0)
    x = numbers(600, 256, device=device)
    grad = x[:, :128].flip(0) if op == "dswiglu_quantize" else x.flip(0)
    grad[0, 3] = grad[599, 5] = 16.0
    check(op, grad, x, format=form)
    if FORMATS[form].by_tensor:
        check(op, grad, x, scale=torch.ones(1, device=device), format=form)


@pytest.mark.parametrize("form", FORMATS)
def test_a_row_of_zeros_without_epsilon_spoils_no_other(form: str, device: str) -> None:
    x, weight = inputs("rmsnorm_fwd_quantize", 4, 40, device)
    alone = flagos.rmsnorm_fwd_quantize(x, weight, eps=0.0, format=form)  # type: ignore[attr-defined]
    x = torch.cat([x, torch.zeros_like(x[:1])])
    found = flagos.rmsnorm_fwd_quantize(x, weight, eps=0.0, format=form)  # type: ignore[attr-defined]
    if form != "block_128x128":  # where all rows are in one block
        assert found[0][:4].view(torch.uint8).equal(alone[0].view(torch.uint8))
    assert found[-1][4] == torch.inf
    if alone[2] is not None:
        assert found[2].equal(alone[2])


def test_the_sum_is_normalized_as_it_is_rounded(device: str) -> None:
    x = torch.full((4, 64), 1.0, dtype=torch.bfloat16, device=device)
    residual = torch.full_like(x, 2.0**-9)  # half a unit in the last place, a tie
    residual[:, ::2] = 2.0**-8 + 2.0**-9
    weight = torch.ones(64, dtype=torch.bfloat16, device=device)
    found = check("rmsnorm_fwd_add_quantize", x, residual, weight, format="mxfp8")
    assert found[6] is not None
    assert found[6].equal(x + residual)


def test_what_a_program_has_seen_is_not_looked_for_again(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    def look(*given: Any) -> Tensor:
        raise AssertionError("the amaxes are known from the statistics' kernel")

    monkeypatch.setattr(_casting, "_amaxes", look)
    for form in ("per_tensor", "nvfp4"):
        check("rmsnorm_fwd_quantize", *inputs("rmsnorm_fwd_quantize", 6, 64, device), format=form)
