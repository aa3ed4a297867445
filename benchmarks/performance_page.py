"""Writes docs/performance.md, and its pictures, from the results that are committed.

    python benchmarks/performance_page.py

Reads ``results/ops_*.json`` (one for each run, written by ops.py), ``results/host_*.json`` (by
ops.py with --host-only) and ``results/dispatch_overhead.json``; measures nothing. A test compares
the page with what this gives, so a new result and its page are committed together.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from peers import COMPILER
from report import (
    Report,
    by_workload,
    fastest,
    is_ours,
    main_versions,
    names_of,
    overview,
    panels,
    roof_text,
    shape_text,
    share,
)

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"

INTRODUCTION = """\
# Performance

Written by `benchmarks/performance_page.py` from the results in `benchmarks/results/`; not edited
by hand. Figures hold for the device and the versions named beside them and for nothing else. Where
another library is faster, the table shows it.
"""

METHOD = """
How operators are measured (`benchmarks/ops.py`): every candidate is called on the same inputs, in
one process. Its values are compared with a float64 formula first, then it is timed: the L2 cache
is cleared before each call, and the median is taken of the times between two events on the device
around it. The device waits until the host has queued a call, so that the host's time is in none
of these figures; it stands by itself. GB/s divides the fewest bytes that the operator must move
by that time: each input read once, each output of the contract written once, and an argument that
is written in place both, unless something else is said. TFLOP/s divides the operations of the
products. The same is counted for a peer that does less. The roofs are measured in the same run.
"""

TURNS = """
Products warm the device until its clocks fall, which would favour whoever is timed first. So where
operations are counted, the candidates take turns in {rounds} rounds, each begun by another of them,
and the median of a candidate's rounds stands here.
"""

COPIES = """
A launch, the first bytes' way and the last ones' cost the same microseconds whatever is moved, so
that of small shapes nobody reaches the roof. What torch's own copy of fewer bytes reaches in the
same run, timed likewise, and its fill, which writes as many and reads none:
"""

HOST = """
What the host needs for one call of `rmsnorm_fwd` on a 4x64 bfloat16 tensor, {where}: the median of
41 batches of 200 calls, all measured in turns, with the garbage collector off; the device is waited
for between batches only. *direct* is the implementation itself, without dispatch. Each column is a
process, and what the processors do beside it moves all of a column: compare within one.
"""

DISPATCH = """
What a dispatch adds to a direct call of a Python function of two tensors, on {cpu}, Python
{python}, torch {torch} (`benchmarks/dispatch_overhead.py`). The cases take turns in random order
within a process; a case's figure there is the fastest of its rounds, and here stands the median
over {processes} processes, with the lowest and the highest of them for the whole call. No device
is involved. *x direct* compares the calls, less an empty loop.
"""

PLANS = """
The first call of an operator after every plan was dropped, among 1,000 operators of 10
implementations each, in the same run (the median over operators, then over processes):
"""

PLUGINS = """
What {plugins} installed plugins cost those who do not use them, on {cpu}, Python {python}, torch
{torch} (`benchmarks/plugin_costs.py`). They are packages as `te-fl new-plugin` writes them, in its
three styles in turn. A start is from torch loaded until the first operator has been called, by the
clock and by the processor's time, which other work on the machine does not lengthen. Processes
with them and without take turns; here stands the median over {processes} of each, with the lowest
and the highest.
"""


def main() -> None:
    reports = load()
    for path, report in reports:
        source = digest(path)
        overview(report, path.with_suffix(".png"), source)
        for family, rows in families(report).items():
            panels(report, rows, family_picture(path, family), source)
    PAGE.write_text(page(reports, load_dispatch()), encoding="utf-8")


def families(report: Report) -> dict[str, list[Report]]:
    """The rows of each family, in the order of the report."""
    found: dict[str, list[Report]] = {}
    for row in report["rows"]:
        found.setdefault(row["family"], []).append(row)
    return found


def family_picture(path: Path, family: str) -> Path:
    """The path of a family's picture for these results."""
    return path.with_name(f"{path.stem}_{family}.png")


def load() -> list[tuple[Path, Report]]:
    """The committed results of operators; files with the same title are adjacent."""
    found = [(path, _report(path)) for path in RESULTS.glob("ops_*.json")]
    return sorted(found, key=lambda it: (_title(it[1]), it[0]))


def load_hosts() -> list[Report]:
    """The committed results of runs that measured only the host's time."""
    return [_report(path) for path in sorted(RESULTS.glob("host_*.json"))]


def load_dispatch() -> Report:
    """The committed results of the dispatch."""
    return _read(RESULTS / "dispatch_overhead.json")


def load_plugins() -> Report:
    """The committed results of the cost of plugins."""
    return _read(RESULTS / "plugin_costs.json")


def _report(path: Path) -> Report:
    found = _read(path)
    keys = ("environment", "roofs", "peers", "rows", "host_us")
    if lacking := [key for key in keys if key not in found]:
        raise ValueError(f"{path}: no report of ops.py: it lacks {', '.join(lacking)}")
    return found


def _read(path: Path) -> Report:
    try:
        found: Report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return found


def digest(path: Path) -> str:
    """A digest of the results that a picture is made from; stored in the picture's file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ------------------------------------------------------------------------------ the page


def page(reports: Iterable[tuple[Path, Report]], dispatch: Report) -> str:
    """The whole page."""
    reports = list(reports)
    parts = [INTRODUCTION, *_method(report for _, report in reports)]
    titles = [_title(report) for _, report in reports]
    alone = load_hosts()
    for (path, report), title in zip(reports, titles, strict=True):
        if titles.count(title) > 1:  # each run measured other operators
            title += f": {', '.join(families(report))}"
        parts += [f"## {title}\n", *_operators(path, report, alone)]
    parts += _dispatch(dispatch)
    parts += _plugins(load_plugins())
    return "\n".join(parts)


def _method(reports: Iterable[Report]) -> Iterator[str]:
    yield _paragraph(METHOD)
    rounds = max((row.get("rounds", 1) for it in reports for row in it["rows"]), default=1)
    if rounds > 1:
        yield _paragraph(TURNS.format(rounds=rounds))


def _title(report: Report) -> str:
    compiled = any(COMPILER in row["results"] for row in report["rows"])
    beside = f", beside `{COMPILER}`" if compiled else ""
    return f"Operators on {report['environment']['device']}{beside}"


def _operators(path: Path, report: Report, alone: list[Report]) -> Iterator[str]:
    names = names_of(report["rows"], report)
    yield _paragraph(
        f"Measured on {report['environment']['date']}. Versions: {_versions(report)}. "
        "The sets of this repository come first: "
        f"{', '.join(f'`{it}`' for it in names if is_ours(it))}."
    )
    yield "The roofs:\n"
    yield "".join(
        f"- {roof_text(report, [name])}: {roof['what']}.\n"
        for name, roof in report["roofs"].items()
    )
    yield from _copies(report)
    shown = [name for name in names if name in report["peers"]]
    if shown:
        yield "Beside the sets stand:\n"
        yield "".join(f"- `{name}`: {report['peers'][name]}.\n" for name in shown)
    yield f"![Fraction of the roof, by operator](../benchmarks/results/{path.stem}.png)\n"
    for family, rows in families(report).items():
        yield from _family(family, rows, path, report)
    yield from _absent(report)
    if report["host_us"]:
        yield "### Host time\n"
        where = f"{report['environment']['device']}, {main_versions(report)}"
        yield _paragraph(HOST.format(where=where))
        device = report["environment"]["device"]
        others = [it["host_us"] for it in alone if it["environment"]["device"] == device]
        columns = [*others, report["host_us"]]
        host = [[name, *(f"{it[name]:.1f}" for it in columns)] for name in report["host_us"]]
        yield _table(["call", *["us, alone"] * len(others), "us, after the above"], host)


def _copies(report: Report) -> Iterator[str]:
    roof = report["roofs"]["copy"]["value"]
    if not roof or not report.get("copies"):
        return
    yield _paragraph(COPIES)

    def reached(moved: float, us: float | None) -> tuple[str, str, str]:
        if us is None:
            return "not measured", "", ""
        rate = moved / us / 1e3
        return f"{us:.1f}", f"{rate:,.0f}", f"{100 * rate / roof:.0f}"

    heads = ["us", "GB/s", "percent of the roof"]
    yield _table(
        ["MiB", *(f"{what}, {head}" for what in ("copy", "fill") for head in heads)],
        [
            [
                f"{it['bytes'] / 2**20:,.0f}",
                *reached(it["bytes"], it["us"]),
                *reached(it["bytes"], it.get("fill_us")),
            ]
            for it in report["copies"]
        ],
        left=0,
    )


def _family(family: str, rows: list[Report], path: Path, report: Report) -> Iterator[str]:
    ours = [name for name in names_of(rows, report) if is_ours(name)]
    roofs = dict.fromkeys(row["roof"] for row in rows)
    units = " and ".join(dict.fromkeys(row["unit"] for row in rows))
    yield f"### {family}\n"
    yield _paragraph(
        f"{report['environment']['device']}, {main_versions(report)}; roof: "
        f"{roof_text(report, roofs)}; cold L2, median. In each cell: microseconds, {units}, and "
        "percent of the roof; the fastest of all in bold. The others stand in one cell, the "
        "fastest first."
    )
    yield _table(
        ["operator", "shape", "dtype", *ours, "others"],
        [
            [
                f"`{row['workload']}`",
                shape_text(row),
                row["dtype"],
                *(_cell(row, name, report) for name in ours),
                _others(row, report),
            ]
            for row in rows
        ],
        left=3,
        last_left=True,
    )
    yield _counts(rows)
    yield _values(rows, report)
    yield from _remarks(rows)
    yield f"![Percent of the roof]({_link(family_picture(path, family))})\n"


def _link(picture: Path) -> str:
    return f"../benchmarks/results/{picture.name}"


def _cell(row: Report, name: str, report: Report) -> str:
    result = row["results"].get(name)
    if result is None:
        return "-"
    fraction = share(row, name, report)
    percent = "" if fraction is None else f" / {100 * fraction:.0f} %"
    text = f"{result['us']:.1f} / {result['rate']:,.0f}{percent}"
    return f"**{text}**" if name == fastest(row) else text


def _others(row: Report, report: Report) -> str:
    names = [name for name in row["results"] if not is_ours(name)]
    names.sort(key=lambda name: row["results"][name]["us"])
    return ", ".join(f"{name} {_cell(row, name, report)}" for name in names) or "-"


def _counts(rows: list[Report]) -> str:
    """How often each candidate is the fastest."""
    best = [name for row in rows if (name := fastest(row))]
    counts = sorted(((best.count(name), name) for name in set(best)), reverse=True)
    said = ", ".join(f"{name} on {count}" for count, name in counts)
    return _paragraph(f"Fastest: {said or 'nobody'} of {len(rows)} shapes.")


def _values(rows: list[Report], report: Report) -> str:
    """The worst error of each set of this repository, and of peers whose error is too large."""
    worst: dict[tuple[str, str], float] = {}
    for row in rows:
        for name, result in row["results"].items():
            ratio = result["error_over_allowed"]
            place = name, row["workload"]
            value = float("inf") if ratio is None else ratio
            worst[place] = max(worst.get(place, 0.0), value)
    sets = [name for name in names_of(rows, report) if is_ours(name)]
    largest = {
        name: max(value for (who, _), value in worst.items() if who == name) for name in sets
    }
    said = ", ".join(f"{name} {value:.2f}" for name, value in largest.items()) or "none"
    outside = ", ".join(
        f"{name} `{workload}` {_times(value)}"
        for (name, workload), value in worst.items()
        if value > 1
    )
    return _paragraph(
        "Values against float64 in the same run, the worst error as a multiple of what the "
        f"contract allowed: {said}. "
        f"Above 1, so that it was not kept: {outside or 'nobody'}."
    )


def _times(value: float) -> str:
    return "(not the bits that are asked for)" if value == float("inf") else f"{value:.2f}"


def _remarks(rows: list[Report]) -> Iterator[str]:
    """What a shape's numbers mean, what is counted, and how peers differ."""
    groups = by_workload(rows)
    axes: dict[str, list[str]] = {}
    notes: dict[tuple[str, str], list[str]] = {}
    lines = []
    for workload, part in groups.items():
        axes.setdefault(part[0]["axes"], []).append(workload)
        counted = part[0]["counted"]
        if counted:
            lines.append(f"- Counted in `{workload}`: {counted}.\n")
        differing = {name: note for row in part for name, note in row["notes"].items()}
        for name, note in differing.items():
            notes.setdefault((name, note), []).append(workload)
        if any(row["checked"] != row["shape"] for row in part):
            sizes = dict.fromkeys("x".join(map(str, row["checked"])) for row in part)
            lines.append(f"- Values of `{workload}` are compared on {', '.join(sizes)}.\n")
    shapes = [
        f"- A shape is {text}{'' if len(axes) == 1 else ': ' + _named(of)}.\n"
        for text, of in axes.items()
    ]
    lines += [f"- {name} in {_named(of)}: {note}.\n" for (name, note), of in notes.items()]
    yield "".join(shapes + lines)


def _named(workloads: list[str]) -> str:
    return ", ".join(f"`{it}`" for it in workloads)


def _absent(report: Report) -> Iterator[str]:
    """What could not be measured, with the reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in report["rows"]:
        for name, reason in row["absent"].items():
            first = reason.splitlines()[0].replace("`", "'")
            found.setdefault((name, first), []).append(f"{row['workload']} {shape_text(row)}")
    for workload, shape, reason in report.get("failed", ()):
        first = reason.splitlines()[0].replace("`", "'")
        where = f"{workload} {'x'.join(map(str, shape))}"
        found.setdefault(("everybody", first), []).append(where)
    if found:
        yield "### Not measured\n"
        yield "".join(
            f"- {name}, {_listed(where)}: `{reason}`\n" for (name, reason), where in found.items()
        )


def _listed(where: list[str]) -> str:
    return (
        ", ".join(where) if len(where) <= 4 else f"{len(where)} combinations of operator and shape"
    )


def _dispatch(results: Report) -> Iterator[str]:
    environment = results["environment"]
    yield "## Dispatch\n"
    said = DISPATCH.format(
        cpu=environment["cpu"],
        python=environment["python"],
        torch=environment["torch"],
        processes=results["processes"],
    )
    yield _paragraph(said)
    cases = sorted(results["cases"].items(), key=lambda item: float(item[1]["us"]))
    yield _table(
        ["way of dispatching", "added, us", "x direct", "whole call, us"],
        [
            [
                name,
                f"{it['added_us']:.3f}",
                f"{it['ratio']:.1f}",
                f"{it['us']:.3f} ({it['lowest_us']:.3f} to {it['highest_us']:.3f})",
            ]
            for name, it in cases
            if name != "empty loop"
        ],
    )
    yield "![The same as a plot](../benchmarks/results/dispatch_overhead.png)\n"
    yield _paragraph(PLANS)
    plans = [[name, f"{us:.0f}"] for name, us in results["plans_us"].items()]
    yield _table(["first call", "us"], plans)


def _plugins(results: Report) -> Iterator[str]:
    yield "## Installed plugins\n"
    yield _paragraph(PLUGINS.format(**results, **results["environment"]))
    rows = {
        "start, ms by the clock": (results["startup_ms"], 0),
        "start, ms of the processor": (results["startup_cpu_ms"], 0),
    }
    for case, measured in results["dispatch_us"].items():
        rows[f"dispatch {case}, us"] = (measured, 3)
    yield _table(
        ["", "without", "with"],
        [
            [what, *(_spread(measured[whose], digits) for whose in ("without", "with"))]
            for what, (measured, digits) in rows.items()
        ],
    )


def _spread(it: Report, digits: int) -> str:
    median, lowest, highest = (f"{it[name]:.{digits}f}" for name in ("median", "lowest", "highest"))
    return f"{median} ({lowest} to {highest})"


def _paragraph(text: str) -> str:
    words = " ".join(text.split())
    return textwrap.fill(words, 100, break_long_words=False, break_on_hyphens=False) + "\n"


def _table(
    heads: list[str], rows: Iterable[list[str]], left: int = 1, last_left: bool = False
) -> str:
    """A table: the first ``left`` columns, and optionally the last, are text, others numbers."""
    rules = ["---"] * left + ["---:"] * (len(heads) - left)
    if last_left:
        rules[-1] = "---"
    lines = [heads, rules, *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _versions(report: Report) -> str:
    names = (name for name in report["environment"] if name not in ("device", "date"))
    return ", ".join(f"{name} {report['environment'][name]}" for name in names)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    main()
