"""The benchmark of the heart runs and writes what it promises; its figures are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "dispatch_overhead.py"


def test_a_quick_run_writes_figures_and_a_plot(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "dispatch_overhead.json").read_text(encoding="utf-8"))
    cases = results["cases"]
    assert cases["direct call"]["added_us"] == 0.0
    # Wide enough for any machine: a dispatch costs something, and far less than custom_op.
    assert 0.0 < cases["manager.call"]["added_us"] < cases["torch.library.custom_op"]["added_us"]
    assert set(results["budgets"]) >= {"manager.call", "bound handle", "plan"}
    assert results["environment"].keys() >= {"device", "cpu", "python", "torch"}
    assert (tmp_path / "dispatch_overhead.png").read_bytes().startswith(b"\x89PNG")
    assert "manager.call" in done.stdout
