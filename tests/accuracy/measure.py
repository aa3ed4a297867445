"""Errors of a result against float64, next to the errors of another result on the same inputs.

The error of an element is counted in units in the last place of the output's dtype, at its
float64 value or at the root mean square of the output, whichever is larger: where values
cancel nearly to zero, units of the remainder say nothing about the arithmetic. Two figures
are kept for all elements of an output, over all samples of a dtype: the root mean square of
the errors and the largest error.

Both results are first rounded to the output's dtype. Left out are elements whose float64 value
is not finite or does not fit the dtype (the conformance kit checks those), and elements where the
composition breaks down: it overflows where the operator must not, or has so large an error that
it would excuse any error of the operator. One-byte types are left out, as the kit demands each
of their bits, and so are outputs for which an oracle gives bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_engine_fl import get_default_manager, ops
from transformer_engine_fl.core.contract import Between
from transformer_engine_fl.testing.arguments import tensors
from transformer_engine_fl.testing.checks import Declined, Run
from transformer_engine_fl.testing.comparison import ulp

Composition = Callable[..., Any]

BROKEN_DOWN = 256.0
"""Units in the last place; in bfloat16 as much as the number itself."""


@dataclass(slots=True)
class Errors:
    """The errors of one output, in units in the last place.

    Attributes:
        squares: the sum of the squared errors.
        count: the number of compared elements.
        largest: the largest error.
        where: the sample with the largest error.
        dtype: the output's dtype.
    """

    dtype: torch.dtype
    squares: float = 0.0
    count: int = 0
    largest: float = 0.0
    where: str = "nowhere"

    @property
    def rms(self) -> float:
        """The root mean square."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def add(self, errors: Tensor, where: str) -> None:
        """Add the errors of some elements of the sample ``where``."""
        self.squares += errors.square().sum().item()
        self.count += errors.numel()
        if errors.max().item() > self.largest:
            self.largest, self.where = errors.max().item(), where


def reference_runs(op_name: str, dtype: str) -> Iterator[Run]:
    """Runs of the reference implementation, one for each sample."""
    manager = get_default_manager()
    manager.ensure_initialized()
    contract = ops.CATALOGUE[op_name]
    entries = manager.registry.entries(op_name)
    entry = next(it for it in entries if it.impl.impl_id == "reference.torch")
    for sample in contract.samples(dtype, "cpu"):
        yield Run(entry, contract, dtype, sample)


def measured(
    op_name: str, dtype: str, composition: Composition
) -> dict[tuple[int, torch.dtype], tuple[Errors, Errors]]:
    """The errors of the reference and of torch's composition.

    The key is the index of the output, or of the mutated argument after the outputs, and its dtype.
    """
    found: dict[tuple[int, torch.dtype], tuple[Errors, Errors]] = {}
    for run in reference_runs(op_name, dtype):
        try:
            results = run.serve(run.fresh())
        except Declined:
            continue
        call = run.fresh()
        composed = composition(*call.args, **call.kwargs)
        assert isinstance(composed, tuple), "a composition returns a tuple"
        expected = run.expected()
        assert len(composed) == len(expected), f"{len(expected)} values, not {len(composed)}"
        for place, values in enumerate(zip(results, composed, expected, strict=True)):
            if values[1] is None or isinstance(values[2], Between):
                continue
            for result, other, exact in zip(*map(tensors, values), strict=True):
                key = place, result.dtype
                both = found.setdefault(key, (Errors(result.dtype), Errors(result.dtype)))
                _add(both, result, other, exact, run.sample.label)
    return found


def _add(
    both: tuple[Errors, Errors], result: Tensor, other: Tensor, exact: Tensor, where: str
) -> None:
    dtype = result.dtype
    if not dtype.is_floating_point or dtype.itemsize == 1 or not result.numel():
        return
    assert other.shape == result.shape, f"{where}: {tuple(other.shape)} of torch"
    pair = [it.detach().to(dtype).double().flatten() for it in (result, other)]
    want = exact.double().flatten()
    fits = want.isfinite() & want.to(dtype).isfinite()
    if not bool(fits.any()):
        return
    want = want[fits]
    unit = ulp(want.abs().clamp_min(want.square().mean().sqrt()), dtype)
    ours, torchs = (((it[fits] - want).abs() / unit).nan_to_num(nan=torch.inf) for it in pair)
    compared = torchs <= BROKEN_DOWN
    if bool(compared.any()):
        both[0].add(ours[compared], where)
        both[1].add(torchs[compared], where)


def inexact(op_name: str, dtype: str) -> Iterator[str]:
    """The places where the reference is not the float64 value in the output's dtype."""
    for run in reference_runs(op_name, dtype):
        try:
            results = run.serve(run.fresh())
        except Declined:
            continue
        for what, result, exact in run.pairs(results, run.expected()):
            wanted = exact.to(result.dtype)
            if not torch.equal(result.double().nan_to_num(), wanted.double().nan_to_num()):
                yield f"{run.sample.label}: {what}"
