"""``te-fl new-plugin NAME``: a package for a vendor, with an entry point and a passing test.

``template/common`` and a folder for each style beside it hold the files. In their texts and
paths ``@module@``, ``@vendor@``, ``@Vendor@`` and ``@impl_id@`` stand for the names.
"""

from __future__ import annotations

import enum
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from transformer_engine_fl.cli._output import console
from transformer_engine_fl.core.errors import ConfigurationError

__all__ = ["Style", "new_plugin"]

NAME = r"[A-Za-z][A-Za-z0-9]*([_-][A-Za-z0-9]+)*"
KINDS = ("flagos", "reference", "vendor")


class Style(enum.StrEnum):
    """How a package declares its operators."""

    SET = "set"
    """``register(registry)`` with an OpImpl for each operator."""
    LIGER = "liger"
    """As Liger-Kernel's guide for hardware backends describes."""
    FLAGGEMS = "flaggems"
    """As FlagGems' guide for vendors describes."""


PREFIX = {Style.SET: "vendor", Style.LIGER: "liger", Style.FLAGGEMS: "flaggems"}


def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The vendor: acme.")],
    style: Annotated[
        Style,
        typer.Option(
            help="The interface by which it declares its operators: this package's own, or that "
            "of a backend for Liger-Kernel or FlagGems."
        ),
    ] = Style.SET,
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where to create the package's folder.")
    ] = Path(),
) -> None:
    """Write a vendor's package, with a test that passes.

    The package is the folder te_fl_NAME: kernels, entry point, README and test. After
    pip install -e te_fl_NAME, te-fl verify shows that it keeps the contracts.
    """
    vendor = _checked(name)
    module = f"te_fl_{vendor.replace('-', '_')}"
    folder = output / module
    names = {
        "module": module,
        "vendor": vendor,
        "Vendor": name[0].upper() + name[1:],
        "impl_id": f"{PREFIX[style]}.{vendor}",
    }
    _write(folder, dict(_files(style, names)))
    out = console()
    for path in sorted(it for it in folder.rglob("*") if it.is_file()):
        out.print(f"written: {path}", soft_wrap=True)
    commands = f"\npip install -e {shlex.quote(str(folder))}\nte-fl verify {names['impl_id']}"
    out.print(commands, soft_wrap=True)


def _checked(name: str) -> str:
    """The vendor's name, in lower case.

    Raises:
        ConfigurationError: it is not a valid name, or is taken.
    """
    if not re.fullmatch(NAME, name):
        raise ConfigurationError(
            f"new-plugin: {name!r} is not a valid vendor name: a letter, then letters and digits, "
            "with single '-' or '_' between them"
        )
    if name.lower() in KINDS:
        raise ConfigurationError(f"new-plugin: {name!r} is a kind of implementation, not a vendor")
    from transformer_engine_fl.core.manager import OpManager
    from transformer_engine_fl.core.registry import OpRegistry

    manager = OpManager(OpRegistry(), plugins=False)
    manager.ensure_initialized()
    operators = manager.registry.snapshot().operators.values()
    for impl in (entry.impl for of_one in operators for entry in of_one):
        if name.lower() in ((impl.vendor or "").lower(), impl.impl_id.removeprefix("vendor.")):
            raise ConfigurationError(
                f"new-plugin: {name!r} is taken: transformer_engine_fl itself has "
                f"{impl.impl_id!r} of vendor {impl.vendor!r}"
            )
    return name.lower()


def _files(style: Style, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(path, text) of each file of the package."""
    for part in ("common", style.value):
        root = files(__package__) / "template" / part
        for path, file in _walked(root):
            yield (
                _filled(path.removesuffix(".in"), names),
                _filled(file.read_text(encoding="utf-8"), names),
            )


def _walked(folder: Traversable, above: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        path = f"{above}{entry.name}"
        if entry.is_dir():
            yield from _walked(entry, f"{path}/")
        elif entry.name.endswith(".in"):
            yield path, entry


def _filled(text: str, names: dict[str, str]) -> str:
    return re.sub(r"@(module|vendor|Vendor|impl_id)@", lambda found: names[found[1]], text)


def _write(folder: Path, texts: dict[str, str]) -> None:
    """Make the folder with all its files, or not at all.

    Raises:
        ConfigurationError: it exists already, or cannot be made.
    """
    if folder.exists():
        raise ConfigurationError(f"new-plugin: {folder} already exists")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-plugin-") as made:
            for path, text in texts.items():
                file = Path(made) / folder.name / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            shutil.move(Path(made) / folder.name, folder)
    except OSError as error:
        raise ConfigurationError(f"--output: {error}") from error
