"""Runs pytest and te-fl in separate processes, as a vendor would."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TE_FL = ("-m", "transformer_engine_fl")


@dataclass(frozen=True)
class Ran:
    """A command's exit status and output."""

    code: int
    out: str
    err: str


class Vendor:
    """An empty directory in which the package is installed with its entry points.

    The entry points are read from pyproject.toml, not from the installed metadata.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        points = project["entry-points"]["pytest11"]
        metadata = folder / "site" / "te_fl_pytest-1.0.dist-info"
        metadata.mkdir(parents=True)
        named = "Metadata-Version: 2.1\nName: te-fl-pytest\nVersion: 1.0\n"
        (metadata / "METADATA").write_text(named)
        lines = "".join(f"{name} = {value}\n" for name, value in points.items())
        (metadata / "entry_points.txt").write_text(f"[pytest11]\n{lines}")
        folders = [str(it) for it in (ROOT, Path(__file__).parent, metadata.parent)]
        self.environ = {
            **{name: value for name, value in os.environ.items() if "PYTEST" not in name},
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(folders),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }

    def run(self, *command: str, plugin: str = "kit_loopback", **variables: str) -> Ran:
        """Run a command in the directory; a single string is run by the shell."""
        done = subprocess.run(
            command[0] if len(command) == 1 else command,
            shell=len(command) == 1,
            cwd=self.folder,
            env={**self.environ, "TE_FL_PLUGIN_MODULES": plugin, **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    def pytest(self, *arguments: str, plugin: str = "kit_loopback") -> Ran:
        """Run pytest in the directory."""
        return self.run(
            sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, plugin=plugin
        )

    def te_fl(self, *arguments: str, plugin: str = "kit_loopback") -> Ran:
        """Run te-fl in the directory."""
        return self.run(sys.executable, *TE_FL, *arguments, plugin=plugin)
