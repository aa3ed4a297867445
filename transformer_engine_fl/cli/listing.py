"""``te-fl list``: the operators and their implementations.

It works without torch: the sets of this package register without it, and plugins are listed
but not loaded. ``--probe`` loads them and asks the devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from transformer_engine_fl.cli._output import Json, fitted, long_table, print_json, reasons
from transformer_engine_fl.core.discovery import find_sources
from transformer_engine_fl.core.manager import OpManager
from transformer_engine_fl.core.registry import Entry

__all__ = ["list_operators"]


def list_operators(
    probe: Annotated[
        bool, typer.Option("--probe", help="Load the plugins and query the devices (slower).")
    ] = False,
    json: Json = False,
) -> None:
    """List the operators, their implementations and the plugins."""
    manager = OpManager(plugins=probe)
    manager.ensure_initialized()
    document = _document(manager, probe)
    if json:
        print_json(document)
    else:
        _show(document)


def _document(manager: OpManager, probe: bool) -> dict[str, Any]:
    registry = manager.registry
    names = sorted({*registry.list_operators(), *registry.contracts})
    return {
        "probed": probe,
        "operators": [_operator(manager, name, probe) for name in names],
        "sources": _sources(manager),
    }


def _operator(manager: OpManager, name: str, probe: bool) -> dict[str, Any]:
    contract = manager.registry.contracts.get(name)
    entries = sorted(
        manager.registry.entries(name), key=lambda it: (-it.impl.priority, it.impl.impl_id)
    )
    return {
        "name": name,
        "family": contract.family if contract else None,
        "aliases": list(contract.aliases) if contract else [],
        "implementations": [_implementation(entry, probe) for entry in entries],
    }


def _implementation(entry: Entry, probe: bool) -> dict[str, Any]:
    impl = entry.impl
    reason = (entry.unavailable() or entry.load()) if probe else None
    return {
        "impl_id": impl.impl_id,
        "kind": impl.kind.value,
        "vendor": impl.vendor,
        "priority": impl.priority,
        "devices": sorted(impl.devices) if impl.devices is not None else None,
        "dtypes": sorted(impl.supported_dtypes) if impl.supported_dtypes is not None else None,
        "min_arch": impl.min_arch,
        "traits": sorted(impl.traits),
        "available": reason is None if probe else None,
        "reason": reason,
    }


def _sources(manager: OpManager) -> list[dict[str, Any]]:
    """Every set and plugin, loaded or not."""
    reports = manager.registry.snapshot().sources
    sources = []
    for source in find_sources():
        report = reports.get(source.key)
        sources.append(
            {
                "name": source.name,
                "origin": source.origin,
                "loaded": report is not None and report.error is None,
                "registered": list(report.registered) if report else [],
                "error": report.error if report else None,
            }
        )
    return sources


# ------------------------------------------------------------------------------ as text


def _show(document: dict[str, Any]) -> None:
    headings = ("operator", "implementation", "kind", "vendor", "priority", "available")
    rows = [row for operator in document["operators"] for row in _rows(operator)]
    typer.echo(long_table(headings, rows))
    for line in (*_reasons(document), *_plugins(document)):
        typer.echo(fitted(line))
    if not document["probed"]:
        probing = "`te-fl list --probe` loads plugins and queries the devices"
        typer.echo(fitted(f"available: not checked; {probing}"))


def _rows(operator: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each implementation; the first names the operator."""
    answers = {None: "?", True: "yes", False: "no"}
    name = operator["name"]
    for it in operator["implementations"]:
        said = (str(it[field] or "") for field in ("impl_id", "kind", "vendor", "priority"))
        yield name, *said, answers[it["available"]]
        name = ""
    if not operator["implementations"]:
        yield name, "none", "", "", "", ""


def _reasons(document: dict[str, Any]) -> list[str]:
    """Why implementations are not available, each reason once."""
    affected: dict[tuple[str, str], list[str]] = {}
    implemented: Counter[str] = Counter()
    for operator in document["operators"]:
        implemented.update(it["impl_id"] for it in operator["implementations"])
        for it in operator["implementations"]:
            if it["reason"]:
                affected.setdefault((it["impl_id"], it["reason"]), []).append(operator["name"])
    return list(reasons(affected, implemented))


def _plugins(document: dict[str, Any]) -> list[str]:
    lines = []
    for source in document["sources"]:
        named = f"{source['name']} ({source['origin']})"
        if source["error"]:
            lines.append(f"{named} is left out: {source['error']}")
        elif not source["loaded"]:
            lines.append(f"{named} is not loaded yet")
    return lines
