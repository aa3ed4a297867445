"""Common code for packages that were written for other projects and are loaded unmodified.

``package`` represents a loaded package and imports its operators when one is first chosen,
``source`` reads what it exports without running it, ``shim`` provides the modules that it imports
from the project it was written for, and ``bridge`` describes how its functions serve contracts.
Each style has a subpackage: ``vendors/liger``, ``vendors/flaggems``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from transformer_engine_fl.core.registry import OpRegistry
from transformer_engine_fl.vendors.packages.source import package_error

__all__ = ["register_function"]

_ALIAS: Final = "transformer_engine_fl.integrations.transformer_engine"
"""The module that makes ``transformer_engine.plugin.core`` an alias of this package."""


def register_function(
    name: str, missing: ImportError | None
) -> Callable[[OpRegistry], None] | None:
    """The function that registers a module without ``register``, or the folder at a path.

    Args:
        name: the module's name, or a path.
        missing: the error, if importing the module failed because another one was not found.

    Returns:
        None if it is not a package of a known style.
    """
    from transformer_engine_fl.vendors import flaggems, liger

    if "/" in name:
        path = Path(name).expanduser()
        style = flaggems if flaggems.is_folder(path) else liger
        return lambda registry: style.load(path, registry)
    if missing is not None:
        for style in (liger, flaggems):
            if (missing.name or "").partition(".")[0] in style.ROOTS:
                return lambda registry: style.load(name, registry)
        if missing.name == "transformer_engine":
            raise package_error(
                missing,
                "Transformer Engine is not installed; to load a plugin for it anyway, name "
                f"{_ALIAS!r} in TE_FL_PLUGIN_MODULES or call its alias_plugin_core()",
            ) from missing
        raise missing
    for style in (liger, flaggems):
        if style.declares(sys.modules[name]):
            return lambda registry: style.load(name, registry)
    return None
