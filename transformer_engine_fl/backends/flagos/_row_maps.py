"""Row id maps in Triton: the row of each pair of a token and an expert.

First pairs are counted in tiles of tokens, one tile or a few of them per program, and then each
tile's pairs are placed. If there are few counts, each placing program sums them itself; if there
are many, a launch in between sums them once for all. Nothing depends on the order in which programs
run, and nothing waits for the device.

The rows are moved elsewhere, by such a map.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from transformer_engine_fl.backends.flagos._arguments import (
    WIDEST_UNIT,
    block_of,
    check_size,
    fresh,
    launch_of,
)
from transformer_engine_fl.backends.flagos._dependent import (
    dependent_launch,
    has_dependent_launches,
    release_dependents,
    wait_for_predecessor,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = [
    "Placing",
    "place_by_index",
    "place_by_mask",
    "place_pairs",
]

# ----------------------------------------------------------------------------- counting
#
# A group is one tile, or a few consecutive ones. Its line of ``counts`` has, for each expert e, the
# number of the group's pairs with lower experts. The group's pairs of expert e thus begin at the
# row that is the sum of the entries e of its own and all later lines, and of the entries e + 1 of
# the lines before. ``earlier`` has, for each tile, the number of each expert's pairs in the tiles
# of its group before it; it is absent if a group is one tile.
#
# Experts given by index are numbers of any size. Small ones from 0 on have a bucket each; all
# negative ones share the first bucket, and all that are too large share the last but one. That is
# right as long as a shared bucket contains a single expert; otherwise each pair is compared with
# all others. The last bucket is for positions without a pair.

_LARGEST = tl.constexpr((1 << 63) - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _expert(
    indices_ptr: tl.tensor,
    pair: tl.tensor,
    exists: tl.tensor,
    topk: tl.tensor,
    index_token: tl.tensor,
    index_slot: tl.tensor,
) -> tl.tensor:
    """The experts of pairs, int64."""
    where = (pair // topk).to(tl.int64) * index_token + (pair % topk).to(tl.int64) * index_slot
    return tl.load(indices_ptr + where, mask=exists, other=0).to(tl.int64)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["pairs", "topk", "tiles", "each", "index_token", "index_slot"]
)
def _count_indices(
    indices_ptr: tl.tensor,
    buckets_ptr: tl.tensor,
    earlier_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    extremes_ptr: tl.tensor,
    pairs: tl.int32,
    topk: tl.int32,
    tiles: tl.int32,
    each: tl.int32,
    index_token: tl.int64,
    index_slot: tl.int64,
    PAIRS: tl.constexpr,
    BUCKETS: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """A group's line, its pairs' buckets, and the extremes of the experts that share a bucket.

    ``extremes`` are the lowest and highest negative experts, and those of the large ones, each for
    GROUPS groups.
    """
    release_dependents(DEPENDENT)
    group = tl.program_id(0)
    bucket_of = tl.arange(0, BUCKETS)
    total = tl.zeros((BUCKETS,), tl.int32)
    lowest = tl.full((PAIRS,), _LARGEST, tl.int64)
    highest = tl.full((PAIRS,), -_LARGEST, tl.int64)
    lowest_large, highest_large = lowest, highest
    line = (group * each).to(tl.int64)
    for tile in tl.range(group * each, tl.minimum(group * each + each, tiles)):
        pair = tile * PAIRS + tl.arange(0, PAIRS)
        exists = pair < pairs
        expert = _expert(indices_ptr, pair, exists, topk, index_token, index_slot)
        bucket = (tl.minimum(tl.maximum(expert, -1), BUCKETS - 3) + 1).to(tl.int32)
        bucket = tl.where(exists, bucket, BUCKETS - 1)
        tl.store(buckets_ptr + pair, bucket)
        if earlier_ptr is not None:
            tl.store(earlier_ptr + line * BUCKETS + bucket_of, total)
            line += 1
        total += tl.histogram(bucket, BUCKETS).to(tl.int32)
        negative, large = expert < 0, expert >= BUCKETS - 3
        lowest = tl.minimum(lowest, tl.where(negative, expert, _LARGEST))
        highest = tl.maximum(highest, tl.where(negative, expert, -_LARGEST))
        lowest_large = tl.minimum(lowest_large, tl.where(large, expert, _LARGEST))
        highest_large = tl.maximum(highest_large, tl.where(large, expert, -_LARGEST))
    lower = tl.cumsum(total, axis=0) - total
    tl.store(counts_ptr + group.to(tl.int64) * BUCKETS + bucket_of, lower)
    extremes_ptr += group
    tl.store(extremes_ptr, tl.min(lowest, axis=0))
    tl.store(extremes_ptr + GROUPS, tl.max(highest, axis=0))
    tl.store(extremes_ptr + 2 * GROUPS, tl.min(lowest_large, axis=0))
    tl.store(extremes_ptr + 3 * GROUPS, tl.max(highest_large, axis=0))


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["tokens", "width", "tiles", "each", "route_token", "route_expert"]
)
def _count_mask(
    routing_ptr: tl.tensor,
    earlier_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    tokens: tl.int32,
    width: tl.int32,
    tiles: tl.int32,
    each: tl.int32,
    route_token: tl.int64,
    route_expert: tl.int64,
    UNIT: tl.constexpr,
    DENSE: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """A group's line; its last entry is the number of the group's pairs."""
    release_dependents(DEPENDENT)
    group = tl.program_id(0)
    experts = width * UNIT
    counts_ptr += group.to(tl.int64) * (experts + 1)
    lower = tl.zeros((), tl.int32)
    for first in tl.range(0, experts, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        known = expert < experts
        total = tl.zeros((EXPERTS,), tl.int32)
        line = (group * each).to(tl.int64)
        for tile in tl.range(group * each, tl.minimum(group * each + each, tiles)):
            if earlier_ptr is not None:
                tl.store(earlier_ptr + line * experts + expert, total, mask=known)
                line += 1
            token = tile * TOKENS + tl.arange(0, TOKENS)
            routed = _routed(
                routing_ptr, token, expert, (token < tokens)[:, None] & known[None, :],
                route_token, route_expert, UNIT, DENSE,
            )  # fmt: skip
            total += tl.sum(routed.to(tl.int32), axis=0)
        tl.store(counts_ptr + expert, lower + tl.cumsum(total, axis=0) - total, mask=known)
        lower += tl.sum(total, axis=0)
    tl.store(counts_ptr + experts, lower)


@triton.jit  # type: ignore[untyped-decorator]
def _routed(
    routing_ptr: tl.tensor,
    token: tl.tensor,
    expert: tl.tensor,
    some: tl.tensor,
    route_token: tl.tensor,
    route_expert: tl.tensor,
    UNIT: tl.constexpr,
    DENSE: tl.constexpr,
) -> tl.tensor:
    """Whether tokens go to experts. DENSE: a token's entries are contiguous."""
    start = (token.to(tl.int64) * route_token * UNIT)[:, None]
    if DENSE:
        where = start + expert[None, :]
    else:
        where = start + (expert * route_expert)[None, :]
    return tl.load(routing_ptr + where, mask=some, other=0) != 0


# -------------------------------------------------------------------------- summing up


@triton.jit(do_not_specialize=["groups", "width"])  # type: ignore[untyped-decorator]
def _add_up(
    counts_ptr: tl.tensor,
    begins_ptr: tl.tensor,
    groups: tl.int32,
    width: tl.int32,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Where each group's pairs begin; in the last column, the number of all pairs."""
    release_dependents(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    group = tl.arange(0, GROUPS)
    some = (group < groups)[:, None] & (column < width)[None, :]
    where = group.to(tl.int64)[:, None] * width + column[None, :]
    lower = tl.load(counts_ptr + where, mask=some, other=0)
    not_last = some & (column + 1 < width)[None, :]
    count = tl.load(counts_ptr + where + 1, mask=not_last, other=0)
    count = tl.where(not_last, count - lower, 0)
    begin = tl.sum(lower, axis=0)[None, :] + tl.cumsum(count, axis=0) - count
    tl.store(begins_ptr + where, begin, mask=some)


@triton.jit  # type: ignore[untyped-decorator]
def _begins(
    counts_ptr: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    group: tl.tensor,
    groups: tl.tensor,
    width: tl.tensor,
    SUMMED: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> tl.tensor:
    """Where the group's pairs of each column begin. SUMMED: ``counts`` comes from ``_add_up``."""
    if SUMMED:
        line = counts_ptr + group.to(tl.int64) * width
        begin = tl.load(line + column, mask=inside, other=0)
    else:
        total = tl.zeros((AT_ONCE, column.shape[0]), tl.int32)
        for first in tl.range(0, groups, AT_ONCE):
            other = first + tl.arange(0, AT_ONCE)
            line = counts_ptr + other.to(tl.int64) * width + (other < group).to(tl.int32)
            some = (other < groups)[:, None] & inside[None, :]
            total += tl.load(line[:, None] + column[None, :], mask=some, other=0)
        begin = tl.sum(total, axis=0)
    return begin


# ----------------------------------------------------------------------------- placing


@triton.jit  # type: ignore[untyped-decorator]
def _is_odd(extremes_ptr: tl.tensor, groups: tl.tensor, GROUPS: tl.constexpr) -> tl.tensor:
    """Whether a shared bucket contains two different experts."""
    group = tl.arange(0, GROUPS)[None, :]
    where = extremes_ptr + tl.arange(0, 2)[:, None] * (2 * GROUPS) + group
    lowest = tl.min(tl.load(where, mask=group < groups, other=_LARGEST), axis=1)
    highest = tl.max(tl.load(where + GROUPS, mask=group < groups, other=-_LARGEST), axis=1)
    return tl.max((lowest < highest).to(tl.int32), axis=0) > 0


@triton.jit  # type: ignore[untyped-decorator]
def _store_rows(
    indices_ptr: tl.tensor,
    extremes_ptr: tl.tensor,
    map_ptr: tl.tensor,
    pair: tl.tensor,
    exists: tl.tensor,
    row: tl.tensor,
    pairs: tl.tensor,
    topk: tl.tensor,
    groups: tl.tensor,
    have: tl.tensor,
    index_token: tl.tensor,
    index_slot: tl.tensor,
    GROUPS: tl.constexpr,
    BESIDE: tl.constexpr,
) -> None:
    """Write the entries of pairs; ``row`` is right unless a shared bucket has two experts."""
    if _is_odd(extremes_ptr, groups, GROUPS):  # rare; the load is not waited for before this
        expert = _expert(indices_ptr, pair, exists, topk, index_token, index_slot)[None, :]
        found = tl.zeros((BESIDE, pair.shape[0]), tl.int32)
        for first in tl.range(0, pairs, BESIDE):
            other = first + tl.arange(0, BESIDE)
            its = _expert(indices_ptr, other, other < pairs, topk, index_token, index_slot)
            its = its[:, None]
            before = (its == expert) & (other[:, None] < pair[None, :])
            found += ((other < pairs)[:, None] & ((its < expert) | before)).to(tl.int32)
        row = tl.sum(found, axis=0)
    entry = (pair % topk).to(tl.int64) * (pairs // topk) + pair // topk
    tl.store(map_ptr + entry, tl.where(row < have, row, -1), mask=exists)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "pairs", "topk", "each", "groups", "have", "index_token", "index_slot",
    ]
)  # fmt: skip
def _place_indices(
    indices_ptr: tl.tensor,
    buckets_ptr: tl.tensor,
    earlier_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    extremes_ptr: tl.tensor,
    map_ptr: tl.tensor,
    pairs: tl.int32,
    topk: tl.int32,
    each: tl.int32,
    groups: tl.int32,
    have: tl.int32,
    index_token: tl.int64,
    index_slot: tl.int64,
    PAIRS: tl.constexpr,
    BUCKETS: tl.constexpr,
    GROUPS: tl.constexpr,
    BESIDE: tl.constexpr,
    SUMMED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Write the entries of a tile's pairs; rows from ``have`` on are dropped."""
    release_dependents(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    tile = tl.program_id(0)
    within = tl.arange(0, PAIRS)
    beside = tl.arange(0, BESIDE)
    pair = tile * PAIRS + within
    exists = pair < pairs
    buckets_ptr += tile * PAIRS
    bucket = tl.load(buckets_ptr + within)
    row = _begins(counts_ptr, bucket, exists, tile // each, groups, BUCKETS, SUMMED, AT_ONCE)
    if earlier_ptr is not None:
        row += tl.load(earlier_ptr + tile.to(tl.int64) * BUCKETS + bucket)
    # Summed over the first axis, of which each thread has several elements.
    found = tl.zeros((BESIDE, PAIRS), tl.int32)
    for first in tl.range(0, PAIRS, BESIDE):
        its = tl.load(buckets_ptr + first + beside)[:, None]
        before = (its == bucket[None, :]) & ((first + beside)[:, None] < within[None, :])
        found += before.to(tl.int32)
    row += tl.sum(found, axis=0)
    _store_rows(
        indices_ptr, extremes_ptr, map_ptr, pair, exists, row, pairs, topk, groups, have,
        index_token, index_slot, GROUPS, BESIDE,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def place_pairs(
    indices_ptr: tl.tensor,
    buckets_ptr: tl.tensor,
    earlier_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    extremes_ptr: tl.tensor,
    map_ptr: tl.tensor,
    pair: tl.tensor,
    exists: tl.tensor,
    pairs: tl.tensor,
    topk: tl.tensor,
    each: tl.tensor,
    groups: tl.tensor,
    have: tl.tensor,
    index_token: tl.tensor,
    index_slot: tl.tensor,
    PAIRS: tl.constexpr,
    BUCKETS: tl.constexpr,
    GROUPS: tl.constexpr,
    SUMMED: tl.constexpr,
    BESIDE: tl.constexpr,
) -> None:
    """Write the entries of a few pairs, as ``_place_indices`` does for a tile.

    The same program can read them afterwards.
    """
    tile = pair // PAIRS
    group = tile // each
    bucket = tl.load(buckets_ptr + pair, mask=exists, other=0)
    if SUMMED:
        row = tl.load(counts_ptr + group.to(tl.int64) * BUCKETS + bucket, mask=exists, other=0)
    else:
        other = tl.arange(0, GROUPS)[:, None]
        where = other * BUCKETS + (other < group[None, :]).to(tl.int32) + bucket[None, :]
        some = (other < groups) & exists[None, :]
        row = tl.sum(tl.load(counts_ptr + where, mask=some, other=0), axis=0)
    if earlier_ptr is not None:
        row += tl.load(earlier_ptr + tile.to(tl.int64) * BUCKETS + bucket, mask=exists, other=0)
    beside = (tile * PAIRS)[None, :] + tl.arange(0, PAIRS)[:, None]
    its = tl.load(buckets_ptr + beside, mask=exists[None, :], other=0)
    row += tl.sum(((its == bucket[None, :]) & (beside < pair[None, :])).to(tl.int32), axis=0)
    _store_rows(
        indices_ptr, extremes_ptr, map_ptr, pair, exists, row, pairs, topk, groups, have,
        index_token, index_slot, GROUPS, BESIDE,
    )  # fmt: skip
    tl.debug_barrier()  # other threads read the entries


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "tokens", "width", "each", "groups", "have", "route_token", "route_expert",
        "probs_token", "probs_expert",
    ]
)  # fmt: skip
def _place_mask(
    routing_ptr: tl.tensor,
    earlier_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    map_ptr: tl.tensor,
    probs_ptr: tl.tensor,
    permuted_ptr: tl.tensor,
    total_ptr: tl.tensor,
    tokens: tl.int32,
    width: tl.int32,
    each: tl.int32,
    groups: tl.int32,
    have: tl.int32,
    route_token: tl.int64,
    route_expert: tl.int64,
    probs_token: tl.int64,
    probs_expert: tl.int64,
    UNIT: tl.constexpr,
    DENSE: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    FILL: tl.constexpr,
    SUMMED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Write the lines of a tile's tokens, the probs of their rows, and the number of all pairs.

    The lines are filled with -1, and then the few entries of pairs are written over it. Experts are
    processed from the last block to the first, so that rows are in descending order.
    """
    release_dependents(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    tile = tl.program_id(0)
    within = tl.arange(0, TOKENS)
    token = tile * TOKENS + within
    experts = width * UNIT
    places = 2 * experts + 1
    map_ptr += tile.to(tl.int64) * TOKENS * places
    size = tl.minimum(tokens - tile * TOKENS, TOKENS) * places
    wide = (size // 4) * 4
    for first in tl.range(0, wide, FILL):
        at = first + tl.arange(0, FILL)
        tl.store(map_ptr + at, tl.full((FILL,), -1, tl.int32), mask=at < wide)
    rest = wide + tl.arange(0, 4)
    tl.store(map_ptr + rest, tl.full((4,), -1, tl.int32), mask=rest < size)
    tl.debug_barrier()  # other threads write over the fill

    group = tile // each
    there = (token < tokens)[:, None]
    lines = map_ptr + (within * places)[:, None]
    taken = tl.zeros((TOKENS,), tl.int32)
    blocks = tl.cdiv(experts, EXPERTS)
    for done in tl.range(0, blocks):
        expert = (blocks - 1 - done) * EXPERTS + tl.arange(0, EXPERTS)
        known = expert < experts
        routed = _routed(
            routing_ptr, token, expert, there & known[None, :],
            route_token, route_expert, UNIT, DENSE,
        )  # fmt: skip
        begin = _begins(counts_ptr, expert, known, group, groups, experts + 1, SUMMED, AT_ONCE)
        if earlier_ptr is not None:
            begin += tl.load(earlier_ptr + tile.to(tl.int64) * experts + expert, mask=known)
        row = begin[None, :] + tl.cumsum(routed.to(tl.int32), axis=0) - 1
        kept = routed & (row < have)
        count = kept.to(tl.int32)
        most = tl.sum(count, axis=1)
        entry = (taken + most)[:, None] - tl.cumsum(count, axis=1)
        tl.store(lines + entry, row, mask=kept)
        tl.store(lines + experts + entry, expert[None, :], mask=kept)
        if probs_ptr is not None:
            where = token.to(tl.int64)[:, None] * probs_token + (expert * probs_expert)[None, :]
            tl.store(permuted_ptr + row, tl.load(probs_ptr + where, mask=kept), mask=kept)
        taken += most
    tl.store(lines + 2 * experts, taken[:, None], mask=there)

    # The total is the same for every group; ``_begins`` merely needs one.
    last = tl.arange(0, 1) + experts
    of = group if SUMMED else group * 0
    end = _begins(counts_ptr, last, last >= 0, of, groups, experts + 1, SUMMED, AT_ONCE)
    tl.store(total_ptr + tl.arange(0, 1), end, mask=(tl.arange(0, 1) + tile) == 0)
    if probs_ptr is not None:
        first_free = tl.sum(end, axis=0) + tile * TOKENS
        for first in tl.range(first_free, have, tl.num_programs(0) * TOKENS):
            tl.store(permuted_ptr + first + within, within * 0, mask=first + within < have)


# ---------------------------------------------------------------------------- launching

_PAIRS, _BUCKETS, _BESIDE = 256, 1024, 32
_MASK_TILE, _MASK_EXPERTS, _MASK_TOKENS, _FILL = 4096, 128, 128, 2048
_COUNT_THREADS, _PLACE_THREADS, _MASK_THREADS, _ADD_THREADS = 128, 256, 256, 256
# Most lines that each program sums by itself, and how many entries it sums at once.
_FEW_OF_INDICES, _FEW_OF_MASKS, _AT_ONCE = 64, 128, 8192
_GROUPS, _COLUMNS = 512, 8


class _Groups:
    """How tiles are grouped, and the groups' counts.

    Attributes:
        tiles: tiles of a group.
        number: the number of groups.
        room: a power of two, at least ``number``.
        counts: the groups' lines.
        earlier: a line for each tile, if a group has several.
        summed: whether a launch of its own sums the lines.
    """

    def __init__(
        self, op: str, tiles: int, width: int, like: Tensor, *, spare: int, few: int
    ) -> None:
        self.tiles = -(-tiles // _GROUPS)
        self.number = -(-tiles // self.tiles)
        self.summed = self.number > few
        self.room = _GROUPS if self.summed else few
        self.counts = fresh(op, like, (self.number, width))
        self.earlier = fresh(op, like, (tiles, width - spare)) if self.tiles > 1 else None

    @property
    def kinds(self) -> tuple[bool]:
        """What specialises a kernel that takes ``earlier``."""
        return (self.earlier is None,)

    def sum_up(self) -> None:
        """Turn ``counts`` into what kernels with SUMMED expect."""
        if self.summed:
            width = self.counts.shape[1]
            begins = torch.empty_like(self.counts)
            launch = launch_of(
                _add_up,
                begins.device,
                (),
                threads=_ADD_THREADS,
                GROUPS=self.room,
                COLUMNS=_COLUMNS,
                **dependent_launch(has_dependent_launches(begins.device)),
            )
            launch((-(-width // _COLUMNS), 1), (self.counts, begins), (self.number, width))
            self.counts = begins


class Placing(NamedTuple):
    """Arguments for a kernel that places pairs itself; the defaults are for one that does not.

    Attributes:
        tensors, numbers, constants: those of :func:`place_pairs`.
    """

    tensors: tuple[Tensor | None, ...] = (None,) * 5
    numbers: tuple[int, ...] = (0,) * 6
    constants: Mapping[str, Any] = MappingProxyType(
        {"PAIRS": 0, "BUCKETS": 0, "GROUPS": 0, "SUMMED": False, "BESIDE": 0}
    )


def place_by_index(
    op: str, indices: Tensor, row_id_map: Tensor, have: int, later: bool = False
) -> Placing | None:
    """Fill the map of ``indices``, of which there are some, with rows below ``have``.

    Returns:
        the arguments for doing that ``later``, if it is to be done later.
    """
    pairs, topk = indices.numel(), indices.shape[1]
    check_size(op, "pairs", pairs)
    tiles = -(-pairs // _PAIRS)
    groups = _Groups(op, tiles, _BUCKETS, row_id_map, spare=0, few=_FEW_OF_INDICES)
    buckets = fresh(op, row_id_map, (tiles * _PAIRS,))
    extremes = fresh(op, row_id_map, (4, groups.room), torch.int64)
    how: dict[str, Any] = {"PAIRS": _PAIRS, "BUCKETS": _BUCKETS, "GROUPS": groups.room}
    kinds = (indices.dtype, *groups.kinds)
    after = has_dependent_launches(indices.device)
    count = launch_of(
        _count_indices, indices.device, kinds, threads=_COUNT_THREADS, **how, DEPENDENT=after
    )
    count(
        (groups.number, 1),
        (indices, buckets, groups.earlier, groups.counts, extremes),
        (pairs, topk, tiles, groups.tiles, *indices.stride()),
    )
    groups.sum_up()
    how |= {"SUMMED": groups.summed, "BESIDE": _BESIDE}
    known = (indices, buckets, groups.earlier, groups.counts, extremes)
    if later:
        numbers = (pairs, topk, groups.tiles, groups.number, *indices.stride())
        return Placing(known, numbers, how)
    put = launch_of(
        _place_indices,
        indices.device,
        kinds,
        threads=_PLACE_THREADS,
        **how,
        AT_ONCE=_AT_ONCE // _PAIRS,
        **dependent_launch(after),
    )
    put(
        (tiles, 1),
        (*known, row_id_map),
        (pairs, topk, groups.tiles, groups.number, have, *indices.stride()),
    )
    return None


def place_by_mask(
    op: str,
    routing_map: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    permuted: Tensor | None,
    have: int,
) -> Tensor:
    """Fill the map of a mask with at least one token, and the permuted probs.

    Returns:
        The number of pairs, on the device.
    """
    tokens, experts = routing_map.shape
    check_size(op, "entries of row_id_map", row_id_map.numel())
    routed = routing_map.view(torch.uint8)
    step, expert_step = routed.stride()
    dense = expert_step == 1 or experts == 1
    unit = math.gcd(experts, step, WIDEST_UNIT) if dense else 1
    block = min(_MASK_EXPERTS, block_of(experts))
    of_tile = min(_MASK_TOKENS, _MASK_TILE // block)
    how: dict[str, Any] = {"UNIT": unit, "DENSE": dense, "TOKENS": of_tile, "EXPERTS": block}
    tiles = -(-tokens // of_tile)
    if probs is not None:
        # A program adds the stride of its loop once more before it sees that no row is left.
        check_size(op, "rows, padded to whole tiles,", have + tiles * of_tile)
    groups = _Groups(op, tiles, experts + 1, row_id_map, spare=1, few=_FEW_OF_MASKS)
    steps = (step // unit, expert_step)
    after = has_dependent_launches(routed.device)
    count = launch_of(
        _count_mask, routed.device, groups.kinds, threads=_MASK_THREADS, **how, DEPENDENT=after
    )
    count(
        (groups.number, 1),
        (routed, groups.earlier, groups.counts),
        (tokens, experts // unit, tiles, groups.tiles, *steps),
    )
    groups.sum_up()
    put = launch_of(
        _place_mask,
        routed.device,
        (None if probs is None else probs.dtype, *groups.kinds),
        threads=_MASK_THREADS,
        **how,
        FILL=_FILL,
        SUMMED=groups.summed,
        AT_ONCE=max(1, _AT_ONCE // 2 // block),
        **dependent_launch(after),
    )
    total = fresh(op, row_id_map, (1,))
    probs_steps = (0, 0) if probs is None else probs.stride()
    put(
        (tiles, 1),
        (routed, groups.earlier, groups.counts, row_id_map, probs, permuted, total),
        (
            *(tokens, experts // unit, groups.tiles, groups.number, have),
            *(*steps, *probs_steps),
        ),
    )
    return total
