"""docs/performance.md and its pictures are what the committed results give."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # the scripts import each other by name

import performance_page  # noqa: E402

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
    for path, report in REPORTS:
        made_from = performance_page.digest(path).encode()
        families = performance_page.families(report)
        pictures = [performance_page.family_picture(path, family) for family in families]
        for picture in (path.with_suffix(".png"), *pictures):
            assert made_from in picture.read_bytes(), AGAIN


def test_a_peer_that_is_faster_is_marked_and_counted() -> None:
    report = copy.deepcopy(REPORTS[0][1])
    report["rows"] = report["rows"][:1]
    (row,) = report["rows"]
    row["results"]["a peer"] = {"us": 0.1, "rate": 9999.0, "error_over_allowed": 1.5}
    page = made_with(report)
    assert re.search(r"a peer \*\*0\.1 / 9,999 / \d+ %\*\*, ", page)
    assert "Fastest: a peer on 1 of 1 shapes." in page
    assert f"a peer `{row['workload']}` 1.50." in " ".join(page.split())


def test_the_summary_compares_each_family_with_the_fastest_peers() -> None:
    report = copy.deepcopy(REPORTS[0][1])
    report["roofs"]["copy"]["value"] = 1000.0
    report["rows"] = [copy.deepcopy(report["rows"][0]) for _ in range(4)]
    rates = [(500.0, 400.0), (600.0, 900.0), (800.0, 100.0), (300.0, None)]
    for row, (ours, peer) in zip(report["rows"], rates, strict=True):
        candidates = {"default.flagos": ours} | ({"a peer": peer} if peer else {})
        row["results"] = {
            name: {"us": 1e3 / rate, "rate": rate, "error_over_allowed": 0.5}
            for name, rate in candidates.items()
        }
    page = made_with(report)
    family = re.escape(report["rows"][0]["family"])
    (line,) = re.findall(rf"^\| \[{family}\]\((#\S+)\) \| (.*) \|$", page, flags=re.M)
    assert line[1] == "4 | 55 | 40 | 2 of 3"
    (heading,) = re.findall(r"^## (Operators on .*)$", page, flags=re.M)
    assert f"[{heading}]({line[0]})" in page


def test_the_device_that_was_measured_last_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, device, date in (("a", "A", "2026-01-02"), ("b", "B", "2026-01-03"), ("c", "B", "x")):
        report = copy.deepcopy(REPORTS[0][1])
        report["environment"] |= {"device": device, "date": date.replace("x", "2025-12-31")}
        (tmp_path / f"ops_{name}.json").write_text(json.dumps(report))
    monkeypatch.setattr(performance_page, "RESULTS", tmp_path)
    found = [report["environment"]["device"] for _, report in performance_page.load()]
    assert found == ["B", "B", "A"]


def test_what_was_not_measured_is_named_with_the_reason() -> None:
    report = copy.deepcopy(REPORTS[0][1])
    report["rows"][0]["absent"]["a peer"] = "ImportError: not installed"
    assert "- a peer, " in (page := made_with(report))
    assert "`ImportError: not installed`" in page


def test_smaller_copies_are_compared_with_the_roof() -> None:
    report = copy.deepcopy(REPORTS[0][1])
    report["roofs"]["copy"]["value"] = 4000.0
    report["copies"] = [{"bytes": 2**27, "us": 40.0, "fill_us": 50.0}, {"bytes": 2**27, "us": 40.0}]
    page = made_with(report)
    assert "| 128 | 40.0 | 3,355 | 84 | 50.0 | 2,684 | 67 |\n" in page
    assert "| 128 | 40.0 | 3,355 | 84 | not measured |  |  |\n" in page


@pytest.mark.parametrize("place", range(len(REPORTS)))
def test_each_table_states_device_versions_and_roof(place: int) -> None:
    path, report = REPORTS[place]
    page = performance_page.page([(path, report)], DISPATCH)
    environment = report["environment"]
    families = performance_page.families(report)
    for family, rows in families.items():
        (caption,) = re.findall(rf"^### {family}\n\n(.*?)\n\n", page, flags=re.M | re.S)
        said = " ".join(caption.split())
        assert environment["device"] in said
        assert environment["torch"] in said
        for roof in {row["roof"] for row in rows}:
            assert f"{report['roofs'][roof]['value']:,.0f} {report['roofs'][roof]['unit']}" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"rows": [', "Expecting value"),
        ("[]", "not a report of ops.py; missing keys: environment, roofs, peers, rows, host_us"),
        ('{"environment": {}, "roofs": {}, "peers": {}, "rows": []}', ".*; missing keys: host_us"),
    ],
)
def test_results_that_are_cut_off_or_are_others_are_named(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performance_page, "RESULTS", tmp_path)
    (tmp_path / "ops_cut.json").write_text(text)
    with pytest.raises(ValueError, match=rf"ops_cut\.json: {said}"):
        performance_page.load()
