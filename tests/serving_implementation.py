"""Finds the implementation that serves a call of the default manager."""

from __future__ import annotations

from typing import Any

from transformer_engine_fl import get_default_manager

__all__ = ["served"]


def served(op_name: str, *args: Any, **kwargs: Any) -> str:
    """The id of the first implementation that served ``op_name`` in the call."""
    manager = get_default_manager()
    names: list[str] = []
    undo = manager.monitor(lambda op, impl: names.append(impl.impl_id) if op == op_name else None)
    try:
        manager.call(op_name, *args, **kwargs)
    finally:
        undo()
    return names[0]
