"""Vendors' packages in the style of Liger-Kernel, loaded as they are.

``package`` loads one and registers what it has, ``shim`` serves what it imports, ``served``
is what that is, ``adapters`` bridges Liger's functions to contracts, and ``base`` has
Liger's names over the operators of this project.
"""

from transformer_engine_fl.vendors.liger.package import (
    ROOTS,
    LigerPackage,
    declares,
    load,
    load_liger_package,
)

__all__ = ["ROOTS", "LigerPackage", "declares", "load", "load_liger_package"]
