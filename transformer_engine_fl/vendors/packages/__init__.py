"""What packages of other projects' styles have in common: each is loaded as it is.

``package`` keeps one and imports its operators when one is first chosen, ``source`` reads
what it exports without running it, ``shim`` serves what it imports of the project it was
written for, ``bridge`` is how its functions serve contracts. What a style looks like is in a
package of its own: ``vendors/liger``, ``vendors/flaggems``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from transformer_engine_fl.core.registry import OpRegistry
from transformer_engine_fl.vendors.packages.source import blamed

__all__ = ["register_function"]

_ALIAS: Final = "transformer_engine_fl.integrations.transformer_engine"
"""Who lets ``transformer_engine.plugin.core`` mean this package."""


def register_function(
    name: str, missing: ImportError | None
) -> Callable[[OpRegistry], None] | None:
    """What registers a module that is no plugin of ours, or the folder at a path.

    Args:
        name: the module's, or a path.
        missing: what could not be found when it was imported, if that failed.

    Returns:
        None if it is a package of no style that is known.
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
            raise blamed(
                missing,
                f"Transformer Engine is not installed; name {_ALIAS!r} in TE_FL_PLUGIN_MODULES, "
                "or call its alias_plugin_core(), to load a plugin for it without",
            ) from missing
        raise missing
    for style in (liger, flaggems):
        if style.declares(sys.modules[name]):
            return lambda registry: style.load(name, registry)
    return None
