"""Chips and those who make kernels for them.

``info`` describes a chip, ``detection`` finds those of this machine, ``registry`` has the
vendors and what each implements, ``liger`` loads packages written for Liger-Kernel, and
``namespace`` has the names of such packages as the policy in force resolves them.
"""

from transformer_engine_fl.vendors.info import BackendInfo, VendorInfo
from transformer_engine_fl.vendors.liger import load_liger_package
from transformer_engine_fl.vendors.registry import (
    BackendRegistry,
    get_current_backend,
    get_op,
    infer_device,
    list_overridden_ops,
    register_vendor,
)

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
