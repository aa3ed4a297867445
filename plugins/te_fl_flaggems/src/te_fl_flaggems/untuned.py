"""Registers FlagGems' operators without autotuning: kernels use their first configuration.

FlagGems measures every configuration of a kernel, from a few to some two hundred, for each new
shape. Each takes a compilation and over a tenth of a second: too much for a test with hundreds of
shapes. ``TE_FL_PLUGIN_MODULES=te_fl_flaggems.untuned`` registers the operators this way, and
``plugins/certify.py`` uses it.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import te_fl_flaggems
from transformer_engine_fl import OpRegistry

__all__ = ["TE_FL_PLUGIN_API", "register", "take_first_configurations"]

TE_FL_PLUGIN_API = te_fl_flaggems.TE_FL_PLUGIN_API

DEPRECATED = "Logical operators 'and' and 'or' are deprecated for non-scalar tensors"
"""A warning of Triton about FlagGems' source, at each compilation of some kernels."""


def register(registry: OpRegistry) -> None:
    """Register every implementation of this package, without autotuning."""
    registry.register_many(te_fl_flaggems.implementations(__name__))


def take_first_configurations(flag_gems: ModuleType) -> int:
    """Leave one configuration for each kernel of FlagGems' modules; returns how many changed."""
    autotuner = importlib.import_module("triton.runtime").Autotuner
    narrowed = 0
    for module in _modules_of(flag_gems):
        for kernel in list(vars(module).values()):
            for layer in _layers(kernel):
                if isinstance(layer, autotuner) and len(layer.configs) > 1:
                    layer.configs = layer.configs[:1]  # a new list: kernels share the old one
                    narrowed += 1
    return narrowed


def _modules_of(flag_gems: ModuleType) -> Iterator[ModuleType]:
    """FlagGems' modules, found by file: it loads vendors' folders under other package names."""
    root = Path(str(flag_gems.__file__)).parent
    for module in list(sys.modules.values()):
        file = getattr(module, "__dict__", {}).get("__file__")  # getattr would load lazy modules
        if isinstance(file, str) and root in Path(file).parents:
            yield module


def _layers(kernel: Any) -> Iterator[Any]:
    """A kernel's decorators, from outside in."""
    interface = importlib.import_module("triton").KernelInterface
    while isinstance(kernel, interface):
        yield kernel
        kernel = getattr(kernel, "fn", None)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module("te_fl_flaggems.kernels"), name)
    warnings.filterwarnings("ignore", DEPRECATED, UserWarning)
    take_first_configurations(importlib.import_module("flag_gems"))
    return found
