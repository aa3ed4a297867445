"""Fixtures that run the commands in this process or in another, and install plugins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from transformer_engine_fl import reset_default_manager, reset_global_policy

PROGRAM = "from transformer_engine_fl.cli import main; main()"

ACME = """\
from transformer_engine_fl import OpImpl
from transformer_engine_fl.backends.reference import normalization as reference

ERROR = 0.0  # of the input's gradient


def rmsnorm_fwd(input, weight, eps=1e-5, *, zero_centered_gamma=False, out_dtype=None):
    return reference.rmsnorm_fwd(
        input, weight, eps, zero_centered_gamma=zero_centered_gamma, out_dtype=out_dtype
    )


def rmsnorm_bwd(dy, x, rsigma, gamma, *, zero_centered_gamma=False):
    dx, dgamma = reference.rmsnorm_bwd(
        dy, x, rsigma, gamma, zero_centered_gamma=zero_centered_gamma
    )
    return dx * (1 + ERROR), dgamma


def register(registry):
    for fn in (rmsnorm_fwd, rmsnorm_bwd):
        registry.register_impl(
            OpImpl(
                op_name=fn.__name__, impl_id="vendor.acme", kind="vendor", vendor="Acme", fn=fn
            )
        )
"""


@dataclass(frozen=True)
class Ran:
    """A command's exit status and output."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Ran]


@pytest.fixture
def te_fl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process; keywords are environment variables."""
    from transformer_engine_fl.cli import main

    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # else the demo sets it for good

    def run(*arguments: str, **variables: str) -> Ran:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            reset_global_policy()
            reset_default_manager()
            capsys.readouterr()
            with pytest.raises(SystemExit) as ended:
                main(arguments)
        said = capsys.readouterr()
        return Ran(int(ended.value.code or 0), said.out, said.err)

    return run


@pytest.fixture
def te_fl_process() -> Command:
    """Runs a command in a separate process; a variable that is None is removed."""

    def run(*arguments: str, program: str = PROGRAM, **variables: str | None) -> Ran:
        merged = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        environ = {name: value for name, value in merged.items() if value is not None}
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Installs a plugin with the given source and the entry point ``acme`` for this test."""

    def installed(source: str) -> Path:
        (tmp_path / "acme_kernels.py").write_text(source)
        metadata = tmp_path / "acme_kernels-1.0.dist-info"
        metadata.mkdir()
        named = "Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.0\n"
        (metadata / "METADATA").write_text(named)
        (metadata / "entry_points.txt").write_text("[te_fl.plugin]\nacme = acme_kernels\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        return tmp_path

    yield installed
    sys.modules.pop("acme_kernels", None)


@pytest.fixture
def acme(install: Callable[[str], Path]) -> Path:
    """A correct plugin, installed: vendor Acme implements RMS norm."""
    return install(ACME)


@pytest.fixture
def wrong_acme(install: Callable[[str], Path]) -> Path:
    """The same plugin with ``ERROR = 0.02``: a wrong gradient."""
    return install(ACME.replace("ERROR = 0.0", "ERROR = 0.02"))
