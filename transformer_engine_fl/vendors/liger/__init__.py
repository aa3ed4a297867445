"""Loads vendors' packages in the style of Liger-Kernel, unmodified.

``package`` loads a package and registers its functions, ``shim`` makes the modules that it imports
available, and ``served`` contains these. ``adapters`` bridges Liger's functions to contracts, and
``base`` implements Liger's names by the operators of this project.
"""

from transformer_engine_fl.vendors.liger.package import (
    ROOTS,
    LigerPackage,
    declares,
    load,
    load_liger_package,
)

__all__ = ["ROOTS", "LigerPackage", "declares", "load", "load_liger_package"]
