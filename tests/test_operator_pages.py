"""docs/operators/ is what the contracts and the registered sets give."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from transformer_engine_fl import Tolerance, contract, functional, get_default_manager, ops

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


def test_every_function_has_a_section_and_a_row_at_its_operators(pages: dict[str, str]) -> None:
    page = pages["functional.md"]
    for name in functional.__all__:
        function = getattr(functional, name)
        assert f"\n## {name}\n\n```python\n{name}(" in page
        assert f"\n| [`{name}`](#{name}) | [`" in page
        first = inspect.cleandoc(function.__doc__).splitlines()[0]
        assert generate._inline(first, "functional") in page
        for operator in generate._called(function):
            section = pages[f"{ops.CATALOGUE[operator].family}.md"].split(f"\n## {operator}\n")[1]
            (row,) = re.findall(r"^\| differentiable \| .*", section.split("\n## ")[0], flags=re.M)
            assert f"[`functional.{name}`](functional.md#{name})" in row
    assert "| differentiable |" not in pages["optimizer.md"]


@pytest.mark.parametrize("name", functional.__all__)
def test_an_operator_that_a_function_refers_to_is_one_that_it_calls(name: str) -> None:
    function = getattr(functional, name)
    referred = re.findall(r":func:`transformer_engine_fl\.ops\.(\w+)`", function.__doc__)
    assert set(referred) <= {*generate._called(function)}


def test_a_backward_is_differentiable_by_no_function() -> None:
    forwards = {
        it for name in functional.__all__ for it in generate._called(getattr(functional, name))
    }
    backwards = {it.backward.op for it in ops.CATALOGUE.values() if it.backward}
    both = {"convert_thd_to_bshd", "convert_bshd_to_thd"}
    both |= {"fused_multi_row_padding", "fused_multi_row_unpadding"}
    assert forwards & backwards == both
    assert not forwards & {"dgelu", "multi_tensor_scale_tensor"}


def _calls() -> dict[str, list[tuple[Callable[[], object], set[str]]]]:
    """Functions that call several operators, or build an operator's name: for each, calls and the
    operators that they call.
    """
    x, weight, target = torch.randn(4, 4), torch.randn(4, 4), torch.arange(4)
    mask, indices = torch.eye(4, dtype=torch.bool), torch.arange(4).reshape(4, 1)
    wanted = x.clone().requires_grad_(), weight.clone().requires_grad_()
    f = functional
    return {
        "linear": [(lambda: f.linear(x, weight, gelu=True), {"generic_gemm"})],
        "grouped_linear": [
            (lambda: f.grouped_linear(x, [weight], [4]), {"te_general_grouped_gemm"}),
        ],
        "layer_norm": [(lambda: f.layer_norm(x, x[0]), {"layernorm_fwd"})],
        "moe_permute": [
            (lambda: f.moe_permute(x, mask, 4), {"moe_permute_mask_fwd"}),
            (lambda: f.moe_permute(x, indices, 4, map_type="index"), {"moe_permute_fwd"}),
        ],
        "cross_entropy": [
            (lambda: f.cross_entropy(x, target), {"cross_entropy_fwd"}),
            (
                lambda: f.cross_entropy(wanted[0], target, gradient_in_forward=True),
                {"cross_entropy_fwd_bwd"},
            ),
        ],
        "fused_linear_cross_entropy": [
            (
                lambda: f.fused_linear_cross_entropy(x, weight, target),
                {"fused_linear_cross_entropy_fwd"},
            ),
            (
                lambda: f.fused_linear_cross_entropy(*wanted, target, gradient_in_forward=True),
                {"fused_linear_cross_entropy_fwd_bwd"},
            ),
        ],
    }


@pytest.mark.parametrize("name", _calls())
def test_what_a_function_calls_is_what_the_page_says(name: str) -> None:
    manager = get_default_manager()
    said = {*generate._called(getattr(functional, name))}
    for call, expected in _calls()[name]:
        served: list[str] = []
        undo = manager.monitor(lambda op_name, impl: served.append(op_name))  # noqa: B023
        call()
        undo()
        assert {*served} == expected
        assert expected <= said


def test_the_support_table_gives_the_dtypes_of_each_implementation(pages: dict[str, str]) -> None:
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
