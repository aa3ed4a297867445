"""FlagGems' functions, bridged to contracts and to ATen's signatures when one is first chosen.

``transformer_engine_fl.vendors.flaggems`` has the bridges, which serve FlagGems itself as well as
the folders that vendors write for it. If FlagGems has a vendor's function for this machine's
device, that function is used. Functions that the vendor marks as unused, in FlagGems or in a
loaded folder, are not served.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from te_fl_flaggems import ATEN, OPERATORS, hopper
from transformer_engine_fl import PluginError
from transformer_engine_fl.vendors.flaggems import adapters, names, unused_ops

__all__ = ["aten", "function"]


def function(name: str) -> Callable[..., Any]:
    """A function of FlagGems, or the vendor's replacement if there is one.

    Raises:
        PluginError: FlagGems has no such function, or the vendor marks it as unused.
    """
    flag_gems = importlib.import_module("flag_gems")
    vendor = getattr(flag_gems, "vendor_name", "")
    if name in _unused(vendor) or name in unused_ops(getattr(flag_gems, "device", "")):
        raise PluginError(f"flag_gems: {vendor} leaves {name!r} unused")
    for module in ("flag_gems", "flag_gems.ops", "flag_gems.fused"):
        found = getattr(importlib.import_module(module), name, None)
        if callable(found):
            made: Callable[..., Any] = found
            return hopper.bridged(made) if hopper.is_for_hopper(made) else made
    version = getattr(flag_gems, "__version__", "of an unknown version")
    raise PluginError(f"flag_gems {version} has no function {name!r}")


def _unused(vendor: str) -> tuple[str, ...]:
    """The functions that a vendor marks as unused; FlagGems ignores the list for NVIDIA."""
    if vendor in ("", "nvidia"):
        return ()
    backend = importlib.import_module("flag_gems.runtime.backend")
    return tuple(backend.get_unused_ops(vendor))


class _Aten:
    """The ATen operators, by name."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in ATEN:
            raise AttributeError(name)
        return names.as_kernel(name, function(ATEN[name]))


aten = _Aten()


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in OPERATORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    bridge = adapters.BRIDGES[name][0]
    return bridge.make(*(function(it) for it in bridge.needs))
