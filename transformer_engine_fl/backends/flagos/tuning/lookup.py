"""Where a value comes from: files for a device, for its vendor, for all, and vendors' rules.

At each of the three levels the file of ``TE_FL_TUNING_PATH`` comes first, then the user's own, then
those of vendors' packages, then those in this folder. A vendor's heuristics are consulted after its
files, before the files for all devices. A broken file counts as absent, with one warning; if the
user named it, it is an error.

The contents of a file are defined in ``files.py``, which is imported only if a file exists.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from transformer_engine_fl.core.blame import caused_by_caller, error_text
from transformer_engine_fl.core.errors import ConfigurationError, RegistrationError
from transformer_engine_fl.core.late import load_attribute
from transformer_engine_fl.core.locks import LOADING
from transformer_engine_fl.core.log import logger
from transformer_engine_fl.core.policy import get_environment
from transformer_engine_fl.core.types import NAME

if TYPE_CHECKING:
    import torch

    from transformer_engine_fl.backends.flagos.tuning.choice import Choice, Key
    from transformer_engine_fl.backends.flagos.tuning.files import TuningFile

__all__ = [
    "SUFFIXES",
    "VENDORS",
    "Source",
    "by_rule",
    "every_file",
    "forget",
    "name_of",
    "names_read",
    "register_tuning",
    "shared_folders",
    "user_folder",
    "value",
    "vendor_of",
]

T = TypeVar("T")
Heuristic = Callable[..., Mapping[str, Any] | None]

VARIABLE = "TE_FL_TUNING_PATH"
SUFFIXES = (".yaml", ".yml")
_FILES = "transformer_engine_fl.backends.flagos.tuning.files"
_FACTS = "transformer_engine_fl.ops._tensors:facts_of"
_PACKAGED = Path(__file__).parent


class Source(NamedTuple):
    """A place where a file may be.

    Attributes:
        path: the file; it need not exist.
        named: whether the user named it, so that a mistake in it is an error.
    """

    path: Path
    named: bool = False


@dataclass(slots=True)
class Vendor:
    """What was registered for a vendor.

    Attributes:
        name: in lower case.
        devices: patterns of its devices' names.
        folders: folders of tuning files, in order of precedence.
        heuristics: by the name of the choice.
        is_here: whether this machine's device is the vendor's, where several makers' devices
            share a name; called once.
    """

    name: str
    devices: list[str] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    heuristics: dict[str, Heuristic] = field(default_factory=dict)
    is_here: Callable[[], bool] | None = None


VENDORS: dict[str, Vendor] = {}
"""By name, in order of registration."""

_read: dict[Path, TuningFile | None] = {}
_sections: dict[tuple[Path, str], Mapping[Any, Any]] = {}
_complained: set[object] = set()


def register_tuning(
    vendor: str,
    *,
    devices: Sequence[str] = (),
    folder: str | Path | None = None,
    heuristics: Mapping[str, Heuristic] = MappingProxyType({}),
    is_here: Callable[[], bool] | None = None,
) -> None:
    """Register a vendor's tuning, with or without kernels of its own.

    Meant for a plugin's ``register``; calling it again with the same arguments changes nothing.

    Args:
        vendor: the vendor's name; compared without case.
        devices: names of its devices: an architecture (``"sm_90"``, ``"gfx942"``), or the torch
            device type if a device has no such name; ``*`` stands for anything. If several
            vendors match, the one registered last wins. Devices of earlier calls for the vendor
            stay; the first call must name some.
        folder: a folder of YAML files named after those devices (``sm_90.yaml``), and
            ``default.yaml`` for what they leave open.
        heuristics: by the name of a choice, ``heuristic(device, **key)`` for what was not
            measured: ``device`` is the name as above, the key that of the choice. It
            returns the value's fields by name, or None to leave it to the general rule.
        is_here: for names shared by devices of several makers: whether this machine's device is
            the vendor's. Called once, when such a device is first looked up.

    Raises:
        RegistrationError: a name or a folder is invalid, the choice has another heuristic
            already, or the vendor has no devices, so that the registration would have no effect.
    """
    name, where = vendor.lower(), f"register_tuning({vendor!r})"
    if not re.fullmatch(NAME, name):
        raise RegistrationError(f"{where}: the vendor's name is invalid")
    if isinstance(devices, str):
        raise RegistrationError(f"{where}: devices must be a list of patterns, got {devices!r}")
    for pattern in (devices := tuple(devices)):
        if not isinstance(pattern, str):
            raise RegistrationError(f"{where}: {pattern!r} is not a device-name pattern")
    if folder is not None and not Path(folder).is_dir():
        raise RegistrationError(f"{where}: {folder} is not a folder")
    with LOADING:
        known = VENDORS.get(name) or Vendor(name)
        if not (devices or known.devices):
            raise RegistrationError(
                f"{where}: needs devices, without which it is never used; name architectures or "
                "torch device types: devices=['sm_90'] or ['npu']; * matches anything"
            )
        for choice, heuristic in heuristics.items():
            other = known.heuristics.get(choice, heuristic)
            if _origin(other) != _origin(heuristic):
                raise RegistrationError(
                    f"{where}: {choice!r} already has a heuristic, {_origin(other)}"
                )
        VENDORS.pop(name, None)
        VENDORS[name] = known
        known.heuristics.update(heuristics)
        known.is_here = is_here if is_here is not None else known.is_here
        known.devices += [it for it in devices if it not in known.devices]
        if folder is not None and Path(folder) not in known.folders:
            known.folders.insert(0, Path(folder))


def _origin(heuristic: Heuristic) -> str:
    """A name that differs between functions, but stays the same when a module is loaded again."""
    module = getattr(heuristic, "__module__", None)
    return f"{module}.{getattr(heuristic, '__qualname__', repr(heuristic))}"


# ---------------------------------------------------------------------------- devices


def name_of(device: torch.device) -> str:
    """The device's name in files: its architecture, or its type if it has none."""
    arch: str | None = load_attribute(_FACTS)(device, None).arch
    return arch or device.type


def vendor_of(name: str) -> Vendor | None:
    """The vendor of the device of that name; None if none is registered for it."""
    for vendor in reversed(VENDORS.values()):
        if any(fnmatchcase(name, pattern) for pattern in vendor.devices) and _is_here(vendor):
            return vendor
    return None


def _is_here(vendor: Vendor) -> bool:
    if vendor.is_here is None:
        return True
    try:
        answer = vendor.is_here()
    except BaseException as error:  # from the vendor's code: the device is not the vendor's
        if caused_by_caller(error):
            raise
        answer = False
        message = f"{vendor.name}'s is_here raised {error_text(error)}: its tuning is skipped"
        _complain((vendor.name, "is_here"), message)
    vendor.is_here = None if answer else _never
    return answer


def _never() -> bool:
    return False


def user_folder() -> Path:
    """Where ``te-fl tune`` keeps what it measures; it need not exist.

    Raises:
        ConfigurationError: the user's home is unknown.
    """
    try:
        root = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    except RuntimeError as error:
        message = f"{error} Set XDG_CONFIG_HOME, or name a folder with {VARIABLE}."
        raise ConfigurationError(message) from None
    return Path(root) / "transformer_engine_fl" / "tuning"


# ------------------------------------------------------------------------------ values


def value(choice: Choice[T], device: torch.device, key: Key) -> T | None:
    """The value measured for a key, or the vendor's rule for it; None if there is neither.

    Raises:
        ConfigurationError: the file that TE_FL_TUNING_PATH names is broken or missing.
    """
    name = name_of(device)
    vendor = vendor_of(name)
    if vendor is not None:
        found = _stated(choice, name, _of_vendor(vendor.name, vendor.folders, name), key)
        if found is None:
            found = _by_rule_of(vendor, choice, name, key)
        if found is not None:
            return found
    return _stated(choice, name, _for_all(), key)


def by_rule(choice: Choice[T], device: torch.device, key: Key) -> T | None:
    """The vendor's rule for a key; None if it has none."""
    name = name_of(device)
    vendor = vendor_of(name)
    return None if vendor is None else _by_rule_of(vendor, choice, name, key)


def stated_path() -> Path | None:
    """The file or folder that TE_FL_TUNING_PATH names; None if the variable is not set.

    Raises:
        ConfigurationError: it names nothing that exists.
    """
    text = get_environment().tuning_path
    if text is None:
        return None
    try:
        path = Path(text).expanduser()
        path.stat()
    except (OSError, ValueError, RuntimeError) as error:  # no such thing, no path, no such user
        message = f"{VARIABLE}: no such file or folder {text!r}: {error}"
        raise ConfigurationError(message) from None
    return path


def shared_folders() -> Iterator[tuple[Path, bool]]:
    """The folders, except this one, with a folder per vendor; and whether the user named each."""
    named = stated_path()
    if named is not None and named.is_dir():
        yield named, True
    with contextlib.suppress(ConfigurationError):  # it may not exist, nor a home
        yield user_folder(), False


def _of_vendor(vendor: str, folders: Sequence[Path], name: str) -> Iterator[Source]:
    """The files for a vendor's device."""
    named = stated_path()
    if named is not None and not named.is_dir():
        yield Source(named, True)
    for level in (name, "default"):
        for folder, is_named in shared_folders():
            yield Source(folder / vendor / f"{level}.yaml", is_named)
        yield from (Source(folder / f"{level}.yaml") for folder in folders)


def _for_all() -> Iterator[Source]:
    """The files for every device."""
    named = stated_path()
    if named is not None and not named.is_dir():
        yield Source(named, True)
    for folder, is_named in shared_folders():
        yield Source(folder / "default.yaml", is_named)
    yield Source(_PACKAGED / "default.yaml")


def every_file() -> list[Source]:
    """Every existing file, whatever device it is for.

    Raises:
        ConfigurationError: TE_FL_TUNING_PATH names nothing that exists.
    """
    found: dict[Path, bool] = {}
    named = stated_path()
    if named is not None and not named.is_dir():
        found[named] = True
    roots = [*shared_folders(), (_PACKAGED, False)]
    roots += [(it, False) for vendor in VENDORS.values() for it in vendor.folders]
    for root, is_named in roots:
        for path in sorted(root.rglob("*")):
            if path.suffix in SUFFIXES:
                found.setdefault(path, is_named)
    return [Source(path, is_named) for path, is_named in found.items()]


def names_read(folder: Path) -> list[str]:
    """The names (* matches anything) of the files in a user's or vendor's folder that calls read.

    Raises:
        ConfigurationError: TE_FL_TUNING_PATH names nothing that exists.
    """
    shared = [it for it, _ in shared_folders()]
    names = ["default"] if folder in shared else []
    for vendor in VENDORS.values():
        if folder in (*(it / vendor.name for it in shared), *vendor.folders):
            names += ["default", *vendor.devices]
    return [f"{name}.yaml" for name in dict.fromkeys(names)]


def _stated(choice: Choice[T], name: str, sources: Iterator[Source], key: Key) -> T | None:
    """The value in the first file that has the key."""
    for source in sources:
        found: T | None = _section(choice, name, source).get(key)
        if found is not None:
            return found
    return None


def _section(choice: Choice[T], name: str, source: Source) -> Mapping[Key, T]:
    """A file's values for a choice, by key; empty if the file is for another device."""
    path = source.path
    with LOADING:
        if path not in _read:
            _read[path] = _whole(source)
        content = _read[path]
        if content is None or content.device not in (None, name):
            return {}
        section = (path, choice.name)
        if section not in _sections:
            values = load_attribute(f"{_FILES}:values")
            read = _or_warning(source, section, lambda: values(content, choice, path))
            _sections[section] = read or {}
        return _sections[section]


def _whole(source: Source) -> TuningFile | None:
    """A file's content, after a check of its choices' names, which may warn."""
    path = source.path
    content = _or_warning(source, path, lambda: _content(path))
    if content is not None and not path.is_relative_to(_PACKAGED):  # whose names are tested
        check = load_attribute(f"{_FILES}:check_names")
        _or_warning(source, (path, "names"), lambda: check(content, path))
    return content


def _content(path: Path) -> TuningFile | None:
    try:
        there = path.exists()
    except OSError as error:  # a parent folder without permission
        raise ConfigurationError(f"{path}: {error}") from None
    if not there:
        return None
    content: TuningFile = load_attribute(f"{_FILES}:read")(path)
    return content


def _or_warning(source: Source, what: object, read: Callable[[], T]) -> T | None:
    """The result of ``read``; None with a warning if it fails, unless the user named the file."""
    try:
        return read()
    except ConfigurationError as error:
        if source.named:
            raise ConfigurationError(f"{VARIABLE}: {error}") from None
        _complain(what, f"{error}; the file is skipped (`te-fl tune --check` checks every file)")
        return None


def _by_rule_of(vendor: Vendor, choice: Choice[T], name: str, key: Key) -> T | None:
    heuristic = vendor.heuristics.get(choice.name)
    if heuristic is None:
        return None
    where = f"the heuristic of {vendor.name} for {choice.name!r}"
    try:
        fields = heuristic(name, **dict(zip(choice.key, key, strict=True)))
        if fields is None:
            return None
        made: T = load_attribute(f"{_FILES}:made")(choice, fields)
        return made
    except BaseException as error:  # a vendor's code; the general rule stands in
        if caused_by_caller(error):
            raise
        _complain((vendor.name, choice.name), f"{where} is skipped: {error_text(error)}")
        return None


def _complain(what: object, message: str) -> None:
    """Warn, once per ``what``."""
    if what not in _complained:
        _complained.add(what)
        logger.warning("%s", message)


def forget() -> None:
    """Forget every file that was read."""
    with LOADING:
        _read.clear()
        _sections.clear()
        _complained.clear()
