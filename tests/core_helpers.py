"""Helpers for the tests of core: stub tensors, one contract, trivial implementations.

Core does not use torch, and neither do its tests: a stub tensor has a device, a dtype and an
architecture, and an implementation returns its own impl id.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from transformer_engine_fl import (
    ArgumentError,
    Contract,
    OpImpl,
    OpManager,
    OpRegistry,
    Sample,
    Tolerance,
)
from transformer_engine_fl.core.tensors import ALL_FACTS, Facts

KINDS = ("flagos", "vendor", "reference")


@dataclass(frozen=True)
class StubTensor:
    """The properties of a tensor that core uses."""

    device: str = "cpu"
    dtype: str = "float32"
    arch: str | None = None
    unusual: str | None = None


class StubTensors:
    """Core's access to a :class:`StubTensor`; counts how often facts are read."""

    def __init__(self) -> None:
        self.looks = 0

    key = staticmethod(attrgetter("device", "dtype", "arch", "unusual"))

    def facts(self, value: StubTensor) -> Facts:
        self.looks += 1
        return Facts(value.device, value.dtype, value.arch, value.unusual, judged=ALL_FACTS)

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, StubTensor)

    def is_ordinary(self, value: StubTensor) -> bool:
        return value.unusual is None

    def is_fatal(self, error: Exception) -> bool:
        return isinstance(error, MemoryError)

    def no_fallback(self, tensors: Iterable[Any]) -> str | None:
        return None


def _check(op: str, x: Any, factor: Any, mode: Any) -> None:
    if not isinstance(x, StubTensor):
        raise ArgumentError(op, "x", repr(x), "a StubTensor")


def _samples(dtype: str, device: str) -> Iterator[Sample]:
    yield Sample("typical", (StubTensor(device, dtype),))


def scale(x: Any, factor: float = 1.0, *, mode: str = "plain") -> Any:
    """The signature of the operator that most tests call."""
    return x


SCALE: Contract[..., Any] = Contract(
    scale,
    family="stub",
    check=_check,
    samples=_samples,
    tolerance={"float32": Tolerance(0.0, 0.0), "bfloat16": Tolerance(0.0, 0.0)},
    oracle=scale,
    aliases=("fused_scale",),
)
"""The contract of operator ``scale``, also known as ``fused_scale``."""


def answering(impl_id: str) -> Callable[..., str]:
    """A function of scale's signature that returns ``impl_id``."""

    def fn(x: Any, factor: float = 1.0, *, mode: str = "plain") -> str:
        return impl_id

    return fn


def impl(impl_id: str, kind: str = "reference", **fields: Any) -> OpImpl:
    """An implementation of ``scale`` that returns its own id; the default vendor is ``acme``."""
    if kind == "vendor":
        fields.setdefault("vendor", "acme")
    fields.setdefault("op_name", "scale")
    fields.setdefault("fn", answering(impl_id))
    return OpImpl(impl_id=impl_id, kind=kind, **fields)  # type: ignore[arg-type]


def one_of_each() -> list[OpImpl]:
    """One implementation of each kind with the usual priorities, and a second vendor's."""
    return [
        impl("default.flagos", "flagos", priority=150),
        impl("vendor.acme", "vendor", vendor="Acme", priority=100),
        impl("vendor.zeta", "vendor", vendor="zeta", priority=90),
        impl("reference.torch", "reference", priority=50),
    ]


def make_manager(*impls: OpImpl, **keywords: Any) -> OpManager:
    """A manager that knows only these implementations, the scale contract and stub tensors."""
    registry = OpRegistry(contracts={"scale": SCALE})
    registry.register_many(impls)
    keywords.setdefault("tensors", StubTensors())
    return OpManager(registry, builtins=False, plugins=False, **keywords)


def slowly(fn: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    """Delay ``fn`` so that all threads reach it before it returns; record its calls."""

    def slow(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        time.sleep(0.05)
        return fn(*args, **kwargs)

    return slow


def order(manager: OpManager, op_name: str = "scale") -> list[str]:
    """Ids of an operator's candidates, best first."""
    return [it.impl_id for it in manager.resolve_candidates(op_name)]


def reason(manager: OpManager, impl_id: str, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """(cause, reason) of the verdict on one implementation of ``scale`` for a call."""
    decision = manager.explain("scale", *args, **kwargs)
    verdict = next(it for it in decision.verdicts if it.impl.impl_id == impl_id)
    return verdict.cause, verdict.reason


def importable(x: Any, factor: float = 1.0, *, mode: str = "plain") -> str:
    """An implementation to register by its import path, ``"core_helpers:importable"``."""
    return "importable"
