"""The examples run as a user runs them, and print what their comments promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def _lines(example: str, **variables: str) -> list[str]:
    """The lines that an example prints, started from a folder other than its own."""
    ours = ("TE_FL_", "TEFL_", "TRITON_INTERPRET")
    clean = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / example)],
        env=clean | {"CUDA_VISIBLE_DEVICES": ""} | variables,
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_the_in_tree_example_is_served_by_its_backend_until_that_is_denied() -> None:
    lines = _lines("example_intree.py")
    assert lines[0] == "root mean square of the output: 1.000"
    headlines = [line for line in lines if line.startswith("rmsnorm_fwd(")]
    asked = "rmsnorm_fwd(device=cpu, dtype=float32)"
    assert headlines == [
        f"{asked}: 'vendor.mybackend' serves",
        f"{asked}: 'reference.torch' serves",
    ]
    denied = "- vendor.mybackend (vendor:mybackend, priority 200): vendor 'mybackend' is denied"
    assert any(denied in line for line in lines)


def test_the_out_of_tree_example_finds_its_backend_through_the_variable() -> None:
    assert _lines("example_outtree.py", TE_FL_PLUGIN_MODULES="mybackend") == [
        "rmsnorm_fwd was served by vendor.mybackend",
        "rmsnorm_bwd was served by reference.torch",
        "the weight has a gradient: True",
    ]


def test_the_out_of_tree_example_does_without_a_backend_that_is_absent_or_denied() -> None:
    expected = [
        "rmsnorm_fwd was served by reference.torch",
        "rmsnorm_bwd was served by reference.torch",
        "the weight has a gradient: True",
    ]
    assert _lines("example_outtree.py") == expected
    denied = {"TE_FL_PLUGIN_MODULES": "mybackend", "TE_FL_DENY_VENDORS": "mybackend"}
    assert _lines("example_outtree.py", **denied) == expected
