"""Vendors' packages in the style of Liger-Kernel, loaded as they are.

``package`` loads one and registers what it has, ``shim`` serves what it imports, ``served``
is what that is, ``adapters`` bridges Liger's functions to contracts, and ``base`` has
Liger's names over the operators of this project.
"""

from transformer_engine_fl.vendors.liger.package import (
    LOADED,
    LigerPackage,
    load_liger_package,
    register_function,
)

__all__ = ["LOADED", "LigerPackage", "load_liger_package", "register_function"]
