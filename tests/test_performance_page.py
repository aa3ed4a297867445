"""docs/performance.md and its pictures are what the committed results give."""

from __future__ import annotations

import copy
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "performance_page.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("performance_page", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


performance_page = _load()
REPORTS = performance_page.load()
DISPATCH = performance_page.load_dispatch()
AGAIN = "run python benchmarks/performance_page.py and commit what it writes"


def made_with(report: dict[str, Any]) -> str:
    page: str = performance_page.page([(REPORTS[0][0], report)], DISPATCH)
    return page


def test_the_page_is_what_the_results_give() -> None:
    written = performance_page.PAGE.read_text(encoding="utf-8")
    assert written == performance_page.page(REPORTS, DISPATCH), AGAIN


def test_every_picture_was_made_from_its_results() -> None:
    assert REPORTS
    for path, _ in REPORTS:
        made_from = performance_page.digest(path).encode()
        assert made_from in path.with_suffix(".png").read_bytes(), AGAIN


def test_a_picture_is_drawn_for_each_operator(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    performance_page.picture(REPORTS[0][1], path, "digest")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_peer_that_is_faster_is_marked_and_counted() -> None:
    report = copy.deepcopy(REPORTS[0][1])
    report["rows"] = report["rows"][:1]
    (row,) = report["rows"]
    row["results"]["a peer"] = {"us": 0.1, "gbps": 9999.0, "error_over_allowed": 0.5}
    page = made_with(report)
    assert "**0.1 / 9,999**" in page
    assert "Fastest: a peer on 1 of 1 shapes." in page


def test_what_was_not_measured_is_named_with_the_reason() -> None:
    report = copy.deepcopy(REPORTS[0][1])
    report["rows"][0]["absent"]["a peer"] = "ImportError: not installed"
    assert "- a peer, " in (page := made_with(report))
    assert "`ImportError: not installed`" in page


@pytest.mark.parametrize("place", range(len(REPORTS)))
def test_each_table_states_device_versions_and_roof(place: int) -> None:
    page = performance_page.page(REPORTS, DISPATCH)
    environment = REPORTS[place][1]["environment"]
    captions = re.findall(r"^### \w+_(?:fwd|bwd)\n\n(.*?)\n\n", page, flags=re.M | re.S)
    operators = {row["op"] for _, report in REPORTS for row in report["rows"]}
    assert len(captions) >= len(operators)
    ours = [it for it in captions if environment["device"] in it]
    assert len(ours) == len({row["op"] for row in REPORTS[place][1]["rows"]})
    for caption in ours:
        said = " ".join(caption.split())
        assert environment["torch"] in said
        assert f"{REPORTS[place][1]['roof_gbps']:,.0f} GB/s" in said
