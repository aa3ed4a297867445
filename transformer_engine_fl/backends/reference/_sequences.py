"""Sequences of several lengths in one tensor: which token stands where.

A layout tells of each row of a tensor which token of which sequence it holds, and of each
token in which row it is. Moving tokens from one layout to another is asking the second for
the tokens of its rows, and the first for the rows of those. All of it is arithmetic on
``cu_seqlens``: nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Packed", "Padded", "Tokens", "as_bytes", "has_row", "rows_at"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens in the rows of a tensor; int64, one of each for each row.

    Attributes:
        sequence: a token's sequence.
        place: its place in there, from 0.
        length: of its sequence.
        inside: bool; where it is False the row holds no token, and the others mean nothing.
    """

    sequence: Tensor
    place: Tensor
    length: Tensor
    inside: Tensor


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences follow one another.

    Attributes:
        offsets: ``[b + 1]``, int64, where each begins and the last ends, in rows.
        rows: how many rows there are; those after the last sequence hold no token.
    """

    offsets: Tensor
    rows: int

    def tokens(self) -> Tokens:
        """What each row holds."""
        row = torch.arange(self.rows, device=self.offsets.device)
        sequence = torch.searchsorted(self.offsets, row, right=True) - 1
        sequence = sequence.clamp(0, self.offsets.shape[0] - 2)
        place, length = row - self.offsets[sequence], self.offsets.diff()[sequence]
        return Tokens(sequence, place, length, (place >= 0) & (place < length))

    def row(self, sequence: Tensor, place: Tensor) -> Tensor:
        """Where tokens are."""
        return self.offsets[sequence] + place


@dataclass(frozen=True, slots=True)
class Padded:
    """Each sequence has ``width`` rows; of a longer one only the first tokens have a row.

    Attributes:
        offsets: ``[b + 1]``, int64; the differences are the lengths.
        width: rows of each sequence.
    """

    offsets: Tensor
    width: int

    def tokens(self) -> Tokens:
        """What each of the ``b * width`` rows holds."""
        lengths = self.offsets.diff()
        sequences = torch.arange(lengths.shape[0], device=lengths.device)
        sequence = sequences.repeat_interleave(self.width)
        place = torch.arange(self.width, device=lengths.device).repeat(lengths.shape[0])
        length = lengths[sequence]
        return Tokens(sequence, place, length, place < length)

    def row(self, sequence: Tensor, place: Tensor) -> Tensor:
        """Where tokens are; -1 for those that have no row."""
        return torch.where(place < self.width, sequence * self.width + place, -1)


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory, float8 as uint8: torch can index that."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def has_row(tensor: Tensor, rows: Tensor) -> Tensor:
    """Which of ``rows`` there are."""
    return (rows >= 0) & (rows < tensor.shape[0])


def rows_at(tensor: Tensor, rows: Tensor) -> Tensor:
    """``tensor[rows]``, fresh and contiguous; zeros for a row that there is not, such as -1."""
    given = as_bytes(tensor)
    with_zeros = torch.cat([given, given.new_zeros((1, *given.shape[1:]))]).contiguous()
    found = with_zeros[torch.where(has_row(given, rows), rows, given.shape[0])]
    # torch has no rule for the view in the batches of is_grads_batched.
    return found if given is tensor else found.view(tensor.dtype)
