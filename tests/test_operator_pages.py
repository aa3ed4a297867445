"""docs/operators/ is what the contracts and the registered sets give."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from transformer_engine_fl import Tolerance, contract, ops

SCRIPT = Path(__file__).parents[1] / "docs" / "generate.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = _load()


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    made: dict[str, str] = generate.pages()
    return made


def test_the_pages_are_current(pages: dict[str, str]) -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in generate.FOLDER.iterdir()}
    differ = sorted(
        name for name in written.keys() | pages.keys() if written.get(name) != pages.get(name)
    )
    assert differ == [], "run `make docs` and commit what it writes"


def test_they_are_the_same_each_time(pages: dict[str, str]) -> None:
    assert generate.pages() == pages


def test_every_operator_has_a_section_and_a_row(pages: dict[str, str]) -> None:
    for name, it in ops.CATALOGUE.items():
        assert f"\n## {name}\n" in pages[f"{it.family}.md"]
        assert f"\n| [`{name}`]({it.family}.md#{name}) |" in pages["index.md"]


def test_the_support_table_says_who_takes_which_dtype(pages: dict[str, str]) -> None:
    table = pages["index.md"].split("## Support")[1]
    heads = re.search(r"^\| operator \| (.*) \|$", table, flags=re.M)
    assert heads is not None
    sets = heads[1].replace("`", "").split(" | ")
    assert {"default.flagos", "reference.torch", "vendor.cuda"} <= set(sets)
    row = re.search(r"^\| \[`rmsnorm_fwd`\]\(.*?\) \| (.*) \|$", table, flags=re.M)
    assert row is not None
    assert dict(zip(sets, row[1].split(" | "), strict=True))["vendor.cuda"] == "f32 bf16 f16 f64"


def test_every_link_leads_to_a_section(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        for page, section in re.findall(r"\]\(([\w.]*)#(\w+)\)", text):
            assert f"\n## {section}\n" in pages[page or name]


def test_code_spans_are_closed_and_no_other_markup_is_left(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        outside = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        assert "``" not in outside, name
        assert ":func:" not in outside, name
        assert outside.count("`") % 2 == 0, name


def test_a_docstring_becomes_markdown() -> None:
    @contract(
        family="rope",
        check=lambda op, **arguments: None,
        samples=lambda dtype, device: iter(()),
        tolerance={"float32": Tolerance(1e-6, 0.0)},
        oracle=lambda **arguments: None,
        mutates=("values",),
    )
    def example(values, places=(1, 2), *, kind="a|b"):  # type: ignore[no-untyped-def]
        """Multiplies ``x * y``, as :func:`silu` and :func:`unheard_of` do, below 2**63.

        A code span that ``goes
        on`` here.

        Args:
            values, places: of ``one
                tensor``.

        Returns:
            Nothing at all: it writes,
            in two lines.
        """

    lines = list(generate._docstring(example, "rope"))
    assert lines == [
        "Multiplies `x * y`, as [`silu`](activation.md#silu) and `unheard_of` do, below 2\\*\\*63.",
        "",
        "A code span that `goes",
        "on` here.",
        "",
        "**Arguments**",
        "",
        "- `values`, `places`: of `one tensor`.",
        "",
        "**Returns**",
        "",
        "Nothing at all: it writes, in two lines.",
    ]
    assert generate._row("a", "b|c") == "| a | b\\|c |"
    assert generate._literal("a|b") == '"a|b"'
    facts = list(generate._facts(example, "rope"))
    assert "| writes | `values` |" in facts
