"""Tensors for the families' samples: random values in every shape and memory layout.

Each family says which values are extreme for it; the memory layouts are the same for all
families.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["arranged", "data", "int32", "layouts", "normal", "with_extremes"]


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Values of the standard normal distribution, the same on every device."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def data(shape: tuple[int, ...], dtype: str, device: str, seed: int) -> Tensor:
    """Random values of a dtype; for uint8, any value of a byte."""
    import torch

    if dtype == "uint8":
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(device)
    return normal(shape, getattr(torch, dtype), device, seed)


def with_extremes(shape: tuple[int, ...], dtype: str, device: str, seed: int) -> Tensor:
    """Values that include the largest of the dtype, infinities and NaN."""
    import torch

    values = data(shape, dtype, device, seed)
    if dtype == "uint8":
        return values
    flat = values.view(-1)
    extremes = [torch.finfo(values.dtype).max, -torch.finfo(values.dtype).smallest_normal, -0.0]
    if dtype not in ("float8_e4m3fn", "float8_e5m2"):
        extremes += [torch.inf, -torch.inf, torch.nan]
    for place, value in enumerate(extremes):
        flat[place :: 7 + place] = value
    return values


def arranged(
    shape: tuple[int, ...], dtype: str, device: str, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of one shape, of any number of dimensions, by the name of their memory layout."""
    import torch

    turned = data(shape[::-1], dtype, device, seed)
    yield "transposed", turned.permute(*reversed(range(len(shape))))
    yield "strided", data((*shape[:-1], 2 * shape[-1]), dtype, device, seed)[..., ::2]
    size = torch.Size(shape).numel()
    yield "unaligned start", data((size + 1,), dtype, device, seed)[1:].view(shape)
    yield "expanded", data((1, *shape[1:]), dtype, device, seed).expand(shape)


def int32(values: Sequence[object], device: str) -> Tensor:
    """Offsets, lengths, indices."""
    import torch

    return torch.tensor(values, dtype=torch.int32, device=device)


def layouts(
    shapes: Mapping[str, tuple[int, ...]], rows: int, columns: int, dtype: str, device: str
) -> Iterator[tuple[str, Tensor]]:
    """(label, normally distributed values) for each shape and each memory layout.

    For uint8, the bytes of such values.

    Args:
        shapes: of the contiguous tensors, by label.
        rows, columns: the shape of the tensors with another memory layout.
        dtype, device: of all of them.
    """
    import torch

    kind: torch.dtype = getattr(torch, dtype)

    def values(*shape: int) -> Tensor:
        seed = sum(shape) + 1
        if kind == torch.uint8:
            return normal(shape, torch.float8_e4m3fn, device, seed).view(kind)
        return normal(shape, kind, device, seed)

    for label, shape in shapes.items():
        yield label, values(*shape)
    yield "transposed", values(columns, rows).t()
    yield "strided columns", values(rows, 2 * columns)[:, ::2]
    yield "padded rows", values(rows, columns + 8)[:, :columns]
    yield "rows an odd distance apart", values(rows, columns + 3)[:, :columns]
    yield "unaligned start", values(rows * columns + 1)[1:].view(rows, columns)
    yield "expanded", values(1, columns).expand(rows, columns)
