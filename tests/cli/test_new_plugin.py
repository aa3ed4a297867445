"""te-fl new-plugin: its packages install, are discovered, keep the contracts and pass ruff."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from kit_processes import TE_FL
from plugin_environments import environment, install, run, run_own_tests

from transformer_engine_fl.cli import verify

ROOT = Path(__file__).parents[2]
STYLES = {"set": "vendor", "liger": "liger", "flaggems": "flaggems"}
SERVES = {"set": "rmsnorm_fwd", "liger": "swiglu", "flaggems": "silu"}

CALL = """\
import sys, torch
from transformer_engine_fl import get_default_manager

served = []
manager = get_default_manager()
manager.monitor(lambda op_name, impl: served.append(impl.impl_id))
weights = [torch.ones(4)] if sys.argv[1] == "rmsnorm_fwd" else []
manager.call(sys.argv[1], torch.ones(2, 4), *weights)
print(served[0])
"""


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A package in each style, each written by the command in a process of its own."""
    folder = tmp_path_factory.mktemp("packages") / "of" / "vendors"
    for style in STYLES:
        arguments = ("new-plugin", f"Zeta-{style}", "--style", style, "--output", str(folder))
        subprocess.run([sys.executable, *TE_FL, *arguments], check=True)
    return {style: folder / f"te_fl_zeta_{style}" for style in STYLES}


@pytest.fixture(scope="session")
def python(packages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with all the packages."""
    interpreter = environment(tmp_path_factory.mktemp("zeta") / "environment")
    install(interpreter, *packages.values())
    return interpreter


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_its_own_tests_pass_where_it_is_installed(
    style: str, packages: dict[str, Path], python: Path
) -> None:
    assert " passed" in run_own_tests(python, packages[style])


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_installing_it_is_enough_to_be_served_by_it(style: str, python: Path) -> None:
    steered = {"TE_FL_PREFER": f"vendor:zeta-{style}", "TE_FL_STRICT": "1"}
    done = run(python, "-c", CALL, SERVES[style], env=steered)
    assert done.stdout == f"{STYLES[style]}.zeta-{style}\n"
    assert done.stderr == ""
    denied = run(python, "-c", CALL, SERVES[style], env={"TE_FL_DENY_VENDORS": f"zeta-{style}"})
    assert f"zeta-{style}" not in denied.stdout


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_the_commands_of_its_readme_show_the_new_plugin(
    style: str, packages: dict[str, Path], python: Path
) -> None:
    page = (packages[style] / "README.md").read_text()
    questions = re.findall(r"^te-fl (list|explain)\b([^#\n]*)#", page, re.M)
    assert [command for command, _ in questions] == ["list", "explain"]
    for command, arguments in questions:
        said = run(python, *TE_FL, command, *arguments.split()).stdout
        assert f"{STYLES[style]}.zeta-{style} " in said


@pytest.mark.slow
def test_its_verification_writes_its_readme(
    packages: dict[str, Path], python: Path, tmp_path: Path
) -> None:
    page = tmp_path / "README.md"
    page.write_text((packages["set"] / "README.md").read_text())
    narrow = ("--op", "rmsnorm_fwd", "--dtype", "float32", "--readme", str(page))
    run(python, *TE_FL, "verify", "vendor.zeta-set", *narrow)
    assert "**vendor.zeta-set: all " in page.read_text()


@pytest.mark.parametrize("style", STYLES)
def test_what_it_writes_is_clean(style: str, packages: dict[str, Path]) -> None:
    def ruff(*arguments: str) -> subprocess.CompletedProcess[str]:
        settings = ("--config", str(ROOT / "pyproject.toml"), "--no-cache")
        command = [sys.executable, "-m", "ruff", *arguments, *settings, str(packages[style])]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    # How imports of the package itself are sorted depends on its place, which differs here.
    checked = ruff("check", "--ignore", "I001,D10")
    assert checked.returncode == 0, checked.stdout
    formatted = ruff("format", "--diff")
    assert formatted.returncode == 0, formatted.stdout


def without_scorecard(file: Path) -> str:
    before, begin, rest = file.read_text().partition(verify.BEGIN)
    return before + begin + rest[rest.find(verify.END) :] if begin else before


def test_te_fl_acme_is_what_it_writes(te_fl, tmp_path: Path) -> None:
    assert te_fl("new-plugin", "acme", "--output", str(tmp_path)).code == 0
    written, kept = tmp_path / "te_fl_acme", ROOT / "plugins" / "te_fl_acme"
    files = {it.relative_to(written) for it in written.rglob("*") if it.is_file()}
    assert files == {
        it.relative_to(kept)
        for it in kept.rglob("*")
        if it.is_file() and not {"__pycache__", ".pytest_cache"} & set(it.parts)
    }
    for file in files:
        assert without_scorecard(written / file) == without_scorecard(kept / file), file


def test_it_says_what_it_has_written_and_what_is_next(te_fl, tmp_path: Path) -> None:
    ran = te_fl("new-plugin", "zeta", "--output", str(tmp_path))
    assert f"written: {tmp_path}/te_fl_zeta/pyproject.toml\n" in ran.out
    assert ran.out.endswith(f"\npip install -e {tmp_path}/te_fl_zeta\nte-fl verify vendor.zeta\n")
    assert "@" not in "".join(it.name for it in tmp_path.rglob("*"))


def test_what_is_next_can_be_pasted_into_a_shell(te_fl, tmp_path: Path) -> None:
    ran = te_fl("new-plugin", "zeta", "--output", str(tmp_path / "of vendors"))
    (line,) = (it for it in ran.out.splitlines() if it.startswith("pip"))
    assert shlex.split(line) == ["pip", "install", "-e", f"{tmp_path}/of vendors/te_fl_zeta"]


def test_a_name_of_several_words_is_written_as_it_was_given(te_fl, tmp_path: Path) -> None:
    te_fl("new-plugin", "MyChip-2", "--output", str(tmp_path))
    assert "MyChip-2's kernels" in (tmp_path / "te_fl_mychip_2" / "README.md").read_text()


BAD = {
    "9x": "is not a valid vendor name",
    "a b": "is not a valid vendor name",
    "../zeta": "is not a valid vendor name",
    "zeta-": "is not a valid vendor name",
    "": "is not a valid vendor name",
    "flagos": "is a kind of implementation",
    "nvidia": "has 'vendor.cuda' of vendor 'nvidia'",
    "Ascend": "has 'vendor.ascend' of vendor 'ascend'",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_name_is_refused_in_a_line(te_fl, tmp_path: Path, name: str) -> None:
    ran = te_fl("new-plugin", name, "--output", str(tmp_path))
    assert ran.code == 2
    assert ran.err.startswith(f"te-fl: new-plugin: {name!r} ")
    assert BAD[name] in ran.err
    assert ran.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_as_it_is(te_fl, tmp_path: Path) -> None:
    (tmp_path / "te_fl_zeta").mkdir()
    ran = te_fl("new-plugin", "zeta", "--output", str(tmp_path))
    assert ran.code == 2
    assert ran.err == f"te-fl: new-plugin: {tmp_path}/te_fl_zeta already exists\n"
    assert list((tmp_path / "te_fl_zeta").iterdir()) == []


def test_a_place_that_is_no_folder_is_refused(te_fl, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = te_fl("new-plugin", "zeta", "--output", str(tmp_path / "file"))
    assert ran.code == 2
    assert ran.err.startswith("te-fl: --output: ")
    assert ran.err.count("\n") == 1


def test_an_unknown_style_is_refused(te_fl, tmp_path: Path) -> None:
    ran = te_fl("new-plugin", "zeta", "--style", "tide", "--output", str(tmp_path))
    assert ran.code == 2
    assert "flaggems" in ran.err
