"""Runs each file of tests on a PrivateUse1 device in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["run_cases"]


def run_cases(file: Path) -> None:
    """Run the tests of a file in a fresh process.

    Skips if all of them skip; a failure shows their output.
    """
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    ours = ("PYTEST_", "TRITON_INTERPRET")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(file)],
        env={name: text for name, text in os.environ.items() if not name.startswith(ours)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if " skipped" in done.stdout and " passed" not in done.stdout:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert " passed" in done.stdout
