"""What the set needs for Triton's interpreter, reported before anything of Triton is loaded."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

from transformer_engine_fl.backends import flagos


@pytest.mark.parametrize(
    ("numpy", "triton", "said"),
    [
        ("2.4.6", "3.7.1", None),
        ("2.3.5", "3.6.0", None),
        ("2.4.6", "3.6.0", "needs NumPy before 2.4: pip install 'numpy<2.4'"),
        ("2.4.0rc1", "3.6.0+git12", "needs NumPy before 2.4"),
        ("2.4.6", None, None),  # Triton under another name
        (None, "3.7.1", "needs NumPy: pip install numpy"),
    ],
)
def test_the_interpreter_is_not_there_without_what_it_needs(
    numpy: str | None, triton: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"numpy": numpy, "triton": triton}

    def version(name: str) -> str:
        found = installed[name]
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = flagos.is_available()
    assert found is True if said is None else isinstance(found, str) and said in found


def test_kernels_that_are_not_interpreted_need_no_numpy() -> None:
    program = (
        "import sys\n"
        "sys.modules['numpy'] = None\n"
        "from transformer_engine_fl.backends.flagos.tuning import files\n"
        "files.load_families()\n"
    )
    environ = {name: it for name, it in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    subprocess.run(command, env=environ, check=True, timeout=120)
