"""plugins/te_fl_transformer_engine installed by pip into a folder of its own: its own tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[2] / "plugins" / "te_fl_transformer_engine"


def _run(*args: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    ours = ("TE_FL_", "TEFL_", "PYTEST_", "PIP_", "COV_", "TRITON_INTERPRET")
    env = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(path), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *args], env=env, cwd=PLUGIN, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is installed."""
    target = tmp_path_factory.mktemp("te_fl_transformer_engine")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    _run("-m", "pip", "install", "-q", *options, "--target", str(target), str(PLUGIN))
    return target


@pytest.mark.slow
def test_its_own_tests_pass_where_it_is_installed(folder: Path) -> None:
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", "pyproject.toml")
    done = _run("-m", "pytest", *options, "tests", path=folder)
    assert " passed" in done.stdout


def test_installed_where_there_is_no_transformer_engine_it_says_so_and_harms_nobody(
    folder: Path,
) -> None:
    code = (
        "from transformer_engine_fl import get_default_manager as manager, ops\n"
        "import sys, torch\n"
        "ops.gelu(torch.ones(2))\n"
        "print(manager().explain('gelu'))\n"
        "assert 'transformer_engine' not in sys.modules\n"
    )
    said = _run("-c", code, path=folder).stdout
    assert "vendor.transformer_engine (vendor:transformer_engine, priority 100)" in said
    assert "not available: Transformer Engine is not installed" in said
