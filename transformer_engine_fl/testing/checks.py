"""The checks of an implementation on one sample.

It is called directly, not through dispatch. A decline that the contract allows is an
outcome, not a failure; everything that it computes is checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_engine_fl.core.contract import Contract, Sample
from transformer_engine_fl.core.errors import ArgumentError, NotSupportedError
from transformer_engine_fl.core.registry import Entry
from transformer_engine_fl.core.selection import ask_supports, options_decline
from transformer_engine_fl.ops._tensors import TorchTensors
from transformer_engine_fl.testing.allocation import Guarded
from transformer_engine_fl.testing.arguments import (
    as_tuple,
    bits,
    by_name,
    changed,
    clone,
    copy_into,
    cropped,
    leaves,
    memory,
    rows_of,
    taking_rows,
    tensors,
    transformed,
)
from transformer_engine_fl.testing.comparison import Worst, compare
from transformer_engine_fl.testing.outcome import PASSED, ConformanceError, Outcome
from transformer_engine_fl.testing.settings import settings_unchanged

__all__ = ["Declined", "Run", "row_ranges"]

Values = tuple[Any, ...]
"""The outputs of a call, then what each argument in ``mutates`` holds afterwards."""


class Declined(Exception):  # noqa: N818 - not an error: the way out of a check
    """The implementation does not take the sample."""


@dataclass(frozen=True, slots=True)
class Run:
    """One sample, and the checks of an implementation on it.

    Attributes:
        entry: the implementation.
        contract: what it must keep.
        dtype: the dtype of the sample.
        sample: the call.
    """

    entry: Entry
    contract: Contract[..., Any]
    dtype: str
    sample: Sample

    # ----------------------------------------------------------------------- the checks

    def values(self) -> Outcome:
        """Values, shapes, dtypes are right, no poison left, fences intact, inputs as declared."""
        call = self.fresh()
        with Guarded() as allocations:
            values = self.serve(call)
        outside = allocations.broken()
        if outside is not None:
            raise self.error(outside)
        self.check_inputs(call)
        self.check_aliases(call, values)
        return Outcome(self.check_values(values))

    def repeated(self) -> Outcome:
        """A call depends on nothing from an earlier one, and leaves the earlier outputs alone.

        The first call sees zeros in the same tensors. The caller owns what it returned, and
        what the second call returned, and may overwrite it.
        """
        call, true = changed(self.sample, torch.zeros_like), self.fresh()
        first = self.serve(call)[: self.outputs]
        kept = [bits(value).clone() for value in tensors(first)]
        copy_into(call, true)
        second = self.serve(call)
        for before, value in zip(kept, tensors(first), strict=True):
            if not torch.equal(before, bits(value)):
                raise self.error("a call overwrote an output of the previous call")
        worst = self.check_values(second)
        for value in tensors(second[: self.outputs]):
            value.zero_()
        copy_into(call, true)
        self.check_values(self.serve(call))
        return Outcome(worst)

    def no_grad(self) -> Outcome:
        """Outputs do not require grad, even if inputs do; autograd does not record writes."""

        def requiring_grad(value: Tensor) -> Tensor:
            differentiable = value.is_floating_point() or value.is_complex()
            return value.requires_grad_() if differentiable else value

        call = self.fresh()
        args, kwargs = transformed((call.args, call.kwargs), requiring_grad)
        fresh = Sample(call.label, args, kwargs)
        for place, value in enumerate(self.serve(fresh)[: self.outputs]):
            if any(it.requires_grad for it in tensors(value)):
                raise self.error(f"{self.named(place)} requires grad")
        for name in self.contract.mutates:
            if not all(it.is_leaf for it in tensors(by_name(self.contract, fresh).get(name))):
                raise self.error(f"wrote {name!r} while autograd was recording (use no_grad)")
        return PASSED

    def fake(self) -> Outcome:
        """Fake and meta tensors give the right shapes, or are refused; nothing is launched."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.raise_if_declined(self.sample)
        expected = self.shapes()
        mode = FakeTensorMode()
        # Fake tensors come inside their mode's block, in which new tensors are fake as well.
        makers: tuple[tuple[str, Any, Callable[[Tensor], Any]], ...] = (
            ("fake", mode, mode.from_tensor),
            ("meta", contextlib.nullcontext(), lambda tensor: tensor.to("meta")),
        )
        for kind, block, make in makers:
            args, kwargs = transformed((self.sample.args, self.sample.kwargs), make)
            try:
                with block:
                    results = as_tuple(self.call(args, kwargs))
            except NotSupportedError:
                continue
            self.check_count(results, expected)
            for result, shape in zip(results, expected, strict=True):
                asked = _kind(transformed(shape, make))
                if shape is not None and _kind(result) != asked:
                    raise self.error(
                        f"wrong shapes for {kind} tensors: {_kind(result)}, "
                        f"the shape rule says {asked}"
                    )
        return PASSED

    def deterministic(self) -> Outcome:
        """The same bits from run to run."""
        first = [bits(it).clone() for it in tensors(self.serve(self.fresh()))]
        for _ in range(3):
            again = tensors(self.serve(self.fresh()))
            if not all(torch.equal(bits(a), b) for a, b in zip(again, first, strict=True)):
                raise self.error("the results of two runs differ in their bits")
        return PASSED

    def batch_invariant(self) -> Outcome:
        """Rows that are computed alone have the same bits as among all."""
        rows = rows_of(self.contract, self.sample)
        whole = self.serve(self.fresh())
        for first, end in row_ranges(rows):
            some = taking_rows(self.contract, self.sample, first, end)
            for what, value, part in self.pairs(whole, self.serve(some)):
                has_rows = value.ndim and (len(value), len(part)) == (rows, end - first)
                if has_rows and not torch.equal(bits(value[first:end]), bits(part)):
                    raise self.error(
                        f"{what}: rows {first} to {end} computed alone differ in their "
                        f"bits from the same rows among {rows}"
                    )
        return PASSED

    def refused(self) -> Outcome:
        """A call that breaks the contract is refused, and no input has been written."""
        if options_decline(self.entry, self.sample.args, self.sample.kwargs) is not None:
            return PASSED  # the implementation does not have the option at all
        call = self.fresh()
        try:
            self.call(call.args, call.kwargs)
        except (ArgumentError, NotSupportedError):
            self.check_inputs(call, declared=())
            return PASSED
        except ConformanceError:
            raise
        except Exception as error:
            raise self.error(
                f"raises {type(error).__name__} on {self.sample.label}, not ArgumentError: {error}"
            ) from error
        raise self.error(f"accepts {self.sample.label}; it must raise ArgumentError")

    def only_called(self, *, poisoned: bool = True) -> Outcome:
        """The call runs to its end, under a tool that checks every memory access.

        Each tensor's memory ends with the tensor. Outputs may be poisoned, but have no fence: to
        the tool an access to one would be valid.
        """
        args, kwargs = cropped((self.sample.args, self.sample.kwargs))
        with Guarded(fence=0) if poisoned else contextlib.nullcontext():
            values = self.serve(Sample(self.sample.label, args, kwargs))
        for device in {it.device for it in tensors((args, kwargs, values))}:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return PASSED

    # ------------------------------------------------------------------- what they share

    @property
    def outputs(self) -> int:
        """How many outputs the operator has."""
        return len(self.shapes())

    def error(self, message: str) -> ConformanceError:
        """An error that says what is wrong; the case adds its name."""
        return ConformanceError(message)

    def fresh(self) -> Sample:
        """The sample on memory of its own."""
        return Sample(self.sample.label, clone(self.sample.args), clone(self.sample.kwargs))

    def shapes(self) -> tuple[Any, ...]:
        """The outputs by the shape rule."""
        return as_tuple(self.contract.shapes(*self.sample.args, **self.sample.kwargs))

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the implementation and check that it leaves torch's settings as they were."""
        reason = self.entry.unavailable() or self.entry.load()
        if reason is not None:
            raise self.error(f"not available: {reason}")
        with settings_unchanged():
            return self.entry.fn(*args, **kwargs)

    def serve(self, call: Sample) -> Values:
        """Call the implementation.

        Raises:
            Declined: it does not take the call, as it says beforehand or when it is called.
        """
        self.raise_if_declined(call)
        passed = [*tensors((call.args, call.kwargs))]
        try:
            returned = self.call(call.args, call.kwargs)
        except NotSupportedError as error:
            raise Declined(str(error)) from error
        results = as_tuple(returned)
        if isinstance(returned, list) or (results is returned and len(results) == 1):
            rule = self.contract.shapes(*self.sample.args, **self.sample.kwargs)
            if isinstance(returned, list) and not isinstance(rule, list):
                right = "a tuple" if isinstance(rule, tuple) else "the output itself"
                raise self.error(f"returned a list; must return {right}")
            if isinstance(returned, tuple) and not isinstance(rule, tuple):
                raise self.error("returned a tuple; must return the output itself")
        held = [*tensors((call.args, call.kwargs))]
        if len(held) != len(passed) or any(a is not b for a, b in zip(held, passed, strict=True)):
            raise self.error("replaced tensors in a list argument, instead of writing into them")
        given = by_name(self.contract, call)
        written = tuple(given.get(name) for name in self.contract.mutates)
        if self.contract.decode is not None:
            with torch.no_grad():
                written = self.contract.decode(*written)
        return *results, *written

    def raise_if_declined(self, call: Sample) -> None:
        """Raise Declined if dispatch would not make this call of the implementation."""
        self.entry.load()  # its options are known from its signature
        reason = options_decline(self.entry, call.args, call.kwargs)
        if reason is None and self.entry.impl.supports is not None:
            called = call.args, call.kwargs
            reason = ask_supports(self.entry, called, TorchTensors().is_fatal)
        if reason is not None:
            raise Declined(reason)

    def named(self, place: int) -> str:
        """The name, for messages, of a value that :meth:`serve` returns."""
        written = place - self.outputs
        return f"output {place}" if written < 0 else f"argument {self.contract.mutates[written]!r}"

    def pairs(self, values: Values, others: Values) -> Iterator[tuple[str, Tensor, Any]]:
        """(name, tensor, the other call's tensor or the bounds) for each tensor of a call."""
        for place, (value, other) in enumerate(zip(values, others, strict=True)):
            for one, two in zip(tensors(value), leaves(other), strict=True):
                yield self.named(place), one, two

    def expected(self) -> Values:
        """The float64 values of the outputs, then of the written arguments."""
        call = self.fresh()
        expected = as_tuple(self.contract.oracle(*call.args, **call.kwargs))
        count = self.outputs + len(self.contract.mutates)
        if len(expected) != count:
            raise ConformanceError(
                f"the oracle of {self.contract.name} returns {len(expected)} values, not {count}: "
                "one for each output and each argument in mutates"
            )
        return expected

    def check_count(self, results: tuple[Any, ...], shapes: tuple[Any, ...]) -> None:
        """Check that there are as many outputs as the shape rule has."""
        if len(results) != len(shapes):
            raise self.error(f"returned {len(results)} outputs, not {len(shapes)}")

    def check_values(self, values: Values) -> Worst | None:
        """Check kinds by the shape rule and values by the oracle; returns the worst error."""
        shapes = self.shapes()
        written = len(self.contract.mutates)
        self.check_count(values[: len(values) - written], shapes)
        for place, (result, shape) in enumerate(zip(values, shapes, strict=False)):
            found, asked = _kind(result), _kind(shape)
            if found != asked:
                raise self.error(f"output {place} is {found}, the shape rule says {asked}")
            if isinstance(result, Tensor) and _steps(result) != _steps(shape):
                raise self.error(
                    f"output {place} has strides {result.stride()}, "
                    f"the shape rule says {shape.stride()}"
                )
        worst: Worst | None = None
        for what, result, expected in self.pairs(values, self.expected()):
            name = str(result.dtype).removeprefix("torch.")
            error = compare(result, expected, self.contract.tolerance_for(self.dtype, name))
            if error.ratio > 1:
                raise ConformanceError(f"{what}: {error}", error)
            worst = error if worst is None else worst.and_of(error)
        return worst

    def check_inputs(self, call: Sample, declared: tuple[str, ...] | None = None) -> None:
        """Check that every input is unchanged, to the last byte of its memory.

        Of an input that is declared to be written, only the bytes between and around its elements
        must be unchanged.
        """
        before, after = by_name(self.contract, self.fresh()), by_name(self.contract, call)
        for name, value in after.items():
            mutable = name in (self.contract.mutates if declared is None else declared)
            for old, new in zip(tensors(before[name]), tensors(value), strict=True):
                if not _unwritten(old, new, mutable):
                    beside = "the memory beside " if mutable else ""
                    raise self.error(f"wrote to {beside}its input {name!r}")

    def check_aliases(self, call: Sample, values: Values) -> None:
        """Check that no output is in the storage of an input."""
        inputs = {
            _address(it): name
            for name, value in by_name(self.contract, call).items()
            for it in tensors(value)
            if it.numel()
        }
        for place, value in enumerate(values[: self.outputs]):
            for it in tensors(value):
                if it.numel() and _address(it) in inputs:
                    shared = inputs[_address(it)]
                    raise self.error(f"{self.named(place)} shares the memory of {shared!r}")


def row_ranges(rows: int) -> list[tuple[int, int]]:
    """Ranges of rows to compute alone: the first row, the second half, the last row."""
    return sorted({(0, 1), (rows // 2, rows), (rows - 1, rows)})


def _kind(value: Any) -> Any:
    """What the shape rule decides of an output: a tensor's shape, dtype and device."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device
    if isinstance(value, list):
        return [_kind(it) for it in value]
    return None if value is None else type(value)


def _steps(value: Tensor) -> list[int]:
    """The strides of the dimensions in which they matter: those of more than one element."""
    if not value.numel():
        return []
    return [step for n, step in zip(value.shape, value.stride(), strict=True) if n > 1]


def _address(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _unwritten(old: Tensor, new: Tensor, mutable: bool) -> bool:
    """Whether memory is unchanged, except for a mutable tensor's elements; overwrites ``old``."""
    if old.device.type == "meta":
        return True
    if (old.shape, old.dtype, old.stride()) != (new.shape, new.dtype, new.stride()):
        return False
    if mutable:
        old.copy_(new)
    return torch.equal(memory(old), memory(new))
