"""Fresh environments to install packages into; they see this environment's dependencies."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

__all__ = ["clean", "environment", "install", "run", "run_own_tests"]

ROOT = Path(__file__).parents[1]


def environment(home: Path) -> Path:
    """The interpreter of a fresh environment that sees the packages of this one."""
    venv.create(home)  # without pip: this environment's is used
    interpreter = home / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(interpreter, "-c", ask).stdout.strip())
    # addsitedir, not the bare path: it follows the .pth files of editable installs as well.
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lines = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in sorted(folders))
    lines += f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"  # before an installed copy
    (site / "parent.pth").write_text(lines)
    return interpreter


def install(interpreter: Path, *packages: Path) -> None:
    """Install packages with pip, without their dependencies."""
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    run(interpreter, "-m", "pip", "install", *options, *map(str, packages))


def run_own_tests(interpreter: Path, package: Path) -> str:
    """Run the tests of an installed package; returns pytest's output."""
    options = ("-q", "-p", "no:cacheprovider", "-c", str(package / "pyproject.toml"))
    tests = str(package / "tests")
    return run(interpreter, "-m", "pytest", *options, tests, cwd=package).stdout


def clean(env: dict[str, str] | None = None) -> dict[str, str]:
    """The environment without variables that affect the project, Python or pip; plus ``env``."""
    ours = ("TE_FL_", "TEFL_", "TRITON_INTERPRET", "PYTHON", "PIP_", "COV_")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    # A GPU would add candidates that these tests do not expect.
    return kept | {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"} | (env or {})


def run(
    interpreter: Path | str,
    *args: str,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter; asserts that it exits with 0."""
    command = [str(interpreter), *args]
    done = subprocess.run(
        command, env=clean(env), cwd=cwd, input=stdin, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done
