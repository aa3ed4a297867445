"""The cases of on_python_device.py, in a process that has had no other device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "on_python_device.py"


def test_aten_operators_of_a_device_of_another_make_are_routed() -> None:
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    ours = ("PYTEST_", "TRITON_INTERPRET")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(CASES)],
        env={name: text for name, text in os.environ.items() if not name.startswith(ours)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if " skipped" in done.stdout and " passed" not in done.stdout:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert " passed" in done.stdout
