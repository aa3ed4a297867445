"""A tuning file: its model, and how it is read, merged and written.

Separate from ``lookup.py`` because importing it loads pydantic and YAML.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    PlainValidator,
    PositiveFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError
from yaml.constructor import ConstructorError

from transformer_engine_fl.backends import flagos
from transformer_engine_fl.backends._files import replaced
from transformer_engine_fl.backends.flagos.tuning.choice import CHOICES, Choice, Key
from transformer_engine_fl.core.errors import ConfigurationError, suggestion

__all__ = [
    "Entry",
    "TuningFile",
    "check_names",
    "load_families",
    "made",
    "merged",
    "present",
    "problem",
    "read",
    "unknown_names",
    "values",
    "write",
]

T = TypeVar("T")
Location = tuple[int | str, ...]

_STRICT = ConfigDict(strict=True)
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def _number(value: Any) -> bool | int | float:
    if isinstance(value, bool | int | float):
        return value
    raise PydanticCustomError("number", "input should be a number or a boolean")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Entry(_Strict):
    """The value for one key.

    Attributes:
        key: the choice's key, by field.
        value: the value's fields.
        ms: the time of the call with this value.
        heuristic_ms: the time of the call with the heuristic's value.
        call: the call that was measured.
        measured_on: the device and the versions.
    """

    key: dict[StrictStr, StrictInt]
    value: dict[StrictStr, Annotated[bool | int | float, PlainValidator(_number)]]
    ms: PositiveFloat | None = None
    heuristic_ms: PositiveFloat | None = None
    call: StrictStr | None = None
    measured_on: StrictStr | None = None


class TuningFile(_Strict):
    """A whole file.

    Attributes:
        format: the version of the file format.
        device: the name of the only device that it is for; None if it is for all.
        choices: measured entries, by the choice's name.
    """

    format: Literal[1] = 1
    device: StrictStr | None = None
    choices: dict[StrictStr, list[Entry]] = {}


# ----------------------------------------------------------------------------- reading


class _Loader(yaml.SafeLoader):
    """Reports line and key of what PyYAML cannot convert, and refuses a duplicate key."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._keys: dict[yaml.Node, str] = {}

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here rather than in construct_mapping, because a merged key (<<) may be given again.
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, value in node.value:
            line, name = key.start_mark.line + 1, str(key.value)
            self._keys[value] = f"{name}: "
            if name in lines:
                said = f"{name}: duplicate key, first in line {lines[name]}"
                raise ConstructorError(None, None, said, key.start_mark)
            lines[name] = line
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int) and value.bit_length() > 64:  # Python may refuse to print it
                raise OverflowError
            return value
        except (ValueError, LookupError, ArithmeticError, AttributeError, TypeError):
            said = f"{node.value!r} is not a valid {node.tag.rpartition(':')[2]}"
            key = self._keys.get(node, "")
            raise ConstructorError(None, None, f"{key}{said}", node.start_mark) from None


def read(path: Path) -> TuningFile:
    """Read a file.

    Raises:
        ConfigurationError: the file cannot be read, is no YAML, or has an unknown key, a duplicate
            key or a value of the wrong type; names the file and the line.
    """
    text = _text(path)
    try:
        content = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        said = getattr(error, "problem", None) or str(error)
        raise ConfigurationError(f"{where}: invalid YAML: {said}") from None
    try:
        return TuningFile.model_validate({} if content is None else content)
    except ValidationError as error:
        raise _wrong(path, error, ()) from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8
        raise ConfigurationError(f"{path}: cannot be read: {error}") from None


def load_families() -> None:
    """Import every family of the set, so that all choices are registered.

    Raises:
        ImportError: Triton is not installed.
    """
    for module in pkgutil.iter_modules(flagos.__path__, f"{flagos.__name__}."):
        if not module.ispkg and not module.name.rpartition(".")[2].startswith("_"):
            importlib.import_module(module.name)


def unknown_names(content: TuningFile, path: Path) -> Iterator[ConfigurationError]:
    """An error for each name that is no choice of the loaded families."""
    for name in content.choices:
        if name not in CHOICES:
            message = f"unknown choice{suggestion(name, CHOICES)}"
            yield problem(path, ("choices", name), message)


def check_names(content: TuningFile, path: Path) -> None:
    """Check that each name is a choice's; loads the families if that is needed to tell.

    Raises:
        ConfigurationError: a name is no choice's; names the file and the line.
    """
    if not CHOICES.keys() >= content.choices.keys():
        try:
            load_families()
        except ImportError:  # of a broken family: its choices are unknown
            return
        for error in unknown_names(content, path):
            raise error


def values(content: TuningFile, choice: Choice[T], path: Path) -> dict[Key, T]:
    """A file's values for a choice, by key.

    Raises:
        ConfigurationError: a key or a value does not fit the choice; names file and line.
    """
    found: dict[Key, T] = {}
    for place, entry in enumerate(content.choices.get(choice.name, ())):
        where: Location = ("choices", choice.name, place)
        key = _key(choice, entry, path, (*where, "key"))
        if key in found:
            raise problem(path, (*where, "key"), f"duplicate key {entry.key}")
        try:
            found[key] = made(choice, entry.value)
        except ValidationError as error:
            raise _wrong(path, error, (*where, "value"), choice.value) from None
        except ValueError as error:
            raise problem(path, (*where, "value"), str(error)) from None
    return found


def _key(choice: Choice[Any], entry: Entry, path: Path, where: Location) -> Key:
    for name in entry.key:
        if name not in choice.key:
            hint = suggestion(name, choice.key)
            message = f"unknown field; the key has: {', '.join(choice.key)}{hint}"
            raise problem(path, (*where, name), message)
    for name in choice.key:
        if name not in entry.key:
            raise problem(path, where, f"{name!r} is missing")
        number = entry.key[name]
        rounded = choice.rounded(name, number)
        if number != rounded:
            raise problem(path, (*where, name), f"{number} rounds to {rounded}; write {rounded}")
    return tuple(entry.key[name] for name in choice.key)


def made(choice: Choice[T], fields: Mapping[str, Any]) -> T:
    """The choice's value with these fields.

    Raises:
        ValueError: the fields do not fit, or a kernel cannot run with them.
    """
    if not isinstance(fields, Mapping):
        raise ValueError(f"{fields!r} is not a mapping of fields")
    value: T = TypeAdapter(choice.value, config=_STRICT).validate_python(dict(fields))
    reason = choice.wrong(value)
    if reason is not None:
        raise ValueError(reason)
    return value


# ------------------------------------------------------------------------------ errors


def _wrong(
    path: Path, error: ValidationError, within: Location, kind: type[Any] | None = None
) -> ConfigurationError:
    """The first error that pydantic reports, in the wording of this project."""
    found = error.errors()
    # An unknown key comes first: a missing one may be there under that misspelt name.
    first = next((it for it in found if it["type"] in _UNKNOWN), found[0])
    where = (*within, *first["loc"])
    model = Entry if "choices" in where else TuningFile
    if first["type"] in _UNKNOWN:
        name = str(first["loc"][-1])
        known = tuple(getattr(kind, "_fields", None) or model.model_fields)
        message = f"unknown key; valid: {', '.join(known)}{suggestion(name, known)}"
    elif first["type"] in ("missing", "missing_argument"):
        message = "is missing"
    elif first["type"] == "model_type":
        known = tuple(model.model_fields)
        message = f"must be a mapping, valid keys: {', '.join(known)}; got {first['input']!r}"
    else:
        message = f"{first['msg'].lower()}, got {first['input']!r}"
    return problem(path, where, message)


def problem(path: Path, where: Location, message: str) -> ConfigurationError:
    """An error at a place in a file, with its line."""
    line = _line(path, where)
    place = f"{path}:{line}" if line else str(path)
    return ConfigurationError(f"{place}: {'.'.join(map(str, where)) or 'the file'}: {message}")


def _line(path: Path, where: Location) -> int | None:
    """The line of the innermost part of ``where`` that exists."""
    try:
        node = yaml.compose(_text(path), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ConfigurationError):
        return None
    if node is None:
        return None
    line: int = node.start_mark.line
    for part in where:
        if isinstance(node, yaml.MappingNode):
            pairs = {it.value: (it, inner) for it, inner in node.value}
            if str(part) not in pairs:
                break
            name, node = pairs[str(part)]
            line = name.start_mark.line
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line
        else:
            break
    return line + 1


# ----------------------------------------------------------------------------- writing


def merged(old: TuningFile, new: TuningFile) -> TuningFile:
    """Both; the new file's entry replaces the old one's for the same key of a choice."""
    choices = dict(old.choices)
    for name, entries in new.choices.items():
        replaced = [entry.key for entry in entries]
        kept = [entry for entry in choices.get(name, ()) if entry.key not in replaced]
        choices[name] = sorted([*kept, *entries], key=lambda entry: [*entry.key.values()])
    return TuningFile(device=new.device or old.device, choices=dict(sorted(choices.items())))


def present(path: Path, device: str | None) -> TuningFile:
    """The existing content to merge into.

    Raises:
        ConfigurationError: it is broken, no regular file, for another device, or for every device.
    """
    if path.exists() and not path.is_file():  # a new file would replace it
        raise ConfigurationError(f"{path}: is not a regular file")
    found = read(path) if path.exists() else TuningFile()
    if found.device not in (None, device):
        message = f"the file is for {found.device!r}, not for {device!r}; name another file"
        raise problem(path, ("device",), message)
    if found.choices and found.device is None and device not in (None, path.stem):
        message = f"the file is for every device, not for {device!r}; name another file"
        raise problem(path, ("choices",), message)
    return found


def write(path: Path, content: TuningFile) -> None:
    """Merge into a file, which is replaced in one step; concurrent writers wait for each other.

    A symbolic link stays one, and the file keeps its mode.

    Raises:
        ConfigurationError: the existing file is broken or for another device, or the path cannot
            be written.
    """
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            plain = merged(present(path, content.device), content).model_dump(exclude_none=True)
            text = yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=100)
            with replaced(target) as file:
                file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error}") from None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock out other writers by a lock file: a lock on the file itself goes when it is replaced."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):  # no locks here, or another user's file
            import fcntl

            lock = stack.enter_context(path.with_name(f".{path.name}.lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
