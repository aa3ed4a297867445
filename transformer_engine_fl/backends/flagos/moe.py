"""Moving tokens to their experts and back in Triton.

Which row a pair has is worked out in three small launches: each program counts, in a tile of
tokens, the pairs that go to a lower expert; these counts are summed over the tiles before
each tile; and with the sums each program places its pairs. Nothing depends on the order in
which programs run.

Then whole rows are moved. A program takes some tokens, and goes through the pairs of each: a
token that goes to several rows is read once, and one that is the sum of several rows is
written once. Values that are only moved are integers of the same size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import (
    WIDEST_UNIT,
    block_of,
    by_rows,
    check_integers,
    check_size,
    fresh,
    keep,
    listed,
    plain,
    rows_of_tile,
)
from transformer_engine_fl.backends.flagos._sequences import launch_rows, piece, place, raw
from transformer_engine_fl.ops import moe as contracts
from transformer_engine_fl.ops._dtypes import math_dtype
from transformer_engine_fl.ops.moe import rows_of_indices

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "moe_permute_bwd",
    "moe_permute_fwd",
    "moe_permute_mask_bwd",
    "moe_permute_mask_fwd",
    "moe_unpermute_bwd",
    "moe_unpermute_fwd",
    "moe_unpermute_mask_bwd",
    "moe_unpermute_mask_fwd",
]

# ----------------------------------------------------------------- kernels: making maps
#
# A line of ``counts`` says of a tile, for each expert, how many of its pairs go to lower
# ones, so that the difference of two neighbours is how many go to the expert itself.
# ``scanned`` has the sums of all lines before each line, and one line more: the sums of all,
# where each expert's rows begin.
#
# Experts given by index are numbers of any size. Those from 0 on are their own buckets; all
# that are negative share the first bucket, and all that are too large share the last one.
# That is right if a bucket that is shared has one number in it; else (``odd``) each pair is
# compared with all others.

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


@triton.jit  # type: ignore[untyped-decorator]
def _bucket(expert: tl.tensor, BUCKETS: tl.constexpr) -> tl.tensor:
    """Up to BUCKETS - 2, so that each has a next one."""
    return (tl.minimum(tl.maximum(expert, -1), BUCKETS - 3) + 1).to(tl.int32)


@triton.jit(do_not_specialize=["pairs", "topk", "index_token", "index_slot"])  # type: ignore[untyped-decorator]
def _count_indices(
    indices_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    extremes_ptr: tl.tensor,
    pairs: tl.int32,
    topk: tl.int32,
    index_token: tl.int64,
    index_slot: tl.int64,
    PAIRS: tl.constexpr,
    BUCKETS: tl.constexpr,
) -> None:
    """The line of a tile, and the lowest and highest of the numbers that share a bucket."""
    tile = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    exists = pair < pairs
    expert = _expert(indices_ptr, pair, exists, topk, index_token, index_slot)
    bucket = tl.where(exists, _bucket(expert, BUCKETS), BUCKETS - 1)
    count = tl.histogram(bucket, BUCKETS).to(tl.int32)
    lower = tl.cumsum(count, axis=0) - count
    tl.store(counts_ptr + tile * BUCKETS + tl.arange(0, BUCKETS), lower)
    negative = exists & (expert < 0)
    large = exists & (expert >= BUCKETS - 3)
    extremes_ptr += tile * 4
    tl.store(extremes_ptr, tl.min(tl.where(negative, expert, _LARGEST), axis=0))
    tl.store(extremes_ptr + 1, tl.max(tl.where(negative, expert, -_LARGEST), axis=0))
    tl.store(extremes_ptr + 2, tl.min(tl.where(large, expert, _LARGEST), axis=0))
    tl.store(extremes_ptr + 3, tl.max(tl.where(large, expert, -_LARGEST), axis=0))


@triton.jit(do_not_specialize=["tokens", "experts", "route_token", "route_expert"])  # type: ignore[untyped-decorator]
def _count_mask(
    routing_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    tokens: tl.int32,
    experts: tl.int32,
    route_token: tl.int64,
    route_expert: tl.int64,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """The line of a tile; its last entry is how many pairs the tile has."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    counts_ptr += tl.program_id(0).to(tl.int64) * (experts + 1)
    start = token.to(tl.int64) * route_token
    lower = tl.zeros((), tl.int32)
    for first in tl.range(0, experts, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        routed = tl.load(
            routing_ptr + start[:, None] + (expert * route_expert)[None, :],
            mask=(token < tokens)[:, None] & (expert < experts)[None, :],
            other=0,
        )
        count = tl.sum((routed != 0).to(tl.int32), axis=0)
        tl.store(
            counts_ptr + expert, lower + tl.cumsum(count, axis=0) - count, mask=expert < experts
        )
        lower += tl.sum(count, axis=0)
    tl.store(counts_ptr + experts, lower)


@triton.jit(do_not_specialize=["tiles", "width"])  # type: ignore[untyped-decorator]
def _scan(
    counts_ptr: tl.tensor,
    scanned_ptr: tl.tensor,
    extremes_ptr: tl.tensor,
    odd_ptr: tl.tensor,
    tiles: tl.int32,
    width: tl.int32,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Some columns of ``scanned``; the program past the last of them finds ``odd``."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    if tl.program_id(0) * COLUMNS < width:
        total = tl.zeros((COLUMNS,), tl.int32)
        for first in tl.range(0, tiles, TILES):
            tile = first + tl.arange(0, TILES)
            where = tile.to(tl.int64)[:, None] * width + column[None, :]
            some = (tile < tiles)[:, None] & inside[None, :]
            counts = tl.load(counts_ptr + where, mask=some, other=0)
            before = total[None, :] + tl.cumsum(counts, axis=0) - counts
            tl.store(scanned_ptr + where, before, mask=some)
            total += tl.sum(counts, axis=0)
        tl.store(scanned_ptr + tiles.to(tl.int64) * width + column, total, mask=inside)
    elif extremes_ptr is not None:
        odd = tl.zeros((), tl.int32)
        for shared in tl.static_range(2):
            lowest = tl.full((TILES,), _LARGEST, tl.int64)
            highest = tl.full((TILES,), -_LARGEST, tl.int64)
            for first in tl.range(0, tiles, TILES):
                tile = first + tl.arange(0, TILES)
                where = extremes_ptr + tile.to(tl.int64) * 4 + 2 * shared
                low = tl.load(where, mask=tile < tiles, other=_LARGEST)
                high = tl.load(where + 1, mask=tile < tiles, other=-_LARGEST)
                lowest, highest = tl.minimum(lowest, low), tl.maximum(highest, high)
            odd += (tl.min(lowest, axis=0) < tl.max(highest, axis=0)).to(tl.int32)
        tl.store(odd_ptr, odd)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["pairs", "topk", "tiles", "have", "index_token", "index_slot"]
)
def _place_indices(
    indices_ptr: tl.tensor,
    scanned_ptr: tl.tensor,
    odd_ptr: tl.tensor,
    map_ptr: tl.tensor,
    pairs: tl.int32,
    topk: tl.int32,
    tiles: tl.int32,
    have: tl.int32,
    index_token: tl.int64,
    index_slot: tl.int64,
    PAIRS: tl.constexpr,
    BUCKETS: tl.constexpr,
    BESIDE: tl.constexpr,
) -> None:
    """The entries of a tile's pairs, of which those of ``have`` or more are dropped."""
    tile = tl.program_id(0)
    pair = tile * PAIRS + tl.arange(0, PAIRS)
    exists = pair < pairs
    expert = _expert(indices_ptr, pair, exists, topk, index_token, index_slot)
    odd = tl.load(odd_ptr) != 0
    # Usually only pairs of this tile are compared, and only with their equals.
    first = tl.where(odd, 0, tile * PAIRS)
    last = tl.where(odd, pairs, tl.minimum(tile * PAIRS + PAIRS, pairs))
    row = tl.zeros((PAIRS,), tl.int32)
    for start in tl.range(first, last, BESIDE):
        other = start + tl.arange(0, BESIDE)
        its = _expert(indices_ptr, other, other < last, topk, index_token, index_slot)[None, :]
        earlier = (its == expert[:, None]) & (other[None, :] < pair[:, None])
        lower = odd & (other < last)[None, :] & (its < expert[:, None])
        row += tl.sum((earlier | lower).to(tl.int32), axis=1)
    bucket = _bucket(expert, BUCKETS)
    line = scanned_ptr + tile.to(tl.int64) * BUCKETS + bucket
    begin = tl.load(scanned_ptr + tiles.to(tl.int64) * BUCKETS + bucket)
    begin += tl.load(line + 1) - tl.load(line)
    row += tl.where(odd, 0, begin)
    entry = (pair % topk).to(tl.int64) * (pairs // topk) + pair // topk
    tl.store(map_ptr + entry, tl.where(row < have, row, -1), mask=exists)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "tokens", "experts", "tiles", "have", "route_token", "route_expert",
        "probs_token", "probs_expert",
    ]
)  # fmt: skip
def _place_mask(
    routing_ptr: tl.tensor,
    scanned_ptr: tl.tensor,
    map_ptr: tl.tensor,
    probs_ptr: tl.tensor,
    permuted_ptr: tl.tensor,
    tokens: tl.int32,
    experts: tl.int32,
    tiles: tl.int32,
    have: tl.int32,
    route_token: tl.int64,
    route_expert: tl.int64,
    probs_token: tl.int64,
    probs_expert: tl.int64,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """The lines of a tile's tokens, and the probs of their rows.

    Experts are gone through from the last one, so rows come in descending order: a pair with
    a row takes the first free entry of its line, any other the last one.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = (token < tokens)[:, None]
    wide = token.to(tl.int64)[:, None]
    line = map_ptr + wide * (2 * experts + 1)
    sums = scanned_ptr + tl.program_id(0).to(tl.int64) * (experts + 1)
    begins = scanned_ptr + tiles.to(tl.int64) * (experts + 1)
    taken = tl.zeros((TOKENS,), tl.int32)
    blocks = tl.cdiv(experts, EXPERTS)
    for done in tl.range(0, blocks):
        expert = (blocks - done) * EXPERTS - 1 - tl.arange(0, EXPERTS)
        known = expert < experts
        some = there & known[None, :]
        where = wide * route_token + (expert * route_expert)[None, :]
        routed = tl.load(routing_ptr + where, mask=some, other=0) != 0
        begin = tl.load(begins + expert, mask=known, other=0)
        begin += tl.load(sums + expert + 1, mask=known, other=0)
        begin -= tl.load(sums + expert, mask=known, other=0)
        row = begin[None, :] + tl.cumsum(routed.to(tl.int32), axis=0) - 1
        kept = routed & (row < have)
        count = kept.to(tl.int32)
        above = taken[:, None] + tl.cumsum(count, axis=1) - count
        entry = tl.where(kept, above, expert[None, :] + above)
        tl.store(line + entry, tl.where(kept, row, -1), mask=some)
        tl.store(line + experts + entry, tl.where(kept, expert[None, :], -1), mask=some)
        if probs_ptr is not None:
            where = wide * probs_token + (expert * probs_expert)[None, :]
            tl.store(permuted_ptr + row, tl.load(probs_ptr + where, mask=kept), mask=kept)
        taken += tl.sum(count, axis=1)
    tl.store(line + 2 * experts, taken[:, None], mask=there)
    if probs_ptr is not None:
        span = tl.arange(0, TOKENS)
        end = tl.load(begins + experts) + tl.program_id(0) * TOKENS
        for first in tl.range(end, have, tl.num_programs(0) * TOKENS):
            tl.store(permuted_ptr + first + span, span * 0, mask=first + span < have)


# ----------------------------------------------------------------- kernels: moving rows
#
# A token's pairs have ``slots`` places in a map, ``map_slot`` apart; MASK says which map it
# is. ``have`` is how many rows there are. Maps come from users: every entry is compared with
# that before a row is read or written.


@triton.jit  # type: ignore[untyped-decorator]
def _pairs(
    map_ptr: tl.tensor,
    token: tl.tensor,
    exists: tl.tensor,
    slots: tl.tensor,
    map_token: tl.tensor,
    map_slot: tl.tensor,
    MASK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """How many places of each token's entries to look at, and the most of any."""
    if MASK:
        where = map_ptr + token.to(tl.int64) * map_token + 2 * slots * map_slot
        count = tl.minimum(tl.load(where, mask=exists, other=0), slots)
        return count, tl.max(count, axis=0)
    else:
        return tl.where(exists, slots, 0), slots


@triton.jit  # type: ignore[untyped-decorator]
def _pair(
    map_ptr: tl.tensor,
    token: tl.tensor,
    at: tl.tensor,
    count: tl.tensor,
    slots: tl.tensor,
    have: tl.tensor,
    map_token: tl.tensor,
    map_slot: tl.tensor,
    MASK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The row at a place of each token, which expert of the token's it is of, if there is one."""
    where = map_ptr + token.to(tl.int64) * map_token + at * map_slot
    row = tl.load(where, mask=at < count, other=-1)
    if MASK:
        expert = tl.load(where + slots * map_slot, mask=at < count, other=-1)
    else:
        expert = token * 0 + at
    known = (row >= 0) & (row < have) & (expert >= 0) & (expert < slots)
    return row.to(tl.int64), expert, known


@triton.jit  # type: ignore[untyped-decorator]
def _zero_rows(
    y_ptr: tl.tensor,
    used_ptr: tl.tensor,
    end: tl.tensor,
    have: tl.tensor,
    step: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    SPAN: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Zeros in all rows from ``end`` on, or if there is ``used``, in those it has a 0 for.

    Programs share them out by SPAN of rows, which are seldom looked at any closer.
    """
    BLOCK: tl.constexpr = column.shape[0]
    zeros = tl.zeros((TOKENS, BLOCK), y_ptr.dtype.element_ty)
    first_span = tl.program_id(0).to(tl.int64) * SPAN
    if used_ptr is None:
        first_span += end
    for first in tl.range(first_span, have.to(tl.int64), tl.num_programs(0).to(tl.int64) * SPAN):
        least = 0
        if used_ptr is not None:
            span = first + tl.arange(0, SPAN)
            used = tl.load(used_ptr + span, mask=span < have, other=1).to(tl.int32)
            least = tl.min(used, axis=0)
        if least == 0:
            last = tl.minimum(first + SPAN, have)
            for start in tl.range(first, last, TOKENS):
                row = start + tl.arange(0, TOKENS)
                unused = row < last
                if used_ptr is not None:
                    unused = tl.load(used_ptr + row, mask=unused, other=1) == 0
                target = y_ptr + (row * step)[:, None] + column[None, :]
                tl.store(target, zeros, mask=unused[:, None] & inside[None, :])


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "rows", "slots", "have", "map_token", "map_slot", "end", "heads", "width",
        "x_row", "y_row",
    ]
)  # fmt: skip
def _spread(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    map_ptr: tl.tensor,
    used_ptr: tl.tensor,
    end_ptr: tl.tensor,
    rows: tl.int32,
    slots: tl.int32,
    have: tl.int32,
    map_token: tl.int64,
    map_slot: tl.int64,
    end: tl.int64,
    heads: tl.int32,
    width: tl.int32,
    x_row: tl.int64,
    y_row: tl.int64,
    MASK: tl.constexpr,
    SPAN: tl.constexpr,
    UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each token into its rows, and zeros as ``_zero_rows`` does.

    ``end`` is the end of the rows with tokens, or where ``end_ptr`` has it.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = token < rows
    head, column, inside = piece(heads, width, UNIT, HEADS, BLOCK)
    x_place = place(token.to(tl.int64) * x_row, head * 0, column, UNIT)
    x = tl.load(x_ptr + x_place, mask=exists[:, None, None] & inside)
    count, most = _pairs(map_ptr, token, exists, slots, map_token, map_slot, MASK)
    for at in tl.range(0, most):
        row, _, known = _pair(map_ptr, token, at, count, slots, have, map_token, map_slot, MASK)
        y_place = place(row * y_row, head * 0, column, UNIT)
        tl.store(y_ptr + y_place, x, mask=known[:, None, None] & inside)
    if end_ptr is not None:
        end = tl.load(end_ptr + end).to(tl.int64)
    within = column < width * UNIT
    _zero_rows(y_ptr, used_ptr, end, have, y_row * UNIT, column, within, SPAN, TOKENS)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "rows", "slots", "have", "map_token", "map_slot", "probs_token", "probs_slot",
        "heads", "width", "x_row", "y_row",
    ]
)  # fmt: skip
def _collect(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    map_ptr: tl.tensor,
    probs_ptr: tl.tensor,
    moved_ptr: tl.tensor,
    to_ptr: tl.tensor,
    rows: tl.int32,
    slots: tl.int32,
    have: tl.int32,
    map_token: tl.int64,
    map_slot: tl.int64,
    probs_token: tl.int64,
    probs_slot: tl.int64,
    heads: tl.int32,
    width: tl.int32,
    x_row: tl.int64,
    y_row: tl.int64,
    MASK: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The sum of each token's rows, each times its prob if there are such.

    ``moved``, one number for each row, goes to the place of its pair in ``to``.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = token < rows
    head, column, inside = piece(heads, width, UNIT, HEADS, BLOCK)
    total = tl.zeros((TOKENS, HEADS, BLOCK), ACC)
    count, most = _pairs(map_ptr, token, exists, slots, map_token, map_slot, MASK)
    for at in tl.range(0, most):
        row, expert, known = _pair(
            map_ptr, token, at, count, slots, have, map_token, map_slot, MASK
        )
        x_place = place(row * x_row, head * 0, column, UNIT)
        x = tl.load(x_ptr + x_place, mask=known[:, None, None] & inside, other=0).to(ACC)
        if probs_ptr is not None:
            where = token.to(tl.int64) * probs_token + expert * probs_slot
            prob = tl.load(probs_ptr + where, mask=known, other=0).to(ACC)
            x *= prob[:, None, None]
        total += x
        if moved_ptr is not None:
            once = known & (tl.program_id(1) == 0)
            target = to_ptr + token.to(tl.int64) * slots + expert
            tl.store(target, tl.load(moved_ptr + row, mask=once), mask=once)
    y_place = place(token.to(tl.int64) * y_row, head * 0, column, UNIT)
    y = total.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + y_place, y, mask=exists[:, None, None] & inside)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["tokens", "slots", "have", "map_token", "map_slot"]
)
def _mark(
    map_ptr: tl.tensor,
    used_ptr: tl.tensor,
    tokens: tl.int32,
    slots: tl.int32,
    have: tl.int32,
    map_token: tl.int64,
    map_slot: tl.int64,
    MASK: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """1 for each row that a pair has."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    count, most = _pairs(map_ptr, token, token < tokens, slots, map_token, map_slot, MASK)
    for at in tl.range(0, most):
        row, _, known = _pair(map_ptr, token, at, count, slots, have, map_token, map_slot, MASK)
        tl.store(used_ptr + row, token * 0 + 1, mask=known)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "tokens", "slots", "have", "map_token", "map_slot", "probs_token", "probs_slot",
        "width", "dy_row", "x_row",
    ]
)  # fmt: skip
def _spread_weighted(
    dy_ptr: tl.tensor,
    x_ptr: tl.tensor,
    probs_ptr: tl.tensor,
    map_ptr: tl.tensor,
    used_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    dprobs_ptr: tl.tensor,
    tokens: tl.int32,
    slots: tl.int32,
    have: tl.int32,
    map_token: tl.int64,
    map_slot: tl.int64,
    probs_token: tl.int64,
    probs_slot: tl.int64,
    width: tl.int32,
    dy_row: tl.int64,
    x_row: tl.int64,
    MASK: tl.constexpr,
    ACC: tl.constexpr,
    WHOLE: tl.constexpr,
    UNIT: tl.constexpr,
    SPAN: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each token times its probs into its rows, and its product with what stood there.

    WHOLE: a tile is as wide as a row, which is then read once.
    """
    columns = width * UNIT
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    wide = token.to(tl.int64)
    exists = token < tokens
    dy_start = (wide * (dy_row * UNIT))[:, None]
    block = tl.arange(0, BLOCK)[None, :]
    if WHOLE:
        mask = exists[:, None] & (block < columns)
        dy = tl.load(dy_ptr + dy_start + block, mask=mask, other=0).to(ACC)
    count, most = _pairs(map_ptr, token, exists, slots, map_token, map_slot, MASK)
    for at in tl.range(0, most):
        row, expert, known = _pair(
            map_ptr, token, at, count, slots, have, map_token, map_slot, MASK
        )
        where = wide * probs_token + expert * probs_slot
        prob = tl.load(probs_ptr + where, mask=known, other=0).to(ACC)[:, None]
        x_start = (row * (x_row * UNIT))[:, None]
        dx_start = (row * width * UNIT)[:, None]
        if WHOLE:
            mask = known[:, None] & (block < columns)
            x = tl.load(x_ptr + x_start + block, mask=mask, other=0).to(ACC)
            products = dy * x
            dx = (dy * prob).to(dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + dx_start + block, dx, mask=mask)
        else:
            products = tl.zeros((TOKENS, BLOCK), ACC)
            for start in tl.range(0, columns, BLOCK):
                column = start + block
                mask = known[:, None] & (column < columns)
                part = tl.load(dy_ptr + dy_start + column, mask=mask, other=0).to(ACC)
                x = tl.load(x_ptr + x_start + column, mask=mask, other=0).to(ACC)
                products += part * x
                dx = (part * prob).to(dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + dx_start + column, dx, mask=mask)
        product = tl.where(known, tl.sum(products, axis=1), 0)
        # The line of a mask has more places than these, and was zero before.
        written = known if MASK else exists
        tl.store(dprobs_ptr + wide * slots + expert, product, mask=written)
    for start in tl.range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        _zero_rows(
            dx_ptr, used_ptr, 0, have, width.to(tl.int64) * UNIT,
            column, column < columns, SPAN, TOKENS,
        )  # fmt: skip


# ---------------------------------------------------------------------------- launching

_THREADS = 128
_PAIRS, _BUCKETS, _BESIDE, _PLACE_THREADS = 256, 1024, 32, 256
_MASK_TILE, _MASK_EXPERTS, _MASK_TOKENS = 4096, 128, 128
_SCAN_TILES, _SCAN_COLUMNS = 128, 32
_MARK_TOKENS = 128
_SPAN = 32
_TILE_BYTES = {"spread": 8192, "collect": 8192}
# (threads of a program, elements of its tile), by width as `_rows.Cut` has it.
_WEIGHTED_TILES = {4096: (128, 4096), 8192: (256, 8192)}
_WEIGHTED_CHUNK, _WEIGHTED_THREADS = 4096, 256
_TRITON_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
_LAUNCHES: dict[object, _launch.Launch] = {}


def _launched(kernel: Any, device: torch.device, dtypes: tuple[Any, ...], **how: Any) -> Any:
    """The launch of a kernel, for these dtypes of its tensors."""
    key = (kernel, device, dtypes, *how.values())
    return _LAUNCHES.get(key) or keep(_LAUNCHES, key, _launch.Launch(kernel, device, **how))


class _Map(NamedTuple):
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

    def used(self, have: int) -> Tensor:
        """``[have]``: 1 for each row that a pair has, and else 0."""
        used = torch.zeros((have,), dtype=torch.uint8, device=self.entries.device)
        launch = _launched(
            _mark, used.device, (), threads=_THREADS, MASK=self.mask, TOKENS=_MARK_TOKENS
        )
        launch(
            (-(-self.tokens // _MARK_TOKENS), 1),
            (self.entries, used),
            (self.tokens, self.slots, have, *self.steps),
        )
        return used


def _map(op: str, row_id_map: Tensor, mask: bool) -> _Map:
    entries = plain(op, "row_id_map", row_id_map)
    check_size(op, "entries of a map", entries.numel())
    if mask:
        tokens, places = entries.shape
        return _Map(entries, tokens, places // 2, (entries.stride(0), entries.stride(1)), mask)
    slots, tokens = entries.shape
    return _Map(entries, tokens, slots, (entries.stride(1), entries.stride(0)), mask)


def _spread_rows(
    op: str,
    x: Tensor,
    y: Tensor,
    pairs: _Map,
    *,
    used: Tensor | None = None,
    end: int = 0,
    end_of: Tensor | None = None,
) -> None:
    """Fill ``y`` with the tokens ``x``, and zeros where ``used``, or ``end``, says so."""
    if not y.numel():
        return
    if not pairs.tokens:
        y.zero_()
        return
    x, step = by_rows(raw(x))
    columns = x.shape[1]
    launch_rows(
        op,
        _spread,
        (x, raw(y), pairs.entries, used, end_of),
        (pairs.slots, y.shape[0], *pairs.steps, end),
        (columns, step, columns),
        rows=pairs.tokens,
        heads=1,
        threads=_THREADS,
        tile_bytes=_TILE_BYTES["spread"],
        MASK=pairs.mask,
        SPAN=_SPAN,
    )


def _collected(
    op: str,
    rows: Tensor,
    pairs: _Map,
    probs: Tensor | None,
    moved: Tensor | None = None,
    to: Tensor | None = None,
) -> Tensor:
    """``[T, C]``, the sum of each token's rows; ``moved`` goes to the pairs' places in ``to``."""
    y = fresh(op, rows, (pairs.tokens, rows.shape[1]))
    if not y.numel():
        return y
    check_size(op, "rows", rows.shape[0])
    x, step = by_rows(rows)
    columns = x.shape[1]
    launch_rows(
        op,
        _collect,
        (x, y, pairs.entries, probs, moved, to),
        (pairs.slots, x.shape[0], *pairs.steps, *((0, 0) if probs is None else probs.stride())),
        (columns, step, columns),
        rows=pairs.tokens,
        heads=1,
        threads=_THREADS,
        tile_bytes=_TILE_BYTES["collect"],
        MASK=pairs.mask,
        ACC=_TRITON_TYPES[math_dtype(x.dtype)],
    )
    return y


def _spread_gradients(
    op: str, dy: Tensor, pairs: _Map, x: Tensor, probs: Tensor, dx: Tensor, dprobs: Tensor
) -> None:
    """Fill ``dx`` and ``dprobs``, which is zero where no pair is."""
    have, columns = dx.shape
    check_size(op, "columns", columns)
    dy, dy_step = by_rows(dy)
    x, x_step = by_rows(x)
    unit = math.gcd(columns, dy_step, x_step, WIDEST_UNIT)
    accumulated = math_dtype(dy.dtype)
    double = 2 if accumulated == torch.float64 else 1
    block = block_of(columns)
    tile = listed(_WEIGHTED_TILES, block * double)
    threads, elements = tile or (_WEIGHTED_THREADS, _WEIGHTED_CHUNK)
    block = min(block, elements // double)
    tokens = rows_of_tile(elements, block * double)
    launch = _launched(
        _spread_weighted,
        dy.device,
        (dy.dtype, x.dtype, probs.dtype),
        threads=threads,
        MASK=pairs.mask,
        ACC=_TRITON_TYPES[accumulated],
        WHOLE=tile is not None,
        UNIT=unit,
        SPAN=_SPAN,
        TOKENS=tokens,
        BLOCK=block,
    )
    launch(
        (-(-pairs.tokens // tokens), 1),
        (dy, x, probs, pairs.entries, pairs.used(have), dx, dprobs),
        (
            *(pairs.tokens, pairs.slots, have, *pairs.steps, *probs.stride()),
            *(it // unit for it in (columns, dy_step, x_step)),
        ),
    )


def _scanned(counts: Tensor, extremes: Tensor | None = None, odd: Tensor | None = None) -> Tensor:
    """The sums of the lines before each line of ``counts``, and at the end of all."""
    tiles, width = counts.shape
    scanned = torch.empty((tiles + 1, width), dtype=torch.int32, device=counts.device)
    launch = _launched(
        _scan,
        counts.device,
        (extremes is None,),
        threads=_THREADS,
        TILES=_SCAN_TILES,
        COLUMNS=_SCAN_COLUMNS,
    )
    programs = -(-width // _SCAN_COLUMNS) + (extremes is not None)
    launch((programs, 1), (counts, scanned, extremes, odd), (tiles, width))
    return scanned


def _place_by_index(op: str, indices: Tensor, row_id_map: Tensor, have: int) -> None:
    """Fill the map."""
    pairs, topk = indices.numel(), indices.shape[1]
    check_size(op, "pairs", pairs)
    tiles = -(-pairs // _PAIRS)
    how = {"PAIRS": _PAIRS, "BUCKETS": _BUCKETS}
    counts = fresh(op, row_id_map, (tiles, _BUCKETS))
    extremes = fresh(op, row_id_map, (tiles, 4), torch.int64)
    odd = fresh(op, row_id_map, (1,))
    count = _launched(_count_indices, indices.device, (indices.dtype,), threads=_THREADS, **how)
    count((tiles, 1), (indices, counts, extremes), (pairs, topk, *indices.stride()))
    scanned = _scanned(counts, extremes, odd)
    put = _launched(
        _place_indices,
        indices.device,
        (indices.dtype,),
        threads=_PLACE_THREADS,
        **how,
        BESIDE=_BESIDE,
    )
    put(
        (tiles, 1),
        (indices, scanned, odd, row_id_map),
        (pairs, topk, tiles, have, *indices.stride()),
    )


def _place_by_mask(
    op: str,
    routing_map: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    permuted: Tensor | None,
    have: int,
) -> Tensor:
    """Fill the map and the permuted probs; the last number returned is that of all pairs."""
    tokens, experts = routing_map.shape
    check_size(op, "entries of a map", row_id_map.numel())
    routed = routing_map.view(torch.uint8)
    block = min(_MASK_EXPERTS, block_of(experts))
    of_tile = min(_MASK_TOKENS, _MASK_TILE // block)
    how = {"threads": _THREADS, "TOKENS": of_tile, "EXPERTS": block}
    tiles = -(-tokens // of_tile)
    counts = fresh(op, row_id_map, (tiles, experts + 1))
    count = _launched(_count_mask, routed.device, (), **how)
    count((tiles, 1), (routed, counts), (tokens, experts, *routed.stride()))
    scanned = _scanned(counts)
    kind = None if probs is None else probs.dtype
    steps = (0, 0) if probs is None else probs.stride()
    put = _launched(_place_mask, routed.device, (kind,), **how)
    put(
        (tiles, 1),
        (routed, scanned, row_id_map, probs, permuted),
        (tokens, experts, tiles, have, *routed.stride(), *steps),
    )
    return scanned


# ---------------------------------------------------------------------------- operators


def moe_permute_fwd(
    input: Tensor, indices: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor]:
    """``moe_permute_fwd`` of the contract."""
    op = "moe_permute_fwd"
    contracts.moe_permute_fwd.check(input, indices, num_out_tokens)
    check_integers(op, num_out_tokens)
    input, indices = plain(op, "input", input), plain(op, "indices", indices)
    tokens, topk = indices.shape
    have = rows_of_indices(indices, num_out_tokens)
    check_size(op, "rows", have)
    output = fresh(op, input, (have, input.shape[1]))
    row_id_map = fresh(op, indices, (topk, tokens), torch.int32)
    if tokens:
        _place_by_index(op, indices, row_id_map, have)
    _spread_rows(op, input, output, _map(op, row_id_map, False), end=tokens * topk)
    return output, row_id_map


def moe_permute_bwd(grad_output: Tensor, row_id_map: Tensor) -> Tensor:
    """``moe_permute_bwd`` of the contract."""
    op = "moe_permute_bwd"
    contracts.moe_permute_bwd.check(grad_output, row_id_map)
    grad_output = plain(op, "grad_output", grad_output)
    return _collected(op, grad_output, _map(op, row_id_map, False), None)


def _unpermuted(
    op: str, input: Tensor, row_id_map: Tensor, probs: Tensor | None, *, mask: bool
) -> Tensor:
    input = plain(op, "input", input)
    probs = None if probs is None else plain(op, "probs", probs)
    return _collected(op, input, _map(op, row_id_map, mask), probs)


def moe_unpermute_fwd(input: Tensor, row_id_map: Tensor, probs: Tensor | None = None) -> Tensor:
    """``moe_unpermute_fwd`` of the contract."""
    contracts.moe_unpermute_fwd.check(input, row_id_map, probs)
    return _unpermuted("moe_unpermute_fwd", input, row_id_map, probs, mask=False)


def _unpermute_gradients(
    op: str,
    grad_output: Tensor,
    row_id_map: Tensor,
    input: Tensor | None,
    probs: Tensor | None,
    num_rows: int,
    *,
    mask: bool,
) -> tuple[Tensor, Tensor | None]:
    check_integers(op, num_rows)
    check_size(op, "rows", num_rows)
    dy = plain(op, "grad_output", grad_output)
    pairs = _map(op, row_id_map, mask)
    dx = fresh(op, dy, (num_rows, dy.shape[1]))
    if input is None or probs is None:
        used = pairs.used(num_rows) if dx.numel() and pairs.tokens else None
        _spread_rows(op, dy, dx, pairs, used=used)
        return dx, None
    x, probs = plain(op, "input", input), plain(op, "probs", probs)
    dprobs = fresh(op, probs, probs.shape, math_dtype(probs.dtype))
    moves = dx.numel() > 0 and pairs.tokens > 0
    if mask or not moves:
        dprobs.zero_()
    if moves:
        _spread_gradients(op, dy, pairs, x, probs, dx, dprobs)
    else:
        dx.zero_()
    return dx, dprobs


def moe_unpermute_bwd(
    grad_output: Tensor,
    row_id_map: Tensor,
    input: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    num_rows: int,
) -> tuple[Tensor, Tensor | None]:
    """``moe_unpermute_bwd`` of the contract."""
    op = contracts.moe_unpermute_bwd
    op.check(grad_output, row_id_map, input, probs, num_rows=num_rows)
    return _unpermute_gradients(
        op.name, grad_output, row_id_map, input, probs, num_rows, mask=False
    )


def moe_permute_mask_fwd(
    input: Tensor, routing_map: Tensor, probs: Tensor | None = None, *, num_out_tokens: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """``moe_permute_mask_fwd`` of the contract."""
    op = "moe_permute_mask_fwd"
    contracts.moe_permute_mask_fwd.check(input, routing_map, probs, num_out_tokens=num_out_tokens)
    check_integers(op, num_out_tokens)
    check_size(op, "rows", num_out_tokens)
    input, routing_map = plain(op, "input", input), plain(op, "routing_map", routing_map)
    tokens, experts = routing_map.shape
    output = fresh(op, input, (num_out_tokens, input.shape[1]))
    row_id_map = fresh(op, routing_map, (tokens, 2 * experts + 1), torch.int32)
    permuted = bits = permuted_bits = None
    if probs is not None:
        probs = plain(op, "probs", probs)
        permuted = fresh(op, probs, (num_out_tokens,))
        bits, permuted_bits = raw(probs), raw(permuted)
    if not tokens:
        if permuted is not None:
            permuted.zero_()
        output.zero_()
        return output, permuted, row_id_map
    scanned = _place_by_mask(op, routing_map, row_id_map, bits, permuted_bits, num_out_tokens)
    pairs = _map(op, row_id_map, True)
    _spread_rows(op, input, output, pairs, end=scanned.numel() - 1, end_of=scanned)
    return output, permuted, row_id_map


def moe_permute_mask_bwd(
    grad_output: Tensor, row_id_map: Tensor, grad_permuted_probs: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """``moe_permute_mask_bwd`` of the contract."""
    op = "moe_permute_mask_bwd"
    contracts.moe_permute_mask_bwd.check(grad_output, row_id_map, grad_permuted_probs)
    rows = plain(op, "grad_output", grad_output)
    pairs = _map(op, row_id_map, True)
    if grad_permuted_probs is None:
        return _collected(op, rows, pairs, None), None
    moved = plain(op, "grad_permuted_probs", grad_permuted_probs).contiguous()
    grad_probs = fresh(op, moved, (pairs.tokens, pairs.slots)).zero_()
    columns = rows.shape[1]
    if not columns:  # there are probs to move all the same
        rows = rows.new_zeros((rows.shape[0], 1))
    grad_input = _collected(op, rows, pairs, None, raw(moved), raw(grad_probs))
    return grad_input[:, :columns].contiguous(), grad_probs


def moe_unpermute_mask_fwd(
    input: Tensor, row_id_map: Tensor, probs: Tensor | None = None
) -> Tensor:
    """``moe_unpermute_mask_fwd`` of the contract."""
    contracts.moe_unpermute_mask_fwd.check(input, row_id_map, probs)
    return _unpermuted("moe_unpermute_mask_fwd", input, row_id_map, probs, mask=True)


def moe_unpermute_mask_bwd(
    grad_output: Tensor,
    row_id_map: Tensor,
    input: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    num_rows: int,
) -> tuple[Tensor, Tensor | None]:
    """``moe_unpermute_mask_bwd`` of the contract."""
    op = contracts.moe_unpermute_mask_bwd
    op.check(grad_output, row_id_map, input, probs, num_rows=num_rows)
    return _unpermute_gradients(op.name, grad_output, row_id_map, input, probs, num_rows, mask=True)
