"""Each package of plugins/, installed alone, registers without warnings and passes its tests."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from plugin_environments import environment, install, run, run_own_tests

PLUGINS = Path(__file__).parents[2] / "plugins"
# te_fl_acme has tests of its own, in test_acme.py.
PACKAGES = sorted(
    it.parent for it in PLUGINS.glob("*/pyproject.toml") if it.parent.name != "te_fl_acme"
)

PROBE = """\
import json, torch
from transformer_engine_fl import get_default_manager

manager = get_default_manager()
output, _ = manager.call("rmsnorm_fwd", torch.ones(2, 8), torch.ones(8))
reports = [it for it in manager.plugins if it.name.startswith("entry point")]
print(json.dumps({it.name: [it.error, len(it.registered)] for it in reports}))
"""


@pytest.fixture(scope="module", params=PACKAGES, ids=lambda it: it.name)
def package(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def python(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment that has this package."""
    interpreter = environment(tmp_path_factory.mktemp(package.name) / "environment")
    install(interpreter, package)
    return interpreter


@pytest.mark.slow
def test_installed_alone_it_registers_and_says_nothing(package: Path, python: Path) -> None:
    done = run(python, "-c", PROBE)
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    (name,) = project["entry-points"]["te_fl.plugin"]
    error, count = json.loads(done.stdout)[f"entry point {name}"]
    assert error is None
    assert count > 0
    assert done.stderr == ""


@pytest.mark.slow
def test_its_own_tests_pass(package: Path, python: Path) -> None:
    assert " passed" in run_own_tests(python, package)


def test_its_page_installs_it_from_where_it_is(package: Path) -> None:
    """pip would look up a bare name in a registry, where it may be another project's."""
    targets = re.findall(
        r'^pip install (?:-e )?"?([^\s"[]+)', (package / "README.md").read_text(), re.M
    )
    assert targets
    assert {*targets} <= {".", f"./plugins/{package.name}"}


def test_its_page_has_a_place_for_its_scorecard(package: Path) -> None:
    text = (package / "README.md").read_text()
    assert text.index("<!-- scorecard -->") < text.index("<!-- end of scorecard -->")
