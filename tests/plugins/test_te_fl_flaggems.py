"""plugins/te_fl_flaggems: its page agrees with its code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

PLUGIN = Path(__file__).parents[2] / "plugins" / "te_fl_flaggems"


def test_its_page_names_each_operator_and_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PLUGIN / "src")
    import te_fl_flaggems

    served, _, rest = (PLUGIN / "README.md").read_text().partition("\n## What it does not serve\n")
    left_out = rest.partition("\n## ")[0]  # without the scorecard's tables
    for name in te_fl_flaggems.OPERATORS:
        assert f"`{name}`" in served, name
    reasons = dict(te_fl_flaggems.UNSUPPORTED)
    reasons |= {name: reason for name, (_, reason) in te_fl_flaggems.LIMITED.items()}
    for name, reason in reasons.items():
        (line,) = [it for it in left_out.splitlines() if it.startswith(f"| `{name}`")]
        assert reason in line.replace("`", ""), name
