"""Makes Liger-Kernel's modules importable while a package written for it loads."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, Final

from transformer_engine_fl.core.locks import LOADING
from transformer_engine_fl.vendors.packages.shim import importable, installed, names_added, tree

__all__ = ["LIGER", "modules"]

LIGER: Final = "liger_kernel"
REGISTRY: Final = f"{LIGER}.ops.backends.registry"

_SERVED: Final = f"{__package__}.served"
_NAMES: Final = {
    REGISTRY: f"{_SERVED}.registry",
    f"{LIGER}.utils": f"{_SERVED}.utils",
    f"{LIGER}.ops.utils": f"{_SERVED}.ops_utils",
}


@contextlib.contextmanager
def modules() -> Iterator[Any]:
    """Within the block Liger's modules are importable; yields the registry for declarations."""
    with LOADING:
        ours = importlib.import_module(_NAMES[REGISTRY])
        if installed(LIGER):
            registry = importlib.import_module(REGISTRY)
            with names_added(registry, ours, ours.__all__):
                yield registry
            return
        made = tree({name: importlib.import_module(it) for name, it in _NAMES.items()}, LIGER)
        backends = made[REGISTRY.rpartition(".")[0]]
        vars(backends).update({name: getattr(ours, name) for name in ours.__all__})
        with importable(made):
            yield ours
