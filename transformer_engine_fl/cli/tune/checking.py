"""What is wrong in tuning files, for ``te-fl tune --check`` and ``te-fl doctor``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_engine_fl.backends.flagos.tuning import CHOICES, lookup
from transformer_engine_fl.core.errors import ConfigurationError, suggestion

if TYPE_CHECKING:
    from transformer_engine_fl.backends.flagos.tuning.files import TuningFile

__all__ = ["Checked", "examined"]


@dataclass(frozen=True)
class Checked:
    """A file that was checked.

    Attributes:
        path: where it is.
        named: TE_FL_TUNING_PATH names it, so that calls raise an error for its problems.
        entries: how many entries it has.
        problems: those of the whole file, or one of each choice; or that no call reads it.
    """

    path: Path
    named: bool
    entries: int
    problems: list[str]


def examined(output: Path | None = None) -> tuple[list[Checked], list[str]]:
    """Every file that calls would read, or those of ``output``; and problems of no file.

    Raises:
        ConfigurationError: ``output`` does not exist.
        TeFlError: Triton is not installed.
    """
    from transformer_engine_fl.cli.tune import measuring

    measuring.load_families()
    if output is None:
        roots = [folder for folder, _ in lookup.shared_folders()]
        sources = lookup.every_file()
    else:
        roots, sources = [output], [lookup.Source(path) for path in _files(output)]
    found = [_checked(source, roots) for source in sources]
    if output is None:
        roots += [folder for vendor in lookup.VENDORS.values() for folder in vendor.folders]
        for file in found:
            if not file.problems and any(it in file.path.parents for it in roots):
                file.problems.extend(_unread(file.path))
    return found, list(_unknown_heuristics())


def _files(output: Path) -> list[Path]:
    if not output.exists():
        raise ConfigurationError(f"--output: no such file or folder: {output}")
    if not output.is_dir():
        return [output]
    return [it for it in sorted(output.rglob("*")) if it.suffix in lookup.SUFFIXES]


def _checked(source: lookup.Source, roots: Sequence[Path]) -> Checked:
    from transformer_engine_fl.backends.flagos.tuning import files

    path = source.path
    try:
        content = files.read(path)
    except ConfigurationError as error:
        return Checked(path, source.named, 0, [str(error)])
    problems = [*_of_place(content, path, roots), *_of_choices(content, path)]
    return Checked(path, source.named, sum(map(len, content.choices.values())), problems)


def _of_place(content: TuningFile, path: Path, roots: Sequence[Path]) -> Iterator[str]:
    """What is wrong with the names of the file and of its folder."""
    vendor = path.parent.name
    if path.parent.parent in roots and path.parent not in roots and vendor not in lookup.VENDORS:
        hint = suggestion(vendor, lookup.VENDORS)
        yield f"{path}: its folder names the unknown vendor {vendor!r}{hint}"
    meant = None if content.device is None else _respelt(content.device)
    if meant is not None:
        yield f"{path}: device: {content.device!r} is no device's name; did you mean {meant!r}?"
    elif content.device is not None and path.stem not in (content.device, "default"):
        named_alike = lookup.vendor_of(path.stem)
        if named_alike is not None:
            yield f"{path}: its name says {path.stem!r}, but it is for {content.device!r}"


def _respelt(device: str) -> str | None:
    """The name that a device of a known vendor has, if ``device`` is spelt almost like it."""
    if lookup.vendor_of(device) is not None:
        return None
    bare = _letters(device)
    for pattern in (it for vendor in lookup.VENDORS.values() for it in vendor.devices):
        stem, _, end = pattern.partition("*")
        number = bare.removeprefix(_letters(stem))
        if stem and not end and bare != number and re.fullmatch(r"\d+[a-z]?", number):
            return stem + number
    return None


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _unread(path: Path) -> Iterator[str]:
    """A problem if no call reads a file, because of its name or its folder's."""
    names = lookup.names_read(path.parent)
    if path != lookup.stated_path() and not any(fnmatchcase(path.name, it) for it in names):
        read = f"read there: {', '.join(names)}" if names else "nothing is read there"
        yield f"{path}: is never read; {read}"


def _of_choices(content: TuningFile, path: Path) -> Iterator[str]:
    from transformer_engine_fl.backends.flagos.tuning import files

    yield from map(str, files.unknown_names(content, path))
    for name in filter(CHOICES.__contains__, content.choices):
        try:
            files.values(content, CHOICES[name], path)
        except ConfigurationError as error:
            yield str(error)


def _unknown_heuristics() -> Iterator[str]:
    for vendor in lookup.VENDORS.values():
        for name in vendor.heuristics:
            if name not in CHOICES:
                hint = suggestion(name, CHOICES)
                yield f"vendor {vendor.name}: heuristic for the unknown choice {name!r}{hint}"
