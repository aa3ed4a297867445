"""Every call of a set's samples under NVIDIA's compute-sanitizer, and what it finds.

Several processes share the calls; one that a call ends is replaced by another. Values are
not compared here, but in ``running``.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, Final

from transformer_engine_fl.core.errors import ConfigurationError, TeFlError
from transformer_engine_fl.testing import machine
from transformer_engine_fl.testing.case import cases, dtypes_of
from transformer_engine_fl.testing.running import Progress, check_counts, reproduction
from transformer_engine_fl.testing.sanitizer import (
    PROGRAM,
    TOOLS,
    Part,
    Process,
    ToolReport,
    find,
    version,
)

__all__ = ["Finding", "Report", "Row", "sanitize"]

SHOWN_LINES: Final = 6
"""How many of a report's lines are kept."""


@dataclass(slots=True)
class Row:
    """The results of the calls of an operator's dtype.

    Attributes:
        operator, device, dtype: which calls.
        calls: how many were made, declined ones included.
        declined, failed: how many of these; a failed call raised an error or ended the process.
        errors, warnings: in how many calls the tool has reported one.
    """

    operator: str
    device: str
    dtype: str
    calls: int = 0
    declined: int = 0
    failed: int = 0
    errors: int = 0
    warnings: int = 0


@dataclass(slots=True)
class Finding:
    """What the tool reported of a kernel in the calls of an operator, or a call that failed.

    Attributes:
        kind: ``error`` or ``warning``, as the tool says; ``failed`` for a call that failed.
        operator, device: of the calls.
        kernel: its name as the tool has it; None where it names none.
        said: the first lines of the first report.
        reports: how many there were; memcheck makes one for each thread.
        cases: the calls, by the names of the cases that compare their values.
        reproduce: a command that makes only the first of these calls.
    """

    kind: str
    operator: str
    device: str
    kernel: str | None
    said: tuple[str, ...]
    reproduce: str
    reports: int = 0
    cases: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Report:
    """The results of the calls of a set under a tool.

    Attributes:
        impl_id, tool: the set and the tool.
        date: when, in UTC.
        seconds: how long it took.
        every: one call in so many of each operator and dtype was made.
        versions, devices: what it ran with.
        rows: by operator, device and dtype.
        findings: errors first, warnings last.
        unfinished: operators' dtypes, as ``operator/dtype``, that the time was too short for.
        under_way: the calls that were being made when the time was over.
        notes: what the tool reported outside of any call, or failed to report, so that the run
            proves nothing.
    """

    impl_id: str
    tool: str
    date: str
    seconds: float
    every: int
    versions: dict[str, str | None]
    devices: list[dict[str, Any]]
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    unfinished: tuple[str, ...]
    under_way: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether calls were checked, and nothing but warnings was found."""
        found = any(it.kind != "warning" for it in self.findings)
        return self.checked and not found and not self.notes

    @property
    def checked(self) -> bool:
        """Whether any call was made that was not declined."""
        return self.total("calls") > self.total("declined")

    def total(self, what: str) -> int:
        """The sum over rows of ``calls``, ``declined``, ``failed``, ``errors`` or ``warnings``."""
        return sum(getattr(row, what) for row in self.rows)

    def verdict(self) -> str:
        """The result in a line."""
        wrong = [
            f"{self.total(what)} calls {words}"
            for what, words in (
                ("errors", "with errors"),
                ("warnings", "with warnings"),
                ("failed", "failed"),
            )
            if self.total(what)
        ]
        nothing = "nothing found" if self.checked else "nothing was checked"
        parts = [
            f"{', '.join(wrong) or nothing} in {self.total('calls')} calls",
            f"{self.total('declined')} declined" if self.total("declined") else "",
            f"operators: {len({row.operator for row in self.rows})}",
            f"1 call in {self.every} was run" if self.every > 1 else "",
            f"{len(self.unfinished)} operator dtypes not finished" if self.unfinished else "",
        ]
        return f"{self.impl_id} under {self.tool}: {'; '.join(filter(None, parts))}"

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return dataclasses.asdict(self) | {"passed": self.passed}


def sanitize(
    impl_id: str,
    tool: str,
    *,
    operators: Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
    on: Iterable[str] = ("cuda",),
    only: Iterable[str] | None = None,
    every: int = 1,
    jobs: int = 1,
    stop_after: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Make every call of a set's samples under a tool of compute-sanitizer.

    Args:
        impl_id, operators, dtypes: as for ``cases``.
        tool: one of ``TOOLS``.
        on: devices.
        only: only the calls of these names, in which ``*`` stands for anything: those of the
            cases that compare values.
        every: make one in ``every`` calls of each operator and dtype, the first among them.
        jobs: the number of processes that share the calls, each under a sanitizer of its own.
            They have what plugins register, but not what this program registered.
        stop_after: seconds, after which the run ends and what is known is returned.
        progress: called after each operator's dtype with how many of these are done, of how
            many, the operator, and the number of findings.

    Raises:
        UnknownOperatorError, ConfigurationError: as ``cases``; or there is no such tool, no
            compute-sanitizer on the PATH, or a number below 1.
        TeFlError: a process ended before its first call.
    """
    if tool not in TOOLS:
        raise ConfigurationError(
            f"compute-sanitizer: unknown tool {tool!r}; valid: {', '.join(TOOLS)}"
        )
    check_counts(every, jobs)
    program = find()
    start = time.perf_counter()
    requested = None if operators is None else tuple(operators)
    of = None if dtypes is None else tuple(dtypes)
    names = None if only is None else tuple(only)
    parts = [
        it for place in dict.fromkeys(on) for it in _parts(impl_id, requested, of, names, place)
    ]
    run = _Running(impl_id, tool, program, every, min(jobs, len(parts)))
    run.all(parts, stop_after, progress or (lambda *_: None))
    rows = {key: run.rows[key] for key in sorted(run.rows)}
    for kind, operator, device, dtype, _ in {
        (it.kind, it.operator, it.device, case.split("/")[2], case)
        for it in run.findings.values()
        for case in it.cases
    }:
        row = rows[operator, device, dtype]
        row.errors += kind == "error"
        row.warnings += kind == "warning"
    here = machine.circumstances({part.device for part in parts})
    order = ("error", "failed", "warning")
    return Report(
        impl_id=impl_id,
        tool=tool,
        date=here.date,
        seconds=round(time.perf_counter() - start, 3),
        every=every,
        versions=here.versions | {PROGRAM: version(program)},
        devices=here.devices,
        rows=tuple(rows.values()),
        findings=tuple(sorted(run.findings.values(), key=lambda it: order.index(it.kind))),
        unfinished=tuple(sorted(f"{it.operator}/{it.dtype}" for it in run.left)),
        under_way=tuple(run.under_way),
        notes=tuple(run.notes),
    )


def _parts(
    impl_id: str,
    operators: tuple[str, ...] | None,
    dtypes: tuple[str, ...] | None,
    only: tuple[str, ...] | None,
    device: str,
) -> list[Part]:
    """The parts for a device: one dtype of each operator first, then another of each."""
    if only is not None:
        found = cases(impl_id, operators=operators, dtypes=dtypes, device=device, only=only)
        named: dict[tuple[str, str], list[str]] = {}
        for case in found:
            if case.name.split("/")[3] == "values":
                named.setdefault((case.operator, case.dtype), []).append(case.name)
        if not named:
            raise ConfigurationError(
                f"{', '.join(map(repr, only))} names no call to sanitize; only cases that "
                "compare values can be named: OPERATOR/IMPL_ID/DTYPE/values/SAMPLE"
            )
        return [Part(device, *key, tuple(names)) for key, names in named.items()]
    seen: collections.Counter[str] = collections.Counter()
    parts = []
    for operator, dtype in dtypes_of(impl_id, operators=operators, dtypes=dtypes, device=device):
        parts.append((seen[operator], Part(device, operator, dtype)))
        seen[operator] += 1
    return [part for _, part in sorted(parts, key=lambda it: it[0])]


# ------------------------------------------------------------------- several processes


class _Running:
    """The processes, each with a thread that reads its output, and their results."""

    def __init__(self, impl_id: str, tool: str, program: str, every: int, jobs: int) -> None:
        self.impl_id = impl_id
        self.tool = tool
        self.every = every
        self.jobs = jobs
        self.program = program
        self.rows: dict[tuple[str, str, str], Row] = {}
        self.findings: dict[tuple[Any, ...], Finding] = {}
        self.notes: list[str] = []
        self.left: list[Part] = []
        self.under_way: list[str] = []
        self.stopped = False
        self._processes: list[Process] = []
        self._lock = threading.Lock()

    def all(self, parts: list[Part], stop_after: float | None, progress: Progress) -> None:
        """Make the calls of all parts, or as many as the time allows."""
        self.left = list(parts)
        waiting = collections.deque(parts)

        def finished(part: Part) -> None:
            with self._lock:
                self.left.remove(part)
                done = len(parts) - len(self.left)
                progress(done, len(parts), part.operator, len(self.findings))

        progress(0, len(parts), "", 0)
        timer = threading.Timer(stop_after or 0, self.stop)
        timer.daemon = True
        if stop_after is not None:
            timer.start()
        with contextlib.ExitStack() as at_the_end:
            at_the_end.callback(self._close)
            pool = at_the_end.enter_context(ThreadPoolExecutor(self.jobs))
            at_the_end.callback(self.stop)
            at_the_end.callback(timer.cancel)
            threads = [pool.submit(self._work, waiting, finished) for _ in range(self.jobs)]
            for thread in as_completed(threads):
                thread.result()

    def stop(self) -> None:
        """Kill every process, and start no more."""
        with self._lock:
            self.stopped = True
            for process in self._processes:
                process.kill()

    def _close(self) -> None:
        for process in self._processes:
            process.close()

    def _start(self) -> Process | None:
        """Another process; None when the time is over."""
        with self._lock:
            if self.stopped:
                return None
            threads = machine.threads_each(self.jobs)
            self._processes.append(Process(self.program, self.tool, threads))
            return self._processes[-1]

    def _work(self, waiting: collections.deque[Part], finished: Callable[[Part], None]) -> None:
        """Make the calls of one part after another, until none is waiting."""
        process: Process | None = None
        while True:
            try:
                part = waiting.popleft()
            except IndexError:
                break
            after: int | None = 0
            while after is not None:
                process = process or self._start()
                if process is None:
                    return
                after = self._make(process, part, after)
                if after is not None:
                    process = None  # it has ended, and another continues
            finished(part)
        if process is not None:
            self._end(process)

    def _make(self, process: Process, part: Part, after: int) -> int | None:
        """Have a process make a part's calls; None if it made all, else after how many it ended."""
        key = (part.operator, part.device, part.dtype)
        row = self.rows.setdefault(key, Row(*key))
        first = after
        order = {
            "impl_id": self.impl_id,
            "every": self.every,
            "after": after,
            "poisoned": self.tool != "initcheck",  # it must find memory uninitialised
        }
        for event in process.make_calls(part, **order):
            if "done" in event:
                self._collect(process)
                return None
            if "call" in event:
                after += 1
                continue
            row.calls += 1
            row.declined += "declined" in event
            if "failed" in event:
                self._failed(row, process, event["failed"])
        self._collect(process)
        if self.stopped:
            self.under_way += [process.call[1]] if process.call and process.open else []
        elif process.open:
            row.calls += 1
            self._failed(row, process, f"ended the process: {process.output_tail()}")
        elif after == first:
            raise TeFlError(
                f"a process under {PROGRAM} ended before its first call: {process.output_tail()}"
            )
        return after

    def _end(self, process: Process) -> None:
        """Let a process end by itself, and compare its error count with what it has reported."""
        process.finish()
        self._collect(process)
        if self.stopped:
            return
        if process.counted is None:
            self._note(f"{PROGRAM} did not report its error count: {process.output_tail()}")
        elif process.counted and not process.reported:
            self._note(f"{PROGRAM} counted {process.counted} errors, but reported none")

    def _failed(self, row: Row, process: Process, said: str) -> None:
        row.failed += 1
        self._found("failed", None, ToolReport(process.call, [said]))

    def _collect(self, process: Process) -> None:
        """Take over the tool's reports."""
        for report in process.take_reports():
            if report.call is None:
                self._note(" ".join(report.lines[:SHOWN_LINES]))
            else:
                self._found(report.kind, report.kernel, report)

    def _found(self, kind: str, kernel: str | None, report: ToolReport) -> None:
        assert report.call is not None  # a report of no call is a note
        part, case = report.call
        key = (kind, part.operator, part.device, kernel, report.lines[0])
        with self._lock:
            if key not in self.findings:
                again = reproduction(self.impl_id, case, part.device, "--sanitize", self.tool)
                said = tuple(report.lines[:SHOWN_LINES])
                finding = Finding(kind, part.operator, part.device, kernel, said, again)
                self.findings[key] = finding
            finding = self.findings[key]
            finding.reports += report.count
            if case not in finding.cases:
                finding.cases.append(case)

    def _note(self, said: str) -> None:
        with self._lock:
            if said not in self.notes:
                self.notes.append(said)
