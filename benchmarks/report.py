"""Turns a report of ops.py into a table and plots; measures nothing.

A report is a dict: ``environment``; ``roofs`` by name (value, unit, what); ``copies``, the bytes
and times of smaller copies and of fills; ``peers``, a description of each; ``rows``; ``host_us``;
``failed``, the workloads that could not be built. A row is one workload on one shape, with the
time, the rate and the error of each candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "Report",
    "by_workload",
    "fastest",
    "is_ours",
    "is_right",
    "main_versions",
    "markdown",
    "names_of",
    "overview",
    "panels",
    "roof_text",
    "shape_text",
    "share",
]

Report = dict[str, Any]

OURS = ("default.", "vendor.", "reference.")
"""Prefixes of the ids of this repository's sets; a name without one of them is a peer's."""


def is_ours(name: str) -> bool:
    """Whether a candidate is a set of this repository."""
    return name.startswith(OURS)


def is_right(result: Report) -> bool:
    """Whether a candidate's values are within the contracts' tolerances."""
    error = result["error_over_allowed"]
    return error is not None and error <= 1


def names_of(rows: Iterable[Report], report: Report) -> list[str]:
    """The candidates with results: this repository's sets, then the peers in report order."""
    names = list(dict.fromkeys(name for row in rows for name in row["results"]))
    order = list(report["peers"])
    return sorted(names, key=lambda it: (not is_ours(it), order.index(it) if it in order else -1))


def by_workload(rows: Iterable[Report]) -> dict[str, list[Report]]:
    """The rows of each workload, in the order of the report."""
    found: dict[str, list[Report]] = {}
    for row in rows:
        found.setdefault(row["workload"], []).append(row)
    return found


def share(row: Report, name: str, report: Report) -> float | None:
    """A candidate's fraction of the roof; None if its rate or the roof is unknown."""
    roof, result = report["roofs"].get(row["roof"], {}).get("value"), row["results"].get(name)
    return result["rate"] / roof if roof and result else None


def fastest(row: Report, names: Iterable[str] | None = None) -> str | None:
    """The fastest candidate among ``names``, by default among all."""
    among = row["results"] if names is None else names
    present = [name for name in among if name in row["results"]]
    return min(present, key=lambda name: row["results"][name]["us"], default=None)


def shape_text(row: Report) -> str:
    return "x".join(str(size) for size in row["shape"])


def main_versions(report: Report) -> str:
    return ", ".join(f"{name} {report['environment'][name]}" for name in ("torch", "triton"))


def roof_text(report: Report, names: Iterable[str]) -> str:
    """The name and the value of each roof."""
    texts = []
    for name in names:
        roof = report["roofs"][name]
        value = "not measured" if roof["value"] is None else f"{roof['value']:,.0f} {roof['unit']}"
        texts.append(f"{name} {value}")
    return ", ".join(texts)


def markdown(report: Report) -> str:
    """The report as a table; the candidates of a workload and shape follow by time."""
    lines = [
        f"Device: {report['environment']['device']}; roofs: {roof_text(report, report['roofs'])}.",
        "",
        "| workload | shape | dtype | candidate | us | rate | fraction of roof | error / allowed |",
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        for name, it in sorted(row["results"].items(), key=lambda item: item[1]["us"]):
            fraction = share(row, name, report)
            error = it["error_over_allowed"]
            cells = (
                row["workload"],
                shape_text(row),
                row["dtype"],
                name,
                f"{it['us']:.1f}",
                f"{it['rate']:,.0f} {row['unit']}",
                "-" if fraction is None else f"{fraction:.2f}",
                "inf" if error is None else f"{error:.2f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    if report["host_us"]:
        lines += ["", "| host time of a call on 4x64 | us |", "|---|---:|"]
        lines += [f"| {name} | {us:.1f} |" for name, us in report["host_us"].items()]
    return "\n".join(lines) + "\n"


# -------------------------------------------------------------------------- the pictures


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _save(plt: Any, figure: Any, path: Path, source: str) -> None:
    figure.savefig(path, dpi=110, metadata={"Source": source})
    plt.close(figure)


def overview(report: Report, path: Path, source: str = "") -> None:
    """Plot this repository's fastest set and the fastest peer, for each row of the report.

    Args:
        report: the results.
        path: the PNG to write.
        source: the digest of the results, stored in the PNG.
    """
    plt = _pyplot()
    rows = report["rows"]
    height = 0.19 * len(rows) + 1.6
    figure, axes = plt.subplots(figsize=(11, height), layout="constrained")
    sides = (
        ("fastest set of this repository", "#1f5fa8", "o", [is_ours]),
        ("fastest peer", "#e07b39", "D", [lambda name: not is_ours(name)]),
    )
    points: list[list[float | None]] = []
    for label, colour, marker, (belongs,) in sides:
        best = [fastest(row, filter(belongs, row["results"])) for row in rows]
        shares = [
            share(row, name, report) if name else None for row, name in zip(rows, best, strict=True)
        ]
        points.append(shares)
        known = [(value, place) for place, value in enumerate(shares) if value is not None]
        axes.scatter(
            [value for value, _ in known],
            [place for _, place in known],
            label=label,
            color=colour,
            marker=marker,
            s=26,
            zorder=3,
        )
    for place, (left, right) in enumerate(zip(*points, strict=True)):
        if left is not None and right is not None:
            axes.plot([left, right], [place, place], color="#b8b8b8", linewidth=1.5, zorder=2)
    labels = [f"{row['workload']}  {shape_text(row)}" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    for place in range(1, len(rows)):
        if rows[place]["family"] != rows[place - 1]["family"]:
            axes.axhline(place - 0.5, color="#999999", linewidth=0.6)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.tick_params(top=True, labeltop=True)
    axes.set_xlabel(f"fraction of the roof ({roof_text(report, report['roofs'])})")
    figure.suptitle(f"{report['environment']['device']}, {main_versions(report)}", fontsize=11)
    figure.legend(loc="outside lower right", ncols=2, fontsize=8)
    _save(plt, figure, path, source)


def panels(report: Report, rows: Sequence[Report], path: Path, source: str = "") -> None:
    """Plot one panel for each workload: shapes by candidates, coloured by fraction of the roof.

    Args:
        report: the results.
        rows: the rows of one family.
        path: the PNG to write.
        source: the digest of the results, stored in the PNG.
    """
    plt = _pyplot()
    groups = by_workload(rows)
    parts = list(groups.values())
    parts_by_line = [parts[place : place + 2] for place in range(0, len(parts), 2)]
    heights = [max(len(part) for part in line) + 3.5 for line in parts_by_line]
    figure, grid = plt.subplots(
        len(parts_by_line),
        2,
        figsize=(14, 0.33 * sum(heights) + 0.9),
        layout="constrained",
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )
    for axes in grid.flat[len(parts) :]:
        axes.set_axis_off()
    image = None
    for (workload, part), axes in zip(groups.items(), grid.flat, strict=False):
        image = _panel(axes, workload, part, report) or image
    if image is not None:
        figure.colorbar(image, ax=grid, shrink=0.7, label="fraction of the roof")
    roofs = dict.fromkeys(row["roof"] for row in rows)
    figure.suptitle(
        f"{report['environment']['device']}, {main_versions(report)}: percent of the roof "
        f"({roof_text(report, roofs)}); the fastest is framed",
        fontsize=12,
    )
    _save(plt, figure, path, source)


def _panel(axes: Any, workload: str, rows: Sequence[Report], report: Report) -> Any:
    names = names_of(rows, report)
    axes.set_title(workload, fontweight="bold", fontsize=11)
    if not names:
        axes.set_axis_off()
        return None
    shares = [[share(row, name, report) for name in names] for row in rows]
    filled = [[float("nan") if it is None else it for it in line] for line in shares]
    image = axes.imshow(filled, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(rows):
        best = fastest(row)
        for x, name in enumerate(names):
            fraction = shares[y][x]
            axes.text(
                x,
                y,
                "-" if fraction is None else f"{100 * fraction:.0f}",
                ha="center",
                va="center",
                fontweight="bold" if name == best else "normal",
                color="white" if (fraction or 0) > 0.6 else "black",
            )
            if name == best:
                axes.add_patch(_frame(x, y))
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
    axes.set_yticks(range(len(rows)), [shape_text(row) for row in rows], fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    ours = sum(map(is_ours, names))
    if 0 < ours < len(names):  # a line between this repository's sets and the peers
        axes.axvline(ours - 0.5, color="black", linewidth=1)
    return image


def _frame(x: int, y: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.47, y - 0.46), 0.94, 0.92, fill=False, edgecolor="#d1495b", linewidth=2)
