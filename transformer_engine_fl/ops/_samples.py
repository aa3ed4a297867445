"""Tensors for the families' samples: random values in every shape and memory layout.

What values are extreme is for a family to say; how a tensor may lie in memory is the same
for all of them.
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
    """Any values of a dtype; of uint8 every one of a byte."""
    import torch

    if dtype == "uint8":
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(device)
    return normal(shape, getattr(torch, dtype), device, seed)


def with_extremes(shape: tuple[int, ...], dtype: str, device: str, seed: int) -> Tensor:
    """Values among which are the largest of the dtype, and what is not finite."""
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
    """Tensors of one shape, of any number of dimensions, by how they lie in memory."""
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
    """(what is special about it, normal values) for each shape and each memory layout.

    Of uint8, the bytes of such values.

    Args:
        shapes: contiguous tensors, by label.
        rows, columns: the shape of those that lie in memory in another way.
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
