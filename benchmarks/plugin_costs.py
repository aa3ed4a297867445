"""Measures what installed plugins cost a program that does not use them, in one run.

    python benchmarks/plugin_costs.py                 two minutes; writes JSON
    python benchmarks/plugin_costs.py --processes 3   sooner; writes only with --out

Twenty packages as written by ``te-fl new-plugin``, in its three styles in turn, are put on the
path with their entry points. Processes with and without them alternate. Each imports torch, and
then measures the time until the first call of an operator has returned, as wall-clock time and as
CPU time, which other work on the machine does not lengthen. Then it measures a dispatch of an
operator that no plugin implements, and of one that each plugin of the first style implements; the
same function serves the call with and without plugins. A figure is the median over the processes,
with the lowest and the highest; for a dispatch each process takes its fastest round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from scripts import at_least, result_folder

from transformer_engine_fl.cli.new_plugin import Style, new_plugin

RESULTS = Path(__file__).parent / "results"

PLUGINS = 20
STARTUP_BUDGET_MS = 150.0
"""What twenty plugins may add to the start of a program."""

PROGRAM = """\
import json, sys, time, timeit
import torch

begin, begin_cpu = time.perf_counter(), time.process_time()
import transformer_engine_fl
from transformer_engine_fl import OpImpl, ops

x, w = torch.ones(2, 4), torch.ones(4)
manager = transformer_engine_fl.get_default_manager()
manager.call("rmsnorm_fwd", x, w)
startup, startup_cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
loaded = sum(name.startswith("te_fl_bench") and "." not in name for name in sys.modules)

plugins = [it for it in manager.plugins if it.name.startswith("entry point bench")]
assert len(plugins) == loaded and all(it.error is None for it in plugins), plugins


def alone(x, w):
    return x


def shared(input, weight, eps=1e-5, *, zero_centered_gamma=False, out_dtype=None):
    return input


manager.registry.register_many(
    OpImpl(name, "probe", "reference", fn, priority=999, mutates=())
    for name, fn in (("alone", alone), ("rmsnorm_fwd", shared))
)
dispatch = {}
for name in ("alone", "rmsnorm_fwd"):
    manager.call(name, x, w)
    names = {"call": manager.call, "name": name, "x": x, "w": w}
    timer = timeit.Timer("call(name, x, w)", globals=names)
    dispatch[name] = min(timer.repeat(50, 2000)) / 2000
print(
    json.dumps(
        {
            "loaded": loaded,
            "startup": startup,
            "startup_cpu": startup_cpu,
            "dispatch": dispatch,
        }
    )
)
"""


def make(folder: Path, count: int = PLUGINS) -> None:
    """Write installed packages to ``folder``, which only needs to be added to the path."""
    styles = list(Style)
    with open(os.devnull, "w") as nowhere:
        kept, sys.stdout = sys.stdout, nowhere
        try:
            for place in range(count):
                new_plugin(f"bench{place}", styles[place % len(styles)], folder / "made")
        finally:
            sys.stdout = kept
    for package in (folder / "made").iterdir():
        module, vendor = package.name, package.name.removeprefix("te_fl_")
        (package / "src" / module).rename(folder / module)
        information = folder / f"{module}-0.1.0.dist-info"
        information.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {module}\nVersion: 0.1.0\n"
        (information / "METADATA").write_text(metadata)
        (information / "entry_points.txt").write_text(f"[te_fl.plugin]\n{vendor} = {module}\n")


def run(folder: Path | None) -> dict[str, Any]:
    """The measurements of one process, with the packages in a folder or with none."""
    ours = ("TE_FL_", "TEFL_", "TRITON_INTERPRET")
    environ = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    paths = [str(Path(__file__).parents[1]), environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder or ""), *paths]))
    environ["TE_FL_PREFER"] = "reference"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    measured: dict[str, Any] = json.loads(done.stdout)
    assert measured["loaded"] == (PLUGINS if folder else 0)  # loaded during the timed part
    return measured


def measure(processes: int) -> dict[str, Any]:
    """Everything that is measured."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder)
        run(folder)  # writes the packages' bytecode
        rounds = [(run(None), run(folder)) for _ in range(processes)]
    return {
        "plugins": PLUGINS,
        "processes": processes,
        "startup_ms": _beside(rounds, lambda it: it["startup"] * 1e3),
        "startup_cpu_ms": _beside(rounds, lambda it: it["startup_cpu"] * 1e3),
        "dispatch_us": {
            said: _beside(rounds, lambda it, key=key: it["dispatch"][key] * 1e6)
            for said, key in (
                ("of an operator that no plugin has", "alone"),
                ("of an operator that plugins have", "rmsnorm_fwd"),
            )
        },
        "environment": {
            "cpu": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


def _beside(rounds: list[tuple[Any, Any]], figure: Any) -> dict[str, Any]:
    """A figure without plugins and with them, and the difference of the medians."""
    without, with_them = ([figure(pair[place]) for pair in rounds] for place in (0, 1))
    return {
        "without": _spread(without),
        "with": _spread(with_them),
        "added": statistics.median(with_them) - statistics.median(without),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=at_least(1), default=11, help="processes of each kind")
    parser.add_argument("--out", type=result_folder, help="folder for the results")
    chosen = parser.parse_args()
    results = measure(chosen.processes)
    starts = {
        "start-up, ms": results["startup_ms"],
        "start-up, ms of CPU time": results["startup_cpu_ms"],
    }
    for name, it in {**starts, **results["dispatch_us"]}.items():
        without, with_them = it["without"]["median"], it["with"]["median"]
        print(f"{name}: {without:.3f} without, {with_them:.3f} with, {it['added']:+.3f}")
    out = chosen.out or (RESULTS if chosen.processes == parser.get_default("processes") else None)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "plugin_costs.json").write_text(
            json.dumps(results, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
