"""Triton's cross entropy beyond the contract's samples: widths, alignment, parts, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_contract import checking
from losses_at_once import LINEAR, LOGITS, checking_losses
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_engine_fl.backends import _cross_entropy
from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos import loss as flagos
from transformer_engine_fl.backends.reference import loss as reference
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.ops import loss as contracts
from transformer_engine_fl.ops._dtypes import math_dtype
from transformer_engine_fl.testing import compare

check = checking(flagos)
check_at_once = checking_losses(check)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 8.0, "ignore_index": 3},
}
IGNORED = 3


def targets_of(logits: Tensor) -> Tensor:
    """Both ends of the vocabulary, the middle, the ignored word, and words that do not exist."""
    words = logits.shape[-1]
    some = torch.tensor([0, words - 1, words // 2, IGNORED, words, -7, 2**40])
    return some.repeat(len(logits))[: len(logits)].to(logits.device)


def check_logits(logits: Tensor, *calls: dict[str, Any]) -> None:
    """Check forward and backward with each of the options, and the statistics of a shard."""
    target = targets_of(logits)
    kind = math_dtype(logits.dtype)
    grads = torch.randn(2, len(logits), dtype=kind, device=logits.device)
    for options in calls:
        _, lse = check("cross_entropy_fwd", logits, target, **options)
        check("cross_entropy_bwd", grads[0], logits, target, lse, grads[1], **options)
        check_at_once(LOGITS, logits, target, grads[0], **options)
    shard = {"vocab_start": 1, "ignore_index": IGNORED}
    check("cross_entropy_partial_fwd", logits, target, **shard)


# ------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [2, 100, 1001, 2048, 9000, 40008])
def test_rows_of_every_width(columns: int, dtype: torch.dtype, device: str) -> None:
    rows = 7 if columns < 9000 else 3
    check_logits(torch.randn(rows, columns).to(device, dtype), *OPTIONS.values())


@pytest.mark.parametrize(
    ("columns", "dtype", "once"),
    [
        (4097, torch.bfloat16, True),
        (8193, torch.bfloat16, True),
        (8193, torch.float32, False),
        (20_481, torch.float32, True),
        (131_073, torch.bfloat16, False),
    ],
    ids=str,
)
def test_which_rows_in_no_whole_vectors_are_read_once(
    columns: int, dtype: torch.dtype, once: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(3, columns).to(device, dtype)
    said = []
    run_with_losses = flagos.run_with_losses

    def run(*args: Any) -> bool:
        said.append(run_with_losses(*args))
        return said[-1]

    monkeypatch.setattr(flagos, "run_with_losses", run)
    check_at_once(LOGITS, logits, targets_of(logits), torch.randn(3).to(device))
    assert set(said) == {once}


# Rows aligned to vectors, which end within one; unaligned rows, with the same alignment in input
# and gradient and whole vectors in their middle; and rows with different alignments.
PLACES = [(77, 96), (5001, 5024), (5001, 5009), (4100, 4100), (4097, 5001)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_rows_of_any_stride_and_alignment(
    place: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    columns, step = place
    memory = torch.randn(4, step).to(device, dtype)
    shifted = memory.view(-1)[1 : 1 + 3 * step].view(3, step)
    for rows in (memory[:3], shifted):
        check_logits(rows[:, :columns], OPTIONS["everything"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_gradients_of_rows_that_begin_anywhere_in_a_vector(
    place: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    columns, step = place
    logits = torch.randn(10, step).to(device, dtype)[:, :columns]
    lse = logits.to(math_dtype(dtype)).logsumexp(-1)
    check("cross_entropy_bwd", torch.randn_like(lse), logits, targets_of(logits), lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", [(1000, 1003), (4096, 4100), (4999, 5008)], ids=str)
def test_a_part_of_padded_rows_has_the_bits_that_it_has_among_all(
    place: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    columns, step = place
    logits = torch.randn(8, step).to(device, dtype)[:, :columns]
    target = torch.arange(8, device=device)
    whole = [*flagos.cross_entropy_fwd(logits, target)]
    whole.append(flagos.cross_entropy_partial_fwd(logits, target))
    for some in (slice(0, 1), slice(4, 5), slice(5, 8)):
        alone = [*flagos.cross_entropy_fwd(logits[some], target[some])]
        alone.append(flagos.cross_entropy_partial_fwd(logits[some], target[some]))
        assert all(torch.equal(a[some], b) for a, b in zip(whole, alone, strict=True))


def test_factors_of_more_rows_than_two_billion_numbers_have(device: str) -> None:
    """Factors are [4, count]: row 3 begins beyond an int32; only one program's part is touched."""
    count, rows = 2**31 // 3 + 1, flagos._MERGE_ROWS
    try:
        before = 2**31  # so that a wrapped int32 stays in this allocation
        factors = torch.empty(before + 4 * count, device=device)[before:]
    except RuntimeError:
        pytest.skip("no memory for them, though most of it stays untouched")
    target = torch.zeros(rows, dtype=torch.int64, device=device)
    numbers = torch.rand(3, rows, device=device)
    launch = flagos.launch_of(flagos._row_factors, factors.device, (), threads=rows, ROWS=rows)
    call = (target, numbers[0], numbers[1], numbers[2], None, factors)
    launch((1, 1), call, (count, -100, 8, 0.5, 0.5 / 8, 0.0))
    found = factors.view(4, count)[:, :rows]
    assert torch.equal(found[0], numbers[1])
    torch.testing.assert_close(found[1], numbers[0] + numbers[2])
    torch.testing.assert_close(found[2], numbers[0] * (0.5 + 0.5 / 8))
    torch.testing.assert_close(found[3], numbers[0] * (0.5 / 8))


@pytest.mark.parametrize("columns", [60, 5001])
def test_rows_that_are_ignored_are_not_looked_at(columns: int, device: str) -> None:
    logits = torch.randn(5, columns, device=device)
    target = torch.tensor([1, -100, 3, -100, 5], device=device)
    logits[target == -100] = torch.nan
    ones = torch.full((5,), torch.inf, device=device).masked_fill(target != -100, 1)
    loss, lse = check("cross_entropy_fwd", logits, target)
    gradient = flagos.cross_entropy_bwd(ones, logits, target, lse * ones, ones)
    assert torch.equal(gradient[target == -100], torch.zeros(2, columns, device=device))
    assert gradient.isfinite().all()
    assert loss.isfinite().all()


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # in the interpreter
@pytest.mark.parametrize("columns", [60, 64, 4096, 24_576])
def test_gradients_at_once_of_rows_that_are_ignored_are_zero(columns: int, device: str) -> None:
    logits = torch.randn(5, columns, device=device).bfloat16()
    target = torch.tensor([1, -100, columns - 1, -100, 5], device=device)
    logits[target == -100] = torch.nan
    loss, lse, gradient = flagos.cross_entropy_fwd_bwd(
        logits, target, torch.full((5,), 0.2, device=device)
    )
    for found in (loss, lse, gradient):
        assert not found[target == -100].any()
        assert found.isfinite().all()
    at_target = gradient[target != -100].gather(1, target[target != -100].unsqueeze(1))
    assert (at_target < 0).all()
    assert (gradient.sum(-1).abs() < 0.01).all()


@pytest.mark.parametrize("columns", [64, 129, 1002, 5003, 9000, 20_482])
def test_a_row_does_not_depend_on_the_rows_around_it(columns: int, device: str) -> None:
    logits = torch.randn(67 if columns < 2000 else 5, columns, device=device).bfloat16()
    target = torch.randint(0, columns, (len(logits),), device=device)
    loss, lse = flagos.cross_entropy_fwd(logits, target)
    stats = flagos.cross_entropy_partial_fwd(logits, target)
    gradient = flagos.cross_entropy_bwd(loss, logits, target, lse)
    all_at_once = flagos.cross_entropy_fwd_bwd(logits, target, loss)
    for first in (0, len(logits) // 2, len(logits) - 1):
        some = slice(first, first + 2)
        part = logits[some], target[some]
        assert torch.equal(flagos.cross_entropy_fwd(*part)[0], loss[some])
        assert torch.equal(flagos.cross_entropy_partial_fwd(*part), stats[some])
        alone = flagos.cross_entropy_bwd(loss[some], *part, lse[some])
        assert torch.equal(alone, gradient[some])
        at_once = flagos.cross_entropy_fwd_bwd(*part, loss[some])
        assert all(torch.equal(one, it[some]) for one, it in zip(at_once, all_at_once, strict=True))


@pytest.mark.parametrize("options", OPTIONS)
def test_shards_of_any_width_make_the_whole(options: str, device: str) -> None:
    logits = torch.randn(9, 7000, device=device)
    target = torch.randint(0, 7000, (9,), device=device)
    target[4] = IGNORED
    given = OPTIONS[options]
    widths, starts = (96, 4001, 2903), (0, 96, 4097)
    own = {name: it for name, it in given.items() if name in ("ignore_index", "softcap")}
    stats = torch.stack(
        [
            flagos.cross_entropy_partial_fwd(part, target, vocab_start=start, **own)
            for start, part in zip(starts, logits.split(widths, -1), strict=True)
        ]
    )
    others = {name: it for name, it in given.items() if name != "softcap"}
    merged = flagos.cross_entropy_merge(stats, target, vocab_size=7000, **others)
    whole = contracts.cross_entropy_fwd.oracle(logits, target, **given)
    tolerance = contracts.cross_entropy_fwd.tolerance["float32"]
    for value, expected in zip(merged, whole, strict=True):
        assert compare(value, expected, tolerance).ratio <= 1


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_scores_under_a_cap_are_as_exact_as_float32_where_tanh_is_put_together(
    cap: float, device: str
) -> None:
    """A shard of one word has its capped score, ``cap * tanh(x / cap)``, in its statistics."""
    u = torch.cat((torch.logspace(-6, 0.5, 200), torch.linspace(0.5, 0.75, 200)))
    logits = (cap * torch.cat((u, -u)))[:, None].to(device)
    target = torch.zeros(len(logits), dtype=torch.int64, device=device)
    stats = flagos.cross_entropy_partial_fwd(logits, target, softcap=cap)
    expected = cap * torch.tanh(logits[:, 0].double() / cap)
    error = (stats[:, 2] - expected).abs() / expected.abs()
    assert error.max() < 4 * torch.finfo(torch.float32).eps


# ---------------------------------------------------------------------- linear layers


def linear_call(
    dtype: torch.dtype, device: str, words: int = 203
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, weight, target and bias."""
    input = torch.randn(21, 24).to(device, dtype)
    weight = (torch.randn(words, 24) / 5).to(device, dtype)
    target = torch.randint(0, words, (21,), device=device)
    target[5] = IGNORED
    return input, weight, target, torch.randn(words).to(device, dtype)


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of linear layers are computed for a few words, or rows, at a time."""
    monkeypatch.setattr(_cross_entropy, "_ROWS_AT_ONCE", (16, 16))
    monkeypatch.setattr(_cross_entropy, "_LOGITS", {"forward": 21 * 64, "backward": 21 * 48})
    monkeypatch.setattr(_cross_entropy, "_FEWEST_WORDS", 16)


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_linear_layers_in_parts(options: str, dtype: torch.dtype, device: str) -> None:
    input, weight, target, bias = linear_call(dtype, device)
    given = OPTIONS[options]
    _, lse = check("fused_linear_cross_entropy_fwd", input, weight, target, bias, **given)
    grads = torch.randn(2, 21, device=device)
    call = (grads[0], input, weight, target, lse, bias, grads[1])
    check("fused_linear_cross_entropy_bwd", *call, **given)
    check_at_once(LINEAR, input, weight, target, grads[0], bias, **given)


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("words", [208, 4096, 20_480])
def test_linear_layers_whose_logits_are_read_once(
    words: int, dtype: torch.dtype, device: str
) -> None:
    input, weight, target, _ = linear_call(dtype, device, words)
    target[1], target[2] = words - 1, 0
    check_at_once(LINEAR, input, weight, target, torch.rand(21, device=device), None, z_loss=0.01)


@pytest.mark.parametrize(
    ("rows", "features", "most"),
    [(5, 24, 5), (1024, 24, 1024), (10_000, 24, 1024), (9_000, 2048, 2048), (9_001, 2**14, 4096)],
)
def test_the_logits_of_so_many_rows_are_made_at_once(rows: int, features: int, most: int) -> None:
    parts = _cross_entropy._rows_at_once(rows, features)
    sizes = [part.stop - part.start for part in parts]
    assert [row for part in parts for row in range(rows)[part]] == list(range(rows))
    assert max(sizes) <= most
    assert len(parts) == -(-rows // most)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("words", [8192, 20_001])
@pytest.mark.parametrize("with_bias", [True, False])
def test_hopper_s_linear_layers_store_no_logits(
    words: int, dtype: torch.dtype, with_bias: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() != (9, 0) or not _launch.has_gluon():
        pytest.skip("needs a Hopper GPU, and a Triton whose Gluon is known")
    rows, hidden = 300, 520
    monkeypatch.setattr(_cross_entropy, "_LOGITS", {"forward": rows * 64, "backward": rows * 2048})
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    input, weight = normal(rows, hidden), normal(words, hidden) / 8
    bias = normal(words) if with_bias else None
    # Few rows have the same target: their gradients for its word would cancel, but for rounding.
    target = torch.randperm(words, generator=generator)[:rows].to(device)
    target[:4] = torch.tensor([0, words - 1, IGNORED, IGNORED])
    missing = target.clone()
    missing[4:6] = torch.tensor([words, 2**40])
    options = {**OPTIONS["everything"], "softcap": None}
    assert flagos._for_hopper(input, weight, flagos.options_of("a test's", **options))
    grads = torch.linspace(0.5, 1, rows, device=device)
    for given in ({}, options):
        check("fused_linear_cross_entropy_fwd", input, weight, missing, bias, **given)
        _, lse = check("fused_linear_cross_entropy_fwd", input, weight, target, bias, **given)
        call = (grads, input, weight, target, lse, bias, grads / 8 if given else None)
        exact = reference.fused_linear_cross_entropy_bwd(*map(as_double, call), **given)
        # Either kernel rounds gradients before it sums them, so both have errors of the same size.
        found = flagos.fused_linear_cross_entropy_bwd(*call, **given)
        with monkeypatch.context() as patch:
            patch.setattr(flagos, "_for_hopper", lambda *_: None)
            others = flagos.fused_linear_cross_entropy_bwd(*call, **given)
        for one, other, value in zip(found, others, exact, strict=True):
            if value is not None:
                errors = [(it.double() - value).square().mean().sqrt() for it in (one, other)]
                assert errors[0] <= 1.05 * errors[1]
                assert errors[0] <= 0.01 * value.square().mean().sqrt()
    if bias is None:  # logits of an ignored row may overflow
        target[2:] = IGNORED
        huge = input.abs()
        huge[5] = torch.finfo(dtype).max
        linear, ignored = (huge, weight.abs() * 16, target), {"ignore_index": IGNORED}
        _, lse = flagos.fused_linear_cross_entropy_fwd(*linear, **ignored)
        found = flagos.fused_linear_cross_entropy_bwd(grads, *linear, lse, **ignored)
        assert all(it is None or it.isfinite().all() for it in found)
        assert found[0][2:].count_nonzero() == 0
        # NaN in a row shows in its gradient, even if the gradient of its loss is 0.
        broken, nothing = input.clone(), torch.zeros_like(grads)
        broken[0] = torch.nan
        _, lse = flagos.fused_linear_cross_entropy_fwd(broken, weight, target, **ignored)
        call = (nothing, broken, weight, target, lse)
        assert flagos.fused_linear_cross_entropy_bwd(*call, **ignored)[0][0].isnan().all()
    else:  # must not reach the gradients of ignored rows
        bias[3:6] = torch.tensor([100.0, torch.inf, torch.nan])
        every = torch.full_like(target, IGNORED)
        call = (grads, input, weight, every, torch.zeros_like(grads), bias, None)
        found = flagos.fused_linear_cross_entropy_bwd(*call, ignore_index=IGNORED)
        assert not any(it is None or it.any() for it in found)


@pytest.mark.parametrize(
    ("rows", "features", "words", "what"),
    [(2**31, 8, 8, "rows"), (8, 2**31, 8, "features"), (8, 8, 2**31, "words")],
)
def test_hopper_s_linear_layers_decline_what_their_kernel_cannot_count(
    rows: int, features: int, words: int, what: str
) -> None:
    hopper = pytest.importorskip("transformer_engine_fl.backends.flagos._loss_hopper")
    input = torch.empty(rows, features, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(words, features, dtype=torch.bfloat16, device="meta")
    target = torch.empty(rows, dtype=torch.int64, device="meta")
    stats = torch.empty(-(-words // hopper.COLUMNS), rows, 4, device="meta")
    with pytest.raises(NotSupportedError, match=f"2147483648 {what}"):
        hopper.store_statistics("a_test", input, weight, None, target, stats)


def as_double(value: Tensor | None) -> Tensor | None:
    return value.double() if value is not None and value.is_floating_point() else value


class Largest(TorchDispatchMode):
    """Records the size of the largest result."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.untyped_storage().nbytes() // 4)
        return result


@pytest.mark.usefixtures("in_parts")
def test_linear_layers_of_float32_are_exact_where_torch_s_products_are_not(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounded(*args: object, **kwargs: object) -> None:
        raise AssertionError("torch multiplies this as TF32")

    monkeypatch.setattr(_cross_entropy, "_as_tf32", lambda tensor: tensor.dtype == torch.float32)
    monkeypatch.setattr(_cross_entropy, "_LOGITS", {"forward": 1, "backward": 1})
    input, weight, target, bias = linear_call(torch.float32, device)
    with monkeypatch.context() as patched:
        for name in ("mm", "addmm", "matmul"):
            patched.setattr(torch, name, rounded)
        _, lse = flagos.fused_linear_cross_entropy_fwd(input, weight, target, bias)
        call = (lse, input, weight, target, lse, bias)
        flagos.fused_linear_cross_entropy_bwd(*call)
        flagos.fused_linear_cross_entropy_fwd_bwd(input, weight, target, lse, bias)
    check_at_once(LINEAR, input, weight, target, lse, bias)
    check("fused_linear_cross_entropy_fwd", input, weight, target, bias)
    check("fused_linear_cross_entropy_bwd", *call)


def test_linear_layers_never_hold_all_logits(device: str) -> None:
    input, weight, target, bias = linear_call(torch.float32, device, words=1000)
    with Largest() as largest:
        _, lse = flagos.fused_linear_cross_entropy_fwd(input, weight, target, bias)
        flagos.fused_linear_cross_entropy_bwd(lse, input, weight, target, lse, bias)
    assert largest.numel == weight.numel(), "the largest is the weight's gradient"
    assert largest.numel > 21 * 64


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("adds", [True, False])
def test_matrix_products_are_widened_by_torch_where_it_can(
    adds: bool, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    multiply, add = torch.mm, torch.addmm
    calls = []

    def mm(left: Tensor, right: Tensor, *, out: Tensor, out_dtype: Any = None) -> Tensor:
        calls.append((left.dtype, out_dtype))
        return multiply(left.to(out.dtype), right.to(out.dtype), out=out)

    def addmm(
        total: Tensor, left: Tensor, right: Tensor, *, out: Tensor, out_dtype: Any = None
    ) -> Tensor:
        if not adds:
            raise RuntimeError("self and mat2 must have the same dtype")
        calls.append((left.dtype, out_dtype))
        return add(total, left.to(out.dtype), right.to(out.dtype), out=out)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(_cross_entropy, "_WIDENS", {})
    monkeypatch.setattr(_cross_entropy, "_ADDS", {})
    input, weight, target, _ = linear_call(torch.bfloat16, device)
    _, lse = check("fused_linear_cross_entropy_fwd", input, weight, target)
    check("fused_linear_cross_entropy_bwd", lse, input, weight, target, lse)
    assert set(calls) == {(torch.bfloat16, torch.float32)}


def test_an_unrelated_error_does_not_mark_adding_products_as_unsupported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_cross_entropy, "_ADDS", {})
    total, narrow = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)

    def failing(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")

    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, failing)
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        _cross_entropy._add_product(total, narrow, narrow)
    assert _cross_entropy._ADDS.get("cpu", True)


def test_the_scale_of_float16_gradients_is_not_that_of_ignored_rows(device: str) -> None:
    input, weight, target, bias = linear_call(torch.float16, device)
    lse = flagos.fused_linear_cross_entropy_fwd(input, weight, target, bias)[1]
    grad = torch.full((21,), 2.0**-9, device=device)
    grad[target == IGNORED] = torch.inf
    call = (grad, input, weight, target, lse, bias)
    check("fused_linear_cross_entropy_bwd", *call, ignore_index=IGNORED)


# ---------------------------------------------------------------------------- arguments


def test_tensors_without_memory_are_declined(device: str) -> None:
    input, weight, target, _ = linear_call(torch.float32, device, words=40)
    row = torch.ones(21, device=device)
    logits = input @ weight.t()
    calls: list[Callable[[Tensor], Any]] = [
        lambda x: flagos.cross_entropy_fwd(x + logits, target),
        lambda x: flagos.cross_entropy_partial_fwd(x + logits, target),
        lambda x: flagos.cross_entropy_bwd(row, x + logits, target, row),
        lambda x: flagos.cross_entropy_merge(
            (x + row)[None, :, None].expand(1, 21, 4), target, vocab_size=40
        ),
        lambda x: flagos.fused_linear_cross_entropy_fwd(input, x + weight, target),
        lambda x: flagos.fused_linear_cross_entropy_bwd(x + row, input, weight, target, row),
        lambda x: flagos.fused_linear_cross_entropy_fwd_bwd(input, weight, target, x + row),
    ]
    for call in calls:
        with pytest.raises(NotSupportedError):
            torch.vmap(call)(torch.zeros(2, device=device))
