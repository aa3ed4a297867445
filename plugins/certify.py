"""Write the scorecard of each package of this folder into its README, where it can run.

``python plugins/certify.py`` certifies every package whose library and device are present,
``python plugins/certify.py te_fl_liger`` only that package, and ``--jobs 8`` uses eight processes.
The packages themselves need not be installed. The module that registers is that of the entry
point, or the one that the package's ``pyproject.toml`` names as ``certify`` in ``[tool.te_fl]``.
The exit code is 1 if a case fails or a package does not register.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from pathlib import Path

PLUGINS = Path(__file__).resolve().parent

WHETHER = """\
import sys
from transformer_engine_fl import get_default_manager
registry = get_default_manager()
registry.ensure_initialized()
entries = [
    entry
    for of_one in registry.registry.snapshot().operators.values()
    for entry in of_one
    if entry.impl.impl_id == sys.argv[1]
]
if not entries:
    sys.exit(f"{sys.argv[1]} is not registered")
reasons = {entry.unavailable() for entry in entries}
print("" if None in reasons else "; ".join(sorted(reasons)))
"""

PROGRAM = "from transformer_engine_fl.cli import main; main()"


def packages() -> list[Path]:
    """The folders of packages whose README has a place for a scorecard."""
    return sorted(
        path.parent
        for path in PLUGINS.glob("*/README.md")
        if "<!-- scorecard -->" in path.read_text(encoding="utf-8")
    )


def certify(package: Path, jobs: int) -> bool:
    """Run the kit on a package; True if every case passes, or if it cannot run here (printed)."""
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))
    ((vendor, module),) = project["project"]["entry-points"]["te_fl.plugin"].items()
    module = project.get("tool", {}).get("te_fl", {}).get("certify", module)
    impl_id = f"vendor.{vendor}"
    paths = [str(package / "src"), str(PLUGINS.parent), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TE_FL_PLUGIN_MODULES": module,
    }
    command = [sys.executable, "-c", WHETHER, impl_id]
    asked = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    if asked.returncode:
        print(
            f"{package.name}: the availability check failed (status {asked.returncode})", flush=True
        )
        return False
    reason = asked.stdout.strip()
    if reason:
        print(f"{package.name}: not available: {reason}", flush=True)
        return True
    page = str(package / "README.md")
    options = ["--quiet", "--jobs", str(jobs), "--readme", page]
    command = [sys.executable, "-c", PROGRAM, "verify", impl_id, *options]
    status = subprocess.run(command, env=environ, check=False).returncode
    if status < 0:
        print(f"{package.name}: killed by signal {-status}", flush=True)
    return status == 0


def main() -> None:
    """Certify the packages that are named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "packages", nargs="*", metavar="PACKAGE", help="the packages to certify (all)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="run the cases in this many processes")
    wanted = parser.parse_args()
    here = {it.name: it for it in packages()}
    if unknown := sorted(set(wanted.packages) - set(here)):
        parser.error(f"unknown package: {', '.join(unknown)}; known: {', '.join(here)}")
    chosen = [here[name] for name in wanted.packages or here]
    failed = [it for it in chosen if not certify(it, wanted.jobs)]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
