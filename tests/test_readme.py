"""What README.md says is true: its code runs, its tables are complete, its figures measured."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest
import torch

import transformer_engine_fl as te
from transformer_engine_fl import SelectionPolicy
from transformer_engine_fl.core.policy import VARIABLES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INTERPRETED = os.environ.get("TRITON_INTERPRET")
RESULTS = ROOT / "benchmarks" / "results" / "dispatch_overhead.json"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def _cells(section: str) -> list[list[str]]:
    """The cells of every table row in a section, without header rows."""
    text = README.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line[:1] == "|"]
    return [
        [cell.strip() for cell in row]
        for place, row in enumerate(rows)
        if "---" not in row[0] and "---" not in (rows[place + 1 :] or [[""]])[0][0]
    ]


@pytest.mark.parametrize("block", _blocks("python"), ids=lambda block: block.splitlines()[-1])
def test_every_python_block_runs(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_the_example_is_short_and_shows_the_serving_implementation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = _blocks("python")[0]
    assert len(example.splitlines()) <= 15
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "'reference.torch' serves" in printed
    if torch.version.cuda is None and not torch.cuda.is_available() and INTERPRETED is None:
        assert f"that prints\n\n```\n{printed}```\n" in README


def test_the_backend_of_the_readme_serves_once_it_is_registered() -> None:
    from transformer_engine_fl import get_default_manager, with_preference

    (block,) = (it for it in _blocks("python") if "OpImpl(" in it)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    with with_preference("vendor"):
        assert get_default_manager().get_selected_impl_id("rmsnorm_fwd") == "vendor.mybackend"


def test_the_backend_of_the_readme_passes_the_conformance_kit() -> None:
    from transformer_engine_fl import testing

    (block,) = (it for it in _blocks("python") if "OpImpl(" in it)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    cases = list(testing.cases("vendor.mybackend"))
    assert cases
    for case in cases:
        case.run()


def test_the_tables_list_every_variable_and_no_other() -> None:
    listed = [cells[0].strip("`") for cells in _cells("Environment variables")]
    assert sorted(listed) == sorted((*VARIABLES, "CUDA_HOME", "CUDA_PATH"))


def test_the_table_lists_every_error_with_what_of_python_it_is() -> None:
    listed = {
        name.strip("`"): bases.replace("`", "").split(", ") for name, bases, _ in _cells("Errors")
    }
    errors = [getattr(te, name) for name in te.__all__ if name.endswith("Error")]
    assert {*listed} == {it.__name__ for it in errors} - {"TeFlError"}
    for error in errors:
        assert issubclass(error, te.TeFlError)
        named = [base.__name__ for base in error.__mro__]
        assert [it for it in listed.get(error.__name__, ()) if it not in named] == []


def test_the_policy_file_of_the_readme_is_a_valid_policy() -> None:
    (block,) = _blocks("toml")
    assert SelectionPolicy(**tomllib.loads(block)).prefer == "vendor"


def test_the_examples_of_the_variables_are_valid(tmp_path: Path) -> None:
    from transformer_engine_fl.core.policy import parse_environment

    (tmp_path / "policy.toml").write_text(_blocks("toml")[0], encoding="utf-8")
    rows = _cells("Environment variables")
    environ = {name.strip("`"): text.strip("`").replace("\\|", "|") for name, text, _ in rows}
    environ["TE_FL_POLICY_FILE"] = str(tmp_path / environ["TE_FL_POLICY_FILE"])
    policy = parse_environment(environ).policy
    assert policy.prefer == "vendor:acme"
    assert policy.per_op_order == {
        "rmsnorm_fwd": ("vendor:acme", "reference"),
        "rmsnorm_bwd": ("reference",),
    }


def test_the_figures_are_those_of_the_committed_measurement() -> None:
    cases = json.loads(RESULTS.read_text(encoding="utf-8"))["cases"]
    shown = {name.strip("`"): float(added) for name, added in _cells("What a dispatch costs")}
    assert shown == {name: pytest.approx(cases[name]["added_us"], abs=6e-4) for name in shown}
    assert {"manager.call", "torch.library.custom_op", "functools.singledispatch"} <= shown.keys()


PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md"))
)


def test_the_pages_that_people_read_are_among_those_checked() -> None:
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/performance.md"} <= {*PAGES}
    assert "plugins/te_fl_acme/README.md" in PAGES


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text)
    missing = [it for it in targets if not (ROOT / page).parent.joinpath(it).exists()]
    assert missing == []


def _anchors(page: Path) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    words = (
        re.sub(r"\]\(.*?\)", "", it).lower() for it in re.findall(r"^#+ (.*)$", text, flags=re.M)
    )
    return {re.sub(r"[^\w -]", "", it).replace(" ", "-") for it in words}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_to_a_heading_leads_to_one(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text(encoding="utf-8"))
    targets = [((path.parent / it) if it else path, anchor) for it, anchor in links]
    assert [it for it in targets if it[1] not in _anchors(it[0])] == []


def test_every_page_of_docs_is_reached_from_the_readme() -> None:
    pages = (path.name for path in (ROOT / "docs").glob("*.md"))
    assert [name for name in pages if f"](docs/{name})" not in README] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_by_its_path_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(
        r"`((?:transformer_engine_fl|core|ops|backends|testing|cli|tests|benchmarks"
        r"|docs|plugins|examples)/[\w/]*\w\.(?:py|cu|md|json))`",
        text,
    )
    roots = (ROOT, ROOT / "transformer_engine_fl")
    assert [it for it in named if not any((root / it).exists() for root in roots)] == []


def test_the_architecture_page_names_every_module_of_core() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    modules = (ROOT / "transformer_engine_fl" / "core").glob("[!_]*.py")
    assert [it.name for it in modules if f"`{it.name}`" not in page] == []


def test_the_architecture_page_names_every_module_that_families_of_the_sets_share() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    layout = page.split("  backends/ ")[1].split("  vendors/ ")[0]
    named = set(re.findall(r"_\w+\.py", layout))
    for line in page.splitlines():
        folder = ""
        for path in re.findall(r"`([\w/]*\w\.py)`", line.split(" | ")[0]):
            folder = path.rpartition("/")[0] or folder  # `flagos/_a.py`, `_b.py`: `_b.py` too
            named.add(f"{folder}/{path.rpartition('/')[2]}".removeprefix("backends/"))
    root = ROOT / "transformer_engine_fl" / "backends"
    modules = (str(path.relative_to(root)) for path in root.rglob("_[!_]*.py"))
    assert sorted(it for it in modules if it not in named) == []


def test_the_architecture_page_names_every_module_of_the_conformance_kit() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    modules = (ROOT / "transformer_engine_fl" / "testing").glob("[!_]*.py")
    assert [it.name for it in modules if it.name not in page] == []
