"""The commands' output: results on stdout, everything else on stderr.

Under ``--json`` stdout carries one JSON document and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "Json",
    "as_json",
    "console",
    "fitted",
    "long_table",
    "named",
    "print_json",
    "progress_bar",
    "reasons",
    "table",
]

NARROWEST = 60
"""Columns (characters) that the widest table needs to lose none of its own."""

WITHOUT_TERMINAL = 400
"""Columns where there is no terminal, as in a CI log: most reasons then fit on one line."""

FEW = 8
"""How many operators a line names at most; for more it gives their number."""

_others = contextlib.ExitStack()
"""While it holds a callback, everything that is printed goes to stderr."""


def _print_nothing_else(context: typer.Context, value: bool) -> bool:
    """Keep stdout for the JSON document: a plugin may print, also in a worker process."""
    if value:
        _others.enter_context(_to_stderr())
        context.call_on_close(_others.close)
    return value


@contextlib.contextmanager
def _to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr, for Python, for other code in the process and for children."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        with contextlib.suppress(OSError):  # one of the two is closed
            kept = os.dup(1)
            stack.callback(os.close, kept)
            os.dup2(2, 1)
            stack.callback(os.dup2, kept, 1)
        yield


Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document instead.", callback=_print_nothing_else),
]


def console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: reasons and names may contain brackets.

    Results are never laid out for fewer than ``NARROWEST`` columns: a table without room would
    lose whole columns, while a narrower terminal only wraps its lines.
    """
    from rich.console import Console

    width = None if stderr else _columns()
    return Console(stderr=stderr, width=width, markup=False, highlight=False, emoji=False)


def print_json(document: Any) -> None:
    """Print the one document of a ``--json`` command."""
    _others.close()
    typer.echo(as_json(document))


def as_json(document: Any) -> str:
    """The document as JSON; null for infinities and NaN."""
    return json.dumps(_finite(document), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    """The value with None for infinities and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def progress_bar(label: str, *, hidden: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr; yields a function to update it: ``(done, total, what is next)``."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}", markup=False),
    )
    bar = Progress(*columns, console=console(stderr=True), expand=True, disable=hidden)
    task = bar.add_task(label, total=None, status="")

    def update(done: int, total: int, status: str) -> None:
        bar.start()  # not before there is work, so that a wrong question shows no bar
        bar.update(task, completed=done, total=total, status=status)

    try:
        yield update
    finally:
        if bar.live.is_started:
            bar.stop()


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    numbers: Sequence[str] = (),
    wrapped: Sequence[str] = (),
) -> Table:
    """A plain table that loses nothing on a narrow terminal.

    Args:
        headings: of the columns.
        rows: their cells.
        numbers: headings of the columns to align at the right.
        wrapped: headings of the columns that may be broken into lines.
    """
    from rich.table import Table

    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for heading in headings:
        made.add_column(
            heading,
            justify="right" if heading in numbers else "left",
            no_wrap=heading not in wrapped,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*row)
    made.show_header = any(headings)
    return made


def long_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()
) -> str:
    """A plain table of hundreds of rows that fits the terminal's width.

    A first cell for which the terminal has no room gets a line of its own, above its row.
    :func:`table` makes several passes over each cell, a tenth of a second for 400 rows, and
    imports rich.

    Args:
        headings: of the columns.
        rows: their cells, of one line.
        numbers: headings of the columns to align at the right; not the first.
    """
    first, *widths = (max(map(len, column)) for column in zip(headings, *rows, strict=True))
    room = _columns() - sum(2 + width for width in widths)
    sides = [">" if heading in numbers else "<" for heading in headings[1:]]
    lines = []
    for name, *cells in (headings, *rows):
        if len(name) > room:
            lines.append(name)
            name = ""
        aligned = (
            f"{it:{side}{width}}" for it, side, width in zip(cells, sides, widths, strict=True)
        )
        lines.append("  ".join((name.ljust(min(first, room)), *aligned)).rstrip())
    return "\n".join(lines)


def fitted(text: str) -> str:
    """Text broken at spaces into lines that fit the terminal's width."""
    width = _columns()
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )


def _columns() -> int:
    """The width to lay out for: the terminal's, even if stdout is a pipe, found as rich does."""
    stated = os.environ.get("COLUMNS", "")
    found = [int(stated)] if stated.isdigit() else []
    for stream in range(3):
        with contextlib.suppress(OSError):  # no terminal, or closed
            found.append(os.get_terminal_size(stream).columns)
    return max(NARROWEST, next(filter(None, found), WITHOUT_TERMINAL))


def named(names: Collection[str], whole: int) -> str:
    """Operators in words: by name if they are few, otherwise how many of how many."""
    return ", ".join(names) if len(names) <= FEW else f"{len(names)} of {whole} operators"


def reasons(
    affected: Mapping[tuple[str, str], Collection[str]], implemented: Mapping[str, int]
) -> Iterator[str]:
    """A line for each reason why implementations are not available.

    Args:
        affected: (impl id, reason) -> the operators that the reason holds for.
        implemented: impl id -> how many operators it implements.
    """
    for (impl_id, reason), names in affected.items():
        whole = implemented[impl_id]
        where = "" if len(names) == whole else f" for {named(names, whole)}"
        yield f"{impl_id} is not available{where}: {reason}"
