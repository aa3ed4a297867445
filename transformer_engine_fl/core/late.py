"""Late binding: objects that are named as text and imported when they are first needed."""

from __future__ import annotations

import importlib.util
from typing import Any

from transformer_engine_fl.core.locks import LOADING

__all__ = ["installed", "load_attribute"]


def installed(module: str) -> bool:
    """Whether a module is there to be imported, ``"package.module"``; the package is imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def load_attribute(reference: str) -> Any:
    """The object that ``"module:attribute"`` names."""
    module, _, path = reference.partition(":")
    with LOADING:
        found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found
