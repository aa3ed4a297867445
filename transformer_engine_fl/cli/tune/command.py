"""The command itself: its options, the progress bar, the table, the file."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from transformer_engine_fl.backends.flagos.tuning import forget, lookup
from transformer_engine_fl.cli._folders import check_writable
from transformer_engine_fl.cli._output import Json, console, print_json, progress_bar, table
from transformer_engine_fl.cli.tune import checking
from transformer_engine_fl.core.errors import ConfigurationError, TeFlError, suggestion
from transformer_engine_fl.core.manager import get_default_manager

if TYPE_CHECKING:
    import torch

    from transformer_engine_fl.backends.flagos.tuning.calls import Calls, Shape
    from transformer_engine_fl.cli.tune.measuring import Job, Result

__all__ = ["tune"]


def _named(text: str) -> Path:
    if not text:
        raise typer.BadParameter("the path is empty")
    return Path(text)


def tune(
    op: Annotated[
        list[str] | None,
        typer.Option(metavar="OP", help="Only this operator; repeatable (all that have choices)."),
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPES",
            help="The shapes to measure: 8192x4096,4096x8192 (a list of the operator's own).",
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DTYPE", help="The dtype to measure; repeatable (the operator's own)."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            parser=_named,
            help="The file (.yaml) or folder to write (the user's tuning folder).",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Measure nothing; report errors in tuning files.")
    ] = False,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs", "-j", metavar="N", min=1, help="Compile in this many processes beforehand."
        ),
    ] = 1,
    json: Json = False,
) -> None:
    """Measure what Triton kernels can choose, and keep it in a file.

    Every candidate is tested against the operator's contract first. The file grows with each
    call that is measured; earlier results stay in it unless they are measured again.
    --check looks at the file or folder of --output, or at every file that would be read, and
    needs no device.
    """
    get_default_manager().ensure_initialized()  # plugins register vendors' devices and folders
    if check:
        if op or dtype or shapes is not None:
            raise ConfigurationError(
                "--check checks whole files; leave out --op, --shapes and --dtype"
            )
        raise typer.Exit(_check(output, as_json=json))
    wanted, sizes, dtypes = _operators(op or []), _shapes(shapes), dtype or []
    _check_question(wanted, sizes, dtypes)
    device = _device()
    from transformer_engine_fl.cli.tune import measuring

    measuring.load_families()
    path = _path(output, lookup.name_of(device))
    _check_file(path, device, wanted)
    if jobs > 1:
        with progress_bar("compiling") as progress:
            measuring.compile_all(wanted, sizes, dtypes, device, jobs, progress)
    results = _measure(measuring.jobs(wanted, sizes, dtypes), device, path)
    if json:
        document = [it.to_dict() for it in results]
        print_json({"file": str(path) if _any_written(results) else None, "results": document})
    else:
        _show(results)
    for line in measuring.named(results):
        console(stderr=True).print(line, soft_wrap=True)
    _print_written(results, path)
    raise typer.Exit(0 if all(it.value for it in results) else 1)


# ------------------------------------------------------------------------ the question


def _device() -> torch.device:
    """The current CUDA device.

    Raises:
        TeFlError: there is none, or kernels are interpreted on the CPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise TeFlError("tuning needs a GPU, and torch sees none on this machine")
    from transformer_engine_fl.backends.flagos import _launch

    if _launch.INTERPRETED:
        raise TeFlError(
            "tuning needs a GPU; TRITON_INTERPRET is set and runs kernels on the CPU; unset it"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _operators(names: Sequence[str]) -> list[Calls]:
    from transformer_engine_fl.backends.flagos.tuning.calls import CALLS

    known = dict.fromkeys(it.op for it in CALLS)
    for name in names:
        if name not in known:
            raise ConfigurationError(
                f"--op: {name!r} has nothing to tune; valid: {', '.join(known)}"
                f"{suggestion(name, known)}"
            )
    return [it for it in CALLS if it.op in (names or known)]


def _shapes(text: str | None) -> list[Shape]:
    shapes = []
    for part in (text or "").split(",") if text is not None else ():
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", part.strip()):
            raise ConfigurationError(
                f"--shapes: {part!r} is not a shape; example: 8192x4096,4096x8192"
            )
        shapes.append(tuple(int(number) for number in part.split("x")))
    return shapes


def _check_question(
    wanted: Sequence[Calls], shapes: Sequence[Shape], dtypes: Sequence[str]
) -> None:
    from transformer_engine_fl.ops import CATALOGUE

    for calls in wanted:
        for shape in shapes:
            if len(shape) != len(calls.shapes[0]):
                more = "; select operators with --op" if len(wanted) > 1 else ""
                raise ConfigurationError(
                    f"--shapes: {'x'.join(map(str, shape))} does not fit {calls.op}, "
                    f"which needs {calls.axes}{more}"
                )
        for name in dtypes:
            known = CATALOGUE[calls.op].dtypes
            if name not in known:
                raise ConfigurationError(
                    f"--dtype: {calls.op} does not support {name!r}; "
                    f"supported: {', '.join(known)}{suggestion(name, known)}"
                )


def _path(output: Path | None, name: str) -> Path:
    """The file to be written."""
    if output is not None and output.suffix in lookup.SUFFIXES:
        return output
    vendor = lookup.vendor_of(name)
    if vendor is None:
        raise ConfigurationError(
            f"no vendor has registered the device {name!r}, so the file has no folder; "
            "name a file with --output FILE.yaml"
        )
    return (lookup.user_folder() if output is None else output) / vendor.name / f"{name}.yaml"


def _check_file(path: Path, device: torch.device, wanted: Sequence[Calls]) -> None:
    """Check that results can be merged into the file, before measuring and not after it."""
    from transformer_engine_fl.backends.flagos.tuning import CHOICES, files

    try:
        content = files.present(path, lookup.name_of(device))
        check_writable(Path(os.path.realpath(path)).parent)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error}") from None
    for name in {name: None for calls in wanted for name in calls.choices}:
        try:
            files.values(content, CHOICES[name], path)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{error}; measurements of {name!r} in this file would be ignored: fix or "
                "remove that entry, or name another file with --output"
            ) from None


# --------------------------------------------------------------------------- measuring


def _measure(jobs: Sequence[Job], device: torch.device, path: Path) -> list[Result]:
    """Measure the jobs in turn, and write each result at once: a later job may fail."""
    import torch

    from transformer_engine_fl.cli.tune import measuring

    results: list[Result] = []
    try:
        with progress_bar("tuning") as progress:
            for done, job in enumerate(jobs):
                update = partial(progress, done, len(jobs))
                result = measuring.measure(job, device, measuring.median_ms, update)
                _write(path, result, device)
                results.append(result)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            progress(len(jobs), len(jobs), "")
    except BaseException:  # an interrupt, too
        _print_written(results, path)
        raise
    forget()
    return results


def _any_written(results: Sequence[Result]) -> bool:
    return any(it.value for it in results)


def _print_written(results: Sequence[Result], path: Path) -> None:
    if _any_written(results):
        console(stderr=True).print(f"written: {path}", soft_wrap=True)


def _write(path: Path, result: Result, device: torch.device) -> None:
    """Write a result, if there is a candidate that keeps the contract."""
    from transformer_engine_fl.backends.flagos.tuning import files

    if result.value is not None:
        entry = files.Entry(
            key=result.key,
            value=result.value,
            ms=_rounded(result.ms),
            heuristic_ms=_rounded(result.heuristic_ms),
            call=str(result.job),
            measured_on=_machine(device),
        )
        choices = {result.job.choice.name: [entry]}
        files.write(path, files.TuningFile(device=lookup.name_of(device), choices=choices))


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else float(f"{ms:.4g}")


def _machine(device: torch.device) -> str:
    import torch

    from transformer_engine_fl.testing.machine import versions

    known = versions(("torch", "triton"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return ", ".join([name, *(f"{it} {known[it]}" for it in ("torch", "triton"))])


def _show(results: Sequence[Result]) -> None:
    from transformer_engine_fl.cli.tune.measuring import shown

    headings = ("choice", "call", "chosen", "ms", "by rule", "ms by rule")
    rows: list[tuple[str | Text, ...]] = []
    for it in results:
        job, other = it.job, it.value is not None and it.value != it.heuristic
        chosen = Text(shown(it.value) if it.value else "none passed", "" if it.value else "red")
        faster = Text(_figure(it.ms), "green" if other else "")
        called = f"{'x'.join(map(str, job.shape))} {job.dtype}"
        rule = (shown(it.heuristic), _figure(it.heuristic_ms))
        rows.append((job.choice.name, called, chosen, faster, *rule))
    console().print(
        table(headings, rows, numbers=("ms", "ms by rule"), wrapped=("chosen", "by rule"))
    )


def _figure(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.4g}"


# ---------------------------------------------------------------------------- checking


def _check(output: Path | None, *, as_json: bool) -> int:
    """Print what is wrong in files; returns the exit code."""
    found, others = checking.examined(output)
    problems = [it for file in found for it in file.problems] + others
    good = {str(file.path): file.entries for file in found if not file.problems}
    if as_json:
        print_json({"good": good, "problems": problems})
        return 1 if problems else 0
    out = console()
    for path, entries in good.items():
        out.print(f"good: {path}, entries: {entries}", soft_wrap=True)
    for problem in problems:
        line = Text("broken: ", "bold red").append(problem, "not bold default")
        out.print(line, soft_wrap=True)
    if not found:
        out.print("no tuning file found: every choice is made by rule")
    return 1 if problems else 0
