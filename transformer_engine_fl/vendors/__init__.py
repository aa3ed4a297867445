"""Chips and those who make kernels for them.

``info`` describes a chip, ``detection`` finds those of this machine, ``registry`` has the
vendors and what each implements, ``liger`` loads packages written for Liger-Kernel and
``flaggems`` folders written for FlagGems, both on the base of ``packages``, and ``namespace``
has the names of what is loaded as the policy in force resolves them.
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


if not TYPE_CHECKING:  # to which every name would be one

    def __getattr__(name: str) -> Any:
        """What loads packages of other styles comes when asked for: few start-ups need it."""
        style = {"load_flaggems_folder": "flaggems", "load_liger_package": "liger"}.get(name)
        if style is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{style}"), name)
