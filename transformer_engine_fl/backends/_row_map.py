"""Row id maps for code that moves tokens: which pairs a token has, and their rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RowMap"]


class RowMap(NamedTuple):
    """A row id map, and how to iterate over it.

    Attributes:
        entries: the map.
        tokens: T.
        slots: most experts of a token.
        steps: strides between tokens, and between a token's entries.
        mask: whether it is the map of a mask.
    """

    entries: Tensor
    tokens: int
    slots: int
    steps: tuple[int, int]
    mask: bool

    @classmethod
    def of(cls, entries: Tensor, mask: bool) -> RowMap:
        """The map of a mask is ``[T, 2 * experts + 1]``; otherwise it is ``[topk, T]``."""
        if mask:
            tokens, places = entries.shape
            return cls(entries, tokens, places // 2, (entries.stride(0), entries.stride(1)), mask)
        slots, tokens = entries.shape
        return cls(entries, tokens, slots, (entries.stride(1), entries.stride(0)), mask)
