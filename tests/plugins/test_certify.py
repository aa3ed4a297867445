"""plugins/certify.py: its status is 0 if each package passes or cannot run on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROJECT = """\
[project]
name = "{name}"
[project.entry-points."te_fl.plugin"]
{vendor} = "{name}"
"""

PACKAGE = """\
import os, signal
from transformer_engine_fl import OpImpl

def silu(input):
    {call}

def register(registry):
    {register}
    for name, here in (("silu", lambda: {silu!r}), ("gelu", lambda: "no card")):
        registry.register_impl(
            OpImpl(name, "vendor.{vendor}", "vendor", silu, vendor="{vendor}", devices=["cpu"],
                   supported_dtypes=["float64"], is_available=here)
        )
"""

KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def package(folder: Path, vendor: str, **parts: object) -> None:
    name = f"te_fl_{vendor}"
    module = folder / name / "src" / name / "__init__.py"
    module.parent.mkdir(parents=True)
    given = {"call": "return input", "register": "pass", "silu": True} | parts
    module.write_text(PACKAGE.format(vendor=vendor, **given))
    page = "<!-- scorecard -->\n<!-- end of scorecard -->\n"
    (folder / name / "README.md").write_text(page)
    (folder / name / "pyproject.toml").write_text(PROJECT.format(name=name, vendor=vendor))


@pytest.mark.parametrize(
    ("parts", "status", "said"),
    [
        ({"silu": "no card"}, 0, "te_fl_a: not available: no card"),
        ({}, 1, "vendor.a: "),  # gelu is not available; silu is tested
        ({"call": KILL}, 1, "te_fl_a: killed by signal 9"),
        ({"register": "raise OSError('no licence')"}, 1, "vendor.a is not registered"),
        ({"register": KILL}, 1, "te_fl_a: the availability check failed (status -9)"),
    ],
    ids=["not here", "wrong", "killed", "left out", "killed when it registers"],
)
def test_only_a_package_that_cannot_run_here_is_passed_over(
    parts: dict[str, object], status: int, said: str, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "plugins" / "certify.py", tmp_path)
    package(tmp_path, "a", **parts)
    package(tmp_path, "b", silu="no card")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "certify.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert said in done.stdout + done.stderr
    assert "te_fl_b: not available: no card" in done.stdout
    assert done.returncode == status
