"""Bridge: how functions that a package exports serve a contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from transformer_engine_fl.core.blame import located_signature
from transformer_engine_fl.core.contract import signature_of

__all__ = ["Bridge", "misfit"]


class Bridge(NamedTuple):
    """How exports of a package serve a contract.

    Attributes:
        needs: the names of the exports that it uses.
        make: turns these exports into a function with the contract's signature.
        call: the arguments that the first export is called with, ``"dy, x, approximate="``;
            empty if the bridge reads them from the export's signature.
        differentiates: whether it computes gradients by differentiating the first export, which
            must be declared differentiable.
    """

    needs: tuple[str, ...]
    make: Callable[..., Callable[..., Any]]
    call: str = ""
    differentiates: bool = False


def misfit(function: Callable[..., Any], call: str) -> str | None:
    """Why a function cannot be called this way, with file and line; None if no reason is known."""
    signature = signature_of(function)
    if signature is None or not call:
        return None
    words = call.split(", ")
    named = {it.removesuffix("="): None for it in words if it.endswith("=")}
    try:
        signature.bind(*words[: len(words) - len(named)], **named)
    except TypeError as error:
        return f"{located_signature(function, signature)} is called with ({call}): {error}"
    return None
