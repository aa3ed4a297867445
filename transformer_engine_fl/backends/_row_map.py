"""Row id maps, as whoever moves tokens goes through them: which pairs a token has, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RowMap"]


class RowMap(NamedTuple):
    """A row id map, and how to go through it.

    Attributes:
        entries: the map.
        tokens: T.
        slots: how many experts each may have.
        steps: from token to token, and from place to place.
        mask: whether it is the map of a mask.
    """

    entries: Tensor
    tokens: int
    slots: int
    steps: tuple[int, int]
    mask: bool

    @classmethod
    def of(cls, entries: Tensor, mask: bool) -> RowMap:
        """Of a mask, ``[T, 2 * experts + 1]``; otherwise ``[topk, T]``."""
        if mask:
            tokens, places = entries.shape
            return cls(entries, tokens, places // 2, (entries.stride(0), entries.stride(1)), mask)
        slots, tokens = entries.shape
        return cls(entries, tokens, slots, (entries.stride(1), entries.stride(0)), mask)
