"""docs/vendors.md: its files can be written, and its code and commands run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "vendors.md"
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.M | re.S)


def _run(folder: Path, command: list[str], text: str) -> None:
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        input=text,
        cwd=folder,
        env=os.environ | {"PATH": programs},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.slow
def test_the_guide_is_right(tmp_path: Path) -> None:
    blocks = BLOCK.findall(GUIDE.read_text())
    code = []
    for language, text in blocks:
        first = text.partition("\n")[0]
        if language == "python" and first.startswith("# file: "):
            path = tmp_path / first.removeprefix("# file: ")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        elif language == "python":
            code.append(text)
    _run(tmp_path, [sys.executable, "-W", "error", "-"], "\n".join(code))
    commands = [text for language, text in blocks if language == "sh"]
    assert commands
    for text in commands:
        _run(tmp_path, ["sh", "-eu"], text)
