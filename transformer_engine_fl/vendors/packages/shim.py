"""Modules of another project, served to a package that imports them while it loads.

Where that project is installed it serves them itself; only what a release of it does not have
is lent to it for that long. Where it is not, modules of ours stand under its names, and are
gone when the package has loaded: nobody else finds a project that is not there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Final

__all__ = ["installed", "lacking", "lent", "standing_in", "tree"]

_OURS: Final = __name__.partition(".")[0]
_STANDS_FOR: Final[dict[str, str]] = {}
"""Which project a module of ours has stood for, by the module's own name."""


def installed(root: str) -> bool:
    """Whether there is a project of that name to import; what stands for it does not count."""
    module = sys.modules.get(root)
    if module is not None:
        return module.__spec__ is not None
    return importlib.util.find_spec(root) is not None


@contextlib.contextmanager
def lent(module: ModuleType, ours: ModuleType, names: Iterable[str]) -> Iterator[None]:
    """Within the block ``module`` has these names of ``ours``, where it has none of its own."""
    missing = [name for name in names if not hasattr(module, name)]
    for name in missing:
        setattr(module, name, getattr(ours, name))
    try:
        yield
    finally:
        for name in missing:
            delattr(module, name)


def tree(modules: Mapping[str, ModuleType], whose: str) -> dict[str, ModuleType]:
    """The modules with the packages above them, each an attribute of the one above it."""
    made: dict[str, ModuleType] = {}
    for name in modules:
        for cut in (at for at, letter in enumerate(name) if letter == "."):
            above = name[:cut]
            if above not in modules and above not in made:
                made[above] = ModuleType(above, f"Stands for {whose} while a package loads.")
    made.update(modules)
    for name, module in made.items():
        if any(other.startswith(f"{name}.") for other in made) and not hasattr(module, "__path__"):
            module.__path__ = []  # a package: what it lacks is a module that is not found
        above, _, own = name.rpartition(".")
        if above:
            setattr(made[above], own, module)
    return made


@contextlib.contextmanager
def standing_in(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Within the block these modules are imported under their names, and not beyond it."""
    before = {name: sys.modules.get(name) for name in modules}
    for name, served in modules.items():  # one of the project itself may be among them
        if served.__name__ == name or served.__name__.startswith(f"{_OURS}."):
            _STANDS_FOR[served.__name__] = name.partition(".")[0]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def lacking(error: BaseException) -> str | None:
    """The project whose stand-in has not what could not be imported; None of another error."""
    name = (error.name or "") if isinstance(error, ImportError) else ""
    root = name.partition(".")[0]
    project = _STANDS_FOR.get(name, root if root in _STANDS_FOR.values() else "")
    return project if project and not installed(project) else None
