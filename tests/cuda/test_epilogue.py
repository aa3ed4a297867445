"""Quantised epilogues in CUDA C++: what the samples of the contracts do not cover.

Without a GPU the kernels run on the CPU.
"""

from __future__ import annotations

import pytest
import torch
from against_contract import checking
from torch import Tensor

from transformer_engine_fl.backends.vendor.cuda import _casting, epilogue, normalization
from transformer_engine_fl.backends.vendor.cuda._arguments import Plans
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.ops._formats import FORMATS

check = checking(epilogue)


def values(*shape: int, device: str, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)


@pytest.fixture
def two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two groups of blocks are resident, so that each has several rows."""
    monkeypatch.setattr(normalization, "require_clusters", lambda kernel, columns: 2)
    monkeypatch.setattr(normalization, "_forwards", Plans())


@pytest.mark.parametrize(
    ("op", "args", "named"),
    [
        ("gelu_quantize", (torch.ones(4, dtype=torch.float64),), "input"),
        ("rmsnorm_fwd_quantize", (torch.ones(2, 4), torch.ones(5)), "weight"),
        ("dswiglu_quantize", (torch.ones(2, 6), torch.ones(2, 6)), "grad"),
    ],
)
@pytest.mark.usefixtures("no_launch")
def test_wrong_arguments_are_named(op: str, args: tuple[object, ...], named: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        getattr(epilogue, op)(*args)
    assert raised.value.argument == named


# Numbers of threads that are no power of two, or many vectors, from each list of ways to cast.
@pytest.mark.parametrize(
    ("op", "format", "columns"),
    [
        ("rmsnorm_fwd_quantize", "per_tensor", 3584),
        ("rmsnorm_fwd_quantize", "mxfp8", 3072),
        ("rmsnorm_fwd_quantize", "mxfp8", 3328),
        ("layernorm_fwd_quantize", "per_tensor", 4096),
        ("layernorm_fwd_quantize", "per_tensor", 5376),
        ("layernorm_fwd_quantize", "mxfp8", 2304),
        ("layernorm_fwd_quantize", "mxfp8", 3584),
        ("layernorm_fwd_quantize", "mxfp8", 10240),
    ],
)
def test_listed_ways_to_cast(op: str, format: str, columns: int, device: str) -> None:
    for width in (columns, columns - 8):  # a row that fills its threads, and one that does not
        x, weight = values(5, width, device=device), values(width, device=device)
        bias = (weight.flip(0),) if op == "layernorm_fwd_quantize" else ()
        scale = torch.full((1,), 2.0, device=device) if format == "per_tensor" else None
        check(op, x, weight, *bias, scale=scale, format=format)


@pytest.mark.parametrize("format", FORMATS)
def test_layer_norms_without_beta(format: str, device: str) -> None:
    x, weight = values(8, 1536, device=device), values(1536, device=device)
    for options in ({}, {"columnwise": True}):
        check("layernorm_fwd_quantize", x, weight, format=format, **options)


def test_a_zero_keeps_its_sign_whichever_kernel_casts_it(device: str) -> None:
    x, weight = values(32, 1536, device=device), torch.zeros(1536, device=device)
    both = [
        epilogue.layernorm_fwd_quantize(x, weight, format="mxfp8", columnwise=columnwise)
        for columnwise in (False, True)
    ]
    codes, beside = (output[0].view(torch.uint8) for output in both)
    assert {0, 128} == set(codes.unique().tolist())
    assert torch.equal(codes, beside)


@pytest.mark.parametrize("format", FORMATS)
def test_norms_of_rows_over_several_warps(format: str, device: str) -> None:
    x, weight = values(8, 1048, device=device), values(1048, device=device)
    for options in ({}, {"columnwise": True}):
        check("rmsnorm_fwd_quantize", x, weight, format=format, **options)


@pytest.mark.parametrize("format", ["per_tensor", "nvfp4"])
def test_norms_with_a_given_scale_leave_the_amax(format: str, device: str) -> None:
    x, weight = values(6, 520, device=device), values(520, device=device)
    scale = torch.tensor([3.0], device=device)
    for options in ({}, {"columnwise": True}):
        check("layernorm_fwd_quantize", x, weight, weight, scale=scale, format=format, **options)


@pytest.mark.parametrize(
    ("format", "columns"),
    [("per_tensor", 4128), ("per_tensor", 8224), ("mxfp8", 4128), ("mxfp8", 8224)],
)
@pytest.mark.usefixtures("two_groups")
def test_groups_with_several_long_rows_leave_one_amax_each(
    format: str, columns: int, device: str
) -> None:
    scale = torch.tensor([3.0], device=device) if format == "per_tensor" else None
    weight = values(columns, device=device)
    for rows in (1, 5):
        x = values(rows, columns, device=device)
        check("rmsnorm_fwd_quantize", x, weight, scale=scale, format=format)
        check("layernorm_fwd_quantize", x, weight, weight, scale=scale, format=format)


@pytest.mark.parametrize(
    ("columns", "rows"),
    # a warp; whole warps with full vectors, also if their number is no power of two; vectors that
    # are not full; two vectors side by side, of one row and of several; a cluster
    [
        (256, 9),
        (512, 9),
        (1280, 5),
        (1504, 5),
        (2048, 5),
        (4096, 5),
        (5120, 5),
        (6128, 3),
        (20480, 3),
    ],
)
@pytest.mark.parametrize("format", ["per_tensor", "block_1x128", "mxfp8"])
@pytest.mark.parametrize("op", ["rmsnorm_fwd_quantize", "layernorm_fwd_quantize"])
@pytest.mark.usefixtures("two_groups")
def test_norms_of_every_width(op: str, format: str, columns: int, rows: int, device: str) -> None:
    scale = torch.tensor([3.0], device=device) if format == "per_tensor" else None
    weight, bias = values(columns, device=device), values(columns, device=device, seed=2)
    parameters = (weight, bias) if op.startswith("layer") else (weight,)
    x = values(rows, columns, device=device, seed=3)
    check(op, x, *parameters, scale=scale, format=format)


@pytest.mark.parametrize("columns", [2048, 8192])
def test_two_vectors_of_a_row_with_a_residual_are_cast_side_by_side(
    columns: int, device: str
) -> None:
    x, residual = values(3, columns, device=device), values(3, columns, device=device, seed=2)
    check("rmsnorm_fwd_add_quantize", x, residual, values(columns, device=device), format="mxfp8")


@pytest.mark.parametrize("format", ["per_tensor", "mxfp8"])
def test_norms_of_rows_that_do_not_stay_on_the_chip(
    format: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(normalization, "FORWARD_TEAMS", ())
    monkeypatch.setattr(normalization, "_forwards", Plans())
    x, residual = values(3, 2000, device=device), values(3, 2000, device=device, seed=2)
    weight = values(2000, device=device)
    check("rmsnorm_fwd_add_quantize", x, residual, weight, format=format)


def test_norms_whose_blocks_are_spread_over_warps(device: str) -> None:
    x, weight = values(4, 1030, device=device), values(1030, device=device)
    check("rmsnorm_fwd_quantize", x, weight, format="block_1x128")


@pytest.mark.parametrize("half", [72, 80])
@pytest.mark.parametrize("format", ["per_tensor", "block_1x128", "mxfp8"])
def test_gated_gradients_whose_halves_end_within_a_block(
    format: str, half: int, device: str
) -> None:
    grad, x = values(20, half, device=device), values(20, 2 * half, device=device, seed=2)
    for options in ({}, {"columnwise": True}):
        check("dswiglu_quantize", grad, x, format=format, **options)


def test_bias_gradients_of_many_rows(device: str) -> None:
    grad, x = values(1200, 40, device=device), values(1200, 40, device=device, seed=2)
    for options in ({}, {"columnwise": True}):
        check("dbias_dgelu_quantize", grad, x, format="mxfp8", **options)


@pytest.mark.parametrize("columns", [40, 512])
@pytest.mark.parametrize("format", ["per_tensor", "mxfp8", "nvfp4"])
def test_bias_gradients_of_strips_of_many_rows(
    format: str, columns: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_casting, "_resident", lambda kernel: 1)
    grad, x = values(203, columns, device=device), values(203, columns, device=device, seed=2)
    check("dbias_dgelu_quantize", grad, x, format=format)


@pytest.mark.parametrize("format", ["per_tensor", "block_1x128", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(("rows", "columns"), [(600, 40), (599, 520)])
def test_activations_with_two_rows_of_a_thread_under_way(
    format: str, rows: int, columns: int, device: str
) -> None:
    check("gelu_quantize", values(rows, columns, device=device), format=format)


@pytest.mark.parametrize(
    ("across", "strips"),
    [(28, 14), (1, 396), (99, 4), (104, 15), (396, 1), (397, 3), (5000, 1)],
)
def test_strips_fill_the_device(across: int, strips: int) -> None:
    assert _casting._strips(across, resident=396) == strips
