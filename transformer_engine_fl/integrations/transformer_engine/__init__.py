"""Loads unmodified plugins for TransformerEngine-FL where that is not installed.

Such a plugin imports ``OpImpl`` and its companions from ``transformer_engine.plugin.core`` and
defines ``register(registry)``. :func:`alias_plugin_core` makes that import path an alias of this
package. It takes effect only when called, and never where a Transformer Engine is installed, whose
own import path stays as it is. ``served.py`` defines what the names stand for.

For a command, which has no code to call it from, name this module in ``TE_FL_PLUGIN_MODULES``.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from transformer_engine_fl.core.locks import LOADING
from transformer_engine_fl.core.log import logger

if TYPE_CHECKING:
    from transformer_engine_fl.core.registry import OpRegistry

__all__ = ["PATH", "alias_plugin_core", "register", "unalias_plugin_core"]

PACKAGE: Final = "transformer_engine"
PATH: Final = f"{PACKAGE}.plugin.core"

_aliases: Final[dict[str, ModuleType]] = {}
"""This package's stand-in modules, by Transformer Engine's module names."""


def alias_plugin_core() -> bool:
    """Let ``transformer_engine.plugin.core`` mean this package, until :func:`unalias_plugin_core`.

    Call it before the first operator is used, which is when plugins are loaded. Calling it again
    changes nothing. Other code in the process then also finds a package ``transformer_engine``
    that contains only ``plugin``.

    Returns:
        Whether the alias is in place. False, with a warning, where a Transformer Engine is
        installed or loaded: a plugin then imports that one.
    """
    with LOADING:
        if _aliases and sys.modules.get(PATH) is _aliases[PATH]:
            return True
        there = _installed()
        if there is not None:
            logger.warning(
                "alias_plugin_core: Transformer Engine is installed (%s), so it is not replaced; "
                "an import of %s gets Transformer Engine's own, or fails",
                there,
                PATH,
            )
            return False
        _aliases.clear()
        _aliases.update(_modules())
        sys.modules.update(_aliases)
        return True


def register(registry: OpRegistry) -> None:
    """Entry point as a plugin module: calls :func:`alias_plugin_core` before other plugins load."""
    alias_plugin_core()


def unalias_plugin_core() -> None:
    """Undo :func:`alias_plugin_core`; modules that were imported meanwhile keep what they got."""
    with LOADING:
        for name, module in _aliases.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        _aliases.clear()


def _installed() -> str | None:
    """Where Transformer Engine is installed or was loaded from; None if it is neither."""
    module = sys.modules.get(PACKAGE)
    if module is not None:
        return str(getattr(module, "__file__", None) or "already imported")
    spec = importlib.util.find_spec(PACKAGE)
    return None if spec is None else str(spec.origin or spec.name)


def _modules() -> dict[str, ModuleType]:
    from transformer_engine_fl.integrations.transformer_engine import served

    made: dict[str, ModuleType] = {}
    for name in (PACKAGE, f"{PACKAGE}.plugin", PATH):
        made[name] = _module(name, {}, package=True)
    vars(made[PATH]).update(served.names("core"))
    for short in served.MODULES:
        made[f"{PATH}.{short}"] = _module(f"{PATH}.{short}", served.names(short))
    for name, module in made.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(made[parent], own, module)
    return made


def _module(name: str, content: dict[str, Any], *, package: bool = False) -> ModuleType:
    module = ModuleType(name, "Stands for TransformerEngine-FL's, by transformer_engine_fl.")
    module.__spec__ = ModuleSpec(name, None, is_package=package)
    if package:
        module.__path__ = []  # a package: a missing submodule raises ModuleNotFoundError
    vars(module).update(content)
    vars(module).setdefault("__getattr__", _missing(name))
    return module


def _missing(module: str) -> Any:
    def missing(name: str) -> Any:
        hint = "which is not installed; transformer_engine_fl replaces its plugin core only"
        if module.startswith(PATH):
            hint = "and transformer_engine_fl has no equivalent"
        raise AttributeError(f"{module}.{name} belongs to Transformer Engine, {hint}")

    return missing
