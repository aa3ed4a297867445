"""Repeated calls of grouped GEMMs with other tensors and another split of the rows."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_engine_fl.backends._groups import KnownGroups
from transformer_engine_fl.core.errors import ArgumentError

__all__ = ["WAYS", "check"]

GROUPS, ROWS, WIDE, DEEP = 5, 40, 24, 32
SPLITS = ([8, 8, 8, 8, 8], [3, 0, 20, 1, 16], [0, 0, 0, 0, 40])
WAYS = {
    "forward": {},
    "dgrad": {"transa": False},
    "wgrad": {"transa": False, "transb": True},
    "accumulated": {},
    "own tensors": {},
}
"""Kinds of calls, and their options."""


def _call(way: str, splits: list[int], seed: int, device: str) -> tuple[list[Any], dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator).to(device)

    options: dict[str, Any] = dict(WAYS[way])
    if way == "wgrad":
        into = [normal(WIDE, DEEP) for _ in range(GROUPS)]
        return [[normal(ROWS, DEEP)], [normal(ROWS, WIDE)], splits], {
            **options, "accumulate_into": into,
        }  # fmt: skip
    A = [normal(WIDE, DEEP) for _ in range(GROUPS)]
    x = normal(ROWS, WIDE if way == "dgrad" else DEEP)
    if way == "own tensors":
        return [A, [it.clone() for it in torch.split(x, splits)], splits], options
    if way == "accumulated":
        options["accumulate_into"] = [normal(ROWS, WIDE)]
    return [A, [x], splits], options


def _expected(args: list[Any], options: dict[str, Any]) -> list[Tensor]:
    A, B, splits = args
    groups = [it if len(it) == GROUPS else torch.split(it[0], splits) for it in (A, B)]
    into = options.get("accumulate_into")
    found = []
    for a, b in zip(*groups, strict=True):
        left = b.t() if options.get("transb") else b
        found.append(left.double() @ (a.t() if options.get("transa", True) else a).double())
    if into is None or len(into) == 1:
        found = [torch.cat(found)]
    return [one + two for one, two in zip(into, found, strict=True)] if into else found


def check(
    module: ModuleType, way: str, device: str, monkeypatch: pytest.MonkeyPatch, *, copied: bool
) -> None:
    """Check calls like an earlier one against the formula; wrong ones must raise ArgumentError.

    Args:
        copied: whether the set copies the call's tensors, so that it remembers no call.
    """
    known: list[bool] = []
    get = KnownGroups.get

    def noted(self: KnownGroups[Any], call: Any) -> Any:
        found = get(self, call)
        known.append(found is not None)
        return found

    monkeypatch.setattr(KnownGroups, "get", noted)
    for seed, splits in enumerate((SPLITS[0], *SPLITS)):
        args, options = _call(way, splits, seed, device)
        expected = _expected(args, options)
        D, _, _ = module.te_general_grouped_gemm(*args, **options)
        results = options.get("accumulate_into") or [D]
        for one, two in zip(results, expected, strict=True):
            torch.testing.assert_close(one.double(), two, rtol=1e-4, atol=1e-4)
    # With a tensor for each group, another split changes their shapes: no call like the last.
    like_before = way != "own tensors"
    expected_known = [False] * 4 if copied else [False, True, like_before, like_before]
    assert known == expected_known
    wrong: list[tuple[int, Any]] = [
        (2, [8, 8, 8, 8, 9]), (2, [-8, 8, 16, 16, 8]), (2, [8, 8, 8, 8, True]),
        (1, [args[1][0].double()]), (0, [*args[0][:-1], args[0][-1][1:]]), (1, [None]), (1, []),
    ]  # fmt: skip
    for place, value in wrong:
        args, options = _call(way, SPLITS[0], 9, device)
        args[place] = value
        with pytest.raises(ArgumentError):
            module.te_general_grouped_gemm(*args, **options)
    if way == "wgrad":
        args, options = _call(way, SPLITS[0], 9, device)
        options["accumulate_into"] = options["accumulate_into"][:1] * GROUPS
        with pytest.raises(ArgumentError):
            module.te_general_grouped_gemm(*args, **options)
