"""Writes docs/operators/: a page for each family of operators, and the table of who has what.

``make docs`` runs it. Everything comes from the contracts in ``ops/``, from what the sets of
this package register, and from the functions of ``functional``, which have a page to themselves;
``tests/test_operator_pages.py`` fails where the pages differ.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from transformer_engine_fl import functional
from transformer_engine_fl.core.contract import Contract
from transformer_engine_fl.core.manager import OpManager
from transformer_engine_fl.core.registry import Entry
from transformer_engine_fl.ops import CATALOGUE

__all__ = ["FOLDER", "main", "pages"]

FOLDER = Path(__file__).parent / "operators"
NOTE = "Written by `docs/generate.py` (`make docs`) from {}; not edited by hand."
OF_CONTRACTS = NOTE.format("the contracts")
FUNCTIONAL = "functional"
SHORT = {
    "float64": "f64",
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "float8_e8m0fnu": "e8m0",
}
NONE = "-"


def main() -> None:
    """Write the pages, and remove those of families that are gone."""
    FOLDER.mkdir(exist_ok=True)
    wanted = pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """Every page by the name of its file."""
    sets = _sets()
    families: dict[str, list[Contract[..., Any]]] = {}
    for contract in sorted(CATALOGUE.values(), key=_line):
        families.setdefault(contract.family, []).append(contract)
    made = {
        f"{family}.md": _text(_family(family, families[family], sets))
        for family in sorted(families)
    }
    own = {"index.md": _index(families, sets), f"{FUNCTIONAL}.md": _functional()}
    return made | {name: _text(lines) for name, lines in own.items()}


def _line(contract: Contract[..., Any]) -> int:
    """Where it stands in its module: a forward comes before its backward there."""
    return int(inspect.unwrap(contract).__code__.co_firstlineno)


def _text(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------- who implements what

Sets = dict[str, dict[str, Entry]]
"""Set -> operator -> its implementation, best priority first."""


def _sets() -> Sets:
    manager = OpManager(plugins=False)
    manager.ensure_initialized()
    entries = [entry for name in CATALOGUE for entry in manager.registry.entries(name)]
    entries.sort(key=lambda it: (-it.impl.priority, it.impl.impl_id))
    found: Sets = {}
    for entry in entries:
        found.setdefault(entry.impl.impl_id, {})[entry.impl.op_name] = entry
    return found


def _dtypes(contract: Contract[..., Any], entry: Entry | None) -> list[str]:
    """The dtypes of a contract that an implementation takes."""
    if entry is None:
        return []
    taken = entry.impl.supported_dtypes
    return [dtype for dtype in contract.dtypes if taken is None or dtype in taken]


def _conditions(entry: Entry) -> str:
    """What an implementation states of itself besides its dtypes."""
    impl = entry.impl
    parts = ["any device" if impl.devices is None else ", ".join(sorted(impl.devices))]
    if impl.min_arch:
        parts.append(f"from {impl.min_arch} on")
    if impl.supports is not None:
        parts.append("judges the arguments")
    if impl.traits:
        parts.append(f"claims {', '.join(sorted(impl.traits))}")
    missing = _missing_options(entry)
    if missing:
        parts.append(f"without {', '.join(f'`{name}`' for name in missing)}")
    return "; ".join(parts)


def _missing_options(entry: Entry) -> list[str]:
    reason = entry.load()
    if reason is not None:
        raise RuntimeError(f"{entry.impl.label} cannot be loaded: {reason}")
    return list(entry.missing)


# ------------------------------------------------------------------------------- index


def _index(families: dict[str, list[Contract[..., Any]]], sets: Sets) -> Iterator[str]:
    yield from ("# Operators", "", OF_CONTRACTS, "")
    yield "A page for each family has every operator's signature, its specification, what it"
    yield "saves for its backward, the tolerances, and what each implementation states."
    yield f"What is differentiable is on a page to itself: [functions]({FUNCTIONAL}.md)."
    yield ""
    yield "| family | operators | what it is |"
    yield "| --- | ---: | --- |"
    for family in sorted(families):
        about = inspect.cleandoc(_module(family).__doc__ or "").split("\n\n")[0]
        summary = " ".join(about.splitlines())
        page = f"[{_title(family)}]({family}.md)"
        yield _row(page, str(len(families[family])), _inline(summary, None))
    yield from ("", "## Sets", "")
    yield "What is registered in this package; plugins add to it (`te-fl list --probe`)."
    yield ""
    yield "| impl_id | kind | priority | operators | devices | traits |"
    yield "| --- | --- | ---: | ---: | --- | --- |"
    for impl_id, operators in sets.items():
        first = next(iter(operators.values())).impl
        kind = first.kind.value + (f" `{first.vendor}`" if first.vendor else "")
        cells = (f"`{impl_id}`", kind, str(first.priority), f"{len(operators)} of {len(CATALOGUE)}")
        yield _row(*cells, _common(operators, _places), _common(operators, _traits))
    yield from ("", "## Support", "")
    yield "The dtypes of the dispatch tensor that each set takes:"
    yield ", ".join(f"`{short}` {name}" for name, short in SHORT.items()) + "."
    yield ""
    yield _row("operator", *(f"`{impl_id}`" for impl_id in sets))
    yield _row(*["---"] * (1 + len(sets)))
    for family in sorted(families):
        for contract in families[family]:
            entries = (operators.get(contract.name) for operators in sets.values())
            taken = (_dtypes(contract, entry) for entry in entries)
            cells = (" ".join(SHORT.get(it, it) for it in dtypes) or NONE for dtypes in taken)
            yield _row(_link(contract.name, here=None), *cells)


def _common(operators: dict[str, Entry], of: Any) -> str:
    """What all implementations of a set state, or that they differ."""
    said = {of(entry) for entry in operators.values()}
    return str(said.pop()) if len(said) == 1 else "by operator"


def _places(entry: Entry) -> str:
    devices = "any" if entry.impl.devices is None else ", ".join(sorted(entry.impl.devices))
    return devices + (f" from {entry.impl.min_arch} on" if entry.impl.min_arch else "")


def _traits(entry: Entry) -> str:
    return ", ".join(sorted(entry.impl.traits)) or NONE


# ------------------------------------------------------------------------------ family


def _family(family: str, contracts: list[Contract[..., Any]], sets: Sets) -> Iterator[str]:
    yield from (f"# {_title(family)}", "", OF_CONTRACTS, "")
    yield from _prose(inspect.cleandoc(_module(family).__doc__ or "").splitlines(), family)
    yield ""
    yield "| operator | what it is |"
    yield "| --- | --- |"
    for contract in contracts:
        summary = " ".join(_paragraphs(contract)[0])
        yield _row(_link(contract.name, here=family), _inline(summary, family))
    for contract in contracts:
        yield ""
        yield from _operator(contract, sets)


def _operator(contract: Contract[..., Any], sets: Sets) -> Iterator[str]:
    here = contract.family
    yield from (f"## {contract.name}", "", "```python")
    yield from _signature(contract.name, contract.signature)
    yield from ("```", "")
    yield from _docstring(contract, here)
    yield ""
    yield from _facts(contract, here)
    yield ""
    those = {
        impl_id: operators[contract.name]
        for impl_id, operators in sets.items()
        if contract.name in operators
    }
    by_row = any(it.by_row for it in contract.tolerance.values())
    bounds = ("rtol", "atol, by row" if by_row else "atol")
    yield _row("dtype", *bounds, *(f"`{impl_id}`" for impl_id in those))
    yield _row("---", "---:", "---:", *["---"] * len(those))
    for dtype, tolerance in contract.tolerance.items():
        bounds = (f"{tolerance.rtol:.3g}", f"{tolerance.atol:.3g}")
        taken = ("yes" if dtype in _dtypes(contract, it) else NONE for it in those.values())
        yield _row(dtype, *bounds, *taken)
    yield ""
    for impl_id, entry in those.items():
        yield f"- `{impl_id}`: {_conditions(entry)}."


def _module(family: str) -> ModuleType:
    return importlib.import_module(f"transformer_engine_fl.ops.{family}")


def _signature(name: str, signature: inspect.Signature) -> list[str]:
    """As it would be written in Python, on one line if it fits."""
    parts: list[str] = []
    keyword_only = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parts.append("*")
        default = parameter.default
        end = "" if default is parameter.empty else f" = {_literal(default)}"
        parts.append(f"{parameter.name}: {parameter.annotation}{end}")
    returns = signature.return_annotation
    line = f"{name}({', '.join(parts)}) -> {returns}"
    if len(line) <= 88:
        return [line]
    return [f"{name}(", *(f"    {part}," for part in parts), f") -> {returns}"]


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _facts(contract: Contract[..., Any], here: str) -> Iterator[str]:
    yield "| | |"
    yield "| --- | --- |"
    yield _row("dispatched on", f"`{contract.dispatch_on}`")
    if contract.mutates:
        yield _row("writes", ", ".join(f"`{name}`" for name in contract.mutates))
    if contract.aliases:
        yield _row("other names", ", ".join(f"`{name}`" for name in contract.aliases))
    backward = contract.backward
    if backward is not None:
        yield _row("backward", _link(backward.op, here))
        saved = (f"`{name}` from `{source}`" for name, source in backward.saves.items())
        yield _row("saved for it", ", ".join(saved))
    forwards = [it for it in CATALOGUE.values() if it.backward and it.backward.op == contract.name]
    if forwards:
        yield _row("backward of", ", ".join(_link(it.name, here) for it in forwards))
    wrappers = [it.__name__ for it in _functions() if contract.name in _called(it)]
    if wrappers:
        yield _row("differentiable", ", ".join(_function_link(name) for name in wrappers))


# --------------------------------------------------------------------------- functional


def _functions() -> list[Callable[..., Any]]:
    """Those of ``functional``, by its modules and as they stand in these."""
    found = [getattr(functional, name) for name in functional.__all__]
    return sorted(found, key=lambda it: (it.__module__, it.__code__.co_firstlineno))


def _functional() -> Iterator[str]:
    yield from ("# Differentiable functions", "")
    yield from (NOTE.format("`transformer_engine_fl.functional`"), "")
    yield "`from transformer_engine_fl.functional import linear`, and so on. Each dispatches to"
    yield "operators, forward and backward; the [README](../../README.md#gradients) says what holds"
    yield "for all of them."
    yield ""
    yield "| function | operators of its forward | what it is |"
    yield "| --- | --- | --- |"
    for function in _functions():
        operators = ", ".join(_link(name, FUNCTIONAL) for name in _called(function))
        about = _inline(" ".join(_paragraphs(function)[0]), FUNCTIONAL)
        yield _row(_function_link(function.__name__, FUNCTIONAL), operators, about)
    for function in _functions():
        name = function.__name__
        yield from ("", f"## {name}", "", "```python")
        yield from _signature(name, inspect.signature(function))
        yield from ("```", "")
        yield from _docstring(function, FUNCTIONAL)


@functools.cache
def _called(function: Callable[..., Any]) -> tuple[str, ...]:
    """The operators that the forward of a function of ``functional`` calls.

    They are called by name, so these are the names in the function's source and in what it
    reaches in its module; a name that is put together is tried with every text there.
    """
    module = inspect.getmodule(function)
    assert module is not None
    body = ast.parse(inspect.getsource(module)).body
    # Of overloads the last one is the function.
    parts = {it.name: it for it in body if isinstance(it, ast.FunctionDef | ast.ClassDef)}
    reached, texts, around = [function.__name__], set(), set()
    for name in reached:  # which grows
        for node in _of_forward(parts[name]):
            match node:
                case ast.Name(id=other) if other in parts and other not in reached:
                    reached.append(other)
                case ast.Constant(value=str(text)):
                    texts.add(text)
                case ast.JoinedStr(values=pieces):
                    fixed = (it.value if isinstance(it, ast.Constant) else "\0" for it in pieces)
                    around.add("".join(fixed))
    texts |= {frame.replace("\0", text) for frame in around for text in texts}
    return tuple(it.name for it in sorted(CATALOGUE.values(), key=_line) if it.name in texts)


def _of_forward(node: ast.AST) -> Iterator[ast.AST]:
    """What is below a node, but what a backward calls, and texts that are no names of operators."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef(name="backward") | ast.Compare():
                continue
            case ast.Call(func=ast.Attribute(attr="pin")):
                continue
            case ast.Dict(values=values):
                yield from _of_forward(ast.Tuple(values))
            case ast.JoinedStr():
                yield child
            case _:
                yield child
                yield from _of_forward(child)


# -------------------------------------------------------------------------- docstrings

_SECTION = re.compile(r"^([A-Z][a-z]+):$")
_ITEM = re.compile(r"^((?:[A-Za-z_]\w*)(?:, [A-Za-z_]\w*)*): (.*)$")
_TITLES = {"Args": "Arguments"}


def _paragraphs(it: Callable[..., Any]) -> list[list[str]]:
    text = inspect.cleandoc(it.__doc__ or "")
    return [part.splitlines() for part in text.split("\n\n")]


def _docstring(it: Callable[..., Any], here: str) -> Iterator[str]:
    """Prose, then each section as a list of its entries."""
    lines = inspect.cleandoc(it.__doc__ or "").splitlines()
    starts = [place for place, line in enumerate(lines) if _SECTION.match(line)]
    first = starts[0] if starts else len(lines)
    yield from _prose(lines[:first], here)
    for start, end in itertools.pairwise([*starts, len(lines)]):
        name = lines[start].removesuffix(":")
        yield from ("", f"**{_TITLES.get(name, name)}**", "")
        yield from _entries(inspect.cleandoc("\n" + "\n".join(lines[start + 1 : end])), here)


def _entries(text: str, here: str) -> Iterator[str]:
    """``name: what it is`` as list items; anything else, one paragraph, as it is."""
    lines = text.splitlines()
    if not any(_ITEM.match(line) for line in lines):
        yield _inline(" ".join(line.strip() for line in lines), here)
        return
    entry: list[str] = []
    for line in [*lines, None]:
        if line is None or (line and not line.startswith(" ")):
            if entry:
                yield _entry(" ".join(entry), here)
            entry = []
        if line:
            entry.append(line.strip())


def _entry(text: str, here: str) -> str:
    item = _ITEM.match(text)
    if item is None:
        return f"- {_inline(text, here)}"
    names = ", ".join(f"`{name}`" for name in item[1].split(", "))
    return f"- {names}: {_inline(item[2], here)}"


def _prose(lines: list[str], here: str) -> Iterator[str]:
    """Paragraphs; one that is indented, a formula, becomes a block of code."""
    while lines and not lines[-1]:
        lines = lines[:-1]
    # A code span may go over the end of a line: spans are found in whole paragraphs.
    for number, paragraph in enumerate("\n".join(lines).split("\n\n")):
        if number:
            yield ""
        if paragraph.startswith("    "):
            yield from paragraph.replace("``", "").splitlines()
        else:
            yield from _inline(paragraph, here).splitlines()


_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")
_CODE = re.compile(r"(`[^`]+`)", re.S)


def _inline(text: str, here: str | None) -> str:
    """Of reStructuredText what the docstrings use, as Markdown."""
    text = _ROLE.sub(lambda found: f"``{found[1]}``\0", text)
    text = text.replace("``", "`")
    pieces = _CODE.split(text)
    for place, piece in enumerate(pieces):
        if place % 2 == 0:
            pieces[place] = re.sub(r"(?<!\*)\*(?!\*)|\*\*(?=\d)|<", _escaped, piece)
        elif pieces[place + 1].startswith("\0"):
            pieces[place + 1] = pieces[place + 1][1:]
            pieces[place] = _link(piece.strip("`"), here)
    return "".join(pieces)


def _escaped(found: re.Match[str]) -> str:
    return "".join(f"\\{character}" for character in found[0])


def _link(name: str, here: str | None) -> str:
    """An operator's name, or else a function's, leading to its section; any other as it is."""
    if name not in CATALOGUE:
        return _function_link(name, here) if name in functional.__all__ else f"`{name}`"
    family = CATALOGUE[name].family
    page = "" if family == here else f"{family}.md"
    return f"[`{name}`]({page}#{name})"


def _function_link(name: str, here: str | None = None) -> str:
    """The name of a function of ``functional``, leading to its section."""
    page, shown = ("", name) if here == FUNCTIONAL else (f"{FUNCTIONAL}.md", f"functional.{name}")
    return f"[`{shown}`]({page}#{name})"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _title(family: str) -> str:
    return family.replace("_", " ").capitalize()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    main()
