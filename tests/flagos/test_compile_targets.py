"""Every kernel compiles for every kind of GPU, on a machine that has none.

A file of ``compiled/`` launches a family's kernels in each way that matters to the compiler. It
names the modules of these kernels (``MODULES``), the kernels that read and write each number once,
so by whole vectors (``STREAMING``), and those of them that use ``tl.load`` instead of ``fetch``
(``PLAIN``). It also gives the number of accesses of single numbers (``single``), further checks of
the code for sm_90 (``check``), and the targets of kernels written for some GPUs only (``TARGETS``).

All cases are compiled for sm_90; the other usual targets take turns, each with a third of the cases
and the first of every kernel. ``--every-target`` compiles all for all.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flagos.compile_kernels import ROOT, TARGETS, USUAL, kernels

from transformer_engine_fl.backends.flagos import _launch

HERE = Path(__file__).parent
FAMILIES = sorted(path.stem for path in (HERE / "compiled").glob("*.py"))

# A run with the interpreter would only repeat, in processes without it, what the first run of
# make test does.
pytestmark = pytest.mark.skipif(
    _launch.INTERPRETED,
    reason="needs Triton's compiler (make test has it in its first run)",
)


def test_no_module_of_kernels_is_left_out() -> None:
    compiled = {
        name
        for family in FAMILIES
        for name in importlib.import_module(f"flagos.compiled.{family}").MODULES
    }
    assert compiled == set(kernels())


def cases() -> list[tuple[str, str]]:
    families = {name: importlib.import_module(f"flagos.compiled.{name}") for name in FAMILIES}
    return [
        (name, target)
        for name, family in families.items()
        for target in getattr(family, "TARGETS", USUAL)
    ]


@pytest.mark.parametrize(("family", "target"), cases())
def test_every_kernel_compiles(
    family: str, target: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    every = ["every"] if request.config.getoption("--every-target") else []
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
    }
    found = subprocess.run(
        [sys.executable, str(HERE / "compile_kernels.py"), target, family, *every],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    assert report["never launched"] == [], "a kernel that compiled/ has no launch for"
    shared_limit = TARGETS[target][3]
    for case in report["cases"]:
        assert case["binary"] > 0, case
        assert case["shared"] <= shared_limit, case
        assert not case["unfenced"], case
    if target != "sm_90":
        return
    calls = importlib.import_module(f"flagos.compiled.{family}")
    names = getattr(calls, "STREAMING", set())
    streaming = [
        case
        for case in report["cases"]
        if case["kernel"] in names and case["dtype"] in ("bf16", "i16")
    ]
    assert {case["kernel"] for case in streaming} == names
    for case in streaming:
        assert case["wide loads"] > 0, case
        assert case["wide stores"] > 0, case
        plain = case["kernel"] in getattr(calls, "PLAIN", set())
        assert (case["plain loads"] > 0) == plain, case
        single = calls.single(case) if hasattr(calls, "single") else 0
        assert case["narrow accesses"] <= single, case
    if hasattr(calls, "check"):
        calls.check(report["cases"])
