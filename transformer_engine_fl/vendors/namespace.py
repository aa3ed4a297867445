"""Liger's names, and those that packages in its style add, as the policy in force resolves them.

``from transformer_engine_fl.vendors.namespace import LigerRMSNormFunction``: the name stays
what it is, and each call goes to whoever the policy of that moment chooses, as that of any
operator does.
"""

from __future__ import annotations

from typing import Any

from transformer_engine_fl.core.errors import suggestion
from transformer_engine_fl.core.manager import get_default_manager
from transformer_engine_fl.vendors.liger import LOADED, base

__all__ = ["LiveName"]


class LiveName:
    """A name of the namespace, to be called, or applied as an ``autograd.Function``."""

    __slots__ = ("__name__",)

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return get_default_manager().call(self.__name__, *args, **kwargs)

    apply = __call__

    def __repr__(self) -> str:
        chosen = get_default_manager().explain(self.__name__).selected
        return f"<{self.__name__} by {chosen.impl_id if chosen else 'nobody'}>"


_made: dict[str, LiveName] = {}


def _names() -> set[str]:
    manager = get_default_manager()
    manager.ensure_initialized()
    base.register(manager.registry)
    exported = {name for package in LOADED.packages.values() for name in package.exports}
    present = set(manager.registry.list_operators())
    return {*base.BASE, *(exported & present)}


def __getattr__(name: str) -> LiveName:
    if name.startswith("__") or name not in (names := _names()):
        close = "" if name.startswith("__") else suggestion(name, names)
        raise AttributeError(f"no Liger-style package has {name!r}{close}")
    return _made.setdefault(name, LiveName(name))


def __dir__() -> list[str]:
    return sorted({*__all__, *_names()})
