"""Cross entropy in CUDA C++: how rows are divided, and what the samples do not cover."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from against_contract import checking
from losses_at_once import LINEAR, LOGITS, checking_losses
from torch import Tensor

from transformer_engine_fl.backends import _cross_entropy
from transformer_engine_fl.backends.vendor.cuda import loss
from transformer_engine_fl.core.errors import ArgumentError, NotSupportedError
from transformer_engine_fl.ops import CATALOGUE
from transformer_engine_fl.ops._dtypes import math_dtype

check = checking(loss)
check_at_once = checking_losses(check)

LOW, FULL, DOUBLE = torch.bfloat16, torch.float32, torch.float64
IGNORED = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 8.0, "ignore_index": IGNORED},
}


@pytest.mark.parametrize("vectors", [0, 1, 7, 8, 33, 256, 257, 512, 8192, 16032, 2**15 + 1, 2**27])
def test_a_row_is_shared_by_whole_warps_or_within_one(vectors: int) -> None:
    lanes = loss.row_lanes(vectors)
    assert lanes & (lanes - 1) == 0
    assert lanes >= loss.FEWEST_LANES
    assert lanes <= 32 or vectors > 64 * loss.DEPTH


@pytest.mark.parametrize(
    ("op", "args", "options", "named"),
    [
        ("cross_entropy_fwd", (torch.ones(2, 4), torch.zeros(3, dtype=torch.int64)), {}, "target"),
        ("cross_entropy_fwd", (torch.ones(2, 4), torch.zeros(2)), {}, "target"),
        *(
            (
                "cross_entropy_fwd",
                (torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)),
                {name: value},
                name,
            )
            for name, value in (
                ("softcap", 0.0),
                ("softcap", 1e-40),
                ("softcap", 1e39),
                ("z_loss", float("inf")),
            )
        ),
        (
            "cross_entropy_partial_fwd",
            (torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)),
            {"vocab_start": -1},
            "vocab_start",
        ),
    ],
)
@pytest.mark.usefixtures("no_launch")
def test_wrong_arguments_are_named(
    op: str, args: tuple[Tensor, ...], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ArgumentError) as raised:
        getattr(loss, op)(*args, **options)
    assert raised.value.argument == named


# ------------------------------------------------------------------ on a device, or emulated

TOO_MUCH: dict[str, list[Any]] = {
    "ignore_index": [-(2**63), 2**63],
    "z_loss": [torch.inf, 1e39, 2**63],
    "softcap": [1e-40, 1e39, 2**63],
    "vocab_start": [2**63 - 1, 2**63 - 4],
    "vocab_size": [2**63, 2**64],
}


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (f"cross_entropy_{form}", name)
        for form in ("fwd", "bwd", "fwd_bwd", "partial_fwd", "merge")
        for name in TOO_MUCH
        if name in CATALOGUE[f"cross_entropy_{form}"].signature.parameters
    ],
)
def test_options_beyond_what_the_contract_allows_are_refused(
    op: str, name: str, device: str
) -> None:
    rows = torch.zeros(2, device=device)
    known = {
        "input": torch.ones(2, 4, device=device),
        "stats": torch.ones(1, 2, 4, device=device),
        "target": torch.zeros(2, dtype=torch.int64, device=device),
        "grad_loss": rows,
        "lse": rows,
        "vocab_size": 4,
    }
    given = {it: known[it] for it in CATALOGUE[op].signature.parameters if it in known}
    getattr(loss, op)(**given)  # valid as they are
    for value in TOO_MUCH[name]:
        with pytest.raises(ArgumentError) as raised:
            getattr(loss, op)(**given | {name: value})
        assert raised.value.argument == name


def made(rows: int, columns: int, device: str, dtype: torch.dtype = LOW) -> tuple[Tensor, Tensor]:
    """Logits; and targets at both ends of the vocabulary, in the middle, ignored and outside."""
    generator = torch.Generator().manual_seed(columns)
    logits = 3 * torch.randn(rows, columns, generator=generator)
    words = torch.tensor([0, columns - 1, columns // 2, IGNORED, columns, -7])
    return logits.to(device, dtype), words.repeat(rows)[:rows].to(device)


def check_both(logits: Tensor, target: Tensor, **options: Any) -> None:
    """Forward, backward and the statistics of a shard."""
    kind = math_dtype(logits.dtype)
    generator = torch.Generator().manual_seed(1)
    grads = torch.randn(2, len(logits), generator=generator).to(logits.device, kind)
    _, lse = check("cross_entropy_fwd", logits, target, **options)
    check("cross_entropy_bwd", grads[0], logits, target, lse, grads[1], **options)
    check_at_once(LOGITS, logits, target, grads[0], **options)
    shard = {"vocab_start": 1, "ignore_index": options.get("ignore_index", -100)}
    check("cross_entropy_partial_fwd", logits, target, **shard)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("columns", [1, 7, 8, 9, 250, 2048, 2063, 4097, 65543, 131080, 262145])
def test_rows_of_every_width(columns: int, options: dict[str, Any], device: str) -> None:
    check_both(*made(6, columns, device), **options)


@pytest.mark.parametrize(
    "columns",
    [64, 257, 1024, 4096, 4098, 8200, 9001, 32_000, 50_257, 65_536, 151_936, 250_001, 262_152],
)
def test_losses_and_gradients_at_once_of_every_tile(columns: int, device: str) -> None:
    check_both(*made(6, columns, device), z_loss=0.01, ignore_index=IGNORED)


@pytest.mark.parametrize("columns", [64, 1001, 4096, 9216, 50_257, 131_072])
def test_gradients_at_once_of_rows_that_are_ignored_are_zero(columns: int, device: str) -> None:
    logits, target = made(6, columns, device)
    target[1::2] = -100
    logits[1::2] = torch.nan
    grad_loss = torch.ones(6, device=device)
    found = loss.cross_entropy_fwd_bwd(logits, target, grad_loss)
    assert not any(it[1::2].any() for it in found)


@pytest.mark.parametrize("dtype", [torch.float16, FULL, DOUBLE])
@pytest.mark.parametrize("columns", [5, 1031, 16391])
def test_other_formats(columns: int, dtype: torch.dtype, device: str) -> None:
    check_both(*made(6, columns, device, dtype), **OPTIONS["everything"])


@pytest.mark.parametrize("rows", [1, 2, 17, 131])
def test_blocks_with_more_rows_than_there_are(rows: int, device: str) -> None:
    check_both(*made(rows, 40, device))


@pytest.mark.parametrize("off", [1, 2, 4, 5])
@pytest.mark.parametrize("columns", [64, 1001, 4096, 5002])
def test_rows_that_begin_anywhere(columns: int, off: int, device: str) -> None:
    logits, target = made(6, columns + 7, device)
    check_both(logits[:, off : off + columns], target.clamp(max=columns - 1))


def test_the_alignment_of_a_row_does_not_change_its_bits(device: str) -> None:
    logits, target = made(6, 5003, device)
    logits[1:] = logits[0]
    target.fill_(17)
    loss_of_each, lse = loss.cross_entropy_fwd(logits, target)
    grads = loss.cross_entropy_bwd(torch.ones_like(lse), logits, target, lse)
    at_once = loss.cross_entropy_fwd_bwd(logits, target, torch.ones_like(lse))
    for found in (loss_of_each, lse, grads, *at_once):
        assert all(torch.equal(row, found[0]) for row in found)


def test_rows_that_are_ignored_may_hold_anything(device: str) -> None:
    logits, target = made(12, 1000, device)
    target[1::2] = -100
    logits[1::2] = torch.nan
    check_both(logits, target, label_smoothing=0.1)


def test_a_linear_layer_of_float32_is_declined_where_torch_multiplies_as_tf32(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cross_entropy, "_as_tf32", lambda tensor: tensor.dtype == FULL)
    input, weight = torch.randn(6, 8, device=device), torch.randn(40, 8, device=device)
    target = torch.arange(6, device=device)
    with pytest.raises(NotSupportedError, match="TF32"):
        loss.fused_linear_cross_entropy_fwd(input, weight, target)
    with pytest.raises(NotSupportedError, match="TF32"):
        loss.fused_linear_cross_entropy_bwd(input[:, 0], input, weight, target, input[:, 0])
    with pytest.raises(NotSupportedError, match="TF32"):
        loss.fused_linear_cross_entropy_fwd_bwd(input, weight, target, input[:, 0])
    check("fused_linear_cross_entropy_fwd", input.to(LOW), weight.to(LOW), target)


def test_a_linear_layer_in_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cross_entropy, "_FEWEST_WORDS", 16)
    monkeypatch.setattr(_cross_entropy, "_ROWS_AT_ONCE", (16, 16))
    monkeypatch.setattr(_cross_entropy, "_LOGITS", {"forward": 21 * 64, "backward": 21 * 48})
    generator = torch.Generator().manual_seed(2)
    for dtype in (FULL, LOW):
        input, weight, bias = (
            torch.randn(shape, generator=generator).to(device, dtype)
            for shape in ((21, 24), (203, 24), (203,))
        )
        target = torch.arange(21, device=device) * 9
        options = {"label_smoothing": 0.1, "softcap": 20.0}
        _, lse = check("fused_linear_cross_entropy_fwd", input, weight, target, bias, **options)
        grad = torch.linspace(-1, 1, 21).to(device)
        call = (grad, input, weight, target, lse, bias)
        check("fused_linear_cross_entropy_bwd", *call, **options)
        at_once = (input, weight, target, grad, bias)
        check("fused_linear_cross_entropy_fwd_bwd", *at_once, **options)


@pytest.mark.parametrize("dtype", [FULL, LOW])
@pytest.mark.parametrize("words", [208, 20_480, 128_256])
def test_a_linear_layer_whose_logits_are_read_once(
    words: int, dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(3)
    input, weight = (
        torch.randn(rows, 24, generator=generator).to(device, dtype) for rows in (5, words)
    )
    target = torch.tensor([0, words - 1, IGNORED, words // 2, words]).to(device)
    grad = torch.linspace(-1, 1, 5).to(device)
    options = {"z_loss": 0.01, "ignore_index": IGNORED}
    check_at_once(LINEAR, input, weight, target, grad, **options)


def test_the_gradient_of_a_narrow_weight_is_summed_whole_and_rounded_by_its_product(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cublas, multiply, seen = torch.backends.cuda.matmul, torch.mm, []

    def watched(left: Tensor, right: Tensor, *, out: Tensor, **how: Any) -> Tensor:
        seen.append((out.dtype, out.shape[0], cublas.allow_bf16_reduced_precision_reduction))
        return multiply(left, right, out=out, **how)

    input, weight = (torch.ones(rows, 24, dtype=LOW, device=device) for rows in (5, 40))
    target, row = torch.arange(5, device=device), torch.ones(5, device=device)
    monkeypatch.setattr(torch, "mm", watched)
    loss.fused_linear_cross_entropy_bwd(row, input, weight, target, row)
    of_weight = [(dtype, switch) for dtype, rows, switch in seen if rows == 40]
    assert of_weight == [(LOW, False)]
