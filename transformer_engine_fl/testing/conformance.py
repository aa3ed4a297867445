"""Cases generated from the contracts, each of which an implementation must pass.

An implementation is called directly, not through dispatch, so that what is tested is
what was named. A case is one thing that must hold on one sample; its name says which,
and running it alone reproduces a failure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_engine_fl.core.contract import Contract, Sample
from transformer_engine_fl.core.errors import ArgumentError, NotSupportedError
from transformer_engine_fl.core.manager import OpManager, get_default_manager
from transformer_engine_fl.core.registry import Entry
from transformer_engine_fl.core.selection import options_decline
from transformer_engine_fl.testing.allocation import Guarded
from transformer_engine_fl.testing.comparison import Worst, compare

__all__ = ["Case", "ConformanceError", "cases"]


class ConformanceError(AssertionError):
    """An implementation does not keep the contract."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that must hold.

    Attributes:
        name: ``operator/impl_id/dtype/what/sample``, unique.
        check: what :meth:`run` runs.
    """

    name: str
    check: Callable[[], Worst | None]

    def run(self) -> Worst | None:
        """Check it; whatever an implementation raises is a failure like any other.

        Returns:
            The worst error of a comparison, None where nothing is compared.

        Raises:
            ConformanceError: it does not hold.
        """
        try:
            return self.check()
        except ConformanceError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise ConformanceError(f"{self.name} raised {said}") from error


def cases(
    impl_id: str,
    *,
    operators: Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
    device: str = "cpu",
    manager: OpManager | None = None,
) -> Iterator[Case]:
    """Every case for an implementation set.

    Args:
        impl_id: the set, e.g. ``"vendor.acme"``.
        operators: only these; all that it implements unless given.
        dtypes: only these; all that the contract has and it supports unless given.
        device: where to run.
        manager: whose registry holds it; the default one unless given.
    """
    manager = manager or get_default_manager()
    manager.ensure_initialized()
    names = manager.registry.list_operators() if operators is None else tuple(operators)
    wanted = None if dtypes is None else frozenset(dtypes)
    for op_name in names:
        for entry in manager.registry.entries(op_name):
            if entry.impl.impl_id == impl_id and entry.contract is not None:
                yield from _of_entry(entry, entry.contract, device, wanted)


def _of_entry(
    entry: Entry, contract: Contract[..., Any], device: str, wanted: frozenset[str] | None
) -> Iterator[Case]:
    label = f"{contract.name}/{entry.impl.impl_id}"
    supported = entry.impl.supported_dtypes
    for dtype in contract.dtypes:
        if (wanted is not None and dtype not in wanted) or (supported and dtype not in supported):
            continue
        samples = list(contract.samples(dtype, device))
        for sample in samples:
            run = _Run(entry, contract, dtype, sample)
            yield Case(f"{label}/{dtype}/values/{sample.label}", run.values)
        typical = _Run(entry, contract, dtype, samples[0])
        yield Case(f"{label}/{dtype}/outputs never require grad", typical.no_grad)
        yield Case(f"{label}/{dtype}/fake tensors", typical.fake)
        if "deterministic" in entry.impl.traits:
            yield Case(f"{label}/{dtype}/deterministic", typical.deterministic)
        for what, broken in _broken_calls(contract, samples[0]):
            run = _Run(entry, contract, dtype, broken)
            yield Case(f"{label}/{dtype}/refuses/{what}", run.refused)


class _Run:
    """One sample, and what may be asked of an implementation on it."""

    def __init__(
        self, entry: Entry, contract: Contract[..., Any], dtype: str, sample: Sample
    ) -> None:
        self.entry = entry
        self.contract = contract
        self.dtype = dtype
        self.sample = sample

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        reason = self.entry.unavailable() or self.entry.load()
        if reason is not None:
            raise ConformanceError(f"{self.entry.impl.label} is not available: {reason}")
        result = self.entry.fn(*args, **kwargs)
        return result if isinstance(result, tuple) else (result,)

    def declined(self) -> bool:
        """Whether the implementation says beforehand that it does not take the sample."""
        args, kwargs = self.sample.args, self.sample.kwargs
        if options_decline(self.entry, args, kwargs) is not None:
            return True
        supports = self.entry.impl.supports
        return supports is not None and supports(*args, **kwargs) is not True

    def values(self) -> Worst | None:
        """Values, shapes, dtypes; poison overwritten, fences whole, inputs as declared."""
        if self.declined():
            return None
        args, kwargs = _clone(self.sample.args), _clone(self.sample.kwargs)
        expected = self.contract.oracle(*_clone(self.sample.args), **_clone(self.sample.kwargs))
        shapes = self.contract.shapes(*args, **kwargs)
        with Guarded() as memory:
            try:
                results = self.call(args, kwargs)
            except NotSupportedError:
                return None
        outside = memory.broken()
        if outside is not None:
            raise ConformanceError(f"{self.entry.impl.label}: {outside}")
        self._check_inputs(args, kwargs)
        return self._check_results(results, _as_tuple(expected), _as_tuple(shapes))

    def _check_results(
        self, results: tuple[Any, ...], expected: tuple[Any, ...], shapes: tuple[Any, ...]
    ) -> Worst | None:
        self._check_count(results, shapes)
        worst: Worst | None = None
        for place, (result, value, shape) in enumerate(zip(results, expected, shapes, strict=True)):
            where = f"{self.entry.impl.label}, output {place}"
            found = (tuple(result.shape), result.dtype, result.device)
            asked = (tuple(shape.shape), shape.dtype, shape.device)
            if found != asked:
                raise ConformanceError(f"{where} is {found}, the shape rule says {asked}")
            name = str(result.dtype).removeprefix("torch.")
            error = compare(result, value, self.contract.tolerance_for(self.dtype, name))
            if error.ratio > 1:
                raise ConformanceError(f"{where}: {error}")
            worst = error if worst is None or error.ratio > worst.ratio else worst
        return worst

    def _check_count(self, results: tuple[Any, ...], shapes: tuple[Any, ...]) -> None:
        if len(results) != len(shapes):
            raise ConformanceError(
                f"{self.entry.impl.label} returned {len(results)} outputs, not {len(shapes)}"
            )

    def _check_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = self.contract.signature.parameters
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        before = {**dict(zip(names, self.sample.args, strict=False)), **self.sample.kwargs}
        for name, value in given.items():
            if name in self.contract.mutates or not isinstance(value, Tensor):
                continue
            if not torch.equal(_bits(value), _bits(before[name])):
                raise ConformanceError(f"{self.entry.impl.label} has written its input {name!r}")

    def no_grad(self) -> None:
        """Outputs do not require grad, whatever the inputs do."""
        if self.declined():
            return
        args = tuple(_requiring_grad(value) for value in self.sample.args)
        for place, result in enumerate(self.call(args, self.sample.kwargs)):
            if result.requires_grad:
                raise ConformanceError(f"{self.entry.impl.label}: output {place} requires grad")

    def fake(self) -> None:
        """Fake and meta tensors give the right shapes, or are refused; nothing is launched."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        expected = _as_tuple(self.contract.shapes(*self.sample.args, **self.sample.kwargs))
        mode = FakeTensorMode()
        # Fake tensors come in a block of their mode; what is made there is fake as well.
        makers: tuple[tuple[str, Any, Callable[[Tensor], Any]], ...] = (
            ("fake", mode, mode.from_tensor),
            ("meta", contextlib.nullcontext(), lambda tensor: tensor.to("meta")),
        )
        for kind, block, make in makers:
            args = tuple(make(it) if isinstance(it, Tensor) else it for it in self.sample.args)
            kwargs = {
                name: make(it) if isinstance(it, Tensor) else it
                for name, it in self.sample.kwargs.items()
            }
            try:
                with block:
                    results = self.call(args, kwargs)
            except NotSupportedError:
                continue
            self._check_count(results, expected)
            for result, shape in zip(results, expected, strict=True):
                if (result.shape, result.dtype) != (shape.shape, shape.dtype):
                    raise ConformanceError(
                        f"{self.entry.impl.label}: wrong shapes for {kind} tensors"
                    )

    def deterministic(self) -> None:
        """The same bits from run to run."""
        if self.declined():
            return
        first = [_bits(it).clone() for it in self.call(self.sample.args, self.sample.kwargs)]
        for _ in range(3):
            again = self.call(self.sample.args, self.sample.kwargs)
            if not all(torch.equal(_bits(a), b) for a, b in zip(again, first, strict=True)):
                raise ConformanceError(f"{self.entry.impl.label}: not the same bits again")

    def refused(self) -> None:
        """A call that breaks the contract is refused, and nothing is computed."""
        try:
            self.call(self.sample.args, self.sample.kwargs)
        except (ArgumentError, NotSupportedError):
            return
        except Exception as error:
            raise ConformanceError(
                f"{self.entry.impl.label} fails on {self.sample.label} with "
                f"{type(error).__name__}, not with an ArgumentError: {error}"
            ) from error
        raise ConformanceError(f"{self.entry.impl.label} takes {self.sample.label}")


Breaking = Callable[[Any], Any]


def _broken_calls(contract: Contract[..., Any], sample: Sample) -> Iterator[tuple[str, Sample]]:
    """Calls that the contract refuses, one argument wrong in each."""
    names = list(contract.signature.parameters)
    for place, value in enumerate(sample.args):
        if not isinstance(value, Tensor):
            continue
        wrong: dict[str, Breaking] = {
            "one column too many": lambda it: torch.cat([it, it[..., :1]], -1),
            "one column too few": lambda it: it[..., :-1],
            "one dimension too many": lambda it: it.unsqueeze(0),
            "an integer dtype": lambda it: it.to(torch.int32),
            "a string": lambda it: "tensor",
            "no tensor": lambda it: None,
        }
        for what, breaking in wrong.items():
            args = (*sample.args[:place], breaking(value), *sample.args[place + 1 :])
            label = f"{what} as {names[place]}"
            if _refused_by_contract(contract, args, sample.kwargs):
                yield label, Sample(label, args, sample.kwargs)


def _refused_by_contract(
    contract: Contract[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    try:
        contract.check(*args, **kwargs)
    except ArgumentError:
        return True
    return False


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _clone(value: Any) -> Any:
    """A copy with the same strides, storage offset and aliasing within the tensor."""
    if isinstance(value, Tensor):
        base = torch.empty(0, dtype=value.dtype, device=value.device)
        storage = value.untyped_storage().clone()  # type: ignore[no-untyped-call]
        return base.set_(storage, value.storage_offset(), value.shape, value.stride())
    if isinstance(value, dict):
        return {name: _clone(it) for name, it in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_clone(it) for it in value)
    return value


def _bits(value: Tensor) -> Tensor:
    """The tensor's bytes, so that NaN equals itself and -0.0 differs from 0.0."""
    return value.detach().contiguous().flatten().view(torch.uint8)


def _requiring_grad(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value
