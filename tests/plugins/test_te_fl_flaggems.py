"""plugins/te_fl_flaggems: its own tests pass, and its page says what its code does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[2] / "plugins" / "te_fl_flaggems"


@pytest.mark.slow
def test_its_own_tests_pass() -> None:
    ours = ("TE_FL_", "TEFL_", "TRITON_INTERPRET", "PYTEST_")
    clean = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    paths = [str(PLUGIN / "src"), str(PLUGIN.parents[1]), clean.get("PYTHONPATH", "")]
    options = ("-q", "-p", "no:cacheprovider", "-c", str(PLUGIN / "pyproject.toml"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(PLUGIN / "tests")],
        env=clean | {"PYTHONPATH": os.pathsep.join(paths)},
        cwd=PLUGIN,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert " passed" in done.stdout


def test_its_page_names_each_operator_and_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PLUGIN / "src")
    import te_fl_flaggems

    served, _, left_out = (PLUGIN / "README.md").read_text().partition("## What it does not serve")
    for name in te_fl_flaggems.OPERATORS:
        assert f"`{name}`" in served, name
    reasons = dict(te_fl_flaggems.UNSUPPORTED)
    reasons |= {name: reason for name, (_, reason) in te_fl_flaggems.LIMITED.items()}
    for name, reason in reasons.items():
        (line,) = [it for it in left_out.splitlines() if it.startswith(f"| `{name}`")]
        assert reason in line.replace("`", ""), name
