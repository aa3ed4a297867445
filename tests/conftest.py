"""What every test starts from: a clean policy, a clean environment, no leftovers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from triton_interpreter import replace_once_per_launch


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-target",
        action="store_true",
        help="compile every case of every kernel for every GPU, and not for one or two of them",
    )


def pytest_configure(config: pytest.Config) -> None:
    import torch

    torch.set_num_threads(1)  # the suite runs in several processes
    if os.environ.get("TRITON_INTERPRET") == "1":
        replace_once_per_launch()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _has_gpu():
        return
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clear the project's variables, the global policy, the default manager and the record of
    warnings that are issued once per process.
    """
    from transformer_engine_fl import reset_default_manager, reset_global_policy
    from transformer_engine_fl.core import registry

    registry._WARNED.clear()
    for name in list(os.environ):
        if name.startswith(("TE_FL_", "TEFL_")):
            monkeypatch.delenv(name)
    reset_global_policy()
    reset_default_manager()
    yield
    monkeypatch.undo()
    reset_global_policy()
    reset_default_manager()


@pytest.fixture
def with_bytecode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that the test starts use cached bytecode, as an installed package does.

    The first process writes it, even if PYTHONDONTWRITEBYTECODE is set in the environment.
    """
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "bytecode"))
