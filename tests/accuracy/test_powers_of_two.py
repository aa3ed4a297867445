"""Powers of two are exact, and not by ``torch.ldexp``, which may read another device's memory."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch

import transformer_engine_fl
from transformer_engine_fl.ops._rounding import power_of_two
from transformer_engine_fl.testing.comparison import ulp


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [(torch.float32, -149, 127), (torch.float64, -1074, 1023)]
)
@pytest.mark.parametrize("whole", [torch.int32, torch.int64])
def test_every_power_that_there_is(
    dtype: torch.dtype, least: int, most: int, whole: torch.dtype
) -> None:
    exponents = range(least, most + 1)
    found = power_of_two(torch.tensor(exponents, dtype=whole), dtype)
    assert found.dtype == dtype
    assert found.tolist() == [math.ldexp(1.0, it) for it in exponents]


def test_what_is_too_large_or_too_small() -> None:
    found = power_of_two(torch.tensor([1024, 2046, -1075, -2044]))
    assert found.tolist() == [math.inf, math.inf, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_unit_in_the_last_place_is_the_distance_of_neighbours(dtype: torch.dtype) -> None:
    values = torch.tensor([2.0**-14, 0.3, 1.0, 1.5, 1000.0], dtype=dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    following = (values.view(bits) + 1).view(dtype)
    assert torch.equal(ulp(values.double(), dtype), following.double() - values.double())


def test_the_package_does_not_use_torch_ldexp() -> None:
    """Off the current device ``torch.ldexp`` reads wrong memory (pytorch issue 189567)."""
    package = Path(transformer_engine_fl.__file__).parent
    asking = [
        f"{path.name}:{node.lineno}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr in ("ldexp", "ldexp_")
        and not (isinstance(node.value, ast.Name) and node.value.id == "math")
    ]
    assert asking == []
