"""Torch operators for tests of failures: their implementations count their runs and can fail.

``scale`` returns a new tensor and ``scale_`` writes its argument; a :class:`Kernel` implements
either. Calls take one of four routes, with or without a guard that looks at the tensor first:
what follows from a failure must not depend on either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from transformer_engine_fl import (
    ArgumentError,
    Contract,
    OpImpl,
    OpManager,
    OpRegistry,
    Sample,
    Tolerance,
)

ROUTES = ("call", "handle", "operator", "pin")
"""How an operator is called: by name, by a bound handle, by the operator object, by a pin."""

GUARDS = (False, True)
"""Whether the candidates declare their devices, so that dispatch looks at the tensor."""


LEFT = 200
"""Stack frames that :func:`deep` leaves: enough for a dispatch and its recovery."""


class KernelError(RuntimeError):
    """A fault of an implementation; unlike a RuntimeError it supports weak references."""


class Kernel:
    """Multiplies by ``factor``; fails on demand, before or after it has written.

    Args:
        error: returns the exception that each run raises; None: runs succeed.
        in_place: whether to write the argument; a failing run writes half of it first.
    """

    def __init__(
        self, error: Callable[[], Exception] | None = None, *, in_place: bool = False
    ) -> None:
        self.error = error
        self.in_place = in_place
        self.runs = 0

    def __call__(self, x: Any, factor: float = 2.0, *, mode: str = "plain") -> Any:
        self.runs += 1
        if self.error is not None:
            if self.in_place:
                x[: len(x) // 2] *= factor
            raise self.error()
        return x.mul_(factor) if self.in_place else x * factor


def contract_of(fn: Callable[..., Any], **fields: Any) -> Contract[..., Any]:
    """A contract with ``fn``'s name and signature; checks nothing without a ``check``."""

    def samples(dtype: str, device: str) -> Iterator[Sample]:
        yield Sample("typical", ())

    fields.setdefault("check", lambda op, **arguments: None)
    return Contract(
        fn,
        family="stub",
        samples=samples,
        tolerance={"float32": Tolerance(0.0, 0.0)},
        oracle=fn,
        **fields,
    )


def _check(op: str, x: Any, factor: Any, mode: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(op, "x", type(x).__name__, "a tensor")
    if x.ndim != 1:
        raise ArgumentError(op, "x", f"of {x.ndim} dimensions", "1 dimension")


def scale(x: Any, factor: float = 2.0, *, mode: str = "plain") -> Any:
    """Returns ``x * factor``."""


def scale_(x: Any, factor: float = 2.0, *, mode: str = "plain") -> Any:
    """Multiplies ``x`` by ``factor`` where it is."""


def scale_into(x: Any, factor: float = 2.0, *, into: Any = None) -> Any:
    """Returns ``x * factor``, or adds it to ``into`` where that is given."""


CONTRACTS = {
    "scale": contract_of(scale, check=_check),
    "scale_": contract_of(scale_, check=_check, mutates=("x",)),
    "scale_into": contract_of(scale_into, mutates=("into",)),
}


def world(
    op_name: str,
    *kernels: Callable[..., Any],
    guarded: bool = False,
    kind: str = "reference",
    **fields: Any,
) -> OpManager:
    """A manager in which ``op_name`` has these candidates: ``impl.0``, ``impl.1`` and so on."""
    if guarded:
        fields["devices"] = {"cpu", "meta"}
    registry = OpRegistry(CONTRACTS)
    registry.register_many(
        OpImpl(op_name, f"impl.{place}", kind, fn, priority=-place, **fields)  # type: ignore[arg-type]
        for place, fn in enumerate(kernels)
    )
    return OpManager(registry, builtins=False, plugins=False)


def arrive(manager: OpManager, op_name: str, route: str) -> Callable[..., Any]:
    """The callable of a route. For ``operator``, ``manager`` must be the default manager."""
    if route == "call":
        return lambda *args, **kwargs: manager.call(op_name, *args, **kwargs)
    if route == "handle":
        return manager.bind(op_name)
    if route == "pin":
        return manager.pin(op_name)
    return CONTRACTS[op_name]


def in_quarantine(manager: OpManager) -> set[tuple[str, str, str | None, str | None]]:
    """(operator, impl id, device, dtype) of every quarantine entry."""
    held = manager.quarantine.held()
    return {(key.op_name, key.impl_id, key.device, key.dtype) for key in held}


def climb(frames: int) -> bool:
    """Use this many stack frames."""
    return climb(frames - 1) if frames else True


def deep(run: Callable[[], Any]) -> Any:
    """Run with only :data:`LEFT` stack frames left."""
    frame, depth = sys._getframe(), 1
    while frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1

    def descend(frames: int) -> Any:
        return descend(frames - 1) if frames else run()

    return descend(sys.getrecursionlimit() - depth - LEFT)
