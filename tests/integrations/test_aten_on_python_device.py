"""Runs the tests of on_python_device.py in a fresh process."""

from __future__ import annotations

from pathlib import Path

from device_process import run_cases


def test_aten_operators_of_a_device_of_another_make_are_routed() -> None:
    run_cases(Path(__file__).parent / "on_python_device.py")
