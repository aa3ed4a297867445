"""The kit catches each kind of fault: sets that are broken on purpose."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import ops, testing
from transformer_engine_fl.backends.reference import epilogue as epilogues
from transformer_engine_fl.backends.reference import normalization as reference
from transformer_engine_fl.ops import _checks as check
from transformer_engine_fl.testing.arguments import clone, cropped

Rms = Callable[..., tuple[Tensor, Tensor]]


def right(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    options = {"zero_centered_gamma": zero_centered_gamma, "out_dtype": out_dtype}
    return reference.rmsnorm_fwd(input, weight, eps, **options)


def broken(change: Callable[[Tensor, Tensor, Tensor, Tensor], Any]) -> Rms:
    """The right operator, with ``change(output, rsigma, input, weight)`` as its result."""

    def operator(
        input: Tensor,
        weight: Tensor,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> Any:
        options = {"zero_centered_gamma": zero_centered_gamma, "out_dtype": out_dtype}
        return change(*right(input, weight, eps, **options), input, weight)

    return operator


def low_precision(output: Tensor, rsigma: Tensor, input: Tensor, weight: Tensor) -> Any:
    return output, rsigma.half().float()


def transposed(output: Tensor) -> Tensor:
    return output.transpose(0, -1).contiguous().transpose(0, -1)


def off_by_one_row(output: Tensor, rsigma: Tensor, input: Tensor, weight: Tensor) -> Any:
    return output.roll(1, 0), rsigma


def an_element_unwritten(output: Tensor, rsigma: Tensor, input: Tensor, weight: Tensor) -> Any:
    fresh = torch.empty_like(output)
    fresh.view(-1)[:-1] = output.view(-1)[:-1]
    return fresh, rsigma


def written_outside(output: Tensor, rsigma: Tensor, input: Tensor, weight: Tensor) -> Any:
    fresh = torch.empty_like(output)
    fresh.copy_(output)
    behind = fresh.storage_offset() + fresh.numel()
    if fresh.untyped_storage().nbytes() > behind * fresh.element_size():
        fresh.as_strided((1,), (1,), behind).zero_()
    return fresh, rsigma


def input_scaled(output: Tensor, rsigma: Tensor, input: Tensor, weight: Tensor) -> Any:
    input.mul_(2)
    return output, rsigma


_calls = [0]


def different_each_time(output: Tensor, rsigma: Tensor, input: Tensor, weight: Tensor) -> Any:
    _calls[0] += 1
    return output * (1 + 1e-7 * _calls[0]), rsigma


def stale(output: Tensor, rsigma: Tensor, input: Tensor, weight: Tensor) -> Any:
    kept = _kept.setdefault((output.shape, output.dtype), output)
    return kept, rsigma


_kept: dict[Any, Tensor] = {}


def reused(output: Tensor, rsigma: Tensor, input: Tensor, weight: Tensor) -> Any:
    kept = _buffers.setdefault((output.shape, output.dtype), torch.zeros_like(output))
    return kept.copy_(output), rsigma


_buffers: dict[Any, Tensor] = {}


def remembered(output: Tensor, rsigma: Tensor, input: Tensor, weight: Tensor) -> Any:
    """Caches a result by the weight's address and keeps the weight alive, as a cache of converted
    weights might.
    """
    kept = _weights.setdefault(weight.data_ptr(), (weight, output.clone()))[1]
    return (kept.clone() if kept.shape == output.shape else output), rsigma


_weights: dict[int, tuple[Tensor, Tensor]] = {}


def padding_cleared(output: Tensor, rsigma: Tensor, input: Tensor, weight: Tensor) -> Any:
    if not input.is_contiguous() and input.ndim == 2 and input.stride(0) > input.shape[1]:
        beside = input.stride(0) - input.shape[1]
        input.as_strided((1, beside), input.stride(), input.shape[1]).zero_()
    return output, rsigma


def depending_on_the_rows(output: Tensor, rsigma: Tensor, input: Tensor, weight: Tensor) -> Any:
    return output * (1 + 2e-7 * (input.shape[0] > 200)), rsigma


FAULTS: dict[str, tuple[Rms, str]] = {
    "statistics of another dtype": (broken(lambda y, r, x, w: (y, r.double())), "shape rule"),
    "statistics of low precision": (broken(low_precision), "allowed error"),
    "outputs swapped": (broken(lambda y, r, x, w: (r, y)), "shape rule"),
    "an output missing": (broken(lambda y, r, x, w: (y,)), "1 outputs, not 2"),
    "strides of its own": (broken(lambda y, r, x, w: (transposed(y), r)), "has strides"),
    "off by one row": (broken(off_by_one_row), "allowed error"),
    "an element unwritten": (broken(an_element_unwritten), "allowed error"),
    "written outside": (broken(written_outside), "written after a buffer"),
    "an input written": (broken(input_scaled), "wrote to its input 'input'"),
    "a stale buffer": (broken(stale), "allowed error"),
    "an output of the call before reused": (
        broken(reused),
        "overwrote an output of the previous call",
    ),
    "a result remembered by address": (broken(remembered), "/repeated/typical"),
    "the padding of an input written": (broken(padding_cleared), "wrote to its input 'input'"),
    "not deterministic": (broken(different_each_time), "differ in their bits"),
    "not batch invariant": (broken(depending_on_the_rows), "bits from the same rows among 257"),
}


def cases(fn: Callable[..., Any], **fields: Any) -> list[testing.Case]:
    return list(testing.cases("vendor.broken", dtypes=["float32"], manager=holding(fn, **fields)))


def holding(
    fn: Callable[..., Any],
    contract: te.Contract[..., Any] = ops.rmsnorm_fwd,
    **fields: Any,
) -> te.OpManager:
    registry = te.OpRegistry({contract.name: contract})
    registry.register_impl(
        te.OpImpl(contract.name, "vendor.broken", "vendor", fn, vendor="broken", **fields)
    )
    return te.OpManager(registry, builtins=False, plugins=False)


def failures(fn: Callable[..., Any], **fields: Any) -> list[str]:
    found = []
    for case in cases(fn, **fields):
        try:
            case.run()
        except testing.ConformanceError as error:
            found.append(str(error))
    return found


def assert_caught(fn: Callable[..., Any], words: str, **fields: Any) -> None:
    found = failures(fn, **fields)
    assert any(words in failure for failure in found), found


def leaving(change: Callable[[], Any]) -> Rms:
    """The right operator with a side effect, ``change``."""

    def also(output: Tensor, rsigma: Tensor, input: Tensor, weight: Tensor) -> Any:
        change()
        return output, rsigma

    return broken(also)


def autocasting() -> None:
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)


SETTINGS: dict[str, tuple[Callable[[], Any], str]] = {
    "gradients": (
        lambda: torch._C._set_grad_enabled(False),
        "whether gradients are recorded (True before, now False)",
    ),
    "dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        "the default dtype (torch.float32 before, now torch.float64)",
    ),
    "device": (
        lambda: torch.set_default_device("meta"),
        "the default device (cpu before, now meta)",
    ),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        "use_deterministic_algorithms (False before, now True, warning only)",
    ),
    "autocast": (autocasting, "autocast (cpu off before, now cpu torch.float16"),
    "a seed": (lambda: torch.manual_seed(3), "the state of torch's default generator"),
    "a draw": (lambda: torch.rand(1), "the state of torch's default generator"),
}


def settings() -> Any:
    """The state that :data:`SETTINGS` change."""
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.random.get_rng_state().tolist(),
    )


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_of_torchs_that_is_left_changed_is_caught_and_put_back(setting: str) -> None:
    change, words = SETTINGS[setting]
    before = settings()
    found = failures(leaving(change))
    assert settings() == before
    assert all(f"did not restore: {words}" in it for it in found), found
    assert {it.split("/")[3] for it in found} >= {
        "values",
        "repeated",
        "outputs never require grad",
        "fake tensors",
    }


def test_a_setting_that_a_refusal_or_an_error_leaves_changed_is_caught_and_put_back() -> None:
    for raised in (te.NotSupportedError("not today"), ZeroDivisionError("over")):

        def operator(input: Tensor, weight: Tensor, eps: float = 1e-5) -> Any:
            torch.set_default_dtype(torch.float64)
            raise raised  # noqa: B023 - it is called in this round

        assert_caught(operator, "did not restore: the default dtype")
        assert torch.get_default_dtype() is torch.float32


def test_settings_of_the_programs_own_are_no_fault_and_stay() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert failures(right) == []
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_set_is_caught(fault: str) -> None:
    fn, words = FAULTS[fault]
    assert_caught(fn, words, traits=["deterministic", "batch_invariant"])


def test_outputs_swapped_that_look_alike_are_caught() -> None:
    def swapped(
        dy: Tensor,
        x: Tensor,
        mu: Tensor,
        rsigma: Tensor,
        gamma: Tensor,
        *,
        zero_centered_gamma: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        options = {"zero_centered_gamma": zero_centered_gamma}
        dx, dgamma, dbeta = reference.layernorm_bwd(dy, x, mu, rsigma, gamma, **options)
        return dx, dbeta, dgamma

    assert_caught(swapped, "output 1: element", contract=ops.layernorm_bwd)


def test_the_only_output_in_a_tuple_is_caught() -> None:
    def in_a_tuple(input: Tensor) -> tuple[Tensor]:
        return (torch.nn.functional.silu(input),)

    assert_caught(in_a_tuple, "returned a tuple", contract=ops.silu)


def test_outputs_in_a_list_are_caught_as_such() -> None:
    def silu(input: Tensor) -> list[Tensor]:
        return [torch.nn.functional.silu(input)]

    def rmsnorm_fwd(input: Tensor, weight: Tensor, eps: float = 1e-5) -> list[Tensor]:
        return [*reference.rmsnorm_fwd(input, weight, eps)]

    said = "returned a list; must return"
    assert_caught(silu, f"{said} the output itself", contract=ops.silu)
    assert_caught(rmsnorm_fwd, f"{said} a tuple", contract=ops.rmsnorm_fwd)


def test_the_right_one_passes() -> None:
    assert failures(right, traits=["deterministic"]) == []
    assert [case.name for case in cases(right) if case.run().declined] == []


# ----------------------------------------------------------------------------- declining


def declining(input: Tensor, weight: Tensor, eps: float = 1e-5) -> Any:
    raise te.NotSupportedError("not today")


def test_one_that_declines_everything_is_caught() -> None:
    for fields in ({}, {"supports": lambda *args, **kwargs: "not today"}):
        assert_caught(declining, "declines the typical sample", **fields)
    assert_caught(declining, "not today")


def test_memory_that_runs_out_in_supports_is_no_decline() -> None:
    def full(*args: Any, **kwargs: Any) -> bool:
        raise torch.OutOfMemoryError("no room for a plan")

    assert_caught(right, "values/typical raised OutOfMemoryError", supports=full)


def test_a_sample_may_be_declined_and_the_outcome_says_why() -> None:
    def plain(input: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
        ops.rmsnorm_fwd.check(input, weight, eps)
        if not input.is_contiguous():
            raise te.NotSupportedError("contiguous inputs only")
        return right(input, weight, eps)

    assert failures(plain) == []
    declined = {case.name.split("/", 3)[-1]: case.run().declined for case in cases(plain)}
    assert declined["values/transposed"] == "contiguous inputs only"
    assert "zero_centered_gamma" in str(declined["values/zero_centered_gamma=True"])
    assert declined["values/typical"] is None


def test_an_unknown_set_operator_or_dtype_is_an_error_that_names_the_nearest() -> None:
    manager = holding(right, devices=["cuda"])
    with pytest.raises(te.UnknownOperatorError, match=r"did you mean 'vendor\.broken'"):
        testing.cases("vendor.brokn", manager=manager)
    with pytest.raises(te.UnknownOperatorError):
        testing.cases("vendor.broken", operators=["rmsnorm_bwd"], manager=manager)
    with pytest.raises(te.ConfigurationError, match="did you mean 'float32'"):
        testing.cases("vendor.broken", dtypes=["flaot32"], manager=holding(right))
    with pytest.raises(te.ConfigurationError, match="runs on cuda only"):
        testing.cases("vendor.broken", device="cpu", manager=manager)


# ------------------------------------------------------------------------------ refusing


def test_one_that_checks_nothing_is_caught() -> None:
    def trusting(
        input: Tensor,
        weight: Tensor,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        rsigma = (input.float().square().mean(-1) + eps).rsqrt()
        gain = weight + 1 if zero_centered_gamma else weight
        return (input * rsigma[..., None] * gain).to(out_dtype or input.dtype), rsigma.flatten()

    for what in (
        "one dimension too many as weight",
        "dtype int32 as input",
        "a tensor on meta as weight",
        "a negative number as eps",
        "NaN as eps",
        "an int as zero_centered_gamma",
        "None as zero_centered_gamma",
        "a dict as out_dtype",
    ):
        assert_caught(trusting, f"/refuses/{what}: ")


def test_one_that_writes_before_it_refuses_is_caught() -> None:
    def hasty(
        input: Tensor,
        weight: Tensor,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {
            "zero_centered_gamma": zero_centered_gamma,
            "out_dtype": out_dtype,
        }
        try:
            return right(input, weight, eps, **options)
        except te.ArgumentError:
            if isinstance(input, Tensor):
                input.zero_()
            raise

    found = failures(hasty)
    assert found
    assert all("/refuses/" in it and "wrote to its input 'input'" in it for it in found), found


def test_outputs_that_require_grad_are_caught() -> None:
    fn = broken(lambda y, r, x, w: (y * w.sum() / w.sum().detach(), r))
    for sample in ("typical", "eps=0.01", "transposed"):
        assert_caught(fn, f"outputs never require grad/{sample}: ")


def test_wrong_shapes_of_fake_tensors_are_caught() -> None:
    def faked(y: Tensor, r: Tensor, x: Tensor, w: Tensor) -> Any:
        return y, (r[None] if x.is_meta or type(x) is not Tensor else r)

    assert_caught(broken(faked), "wrong shapes for fake tensors")


# ------------------------------------------------------------------------------- writing


def _accumulate_check(op: str, total: Any, parts: Any, scale: Any) -> None:
    if not isinstance(scale, Tensor) or scale.shape != ():
        raise te.ArgumentError(op, "scale", repr(scale), "a tensor of one number")
    if not isinstance(total, Tensor) or total.dtype != torch.float32:
        raise te.ArgumentError(op, "total", repr(total), "a float32 tensor")
    if not isinstance(parts, list) or not all(
        isinstance(it, Tensor) and it.shape == total.shape and it.dtype == total.dtype
        for it in parts
    ):
        raise te.ArgumentError(op, "parts", repr(parts), "tensors as 'total'")


def _accumulate_samples(dtype: str, device: str) -> Iterator[te.Sample]:
    values = torch.linspace(-1, 1, 4 * 6, device=device).view(4, 6)
    scale = torch.tensor(0.5, device=device)
    yield te.Sample("typical", (values, [values.flip(0), values * 3]), {"scale": scale})
    padded = torch.ones(4, 8, device=device)[:, :6]
    yield te.Sample("padded", (padded, [values]), {"scale": scale})


def _accumulate_oracle(total: Tensor, parts: list[Tensor], *, scale: Tensor) -> Any:
    after = total.double() + sum(it.double() for it in parts) * scale.double()
    return after > 0, after


@te.contract(
    family="example",
    check=_accumulate_check,
    samples=_accumulate_samples,
    tolerance={"float32": te.Tolerance(1e-6, 1e-6)},
    oracle=_accumulate_oracle,
    mutates=("total",),
)
def accumulate(total: Tensor, parts: list[Tensor], *, scale: Tensor) -> Tensor:
    """``total += scale * sum(parts)``; returns where it is positive."""
    return torch.empty_like(total, dtype=torch.bool, memory_format=torch.contiguous_format)


def accumulating(change: Callable[[Tensor, list[Tensor], Tensor], Any]) -> Callable[..., Tensor]:
    @torch.no_grad()
    def operator(total: Tensor, parts: list[Tensor], *, scale: Tensor) -> Tensor:
        accumulate.check(total, parts, scale=scale)
        for part in parts:
            total.add_(part * scale)
        positive = (total > 0).contiguous()
        changed = change(total, parts, scale)
        return changed if isinstance(changed, Tensor) and changed.dtype == torch.bool else positive

    return operator


@pytest.mark.parametrize(
    ("label", "asked"),
    [("three dimensions, block_128x128", False), ("typical, block_1x128", True)],
)
def test_rows_that_share_a_scale_are_not_tested_for_batch_invariance(
    label: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds for a sample in three dimensions, which the oracle treats in two."""
    contract, fn = ops.clamped_swiglu_quantize, epilogues.clamped_swiglu_quantize
    whole = contract.samples
    some = lambda *where: (it for it in whole(*where) if it.label == label)  # noqa: E731
    monkeypatch.setattr(contract, "samples", some)
    names = [it.name for it in cases(fn, contract=contract, traits=["batch_invariant"])]
    assert any("/values/" in name for name in names)
    assert any("/batch invariant/" in name for name in names) is asked


def test_an_operator_that_writes_what_it_declares_passes() -> None:
    fn = accumulating(lambda total, parts, scale: None)
    traits = ["deterministic", "batch_invariant"]
    assert failures(fn, contract=accumulate, traits=traits) == []
    names = [case.name for case in cases(fn, contract=accumulate, traits=traits)]
    assert any("batch invariant" in name for name in names)
    assert any("refuses/None inside as parts" in name for name in names)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda total, parts, scale: total.add_(1e-3), "argument 'total': element"),
        (lambda total, parts, scale: scale.mul_(2), "wrote to its input 'scale'"),
        (lambda total, parts, scale: parts[-1].neg_(), "wrote to its input 'parts'"),
        (lambda total, parts, scale: total <= 0, "output 0: element"),
        (
            lambda total, parts, scale: total.as_strided(
                (4, total.stride(0)), total.stride()
            ).abs_(),
            "argument 'total': element",
        ),
        (
            lambda total, parts, scale: total.as_strided((1,), (1,), total.stride(0) - 1).fill_(7),
            "the memory beside its input 'total'",
        ),
    ],
    ids=["wrong values", "a keyword", "in a list", "a wrong bool", "all wrong", "adjacent memory"],
)
def test_writing_anything_else_is_caught(change: Callable[..., Any], words: str) -> None:
    assert_caught(accumulating(change), words, contract=accumulate)


# --------------------------------------------------------------------------- lists of tensors


def _blend_check(op: str, totals: Any, parts: Any, weight: Any, counts: Any, flag: Any) -> None:
    check.are_tensors(op, "totals", totals, dtypes=["float32"])
    check.are_tensors(op, "parts", parts, dtypes=["float32"])
    check.are_like(op, "parts", parts, "totals", totals)
    check.is_number(op, "weight", weight, at_least=0)
    if counts is not None:
        check.are_tensors(op, "counts", counts, dtypes=["int32"])
        check.are_like(op, "counts", counts, "totals", totals)
    if flag is not None:
        check.is_tensor(op, "flag", flag, dtypes=["int32"])
        check.has_shape(op, "flag", flag, (1,), "one element")
        check.same_device(op, "flag", {"totals": (*totals, flag)[0], "flag": flag})


def _blend_samples(dtype: str, device: str) -> Iterator[te.Sample]:
    shapes = ((3, 4), (5,), (0, 2), ())
    totals = [torch.full(shape, 2.0, device=device) for shape in shapes]
    parts = [torch.full(shape, -3.0, device=device) for shape in shapes]
    counts = [torch.full(shape, 7, dtype=torch.int32, device=device) for shape in shapes]
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    yield te.Sample("typical", (totals, parts, 0.5))
    yield te.Sample("counted", (totals, parts, 0.5), {"counts": counts, "flag": flag})
    yield te.Sample("no tensors", ([], [], 0.5))
    beside = [torch.ones(4, 8, device=device)[:, :6], torch.ones(3, device=device)[1:]]
    yield te.Sample("strided", (beside, [torch.ones_like(it) for it in beside], 0.5))


def _blend_oracle(
    totals: list[Tensor],
    parts: list[Tensor],
    weight: float,
    *,
    counts: list[Tensor] | None = None,
    flag: Tensor | None = None,
) -> Any:
    after = [t.double() + weight * p.double() for t, p in zip(totals, parts, strict=True)]
    counted = None if counts is None else [it.double() + 1 for it in counts]
    return after, after, counted, None if flag is None else flag.double() + 1


@te.contract(
    family="example",
    check=_blend_check,
    samples=_blend_samples,
    tolerance={"float32": te.Tolerance(1e-6, 1e-6)},
    oracle=_blend_oracle,
    mutates=("totals", "counts", "flag"),
)
def blend(
    totals: list[Tensor],
    parts: list[Tensor],
    weight: float,
    *,
    counts: list[Tensor] | None = None,
    flag: Tensor | None = None,
) -> list[Tensor]:
    """``totals += weight * parts``; counts and flag go up by one. Returns copies of the totals."""
    return [torch.empty_like(it, memory_format=torch.contiguous_format) for it in totals]


Lists = Callable[[list[Tensor], list[Tensor]], object]


def blending(change: Lists) -> Callable[..., list[Tensor]]:
    @torch.no_grad()
    def operator(
        totals: list[Tensor],
        parts: list[Tensor],
        weight: float,
        *,
        counts: list[Tensor] | None = None,
        flag: Tensor | None = None,
    ) -> list[Tensor]:
        blend.check(totals, parts, weight, counts=counts, flag=flag)
        for total, part in zip(totals, parts, strict=True):
            total.add_(part, alpha=weight)
        for it in (*(counts or ()), *(() if flag is None else (flag,))):
            it.add_(1)
        copies = [it.clone(memory_format=torch.contiguous_format) for it in totals]
        if totals:
            change(totals, parts)
        return copies

    return operator


def test_an_operator_that_writes_lists_passes() -> None:
    fn = blending(lambda totals, parts: None)
    assert failures(fn, contract=blend, traits=["deterministic"]) == []
    names = [case.name for case in cases(fn, contract=blend)]
    for what in ("one item too few", "no item", "dtype int32 in an item", "None inside"):
        for name in ("totals", "parts"):
            assert f"blend/vendor.broken/float32/refuses/{what} as {name}" in names
    assert "blend/vendor.broken/float32/refuses/dtype float32 in an item as counts" in names
    assert "blend/vendor.broken/float32/fake tensors/strided" in names


def put_another(totals: list[Tensor], parts: list[Tensor]) -> None:
    totals[1] = totals[1].clone()


def write_behind(totals: list[Tensor], parts: list[Tensor]) -> None:
    last = totals[1]
    last.as_strided((1,), (1,), last.storage_offset() + last.numel()).zero_()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda totals, parts: totals[1].add_(1e-3), "argument 'totals': element"),
        (lambda totals, parts: parts[0].neg_(), "wrote to its input 'parts'"),
        (put_another, "replaced tensors in a list argument"),
        (lambda totals, parts: parts.append(parts[0]), "replaced tensors in a list argument"),
        (write_behind, "the memory beside its input 'totals'"),
    ],
    ids=["wrong values", "another list", "another tensor", "one more", "behind an item"],
)
def test_writing_lists_wrongly_is_caught(change: Lists, words: str) -> None:
    assert_caught(blending(change), words, contract=blend)


def test_writing_that_autograd_records_is_caught() -> None:
    recorded = blending(lambda totals, parts: None).__wrapped__  # type: ignore[attr-defined]
    assert_caught(recorded, "outputs never require grad/", contract=blend)


def test_values_that_are_one_number_together_are_decoded() -> None:
    def oracle(high: Tensor, low: Tensor) -> Any:
        return high.double(), 256.0 * high.double() + low.double()

    def decode(high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
        return high, high.float() * 256 + low.float()

    @te.contract(
        family="example",
        check=lambda op, high, low: None,
        samples=lambda dtype, device: iter(
            [te.Sample("typical", (torch.ones(2, device=device), torch.zeros(2, device=device)))]
        ),
        tolerance={"float32": te.Tolerance(0.0, 0.0)},
        oracle=oracle,
        mutates=("high", "low"),
        decode=decode,
    )
    def carry(high: Tensor, low: Tensor) -> None:
        """Leaves the number as it is."""

    def wrong(high: Tensor, low: Tensor) -> None:
        low.add_(1)

    assert failures(lambda high, low: None, contract=carry) == []
    assert_caught(wrong, "argument 'low'", contract=carry)


@te.contract(
    family="example",
    check=lambda op, input: None,
    samples=lambda dtype, device: iter([te.Sample("typical", (torch.ones(3, device=device),))]),
    tolerance={"float32": te.Tolerance(0.0, 0.0)},
    oracle=lambda input: input.double(),
)
def duplicate(input: Tensor) -> Tensor:
    """A copy."""
    return torch.empty_like(input)


def test_an_input_as_the_output_is_caught() -> None:
    assert failures(lambda input: input.detach().clone(), contract=duplicate) == []
    assert_caught(lambda input: input.detach(), "shares the memory of 'input'", contract=duplicate)


# ------------------------------------------------------------------------------ the kit


def test_cases_can_be_chosen_by_name() -> None:
    manager = holding(right)
    name = "rmsnorm_fwd/vendor.broken/float32/values/typical"
    alone = list(testing.cases("vendor.broken", only=[name], manager=manager))
    assert [case.name for case in alone] == [name]
    (case,) = alone
    assert (case.operator, case.impl_id, case.dtype) == ("rmsnorm_fwd", "vendor.broken", "float32")
    every = [it.name for it in testing.cases("vendor.broken", manager=manager)]
    some = [it.name for it in testing.cases("vendor.broken", only=["*/values/*"], manager=manager)]
    assert some == [it for it in every if "/values/" in it]
    with pytest.raises(te.ConfigurationError, match=r"did you mean '.*/values/typical'"):
        testing.cases("vendor.broken", only=[name.replace("typical", "typcal")], manager=manager)


def test_operators_are_known_by_their_aliases() -> None:
    aliased = next(it for it in ops.CATALOGUE.values() if it.aliases)
    chosen = testing.cases("reference.torch", operators=[aliased.aliases[0]])
    assert next(chosen).operator == aliased.name


def test_the_devices_of_a_set_are_those_of_this_machine() -> None:
    assert testing.devices("reference.torch")[0] == "cpu"
    assert testing.devices("vendor.broken", manager=holding(right, devices=["cpu", "npu"])) == (
        "cpu",
    )
    with pytest.raises(te.ConfigurationError, match=r"runs on npu only; this machine has: cpu"):
        testing.devices("vendor.broken", manager=holding(right, devices=["npu"]))


def test_verify_gathers_what_fails_and_goes_on() -> None:
    seen: list[tuple[int, int, str, int]] = []
    fn, words = FAULTS["off by one row"]
    card = testing.verify(
        "vendor.broken",
        dtypes=["float32"],
        manager=holding(fn),
        progress=lambda *said: seen.append(said),
    )
    assert not card.passed
    assert len(card.failures) == card.total("failed") == len(failures(fn))
    assert any(words in failure.said for failure in card.failures)
    count = len(cases(fn))
    assert [done for done, *_ in seen] == [*range(count), count]
    assert seen[-1][1:] == (count, "", len(card.failures))
    (row,) = card.rows
    assert row.passed + row.declined + row.failed == count
    assert row.worst is not None
    assert row.worst.ratio > 1
    assert str(row.at).startswith("rmsnorm_fwd/vendor.broken/float32/values/")
    assert card.source == "registered by the program"


def test_an_error_without_a_text_is_a_failure_like_any_other() -> None:
    class SpeechlessError(Exception):
        def __str__(self) -> str:
            return str(self.args[7])

    def check() -> testing.Outcome:
        raise SpeechlessError

    with pytest.raises(testing.ConformanceError, match="raised SpeechlessError, whose str"):
        testing.Case("scale/broken/float32/values/typical", check).run()


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit("left")])
def test_what_would_end_a_program_is_a_failure_like_any_other(error: BaseException) -> None:
    def check() -> testing.Outcome:
        raise error

    with pytest.raises(testing.ConformanceError, match=f"raised {type(error).__name__}: "):
        testing.Case("scale/broken/float32/values/typical", check).run()


def test_ctrl_c_and_the_end_that_a_signal_asks_for_are_no_failures() -> None:
    def leave(*_: object) -> None:
        sys.exit(3)

    def interrupted() -> testing.Outcome:
        raise KeyboardInterrupt

    def ended() -> testing.Outcome:
        signal.raise_signal(signal.SIGTERM)
        return testing.Outcome()

    before = signal.signal(signal.SIGTERM, leave)
    try:
        for check, error in ((interrupted, KeyboardInterrupt), (ended, SystemExit)):
            with pytest.raises(error):
                testing.Case("scale/broken/float32/values/typical", check).run()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_largest_errors_of_several_outputs_are_kept() -> None:
    one = testing.Worst(0.5, relative=0.1, ulps=7.0, index=3, got=1.0, expected=2.0)
    two = testing.Worst(0.9, relative=0.01, ulps=2.0, index=5, got=4.0, expected=3.0)
    for both in (one.and_of(two), two.and_of(one)):
        assert (both.ratio, both.relative, both.ulps, both.index) == (0.9, 0.1, 7.0, 5)


def test_cases_have_unique_names_and_cover_every_operator_of_a_set() -> None:
    names = [case.name for case in testing.cases("reference.torch")]
    assert len(set(names)) == len(names)
    assert {name.split("/")[0] for name in names} == set(ops.CATALOGUE)


@pytest.mark.parametrize("copied", [clone, cropped])
def test_a_copy_of_a_lazily_negated_tensor_has_its_values(copied: Callable[[Tensor], Any]) -> None:
    tensor = torch.arange(12.0).view(3, 4)[1:, ::2]
    negated = copied(torch._neg_view(tensor))
    assert negated.is_neg()
    assert negated.stride() == tensor.stride()
    assert torch.equal(negated, -tensor)


def test_a_single_element_may_have_any_stride() -> None:
    one, other = torch.tensor([1, 2, 3])[::3], torch.tensor([2, 2, 3])[::3]
    assert one.stride() == (3,)
    exact = te.Tolerance(0.0, 0.0)
    assert testing.compare(one, one, exact).ratio == 0
    assert testing.compare(one, other, exact).ratio == float("inf")


def test_integers_bools_and_float8_compare_exactly() -> None:
    loose = te.Tolerance(1.0, 1.0)
    expected = torch.tensor([1.0, 2.0, 448.0], dtype=torch.float64)
    for dtype in (torch.int32, torch.uint8, torch.float8_e4m3fn):
        result = torch.tensor([1, 2, 100 if dtype == torch.uint8 else 448]).to(dtype)
        want = result.double()
        assert testing.compare(result, want, loose).ratio == 0
        result.view(torch.uint8)[-1] ^= 1
        assert testing.compare(result, want, loose).ratio == float("inf")
    assert testing.compare(expected > 1, expected > 2, loose).index == 1


def test_one_nan_of_float8_is_as_good_as_another() -> None:
    exact = te.Tolerance(0.0, 0.0)
    nan, one = torch.tensor([float("nan")]).double(), torch.tensor([1.0]).double()
    for byte in (0x7F, 0xFF):
        result = torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn)
        assert testing.compare(result, nan, exact).ratio == 0
        assert testing.compare(result, one, exact).ratio == float("inf")
    assert testing.compare(one.to(torch.float8_e4m3fn), nan, exact).ratio == float("inf")


def test_bounds_are_kept_by_every_element() -> None:
    low = torch.tensor([1.0, 2.0, torch.nan, -1.0], dtype=torch.float64)
    bounds = te.Between(low, low + 1)
    loose = te.Tolerance(10.0, 10.0)

    def worst(*values: float, of: te.Between = bounds) -> testing.Worst:
        return testing.compare(torch.tensor(values), of, loose)

    assert worst(1.0, 3.0, torch.nan, -0.5).ratio == 0
    for index, wrong in enumerate((0.99, 3.01, 2.0, torch.nan)):
        values = [1.0, 3.0, torch.nan, -0.5]
        values[index] = wrong
        found = worst(*values)
        assert (found.ratio, found.index) == (float("inf"), index)
    doubled = te.Between(low, low, values=lambda it: it * 2)
    assert worst(0.5, 1.0, torch.nan, -0.5, of=doubled).ratio == 0
    assert worst(0.5, 1.0, torch.nan, -0.25, of=doubled).index == 3
    assert testing.compare(torch.ones(0), te.Between(low[:0], low[:0]), loose).ratio == 0


def test_an_oracle_may_return_bounds_in_place_of_a_tensor() -> None:
    def oracle(input: Tensor) -> Any:
        exact = input.double() * 2
        return te.Between(exact, exact), [te.Between(exact - 1, exact + 1), exact]

    @te.contract(
        family="example",
        check=lambda op, input: check.is_tensor(op, "input", input, dtypes=["float32"]),  # type: ignore[arg-type,return-value]
        samples=lambda dtype, device: iter([te.Sample("typical", (torch.ones(4, device=device),))]),
        tolerance={"float32": te.Tolerance(0.5, 0.5)},
        oracle=oracle,
    )
    def bounded(input: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Twice the input: exactly, to one, and to the tolerance."""
        return torch.empty_like(input), [torch.empty_like(input), torch.empty_like(input)]

    def adding(first: float, second: float) -> Callable[..., Any]:
        def implementation(input: Tensor) -> Any:
            bounded.check(input)
            twice = input.detach() * 2
            return twice + first, [twice + second, twice + second]

        return implementation

    assert failures(adding(0.0, 0.75), contract=bounded) == []
    assert_caught(adding(0.1, 0.0), "output 0", contract=bounded)
    assert_caught(adding(0.0, 1.1), "output 1", contract=bounded)


def test_infinite_and_missing_values_are_errors() -> None:
    tolerance = te.Tolerance(rtol=1e-3, atol=1e-3)
    expected = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert testing.compare(expected.float(), expected, tolerance).ratio < 1
    for wrong in (float("nan"), float("inf")):
        result = torch.tensor([1.0, wrong, 3.0])
        assert testing.compare(result, expected, tolerance).ratio == float("inf")
        asked = torch.tensor([1.0, wrong, 3.0], dtype=torch.float64)
        assert testing.compare(asked.float(), asked, tolerance).ratio == 0
        assert testing.compare(expected.float(), asked, tolerance).ratio == float("inf")


@pytest.mark.parametrize("expected", [float("nan"), float("inf")])
def test_a_finite_value_where_none_is_expected_is_an_error(expected: float) -> None:
    wanted = torch.tensor([1.0, expected], dtype=torch.float64)
    worst = testing.compare(torch.tensor([1.0, 2.0]), wanted, te.Tolerance(1e-3, 1e-3))
    assert worst.ratio == float("inf")
    assert testing.compare(wanted.float(), wanted, te.Tolerance(1e-3, 1e-3)).ratio == 0


def test_the_bound_scales_with_the_values() -> None:
    tolerance = te.Tolerance(rtol=0.0, atol=1e-3)
    for scale in (1e-20, 1.0, 1e20):
        expected = torch.tensor([1.0, -1.0], dtype=torch.float64) * scale
        result = expected + 0.0005 * scale
        assert testing.compare(result, expected, tolerance).ratio == pytest.approx(0.5)


def test_the_bound_of_a_large_row_scales_with_it_where_rows_differ() -> None:
    expected = torch.tensor([[8.0, -8.0], [1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    whole = expected.square().mean().sqrt()
    for row, scale in ((0, 8.0), (1, float(whole)), (2, float(whole))):
        result = expected.clone()
        result[row] += 0.0005 * scale
        by_row = te.Tolerance(rtol=0.0, atol=1e-3, by_row=True)
        assert testing.compare(result, expected, by_row).ratio == pytest.approx(0.5)
        ratio = testing.compare(result, expected, te.Tolerance(rtol=0.0, atol=1e-3)).ratio
        assert ratio == pytest.approx(0.5 * scale / float(whole))
    gone = torch.full((2, 2), float("nan"), dtype=torch.float64)
    assert testing.compare(gone.float(), gone, by_row).ratio == 0
    assert testing.compare(expected[0, 0], expected[0, 0], by_row).ratio == 0


def test_integers_and_flags_must_be_equal() -> None:
    generous = te.Tolerance(rtol=1.0, atol=1.0)
    expected = torch.tensor([1, 0, 255], dtype=torch.float64)
    for dtype, wrong in ((torch.uint8, [1, 0, 254]), (torch.int64, [1, 1, 255])):
        right = expected.to(dtype)
        assert testing.compare(right, expected, generous).ratio == 0
        assert testing.compare(torch.tensor(wrong, dtype=dtype), expected, generous).ratio > 1
    flags = torch.tensor([True, False])
    assert testing.compare(flags, torch.tensor([1.0, 1.0]).double(), generous).ratio > 1


def test_the_ulp_of_an_error() -> None:
    expected = torch.tensor([1.0], dtype=torch.float64)
    result = torch.tensor([1.0 + 2**-7], dtype=torch.bfloat16)
    assert testing.compare(result, expected, te.Tolerance(1.0, 1.0)).ulps == pytest.approx(1.0)


def test_where_the_tolerance_is_absolute_an_ulp_is_one_of_what_it_calls_small() -> None:
    expected = torch.tensor([1.0, 2.0**-30], dtype=torch.float64)
    result = expected.float()
    result[1] += 2.0**-25
    tolerance = te.Tolerance(rtol=2.0**-20, atol=2.0**-22)  # small: a quarter of the rms, 0.7
    worst = testing.compare(result, expected, tolerance)
    assert worst.ulps == pytest.approx(2.0**-25 / 2.0**-26)
    assert testing.compare(result, expected, te.Tolerance(2.0**-20, 0.0)).ulps > 2**20
