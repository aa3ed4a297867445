"""Lists of tensors, prepared for multi-tensor kernels: one launch processes whole lists.

How numbers get onto a device, and how lists are cut into chunks, is defined by each set of
implementations (:class:`ListPreparer`, :class:`Demand`).

The i-th tensors of a call's lists are a *row*. A kernel finds its rows in a table on the device:
first the index of each row's first chunk, then for each row its count of elements and the addresses
of its tensors. One launch takes the rows that have the same dtypes and the same alignment; one
program takes one chunk of a row.

The results are cached by what can be seen of the tensors without reading them: a second call with
the same tensors checks nothing and copies nothing to the device. A table is written by kernels that
carry its numbers as arguments, so a table made while a CUDA graph is captured is written by the
graph as well. A graph gets tables of its own, because a cached table may be evicted before the
graph is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine_fl.backends._arguments import (
    NOT_A_TENSOR,
    PLAIN,
    add_to_cache,
    check_fresh,
    check_size,
)
from transformer_engine_fl.backends._memory import keeping_stream
from transformer_engine_fl.core.errors import NotSupportedError

if TYPE_CHECKING:
    from transformer_engine_fl.core.contract import Contract

__all__ = [
    "ALIGNMENT",
    "MOST_LAYOUTS",
    "MOST_TABLES",
    "Demand",
    "Group",
    "ListPreparer",
    "PreparedLists",
    "Tiles",
    "whole_chunk",
]

ALIGNMENT = 16
"""Bytes of the widest access: the tensors of an aligned group begin at a multiple of it."""

MOST_LAYOUTS = 64
MOST_TABLES = 8
"""Per layout: gradients may have other addresses in each step."""
_WHOLE_CHUNK = 8192  # bytes of the widest tensor
_MOST_CHUNKS = 2**31 - 2**14
_PLAIN = frozenset(PLAIN)

Lists = Sequence[Sequence[Tensor]]
_Pointers = tuple[tuple[int, ...], ...]
NumbersOnDevice = Callable[[Sequence[int], torch.device], Tensor]


class Tiles(NamedTuple):
    """How lists are cut.

    Attributes:
        threads: threads of a program.
        tile: elements that a program processes at once.
        chunk: elements that a program processes in all.
    """

    threads: int
    tile: int
    chunk: int


def whole_chunk(threads: int) -> Callable[[int], Tiles]:
    """The cut by item size whose programs process all of their chunk at once."""

    def cut(itemsize: int) -> Tiles:
        elements = _WHOLE_CHUNK // itemsize
        return Tiles(threads, elements, elements)

    return cut


class Demand(NamedTuple):
    """What an operator needs of its lists.

    Attributes:
        names: its list arguments, in the order of the addresses in a table.
        cut: chooses the cut from the device, the total elements of the first list and the item
            size of the widest tensor of all lists but the ``numbers``.
        numbers: how many of the lists, counted from the end, hold one number for each row. Tensors
            of all other lists have as many elements as those of the first.
        chunk_starts: whether a row's table entry ends with the index of its first chunk among all
            chunks.
    """

    names: tuple[str, ...]
    cut: Callable[[torch.device, int, int], Tiles]
    numbers: int = 0
    chunk_starts: bool = False


class Group(NamedTuple):
    """The rows of one launch.

    Attributes:
        dtypes: the dtypes of a row's tensors, without its numbers.
        aligned: all those tensors begin at a multiple of ALIGNMENT.
        table: int64.
        rows: the number of rows.
        chunks: the chunks of all rows together: the programs of the launch.
        tiles: how the rows are cut.
    """

    dtypes: tuple[torch.dtype, ...]
    aligned: bool
    table: Tensor
    rows: int
    chunks: int
    tiles: Tiles


class _Tables(NamedTuple):
    groups: tuple[Group, ...]
    chunk_starts: Tensor | None


class _Layout:
    """What follows from the shapes, strides, dtypes and device of tensors alone.

    Attributes:
        device: the tensors' device; None if there are none.
        chunk_starts: the index of each row's first chunk among all chunks, then the number of
            chunks.
        copied: rows whose tensors do not hold their elements in the same order without gaps.
    """

    def __init__(
        self, op: str, demand: Demand, lists: Lists, numbers_on_device: NumbersOnDevice
    ) -> None:
        first = lists[0]
        self._demand = demand
        self._numbers_on_device = numbers_on_device
        self._tables: dict[object, _Tables] = {}  # by stream and addresses
        self._sizes = [it.numel() for it in first]
        self.device = first[0].device if first else None
        self._dtyped = len(lists) - demand.numbers
        if self.device is not None:
            itemsize = max(it.itemsize for some in lists[: self._dtyped] for it in some)
            self._tiles = demand.cut(self.device, sum(self._sizes), itemsize)
        least = 1 if demand.numbers else 0  # without elements there are still numbers to write
        self._counts = [max(-(-size // self._tiles.chunk), least) for size in self._sizes]
        self._groups: dict[tuple[torch.dtype, ...], list[int]] = {}
        self.copied: set[int] = set()
        self.chunk_starts = [0]
        for row, count in enumerate(self._counts):
            self.chunk_starts.append(self.chunk_starts[-1] + count)
            if count:
                tensors = [it[row] for it in lists[: self._dtyped]]
                self._groups.setdefault(tuple([it.dtype for it in tensors]), []).append(row)
                if not _have_same_layout(tensors):
                    self.copied.add(row)
        check_size(op, "chunks", self.chunk_starts[-1], _MOST_CHUNKS)

    def check_memory(self, op: str, pointers: _Pointers, written: Sequence[bool]) -> None:
        """Decline tensors without memory, and writing a tensor twice, where order would matter."""
        addresses: list[int] = []
        for place, (column, writes) in enumerate(zip(pointers, written, strict=True)):
            if place < self._dtyped:
                column = tuple([it for it, n in zip(column, self._sizes, strict=True) if n])
            if 0 in column:
                raise NotSupportedError(f"{op}: a tensor has no memory of its own")
            if writes:
                addresses += column
        if len(set(addresses)) != len(addresses):
            raise NotSupportedError(f"{op}: a tensor that is written is listed twice")

    def cached_tables(self, op: str, pointers: _Pointers, written: Sequence[bool]) -> _Tables:
        """Tables for these addresses, from the cache if they are in it."""
        assert self.device is not None
        stream = keeping_stream(self.device)
        key = (stream, pointers)
        tables = self._tables.get(key)
        if tables is None:
            self.check_memory(op, pointers, written)
            tables = self.new_tables(pointers)
            if stream is not None:
                add_to_cache(self._tables, key, tables, MOST_TABLES)
        return tables

    def new_tables(self, pointers: _Pointers) -> _Tables:
        """Tables for these addresses."""
        assert self.device is not None
        groups = []
        for dtypes, rows in self._groups.items():
            halves: tuple[list[int], list[int]] = ([], [])
            for row in rows:
                bits = 0
                for column in pointers[: self._dtyped]:
                    bits |= column[row]
                halves[not bits % ALIGNMENT].append(row)
            for aligned, some in enumerate(halves):
                if some:
                    groups.append(self._group(dtypes, bool(aligned), some, pointers))
        chunk_starts = (
            self._numbers_on_device(self.chunk_starts, self.device)
            if self._demand.chunk_starts
            else None
        )
        return _Tables(tuple(groups), chunk_starts)

    def _group(
        self,
        dtypes: tuple[torch.dtype, ...],
        aligned: bool,
        rows: list[int],
        pointers: _Pointers,
    ) -> Group:
        assert self.device is not None
        starts: list[int] = []
        body: list[int] = []
        chunks = 0
        for row in rows:
            starts.append(chunks)
            chunks += self._counts[row]
            body.append(self._sizes[row])
            body += [column[row] for column in pointers]
            if self._demand.chunk_starts:
                body.append(self.chunk_starts[row])
        table = self._numbers_on_device(starts + body, self.device)
        return Group(dtypes, aligned, table, len(rows), chunks, self._tiles)


class PreparedLists(NamedTuple):
    """The checked arguments of a call, and what its kernels are launched with.

    Attributes:
        others: the arguments that are no lists, by name; tensors are plain ones.
        device: the device of the lists' tensors; None if there are none.
        groups: one launch each.
        chunks: the chunks of all rows together.
        chunk_starts: the index of each row's first chunk among all chunks, then their number; None
            unless demanded.
        copies: (tensor, its dense copy) pairs: written back when the kernels are launched.
        written: the tensors that the call writes.
        lists: the tensors that the tables point to; they must live until the kernels are launched.
    """

    others: dict[str, Any]
    device: torch.device | None
    groups: tuple[Group, ...] = ()
    chunks: int = 0
    chunk_starts: Tensor | None = None
    copies: Sequence[tuple[Tensor, Tensor]] = ()
    written: Sequence[Tensor] = ()
    lists: Lists = ()

    def finish(self) -> None:
        """Write copies back and report the writes to autograd; call it after the launches."""
        for memory, copy in self.copies:
            memory.copy_(copy)
        # Autograd must know that values saved of these tensors for a backward pass are gone.
        torch.autograd.graph.increment_version(self.written)


class ListPreparer:
    """A set's way of preparing lists.

    Args:
        plain: gives the same memory as a plain tensor, or declines (``TensorPreparer.plain``).
        numbers_on_device: puts integers into a device's memory, also while a graph is captured.

    Attributes:
        layouts: the cached layouts of lists seen before.
    """

    def __init__(
        self, plain: Callable[[str, str, Tensor], Tensor], numbers_on_device: NumbersOnDevice
    ) -> None:
        self._plain = plain
        self._numbers_on_device = numbers_on_device
        self.layouts: dict[object, _Layout] = {}

    def prepare(
        self, contract: Contract[..., Any], demand: Demand, **arguments: Any
    ) -> PreparedLists:
        """Check a call and prepare its lists for kernels.

        Args:
            contract: the operator's.
            demand: what its kernels need.
            arguments: all arguments of the call, by name.

        Raises:
            ArgumentError: the call breaks the contract.
            NotSupportedError: kernels cannot take one of the arguments.
        """
        op, names = contract.name, demand.names
        given: Lists = [arguments[name] for name in names]
        writes = [name in contract.mutates for name in names]
        seen = _seen(given, writes)
        facts, pointers = seen or (None, ())
        layout = None if seen is None else self.layouts.get((demand, facts))
        if layout is not None and _others_are_on(layout.device, arguments, names):
            # The lists were checked when lists like them were first seen.
            contract.check(**{**arguments, **dict.fromkeys(names, ())})
        else:
            contract.check(**arguments)
            plain = [self._plain_list(op, *it) for it in zip(names, given, strict=True)]
            layout = _Layout(op, demand, plain, self._numbers_on_device)
            if seen is not None:
                add_to_cache(self.layouts, (demand, facts), layout, MOST_LAYOUTS)
        others = {
            name: self._other(op, name, it) for name, it in arguments.items() if name not in names
        }
        if layout.device is None:
            return PreparedLists(others, None)
        check_fresh(op, torch.empty((0,), device=layout.device))
        copies: list[tuple[Tensor, Tensor]] = []
        lists = given
        if seen is not None and not layout.copied:
            tables = layout.cached_tables(op, pointers, writes)
        else:
            layout.check_memory(op, _pointers(op, given), writes)
            dense = [self._plain_list(op, *it) for it in zip(names, given, strict=True)]
            for place, tensors in enumerate(dense):
                for row, tensor in enumerate(tensors):
                    if row in layout.copied:
                        tensors[row] = tensor.contiguous()
                    if writes[place] and tensors[row].data_ptr() != given[place][row].data_ptr():
                        memory = given[place][row].as_subclass(torch.Tensor).detach()
                        copies.append((memory, tensors[row]))
            lists = dense
            tables = layout.new_tables(_pointers(op, lists))
        written = [
            it for listed, writing in zip(given, writes, strict=True) if writing for it in listed
        ]
        chunk_starts = layout.chunk_starts[-1], tables.chunk_starts
        return PreparedLists(
            others, layout.device, tables.groups, *chunk_starts, copies, written, lists
        )

    def _plain_list(self, op: str, name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._plain(op, f"{name}[{row}]", it) for row, it in enumerate(tensors)]

    def _other(self, op: str, name: str, value: Any) -> Any:
        """An argument that is no list: a number, None, or a tensor, which may be written."""
        if isinstance(value, Tensor):
            tensor = self._plain(op, name, value)
            if value.is_neg():
                raise NotSupportedError(f"{op}: {name!r} has its negative bit set")
            return tensor
        if value is not None and not isinstance(value, int | float):
            raise NotSupportedError(f"{op}: {name!r} is symbolic, not a concrete number")
        return value


def _seen(lists: Lists, writes: Sequence[bool]) -> tuple[object, _Pointers] | None:
    """The cacheable facts of plain tensors, and their addresses; None if a tensor is not plain.

    The result is also None for a written tensor that was made in inference mode, outside of it. A
    device is represented by its number. Tensors without memory have the CPU's number, but their
    address is 0.
    """
    facts, pointers = [], []
    outside = not torch.is_inference_mode_enabled()
    try:
        for tensors, written in zip(lists, writes, strict=True):
            if not isinstance(tensors, list | tuple) or not _PLAIN.issuperset(map(type, tensors)):
                return None
            if any(map(Tensor.is_neg, tensors)):
                return None
            if written and outside and any(map(Tensor.is_inference, tensors)):
                return None
            pointers.append(tuple(map(Tensor.data_ptr, tensors)))
            shapes = tuple([it.shape for it in tensors])
            dtypes = tuple([it.dtype for it in tensors])
            dense = all(map(Tensor.is_contiguous, tensors))
            strides = None if dense else tuple(map(Tensor.stride, tensors))
            facts.append((shapes, strides, dtypes, tuple(map(Tensor.get_device, tensors))))
    except NOT_A_TENSOR:
        return None
    return tuple(facts), tuple(pointers)


def _others_are_on(
    device: torch.device | None, arguments: dict[str, Any], names: Sequence[str]
) -> bool:
    """Whether all tensors outside the lists are on that device."""
    return all(
        it.device == device
        for name, it in arguments.items()
        if isinstance(it, Tensor) and name not in names
    )


def _pointers(op: str, lists: Lists) -> _Pointers:
    try:
        return tuple([tuple([it.data_ptr() for it in tensors]) for tensors in lists])
    except RuntimeError as error:  # a wrapper that torch's transforms put around a tensor
        raise NotSupportedError(f"{op}: a tensor has no memory of its own: {error}") from None


def _have_same_layout(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors hold their elements in the same order, without gaps."""
    if all(map(Tensor.is_contiguous, tensors)):
        return True
    steps = tensors[0].stride()
    if any(it.stride() != steps for it in tensors):
        return False
    extent = 1
    for step, size in sorted(zip(steps, tensors[0].shape, strict=True)):
        if size != 1:
            if step != extent:
                return False
            extent *= size
    return True
