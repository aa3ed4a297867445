"""What importing the package loads and costs, and which packages may import which."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import transformer_engine_fl

PACKAGE = Path(transformer_engine_fl.__file__).parent
CORE = sorted((PACKAGE / "core").rglob("*.py"))
HEAVY = ("torch", "triton", "cuda", "pydantic", "typer", "rich", "yaml", "numpy")


def in_fresh_interpreter(statements: str) -> tuple[list[str], float]:
    """Run statements in a fresh interpreter: (heavy modules loaded, CPU seconds)."""
    code = (
        "import sys, time, json\n"
        "start = time.process_time()\n"
        f"{statements}\n"
        "seconds = time.process_time() - start\n"
        f"print(json.dumps([[it for it in {HEAVY!r} if it in sys.modules], seconds]))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr == ""
    loaded, seconds = json.loads(run.stdout)
    return loaded, seconds


@pytest.mark.parametrize(
    "statements",
    [
        "import transformer_engine_fl",
        "from transformer_engine_fl import *",
        "from transformer_engine_fl import ops; ops.rmsnorm_fwd.signature",
        "from transformer_engine_fl.ops import CATALOGUE; list(CATALOGUE)",
        "import transformer_engine_fl.core.policy as p; p.get_policy()",
        "import transformer_engine_fl as t; t.get_default_manager().registry.contracts",
        "import transformer_engine_fl as t\nwith t.with_preference('vendor'): t.get_policy()",
    ],
)
def test_nothing_heavy_is_loaded(statements: str) -> None:
    assert in_fresh_interpreter(statements)[0] == []


@pytest.mark.usefixtures("with_bytecode")
def test_the_import_takes_less_than_a_tenth_of_a_second() -> None:
    times = []
    for _ in range(10):
        times.append(in_fresh_interpreter("import transformer_engine_fl")[1])
        if times[-1] < 0.1:
            return
    pytest.fail(f"the quickest of {len(times)} imports took {min(times):.3f} s")


def test_the_names_that_are_offered_exist_and_are_sorted() -> None:
    names = transformer_engine_fl.__all__
    assert list(names) == sorted(names)
    assert all(hasattr(transformer_engine_fl, name) for name in names)


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, in functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_core_imports_nothing_from_above_itself_and_no_framework(path: Path) -> None:
    allowed = {"pydantic"} if path.name == "policy_file.py" else set()
    for name in imported(path):
        root = name.partition(".")[0]
        if root == "transformer_engine_fl":
            assert name.startswith("transformer_engine_fl.core."), f"{path.name} imports {name}"
        else:
            assert root in sys.stdlib_module_names | allowed, f"{path.name} imports {name}"


def test_ops_import_neither_backends_nor_what_is_above() -> None:
    for path in (PACKAGE / "ops").rglob("*.py"):
        for name in imported(path):
            if name.startswith("transformer_engine_fl."):
                assert name.split(".")[1] in ("core", "ops"), f"{path.name} imports {name}"
