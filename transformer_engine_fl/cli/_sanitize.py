"""How ``te-fl verify --sanitize`` shows what compute-sanitizer has found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from transformer_engine_fl.cli._output import long_table

if TYPE_CHECKING:
    from transformer_engine_fl.testing.sanitizing import Finding, Report

__all__ = ["show"]

SHOWN_FINDINGS = 20


def show(out: Console, report: Report, *, quiet: bool) -> None:
    """Print a line for each operator, the findings, and the verdict."""
    if not quiet:
        columns = ("calls", "declined", "failed", "errors", "warnings")
        groups: dict[tuple[str, str], list[int]] = {}
        for row in report.rows:
            sums = groups.setdefault((row.operator, row.device), [0] * len(columns))
            for place, what in enumerate(columns):
                sums[place] += getattr(row, what)
        rows = [(*names, *map(str, sums)) for names, sums in groups.items()]
        headings = ("operator", "device", *columns)
        typer.echo(long_table(headings, rows, numbers=columns))
    for finding in report.findings[:SHOWN_FINDINGS]:
        _show_finding(out, finding)
    if len(report.findings) > SHOWN_FINDINGS:
        out.print(f"and {len(report.findings) - SHOWN_FINDINGS} more: --json has all")
    for note in report.notes:
        out.print(Text("outside of any call: ", "bold red").append(note, "not bold default"))
    for name in report.under_way:
        out.print(f"running when the time limit was reached: {name}", soft_wrap=True)
    if report.unfinished and not quiet:
        out.print(f"not finished: {', '.join(report.unfinished)}")
    out.print(Text(report.verdict(), "green" if report.passed else "bold red"))


def _show_finding(out: Console, finding: Finding) -> None:
    style = "bold yellow" if finding.kind == "warning" else "bold red"
    where = f"{finding.operator} on {finding.device}"
    if finding.kernel is not None:
        where += f", kernel {finding.kernel}"
    out.print(Text(f"{finding.kind}: ", style).append(where, "not bold default"), soft_wrap=True)
    for line in finding.said:
        out.print(f"  {line}", soft_wrap=True)
    more = f" and {len(finding.cases) - 1} other calls" if len(finding.cases) > 1 else ""
    out.print(f"  in {finding.cases[0]}{more}, reports: {finding.reports}", soft_wrap=True)
    out.print(f"  to reproduce: {finding.reproduce}", soft_wrap=True)
