"""Bridge: how functions that a package exports serve a contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Bridge"]


class Bridge(NamedTuple):
    """How exports of a package serve a contract.

    Attributes:
        needs: their names.
        make: from those, a function with the contract's signature.
        differentiates: it asks for the gradients of the first, which must be said to have them.
    """

    needs: tuple[str, ...]
    make: Callable[..., Callable[..., Any]]
    differentiates: bool = False
