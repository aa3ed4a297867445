"""Measuring the candidates of a choice: values by the conformance kit, then times.

The families define the candidates, and the calls with which they are measured.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from transformer_engine_fl.backends.flagos.tuning import CHOICES, Choice
from transformer_engine_fl.backends.flagos.tuning.calls import CALLS, Calls, Shape
from transformer_engine_fl.cli._processes import run_in_processes
from transformer_engine_fl.core.blame import error_text
from transformer_engine_fl.core.contract import Sample
from transformer_engine_fl.core.errors import TeFlError
from transformer_engine_fl.core.manager import get_default_manager
from transformer_engine_fl.core.registry import Entry
from transformer_engine_fl.ops import CATALOGUE
from transformer_engine_fl.ops._tensors import TorchTensors
from transformer_engine_fl.testing import timing
from transformer_engine_fl.testing.checks import Declined, Run
from transformer_engine_fl.testing.outcome import ConformanceError

__all__ = [
    "Discarded",
    "Job",
    "Result",
    "compile_all",
    "jobs",
    "load_families",
    "measure",
    "median_ms",
    "named",
    "shown",
]

IMPL_ID = "default.flagos"
_WORTH = 0.99
"""A candidate that is less than a hundredth faster than the heuristic's value is not chosen."""

T = TypeVar("T")
Timer = Callable[[Callable[[], Any]], float]


def median_ms(work: Callable[[], Any]) -> float:
    """Median time of a call, the L2 cache cleared before each."""
    return timing.median_ms(work, warmup=5, rep=30)


class Discarded(NamedTuple):
    """A candidate that was discarded, and why."""

    value: dict[str, Any]
    reason: str


class Job(NamedTuple):
    """One choice to be measured with one call."""

    calls: Calls
    choice: Choice[Any]
    shape: Shape
    dtype: str

    def sample(self, shape: Shape, device: str) -> Sample:
        """The call on a shape."""
        return self.calls.make(shape, getattr(torch, self.dtype), device)

    def __str__(self) -> str:
        return f"{self.calls.op} {'x'.join(map(str, self.shape))} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a job.

    Attributes:
        job: the job.
        key: the key of the choice for which the call asked.
        value: the candidate to use; None if none keeps the contract.
        ms: its time, the mean of two.
        heuristic: the value that the heuristic chooses.
        heuristic_ms: its time; None if it was discarded.
        tried: how many candidates were tried, discarded ones included.
        discarded: the candidates whose results break the contract, or that do not run.
    """

    job: Job
    key: dict[str, int]
    value: dict[str, Any] | None
    ms: float | None
    heuristic: dict[str, Any]
    heuristic_ms: float | None
    tried: int
    discarded: tuple[Discarded, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        job = self.job
        return {
            "operator": job.calls.op,
            "choice": job.choice.name,
            "shape": list(job.shape),
            "dtype": job.dtype,
            "key": self.key,
            "value": self.value,
            "ms": self.ms,
            "heuristic": self.heuristic,
            "heuristic_ms": self.heuristic_ms,
            "tried": self.tried,
            "discarded": [it._asdict() for it in self.discarded],
        }


def load_families() -> None:
    """Import every family of the set, so that each choice is registered.

    Raises:
        TeFlError: Triton is not installed.
    """
    try:
        from transformer_engine_fl.backends.flagos.tuning import files

        files.load_families()
    except ImportError as error:
        raise TeFlError(f"the Triton set cannot be loaded: {error}") from error


def jobs(wanted: Sequence[Calls], shapes: Sequence[Shape], dtypes: Sequence[str]) -> list[Job]:
    """The jobs: for the operators' own shapes and dtypes unless given."""
    return [
        Job(calls, CHOICES[name], shape, dtype)
        for calls in wanted
        for name in calls.choices
        for dtype in dtypes or calls.dtypes
        for shape in shapes or calls.shapes_of(dtype)
    ]


def compile_all(
    wanted: Sequence[Calls],
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    device: torch.device,
    processes: int,
    progress: Callable[[int, int, str], None],
) -> None:
    """Run every candidate of :func:`jobs` once, in several processes.

    Measuring then finds the compiled kernels in Triton's cache on disk. Compiling takes much
    longer than measuring, and one process compiles one kernel at a time.

    Args:
        wanted, shapes, dtypes: as for :func:`jobs`.
        device: the device to run on.
        processes: how many.
        progress: called with the jobs done, the total, and the job that was done last.
    """
    question = ([CALLS.index(it) for it in wanted], shapes, dtypes, str(device))
    count = len(jobs(wanted, shapes, dtypes))
    run_in_processes(
        partial(_rehearse, *question),
        range(count),
        processes,
        lambda done, name: progress(done, count, name),
    )


def _rehearse(
    places: list[int], shapes: Sequence[Shape], dtypes: Sequence[str], where: str, index: int
) -> str:
    """Run every candidate of one job on its smaller shape; returns the job's name."""
    load_families()
    job = jobs([CALLS[place] for place in places], shapes, dtypes)[index]
    entry = _entry(job.calls.op)
    with contextlib.suppress(Exception):  # a failure comes again when it is measured and reported
        sample = job.sample(job.calls.check_shape(job.shape), where)
        with job.choice.trial() as keys:
            entry.fn(*sample.args, **sample.kwargs)
        for value in job.choice.candidates(*next(iter(keys))):
            with contextlib.suppress(Exception), job.choice.trial(value):
                entry.fn(*sample.args, **sample.kwargs)
    return str(job)


def measure(
    job: Job, device: torch.device, timer: Timer, progress: Callable[[str], None]
) -> Result:
    """Measure every candidate.

    Args:
        job: the choice and the call.
        device: the device to measure on.
        timer: returns the milliseconds of a call; asked twice about each candidate that is not
            discarded.
        progress: called with each candidate, as text, each time before it is timed.

    Raises:
        TeFlError: the call does not ask for this choice, or the device ran out of memory.
    """
    where = str(device)
    entry = _entry(job.calls.op)
    checked = _attempt(job, lambda: job.sample(job.calls.check_shape(job.shape), where))
    timed = _attempt(job, lambda: job.sample(job.shape, where))
    with job.choice.trial() as keys:
        _attempt(job, lambda: entry.fn(*timed.args, **timed.kwargs))
    if len(keys) != 1:
        raise TeFlError(f"{job}: looks {job.choice.name!r} up {len(keys)} times, not once")
    (key,) = keys
    first = job.choice.unmeasured(device, key)
    values = list(dict.fromkeys([first, *job.choice.candidates(*key)]))
    times: dict[Any, list[float]] = {value: [] for value in values}
    discarded = []
    # A device that is busy may lower its clocks. Each candidate is timed twice, the second time in
    # reverse order, so that this makes all of them slower alike. Their calls cannot take turns: a
    # trial of another value plans the launches anew.
    for again, order in enumerate((values, values[::-1])):
        for value in [it for it in order if it in times]:
            progress(f"{job}: {shown(value._asdict())}{' (again)' if again else ''}")
            with job.choice.trial(value):
                wrong = None if again else _wrong(job, entry, checked, value)
                found = wrong or _milliseconds(job, entry, timed, value, timer)
            if isinstance(found, str):
                del times[value]
                discarded.append(Discarded(value._asdict(), found))
            else:
                times[value].append(found)
    means = {value: statistics.fmean(both) for value, both in times.items()}
    return _result(job, key, first, means, len(values), discarded)


def _result(
    job: Job,
    key: tuple[int, ...],
    first: Any,
    times: dict[Any, float],
    tried: int,
    discarded: list[Discarded],
) -> Result:
    best = min(times, key=lambda it: times[it], default=None)
    if first in times and times[best] > _WORTH * times[first]:
        best = first
    return Result(
        job,
        dict(zip(job.choice.key, key, strict=True)),
        None if best is None else best._asdict(),
        times.get(best),
        first._asdict(),
        times.get(first),
        tried,
        tuple(discarded),
    )


def _entry(op: str) -> Entry:
    manager = get_default_manager()
    manager.ensure_initialized()
    (entry,) = (it for it in manager.registry.entries(op) if it.impl.impl_id == IMPL_ID)
    reason = entry.unavailable() or entry.load()
    if reason is not None:
        raise TeFlError(f"{op}: {IMPL_ID} is not available: {reason}")
    return entry


def _wrong(job: Job, entry: Entry, sample: Sample, value: Any) -> str | None:
    """Why a result breaks the contract, or there is none; ``value`` is under trial."""
    try:
        Run(entry, CATALOGUE[job.calls.op], job.dtype, sample).values()
    except Declined as error:
        return f"declines the call: {error}"
    except ConformanceError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a kernel's; it is reported
        return _error_line(job, error, value)
    return None


def _milliseconds(job: Job, entry: Entry, sample: Sample, value: Any, timer: Timer) -> float | str:
    """The time of a call, or why it does not run; ``value`` is under trial."""
    try:
        return timer(lambda: entry.fn(*sample.args, **sample.kwargs))
    except Exception as error:  # noqa: BLE001 - a kernel's; it is reported
        return _error_line(job, error, value)


def _attempt(job: Job, work: Callable[[], T]) -> T:
    try:
        return work()
    except Exception as error:
        raise TeFlError(f"{job}: {_error_line(job, error)}") from error


def _error_line(job: Job, error: Exception, value: Any = None) -> str:
    """An error in one line; ``value`` is the candidate under trial, if any.

    Raises:
        TeFlError: the error is fatal: nothing that follows could run either.
    """
    line = error_text(error).partition("\n")[0][:200]
    if TorchTensors().is_fatal(error):
        prefix = job if value is None else f"{job}: {shown(value._asdict())}"
        raise TeFlError(
            f"{prefix}: {line}; measuring has stopped; if the device is out of memory, give "
            "smaller --shapes"
        ) from error
    return line


def shown(fields: dict[str, Any]) -> str:
    """A candidate as text."""
    return " ".join(f"{name}={value}" for name, value in fields.items())


def named(results: Sequence[Result]) -> Iterator[str]:
    """A line for each candidate that was discarded."""
    for it in results:
        for value, reason in it.discarded:
            yield f"{it.job}: {it.job.choice.name} {shown(value)} is discarded: {reason}"
