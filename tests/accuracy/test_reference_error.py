"""The reference is no further from float64 than torch's own eager composition is.

For each operator, dtype and output, over all samples (see ``measure.py``), neither the root mean
square of the reference's errors nor its largest error exceeds the composition's by more than an
allowance, which is less than one rounding step. An allowance is needed because of two equally
good calculations one is always a little worse on given numbers: a value close to the middle
between two others is rounded up by one and down by the other, and the last bits of a float32 sum
depend on the order of its terms. If the output is float32 these bits show, and which of many
elements has the largest error is a matter of luck: there the largest error may also be twice as
large. The root mean square may not.

A composition takes the operator's arguments: a backward uses what the forward saved, where
autograd would compute it again with another result.

float64 is left out, as the formula in float64 cannot be the measure there.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from accuracy.exact import BOUNDED, EXACT
from accuracy.measure import Composition, inexact, measured
from operator_names import ALL

from transformer_engine_fl import ops

RMS_ALLOWANCE = 0.05
LARGEST_ALLOWANCE = 0.9
"""In units in the last place of the output's dtype."""

LARGEST_OF_SUMS = 2.0
"""How many times as large the largest error of a float32 output may be."""


def _compositions() -> dict[str, Composition]:
    found: dict[str, Composition] = {}
    for path in sorted(Path(__file__).with_name("compositions").glob("*.py")):
        module = importlib.import_module(f"accuracy.compositions.{path.stem}")
        twice = found.keys() & module.COMPOSITIONS.keys()
        assert not twice, f"{path.name} repeats {sorted(twice)}"
        found |= module.COMPOSITIONS
    return found


COMPOSITIONS = _compositions()
DTYPES = {
    name: [it for it in ops.CATALOGUE[name].dtypes if it != "float64"] for name in COMPOSITIONS
}


def excess(op_name: str, dtype: str, composition: Composition) -> list[str]:
    """The outputs in which the reference is worse than the composition, and by how much."""
    found = []
    pairs = measured(op_name, dtype, composition)
    assert any(ours.count for ours, _ in pairs.values()), "nothing is compared"
    for (place, _), (ours, torchs) in pairs.items():
        if ours.rms > torchs.rms + RMS_ALLOWANCE:
            found.append(f"output {place}: rms {ours.rms:.4f} ulps, torch's {torchs.rms:.4f}")
        factor = LARGEST_OF_SUMS if torchs.dtype == torch.float32 else 1.0
        if ours.largest > torchs.largest * factor + LARGEST_ALLOWANCE:
            found.append(
                f"output {place}: {ours.largest:.4f} ulps in {ours.where!r}, "
                f"torch's largest is {torchs.largest:.4f}"
            )
    return found


@pytest.mark.parametrize(
    ("op_name", "dtype"),
    [(name, dtype) for name, dtypes in DTYPES.items() for dtype in dtypes],
)
def test_the_reference_is_no_worse_than_torchs_composition(op_name: str, dtype: str) -> None:
    assert excess(op_name, dtype, COMPOSITIONS[op_name]) == []


@pytest.mark.parametrize("op_name", [name for name in EXACT if name in ops.CATALOGUE])
def test_what_is_listed_as_exact_does_not_round(op_name: str) -> None:
    for dtype in ops.CATALOGUE[op_name].dtypes:
        assert list(inexact(op_name, dtype)) == []


def test_every_operator_has_a_composition_or_is_exact() -> None:
    assert sorted(COMPOSITIONS.keys() & EXACT.keys()) == []
    compared = COMPOSITIONS.keys() | EXACT.keys()
    missing = sorted(ops.CATALOGUE.keys() - compared - BOUNDED.keys())
    assert missing == [], "add a composition of torch's, or say in exact.py why it does not round"
    assert set(BOUNDED.values()) <= compared


def test_what_is_listed_as_exact_is_an_operator() -> None:
    assert sorted(EXACT.keys() - ALL - ops.CATALOGUE.keys()) == []


def test_a_worse_reference_is_found() -> None:
    def in_float64(input: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor]:
        return (torch.softmax(input.double() * scale, -1),)

    def in_float16(input: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor]:
        return (torch.softmax(input.half() * scale, -1),)

    assert excess("scaled_softmax_forward", "float32", in_float64) != []
    assert excess("scaled_softmax_forward", "float32", in_float16) == []


def test_an_operator_that_rounds_is_found() -> None:
    assert list(inexact("silu", "bfloat16")) != []
    assert list(inexact("relu", "bfloat16")) == []
