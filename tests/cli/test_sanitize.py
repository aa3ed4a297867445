"""te-fl verify --sanitize, with a stub of compute-sanitizer.

The stub runs the command that it is given, and prints the text of SAYS_FIRST and SAYS_LAST. The
operators print the errors that compute-sanitizer would report, in its format.
"""

from __future__ import annotations

import shlex
import sys
import threading
import time
from pathlib import Path

import pytest

from transformer_engine_fl import ops
from transformer_engine_fl.testing import sanitizing
from transformer_engine_fl.testing.sanitizer import ToolReport

TOOL = f"""\
#!/bin/sh
[ "$1" = --version ] && echo 'Version 2025.1.0.0 (build 1)' && exit
echo "$@" > '{{folder}}/arguments'
echo "$PYTORCH_NO_CUDA_MEMORY_CACHING" > '{{folder}}/uncached'
echo '========= COMPUTE-SANITIZER'
[ -n "$SAYS_FIRST" ] && echo "$SAYS_FIRST"
[ -n "$STARTS_NOTHING" ] && exit 1
while [ "$1" != '{sys.executable}' ]; do shift; done
"$@"
[ -z "$SAYS_LAST" ] || echo "$SAYS_LAST"
"""

ACME = """\
import os
import sys
import time

import torch

from transformer_engine_fl import NotSupportedError, OpImpl, ops
from transformer_engine_fl.backends.reference import activation

FOLDER = {folder!r}


def says(text):
    print(text, flush=True)


def silu(input):
    ops.silu.check(input)
    strided = not input.is_contiguous()
    {body}
    return activation.silu(input)


def register(registry):
    registry.register_impl(OpImpl("silu", "vendor.acme", "vendor", silu, vendor="acme"))
"""

SUMMARY = "========= ERROR SUMMARY: {} errors"

OUTSIDE = """\
========= Invalid __global__ read of size 2 bytes
=========     at load(const __half *, int)+0x490 in memory.cuh:12
=========     by thread ({thread},0,0) in block (0,0,0)
=========     Access at 0x7f71b9e01360 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f71b9e00a00 of size 2,400 bytes
=========         Device Frame: row(const __half *, int)+0x10 in rows.cuh:8
=========         Device Frame: silu_kernel(const __half *, __half *, int)+0x70 in silu.cu:30
=========
"""

RACE = """\
========= {severity}: Race reported between Write access at silu_kernel(int)+0x550 in silu.cu:100
=========     and Read access at silu_kernel(int)+0x580 in silu.cu:107 [65536 hazards]
=========
"""


@pytest.fixture
def acme(install, tmp_path, monkeypatch):
    """Installs vendor Acme, whose silu runs ``body`` first, and puts the stub on the path."""
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(TOOL.format(folder=tmp_path))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setenv("SAYS_LAST", SUMMARY.format(0))

    def installed(body: str = "pass") -> Path:
        install(ACME.format(folder=str(tmp_path), body=body))
        return tmp_path

    return installed


@pytest.fixture
def sanitize(te_fl):
    """Runs the command for silu in float16 on the CPU."""

    def run(*options: str, tool: str = "memcheck", **variables: str):
        asked = ("vendor.acme", "--dtype", "float16", "--device", "cpu", "--sanitize", tool)
        return te_fl("verify", *asked, *options, **variables)

    return run


def names(strided: bool | None = None) -> list[str]:
    """The names of the calls: all, or those whose input is or is not strided (non-contiguous)."""
    return [
        f"silu/vendor.acme/float16/values/{sample.label}"
        for sample in ops.silu.samples("float16", "cpu")
        if strided is None or strided != sample.args[0].is_contiguous()
    ]


def test_a_clean_run_states_the_number_of_calls(acme, sanitize):
    folder = acme()
    ran = sanitize(COLUMNS="80")
    assert ran.code == 0, ran.err
    count = len(names())
    assert ran.out.splitlines()[1].split() == ["silu", "cpu", str(count), "0", "0", "0", "0"]
    last = f"vendor.acme under memcheck: nothing found in {count} calls; operators: 1"
    assert ran.out.splitlines()[-1] == last
    arguments = (folder / "arguments").read_text()
    assert arguments.startswith("--tool memcheck ")
    assert "--kernel-name-exclude kns=at6native" in arguments
    assert (folder / "uncached").read_text() == "1\n"
    assert not list(Path().glob("scorecard*"))


def test_memory_is_poisoned_and_ends_where_tensors_do(acme, sanitize):
    acme(
        "end = input.storage_offset() + sum((n - 1) * s for n, s in zip(input.shape, "
        "input.stride())) + 1 if input.numel() else input.storage_offset()\n"
        "    assert input.untyped_storage().nbytes() == 2 * end\n"
        "    assert torch.empty_like(input).isnan().all()\n"
        "    output = torch.empty(9, dtype=torch.uint8)\n"
        "    assert (output == 0xA5).all()\n"
        "    assert output.untyped_storage().nbytes() == 9"
    )
    ran = sanitize("--json")
    assert ran.document["findings"] == []
    assert ran.document["rows"][0]["calls"] == len(names())


def test_what_is_uninitialised_is_left_so_for_the_tool_that_looks_for_it(acme, sanitize):
    acme("assert torch._C._len_torch_function_stack() == 0")
    assert sanitize("--every", "100", tool="initcheck").code == 0


def test_a_report_is_shown_with_its_kernel_and_the_calls_that_caused_it(acme, sanitize):
    both = OUTSIDE.format(thread=1) + OUTSIDE.format(thread=2)
    acme(f"strided and says({both!r})")
    ran = sanitize("--json", SAYS_LAST=SUMMARY.format(2))
    assert ran.code == 1
    (finding,) = ran.document["findings"]
    assert finding["kind"] == "error"
    assert finding["kernel"] == "silu_kernel(const __half *, __half *, int)"
    assert finding["said"][0] == "Invalid __global__ read of size 2 bytes"
    assert finding["said"][3] == "Access at 0x7f71b9e01360 is out of bounds"
    assert finding["cases"] == names(strided=True)
    assert finding["reports"] == 2 * len(names(strided=True))
    (row,) = ran.document["rows"]
    assert (row["errors"], row["calls"]) == (len(names(strided=True)), len(names()))

    shown = sanitize(SAYS_LAST=SUMMARY.format(2))
    assert "error: silu on cpu, kernel silu_kernel(const __half *, __half *, int)\n" in shown.out
    assert f"  to reproduce: {finding['reproduce']}\n" in shown.out
    command = shlex.split(finding["reproduce"])
    assert command[:5] == ["te-fl", "verify", "vendor.acme", "--sanitize", "memcheck"]
    assert command[-2:] == ["--case", names(strided=True)[0]]


def test_one_call_can_be_made_alone(acme, sanitize):
    acme(f"says({OUTSIDE!r})")
    name = names(strided=True)[0]
    ran = sanitize("--case", name, "--json")
    assert [it["cases"] for it in ran.document["findings"]] == [[name]]
    assert ran.document["rows"][0]["calls"] == 1


@pytest.mark.parametrize(
    ("severity", "code", "said"), [("Warning", 0, "warnings"), ("Error", 1, "errors")]
)
def test_warnings_are_told_apart_from_errors(acme, sanitize, severity, code, said):
    folder = acme(f"strided and says({RACE.format(severity=severity)!r})")
    ran = sanitize(tool="racecheck", SAYS_LAST="========= RACECHECK SUMMARY: 1 hazard displayed")
    assert ran.code == code
    assert f"{severity.lower()}: silu on cpu, kernel silu_kernel(int)\n" in ran.out
    count = len(names(strided=True))
    assert ran.out.splitlines()[-1].startswith(
        f"vendor.acme under racecheck: {count} calls with {said} in {len(names())} calls"
    )
    assert "--racecheck-report analysis" in (folder / "arguments").read_text()
    assert (folder / "uncached").read_text() == "\n"


def test_a_call_that_raises_or_declines_is_counted(acme, sanitize):
    acme(
        'if strided:\n        raise RuntimeError("launch failed")\n'
        "    if input.ndim == 1:\n        raise NotSupportedError('rows')"
    )
    document = sanitize("--json").document
    (finding,) = document["findings"]
    assert (finding["kind"], finding["said"]) == ("failed", ["RuntimeError: launch failed"])
    flat = [it for it in ops.silu.samples("float16", "cpu") if it.args[0].ndim == 1]
    declined = sum(it.args[0].is_contiguous() for it in flat)
    (row,) = document["rows"]
    assert (row["failed"], row["declined"]) == (len(names(strided=True)), declined)
    assert declined
    assert not document["passed"]


def test_a_call_that_ends_the_process_is_named_and_the_others_are_made(acme, sanitize):
    acme("strided and (says('an abyss'), os._exit(3))")
    last = "========= Error: process didn't terminate successfully\n=========     The application"
    document = sanitize("--json", SAYS_LAST=last).document
    assert document["rows"][0]["calls"] == len(names())
    (finding,) = document["findings"]
    assert finding["cases"] == names(strided=True)
    assert finding["said"][0].startswith("ended the process: ")
    assert finding["said"][0].endswith("an abyss")


def test_a_run_that_reaches_its_time_limit_reports_its_findings(acme, monkeypatch, sanitize):
    folder = acme(
        f"strided or says({OUTSIDE!r})\n"
        "    if strided:\n"
        "        open(FOLDER + '/begun', 'w').close()\n"
        "        time.sleep(600)"
    )

    class WhenItHasBegun(threading.Timer):
        def run(self):
            while not (folder / "begun").exists():
                time.sleep(0.01)
            self.function()

    monkeypatch.setattr(sanitizing.threading, "Timer", WhenItHasBegun)
    ran = sanitize("--stop-after", "600", "--json")
    document = ran.document
    assert ran.code == 1
    assert document["under_way"] == names(strided=True)[:1]
    assert document["unfinished"] == ["silu/float16"]
    made = names().index(names(strided=True)[0])
    assert document["rows"][0]["calls"] == document["rows"][0]["errors"] == made > 0
    monkeypatch.undo()


def test_a_time_limit_of_zero_checks_nothing_and_fails(acme, sanitize):
    acme()
    ran = sanitize("--stop-after", "0", COLUMNS="200")
    assert ran.code == 1
    assert "not finished: silu/float16" in ran.out
    last = "nothing was checked in 0 calls; operators: 0; 1 operator dtypes not finished"
    assert ran.out.splitlines()[-1].endswith(last)


def test_several_processes_make_each_call_once(acme, te_fl):
    acme("says('')")
    asked = ("vendor.acme", "--device", "cpu", "--sanitize", "synccheck", "--json")
    rows = te_fl("verify", *asked, "--jobs", "2", "--every", "3").document["rows"]
    counts = {row["dtype"]: row["calls"] for row in rows}
    assert counts == {
        dtype: -(-len(list(ops.silu.samples(dtype, "cpu"))) // 3) for dtype in ops.silu.dtypes
    }


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SAYS_LAST": SUMMARY.format(3)}, "counted 3 errors, but reported none"),
        ({"SAYS_LAST": ""}, "did not report its error count"),
        ({"SAYS_FIRST": "========= Internal Sanitizer Error: no"}, "Internal Sanitizer Error: no"),
    ],
)
def test_tool_output_that_belongs_to_no_call_fails_the_run(acme, sanitize, variables, said):
    acme()
    ran = sanitize("--every", "100", **variables)
    assert ran.code == 1
    assert said in ran.out


def test_a_process_that_does_not_start_is_one_message(acme, sanitize):
    acme()
    ran = sanitize(STARTS_NOTHING="1", SAYS_FIRST="no such option")
    assert ran.code == 1
    assert "ended before its first call: no such option\n" in ran.err


def test_where_the_tool_is_not_it_says_where_it_would_be(acme, sanitize, tmp_path):
    acme()
    ran = sanitize(PATH=str(tmp_path))
    assert ran.code == 2
    assert ran.err.startswith("te-fl: compute-sanitizer is not on the PATH: it is in")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--sanitize", "memchek"), "unknown tool 'memchek'; valid: memcheck, racecheck"),
        (("--sanitize", "memcheck", "--output", "x"), "--sanitize writes no scorecard"),
        (("--stop-after", "5"), "--stop-after needs --sanitize"),
        (("--sanitize", "memcheck", "--case", "*/refuses/*"), "names no call to sanitize"),
    ],
)
def test_mistake_is_one_message(acme, te_fl, options, said):
    acme()
    ran = te_fl("verify", "vendor.acme", "--device", "cpu", "--quiet", *options)
    assert ran.code == 2
    assert said in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("lines", "kernel"),
    [
        (["Invalid __shared__ write of size 4 bytes", "at k(int *)+0x50"], "k(int *)"),
        (
            ["Invalid __global__ read of size 8 bytes", "at 0x3b0 in void k<int>(int *)"],
            "void k<int>(int *)",
        ),
        (["Barrier error detected. Divergent thread(s) in block.", "at k+0x15520 in k.py:3"], "k"),
        (
            [
                "Barrier error detected. Invalid arguments.",
                "at __syncwarp(unsigned int)+0xe0 in sm_30_intrinsics.hpp:110",
                "Device Frame: k(float *, unsigned long)+0xb0 in kernel.cu:12",
            ],
            "k(float *, unsigned long)",
        ),
        (["Internal Sanitizer Error: it does not track a launch"], None),
    ],
)
def test_the_kernel_is_the_outermost_frame(lines, kernel):
    assert ToolReport(None, lines).kernel == kernel
