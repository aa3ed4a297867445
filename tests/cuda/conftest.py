"""Fixtures for the tests of the CUDA C++ set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cuda_emulation
import pytest

from transformer_engine_fl.backends import _repeats
from transformer_engine_fl.backends.vendor.cuda import _compile, _launch
from transformer_engine_fl.testing import Guarded


@pytest.fixture
def compiler() -> None:
    """Skip if kernels cannot be compiled; no device is needed."""
    reason = _compile.missing_compiler()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of compiled kernels for one test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return _compile.CACHE.folder


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if anything is compiled, loaded or launched."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail("a kernel was asked for")

    monkeypatch.setattr(_launch, "load", refuse)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Allocated memory holds NaN, so that elements which are never written are found."""
    with Guarded() as memory:
        yield
    assert memory.broken() is None


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the kernels run: on the CPU, emulated, and on a GPU if there is one."""
    if request.param == "gpu":
        yield "cuda"
        return
    reason = cuda_emulation.missing()
    if reason:
        pytest.skip(reason)
    with cuda_emulation.running():
        yield "cpu"


@pytest.fixture(autouse=True)
def no_known_calls() -> Iterator[None]:
    """Forget repeated calls, which would hide a test's changes to plans."""
    _repeats.forget()
    yield
    _repeats.forget()
