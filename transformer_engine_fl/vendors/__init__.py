"""Chips and those who make kernels for them.

``info`` describes a chip, ``detection`` finds those of this machine, ``registry`` has the
vendors and what each implements, ``liger`` loads packages written for Liger-Kernel, and
``namespace`` has the names of such packages as the policy in force resolves them.
"""

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
    from transformer_engine_fl.vendors.liger import load_liger_package

__all__ = [
    "BackendInfo",
    "BackendRegistry",
    "VendorInfo",
    "get_current_backend",
    "get_op",
    "infer_device",
    "list_overridden_ops",
    "load_liger_package",
    "register_vendor",
]


if not TYPE_CHECKING:  # to which every name would be one

    def __getattr__(name: str) -> Any:
        """What loads Liger-style packages comes when it is asked for: few start-ups need it."""
        if name == "load_liger_package":
            from transformer_engine_fl.vendors import liger

            return liger.load_liger_package
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
