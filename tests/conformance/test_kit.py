"""The kit catches each kind of fault: sets that are broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import ops, testing
from transformer_engine_fl.backends.reference import normalization as reference

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

FAULTS: dict[str, tuple[Rms, str]] = {
    "statistics of another dtype": (broken(lambda y, r, x, w: (y, r.double())), "shape rule"),
    "statistics of low precision": (broken(low_precision), "allowed error"),
    "outputs swapped": (broken(lambda y, r, x, w: (r, y)), "shape rule"),
    "an output missing": (broken(lambda y, r, x, w: (y,)), "1 outputs, not 2"),
    "off by one row": (broken(off_by_one_row), "allowed error"),
    "an element unwritten": (broken(an_element_unwritten), "allowed error"),
    "written outside": (broken(written_outside), "written after a buffer"),
    "an input written": (broken(input_scaled), "written its input 'input'"),
    "a stale buffer": (broken(stale), "allowed error"),
    "not deterministic": (broken(different_each_time), "same bits"),
}


def failures(fn: Rms, **fields: Any) -> list[str]:
    registry = te.OpRegistry()
    registry.register_impl(
        te.OpImpl("rmsnorm_fwd", "vendor.broken", "vendor", fn, vendor="broken", **fields)
    )
    manager = te.OpManager(registry, builtins=False, plugins=False)
    found = []
    for case in testing.cases("vendor.broken", dtypes=["float32"], manager=manager):
        try:
            case.run()
        except testing.ConformanceError as error:
            found.append(f"{case.name}: {error}")
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_set_is_caught(fault: str) -> None:
    fn, words = FAULTS[fault]
    found = failures(fn, traits=["deterministic"])
    assert any(words in failure for failure in found), found


def test_the_right_one_passes() -> None:
    assert failures(right, traits=["deterministic"]) == []


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

    found = failures(trusting)
    assert any("refuses/one dimension too many as weight" in failure for failure in found), found


def test_outputs_that_require_grad_are_caught() -> None:
    found = failures(broken(lambda y, r, x, w: (y * w.sum() / w.sum().detach(), r)))
    assert any("requires grad" in failure for failure in found), found


def test_cases_have_unique_names_and_cover_every_operator_of_a_set() -> None:
    names = [case.name for case in testing.cases("reference.torch")]
    assert len(set(names)) == len(names)
    assert {name.split("/")[0] for name in names} == set(ops.CATALOGUE)


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


def test_the_bound_scales_with_the_values() -> None:
    tolerance = te.Tolerance(rtol=0.0, atol=1e-3)
    for scale in (1e-20, 1.0, 1e20):
        expected = torch.tensor([1.0, -1.0], dtype=torch.float64) * scale
        result = expected + 0.0005 * scale
        assert testing.compare(result, expected, tolerance).ratio == pytest.approx(0.5)


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
