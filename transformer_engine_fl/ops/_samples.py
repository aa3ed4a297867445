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

__all__ = ["int32", "layouts", "normal"]


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Values of the standard normal distribution, the same on every device."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def int32(values: Sequence[object], device: str) -> Tensor:
    """Offsets, lengths, indices."""
    import torch

    return torch.tensor(values, dtype=torch.int32, device=device)


def layouts(
    shapes: Mapping[str, tuple[int, ...]], rows: int, columns: int, dtype: str, device: str
) -> Iterator[tuple[str, Tensor]]:
    """(what is special about it, normal values) for each shape and each memory layout.

    Args:
        shapes: contiguous tensors, by label.
        rows, columns: the shape of those that lie in memory in another way.
        dtype, device: of all of them.
    """
    import torch

    kind: torch.dtype = getattr(torch, dtype)

    def values(*shape: int) -> Tensor:
        return normal(shape, kind, device, seed=sum(shape) + 1)

    for label, shape in shapes.items():
        yield label, values(*shape)
    yield "transposed", values(columns, rows).t()
    yield "strided columns", values(rows, 2 * columns)[:, ::2]
    yield "padded rows", values(rows, columns + 8)[:, :columns]
    yield "unaligned start", values(rows * columns + 1)[1:].view(rows, columns)
    yield "expanded", values(1, columns).expand(rows, columns)
