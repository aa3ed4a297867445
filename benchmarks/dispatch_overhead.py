"""Measures the cost of a dispatch, and of other dispatch mechanisms, in one run.

    python benchmarks/dispatch_overhead.py            about a minute; writes JSON and a plot
    python benchmarks/dispatch_overhead.py --quick    a few seconds; writes only with --out
    python benchmarks/dispatch_overhead.py --check    status 1 if a budget is exceeded

Every case calls the same function of two tensors, which returns the first. Several processes run
one after the other, because memory layout and hash seeds differ between processes. Within a process
the cases alternate, in a new random order in each round, so that a slow moment affects all of them
alike. A case's figure in a process is its fastest round; the result is the median over the
processes, with the lowest and the highest. The cost of a dispatch is the difference from the
direct call.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import platform
import random
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scripts import at_least, result_folder
from torch import Tensor

from transformer_engine_fl import (
    BackendImplKind,
    Contract,
    OpImpl,
    OpManager,
    OpRegistry,
    SelectionPolicy,
    get_default_manager,
    set_global_policy,
    with_preference,
)

RESULTS = Path(__file__).parent / "results"

REFERENCE_LOOKUP_US = 0.04
"""A dict look-up and a call, less an empty loop, on the machine that the budgets are stated for."""

BUDGETS_US = {
    "manager.call": 0.25,
    "bound handle": 0.10,
    "manager.call, device and dtype guard": 0.80,
}
"""What a case may add to the direct call, on a machine with ``REFERENCE_LOOKUP_US``."""

PLAN_BUDGET_US = 200.0
"""What the first call of an operator may take after all plans were dropped, on any machine."""

OPERATORS, IMPLEMENTATIONS = 1_000, 10
SAMPLE_SECONDS = 1e-3


def trivial(a: Tensor, b: Tensor) -> Tensor:
    """The operator that every case calls."""
    return a


# ------------------------------------------------------------------------------ managers


def _impls(op_name: str, count: int, **conditions: Any) -> list[OpImpl]:
    return [
        OpImpl(
            op_name,
            impl_id=f"impl{place}",
            kind=BackendImplKind.REFERENCE,
            fn=trivial,
            priority=place,
            mutates=(),
            **conditions,
        )
        for place in range(count)
    ]


def _manager(operators: int = 1, implementations: int = 1, **conditions: Any) -> OpManager:
    """A new manager with operators called op0, op1 and so on."""
    registry = OpRegistry(contracts={})
    registry.register_many(
        impl
        for place in range(operators)
        for impl in _impls(f"op{place}", implementations, **conditions)
    )
    return OpManager(registry, builtins=False, plugins=False)


GUARD = {"devices": frozenset({"cpu"}), "supported_dtypes": frozenset({"float32"})}


def _operator_object() -> Contract[..., Any]:
    """An operator like those of ``ops``, which calls through the default manager."""
    get_default_manager().registry.register_many(_impls("trivial", 1))
    return Contract(
        trivial,
        family="benchmark",
        check=lambda op, **arguments: None,
        samples=lambda dtype, device: iter(()),
        tolerance={},
        oracle=trivial,
    )


# --------------------------------------------------------------------------------- cases


@dataclass
class Case:
    """A statement to time.

    Attributes:
        name: its name in the results.
        statement: may use a, b and the names of ``uses``.
        uses: other objects that the statement needs, by name.
        block: the context in which it runs.
    """

    name: str
    statement: str
    uses: dict[str, Any]
    block: Callable[[], AbstractContextManager[Any]] = nullcontext

    def timer(self) -> timeit.Timer:
        """A timer whose loop has every name as a local variable."""
        names = {"a": torch.ones(4), "b": torch.ones(4), **self.uses}
        setup = "; ".join(f"{name} = _{name}" for name in names)
        return timeit.Timer(
            self.statement, setup, globals={f"_{name}": value for name, value in names.items()}
        )


def cases() -> Iterator[Case]:
    """Everything that is measured."""
    unguarded, guarded = _manager(), _manager(**GUARD)
    many = _manager(1, IMPLEMENTATIONS)
    crowded = _manager(OPERATORS, IMPLEMENTATIONS)
    prefer = functools.partial(with_preference, "reference")

    yield Case("empty loop", "pass", {})
    yield Case("direct call", "f(a, b)", {"f": trivial})
    yield Case("dict look-up and call", "table['op0'](a, b)", {"table": {"op0": trivial}})
    yield Case("manager.call", "m.call('op0', a, b)", {"m": unguarded})
    yield Case("manager.call, 10 implementations", "m.call('op0', a, b)", {"m": many})
    yield Case("manager.call, 1,000 operators of 10 each", "m.call('op500', a, b)", {"m": crowded})
    yield Case("manager.call, inside a with block", "m.call('op0', a, b)", {"m": unguarded}, prefer)
    yield Case("manager.call, device and dtype guard", "m.call('op0', a, b)", {"m": guarded})
    yield Case("bound handle", "f(a, b)", {"f": unguarded.bind("op0")})
    yield Case("bound handle, inside a with block", "f(a, b)", {"f": unguarded.bind("op0")}, prefer)
    yield Case("bound handle, device and dtype guard", "f(a, b)", {"f": guarded.bind("op0")})
    yield Case("operator object, ops.X(...)", "f(a, b)", {"f": _operator_object()})
    yield Case(
        "entering a with block, and manager.call",
        "with prefer('reference'): m.call('op0', a, b)",
        {"m": unguarded, "prefer": with_preference},
    )
    yield from _others()


def _others() -> Iterator[Case]:
    """The dispatch mechanisms of Python and torch."""
    generic = functools.singledispatch(lambda a, b: NotImplemented)
    generic.register(Tensor, trivial)
    yield Case("functools.singledispatch", "f(a, b)", {"f": generic})

    third = torch.ones(4)

    # torch rejects a custom_op that returns its argument, so this one returns a third tensor.
    opaque = torch.library.custom_op(
        "te_fl_benchmark::custom",
        lambda a, b: third,
        mutates_args=(),
        schema="(Tensor a, Tensor b) -> Tensor",
    )
    yield Case("torch.library.custom_op", "f(a, b)", {"f": opaque})

    library = torch.library.Library("te_fl_benchmark", "FRAGMENT")
    library.define("defined(Tensor a, Tensor b) -> Tensor")
    library.impl("defined", trivial, "CPU")
    overload = torch.ops.te_fl_benchmark.defined.default
    yield Case("torch.library define and impl", "f(a, b)", {"f": overload, "held": library})


# ----------------------------------------------------------------------------- measuring


def measure(rounds: int) -> dict[str, float]:
    """Each case's fastest round in this process, and the first calls that build plans, in us."""
    chosen = list(cases())
    timers = [case.timer() for case in chosen]
    numbers = []
    for case, timer in zip(chosen, timers, strict=True):
        with case.block():
            timer.timeit(1_000)
            numbers.append(max(1, round(1_000 * SAMPLE_SECONDS / timer.timeit(1_000))))
    fastest = [float("inf")] * len(chosen)
    order = list(range(len(chosen)))
    gc.disable()
    for _ in range(rounds):
        random.shuffle(order)
        for place in order:
            with chosen[place].block():
                seconds = timers[place].timeit(numbers[place]) / numbers[place]
            fastest[place] = min(fastest[place], seconds)
    gc.enable()
    figures = {case.name: 1e6 * value for case, value in zip(chosen, fastest, strict=True)}
    return figures | _plans(max(20, rounds))


def _plans(repeats: int) -> dict[str, float]:
    """First calls after all plans were dropped: the median over operators, in us."""
    a, b = torch.ones(4), torch.ones(4)
    plain = _manager(OPERATORS, IMPLEMENTATIONS)
    guarded = _manager(OPERATORS, IMPLEMENTATIONS, **GUARD)
    figures = {
        "plan": _first_calls(plain, (a, b), repeats, lambda place: plain.reset_quarantine()),
        "plan, device and dtype guard": _first_calls(
            guarded, (a, b), repeats, lambda place: guarded.reset_quarantine()
        ),
        "plan, under a policy not seen before": _first_calls(plain, (a, b), repeats, _new_policy),
    }
    set_global_policy(None)
    return figures


def _new_policy(place: int) -> None:
    set_global_policy(SelectionPolicy(per_op_order={f"op{place}": ("reference",)}))


def _first_calls(
    manager: OpManager,
    args: tuple[Tensor, Tensor],
    repeats: int,
    forget: Callable[[int], None],
) -> float:
    manager.call("op0", *args)
    taken = []
    for place in range(1, 1 + min(repeats, OPERATORS - 1)):
        forget(place)
        start = time.perf_counter_ns()
        manager.call(f"op{place}", *args)
        taken.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(taken)


def run(processes: int, rounds: int) -> dict[str, list[float]]:
    """Each case's figure in each process."""
    figures: dict[str, list[float]] = {}
    for number in range(processes):
        print(f"process {number + 1} of {processes}", end="\r", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, "--worker", str(rounds)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        for name, value in json.loads(done.stdout).items():
            figures.setdefault(name, []).append(value)
    print(file=sys.stderr)
    return figures


# ----------------------------------------------------------------------------- reporting


def report(figures: dict[str, list[float]]) -> dict[str, Any]:
    """The results to write: figures in us, ratios, budgets, versions."""
    middle = {name: statistics.median(values) for name, values in figures.items()}
    empty, direct = middle["empty loop"], middle["direct call"]
    scale = (middle["dict look-up and call"] - empty) / REFERENCE_LOOKUP_US
    measured = {
        name: {
            "us": round(middle[name], 4),
            "lowest_us": round(min(values), 4),
            "highest_us": round(max(values), 4),
            "added_us": round(middle[name] - direct, 4),
            "ratio": round((middle[name] - empty) / (direct - empty), 2),
        }
        for name, values in figures.items()
        if not name.startswith("plan")
    }
    budgets = {
        name: _budget(middle[name] - direct, budget * scale) for name, budget in BUDGETS_US.items()
    }
    plans = {name: round(us, 1) for name, us in middle.items() if name.startswith("plan")}
    budgets |= {name: _budget(us, PLAN_BUDGET_US) for name, us in plans.items()}
    return {
        "processes": len(figures["direct call"]),
        "scale": round(scale, 3),
        "cases": measured,
        "plans_us": plans,
        "budgets": budgets,
        "environment": _environment(),
    }


def _budget(used: float, budget: float) -> dict[str, Any]:
    return {"us": round(used, 4), "budget_us": round(budget, 4), "within": used <= budget}


def _environment() -> dict[str, str]:
    from transformer_engine_fl import __version__

    return {
        "device": "cpu",
        "cpu": _cpu(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformer_engine_fl": __version__,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def show(results: dict[str, Any]) -> None:
    """Print the results as tables."""
    print(f"{'case':<42} {'us':>8} {'added us':>9} {'x direct':>9}   lowest..highest us")
    for name, row in results["cases"].items():
        span = f"{row['lowest_us']:.3f}..{row['highest_us']:.3f}"
        print(f"{name:<42} {row['us']:>8.3f} {row['added_us']:>9.3f} {row['ratio']:>9.1f}   {span}")
    print(f"\nbudgets; for this machine's speed, a call's budget is scaled by {results['scale']}")
    for name, row in results["budgets"].items():
        verdict = "within" if row["within"] else "OVER"
        print(f"{name:<42} {row['us']:>8.3f} of {row['budget_us']:>8.3f} us   {verdict}")


OURS, THEIRS = "#1f6391", "#9a9a9a"


def plot(results: dict[str, Any], path: Path) -> None:
    """Plot what each mechanism adds to the direct call."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {name: row for name, row in results["cases"].items() if row["added_us"] > 0}
    names = sorted(rows, key=lambda name: -rows[name]["added_us"])
    others = ("dict", "functools", "torch.library")
    figure, axes = pyplot.subplots(figsize=(8, 0.34 * len(names) + 1.3), layout="constrained")
    for color, label, theirs in ((OURS, "this framework", False), (THEIRS, "others", True)):
        shown = [it for it, name in enumerate(names) if name.startswith(others) is theirs]
        added = [rows[names[it]]["added_us"] for it in shown]
        # Dots, not bars: the length of a bar is meaningless on a logarithmic axis.
        axes.plot(added, shown, "o", color=color, label=label)
        for it, value in zip(shown, added, strict=True):
            axes.annotate(
                f"{value:.3f}", (value, it), (7, 0), textcoords="offset points", va="center"
            )
    axes.set_yticks(range(len(names)), names)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.set_xscale("log")
    axes.margins(x=0.16)
    axes.set_xlabel("added to a direct call, microseconds (logarithmic)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False)
    environment = results["environment"]
    axes.set_title(
        f"Host cost of one dispatch (Python {environment['python']}, torch {environment['torch']})",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one process, few rounds")
    parser.add_argument("--check", action="store_true", help="exit with 1 if over a budget")
    parser.add_argument("--processes", type=at_least(1), default=9)
    parser.add_argument("--rounds", type=at_least(1), default=200)
    parser.add_argument("--out", type=result_folder, help="folder for the JSON and the plot")
    parser.add_argument("--worker", type=at_least(1), metavar="ROUNDS", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker is not None:
        print(json.dumps(measure(options.worker)))
        return 0
    figures = run(1, 5) if options.quick else run(options.processes, options.rounds)
    results = report(figures)
    show(results)
    folder = options.out or (None if options.quick else RESULTS)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "dispatch_overhead.json"
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        plot(results, path.with_suffix(".png"))
        print(f"\nwritten: {path} and {path.with_suffix('.png').name}")
    over = [name for name, row in results["budgets"].items() if not row["within"]]
    return 1 if over and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
