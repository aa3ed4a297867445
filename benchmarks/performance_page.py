"""Writes docs/performance.md, and its pictures, from the results that are committed.

    python benchmarks/performance_page.py

Reads ``results/ops_*.json`` (one for each device, written by ops.py) and
``results/dispatch_overhead.json``; measures nothing. A test compares the page with what
this gives, so a new result and its page are committed together.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"

Report = dict[str, Any]

OURS = ("default.", "vendor.", "reference.")
"""How the impl ids of the sets in this repository begin; every other name is a peer's."""

PEERS = {
    "torch.eager": "`F.rms_norm` and `F.layer_norm`; backward by `torch.autograd.grad`",
    "torch.compile": "`F.layer_norm`, or RMS norm written in plain torch, compiled for each shape",
    "liger-kernel": "its Triton kernels, called without autograd",
    "quack": "its CuTe kernels, called without autograd; layernorm with float32 parameters",
    "flag_gems": "its Triton kernels, called without autograd",
}

INTRODUCTION = """\
# Performance

Written by `benchmarks/performance_page.py` from the results in `benchmarks/results/`; not edited
by hand. Figures hold for the device and the versions named beside them and for nothing else. Where
another library is faster, the table shows it.
"""

METHOD = """
How it is measured (`benchmarks/ops.py`): every candidate is called on the same inputs, in one
process. Its values are compared with a float64 formula first, then it is timed: the L2 cache is
cleared before each call, and the median is taken of the times between two events on the device
around it. The clearing hides part of what the host does before a launch; what it does not hide is
in the time, which shows at small shapes. GB/s divides the fewest bytes that the operator must
move, each input read once and each output of the contract written once, by that time; the same
bytes are counted for a peer that returns fewer outputs. The roof is a device-to-device copy of
2 GiB in the same run, read and written.
"""

HOST = """
What the host needs for one call of `rmsnorm_fwd` on a 4x64 bfloat16 tensor, {where}: the median of
41 batches of 200 calls, all measured in turns, with the garbage collector off; the device is waited
for between batches only. *direct* is the implementation itself, without dispatch.
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


def main() -> None:
    reports = load()
    for path, report in reports:
        picture(report, path.with_suffix(".png"), digest(path))
    PAGE.write_text(page(reports, load_dispatch()), encoding="utf-8")


def load() -> list[tuple[Path, Report]]:
    """The committed results of operators, by file."""
    return [
        (path, json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(RESULTS.glob("ops_*.json"))
    ]


def load_dispatch() -> Report:
    """The committed results of the dispatch."""
    found: Report = json.loads((RESULTS / "dispatch_overhead.json").read_text(encoding="utf-8"))
    return found


def digest(path: Path) -> str:
    """Names the results that a picture was made from; it stands in the picture's file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ------------------------------------------------------------------------------ the page


def page(reports: Iterable[tuple[Path, Report]], dispatch: Report) -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for path, report in reports:
        parts += _operators(path, report)
    parts += _dispatch(dispatch)
    return "\n".join(parts)


def _operators(path: Path, report: Report) -> Iterator[str]:
    yield f"## Operators on {report['environment']['device']}\n"
    yield _paragraph(METHOD)
    names = _names(report["rows"])
    yield _paragraph(
        f"Versions: {_versions(report)}. Copy roof: {report['roof_gbps']:,.0f} GB/s. The sets of "
        f"this repository come first: {', '.join(f'`{it}`' for it in names if _is_ours(it))}."
    )
    shown = [name for name in PEERS if name in names]
    if shown:
        yield "Beside them stand:\n"
        yield "".join(f"- `{name}`: {PEERS[name]}.\n" for name in shown)
    yield f"![Fraction of the copy roof](../benchmarks/results/{path.stem}.png)\n"
    for op in _in_order(report["rows"]):
        yield from _operator(op, report)
    yield from _values(report)
    yield from _absent(report["rows"])
    if report["host_us"]:
        yield "### Host time\n"
        where = f"{report['environment']['device']}, {_main_versions(report)}"
        yield _paragraph(HOST.format(where=where))
        rows = [[name, f"{us:.1f}"] for name, us in report["host_us"].items()]
        yield _table(["call", "us"], rows)


def _operator(op: str, report: Report) -> Iterator[str]:
    rows = [row for row in report["rows"] if row["op"] == op]
    names = _names(rows)
    dtypes = ", ".join(dict.fromkeys(_dtype(row) for row in rows))
    yield f"### {op}\n"
    yield _paragraph(
        f"{report['environment']['device']}, {_main_versions(report)}; {dtypes}; roof "
        f"{report['roof_gbps']:,.0f} GB/s; cold L2, median. "
        "In each cell: microseconds, and GB/s of the bytes that must be moved; the fastest in bold."
    )
    yield _table(["shape", *names], [[_shape(row), *_cells(row, names)] for row in rows])
    fastest = [_fastest(row) for row in rows]
    counts = sorted(((fastest.count(name), name) for name in set(fastest)), reverse=True)
    said = ", ".join(f"{name} on {count}" for count, name in counts)
    yield f"Fastest: {said} of {len(rows)} shapes.\n"


def _cells(row: Report, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        result = row["results"].get(name)
        if result is None:
            yield "-"
            continue
        text = f"{result['us']:.1f} / {result['gbps']:,.0f}"
        yield f"**{text}**" if name == _fastest(row) else text


def _values(report: Report) -> Iterator[str]:
    """The worst error of each candidate."""
    names, rows = _names(report["rows"]), []
    for op in _in_order(report["rows"]):
        cells = [f"`{op}`"]
        for name in names:
            ratios = [
                row["results"][name]["error_over_allowed"]
                for row in report["rows"]
                if row["op"] == op and name in row["results"]
            ]
            cells.append(f"{max(ratios):.2f}" if ratios else "-")
        rows.append(cells)
    yield "### Values\n"
    yield _paragraph(
        "In the same run: the worst error against float64 over all shapes, as a multiple of what "
        "the contract allows (above 1, the contract is not kept)."
    )
    yield _table(["operator", *names], rows)


def _absent(rows: Iterable[Report]) -> Iterator[str]:
    """What could not be measured, with the reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in row["absent"].items():
            first = reason.splitlines()[0].replace("`", "'")
            found.setdefault((name, first), []).append(f"{row['op']} {_shape(row)}")
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


def _paragraph(text: str) -> str:
    words = " ".join(text.split())
    return textwrap.fill(words, 100, break_long_words=False, break_on_hyphens=False) + "\n"


def _table(heads: list[str], rows: Iterable[list[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


# --------------------------------------------------------------------------- the results


def _names(rows: Iterable[Report]) -> list[str]:
    """Whose results there are: this repository's sets first."""
    names = list(dict.fromkeys(name for row in rows for name in row["results"]))
    order = list(PEERS)
    return sorted(names, key=lambda it: (not _is_ours(it), order.index(it) if it in order else -1))


def _is_ours(name: str) -> bool:
    return name.startswith(OURS)


def _in_order(rows: Iterable[Report]) -> list[str]:
    """The operators, each forward before its backward."""
    return sorted({row["op"] for row in rows}, key=lambda op: (op[:-4], op.endswith("_bwd")))


def _fastest(row: Report) -> str:
    fastest: str = min(row["results"], key=lambda name: row["results"][name]["us"])
    return fastest


def _shape(row: Report) -> str:
    return "x".join(str(size) for size in row["shape"])


def _dtype(row: Report) -> str:
    return str(row["dtype"]).removeprefix("torch.")


def _versions(report: Report) -> str:
    names = (name for name in report["environment"] if name != "device")
    return ", ".join(f"{name} {report['environment'][name]}" for name in names)


def _main_versions(report: Report) -> str:
    return ", ".join(f"{name} {report['environment'][name]}" for name in ("torch", "triton"))


# --------------------------------------------------------------------------- the picture


def picture(report: Report, path: Path, source: str) -> None:
    """A panel for each operator: shape by candidate, coloured by the fraction of the roof.

    Args:
        report: the results.
        path: where the PNG goes.
        source: the digest of the results, kept in the PNG.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    operators = _in_order(report["rows"])
    most = max(sum(row["op"] == op for row in report["rows"]) for op in operators)
    lines = -(-len(operators) // 2)
    figure, panels = plt.subplots(
        lines, 2, figsize=(13, lines * (0.36 * most + 1.1) + 1), layout="constrained", squeeze=False
    )
    for axes in panels.flat[len(operators) :]:
        axes.set_axis_off()
    for op, axes in zip(operators, panels.flat, strict=False):
        image = _panel(axes, op, report)
    environment = report["environment"]
    figure.colorbar(image, ax=panels, shrink=0.6, label="fraction of the copy roof")
    figure.suptitle(
        f"{environment['device']}, {_main_versions(report)}: percent of the copy roof "
        f"({report['roof_gbps']:,.0f} GB/s); the fastest in a frame",
        fontsize=12,
    )
    figure.savefig(path, dpi=110, metadata={"Source": source})
    plt.close(figure)


def _panel(axes: Any, op: str, report: Report) -> Any:
    rows = [row for row in report["rows"] if row["op"] == op]
    names = _names(rows)
    shares = [
        [
            row["results"].get(name, {}).get("gbps", float("nan")) / report["roof_gbps"]
            for name in names
        ]
        for row in rows
    ]
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(rows):
        for x, name in enumerate(names):
            share = shares[y][x]
            best = name == _fastest(row)
            axes.text(
                x,
                y,
                f"{100 * share:.0f}" if share == share else "-",
                ha="center",
                va="center",
                fontweight="bold" if best else "normal",
                color="white" if share > 0.6 else "black",
            )
            if best:
                axes.add_patch(_frame(x, y))
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right")
    axes.set_yticks(range(len(rows)), [_shape(row) for row in rows])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(op, fontweight="bold", fontsize=11)
    if names and not all(map(_is_ours, names)):  # a line between the sets here and the peers
        axes.axvline(sum(map(_is_ours, names)) - 0.5, color="black", linewidth=1)
    return image


def _frame(x: int, y: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.47, y - 0.46), 0.94, 0.92, fill=False, edgecolor="#d1495b", linewidth=2)


if __name__ == "__main__":
    main()
