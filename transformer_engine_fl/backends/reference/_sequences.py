"""Layouts of sequences of different lengths in one tensor.

A layout maps each row of a tensor to the token of the sequence that it holds, and each token to
its row. To move tokens from one layout to another, ask the target for the tokens of its rows, and
the source for the rows of these tokens. All of this is arithmetic on ``cu_seqlens`` on the
device: the host never waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Packed", "Padded", "Tokens", "as_bytes", "has_row", "rows_at"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens in the rows of a tensor: int64 tensors with an element for each row.

    Attributes:
        sequence: the number of the token's sequence.
        place: the token's place in the sequence, from 0.
        length: of the sequence.
        inside: bool; where False, the row holds no token and the other values are meaningless.
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
        rows: the number of rows; rows after the last sequence hold no token.
    """

    offsets: Tensor
    rows: int

    def tokens(self) -> Tokens:
        """The token of each row."""
        row = torch.arange(self.rows, device=self.offsets.device)
        sequence = torch.searchsorted(self.offsets, row, right=True) - 1
        sequence = sequence.clamp(0, self.offsets.shape[0] - 2)
        place, length = row - self.offsets[sequence], self.offsets.diff()[sequence]
        return Tokens(sequence, place, length, (place >= 0) & (place < length))

    def row(self, sequence: Tensor, place: Tensor) -> Tensor:
        """The rows of tokens."""
        return self.offsets[sequence] + place


@dataclass(frozen=True, slots=True)
class Padded:
    """Each sequence has ``width`` rows; of a longer one only the first tokens have a row.

    Attributes:
        offsets: ``[b + 1]``, int64; the differences are the lengths.
        width: the number of rows of each sequence.
    """

    offsets: Tensor
    width: int

    def tokens(self) -> Tokens:
        """The token of each of the ``b * width`` rows."""
        lengths = self.offsets.diff()
        sequences = torch.arange(lengths.shape[0], device=lengths.device)
        sequence = sequences.repeat_interleave(self.width)
        place = torch.arange(self.width, device=lengths.device).repeat(lengths.shape[0])
        length = lengths[sequence]
        return Tokens(sequence, place, length, place < length)

    def row(self, sequence: Tensor, place: Tensor) -> Tensor:
        """The rows of tokens; -1 for tokens without a row."""
        return torch.where(place < self.width, sequence * self.width + place, -1)


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory, with float8 as uint8, which torch can index."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def has_row(tensor: Tensor, rows: Tensor) -> Tensor:
    """Which of ``rows`` the tensor has."""
    return (rows >= 0) & (rows < tensor.shape[0])


def rows_at(tensor: Tensor, rows: Tensor) -> Tensor:
    """A contiguous copy of ``tensor[rows]``, with zeros for rows that do not exist, such as -1."""
    given = as_bytes(tensor)
    with_zeros = torch.cat([given, given.new_zeros((1, *given.shape[1:]))]).contiguous()
    found = with_zeros[torch.where(has_row(given, rows), rows, given.shape[0])]
    # No view where none is needed: torch has no batching rule for it, as is_grads_batched needs.
    return found if given is tensor else found.view(tensor.dtype)
