"""Grouped products with a list of tensors for each operand: recognising a call like an earlier one.

Inspecting hundreds of tensors one after the other takes longer than multiplying them. So the result
of the inspection is kept, and a guard that torch runs on all tensors at once tells whether another
call is like it: in all but the tensors' addresses and contents, and the split of rows that all
groups share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from transformer_engine_fl.backends import _repeats
from transformer_engine_fl.backends._arguments import add_to_cache

__all__ = ["GroupedCall", "KnownGroups"]

Found = TypeVar("Found")
_NUMBERS = {int, float}
_LISTS = {list, tuple}


class GroupedCall(NamedTuple):
    """The inspected parts of a call of grouped products.

    Attributes:
        operands: the tensors of A, then those of B.
        tensors: all tensors of the call.
        splits: the rows of each group; empty if each group has tensors of its own.
        key: what must be equal, besides what the guard of the tensors tests.
        transb, of_a, of_b, of_into: the contract's flag, and the number of tensors in each list.
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
        """The call; None if it may be invalid, or has ``others``.

        Args:
            others: biases and scales.
            flags: transa, transb and further flags.
            numbers: alpha and beta.
            A, B, m_splits, gelu_input, into, out_dtype: the contract's arguments.
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
        try:  # so that products of several sizes are kept at the same time
            first = (A[0].dtype, A[0].shape, B[0].shape)
        except (IndexError, AttributeError):
            return None
        key = (flags, numbers, out_dtype, given, len(splits), of_a, of_b, of_into, first)
        tensors = [*operands, *lists[2], *more]
        return cls(operands, tensors, splits, key, flags[1], of_a, of_b, of_into)

    def free(self) -> str | None:
        """What may be split differently with the same tensors: "rows" of D, "terms" or nothing."""
        groups = len(self.splits)
        if self.of_b != 1 or groups < 2:
            return None
        if self.transb:
            return "terms" if self.of_a == 1 else None
        return "rows" if self.of_a == groups and self.of_into < 2 else None


class KnownGroups(Generic[Found]):
    """Results of inspecting calls, by the calls' keys."""

    def __init__(self) -> None:
        self._found: dict[
            object, tuple[Callable[[list[Tensor]], bool], list[int] | None, Found]
        ] = {}

    def get(self, call: GroupedCall | None) -> Found | None:
        """The result kept for an earlier call that this one is like; None if there is none."""
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
        """Keep the result for a call that is valid."""
        alike = _repeats.tensor_guard(call.tensors)
        if alike is not None:
            splits = None if call.free() else [*call.splits]
            add_to_cache(self._found, call.key, (alike, splits, found))
