"""Running every case of a set, in this process or in several."""

from __future__ import annotations

import functools
import importlib.metadata
import multiprocessing
import os
import shlex
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import torch

from transformer_engine_fl.core.errors import ConfigurationError, TeFlError
from transformer_engine_fl.core.manager import OpManager, get_default_manager
from transformer_engine_fl.testing import machine
from transformer_engine_fl.testing.case import Case, cases, devices, dtypes_of, switched_off
from transformer_engine_fl.testing.outcome import ConformanceError
from transformer_engine_fl.testing.scorecard import Failure, Row, Scorecard

__all__ = [
    "Progress",
    "check_counts",
    "reproduction",
    "verify",
]

DECIDING = ("TRITON_INTERPRET",)
"""Variables that decide how kernels run."""

REPEATED_VARIABLES = ("TE_FL_PLUGIN_MODULES", *DECIDING)
"""Variables that a command to reproduce a failure must set again: they decide which
implementations there are, and how kernels run."""

Progress = Callable[[int, int, str, int], None]
"""Called with the cases done, the total, the current operator, and the number of failures."""

Results = tuple[list[Row], list[Failure]]


class _Part(NamedTuple):
    """The cases of an operator's dtype on a device."""

    device: str
    operator: str
    dtype: str


def verify(
    impl_id: str,
    *,
    operators: Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
    on: Iterable[str] | None = None,
    only: Iterable[str] | None = None,
    every: int = 1,
    jobs: int = 1,
    manager: OpManager | None = None,
    progress: Progress | None = None,
) -> Scorecard:
    """Run every case of a set; a failure does not end the run.

    Args:
        impl_id, operators, dtypes, only, manager: as for ``cases``.
        on: devices; each type of this machine that the set runs on unless given.
        every: run one in ``every`` cases of each operator and dtype, the first among them.
        jobs: the number of processes that share the cases. They are spawned, so they have what
            plugins register but not what this program registered, and only the default manager.
        progress: called before each case and at the end; with several processes, after each
            dtype of an operator, which ``done`` and ``total`` then count.

    Raises:
        UnknownOperatorError, ConfigurationError: as ``cases``; or several ``jobs`` with a
            ``manager`` or ``only``, or a number below 1.
        TeFlError: one of several processes died.
    """
    check_counts(every, jobs)
    if jobs > 1 and (manager is not None or only is not None):
        raise ConfigurationError(
            "jobs: must be 1 with cases selected by name or with a manager argument"
        )
    manager = manager or get_default_manager()
    operators = None if operators is None else tuple(operators)
    dtypes = None if dtypes is None else tuple(dtypes)
    only = None if only is None else tuple(only)
    if on is None:
        on = devices(impl_id, operators=operators, manager=manager)
    places = tuple(dict.fromkeys(on))
    progress = progress or (lambda *_: None)
    start = time.perf_counter()
    if jobs > 1:
        parts = [
            _Part(place, *names)
            for place in places
            for names in dtypes_of(impl_id, operators=operators, dtypes=dtypes, device=place)
        ]
        rows, failures = _shared(impl_id, parts, every, jobs, progress)
    else:
        find = functools.partial(cases, impl_id, operators=operators, dtypes=dtypes, only=only)
        found = [
            (place, case)
            for place in places
            for case in _each(every, find(device=place, manager=manager))
        ]
        rows, failures = _run(found, manager, progress)
    whole = operators is None and only is None
    off = switched_off(impl_id, operators=operators, manager=manager)
    covered = {row.operator for row in rows} | set(off)
    here = machine.circumstances(places)
    return Scorecard(
        impl_id=impl_id,
        source=_source(impl_id, manager),
        date=here.date,
        seconds=time.perf_counter() - start,
        every=every,
        versions=here.versions
        | {name: os.environ[name] for name in DECIDING if name in os.environ},
        devices=here.devices,
        rows=tuple(rows),
        failures=tuple(failures),
        switched_off=off if only is None else {},
        missing=tuple(sorted(set(manager.registry.contracts) - covered)) if whole else None,
    )


def check_counts(every: int, jobs: int) -> None:
    """Check the counts.

    Raises:
        ConfigurationError: one is below 1.
    """
    if every < 1 or jobs < 1:
        raise ConfigurationError(f"every and jobs must be at least 1, got {every} and {jobs}")


def _each(every: int, found: Iterable[Case]) -> Iterator[Case]:
    seen: dict[tuple[str, str], int] = {}
    for case in found:
        key = (case.operator, case.dtype)
        seen[key] = seen.get(key, -1) + 1
        if seen[key] % every == 0:
            yield case


def _run(found: list[tuple[str, Case]], manager: OpManager, progress: Progress) -> Results:
    rows: dict[tuple[str, str, str], Row] = {}
    failures: list[Failure] = []
    contracts = manager.registry.contracts
    for done, (device, case) in enumerate(found):
        progress(done, len(found), case.operator, len(failures))
        key = (case.operator, device, case.dtype)
        if key not in rows:
            rows[key] = Row(key[0], contracts[case.operator].family, device, case.dtype)
        try:
            outcome = case.run()
        except ConformanceError as error:
            rows[key].count(case, None, error.worst)
            failures.append(_failure(case, device, error))
        else:
            rows[key].count(case, outcome, outcome.worst)
    progress(len(found), len(found), "", len(failures))
    return list(rows.values()), failures


# ------------------------------------------------------------------- several processes


def _shared(impl_id: str, parts: list[_Part], every: int, jobs: int, progress: Progress) -> Results:
    done: dict[_Part, Results] = {}
    failed = 0
    context = multiprocessing.get_context("spawn")  # a device does not survive a fork
    with ProcessPoolExecutor(jobs, context, _start, (jobs,)) as pool:
        waiting = {pool.submit(_part, impl_id, part, every): part for part in parts}
        progress(0, len(parts), "", 0)
        try:
            for future in as_completed(waiting):
                part = waiting[future]
                done[part] = future.result()
                failed += len(done[part][1])
                progress(len(done), len(parts), part.operator, failed)
        except BrokenProcessPool as error:
            open_ = sorted({part.operator for part in parts if part not in done})[: 2 * jobs]
            raise TeFlError(
                f"a process that ran cases of {impl_id} died; not finished: "
                f"{', '.join(open_)}; run these with --op and one job"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
    results = [done[part] for part in parts]
    return [row for it, _ in results for row in it], [one for _, it in results for one in it]


def _start(jobs: int) -> None:
    torch.set_num_threads(machine.threads_each(jobs))


def _part(impl_id: str, part: _Part, every: int) -> Results:
    found = cases(impl_id, operators=(part.operator,), dtypes=(part.dtype,), device=part.device)
    chosen = [(part.device, case) for case in _each(every, found)]
    return _run(chosen, get_default_manager(), lambda *_: None)


# ---------------------------------------------------------------------- what is reported


def _failure(case: Case, device: str, error: ConformanceError) -> Failure:
    """The failure as text: an exception would keep the tensors of the call alive."""
    cause = error.__cause__
    raised = cause is not None and not isinstance(cause, ConformanceError)
    return Failure(
        case.name,
        device,
        said=str(error).removeprefix(f"{case.name}: ").removeprefix(f"{case.name} "),
        traceback="".join(traceback.format_exception(cause)) if cause and raised else None,
        reproduce=reproduction(case.impl_id, case.name, device),
    )


def reproduction(impl_id: str, case: str, device: str, *options: str) -> str:
    """The command that runs a case alone, with these further options."""
    set_here = [f"{name}={os.environ[name]}" for name in REPEATED_VARIABLES if name in os.environ]
    command = ("te-fl", "verify", impl_id, *options, "--device", device, "--case", case)
    return shlex.join([*set_here, *command])


def _source(impl_id: str, manager: OpManager) -> str:
    """The set or plugin that registered ``impl_id``, with the version of its distribution."""
    for report in manager.registry.snapshot().sources.values():
        if any(label.endswith(f"/{impl_id}") for label in report.registered):
            try:
                version = f" {importlib.metadata.version(report.origin)}"
            except importlib.metadata.PackageNotFoundError:
                version = ""
            return f"{report.name} ({report.origin}{version})"
    return "registered by the program"
