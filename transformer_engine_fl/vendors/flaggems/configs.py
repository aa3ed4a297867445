"""``tune_configs.yaml``: its format, and the configurations that it describes.

The file has a list of entries for each operator. A plain entry is one configuration: ``META`` and
launch parameters. An entry with ``gen: true`` generates several: its ``param_map`` gives for each
number either the number itself or the key of a list in the entry.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from transformer_engine_fl.core.errors import PluginError, suggestion

__all__ = ["FILE", "LAUNCH", "Config", "read"]

FILE: Final = "tune_configs.yaml"

LAUNCH: Final = {"num_warps": 4, "num_stages": 2, "num_ctas": 1, "num_ldmatrixes": 0}
"""The launch parameters besides META, and their defaults."""

_PLAIN: Final = ("META", *LAUNCH, "multibuffer")
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NAME: Final = "tag:yaml.org,2002:str"
_SCALARS: Final = (bool, int, float, str)


class Config(NamedTuple):
    """One configuration of a kernel.

    Attributes:
        meta: the kernel's constants.
        launch: the launch parameters that are given.
    """

    meta: Mapping[str, Any]
    launch: Mapping[str, int]


def read(path: Path, owner: str) -> dict[str, list[Config]]:
    """The configurations of each operator.

    Args:
        path: the file.
        owner: the folder, for messages.

    Raises:
        PluginError: an unknown key, or a value of the wrong type; names the folder, the
            file, the line and the key.
    """
    return _Reader(path, owner).file()


class _Reader:
    """Reads one file; its errors name the line and the key."""

    def __init__(self, path: Path, owner: str) -> None:
        self._path = path
        self._owner = owner

    def file(self) -> dict[str, list[Config]]:
        try:
            root = yaml.compose(self._path.read_text(encoding="utf-8"), Loader=_LOADER)
        except (OSError, ValueError) as error:  # ValueError: no UTF-8
            raise PluginError(f"{self._owner}: {self._path}: cannot be read: {error}") from None
        except (yaml.YAMLError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark else ""
            said = getattr(error, "problem", None) or str(error)
            raise PluginError(f"{self._owner}: {self._path}{line}: invalid YAML: {said}") from None
        if root is None:
            return {}
        found = {}
        for name, node in self._pairs(root, ()):
            entries = self._items(node, (name,))
            found[name] = [
                config
                for at, entry in enumerate(entries)
                for config in self._entry(entry, (name, at))
            ]
        return found

    # ------------------------------------------------------------------------ entries

    def _entry(self, node: yaml.Node, where: tuple[Any, ...]) -> Iterator[Config]:
        pairs = dict(self._pairs(node, where))
        if "gen" in pairs:
            self._is(pairs["gen"], bool, (*where, "gen"))
            return self._generated(pairs, node, where)
        for key in pairs:
            if key not in _PLAIN:
                self._unknown(pairs, key, where, _PLAIN)
        if "META" not in pairs:
            raise self._problem(node, where, "META is missing")
        meta = {
            key: self._is(value, _SCALARS, (*where, "META", key))
            for key, value in self._pairs(pairs["META"], (*where, "META"))
        }
        if "multibuffer" in pairs:
            self._is(pairs["multibuffer"], bool, (*where, "multibuffer"))
        launch = {key: self._count(pairs[key], (*where, key)) for key in LAUNCH if key in pairs}
        return iter([Config(meta, launch)])

    def _generated(
        self, pairs: Mapping[str, yaml.Node], node: yaml.Node, where: tuple[Any, ...]
    ) -> Iterator[Config]:
        if "param_map" not in pairs:
            raise self._problem(node, where, "param_map is missing")
        sources: dict[str, list[Any]] = {}
        fixed: dict[str, Any] = {}
        used: set[str] = set()
        of_meta = (*where, "param_map", "META")
        for key, value in self._pairs(pairs["param_map"], (*where, "param_map")):
            if key == "META":
                for name, source in self._meta_sources(value, of_meta):
                    self._source(
                        f"META.{name}", source, pairs, (*of_meta, name), sources, fixed, used
                    )
            elif key in LAUNCH:
                self._source(key, value, pairs, (*where, "param_map", key), sources, fixed, used)
            else:
                known = ("META", *LAUNCH)
                raise self._problem(value, (*where, "param_map", key), _unknown(key, known))
        valid = sorted({"gen", "param_map", *used, *LAUNCH})
        for key in pairs:
            if key not in valid:
                self._unknown(pairs, key, where, valid)
        names = list(sources)
        return (
            _config(fixed | dict(zip(names, values, strict=True)))
            for values in itertools.product(*sources.values())
        )

    def _meta_sources(
        self, node: yaml.Node, where: tuple[Any, ...]
    ) -> Iterator[tuple[str, yaml.Node]]:
        """(constant, its source in param_map); "" stands for a list of complete METAs."""
        if isinstance(node, yaml.ScalarNode):
            return iter([("", node)])
        return self._pairs(node, where)

    def _source(
        self,
        name: str,
        node: yaml.Node,
        pairs: Mapping[str, yaml.Node],
        where: tuple[Any, ...],
        sources: dict[str, list[Any]],
        fixed: dict[str, Any],
        used: set[str],
    ) -> None:
        """Record a number's source: the values of the key that it names, or the number itself."""
        value = self._is(node, (int, str) if name in LAUNCH else _SCALARS, where)
        if not isinstance(value, str):
            fixed[name] = value
            return
        if value not in pairs:
            raise self._problem(node, where, f"{value!r} is not a key of the entry")
        used.add(value)
        of_list = (*where[:2], value)
        kinds: Any = dict if name == "META." else int if name in LAUNCH else _SCALARS
        sources[name] = [
            self._is(it, kinds, (*of_list, at))
            for at, it in enumerate(self._items(pairs[value], of_list))
        ]

    # -------------------------------------------------------------------------- nodes

    def _pairs(self, node: yaml.Node, where: tuple[Any, ...]) -> Iterator[tuple[str, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            raise self._problem(node, where, f"must be a mapping, got {self._said(node)}")
        seen = set()
        for key, value in node.value:
            if key.tag != _NAME:
                raise self._problem(key, (*where, key.value), f"{key.value!r} is not a name")
            if key.value in seen:
                raise self._problem(key, (*where, key.value), "duplicate key")
            seen.add(key.value)
            yield key.value, value

    def _items(self, node: yaml.Node, where: tuple[Any, ...]) -> Sequence[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode):
            raise self._problem(node, where, f"must be a list, got {self._said(node)}")
        return node.value  # type: ignore[no-any-return]

    def _is(self, node: yaml.Node, kinds: Any, where: tuple[Any, ...]) -> Any:
        value = _value(node)
        wanted = kinds if isinstance(kinds, tuple) else (kinds,)
        if type(value) not in wanted:
            names = " or ".join(kind.__name__ for kind in wanted)
            raise self._problem(node, where, f"must be {names}, got {self._said(node)}")
        return value

    def _count(self, node: yaml.Node, where: tuple[Any, ...]) -> int:
        value: int = self._is(node, int, where)
        if value < 0:
            raise self._problem(node, where, f"must not be negative, got {value}")
        return value

    def _said(self, node: yaml.Node) -> str:
        value = _value(node)
        return f"{type(value).__name__} {value!r}"

    def _unknown(
        self,
        pairs: Mapping[str, yaml.Node],
        key: str,
        where: tuple[Any, ...],
        known: Sequence[str],
    ) -> None:
        raise self._problem(pairs[key], (*where, key), _unknown(key, known))

    def _problem(self, node: yaml.Node, where: tuple[Any, ...], said: str) -> PluginError:
        key = ".".join(str(part) for part in where)
        at = f"{self._path}:{node.start_mark.line + 1}"
        return PluginError(f"{self._owner}: {at}: {key + ': ' if key else ''}{said}")


def _unknown(key: str, known: Sequence[str]) -> str:
    return f"unknown key; valid: {', '.join(known)}{suggestion(key, known)}"


def _value(node: yaml.Node) -> Any:
    return yaml.constructor.SafeConstructor().construct_object(node, deep=True)


def _config(values: Mapping[str, Any]) -> Config:
    meta: dict[str, Any] = {}
    for name, value in values.items():
        if name == "META.":
            meta |= value
        elif name.startswith("META."):
            meta[name.removeprefix("META.")] = value
    return Config(meta, {key: int(values[key]) for key in LAUNCH if key in values})
