"""Operators on lists of tensors in torch.library and in compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import transformer_engine_fl as te
from transformer_engine_fl.ops import _checks as check
from transformer_engine_fl.ops import _library


def _check(op: str, parts: Any, total: Any, by: Any, squares: Any, times: Any) -> None:
    check.are_tensors(op, "parts", parts, dtypes=["float32"])
    if squares is not None:
        check.are_tensors(op, "squares", squares, dtypes=["float32"])
        check.are_like(op, "squares", squares, "parts", parts)


def _samples(dtype: str, device: str) -> Iterator[te.Sample]:
    parts = [torch.ones(3, device=device), torch.ones(2, 2, device=device)]
    yield te.Sample("typical", (parts, torch.zeros(1, device=device), 2.0))


@te.contract(
    family="example",
    check=_check,
    samples=_samples,
    tolerance={"float32": te.Tolerance(0.0, 0.0)},
    oracle=lambda parts, total, by, *, squares=None, times=1: None,
    mutates=("parts", "total", "squares"),
)
def grow_lists(
    parts: list[Tensor],
    total: Tensor | None,
    by: float,
    *,
    squares: list[Tensor] | None = None,
    times: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Multiply each part; returns their number, and what ``total``, if any, has grown to."""
    return torch.empty(1), None if total is None else torch.empty_like(total)


@torch.no_grad()
def growing(
    parts: list[Tensor],
    total: Tensor | None,
    by: float,
    *,
    squares: list[Tensor] | None = None,
    times: int = 1,
) -> tuple[Tensor, Tensor | None]:
    grow_lists.check(parts, total, by, squares=squares, times=times)
    for it in parts:
        it.mul_(by**times)
    for square, it in zip(squares or (), parts, strict=False):
        square.copy_(it * it)
    count = torch.full((1,), float(len(parts)))
    if total is None:
        return count, None
    for it in parts:
        total.add_(it.sum())
    return count, total.clone()


def manager_with(**fields: Any) -> te.OpManager:
    registry = te.OpRegistry({"grow_lists": grow_lists})
    registry.register_impl(te.OpImpl("grow_lists", "vendor.own", "vendor", growing, **fields))
    return te.OpManager(registry, builtins=False, plugins=False)


def test_every_written_argument_is_an_alias_set_of_its_own() -> None:
    assert _library.schema(grow_lists) == (
        "grow_lists(Tensor(a0!)[] parts, Tensor(a1!)? total, float by, *, "
        "Tensor(a2!)[]? squares=None, SymInt times=1, str impl) -> (Tensor, Tensor)"
    )


PASSED = [
    lambda: ([torch.ones(3), torch.ones(2, 2)], torch.zeros(1), 2.0, None),
    lambda: ([torch.ones(3), torch.ones(2, 2)], None, 2.0, [torch.ones(3), torch.ones(2, 2)]),
    lambda: ([], None, 2.0, None),
]


@pytest.mark.parametrize("passed", PASSED)
def test_torchs_own_check_of_written_lists(passed: Callable[[], Any]) -> None:
    manager = manager_with(vendor="own")
    manager.ensure_initialized()
    (entry,) = manager.registry.entries("grow_lists")
    assert entry.load() is None
    *args, squares = passed()
    names = {"squares": squares, "impl": _library.reference_to(entry)}
    torch.library.opcheck(_library.operator(grow_lists), tuple(args), names)


@pytest.mark.parametrize("traits", [["traceable"], []], ids=["traced", "opaque"])
@pytest.mark.parametrize("passed", PASSED)
def test_written_lists_compile(passed: Callable[[], Any], traits: list[str]) -> None:
    torch._dynamo.reset()
    manager = manager_with(vendor="own", traits=traits)

    def program(parts: list[Tensor], total: Tensor | None, by: float, squares: Any) -> Any:
        count, after = manager.call("grow_lists", parts, total, by, squares=squares)
        return count, after, [it * 2 for it in parts]

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    given, wanted = passed(), passed()
    torch.testing.assert_close(compiled(*given), program(*wanted))
    torch.testing.assert_close(given, wanted)


@pytest.mark.parametrize("traits", [["traceable"], []], ids=["traced", "opaque"])
def test_a_number_that_counts_up_is_not_compiled_each_time(traits: list[str]) -> None:
    torch._dynamo.reset()
    manager = manager_with(vendor="own", traits=traits)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def program(parts: list[Tensor], times: int) -> Any:
        return manager.call("grow_lists", parts, None, 2.0, times=times)

    for times in range(1, 6):
        parts = [torch.ones(3)]
        program(parts, times)
        assert parts[0].tolist() == [2.0**times] * 3
    assert counter.frame_count == 2
