"""Vendors' folders in the style of FlagGems, loaded as they are.

``folder`` loads one and registers what it has, ``shim`` serves what it imports, ``served`` is
what that is, ``names`` knows which function stands for which ATen operator, ``adapters``
bridges them to contracts, ``configs`` reads a folder's tuning, and ``tuning`` hands it on.
"""

from transformer_engine_fl.vendors.flaggems.folder import (
    ROOTS,
    FlagGemsFolder,
    declares,
    is_folder,
    load,
    unused_ops,
)

__all__ = [
    "ROOTS",
    "FlagGemsFolder",
    "declares",
    "is_folder",
    "load",
    "load_flaggems_folder",
    "unused_ops",
]

load_flaggems_folder = load
