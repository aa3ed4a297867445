"""Loads vendors' folders in the style of FlagGems, unmodified.

``folder`` loads a folder and registers its functions, ``shim`` makes the modules that it imports
available, and ``served`` contains these. ``names`` maps functions to ATen operators, ``adapters``
bridges functions to contracts, ``configs`` reads a folder's tuning, and ``tuning`` applies that
to the kernels of this project.
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
