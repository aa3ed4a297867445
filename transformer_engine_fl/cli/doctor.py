"""``te-fl doctor``: what this installation has, what works, and what is broken and why.

Its job is to find faults, so no fault ends it: a malformed setting is a finding, and the
rest is judged as if that setting were not there.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import logging
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from transformer_engine_fl.backends import _disk_cache
from transformer_engine_fl.backends.flagos.tuning.lookup import stated_path
from transformer_engine_fl.cli._output import Json, console, print_json, reasons, table
from transformer_engine_fl.cli.tune.checking import examined
from transformer_engine_fl.core.blame import error_text
from transformer_engine_fl.core.discovery import ENTRY_POINT_GROUP
from transformer_engine_fl.core.errors import ConfigurationError, suggestion
from transformer_engine_fl.core.log import logger
from transformer_engine_fl.core.manager import OpManager, get_default_manager
from transformer_engine_fl.core.policy import (
    VARIABLES,
    effective_policy,
    parse_environment,
    reset_global_policy,
)
from transformer_engine_fl.core.vetting import unknown_names
from transformer_engine_fl.testing.machine import devices, torch_build, versions

__all__ = ["doctor"]

REQUIRED = ("torch", "pydantic", "PyYAML", "typer", "rich")
OPTIONAL = ("triton", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "transformers")
OTHER_VARIABLES = ("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET")
"""Variables of other projects that decide what runs."""

Report = dict[str, Any]


def doctor(
    json: Json = False,
    clear_cache: Annotated[
        bool,
        typer.Option(
            "--clear-cache",
            help="First delete the compiled kernels that are cached on disk; each is compiled "
            "again at its next call.",
        ),
    ] = False,
) -> None:
    """Check this installation. The exit code is 1 if something is broken."""
    report = examine(clear_cache=clear_cache)
    if json:
        print_json(report)
    else:
        _show(report)
    raise typer.Exit(0 if report["healthy"] else 1)


def examine(*, clear_cache: bool = False) -> Report:
    """Everything the doctor has to say, as plain JSON values."""
    findings = _Findings()
    malformed, environment = dict(_malformed()), _environment()
    for problem in malformed.values():
        findings.broken(problem, "the rest of this report ignores the variable")
    with _collected_warnings() as warnings, _unset(malformed):
        manager = get_default_manager()
        report = {
            "versions": _versions(findings),
            "devices": findings.watch("the devices cannot be queried", devices, []),
            "environment": environment,
            "policy": _policy(manager, findings),
            "sources": _sources(manager, findings),
            "operators": _operators(manager, findings),
            "quarantine": _quarantine(manager),
            "cache": _cache(findings, clear_cache),
        }
        _tuning(findings)
    for message in warnings:
        findings.add_logged(message)
    broken = any(it["severity"] == "broken" for it in findings.found)
    return {"healthy": not broken, "findings": findings.found, **report}


class _Findings:
    """What was found wrong: ``broken``, or worth a ``warning``."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def broken(self, what: str, detail: str | None = None) -> None:
        self.found.append({"severity": "broken", "what": what, "detail": detail})

    def warning(self, what: str) -> None:
        self.found.append({"severity": "warning", "what": what, "detail": None})

    def add_logged(self, message: str) -> None:
        """Add a warning that was logged meanwhile, unless it repeats what was found already."""
        if not any(it["what"] in message for it in self.found):
            self.warning(message)

    def watch(self, what: str, examination: Callable[[], Any], otherwise: Any) -> Any:
        """The examination's result; an exception is a finding, and gives ``otherwise``."""
        try:
            return examination()
        except Exception as error:  # noqa: BLE001 - a broken driver may raise anything
            self.broken(f"{what}: {error_text(error)}", "".join(traceback.format_exception(error)))
            return otherwise


# ----------------------------------------------------------------------- the environment


def _malformed() -> Iterator[tuple[str, str]]:
    """(variable, what is wrong with it), each judged by itself."""
    for name in VARIABLES:
        try:
            parse_environment({name: os.environ.get(name, "")})
        except ConfigurationError as error:
            yield name, str(error)


@contextlib.contextmanager
def _unset(names: dict[str, str]) -> Iterator[None]:
    """The environment without some variables, and put back at the end."""
    if not names:
        yield
        return
    kept = {name: os.environ.pop(name) for name in names}
    reset_global_policy()
    try:
        yield
    finally:
        os.environ.update(kept)
        reset_global_policy()


@contextlib.contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """Collect the warnings that are logged for the report, and print no log lines."""
    warnings: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            warnings.append(record.getMessage())
        return False

    logger.addFilter(keep)
    try:
        yield warnings
    except KeyboardInterrupt:  # there will be no report, and the warnings may say what hung
        for message in warnings:
            console(stderr=True).print(message, soft_wrap=True)
        raise
    finally:
        logger.removeFilter(keep)


def _environment() -> dict[str, str]:
    ours = (name for name in os.environ if name.startswith(("TE_FL_", "TEFL_")))
    names = sorted({*ours, *(name for name in OTHER_VARIABLES if name in os.environ)})
    return {name: os.environ[name] for name in names}


# -------------------------------------------------------------------------- the machine


def _versions(findings: _Findings) -> dict[str, str | None]:
    found = versions((*REQUIRED, *OPTIONAL))
    for name in REQUIRED:
        if found[name] is None:
            findings.broken(f"{name} is required and not installed")
    found["torch built for"] = findings.watch("torch cannot be imported", torch_build, None)
    return found


# ------------------------------------------------------------------- policy and plugins


def _policy(manager: OpManager, findings: _Findings) -> dict[str, Any]:
    manager.ensure_initialized()
    effective = effective_policy()
    for message in unknown_names(effective, manager.registry):
        findings.warning(message)
    for name in os.environ:
        if name.startswith(("TE_FL_", "TEFL_")) and name not in VARIABLES:
            hint = suggestion(name, VARIABLES)  # the text is that of the log, so that it comes once
            findings.warning(f"unknown environment variable {name}{hint}")
    return {
        field: {"value": value, "origin": effective.origins[field]}
        for field, value in effective.policy.to_dict().items()
    }


def _tuning(findings: _Findings) -> None:
    """What ``te-fl tune --check`` finds; for files of ``TE_FL_TUNING_PATH``, calls raise it."""
    try:
        stated_path()
    except ConfigurationError as error:
        findings.broken(str(error))
        return
    if importlib.util.find_spec("triton") is None:  # nothing reads tuning files
        return
    found, others = findings.watch("tuning files cannot be checked", examined, ([], []))
    for file in found:
        for problem in file.problems:
            if file.named:
                findings.broken(f"TE_FL_TUNING_PATH: {problem}")
            else:
                findings.warning(problem)
    for problem in others:
        findings.warning(problem)


def _misspelt_groups() -> Iterator[str]:
    """Messages for entry points whose group is nearly spelt like that of plugins."""
    found: dict[tuple[str, str], None] = {}
    for distribution in distributions():
        with contextlib.suppress(Exception):  # discovery.py warns of one that cannot be read
            for group in {it.group for it in distribution.entry_points} - {ENTRY_POINT_GROUP}:
                if difflib.get_close_matches(group.casefold(), [ENTRY_POINT_GROUP], cutoff=0.8):
                    found[group, distribution.name] = None
    for group, name in found:
        yield f"{name}: unknown entry-point group {group!r}; did you mean {ENTRY_POINT_GROUP!r}?"


def _sources(manager: OpManager, findings: _Findings) -> list[dict[str, Any]]:
    for slip in _misspelt_groups():
        findings.warning(slip)
    for report in manager.plugins:
        if report.error:
            what = f"{report.name} ({report.origin}) is left out: {report.error}"
            findings.broken(what, report.traceback)
    return [
        {
            "name": report.name,
            "origin": report.origin,
            "registered": list(report.registered),
            "error": report.error,
        }
        for report in manager.plugins
    ]


def _operators(manager: OpManager, findings: _Findings) -> list[dict[str, Any]]:
    """What serves each operator on this machine, and which implementations are not available."""
    faults: dict[str, list[str]] = {}
    operators = []
    for name in manager.registry.list_operators():
        unavailable: dict[str, str] = {}
        entries = manager.registry.entries(name)
        for entry in entries:
            impl_id, missing = entry.impl.impl_id, entry.unavailable()
            problem = entry.load() if missing is None else missing
            if problem is not None:
                unavailable[impl_id] = problem
            # A probe may answer no; a probe that raises, or a failed import, is a fault.
            if problem is not None and (missing is None or missing.startswith(_PROBE_RAISED)):
                faults.setdefault(f"{impl_id}: {problem}", []).append(name)
        decision = manager.explain(name)
        if decision.selected is None:
            findings.broken(f"no implementation serves {name!r} on this machine", str(decision))
        serving = decision.selected.impl_id if decision.selected else None
        operators.append(
            {
                "name": name,
                "serving": serving,
                "implemented_by": [entry.impl.impl_id for entry in entries],
                "unavailable": unavailable,
            }
        )
        if not manager.registry.contracts.get(name) and (slip := _name_hint(name, manager)):
            impl_ids = ", ".join(it.impl.impl_id for it in entries)
            findings.warning(f"{impl_ids}: registered for {name!r}, {slip}")
    for fault, names in faults.items():
        findings.broken(fault, f"for {', '.join(names)}")
    return operators


def _name_hint(name: str, manager: OpManager) -> str | None:
    """What is most likely wrong with the name of an operator without a contract, or None."""
    if name.startswith("aten::"):
        return _no_aten(name)
    contracts, letters = manager.registry.contracts, sorted(name.lower())
    entries = {it: manager.registry.entries(it) for it in manager.registry.list_operators()}
    ours = [it for it, found in entries.items() if any(e.impl.kind == "reference" for e in found)]
    # The same letters in another order or case: also names of other projects' operators.
    close = [it for it in (*contracts, *ours) if it != name and sorted(it.lower()) == letters]
    close = close or difflib.get_close_matches(name, contracts, n=1, cutoff=0.85)
    return f"an operator without a contract; did you mean {close[0]!r}?" if close else None


def _no_aten(name: str) -> str | None:
    import torch

    from transformer_engine_fl.integrations.aten.routes import overload

    if overload(name) is not None:
        return None
    known = (it for it in torch._C._dispatch_get_all_op_names() if it.startswith("aten::"))
    return f"an operator that torch does not have{suggestion(name, known)}"


_PROBE_RAISED = "is_available() raised"
"""How the registry's message begins."""


def _quarantine(manager: OpManager) -> list[dict[str, Any]]:
    return [
        {
            "op": key.op_name,
            "impl_id": key.impl_id,
            "device": key.device,
            "dtype": key.dtype,
            "reason": reason,
        }
        for key, reason in manager.quarantine.held().items()
    ]


def _cache(findings: _Findings, clear: bool) -> dict[str, Any]:
    """What sets keep on disk, by folder, and how many entries were deleted first, if asked."""
    report: dict[str, Any] = {"path": None, "folders": [], "deleted": None}
    try:
        report["path"] = str(_disk_cache.root())
        if clear:
            try:
                report["deleted"] = _disk_cache.clear()
            except OSError as error:
                findings.broken(f"compiled kernels cannot be deleted: {error}")
        report["folders"] = [it._asdict() for it in _disk_cache.folders()]
        _disk_cache.check_writable()
    except (OSError, RuntimeError) as error:
        said = f"compiled kernels cannot be cached: {error}; set XDG_CACHE_HOME to another folder"
        findings.broken(said) if clear else findings.warning(said)
    return report


# ------------------------------------------------------------------------------ as text


def _show(report: Report) -> None:
    out = console()
    _section(out, "versions")
    versions = [(name, version or "not installed") for name, version in report["versions"].items()]
    out.print(table(("", ""), versions, wrapped=("",)))
    _section(out, "devices")
    for it in report["devices"]:
        details = [it["name"], it["arch"], _gibibytes(it["memory_bytes"])]
        out.print(f"{it['device']}: {', '.join(detail for detail in details if detail)}")
    _section(out, "environment")
    for name, value in report["environment"].items():
        out.print(f"{name}={value}")
    if not report["environment"]:
        out.print("no TE_FL_* or TEFL_* variable is set")
    _section(out, "policy")
    rows = [(field, str(it["value"]), it["origin"]) for field, it in report["policy"].items()]
    out.print(table(("field", "value", "source"), rows, wrapped=("value", "source")))
    _section(out, "sets and plugins")
    _show_sources(out, report["sources"])
    _section(out, "operators")
    _show_operators(out, report["operators"])
    _section(out, "quarantine")
    for it in report["quarantine"]:
        where = f"{it['device']}, {it['dtype']}"
        out.print(f"{it['op']}/{it['impl_id']} on {where}: {it['reason']}")
    if not report["quarantine"]:
        out.print("empty (each process has its own; no implementation has failed in this one)")
    _section(out, "cache")
    _show_cache(out, report["cache"])
    _section(out, "findings")
    _show_findings(out, report["findings"])


def _section(out: Console, title: str) -> None:
    if title != "versions":
        out.print()
    out.print(title, style="bold")


def _gibibytes(count: int | None) -> str | None:
    return f"{count / 2**30:.0f} GiB" if count else None


def _show_sources(out: Console, sources: list[dict[str, Any]]) -> None:
    rows: list[tuple[str | Text, ...]] = []
    for it in sources:
        became = f"{len(it['registered'])} implementations" if not it["error"] else "left out"
        rows.append((it["name"], it["origin"], Text(became, "red" if it["error"] else "")))
    out.print(table(("name", "from", "registered"), rows, wrapped=("from",)))


def _show_operators(out: Console, operators: list[dict[str, Any]]) -> None:
    serving: dict[str | None, list[str]] = {}
    affected: dict[tuple[str, str], list[str]] = {}
    implemented: Counter[str] = Counter()
    for it in operators:
        serving.setdefault(it["serving"], []).append(it["name"])
        implemented.update(it["implemented_by"])
        for impl_id, reason in it["unavailable"].items():
            affected.setdefault((impl_id, reason), []).append(it["name"])
    rows: list[tuple[str | Text, ...]] = [
        (impl_id or Text("none", "red"), str(len(names)), _operators_text(names, len(operators)))
        for impl_id, names in sorted(serving.items(), key=lambda it: len(it[1]))
    ]
    headings = ("served here by", "operators", "")
    out.print(table(headings, rows, numbers=headings[1:2], wrapped=headings[2:]))
    for line in reasons(affected, implemented):
        out.print(line)


def _show_cache(out: Console, cache: dict[str, Any]) -> None:
    if cache["deleted"] is not None:
        out.print(f"kernels deleted: {cache['deleted']}")
    for it in cache["folders"]:
        size = f"kernels cached: {it['entries']}, {it['bytes'] / 2**20:.1f} MiB"
        out.print(f"{it['name']}: {size} in {cache['path']}", soft_wrap=True)
    if not cache["folders"]:
        where = f"in {cache['path']}" if cache["path"] else "on disk"
        out.print(f"no kernel is cached {where}", soft_wrap=True)


def _operators_text(names: list[str], whole: int) -> str:
    """The operators by name, unless they are more than half of all."""
    if len(names) == whole:
        return "all"
    return ", ".join(names) if len(names) <= whole // 2 else "all others"


def _show_findings(out: Console, findings: list[dict[str, Any]]) -> None:
    for it in findings:
        style = "bold red" if it["severity"] == "broken" else "yellow"
        out.print(Text(f"{it['severity']}: ", style).append(it["what"], "not bold default"))
        for line in (it["detail"] or "").splitlines():
            out.print(f"  {line}", soft_wrap=True)
    if not findings:
        out.print("healthy: nothing is broken", style="green")
