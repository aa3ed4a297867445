"""Measures implementation sets and their peers on a GPU: accuracy first, then time.

    python benchmarks/ops.py --impl default.flagos --impl vendor.cuda --out results.json

Every implementation and every installed peer does the same work on the same inputs. Its values
are checked against float64; then it is timed with a cold L2 cache, and the median is reported.
Memory-bound work is reported in GB/s of the fewest bytes that must be moved, and compared with a
large device-to-device copy in the same run. Matrix products are reported in TFLOP/s, and compared
with torch's product of large square matrices in the same run; their candidates are timed in
turns of random order. Writes JSON, with ``--markdown`` also a table, and with ``--plot`` a plot.
``workloads/`` defines what is measured, and ``peers/`` what it is compared with.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import json
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import copies, error_ratio, roofs
from peers import COMPILER, DESCRIPTIONS, Work, peers_of
from report import is_right, markdown, overview, shape_text
from scripts import at_least, picture_file, result_file
from workloads import WORKLOADS, Shape, Workload, chosen

import transformer_engine_fl as te
from transformer_engine_fl.backends._files import replaced
from transformer_engine_fl.cli._processes import run_in_processes
from transformer_engine_fl.core.contract import Contract, Sample
from transformer_engine_fl.core.errors import suggestion
from transformer_engine_fl.ops._dtypes import FLOATS
from transformer_engine_fl.testing.arguments import as_tuple
from transformer_engine_fl.testing.timing import medians_ms

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Candidate:
    """An implementation (by its id) or a peer (by its name), and a function that makes its work."""

    name: str
    make: Callable[[Sample], Work]
    note: str = ""


class AbsentError(Exception):
    """An implementation declines a call."""


def implementation(op: str, impl_id: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The function that one implementation runs for a call.

    Raises:
        AbsentError: the implementation does not run the call; the message says why.
    """
    manager = te.get_default_manager()
    with te.policy_context(prefer=f"impl:{impl_id}", strict=True):
        verdicts = manager.explain(op, *args, **kwargs).verdicts
        own = next((it for it in verdicts if it.impl.impl_id == impl_id), None)
        if own is None:
            raise AbsentError("does not implement the operator")
        if not own.accepted:
            raise AbsentError(own.reason)
        return manager.resolve(op, *args, **kwargs)


def own_work(workload: Workload, impl_id: str, sample: Sample) -> Work:
    """The work of an implementation; its functions are resolved before anything is timed."""
    functions: dict[str, Callable[..., Any]] = {}

    def rehearsed(contract: Contract[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            functions[contract.name] = implementation(contract.name, impl_id, *args, **kwargs)
            return contract.shapes(*args, **kwargs)

        return step

    workload.perform({it.name: rehearsed(it) for it in workload.contracts}, sample)
    if workload.run is None:
        run = functools.partial(functions[workload.operators[0]], *sample.args, **sample.kwargs)
    else:
        run = functools.partial(workload.run, functions, sample)
    return Work(run, lambda result: (*as_tuple(result), *workload.written(sample)))


def candidates(workload: Workload, args: argparse.Namespace) -> Iterator[Candidate]:
    """Every implementation and peer to be measured."""
    for impl_id in args.impl:
        yield Candidate(impl_id, functools.partial(own_work, workload, impl_id))
    for name, peer in peers_of(workload.name).items() if args.peers else ():
        if name != COMPILER or args.compile:
            yield Candidate(name, peer.work, peer.note)


def measure(
    workload: Workload, shape: Shape, args: argparse.Namespace, device: str = "cuda"
) -> Report:
    """Measure all candidates on one workload and shape."""
    row: Report = {
        "workload": workload.name,
        "ops": list(workload.operators),
        "family": workload.family,
        "axes": workload.axes,
        "shape": list(shape),
        "unit": workload.unit,
        "roof": workload.roof,
        "counted": workload.counted,
        "in_turns": bool(workload.flops),
        "notes": {},
        "results": {},
        "absent": {},
    }
    dtype = getattr(torch, args.dtype)
    small = workload.check_shape(shape) if workload.check_shape else shape
    make = functools.partial(workload.sample, dtype=dtype, device=device)
    sample = make(shape)
    row["dtype"] = workload.dispatch_dtype(sample)
    row["work"] = workload.work(shape, sample)
    row["checked"] = list(small)
    checked = sample if small == shape else make(small)
    expected = workload.expected(checked)

    def fresh(kept: Sample, its_shape: Shape) -> Sample:
        return make(its_shape) if workload.mutates else kept

    every = list(candidates(workload, args))
    # Matrix products heat a device until it lowers its clocks, so their candidates are timed in
    # turns, and hold their memory at the same time. Memory-bound workloads need most of the memory,
    # and clocks hardly matter to them: their candidates are timed one by one.
    for together in [every] if workload.flops else [[it] for it in every]:
        works: dict[str, Work] = {}
        ratios: dict[str, float | None] = {}
        for candidate in together:
            with _absence_noted(row, candidate.name):
                work = candidate.make(fresh(checked, small))
                values = work.values(work.run())
                ratios[candidate.name] = error_ratio(
                    workload, row["dtype"], values, expected, whole=candidate.name in args.impl
                )
                del values
                if small != shape:
                    work = candidate.make(fresh(sample, shape))
                works[candidate.name] = work
        for name, milliseconds in _times(row, works, args).items():
            per_second = row["work"] / milliseconds * 1e3
            row["results"][name] = {
                "us": milliseconds * 1e3,
                "rate": per_second / (1e12 if workload.flops else 1e9),
                "error_over_allowed": ratios[name],
            }
        row["notes"] |= {
            it.name: it.note for it in together if it.note and it.name in row["results"]
        }
    return row


def _times(row: Report, works: dict[str, Work], args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds by candidate.

    Each runs once first, now that all have their memory: one that failed among the others would
    end their timing, too.
    """
    for name in list(works):
        with _absence_noted(row, name):
            works[name].run()
        if name in row["absent"]:
            del works[name]
    with _absence_noted(row, *works):
        medians = medians_ms([it.run for it in works.values()], args.warmup, args.rep)
        return dict(zip(works, medians, strict=True))
    return {}


@contextlib.contextmanager
def _absence_noted(row: Report, *names: str) -> Iterator[None]:
    """Report candidates that decline or fail as absent."""
    try:
        yield
    except AbsentError as error:
        said = str(error).splitlines()[0]
    except Exception as error:  # noqa: BLE001 - any failure of a candidate is reported
        said = f"{type(error).__name__}: {error}"[:300]
    else:
        return
    row["absent"] |= dict.fromkeys(names, said)


def prepare(
    plan: list[tuple[Workload, Shape]], args: argparse.Namespace, device: str = "cuda"
) -> None:
    """Run every call once, in several processes, to fill the compilers' caches on disk.

    Compiling takes much longer than measuring, and a process compiles one kernel at a time.
    """
    calls = [(workload.name, shape, args, device) for workload, shape in plan]

    def progress(done: int, seconds: float) -> None:
        print(f"prepared {done} of {len(calls)} ({seconds:.0f} s)", flush=True)

    run_in_processes(_rehearse, calls, args.prepare, progress)


def _rehearse(call: tuple[str, Shape, argparse.Namespace, str]) -> float:
    """Run the work of every candidate once; returns the seconds taken."""
    name, shape, args, device = call
    workload, start = WORKLOADS[name], time.perf_counter()
    small = workload.check_shape(shape) if workload.check_shape else shape
    for its_shape in dict.fromkeys((small, shape)):
        with contextlib.suppress(Exception):  # the measurement fails too, and reports it
            sample = workload.sample(its_shape, dtype=getattr(torch, args.dtype), device=device)
            for candidate in candidates(workload, args):
                with contextlib.suppress(Exception):
                    candidate.make(sample).run()
        torch.cuda.empty_cache()
    return time.perf_counter() - start


def host_times(impls: list[str]) -> dict[str, float]:
    """Host microseconds of one call on a 4x64 tensor; batches of the calls alternate."""
    x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    w = torch.ones(64, device="cuda", dtype=torch.bfloat16)
    works: dict[str, Callable[[], Any]] = {
        "torch.empty_like": lambda: torch.empty_like(x),
        "F.rms_norm": lambda: torch.nn.functional.rms_norm(x, (64,), w, 1e-5),
    }
    for impl_id in impls:
        # A manager of its own for each implementation, with no other to choose.
        registry = te.OpRegistry()
        te.OpManager(registry, plugins=False).ensure_initialized()
        chosen = te.OpRegistry()
        chosen.register_impl(registry.get_implementation("rmsnorm_fwd", impl_id))
        manager = te.OpManager(chosen, builtins=False, plugins=False)
        works[f"manager.call, {impl_id}"] = functools.partial(manager.call, "rmsnorm_fwd", x, w)
        works[f"bound handle, {impl_id}"] = functools.partial(manager.bind("rmsnorm_fwd"), x, w)
        works[f"direct, {impl_id}"] = functools.partial(manager.resolve("rmsnorm_fwd"), x, w)
    for work in works.values():
        for _ in range(200):
            work()
    times: dict[str, list[float]] = {name: [] for name in works}
    gc.collect()
    gc.disable()  # as timeit does
    for _ in range(41):
        for name, work in works.items():
            times[name].append(_host_time(work))
    gc.enable()
    return {name: statistics.median(batches) for name, batches in times.items()}


def _host_time(work: Callable[[], Any], calls: int = 200) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls * 1e6


def environment() -> dict[str, str]:
    """Device, date and versions."""
    from importlib.metadata import PackageNotFoundError, version

    found = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
    }
    for name in ("torch", "triton", "cuda-core", "liger-kernel", "flag_gems", "quack-kernels"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["torch"] = torch.__version__
    return found


def planned(args: argparse.Namespace) -> Iterator[tuple[Workload, Shape]]:
    """The workloads and shapes to measure, in order.

    Raises:
        LookupError: there is no such workload, or it has no such shape.
    """
    for workload in chosen(args.op, args.family):
        shapes = workload.shapes[:1] if args.quick else workload.shapes
        if args.wide:
            shapes += workload.wide
        for shape in args.shape or shapes:
            if len(shape) != len(workload.tiny):
                text = "x".join(map(str, shape))
                raise LookupError(
                    f"{text} is not a shape of {workload.name}, which takes {workload.axes}"
                )
            yield workload, shape


def parse_shape(text: str) -> Shape:
    """The type of an argument such as ``8192x4096``."""
    numbers = text.split("x")
    if not all(number.isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; example: 8192x4096")
    return tuple(map(int, numbers))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--impl", action="append", default=[], help="an implementation id; may be repeated")
    add("--op", action="append", default=[], help="an operator or the name of a workload")
    add("--family", action="append", default=[], help="the standard workloads of a family")
    add("--shape", action="append", type=parse_shape, help="instead of the standard shapes")
    add("--dtype", default="bfloat16", choices=FLOATS, help="for workloads with no dtype of theirs")
    add("--wide", action="store_true", help="add shapes with rows of 65,536 columns and more")
    add("--quick", action="store_true", help="one shape per workload, no torch.compile")
    add("--no-peers", dest="peers", action="store_false", help="measure only the sets")
    add("--no-compile", dest="compile", action="store_false", help="leave torch.compile out")
    add("--prepare", type=at_least(0), default=0, help="processes that compile beforehand")
    add("--warmup", type=at_least(1), default=20, help="milliseconds of warm-up")
    add("--rep", type=at_least(1), default=80, help="milliseconds of a measurement")
    add("--host", action="store_true", help="also measure the host time of a tiny call")
    add("--host-only", action="store_true", help="measure only the host time")
    add("--list", action="store_true", help="list the workloads and their peers, and exit")
    add("--out", type=result_file, help="JSON file, rewritten after each workload")
    add("--markdown", type=result_file, help="Markdown file with a table of the results")
    add("--plot", type=picture_file, help="picture file with a plot of the results")
    return parser


def listing() -> str:
    """Each workload with its shapes and its peers; ``*`` marks those of a standard run."""
    lines = []
    for it in WORKLOADS.values():
        shapes = ", ".join("x".join(map(str, shape)) for shape in it.shapes)
        lines.append(f"{'*' if it.standard else ' '} {it.family}: {it.name} ({it.axes}: {shapes})")
        lines.append(f"    {', '.join(peers_of(it.name)) or 'no peers'}")
    return "\n".join(lines)


def question() -> tuple[argparse.Namespace, list[tuple[Workload, Shape]]]:
    """The arguments and the calls to measure; exits with an error if an argument is invalid."""
    parser = arguments()
    args = parser.parse_args()
    if args.list:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that piping into head works
        print(listing())
        sys.exit()
    args.impl = args.impl or ["default.flagos", "vendor.cuda"]
    if args.quick:
        args.compile, args.warmup, args.rep = False, min(args.warmup, 10), min(args.rep, 30)
    manager = te.get_default_manager()
    manager.ensure_initialized()
    listed = map(manager.registry.entries, manager.registry.list_operators())
    known = {it.impl.impl_id for entries in listed for it in entries}
    for name in args.impl:
        if name not in known:
            said = f"unknown implementation {name!r}; known: {', '.join(sorted(known))}"
            parser.error(f"--impl: {said}{suggestion(name, known)}")
    try:
        return args, [] if args.host_only else list(planned(args))
    except LookupError as error:
        parser.error(str(error))


def main() -> int:
    """Measure, print and write; returns 1 if nothing could be measured."""
    args, plan = question()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU to measure on")
    if args.prepare:
        prepare(plan, args)
    report: Report = {"environment": environment(), "roofs": roofs(), "peers": {}}
    report |= {"copies": copies(), "rows": [], "host_us": {}}
    for workload, shape in plan:
        try:
            row = measure(workload, shape, args)
        except Exception as error:  # noqa: BLE001 - the others can still be measured
            print(f"{workload.name} {shape}: {type(error).__name__}: {error}", flush=True)
            report.setdefault("failed", []).append(
                [workload.name, list(shape), f"{type(error).__name__}: {error}"[:300]]
            )
            row = None
        gc.collect()
        torch.cuda.empty_cache()
        if row is not None:
            report["rows"].append(row)
            present = {name for name in row["results"] if name in DESCRIPTIONS}
            report["peers"] |= {name: DESCRIPTIONS[name] for name in present}
            rates = ", ".join(
                f"{name} {it['rate']:.0f}{'' if is_right(it) else ' (outside the tolerance)'}"
                for name, it in row["results"].items()
            )
            print(f"{row['workload']} {shape_text(row)}: {rates} {row['absent'] or ''}", flush=True)
        write(report, args.out)
    if args.host or args.host_only:
        report["host_us"] = host_times(args.impl)
    write(report, args.out)
    if args.plot and report["rows"]:
        with replaced(args.plot) as picture:
            overview(report, picture)
    table = markdown(report)
    if args.markdown:
        with replaced(args.markdown) as page:
            page.write_text(table, encoding="utf-8")
    print(table)
    return 0 if report["host_us"] or any(row["results"] for row in report["rows"]) else 1


def write(report: Report, path: Path | None) -> None:
    """Write the report, if there is a path."""
    if path is not None:
        with replaced(path) as file:
            file.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
