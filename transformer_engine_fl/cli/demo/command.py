"""``te-fl demo``: trains a small transformer through the dispatcher.

Nothing here imports torch before the command runs. training.py trains the model, sets.py
resolves the names of sets, and report.py shows the results.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from transformer_engine_fl.cli._output import Json, console, print_json
from transformer_engine_fl.core.manager import get_default_manager
from transformer_engine_fl.core.types import BackendImplKind, OpImpl
from transformer_engine_fl.testing.machine import device_types, usable_device

if TYPE_CHECKING:
    import torch

    from transformer_engine_fl.cli.demo.training import Job, Progress

__all__ = ["demo"]

STEPS, COMPARED_STEPS, INTERPRETED_STEPS = 250, 20, 10


def demo(
    steps: Annotated[
        int | None, typer.Option(min=1, help="How many steps to train (250, or 20 for each set).")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="The random seed of parameters and batches.")
    ] = 0,
    device: Annotated[
        str | None, typer.Option(help="The device to train on: cpu, cuda, cuda:1.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="SET,SET",
            help="Train on each set and compare the losses. A set is a kind (reference, flagos, "
            "vendor), a vendor (nvidia), an in-tree vendor's folder (cuda), a plugin or an "
            "impl id.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Train a small transformer through the dispatcher.

    The text is the sources of Python's standard library. Every normalization in the model is
    dispatched, under the policy of the environment: TE_FL_PREFER=vendor:acme te-fl demo. With
    --compare the exit code is 0 if two sets or more ran and their losses agree; a set that
    this machine lacks is named and left out.
    """
    # Waiting threads must not spin: next to other work on the machine each step would stall.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    notes = _interpret_triton(compare) if compare else []
    place = _device(device)
    if compare is None:
        _train(steps, seed, place, json)
    else:
        _compare(compare, steps, seed, place, notes, json)


def _train(steps: int | None, seed: int, device: torch.device, json: bool) -> None:
    from transformer_engine_fl.cli.demo.corpus import load_corpus
    from transformer_engine_fl.cli.demo.report import job_document, run_document, show_run
    from transformer_engine_fl.cli.demo.sets import decide
    from transformer_engine_fl.cli.demo.training import train

    decisions = decide(get_default_manager(), device)
    small = _interpreted(decision.selected for decision in decisions)
    job, notes = _job(steps, STEPS, seed, device, small=small)
    _print_notes(notes)
    corpus = load_corpus()
    with _progress_bar("training", job) as progress:
        run = train(corpus, job, progress)
    if json:
        print_json({**job_document(job), "notes": notes, **run_document(run)})
    else:
        show_run(console(), job, run)


def _compare(
    names: str, steps: int | None, seed: int, device: torch.device, notes: list[str], json: bool
) -> None:
    from transformer_engine_fl.cli.demo.comparison import Outcome, agree, run_set, tolerance
    from transformer_engine_fl.cli.demo.corpus import load_corpus
    from transformer_engine_fl.cli.demo.report import (
        job_document,
        outcome_document,
        show_comparison,
    )
    from transformer_engine_fl.cli.demo.sets import find_sets
    from transformer_engine_fl.cli.demo.training import train

    manager = get_default_manager()
    judged = [(it, *it.judge(manager, device)) for it in find_sets(names, manager)]
    small = _interpreted(impl for _, able, _ in judged for impl in able)
    job, more = _job(steps, COMPARED_STEPS, seed, device, small=small)
    notes = [*notes, *more]
    _print_notes(notes)
    corpus = load_corpus()
    outcomes = []
    for impl_set, able, reason in judged:
        if not able:
            outcomes.append(Outcome(impl_set, lacking=reason))
            continue
        with _progress_bar(impl_set.name, job) as progress:
            outcomes.append(run_set(impl_set, functools.partial(train, corpus, job, progress)))
    agreed = agree(outcomes)
    if json:
        first = next((outcome.run for outcome in outcomes if outcome.run), None)
        sets = [outcome_document(outcome, first) for outcome in outcomes]
        results = {"notes": notes, "tolerance": tolerance(job.steps), "agree": agreed, "sets": sets}
        print_json({**job_document(job), **results})
    else:
        show_comparison(console(), outcomes, agreed=agreed)
    raise typer.Exit(0 if agreed else 1)


# -------------------------------------------------------------------------- the machine


def _interpret_triton(compare: str) -> list[str]:
    """Have Triton interpret its kernels if they are asked for and no GPU can run them.

    Triton decides that when it is imported, so this must run before anything imports it.
    """
    import torch

    wanted = any("flagos" in name.lower() for name in compare.split(","))
    if not wanted or torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ:
        return []
    if "triton" in sys.modules:  # too late; the set itself says what it lacks
        return []
    os.environ["TRITON_INTERPRET"] = "1"
    return ["no GPU here can run Triton's kernels: TRITON_INTERPRET=1 was set for this run"]


def _interpreted(impls: Iterable[OpImpl | None]) -> bool:
    """Whether Triton's interpreter would run, thousands of times slower than a GPU."""
    on = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on")
    return on and any(impl.kind is BackendImplKind.FLAGOS for impl in impls if impl)


def _device(name: str | None) -> torch.device:
    """The device to train on.

    Raises:
        ConfigurationError: this machine has no such device.
    """
    return usable_device(name if name is not None else device_types()[-1], "--device")


def _job(
    steps: int | None, usual: int, seed: int, device: torch.device, *, small: bool
) -> tuple[Job, list[str]]:
    """What to train, and notes on that for the user."""
    from transformer_engine_fl.cli.demo.model import Shape
    from transformer_engine_fl.cli.demo.training import Job

    if not small:
        shape = Shape(layers=4, width=128, heads=4, context=64, batch=16, held_out=64)
        return Job(shape, steps or usual, seed, device), []
    shape = Shape(layers=2, width=64, heads=2, context=32, batch=2, held_out=4)
    job = Job(shape, steps or INTERPRETED_STEPS, seed, device)
    return job, [
        "the flagos set runs in Triton's interpreter, which is slow: a small model, "
        f"{job.steps} steps of {shape.tokens} tokens"
    ]


# ------------------------------------------------------------------------ on the way


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        console(stderr=True).print(f"note: {note}")


@contextmanager
def _progress_bar(label: str, job: Job) -> Iterator[Progress]:
    """A bar on stderr with the loss and the speed."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}", markup=False),
    )
    with Bar(*columns, console=console(stderr=True), expand=True) as bar:
        task = bar.add_task(label, total=job.steps, status="")

        def progress(done: int, loss: float, rate: float | None) -> None:
            status = f"loss {loss:.3f}" + (f"  {rate:,.0f} tokens/s" if rate else "")
            bar.update(task, completed=done, status=status)

        yield progress
