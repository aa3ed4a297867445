"""Names of loaded vendor packages, and Liger's own, as operators that the policy dispatches.

``from transformer_engine_fl.vendors.namespace import LigerRMSNormFunction``: the name can be
imported once, and each call is dispatched by the policy in force at that moment, like a call of
any operator.
"""

from __future__ import annotations

from typing import Any

from transformer_engine_fl.core.errors import suggestion
from transformer_engine_fl.core.manager import get_default_manager
from transformer_engine_fl.vendors.liger import base
from transformer_engine_fl.vendors.packages.package import LOADED

__all__ = ["LiveName"]


class LiveName:
    """A name of the namespace: called, or applied like an ``autograd.Function``, it dispatches."""

    __slots__ = ("__name__", "_op_name")

    def __init__(self, name: str, op_name: str) -> None:
        self.__name__ = name
        self._op_name = op_name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return get_default_manager().call(self._op_name, *args, **kwargs)

    apply = __call__

    def __repr__(self) -> str:
        chosen = get_default_manager().explain(self._op_name).selected
        return f"<{self.__name__} by {chosen.impl_id if chosen else 'no implementation'}>"


_made: dict[tuple[str, str], LiveName] = {}


def _names() -> dict[str, str]:
    """The operators by the names of this namespace."""
    manager = get_default_manager()
    manager.ensure_initialized()
    base.register(manager.registry)
    present = set(manager.registry.list_operators())
    names: dict[str, str] = {}
    for package in LOADED.packages.values():
        for name, op_name in package.live_names().items():
            if op_name in present:
                names.setdefault(name, op_name)
    return names | {name: name for name in base.BASE}


def __getattr__(name: str) -> LiveName:
    names = {} if name.startswith("__") else _names()
    if name not in names:
        close = suggestion(name, names) if names else ""
        raise AttributeError(f"no loaded package has {name!r}{close}")
    made = (name, names[name])
    return _made.setdefault(made, LiveName(*made))


def __dir__() -> list[str]:
    return sorted({*__all__, *_names()})
