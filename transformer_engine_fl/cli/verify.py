"""``te-fl verify IMPL_ID``: the conformance kit without pytest, and a scorecard of the result.

``--sanitize TOOL`` makes the same calls under compute-sanitizer instead; ``_sanitize`` shows
what the tool found.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from transformer_engine_fl.backends._files import replaced
from transformer_engine_fl.cli import _sanitize
from transformer_engine_fl.cli._folders import check_writable
from transformer_engine_fl.cli._output import (
    Json,
    as_json,
    console,
    long_table,
    named,
    print_json,
    progress_bar,
)
from transformer_engine_fl.cli._processes import exit_on_sigterm
from transformer_engine_fl.core.errors import ConfigurationError

if TYPE_CHECKING:
    from transformer_engine_fl.testing.scorecard import Failure, Row, Scorecard

__all__ = ["verify"]

SHOWN_FAILURES = 10

BEGIN, END = "<!-- scorecard -->", "<!-- end of scorecard -->"


def verify(
    impl_id: Annotated[str, typer.Argument(metavar="IMPL_ID", help="The set: vendor.acme.")],
    op: Annotated[
        list[str] | None, typer.Option(metavar="OP", help="Only this operator; repeatable.")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE",
            help="The device to test on: cpu, cuda, cuda:1; repeatable (all that the set "
            "supports here).",
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="DTYPE", help="Only the samples of this dtype; repeatable."),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only the case with this name; * matches anything; repeatable.",
        ),
    ] = None,
    every: Annotated[
        int, typer.Option(metavar="N", min=1, help="Run every Nth case only, for a first look.")
    ] = 1,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs", "-j", metavar="N", min=1, help="Run the cases in this many processes."
        ),
    ] = 1,
    sanitize: Annotated[
        str | None,
        typer.Option(
            metavar="TOOL",
            help="Instead of comparing values, make each call under NVIDIA's compute-sanitizer: "
            "memcheck, racecheck, synccheck or initcheck.",
        ),
    ] = None,
    stop_after: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="With --sanitize: stop after this time and report what was found.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where to write the scorecard (the current directory; "
            "with --case, --json or --readme, nowhere).",
        ),
    ] = None,
    readme: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the scorecard into this page, between its lines <!-- scorecard --> and "
            "<!-- end of scorecard -->.",
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress bar and no table.")
    ] = False,
    json: Json = False,
) -> None:
    """Test a set of implementations against the contracts.

    The scorecard, scorecard-IMPL_ID.json and scorecard-IMPL_ID.md, lists the operators covered,
    the largest errors, and each failure with the command that reproduces it alone. The exit
    code is 1 if a case fails. In pytest: pytest --te-fl-impl IMPL_ID.

    With --sanitize the calls whose values would be compared are made on a CUDA device,
    and the exit code is 1 if the tool reports an error; nothing is written.
    """
    # Waiting threads must not spin: next to other work on the machine each call would stall.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if sanitize is not None and (output is not None or readme is not None):
        raise ConfigurationError("--sanitize writes no scorecard: leave out --output and --readme")
    if stop_after is not None and sanitize is None:
        raise ConfigurationError("--stop-after needs --sanitize")
    if readme is not None:
        _halves(readme)  # reports what is wrong with the page before the work
    wanted = output is not None or not (case or json or readme or sanitize)
    if wanted:
        try:
            check_writable(output or Path())
        except OSError as error:
            raise ConfigurationError(f"--output: {error}") from None
    from transformer_engine_fl import testing

    if sanitize is not None:
        with progress_bar(impl_id, hidden=quiet) as update, exit_on_sigterm():
            report = testing.sanitize(
                impl_id,
                sanitize,
                operators=op or None,
                dtypes=dtype or None,
                on=device or ("cuda",),
                only=case or None,
                every=every,
                jobs=jobs,
                stop_after=stop_after,
                progress=lambda done, total, operator, found: update(
                    done, total, f"{found} found  {operator}" if found else operator
                ),
            )
        if json:
            print_json(report.to_dict())
        else:
            _sanitize.show(console(), report, quiet=quiet)
        raise typer.Exit(0 if report.passed else 1)

    with progress_bar(impl_id, hidden=quiet) as update, exit_on_sigterm():
        card = testing.verify(
            impl_id,
            operators=op or None,
            dtypes=dtype or None,
            on=device or None,
            only=case or None,
            every=every,
            jobs=jobs,
            progress=lambda done, total, operator, failed: update(
                done, total, f"{failed} failed  {operator}" if failed else operator
            ),
        )
    written = []
    try:
        if wanted:
            written += _write(card, output or Path())
        if readme is not None:
            written.append(_fill_in(card, readme))
    finally:  # the results are shown even if nothing can be written
        if json:
            print_json(card.to_dict())
        else:
            _show(console(), card, quiet=quiet, traced=bool(case))
            for path in written:
                console(stderr=True).print(f"written: {path}", soft_wrap=True)
    raise typer.Exit(0 if card.passed else 1)


def _write(card: Scorecard, folder: Path) -> list[Path]:
    """Write the scorecard as JSON and as Markdown.

    Raises:
        ConfigurationError: nothing can be written there.
    """
    paths = [folder / f"scorecard-{card.impl_id}.{suffix}" for suffix in ("json", "md")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        texts = (as_json(card.to_dict()) + "\n", card.to_markdown())
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--output: {error}") from error
    return paths


def _fill_in(card: Scorecard, page: Path) -> Path:
    """Put the scorecard between a page's markers.

    Raises:
        ConfigurationError: the page has none, or cannot be written.
    """
    before, after = _halves(page)
    try:
        with replaced(page) as file:
            file.write_text(f"{before}\n\n{card.to_section()}\n{after}", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--readme: {error}") from error
    return page


def _halves(page: Path) -> tuple[str, str]:
    """A page's text before and after the place of a scorecard, including the markers."""
    try:
        check_writable(page.resolve().parent)
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--readme: {error}") from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigurationError(
            f"--readme: {page} lacks the lines {BEGIN} and {END}, in this order"
        )
    return before + begin, end + after


# ------------------------------------------------------------------------------ as text


def _show(out: Console, card: Scorecard, *, quiet: bool, traced: bool) -> None:
    if not quiet:
        headings = ("operator", "device", "passed", "declined", "failed", "ulps", "relative")
        rows = [_cells(operator, device, rows) for (operator, device), rows in _grouped(card)]
        typer.echo(long_table(headings, rows, numbers=headings[2:]))
    for failure in card.failures[:SHOWN_FAILURES]:
        _show_failure(out, failure, traced=traced)
    if len(card.failures) > SHOWN_FAILURES:
        out.print(f"and {len(card.failures) - SHOWN_FAILURES} more")
    if card.missing and not quiet:
        whole = len(card.missing) + len(card.operators) + len(card.switched_off)
        out.print(f"not implemented: {named(card.missing, whole)}")
    if card.switched_off and not quiet:
        for name, reason in card.switched_off.items():
            out.print(Text(f"not run: {name}: {reason}"))
    out.print(Text(card.verdict(), "green" if card.passed else "bold red"))


def _grouped(card: Scorecard) -> Iterator[tuple[tuple[str, str], list[Row]]]:
    """The rows of each operator on each device: its dtypes."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in card.rows:
        groups.setdefault((row.operator, row.device), []).append(row)
    yield from groups.items()


def _cells(operator: str, device: str, rows: list[Row]) -> tuple[str, ...]:
    passed, declined, failed = (
        sum(getattr(row, what) for row in rows) for what in ("passed", "declined", "failed")
    )
    worst = [row.worst for row in rows if row.worst]
    ulps = f"{max(it.ulps for it in worst):.3g}" if worst else "-"
    relative = f"{max(it.relative for it in worst):.2g}" if worst else "-"
    return operator, device, str(passed), str(declined), str(failed), ulps, relative


def _show_failure(out: Console, failure: Failure, *, traced: bool) -> None:
    out.print(Text("fails: ", "bold red").append(failure.case, "not bold default"))
    out.print(f"  {failure.said}")
    if traced and failure.traceback:
        for line in failure.traceback.splitlines():
            out.print(f"  {line}", soft_wrap=True)
    out.print(f"  to reproduce: {failure.reproduce}", soft_wrap=True)
