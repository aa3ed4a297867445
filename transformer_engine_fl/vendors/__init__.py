"""Vendors: their devices, and the kernels that they provide.

``info`` describes a device, ``detection`` finds the devices of this machine, and ``registry`` has
the vendors and what each implements. ``liger`` loads packages written for Liger-Kernel and
``flaggems`` loads folders written for FlagGems, both based on ``packages``. ``namespace``
exports the names of loaded packages and resolves each call by the policy in force.
"""

import importlib
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.vendors.info import BackendInfo, VendorInfo
from transformer_engine_fl.vendors.registry import (
    BackendRegistry,
    get_current_backend,
    get_op,
    infer_device,
    list_overridden_ops,
    register_vendor,
)

if TYPE_CHECKING:
    from transformer_engine_fl.vendors.flaggems import load_flaggems_folder
    from transformer_engine_fl.vendors.liger import load_liger_package

__all__ = [
    "BackendInfo",
    "BackendRegistry",
    "VendorInfo",
    "get_current_backend",
    "get_op",
    "infer_device",
    "list_overridden_ops",
    "load_flaggems_folder",
    "load_liger_package",
    "register_vendor",
]


if not TYPE_CHECKING:  # a type checker would accept any name from it

    def __getattr__(name: str) -> Any:
        """Import the loaders of other projects' packages on first use: most processes do not."""
        style = {"load_flaggems_folder": "flaggems", "load_liger_package": "liger"}.get(name)
        if style is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{style}"), name)
