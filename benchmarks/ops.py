"""Measures implementation sets, and their peers, on a GPU: values first, then time.

    python benchmarks/ops.py --impl default.flagos --impl vendor.cuda --out results.json

For each operator and shape, every implementation and every peer that is installed does
the same work on the same inputs. Its values are checked against float64; then it is
timed with a cold L2 cache and the median is taken. GB/s counts the fewest bytes that
the operator must move, each input read once and each output written once, and stands
beside a large device-to-device copy of the same run, the roof. Writes JSON, and with
``--markdown`` and ``--plot`` a table and a picture of it.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peers import peers
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import ops
from transformer_engine_fl.testing import compare

SHAPES = {
    "normalization": (
        (8192, 4096),
        (4096, 8192),
        (32768, 1024),
        (2048, 32768),
        (16, 4096),
        (32768, 4096),
        (16384, 8192),
    ),
}
WIDE = ((1024, 65536), (512, 131072), (256, 262144))


def inputs_for(op: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Random inputs of an operator, in the contract's order."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(dtype)

    x, columns = normal(*shape), shape[-1]
    weight, bias = normal(columns), normal(columns)
    if op == "rmsnorm_fwd":
        return [x, weight]
    if op == "layernorm_fwd":
        return [x, weight, bias]
    with te.with_preference("reference"):
        manager = te.get_default_manager()
        if op == "rmsnorm_bwd":
            return [normal(*shape), x, manager.call("rmsnorm_fwd", x, weight)[1], weight]
        _, mu, rsigma = manager.call("layernorm_fwd", x, weight, bias)
        return [normal(*shape), x, mu, rsigma, weight]


def bytes_moved(op: str, inputs: list[Tensor]) -> int:
    """The fewest bytes that the operator must move."""
    outputs = ops.CATALOGUE[op].shapes(*inputs)
    return sum(it.numel() * it.element_size() for it in (*inputs, *outputs))


def median_ms(work: Callable[[], Any]) -> float:
    """Median time of one call, with the L2 cache cleared before each."""
    from triton.testing import do_bench

    result: float = do_bench(work, warmup=20, rep=80, return_mode="median")
    return result


def copy_roof() -> float:
    """GB/s of a large device-to-device copy, read and written."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source)) / 1e6


def check(op: str, inputs: list[Tensor], results: Any) -> float:
    """The worst error over what the contract allows; a peer may return fewer outputs."""
    contract = ops.CATALOGUE[op]
    expected = contract.oracle(*inputs)
    dtype = str(inputs[0].dtype).removeprefix("torch.")
    worst = 0.0
    for result, value in zip(results, expected, strict=False):
        if result is None:
            continue
        name = str(result.dtype).removeprefix("torch.")
        worst = max(worst, compare(result, value, contract.tolerance_for(dtype, name)).ratio)
    return worst


def candidates(
    op: str, impls: list[str], inputs: list[Tensor], absent: dict[str, str], with_peers: bool
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, work) of everything to be measured."""
    manager = te.get_default_manager()
    for impl_id in impls:
        with te.policy_context(prefer=f"impl:{impl_id}", strict=True):
            try:
                fn = manager.resolve(op, *inputs)
            except te.TeFlError as error:
                absent[impl_id] = str(error)
                continue
        yield impl_id, functools.partial(fn, *inputs)
    for name, maker in peers(op, absent) if with_peers else ():
        try:
            yield name, maker(inputs)
        except Exception as error:  # noqa: BLE001 - whatever keeps a peer out is reported
            absent[name] = f"{type(error).__name__}: {error}"[:300]


def measure(
    op: str, shape: tuple[int, ...], dtype: torch.dtype, args: argparse.Namespace
) -> dict[str, Any]:
    """All candidates on one operator and shape."""
    inputs = inputs_for(op, shape, dtype, "cuda")
    moved = bytes_moved(op, inputs)
    row: dict[str, Any] = {"op": op, "shape": shape, "dtype": str(dtype), "bytes": moved}
    row["results"], row["absent"] = {}, {}
    for name, work in candidates(op, args.impl, inputs, row["absent"], args.peers):
        try:
            ratio = check(op, inputs, work())
            milliseconds = median_ms(work)
        except Exception as error:  # noqa: BLE001 - a failure is a result, and is shown
            row["absent"][name] = f"{type(error).__name__}: {error}"[:300]
            continue
        row["results"][name] = {
            "us": milliseconds * 1e3,
            "gbps": moved / milliseconds / 1e6,
            "error_over_allowed": ratio,
        }
    return row


def host_times(impls: list[str]) -> dict[str, float]:
    """Host microseconds of one call on a 4x64 tensor, all measured in turns."""
    x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    w = torch.ones(64, device="cuda", dtype=torch.bfloat16)
    works: dict[str, Callable[[], Any]] = {
        "torch.empty_like": lambda: torch.empty_like(x),
        "F.rms_norm": lambda: torch.nn.functional.rms_norm(x, (64,), w, 1e-5),
    }
    for impl_id in impls:
        # A manager of its own for each, so that each keeps its choice.
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
    """Device and versions."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"device": torch.cuda.get_device_name(), "python": platform.python_version()}
    for name in ("torch", "triton", "cuda-core", "liger-kernel", "flag_gems", "quack-kernels"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["torch"] = torch.__version__
    return found


def markdown(report: dict[str, Any]) -> str:
    """The report as a table, best first in each row."""
    lines = [
        f"Device: {report['environment']['device']}; copy roof {report['roof_gbps']:,.0f} GB/s.",
        "",
        "| operator | shape | implementation | us | GB/s | of the roof |",
        "|---|---|---|---:|---:|---:|",
    ]
    for row in report["rows"]:
        shape = "x".join(str(size) for size in row["shape"])
        ranked = sorted(row["results"].items(), key=lambda item: item[1]["us"])
        for name, it in ranked:
            share = it["gbps"] / report["roof_gbps"]
            lines.append(
                f"| {row['op']} | {shape} | {name} | {it['us']:.1f} "
                f"| {it['gbps']:,.0f} | {share:.2f} |"
            )
    if report["host_us"]:
        lines += ["", "| host time of a call on 4x64 | us |", "|---|---:|"]
        lines += [f"| {name} | {us:.1f} |" for name, us in report["host_us"].items()]
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any], path: str) -> None:
    """Roof fraction per operator and shape, one bar for each candidate."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(name for row in report["rows"] for name in row["results"]))
    labels = [f"{row['op']}\n{'x'.join(map(str, row['shape']))}" for row in report["rows"]]
    figure, axes = plt.subplots(figsize=(10, 0.55 * len(labels) + 1.5), layout="constrained")
    height = 0.85 / max(len(names), 1)
    for place, name in enumerate(names):
        shares = [
            row["results"].get(name, {}).get("gbps", 0) / report["roof_gbps"]
            for row in report["rows"]
        ]
        offsets = [index + place * height for index in range(len(labels))]
        axes.barh(offsets, shares, height, label=name)
    axes.set_yticks([index + 0.4 for index in range(len(labels))], labels, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel(f"fraction of the copy roof ({report['roof_gbps']:,.0f} GB/s)")
    axes.set_title(report["environment"]["device"])
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--impl", action="append", default=[], help="an implementation id")
    parser.add_argument("--op", action="append", help="an operator (all that have shapes here)")
    parser.add_argument("--shape", action="append", help="8192x4096 (the standard ones)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--wide", action="store_true", help="add rows of 65,536 and above")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--host", action="store_true", help="also the host time of a tiny call")
    parser.add_argument("--host-only", action="store_true", help="nothing but that")
    parser.add_argument("--out", help="write the report as JSON")
    parser.add_argument("--markdown", help="write the report as a table")
    parser.add_argument("--plot", help="write the report as a picture")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this measures on a GPU, and torch sees none")
    args.impl = args.impl or ["default.flagos", "vendor.cuda"]
    dtype = getattr(torch, args.dtype)
    report: dict[str, Any] = {"environment": environment(), "rows": [], "host_us": {}}
    report["roof_gbps"] = copy_roof()
    measured = [op for op, contract in ops.CATALOGUE.items() if contract.family in SHAPES]
    for op in () if args.host_only else args.op or measured:
        shapes = SHAPES[ops.CATALOGUE[op].family] + (WIDE if args.wide else ())
        if args.shape:
            shapes = tuple(tuple(int(n) for n in text.split("x")) for text in args.shape)
        for shape in shapes:
            row = measure(op, shape, dtype, args)
            report["rows"].append(row)
            shown = ", ".join(f"{k} {v['gbps']:.0f}" for k, v in row["results"].items())
            print(f"{op} {shape}: {shown} {row['absent'] or ''}", flush=True)
    if args.host or args.host_only:
        report["host_us"] = host_times(args.impl)
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1))
    if args.plot:
        plot(report, args.plot)
    table = markdown(report)
    if args.markdown:
        Path(args.markdown).write_text(table)
    print(table)


if __name__ == "__main__":
    main()
