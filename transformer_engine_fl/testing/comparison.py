"""Comparing a result with its float64 value, by the contract's tolerance."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_engine_fl.core.contract import Between, Tolerance
from transformer_engine_fl.ops._rounding import power_of_two
from transformer_engine_fl.testing.arguments import bits

__all__ = ["Worst", "compare", "ulp"]


@dataclass(frozen=True, slots=True)
class Worst:
    """The largest error of a result.

    Attributes:
        ratio: error over what the tolerance allows; above 1 is a failure.
        relative: error over the root mean square of the expected values.
        ulps: error in units in the last place of the result's dtype at the expected value, or
            at ``atol / rtol * r`` (r: see ``Tolerance``) where that is larger: below it, the
            bound is mostly absolute.
        index: where it is, as a flat index.
        got, expected: the values there.
    """

    ratio: float
    relative: float
    ulps: float
    index: int
    got: float
    expected: float

    def and_of(self, other: Worst) -> Worst:
        """The largest errors of two results, and where the worse one is."""
        worse = other if other.ratio > self.ratio else self
        return dataclasses.replace(
            worse,
            relative=max(self.relative, other.relative),
            ulps=max(self.ulps, other.ulps),
        )

    def __str__(self) -> str:
        return (
            f"element {self.index} is {self.got!r}, expected {self.expected!r}: "
            f"{self.ratio:.3g} times the allowed error, {self.ulps:.3g} ulps"
        )


_NOTHING = Worst(0.0, 0.0, 0.0, -1, 0.0, 0.0)


def compare(result: Tensor, expected: Tensor | Between, tolerance: Tolerance) -> Worst:
    """The worst element of ``result`` against ``expected`` (float64), on the result's device.

    A NaN or an infinity that is not expected counts as an infinite error. Integers, bools
    and types of one byte (float8) have no tolerance: any other bit is an infinite error,
    except that one NaN is as good as another. So is any element out of bounds.
    """
    if isinstance(expected, Between):
        return _within(result.detach(), expected)
    if not result.numel():
        return _NOTHING
    if not result.is_floating_point() or result.element_size() == 1:
        return _exactly(result.detach(), expected.detach().to(result.device))
    got = result.detach().to(torch.float64).flatten()
    want = expected.detach().to(got).flatten()
    scale = _root_mean_square(want).item()
    scales = want.new_tensor(scale)
    if tolerance.by_row and expected.dim():
        rows = _root_mean_square(want.view(-1, expected.shape[-1]))
        scales = rows.clamp_min(scale).expand(-1, expected.shape[-1]).flatten()
    same = (got == want) | (got.isnan() & want.isnan())
    error = torch.where(same, 0.0, (got - want).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    allowed = tolerance.rtol * want.abs() + tolerance.atol * scales
    ratio = torch.where(same, 0.0, error / allowed.clamp_min(torch.finfo(torch.float64).tiny))
    # Not finite here: NaN or infinity was expected and not found, or the reverse.
    ratio = ratio.nan_to_num(nan=torch.inf, posinf=torch.inf)
    place = int(ratio.argmax())
    small = tolerance.atol / tolerance.rtol * scales if tolerance.rtol else want.new_zeros(())
    return Worst(
        ratio=float(ratio[place]),
        relative=float(error.max()) / scale if scale else float(error.max()),
        ulps=float((error / ulp(want.abs().maximum(small), result.dtype)).max()),
        index=place,
        got=float(got[place]),
        expected=float(want[place]),
    )


def _root_mean_square(values: Tensor) -> Tensor:
    """The root mean square of each row's finite elements, as a column; 0 if there are none."""
    finite = values.isfinite()
    squares = torch.where(finite, values, 0.0).square().sum(-1, keepdim=True)
    return (squares / finite.sum(-1, keepdim=True).clamp_min(1)).sqrt()


def _exactly(result: Tensor, expected: Tensor) -> Worst:
    """The first element that differs in any bit from the expected one in its dtype, or nothing."""
    size = result.element_size()
    got = result.contiguous().flatten()
    want = expected.to(result.dtype).contiguous().flatten()
    differ = (bits(got) != bits(want)).view(-1, size).any(-1)
    if got.is_floating_point():
        differ &= ~(got.isnan() & want.isnan())
    return _first(differ, got, want)


def _within(result: Tensor, bounds: Between) -> Worst:
    """The first element out of bounds, or nothing."""
    values = result if bounds.values is None else bounds.values(result)
    got = values.double().flatten()
    low, high = (it.to(got).flatten() for it in (bounds.low, bounds.high))
    inside = (low <= got) & (got <= high) | got.isnan() & low.isnan() & high.isnan()
    return _first(~inside, got, torch.where(got < low, low, high))


def _first(wrong: Tensor, got: Tensor, want: Tensor) -> Worst:
    """The first element that is wrong, as an infinite error, or nothing."""
    if not bool(wrong.any()):
        return _NOTHING
    place = int(wrong.to(torch.uint8).argmax())
    value, right = float(got[place].double()), float(want[place].double())
    return Worst(torch.inf, torch.inf, torch.inf, place, value, right)


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of ``dtype`` at each value."""
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.finfo(torch.float64)
    exponent = torch.frexp(values.abs().clamp_min(info.tiny)).exponent - 1
    return info.eps * power_of_two(exponent, values.dtype)
