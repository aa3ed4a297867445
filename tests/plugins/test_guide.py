"""docs/write-a-backend.md: its commands and files work, in order, in a fresh environment."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from plugin_environments import clean, environment

GUIDE = Path(__file__).parents[2] / "docs" / "write-a-backend.md"
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.M | re.S)
PIP = """\
#!{python}
import runpy
runpy.run_module("pip", run_name="__main__")
"""
TE_FL = """\
#!{python}
from transformer_engine_fl.cli import main
main()
"""
PYTEST = """\
#!{python}
import sys, pytest
sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_its_commands_lead_to_a_certified_plugin(tmp_path: Path) -> None:
    interpreter = environment(tmp_path / "environment")
    programs = interpreter.parent
    for name, text in {"pip": PIP, "te-fl": TE_FL, "pytest": PYTEST}.items():
        (programs / name).write_text(text.format(python=interpreter))
        (programs / name).chmod(0o755)
    # Without an index: the packages and their build backend are on this machine.
    offline = {"PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
    env = clean(offline) | {"PATH": os.pathsep.join([str(programs), os.environ["PATH"]])}
    folder = tmp_path / "work"
    folder.mkdir()
    blocks = BLOCK.findall(GUIDE.read_text())
    assert len(blocks) >= 7
    for language, text in blocks:
        first = text.partition("\n")[0]
        if language == "python":
            assert first.startswith("# file: ")
            file = folder / first.removeprefix("# file: ")
            assert file.exists(), "one that new-plugin has written"
            file.write_text(text)
            continue
        done = subprocess.run(
            ["sh", "-eu"],
            input=text,
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
