"""Calls with a list of tensors for each operand, which are like one before.

To look at hundreds of tensors one after the other takes longer than to multiply them. So what a
set found out of such a call is kept, and a look that torch takes at all tensors at once says
whether another call is like it: in all but where its tensors are, what they hold, and how rows
that all groups share are split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from transformer_engine_fl.backends import _repeats
from transformer_engine_fl.backends._arguments import keep

__all__ = ["GroupedCall", "KnownGroups"]

Found = TypeVar("Found")
_NUMBERS = {int, float}
_LISTS = {list, tuple}


class GroupedCall(NamedTuple):
    """A call of grouped products, as far as it is looked at here.

    Attributes:
        operands: the tensors of A, then those of B.
        tensors: all there are.
        splits: the rows of each group; none if each has tensors of its own.
        key: what must be the same, beside the tensors' kind.
        transb, of_a, of_b, of_into: the contract's, and how many tensors each list has.
    """

    operands: list[Tensor]
    tensors: list[Tensor]
    splits: Sequence[int]
    key: tuple[Any, ...]
    transb: bool
    of_a: int
    of_b: int
    of_into: int

    @classmethod
    def of(
        cls,
        A: Any,
        B: Any,
        m_splits: Any,
        gelu_input: Any,
        into: Any,
        others: tuple[Any, ...],
        flags: tuple[Any, ...],
        numbers: tuple[Any, ...],
        out_dtype: Any,
    ) -> GroupedCall | None:
        """The call; None of one that may be wrong, or has ``others``.

        Args:
            others: biases and scales.
            flags: transa, transb and others.
            numbers: alpha and beta.
            A, B, m_splits, gelu_input, into, out_dtype: the contract's.
        """
        if any(it is not None for it in others):
            return None
        lists = (A, B, () if into is None else into)
        splits = () if m_splits is None else m_splits
        if not {*map(type, (*lists, splits))} <= _LISTS or not {*map(type, splits)} <= {int}:
            return None
        if {*map(type, flags)} != {bool} or not {*map(type, numbers)} <= _NUMBERS:
            return None
        if out_dtype is not None and type(out_dtype) is not torch.dtype:
            return None
        operands = [*A, *B]
        more = [] if gelu_input is None else [gelu_input]
        given = (m_splits is None, gelu_input is None, into is None)
        of_a, of_b, of_into = map(len, lists)
        try:  # so that products of several sizes are known at the same time
            first = (A[0].dtype, A[0].shape, B[0].shape)
        except (IndexError, AttributeError):
            return None
        key = (flags, numbers, out_dtype, given, len(splits), of_a, of_b, of_into, first)
        tensors = [*operands, *lists[2], *more]
        return cls(operands, tensors, splits, key, flags[1], of_a, of_b, of_into)

    def free(self) -> str | None:
        """What may be split otherwise with the same tensors: "rows" of D, or "terms"."""
        groups = len(self.splits)
        if self.of_b != 1 or groups < 2:
            return None
        if self.transb:
            return "terms" if self.of_a == 1 else None
        return "rows" if self.of_a == groups and self.of_into < 2 else None


class KnownGroups(Generic[Found]):
    """What was found out of calls, by what they have in common."""

    def __init__(self) -> None:
        self._found: dict[
            object, tuple[Callable[[list[Tensor]], bool], list[int] | None, Found]
        ] = {}

    def get(self, call: GroupedCall | None) -> Found | None:
        """What was found out of a call that this one is like."""
        known = None if call is None else self._found.get(call.key)
        if call is None or known is None:
            return None
        alike, splits, found = known
        if splits is not None:
            fits = splits == [*call.splits]
        else:
            fits = min(call.splits) >= 0 and sum(call.splits) == call.operands[-1].shape[0]
        return found if fits and alike(call.tensors) else None

    def add(self, call: GroupedCall, found: Found) -> None:
        """Remember what was found out of a call that is right."""
        alike = _repeats.look(call.tensors)
        if alike is not None:
            splits = None if call.free() else [*call.splits]
            keep(self._found, call.key, (alike, splits, found))
