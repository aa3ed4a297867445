"""Makes FlagGems' modules importable while a folder written for it loads."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Final

from transformer_engine_fl.core.blame import error_text
from transformer_engine_fl.core.locks import LOADING
from transformer_engine_fl.core.log import logger
from transformer_engine_fl.vendors.packages.shim import importable, installed, names_added, tree

if TYPE_CHECKING:
    from transformer_engine_fl.vendors.flaggems.folder import FlagGemsFolder

__all__ = ["BACKENDS", "FLAG_GEMS", "UTILS", "modules"]

FLAG_GEMS: Final = "flag_gems"
BACKENDS: Final = f"{FLAG_GEMS}.runtime.backend"
UTILS: Final = "backend_utils"
"""The module with ``VendorInfoBase``; FlagGems also has it on ``sys.path`` under this name."""

_SERVED: Final = f"{__package__}.served"
_LAZY: Final = {
    f"{FLAG_GEMS}.utils.{name}": f"{_SERVED}.{module}"
    for name, module in {
        "libentry": "utils",
        "limits": "utils",
        "pointwise_dynamic": "pointwise",
        "shape_utils": "utils",
        "triton_lang_extension": "triton_lang_extension",
        "triton_lang_helper": "utils",
    }.items()
}
"""FlagGems' helper modules -> their stand-ins; a stand-in is imported on first use."""

BROKEN: Final[set[str]] = set()
"""Contains FlagGems' name once importing it has failed, so that it is tried only once."""


@contextlib.contextmanager
def modules(folder: FlagGemsFolder | None = None) -> Iterator[None]:
    """Within the block a folder's imports from FlagGems are found.

    Args:
        folder: the folder whose operators load; None while its declaration loads.
    """
    ours = importlib.import_module(f"{_SERVED}.backend_utils")
    with LOADING:
        real = _real()
        if real is None:
            made = _stand_ins(ours, folder)
        else:
            made = {UTILS: real}
        with names_added(real or ours, ours, ours.__all__), importable(made):
            yield


def _real() -> ModuleType | None:
    """FlagGems' own ``backend_utils``; None where it is not installed, or cannot be imported."""
    if FLAG_GEMS in BROKEN or not installed(FLAG_GEMS):
        return None
    try:
        return importlib.import_module(f"{BACKENDS}.{UTILS}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it needs a device to be imported
        for name in [it for it in sys.modules if f"{it}.".startswith(f"{FLAG_GEMS}.")]:
            if not name.startswith(f"{BACKENDS}._"):
                del sys.modules[name]
        BROKEN.add(FLAG_GEMS)
        said = " ".join(error_text(error).split())
        logger.warning("flag_gems is installed and cannot be imported (%s): stood in for", said)
        return None


def _stand_ins(ours: ModuleType, folder: FlagGemsFolder | None) -> dict[str, ModuleType]:
    found = {UTILS: ours, f"{BACKENDS}.{UTILS}": ours}
    if folder is not None:
        from transformer_engine_fl.vendors.flaggems.served.runtime import Runtime

        found |= Runtime(folder).modules()
        found[f"{FLAG_GEMS}.utils"] = _Lazy(f"{FLAG_GEMS}.utils", f"{_SERVED}.utils")
        for name, served in _LAZY.items():
            found[name] = _Lazy(name, served)
        # The folder under the short name that it has while FlagGems puts it on sys.path.
        own = sys.modules[folder.package]
        found[folder.package.rpartition(".")[2]] = own
        root = ModuleType(FLAG_GEMS, "Stands for FlagGems while a folder for it loads.")
        root.device, root.vendor_name = folder.info.device, folder.info.vendor  # type: ignore[attr-defined]
        found[FLAG_GEMS] = root
    made = tree(found, "FlagGems")
    if folder is not None:
        for name in ("libentry", "pointwise_dynamic"):  # as attributes these are functions
            delattr(made[f"{FLAG_GEMS}.utils"], name)
        made[BACKENDS].vendor_module = own  # type: ignore[attr-defined]
        made[folder.package] = own
    return made


class _Lazy(ModuleType):
    """A module that has another module's attributes, and imports it on first use."""

    def __init__(self, name: str, content: str) -> None:
        super().__init__(name, "Stands for FlagGems' while a folder for it loads.")
        self.__path__: list[str] = []
        self._content = content

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._content), name)
