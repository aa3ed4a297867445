"""Measures errors against float64, and the roofs that rates are compared with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transformer_engine_fl import Between
from transformer_engine_fl.testing.arguments import as_tuple, leaves, tensors
from transformer_engine_fl.testing.comparison import compare
from transformer_engine_fl.testing.timing import median_ms

if TYPE_CHECKING:
    from workloads import Workload

__all__ = ["LARGEST", "copies", "error_ratio", "roofs"]

LARGEST = 8192
"""M, N and K of the matrix products that give the roofs in TFLOP/s."""

COPIED = (2**22, 2**24, 2**25, 2**26, 2**27, 2**28, 2**29)
"""Bytes of the smaller copies, which show what the fixed costs of a call leave of the roof.

Each is timed beside a fill of as many bytes as the copy reads and writes together, because writing
alone may be slower than reading and writing in turn.
"""


def roofs() -> dict[str, dict[str, Any]]:
    """The roofs by name: value, unit, and what was measured."""
    found: dict[str, dict[str, Any]] = {}
    for name, unit, what, measure in (
        ("copy", "GB/s", "a device-to-device copy of 2 GiB, read and written", _copy),
        ("matmul", "TFLOP/s", f"torch.matmul in bfloat16, {LARGEST} cubed", _matmul),
        ("scaled_mm", "TFLOP/s", f"torch._scaled_mm in float8, {LARGEST} cubed", _scaled_mm),
    ):
        try:
            value = measure()
        except Exception as error:  # noqa: BLE001 - unsupported by the device; reported
            found[name] = {"value": None, "unit": unit, "what": f"{what}: {error}"[:300]}
        else:
            found[name] = {"value": value, "unit": unit, "what": what}
        torch.cuda.empty_cache()
    return found


def copies() -> list[dict[str, float]]:
    """For each smaller copy, the bytes that it reads and writes together, and its microseconds.

    ``fill_us`` is a fill of as many bytes, by the faster of ``zero_`` and ``fill_``.
    """
    return [
        {"bytes": 2 * size, "us": _copy_ms(size) * 1e3, "fill_us": _fill_ms(2 * size) * 1e3}
        for size in COPIED
    ]


def _copy() -> float:
    return 2 * 2**31 / _copy_ms(2**31) / 1e6


def _copy_ms(size: int) -> float:
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return median_ms(lambda: target.copy_(source))


def _fill_ms(size: int) -> float:
    target = torch.empty(size // 4, dtype=torch.float32, device="cuda")
    return min(median_ms(target.zero_), median_ms(lambda: target.fill_(1)))


def _matmul() -> float:
    a, b = (torch.randn(LARGEST, LARGEST, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * LARGEST**3 / median_ms(lambda: a @ b.t()) / 1e9


def _scaled_mm() -> float:
    a, b = (torch.randn(LARGEST, LARGEST, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")

    def product() -> Any:
        return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return 2 * LARGEST**3 / median_ms(product) / 1e9


def error_ratio(
    workload: Workload,
    dispatch_dtype: str,
    results: Any,
    expected: tuple[Any, ...],
    *,
    whole: bool = False,
) -> float | None:
    """The worst error divided by the error that the contracts allow; None if it is infinite.

    A peer may return fewer values, or None for a value that cannot be compared; such values are not
    checked. With ``whole``, as for implementations, every value is required. Bits other than the
    required ones, where the contract requires exact bits, and a wrong number of elements are an
    infinite error.
    """
    worst = 0.0
    results = as_tuple(results)
    if whole and len(results) != len(expected):
        return None
    for result, value in zip(results, expected, strict=False):
        if result is None and not whole:
            continue
        given, wanted = [*tensors(result)], [*leaves(value)]
        if [it.numel() for it in given] != [_elements(it) for it in wanted]:
            return None
        for found, right in zip(given, wanted, strict=True):
            dtype = str(found.dtype).removeprefix("torch.")
            tolerance = workload.tolerance(dispatch_dtype, dtype)
            ratio = compare(found, right, tolerance).ratio
            exact = tolerance.rtol == tolerance.atol == 0
            worst = max(worst, math.inf if exact and ratio else ratio)
    return worst if math.isfinite(worst) else None


def _elements(expected: Tensor | Between) -> int:
    return (expected.low if isinstance(expected, Between) else expected).numel()
