"""A process under NVIDIA's compute-sanitizer: starting it, and reading its and the tool's output.

The process makes the calls that it is asked for (``sanitized``). Its output has the tool's
lines between the announcements of the calls, so a report belongs to the call announced last.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from transformer_engine_fl.core.errors import ConfigurationError
from transformer_engine_fl.testing.sanitized import ANNOUNCED

__all__ = ["PROGRAM", "TOOLS", "Part", "Process", "ToolReport", "find", "version"]

PROGRAM: Final = "compute-sanitizer"

OPTIONS: Final = (
    *("--target-processes", "application-only"),  # not the compilers that kernels are built with
    *("--launch-timeout", "300"),  # importing torch takes its time
    *("--show-backtrace", "device"),
    *("--print-limit", "0"),  # no limit: a report must be printed to be matched with a call
    *("--destroy-on-device-error", "kernel"),  # the calls after it are still made
)

OTHERS: Final = ("--kernel-name-exclude", "kns=at6native")
"""Excludes torch's own kernels: they prepare the samples, and checking them takes time."""

TOOLS: Final[dict[str, tuple[str, ...]]] = {
    # Torch handles driver calls that fail; a set whose driver call fails raises an error itself.
    "memcheck": ("--report-api-errors", "no", *OTHERS),
    "racecheck": ("--racecheck-report", "analysis", *OTHERS),
    "synccheck": OTHERS,
    # Here all writes must be seen, torch's kernels' too. Copying a sample copies its gaps as well.
    "initcheck": ("--check-api-memory-access", "no"),
}
"""The tools of compute-sanitizer, with the options of each."""

ONE_BY_ONE: Final = ("memcheck", "initcheck")
"""Tools that check allocations: each tensor must have its own, not one from torch's cache."""

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1])\n"
_WORK = _START + "from transformer_engine_fl.testing.sanitized import main; main()"

_LINE = re.compile(r"(?<!=)={9}(?!=) ?(.*)")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_NO_REPORT = re.compile("COMPUTE-SANITIZER|Target application returned|Error: process didn't")
_PLACE = re.compile(
    r"(?:Device Frame: ?|\bat )(?:0x[0-9a-f]+ in )?(?P<kernel>.+?)(?:\+0x[0-9a-f]+.*| in \S+:\d+)?$"
)


def find() -> str:
    """Where compute-sanitizer is.

    Raises:
        ConfigurationError: it is not on the PATH; says where there is one.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise ConfigurationError(
            f"{PROGRAM} is not on the PATH: it is in the folder bin of the CUDA toolkit "
            "(/usr/local/cuda/bin), or in nvidia/cu13/bin of site-packages with the wheel "
            "nvidia-cuda-sanitizer-api"
        )
    return program


def version(program: str) -> str | None:
    """The version that the program states."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"[Vv]ersion (\S+)", said.stdout)
    return found[1] if found else None


@dataclass(frozen=True, slots=True)
class Part:
    """The calls of an operator's dtype on a device; with these names, None for all."""

    device: str
    operator: str
    dtype: str
    names: tuple[str, ...] | None = None


@dataclass(slots=True)
class ToolReport:
    """A report of the tool, its call (None before the first), and how often it came in a row."""

    call: tuple[Part, str] | None
    lines: list[str]
    count: int = 1

    @property
    def kind(self) -> str:
        """Its severity: racecheck has warnings beside errors."""
        return "warning" if self.lines[0].lower().startswith("warning") else "error"

    @property
    def kernel(self) -> str | None:
        """The kernel: the outermost frame on the device, else where the first access was."""
        frames = [line for line in self.lines if line.startswith("Device Frame")]
        races = [line for line in self.lines[:1] if " access at " in line]
        places = [line for line in self.lines[1:] if line.startswith("at ")]
        for line in (*frames[-1:], *races, *places):
            if found := _PLACE.search(line):
                return found["kernel"]
        return None


class Process:
    """A process under the tool.

    Args:
        program, tool: compute-sanitizer, and which of its tools.
        threads: how many CPU threads the process may use.

    Attributes:
        call: the last call that was announced.
        open: whether the outcome of ``call`` is still to come.
        reported: whether the tool has reported anything.
        counted: how many errors the tool counts at its end, None before.
    """

    def __init__(self, program: str, tool: str, threads: int) -> None:
        cache = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool in ONE_BY_ONE else {}
        self._process = subprocess.Popen(
            [
                *(program, "--tool", tool, *OPTIONS, *TOOLS[tool]),
                *(sys.executable, "-c", _WORK, json.dumps(sys.path)),
            ],
            env={"OMP_NUM_THREADS": str(threads), **os.environ, **cache},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that kill() ends its children too
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._last: collections.deque[str] = collections.deque(maxlen=4)
        self._is_report = False
        self.call: tuple[Part, str] | None = None
        self.open = False
        self.reported = False
        self.counted: int | None = None
        self._reports: list[ToolReport] = []

    def make_calls(self, part: Part, **order: Any) -> Iterator[dict[str, Any]]:
        """Have it make calls; yields its announcements, until it is done or ends."""
        with contextlib.suppress(BrokenPipeError):
            self._input.write(json.dumps(dataclasses.asdict(part) | order) + "\n")
            self._input.flush()
        for line in self._lines():
            event = json.loads(line)
            self.open = "call" in event
            if self.open:
                self.call = (part, event["call"])
            yield event
            if "done" in event:
                return

    def finish(self) -> None:
        """Let it end by itself."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        for _ in self._lines():
            pass

    def kill(self) -> None:
        """Kill it and its children."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it if it has not ended, and release its resources."""
        self.kill()
        self._process.wait()
        for stream in (self._input, self._output):
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def take_reports(self) -> list[ToolReport]:
        """The reports since the last call of this."""
        self._merge()
        taken, self._reports, self._is_report = self._reports, [], False
        return taken

    def output_tail(self) -> str:
        """The last lines of its output; of the tool's lines only the first of each report."""
        return " | ".join(self._last) or "no output"

    def _lines(self) -> Iterator[str]:
        """The process's announcements; keeps the tool's lines in between."""
        for line in self._output:
            if line.startswith(ANNOUNCED):
                yield line.removeprefix(ANNOUNCED)
                continue
            found = _LINE.search(line.rstrip())
            if found:
                self._take(found[1])
            elif line.strip():
                self._last.append(line.strip())

    def _take(self, line: str) -> None:
        """Keep a line of the tool; the first line of a report is not indented."""
        if line.startswith(" ") or not line:
            if line.strip() and self._is_report:
                self._reports[-1].lines.append(line.strip())
            return
        summary = _SUMMARY.match(line)
        self._is_report = not summary and not _NO_REPORT.match(line)
        if summary and self.counted is None:  # a second summary counts those not printed
            self.counted = int(summary[1])
        if self._is_report:
            self._merge()
            self._reports.append(ToolReport(self.call, [line]))
            self._last.append(line)
            self.reported = True

    def _merge(self) -> None:
        """Merge the last two reports if they are the same for two threads."""
        if len(self._reports) > 1:
            one, other = self._reports[-2:]
            if one.call == other.call and one.lines[:2] == other.lines[:2]:
                one.count += other.count
                self._reports.pop()
