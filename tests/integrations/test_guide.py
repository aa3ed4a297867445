"""docs/aten.md: its code runs, and its table lists the bridges."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from transformer_engine_fl.integrations.aten.bridges import PARTS, WHOLE

GUIDE = (Path(__file__).parents[2] / "docs" / "aten.md").read_text()


def test_the_code_of_the_guide_runs() -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", GUIDE, re.M | re.S))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-"],
        input=code,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "aten::mm(device=cpu, dtype=float32)" in done.stdout


def test_every_bridge_is_in_the_table() -> None:
    table = {line.split("|")[1] for line in GUIDE.splitlines() if line.startswith("| `")}
    named = set(re.findall(r"`(\w+)`", " ".join(table)))
    assert named == {*PARTS, *WHOLE}
