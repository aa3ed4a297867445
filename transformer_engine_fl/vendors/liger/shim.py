"""The modules that packages for Liger-Kernel import, while one of them loads.

Where liger-kernel is installed it serves them itself; only what a release no longer has of
the vendors' interface is lent to it for that long. Where it is not, modules of ours stand
under its names, and are gone when the package has loaded: nobody else finds a liger-kernel
that is not there.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

from transformer_engine_fl.core.locks import LOADING

__all__ = ["LIGER", "installed", "modules"]

LIGER: Final = "liger_kernel"
REGISTRY: Final = f"{LIGER}.ops.backends.registry"

_SERVED: Final = f"{__package__}.served"
_NAMES: Final = {
    REGISTRY: f"{_SERVED}.registry",
    f"{LIGER}.utils": f"{_SERVED}.utils",
    f"{LIGER}.ops.utils": f"{_SERVED}.ops_utils",
}
_PACKAGES: Final = (LIGER, f"{LIGER}.ops", f"{LIGER}.ops.backends")


def installed() -> bool:
    """Whether there is a liger-kernel to import."""
    return LIGER in sys.modules or importlib.util.find_spec(LIGER) is not None


@contextlib.contextmanager
def modules() -> Iterator[Any]:
    """The registry that a package declares itself in, importable within the block."""
    with LOADING:
        ours = importlib.import_module(_NAMES[REGISTRY])
        serve = _lend(ours) if installed() else _stand_in()
        with serve as registry:
            yield registry


@contextlib.contextmanager
def _lend(ours: ModuleType) -> Iterator[Any]:
    registry = importlib.import_module(REGISTRY)
    lent = [name for name in ours.__all__ if not hasattr(registry, name)]
    for name in lent:
        setattr(registry, name, getattr(ours, name))
    try:
        yield registry
    finally:
        for name in lent:
            delattr(registry, name)


@contextlib.contextmanager
def _stand_in() -> Iterator[Any]:
    made: dict[str, ModuleType] = {}
    for name in _PACKAGES:
        made[name] = ModuleType(name, "Stands for liger-kernel's while a package for it loads.")
        made[name].__path__ = []  # a package: what it lacks is a module that is not found
    for name, ours in _NAMES.items():
        made[name] = importlib.import_module(ours)
    for name, module in made.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(made[parent], own, module)
    registry = made[REGISTRY]
    vars(made[f"{LIGER}.ops.backends"]).update(
        {name: getattr(registry, name) for name in registry.__all__}
    )
    sys.modules.update(made)
    try:
        yield registry
    finally:
        for name in made:
            sys.modules.pop(name, None)
