"""Dispatch on an argument that is a list of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from core_helpers import StubTensor, StubTensors

from transformer_engine_fl import (
    ArgumentError,
    Contract,
    NotSupportedError,
    OpImpl,
    OpManager,
    OpRegistry,
    PartialMutationError,
    Sample,
    Tolerance,
)


def _check(op: str, factor: Any, parts: Any, flag: Any) -> None:
    if not isinstance(parts, list):
        raise ArgumentError(op, "parts", repr(parts), "a list")


def _samples(dtype: str, device: str) -> Iterator[Sample]:
    yield Sample("typical", (1.0, [StubTensor(device, dtype)]))


def scale_all(factor: float, parts: list[Any], *, flag: Any = None) -> Any:
    """Multiplies each part."""
    return None


SCALE_ALL: Contract[..., Any] = Contract(
    scale_all,
    family="stub",
    check=_check,
    samples=_samples,
    tolerance={"float32": Tolerance(0.0, 0.0)},
    oracle=scale_all,
    mutates=("parts", "flag"),
    dispatch_on="parts",
)


def manager_of(**behaviours: Any) -> OpManager:
    """An implementation of vendor ``chip`` for float32 on a chip, and a reference for all tensors.

    ``behaviours`` gives exceptions that ``chip`` or ``reference`` raises.
    """

    def made(name: str) -> Any:
        def fn(factor: float, parts: list[Any], *, flag: Any = None) -> str:
            if name in behaviours:
                raise behaviours[name]
            return name

        return fn

    conditions: dict[str, Any] = {"devices": ["chip"], "supported_dtypes": ["float32"]}
    registry = OpRegistry(contracts={"scale_all": SCALE_ALL})
    registry.register_many(
        [
            OpImpl("scale_all", "vendor.chip", "vendor", made("chip"), vendor="chip", **conditions),
            OpImpl("scale_all", "reference", "reference", made("reference")),
        ]
    )
    return OpManager(registry, builtins=False, plugins=False, tensors=StubTensors())


CHIP, HALF, HOST = StubTensor("chip"), StubTensor("chip", "bfloat16"), StubTensor("cpu")


@pytest.mark.parametrize("bound", [False, True])
def test_the_first_tensor_of_the_list_chooses(bound: bool) -> None:
    manager = manager_of()
    run = manager.bind("scale_all") if bound else lambda *a, **k: manager.call("scale_all", *a, **k)
    for parts, served in (
        ([CHIP, HALF], "chip"),
        ([HALF, CHIP], "reference"),
        ([HOST], "reference"),
        ((CHIP,), "chip"),
        ([None, [CHIP]], "chip"),
    ):
        assert run(2.0, parts) == served
        assert run(2.0, parts=parts) == served


def test_without_a_tensor_an_implementation_without_conditions_serves() -> None:
    manager = manager_of()
    for _ in range(2):
        assert manager.call("scale_all", 2.0, []) == "reference"
        assert manager.call("scale_all", 2.0, [], flag=CHIP) == "reference"
        assert manager.call("scale_all", 2.0, [CHIP]) == "chip"


def test_a_kind_of_tensor_is_judged_once_and_then_known() -> None:
    manager = manager_of()
    for _ in range(5):
        manager.call("scale_all", 2.0, [CHIP, HALF])
    assert manager.tensors.looks == 1  # type: ignore[attr-defined]


def test_half_written_lists_are_named_and_nothing_else_runs_on_them() -> None:
    manager = manager_of(chip=ValueError("out of range"))
    with pytest.raises(PartialMutationError) as caught:
        manager.call("scale_all", 2.0, [CHIP])
    assert caught.value.tensors == ("parts",)
    assert manager.call("scale_all", 2.0, [CHIP]) == "reference"  # chip is in quarantine
    assert manager_of(chip=NotSupportedError("no")).call("scale_all", 2.0, [CHIP]) == "reference"


def test_a_list_that_is_none_is_one_argument_error() -> None:
    with pytest.raises(ArgumentError, match="parts"):
        manager_of(reference=TypeError("not iterable")).call("scale_all", 2.0, 3)
