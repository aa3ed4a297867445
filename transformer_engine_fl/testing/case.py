"""Cases generated from the contracts, each of which an implementation must pass.

A case is one property that must hold on one sample; its name says which, and running it
alone reproduces a failure. ``checks`` and ``streams`` check the properties.
"""

from __future__ import annotations

import functools
import itertools
import re
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from transformer_engine_fl.core.blame import error_text
from transformer_engine_fl.core.contract import Between, Contract, Sample
from transformer_engine_fl.core.errors import (
    ArgumentError,
    ConfigurationError,
    UnknownOperatorError,
    suggestion,
)
from transformer_engine_fl.core.manager import OpManager, get_default_manager
from transformer_engine_fl.core.registry import Entry
from transformer_engine_fl.testing import streams
from transformer_engine_fl.testing.arguments import (
    as_tuple,
    by_name,
    rows_of,
    taking_rows,
    tensors,
    tiled,
)
from transformer_engine_fl.testing.checks import Declined, Run, row_ranges
from transformer_engine_fl.testing.machine import device_types, usable_device
from transformer_engine_fl.testing.outcome import ConformanceError, Outcome
from transformer_engine_fl.testing.refusals import refused_calls

__all__ = ["Case", "calls", "cases", "devices", "dtypes_of", "switched_off"]

_MANY_ROWS = 512
"""How many rows the widest sample is repeated to on a GPU: more than it has multiprocessors."""


@dataclass(frozen=True, slots=True)
class Case:
    """One property that must hold on one sample.

    Attributes:
        name: ``operator/impl_id/dtype/what/sample``, unique.
        check: what :meth:`run` runs.
        required: declining is a failure.
    """

    name: str
    check: Callable[[], Outcome]
    required: bool = False

    @property
    def operator(self) -> str:
        """The operator's name."""
        return self.name.split("/")[0]

    @property
    def impl_id(self) -> str:
        """The id of the implementation set."""
        return self.name.split("/")[1]

    @property
    def dtype(self) -> str:
        """The dtype of its sample."""
        return self.name.split("/")[2]

    def run(self) -> Outcome:
        """Run the check; any exception of the implementation is a failure.

        Returns:
            The outcome: the worst error of a comparison, or why the sample was declined.

        Raises:
            ConformanceError: the property does not hold.
        """
        try:
            return self.check()
        except ConformanceError as error:
            raise ConformanceError(f"{self.name}: {error}", error.worst) from error
        except Declined as declined:
            if self.required:
                raise ConformanceError(
                    f"{self.name}: declines the typical sample of a dtype that it supports: "
                    f"{declined}"
                ) from declined
            return Outcome(declined=str(declined))
        except BaseException as error:  # also SystemExit, say
            if isinstance(error, KeyboardInterrupt) or _is_of_a_signal(error):
                raise
            raise ConformanceError(f"{self.name} raised {error_text(error)}") from error


def _is_of_a_signal(error: BaseException) -> bool:
    """Whether a signal's handler raised it to end the program, as te-fl's does at a SIGTERM."""
    if isinstance(error, Exception):
        return False
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(handler, "__code__", None) for handler in handlers}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def cases(
    impl_id: str,
    *,
    operators: Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
    device: str = "cpu",
    only: Iterable[str] | None = None,
    manager: OpManager | None = None,
) -> Iterator[Case]:
    """Every case for an implementation set.

    Args:
        impl_id: the set, e.g. ``"vendor.acme"``.
        operators: only these; all that the set implements unless given.
        dtypes: only these; all that both the contract and the set have unless given.
        device: where to run.
        only: only the cases of these names, in which ``*`` stands for anything.
        manager: the manager whose registry holds the set; the default one unless given.

    Raises:
        UnknownOperatorError: nothing here has that id, or an operator of ``operators``
            has no implementation of that id.
        ConfigurationError: there is nothing to test: no contract, no such dtype or case,
            the set does not run on that device, or is switched off.
    """
    here, wanted = _select_entries(impl_id, operators, dtypes, device, manager)
    if only is None:
        return (case for it in here for case in _of_entry(*it, device, wanted))
    named = (case for name in only for case in _named(name, here, device, wanted))
    return iter({case.name: case for case in named}.values())


def calls(impl_id: str, operator: str, dtype: str, device: str) -> Iterator[tuple[str, Run]]:
    """Each sample of an operator's dtype as a call of its own, in the default manager.

    Each has the name of the case that compares its values. Errors are those of :func:`cases`.
    """
    here, _ = _select_entries(impl_id, (operator,), (dtype,), device, None)
    for entry, contract in here:
        for sample in contract.samples(dtype, device):
            name = f"{_label(entry, contract, dtype)}/values/{sample.label}"
            yield name, Run(entry, contract, dtype, sample)


def dtypes_of(
    impl_id: str, *, operators: Iterable[str] | None, dtypes: Iterable[str] | None, device: str
) -> Iterator[tuple[str, str]]:
    """Each operator with each dtype that :func:`cases` has cases of in the default manager.

    Arguments and errors are those of :func:`cases`.
    """
    here, wanted = _select_entries(impl_id, operators, dtypes, device, None)
    for entry, contract in here:
        for dtype in contract.dtypes:
            if _takes(entry, dtype, wanted):
                yield contract.name, dtype


def devices(
    impl_id: str, *, operators: Iterable[str] | None = None, manager: OpManager | None = None
) -> tuple[str, ...]:
    """The device types of this machine that a set runs on, the CPU first.

    Args:
        impl_id, operators, manager: as for :func:`cases`.

    Raises:
        UnknownOperatorError: as :func:`cases`.
        ConfigurationError: it runs on none of them.
    """
    found = _entries(impl_id, operators, manager or get_default_manager())
    here = device_types()
    served = tuple(kind for kind in here if any(_runs_on(entry, kind) for entry, _ in found))
    if not served:
        theirs = {name for entry, _ in found for name in entry.impl.devices or ()}
        reasons = dict.fromkeys(reason for entry, _ in found if (reason := entry.unavailable()))
        raise ConfigurationError(
            f"{impl_id!r} runs on {', '.join(sorted(theirs))} only; "
            f"this machine has: {', '.join(here)}{''.join(f'; {it}' for it in reasons)}"
        )
    return served


def switched_off(
    impl_id: str, *, operators: Iterable[str] | None = None, manager: OpManager | None = None
) -> dict[str, str]:
    """The operators of a set that serve nowhere and have no cases, each with its reason.

    For example operators of Transformer Engine's plugins for which there is no bridge. Arguments
    and errors are those of :func:`cases`.
    """
    found = _with_contract(impl_id, operators, manager or get_default_manager())
    reasons = {contract.name: entry.switched_off() for entry, contract in found}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _runs_on(entry: Entry, kind: str) -> bool:
    return entry.impl.devices is None or kind in entry.impl.devices


Found = list[tuple[Entry, Contract[..., Any]]]


def _select_entries(
    impl_id: str,
    operators: Iterable[str] | None,
    dtypes: Iterable[str] | None,
    device: str,
    manager: OpManager | None,
) -> tuple[Found, frozenset[str] | None]:
    """The implementations to test on a device, and the dtypes that are wanted, None for all."""
    found = _entries(impl_id, operators, manager or get_default_manager())
    wanted = None if dtypes is None else frozenset(dtypes)
    kind = usable_device(device, "device").type
    here = [it for it in found if _runs_on(it[0], kind)]
    if not here:
        theirs = ", ".join(
            sorted({name for entry, _ in found for name in entry.impl.devices or ()})
        )
        raise ConfigurationError(f"device {device!r}: {impl_id!r} runs on {theirs} only")
    known = sorted({dtype for _, contract in here for dtype in contract.dtypes})
    for dtype in sorted(wanted or ()):
        if dtype not in known:
            raise ConfigurationError(
                f"dtypes: {dtype!r} is in no contract of {impl_id!r}; "
                f"they have {', '.join(known)}{suggestion(dtype, known)}"
            )
    if not any(_takes(entry, dtype, wanted) for entry, it in here for dtype in it.dtypes):
        claimed = {name for entry, _ in here for name in entry.impl.supported_dtypes or ()}
        requested = known if wanted is None else sorted(wanted)
        raise ConfigurationError(
            f"{impl_id!r} supports none of the dtypes to be tested ({', '.join(requested)}); its "
            f"supported_dtypes are {', '.join(sorted(claimed)) or 'none'}"
        )
    return here, wanted


def _takes(entry: Entry, dtype: str, wanted: frozenset[str] | None) -> bool:
    supported = entry.impl.supported_dtypes
    return (wanted is None or dtype in wanted) and (supported is None or dtype in supported)


def _entries(impl_id: str, operators: Iterable[str] | None, manager: OpManager) -> Found:
    found = _with_contract(impl_id, operators, manager)
    on = [it for it in found if it[0].switched_off() is None]
    if not on:
        reasons = dict.fromkeys(str(entry.switched_off()) for entry, _ in found)
        raise ConfigurationError(
            f"none of the selected operators of {impl_id!r} can be tested: {'; '.join(reasons)}"
        )
    return on


def _with_contract(impl_id: str, operators: Iterable[str] | None, manager: OpManager) -> Found:
    manager.ensure_initialized()
    registry = manager.registry
    known = {
        entry.impl.impl_id: (entry.impl.vendor or "").lower()
        for name in registry.list_operators()
        for entry in registry.entries(name)
    }
    if impl_id not in known:
        requested = impl_id.lower()
        of_vendor = [repr(it) for it, vendor in known.items() if vendor and vendor == requested]
        hint = f"; vendor {impl_id!r} has {', '.join(sorted(of_vendor))}" if of_vendor else ""
        raise UnknownOperatorError(
            f"unknown implementation {impl_id!r}; known: "
            f"{', '.join(sorted(known)) or 'none'}{hint or suggestion(impl_id, known)}"
        )
    theirs = {
        name: entry
        for name in registry.list_operators()
        for entry in registry.entries(name)
        if entry.impl.impl_id == impl_id
    }
    names = list(theirs)
    if operators is not None:
        names = [registry.canonical(name) for name in dict.fromkeys(operators)]
        for name in names:
            if name not in theirs:
                raise UnknownOperatorError(
                    f"{impl_id!r} does not implement {name!r}{suggestion(name, theirs)}"
                )
    entries = (theirs[name] for name in names)
    found = [(entry, entry.contract) for entry in entries if entry.contract is not None]
    if not found:
        close = suggestion(names[0], registry.contracts) if len(names) == 1 else ""
        raise ConfigurationError(
            f"no operator of {impl_id!r} has a contract to test against: "
            f"{', '.join(map(repr, names))}{close}"
        )
    return found


def _named(name: str, here: Found, device: str, wanted: frozenset[str] | None) -> Iterator[Case]:
    """The cases that match a name, in which ``*`` stands for anything; none is an error."""
    literal = name.partition("*")[0]
    pattern = re.compile(".*".join(map(re.escape, name.split("*"))))
    chosen = (case for it in here for case in _of_entry(*it, device, wanted, literal))
    matching = [case for case in chosen if pattern.fullmatch(case.name)]
    if not matching:
        operator = [it for it in here if it[1].name == name.partition("/")[0]]
        near = [case.name for it in operator for case in _of_entry(*it, device, wanted)]
        form = "operator/impl_id/dtype/what/sample; * matches anything"
        raise ConfigurationError(f"no case named {name!r} ({form}){suggestion(name, near)}")
    yield from matching


def _of_entry(
    entry: Entry,
    contract: Contract[..., Any],
    device: str,
    wanted: frozenset[str] | None,
    start: str = "",
) -> Iterator[Case]:
    """The cases of an implementation; may leave out some whose names lack the prefix ``start``."""
    for dtype in contract.dtypes:
        label = f"{_label(entry, contract, dtype)}/"
        if not (label.startswith(start) or start.startswith(label)):
            continue
        if _takes(entry, dtype, wanted):
            yield from _of_dtype(entry, contract, dtype, list(contract.samples(dtype, device)))


def _label(entry: Entry, contract: Contract[..., Any], dtype: str) -> str:
    return f"{contract.name}/{entry.impl.impl_id}/{dtype}"


def _of_dtype(
    entry: Entry, contract: Contract[..., Any], dtype: str, samples: list[Sample]
) -> Iterator[Case]:
    """Every case of a dtype; the first sample is the typical one."""
    label = _label(entry, contract, dtype)
    traits = entry.impl.traits

    def of(chosen: Iterable[Sample]) -> Iterator[tuple[str, Run]]:
        for sample in chosen:
            yield sample.label, Run(entry, contract, dtype, sample)

    typical = samples[0]
    for name, run in of(samples):
        yield Case(f"{label}/values/{name}", run.values, required=run.sample is typical)
    for name, run in of(_one_of_each_kind(contract, samples)):
        yield Case(f"{label}/outputs never require grad/{name}", run.no_grad)
        yield Case(f"{label}/fake tensors/{name}", run.fake)
    for name, run in of([typical]):
        yield Case(f"{label}/repeated/{name}", run.repeated)
        if _device(typical) == "cuda":
            yield Case(f"{label}/stream/{name}", functools.partial(streams.stream, run))
            if torch.cuda.device_count() > 1:
                other = functools.partial(streams.other_device, run)
                yield Case(f"{label}/other device/{name}", other)
            if "graph_safe" in traits:
                yield Case(f"{label}/graph safe/{name}", functools.partial(streams.graph_safe, run))
    sizes = _sizes(contract, samples)
    if "deterministic" in traits:
        for name, run in of(sizes):
            yield Case(f"{label}/deterministic/{name}", run.deterministic)
    if "batch_invariant" in traits:
        some = {it.label: it for it in (*sizes, *_layouts(contract, samples))}.values()
        for name, run in of(it for it in some if _rows_are_independent(contract, it)):
            yield Case(f"{label}/batch invariant/{name}", run.batch_invariant)
    for name, run in of(refused_calls(contract, samples)):
        yield Case(f"{label}/refuses/{name}", run.refused)


def _one_of_each_kind(contract: Contract[..., Any], samples: list[Sample]) -> Iterator[Sample]:
    """The typical sample, one with an option, one that is not contiguous."""

    def strided(sample: Sample) -> bool:
        value = by_name(contract, sample).get(contract.dispatch_on)
        return not all(it.is_contiguous() for it in tensors(value))

    kinds = (samples[:1], filter(lambda it: it.kwargs, samples), filter(strided, samples))
    firsts = [it for kind in kinds for it in list(kind)[:1]]
    yield from {id(it): it for it in firsts}.values()


def _sizes(contract: Contract[..., Any], samples: list[Sample]) -> list[Sample]:
    """The typical sample, the one of most rows, the widest; on a GPU also that with many rows."""

    def width(sample: Sample) -> int:
        value = by_name(contract, sample).get(contract.dispatch_on)
        return value.shape[-1] if isinstance(value, torch.Tensor) and value.ndim else 0

    rows = functools.partial(rows_of, contract)
    widest = max(samples, key=lambda it: (rows(it) > 1, width(it)))
    chosen = [samples[0], max(samples, key=rows), widest]
    if rows(widest) > 1 and _device(widest) != "cpu":
        tall = tiled(contract, widest, _MANY_ROWS)
        chosen += [tall] * (_checked(contract, tall) is not None)
    return list({it.label: it for it in chosen}.values())


def _layouts(contract: Contract[..., Any], samples: list[Sample]) -> list[Sample]:
    """The widest sample of each layout of rows that are not simply dense.

    Layouts differ in what a set may make of rows, among others or alone: whether they are dense in
    themselves, whether their widths and distances are multiples of 16 bytes, and along how many
    dimensions they lie. Rows of several dimensions may have no single stride, of which a slice of
    one shows nothing.
    """
    found: dict[tuple[object, ...], tuple[int, Sample]] = {}
    for sample in samples:
        value = by_name(contract, sample).get(contract.dispatch_on)
        if isinstance(value, torch.Tensor) and value.ndim > 1 and not value.is_contiguous():
            width, distance = value.shape[-1], value.stride(-2)
            odd = [it * value.element_size() % 16 != 0 for it in (width, distance)]
            layout = (value.ndim, value.shape[-2] == 1, value.stride(-1) == 1, *odd)
            if width > found.get(layout, (0, sample))[0]:
                found[layout] = width, sample
    return [sample for _, sample in found.values()]


def _rows_are_independent(contract: Contract[..., Any], sample: Sample) -> bool:
    """Whether, by the oracle, rows that are computed alone have the values they have among all."""
    rows = rows_of(contract, sample)
    if rows < 2:
        return False
    whole = [*_right(contract, sample)]

    def alone(first: int, end: int) -> bool:
        some = taking_rows(contract, sample, first, end)
        shapes = _checked(contract, some)
        if shapes is None or not any(len(it) == end - first for it in tensors(shapes) if it.ndim):
            return False
        try:
            parts = [*_right(contract, some)]
        except Exception:  # noqa: BLE001  # cut down, the call has no meaning
            return False
        if len(parts) != len(whole):
            return False
        pairs = [
            (value[first:end].double(), part.double())
            for value, part in zip(whole, parts, strict=True)
            if value.ndim and part.ndim and (len(value), len(part)) == (rows, end - first)
        ]
        same = functools.partial(torch.allclose, rtol=1e-9, equal_nan=True)
        return bool(pairs) and all(same(value, part) for value, part in pairs)

    return all(alone(first, end) for first, end in row_ranges(rows))


def _right(contract: Contract[..., Any], sample: Sample) -> Iterator[torch.Tensor]:
    """Each tensor that the oracle returns, of bounds both: the outputs, in the shapes of the shape
    rule, and then the inputs that are written.
    """
    rule = as_tuple(contract.shapes(*sample.args, **sample.kwargs))
    values = as_tuple(contract.oracle(*sample.args, **sample.kwargs))
    for output, value in itertools.zip_longest(rule, values):
        for bound in (value.low, value.high) if isinstance(value, Between) else (value,):
            for shape, tensor in itertools.zip_longest(tensors(output), tensors(bound)):
                like = shape is not None and shape.numel() == tensor.numel()
                yield tensor.reshape(shape.shape) if like else tensor


def _checked(contract: Contract[..., Any], sample: Sample) -> tuple[Any, ...] | None:
    """The outputs by the shape rule, None if the contract refuses the call."""
    try:
        return as_tuple(contract.shapes(*sample.args, **sample.kwargs))
    except ArgumentError:
        return None


def _device(sample: Sample) -> str:
    return next(tensors((sample.args, sample.kwargs))).device.type
