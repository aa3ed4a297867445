"""Provides another project's modules to a package that imports them while it loads.

If that project is installed, its own modules are used; names that its release lacks are added to
them while the package loads. If it is not installed, stand-in modules of this package are
importable under its names while the package loads, and removed afterwards, so that no other code
finds a project that is not installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Final

__all__ = ["importable", "installed", "lacking", "names_added", "tree"]

_OURS: Final = __name__.partition(".")[0]
_STANDS_FOR: Final[dict[str, str]] = {}
"""The project that a stand-in module has stood for, by the stand-in's own name."""


def installed(root: str) -> bool:
    """Whether a project of that name can be imported; stand-ins do not count."""
    module = sys.modules.get(root)
    if module is not None:
        return module.__spec__ is not None
    return importlib.util.find_spec(root) is not None


@contextlib.contextmanager
def names_added(module: ModuleType, ours: ModuleType, names: Iterable[str]) -> Iterator[None]:
    """Within the block ``module`` has these names from ``ours``, unless it has them itself."""
    missing = [name for name in names if not hasattr(module, name)]
    for name in missing:
        setattr(module, name, getattr(ours, name))
    try:
        yield
    finally:
        for name in missing:
            delattr(module, name)


def tree(modules: Mapping[str, ModuleType], project: str) -> dict[str, ModuleType]:
    """The modules and their parent packages, each set as an attribute of its parent."""
    made: dict[str, ModuleType] = {}
    for name in modules:
        for cut in (at for at, letter in enumerate(name) if letter == "."):
            above = name[:cut]
            if above not in modules and above not in made:
                made[above] = ModuleType(above, f"Stands for {project} while a package loads.")
    made.update(modules)
    for name, module in made.items():
        if any(other.startswith(f"{name}.") for other in made) and not hasattr(module, "__path__"):
            module.__path__ = []  # a package: a missing submodule raises ModuleNotFoundError
        above, _, own = name.rpartition(".")
        if above:
            setattr(made[above], own, module)
    return made


@contextlib.contextmanager
def importable(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Within the block, and only there, these modules are importable under their names."""
    before = {name: sys.modules.get(name) for name in modules}
    for name, served in modules.items():  # the project's own modules may be among them
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
    """The project whose stand-in lacks what could not be imported; None for other errors."""
    name = (error.name or "") if isinstance(error, ImportError) else ""
    root = name.partition(".")[0]
    project = _STANDS_FOR.get(name, root if root in _STANDS_FOR.values() else "")
    return project if project and not installed(project) else None
