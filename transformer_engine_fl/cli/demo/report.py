"""The demo's results: as plain JSON values, and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from transformer_engine_fl.cli._output import table
from transformer_engine_fl.cli.demo.comparison import Outcome, differences, tolerance
from transformer_engine_fl.cli.demo.training import Job, Run

__all__ = ["job_document", "outcome_document", "run_document", "show_comparison", "show_run"]

_MOST_STEPS = 20
"""How many steps a comparison shows as text at most; JSON has them all."""


def job_document(job: Job) -> dict[str, Any]:
    """What was trained."""
    return {
        "steps": job.steps,
        "seed": job.seed,
        "device": str(job.device),
        "dtype": "float32",
        "tokens_per_step": job.shape.tokens,
    }


def run_document(run: Run) -> dict[str, Any]:
    """The results of a training."""
    return {
        "parameters": run.parameters,
        "loss_before": run.loss_before,
        "loss_after": run.loss_after,
        "losses": list(run.losses),
        "seconds": run.seconds,
        "tokens_per_second": run.tokens_per_second,
        "served": [
            {
                "op": it.op,
                "impl_id": it.impl.impl_id,
                "kind": it.impl.kind.value,
                "vendor": it.impl.vendor,
                "calls": it.calls,
            }
            for it in run.served
        ],
    }


def outcome_document(outcome: Outcome, first: Run | None) -> dict[str, Any]:
    """The result for one set; its losses are compared with those of ``first``."""
    return {
        "name": outcome.impl_set.name,
        "selector": str(outcome.impl_set.selector),
        "status": outcome.status,
        "reason": outcome.lacking or outcome.failed,
        "served_by_others": outcome.others,
        "difference": max(differences(outcome.run, first)) if outcome.run and first else None,
        "run": run_document(outcome.run) if outcome.run else None,
    }


def show_run(out: Console, job: Job, run: Run) -> None:
    """Show one training, and the implementations that served it."""
    size = f"{run.parameters / 1e6:.2f}M parameters, {job.steps} steps of {job.shape.tokens} tokens"
    out.print(f"{size} on {job.device} in {run.seconds:.1f} s")
    out.print(f"loss on held-out text: {run.loss_before:.3f} before, {run.loss_after:.3f} after")
    if run.tokens_per_second:
        out.print(f"{run.tokens_per_second:,.0f} tokens per second")
    out.print()
    rows = [
        (it.op, it.impl.impl_id, it.impl.kind.value, it.impl.vendor or "", f"{it.calls:,}")
        for it in run.served
    ]
    headings = ("operator", "served by", "kind", "vendor", "calls")
    out.print(table(headings, rows, numbers=("calls",)))


def show_comparison(out: Console, outcomes: Sequence[Outcome], *, agreed: bool) -> None:
    """Show several trainings side by side."""
    runs = {outcome.impl_set.name: outcome.run for outcome in outcomes if outcome.run}
    if runs:
        _show_losses(out, runs)
        _show_sets(out, outcomes)
    for outcome in outcomes:
        name = outcome.impl_set.name
        if outcome.lacking:
            out.print(f"this machine lacks {name}: {outcome.lacking}")
        elif outcome.failed:
            out.print(f"{name} failed: {outcome.failed}", style="red")
        elif outcome.others:
            others = ", ".join(f"{op} ({impl_id})" for op, impl_id in outcome.others.items())
            out.print(f"{name} lacks operators that others served: {others}")
    steps = max((len(run.losses) for run in runs.values()), default=0)
    within = f"within a relative difference of {tolerance(steps):.1g} (in float32)"
    if agreed:
        out.print(f"the losses agree {within}", style="green")
    elif len(runs) < 2:
        out.print("nothing to compare: fewer than two of these sets ran", style="red")
    elif not any(outcome.failed for outcome in outcomes):
        out.print(f"the losses do not agree {within}", style="red")


def _show_losses(out: Console, runs: dict[str, Run]) -> None:
    steps = len(next(iter(runs.values())).losses)
    shown = range(0, steps, -(-steps // _MOST_STEPS))
    rows = [
        ("before", *(f"{run.loss_before:.6f}" for run in runs.values())),
        *((str(it + 1), *(f"{run.losses[it]:.6f}" for run in runs.values())) for it in shown),
        ("after", *(f"{run.loss_after:.6f}" for run in runs.values())),
    ]
    out.print(table(("step", *runs), rows, numbers=("step", *runs)))
    out.print("(before and after: on held-out text)")
    out.print()


def _show_sets(out: Console, outcomes: Sequence[Outcome]) -> None:
    first = next(outcome.run for outcome in outcomes if outcome.run)
    rows = []
    for outcome in outcomes:
        cells = ["", "", ""]
        if run := outcome.run:
            calls: Counter[str] = Counter()
            for it in run.served:
                calls[it.impl.impl_id] += it.calls
            cells = [
                f"{run.tokens_per_second:,.0f}" if run.tokens_per_second else "",
                f"{max(differences(run, first)):.1e}" if run is not first else "",
                ", ".join(f"{impl_id} {count:,}" for impl_id, count in calls.items()),
            ]
        rows.append((outcome.impl_set.name, outcome.status, *cells))
    headings = ("set", "", "tokens/s", "difference", "served by (calls)")
    numbers = ("tokens/s", "difference")
    out.print(table(headings, rows, numbers=numbers, wrapped=("served by (calls)",)))
