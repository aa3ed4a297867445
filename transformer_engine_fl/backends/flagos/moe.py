"""Moving tokens to their experts and back in Triton.

The row of each pair (token, expert) is computed in ``_row_maps.py``; here whole rows are moved. A
program takes some tokens and iterates over the pairs of each: a token that goes to several rows is
read once, and one that is the sum of several rows is written once. Values that are only moved are
treated as integers of the same size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends._row_map import RowMap
from transformer_engine_fl.backends.flagos._arguments import (
    TRITON_TYPES,
    WIDEST_UNIT,
    block_of,
    by_rows,
    check_integers,
    check_size,
    fresh,
    launch_of,
    listed,
    plain,
    rows_of_tile,
)
from transformer_engine_fl.backends.flagos._dependent import (
    dependent_launch,
    has_dependent_launches,
    wait_for_predecessor,
)
from transformer_engine_fl.backends.flagos._fetch import fetch
from transformer_engine_fl.backends.flagos._row_maps import (
    Placing,
    place_by_index,
    place_by_mask,
    place_pairs,
)
from transformer_engine_fl.backends.flagos._sequences import (
    launch_rows,
    piece,
    place,
    raw,
    tile_of,
)
from transformer_engine_fl.backends.flagos._tiles import Tile, tile_choice
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

# ----------------------------------------------------------------- kernels: moving rows
#
# A token's pairs have ``slots`` entries in a map, ``map_slot`` apart; MASK says which kind of map
# it is. ``have`` is the number of rows. Maps come from users: every entry is checked against it
# before a row is read or written.


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
    """The number of entries to look at for each token, and the maximum of all."""
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
    """Each token's row at an entry, the pair's index, and whether there is such a pair.

    The index is the expert with ``MASK``, and which of the token's choices it is without.
    """
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
    """Write zeros to all rows from ``end`` on; if ``used`` is given, to the rows where it is 0.

    Rows are divided among programs in spans of SPAN rows; few spans need a closer look.
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
        "rows", "slots", "have", "map_token", "map_slot", "end", "pairs", "topk", "each",
        "groups", "index_token", "index_slot", "heads", "width", "x_row", "y_row",
    ]
)  # fmt: skip
def _spread(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    map_ptr: tl.tensor,
    used_ptr: tl.tensor,
    end_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    buckets_ptr: tl.tensor,
    earlier_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    extremes_ptr: tl.tensor,
    rows: tl.int32,
    slots: tl.int32,
    have: tl.int32,
    map_token: tl.int64,
    map_slot: tl.int64,
    end: tl.int64,
    pairs: tl.int32,
    topk: tl.int32,
    each: tl.int32,
    groups: tl.int32,
    index_token: tl.int64,
    index_slot: tl.int64,
    heads: tl.int32,
    width: tl.int32,
    x_row: tl.int64,
    y_row: tl.int64,
    MASK: tl.constexpr,
    SPAN: tl.constexpr,
    PLACED: tl.constexpr,
    PAIRS: tl.constexpr,
    BUCKETS: tl.constexpr,
    GROUPS: tl.constexpr,
    SUMMED: tl.constexpr,
    BESIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy each token to its rows, and write zeros as ``_zero_rows`` does.

    ``end`` is the end of the rows with tokens, unless ``end_ptr`` points to it. DEPENDENT: see
    ``_dependent``; the previous kernel must not have written the tokens. PLACED: if programs of one
    token make the map's entries of their token, at least the number of a token's pairs; else 0.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = token < rows
    head, column, inside = piece(heads, width, UNIT, HEADS, BLOCK)
    x_place = place(token.to(tl.int64) * x_row, head * 0, column, UNIT)
    # A plain load: ``fetch`` was slower here where experts are given by index.
    x = tl.load(x_ptr + x_place, mask=exists[:, None, None] & inside)
    wait_for_predecessor(DEPENDENT)
    if PLACED > 0:
        own = tl.arange(0, PLACED)
        place_pairs(
            indices_ptr, buckets_ptr, earlier_ptr, counts_ptr, extremes_ptr, map_ptr,
            tl.program_id(0) * topk + own, own < topk, pairs, topk, each, groups, have,
            index_token, index_slot, PAIRS, BUCKETS, GROUPS, SUMMED, BESIDE,
        )  # fmt: skip
    count, most = _pairs(map_ptr, token, exists, slots, map_token, map_slot, MASK)
    for at in tl.range(0, most):
        row, _, known = _pair(map_ptr, token, at, count, slots, have, map_token, map_slot, MASK)
        y_place = place(row * y_row, head * 0, column, UNIT)
        tl.store(y_ptr + y_place, x, mask=known[:, None, None] & inside)
    if end_ptr is not None:
        end = tl.load(end_ptr).to(tl.int64)
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
    """The sum of each token's rows, each times its prob if there are probs.

    ``moved``, one number for each row, goes to the entry of its pair in ``to``.
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
        x = fetch(x_ptr + x_place, known[:, None, None] & inside).to(ACC)
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
    """Write 1 for each row that belongs to a pair."""
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
    """Copy each token times its probs to its rows; dprobs are its products with the rows of x.

    WHOLE: a tile is as wide as a row, so dy is read once.
    """
    columns = width * UNIT
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    wide = token.to(tl.int64)
    exists = token < tokens
    dy_start = (wide * (dy_row * UNIT))[:, None]
    block = tl.arange(0, BLOCK)[None, :]
    if WHOLE:
        mask = exists[:, None] & (block < columns)
        dy = fetch(dy_ptr + dy_start + block, mask).to(ACC)
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
            x = fetch(x_ptr + x_start + block, mask).to(ACC)
            products = dy * x
            dx = (dy * prob).to(dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + dx_start + block, dx, mask=mask)
        else:
            products = tl.zeros((TOKENS, BLOCK), ACC)
            for start in tl.range(0, columns, BLOCK):
                column = start + block
                mask = known[:, None] & (column < columns)
                part = fetch(dy_ptr + dy_start + column, mask).to(ACC)
                x = fetch(x_ptr + x_start + column, mask).to(ACC)
                products += part * x
                dx = (part * prob).to(dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + dx_start + column, dx, mask=mask)
        product = tl.where(known, tl.sum(products, axis=1), 0)
        # With a mask, a row of dprobs has more entries than these; it was zeroed before.
        written = known if MASK else exists
        tl.store(dprobs_ptr + wide * slots + expert, product, mask=written)
    for start in tl.range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        _zero_rows(
            dx_ptr, used_ptr, 0, have, width.to(tl.int64) * UNIT,
            column, column < columns, SPAN, TOKENS,
        )  # fmt: skip


# ---------------------------------------------------------------------------- launching

_MARK_TOKENS, _MARK_THREADS = 128, 128
_SPAN = 32
# Most pairs of a token for which the program that moves the token makes the map's entries.
_MOST_PLACED = 16
_SPREAD_TILE = tile_choice("moe_spread", {}, Tile(128, 8192), in_bytes=True)
_SUM_TILE = tile_choice("moe_sum", {}, Tile(256, 8192), in_bytes=True)
_WEIGHTED_SUM_TILE = tile_choice("moe_weighted_sum", {}, Tile(128, 8192), in_bytes=True)
# (threads of a program, elements of its tile), by width as in `_rows.Cut`.
_WEIGHTED_TILES = {2048: (128, 2048), 4096: (128, 4096), 8192: (256, 8192)}
_WEIGHTED_CHUNK, _WEIGHTED_THREADS = 4096, 256


def _used(pairs: RowMap, have: int) -> Tensor:
    """``[have]``: 1 for each row that belongs to a pair, else 0."""
    used = torch.zeros((have,), dtype=torch.uint8, device=pairs.entries.device)
    launch = launch_of(
        _mark, used.device, (), threads=_MARK_THREADS, MASK=pairs.mask, TOKENS=_MARK_TOKENS
    )
    launch(
        (-(-pairs.tokens // _MARK_TOKENS), 1),
        (pairs.entries, used),
        (pairs.tokens, pairs.slots, have, *pairs.steps),
    )
    return used


def _map(op: str, row_id_map: Tensor, mask: bool) -> RowMap:
    entries = plain(op, "row_id_map", row_id_map)
    check_size(op, "entries of row_id_map", entries.numel())
    return RowMap.of(entries, mask)


def _places_itself(x: Tensor, topk: int) -> bool:
    """Whether programs that move tokens make the map's entries: only if each has one token."""
    if not x.shape[1] or topk > _MOST_PLACED:
        return False
    _, elements = _SPREAD_TILE(x.device, x.itemsize)
    return tile_of(1, x.shape[1], x.itemsize, elements * x.itemsize).tokens == 1


def _spread_rows(
    op: str,
    x: Tensor,
    y: Tensor,
    pairs: RowMap,
    *,
    used: Tensor | None = None,
    end: int = 0,
    end_of: Tensor | None = None,
    placed: bool = False,
    placing: Placing | None = None,
) -> None:
    """Fill ``y`` with the tokens ``x``, and with zeros where ``used``, or ``end``, says so.

    ``placed``: the previous launch is one of those that make the map. ``placing``: the rest of that
    work, if it is to be done in this launch.
    """
    if not y.numel():
        return
    if not pairs.tokens:
        y.zero_()
        return
    given = raw(x)
    x, step = by_rows(given)
    # If x was copied, the previous launch is that copy.
    after = placed and x is given and has_dependent_launches(x.device)
    columns = x.shape[1]
    threads, elements = _SPREAD_TILE(x.device, x.itemsize)
    of_map = placing or Placing()
    launch_rows(
        op,
        _spread,
        (x, raw(y), pairs.entries, used, end_of, *of_map.tensors),
        (pairs.slots, y.shape[0], *pairs.steps, end, *of_map.numbers),
        (columns, step, columns),
        rows=pairs.tokens,
        heads=1,
        threads=threads,
        tile_bytes=elements * x.itemsize,
        MASK=pairs.mask,
        SPAN=_SPAN,
        PLACED=0 if placing is None else triton.next_power_of_2(pairs.slots),
        **of_map.constants,
        **dependent_launch(after),
    )


def _collected(
    op: str,
    rows: Tensor,
    pairs: RowMap,
    probs: Tensor | None,
    moved: Tensor | None = None,
    to: Tensor | None = None,
) -> Tensor:
    """``[T, C]``: the sum of each token's rows; ``moved`` goes to the pairs' entries in ``to``."""
    y = fresh(op, rows, (pairs.tokens, rows.shape[1]))
    if not y.numel():
        return y
    check_size(op, "rows", rows.shape[0])
    x, step = by_rows(rows)
    columns = x.shape[1]
    choice = _SUM_TILE if probs is None else _WEIGHTED_SUM_TILE
    threads, elements = choice(x.device, x.itemsize)
    launch_rows(
        op,
        _collect,
        (x, y, pairs.entries, probs, moved, to),
        (pairs.slots, x.shape[0], *pairs.steps, *((0, 0) if probs is None else probs.stride())),
        (columns, step, columns),
        rows=pairs.tokens,
        heads=1,
        threads=threads,
        tile_bytes=elements * x.itemsize,
        MASK=pairs.mask,
        ACC=TRITON_TYPES[math_dtype(x.dtype)],
    )
    return y


def _spread_gradients(
    op: str, dy: Tensor, pairs: RowMap, x: Tensor, probs: Tensor, dx: Tensor, dprobs: Tensor
) -> None:
    """Fill ``dx`` and ``dprobs``; with a mask ``dprobs`` must be zero before."""
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
    launch = launch_of(
        _spread_weighted,
        dy.device,
        (dy.dtype, x.dtype, probs.dtype),
        threads=threads,
        MASK=pairs.mask,
        ACC=TRITON_TYPES[accumulated],
        WHOLE=tile is not None,
        UNIT=unit,
        SPAN=_SPAN,
        TOKENS=tokens,
        BLOCK=block,
    )
    launch(
        (-(-pairs.tokens // tokens), 1),
        (dy, x, probs, pairs.entries, _used(pairs, have), dx, dprobs),
        (
            *(pairs.tokens, pairs.slots, have, *pairs.steps, *probs.stride()),
            *(it // unit for it in (columns, dy_step, x_step)),
        ),
    )


# ---------------------------------------------------------------------------- operators


@repeating
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
    placing = None
    if tokens:
        later = have > 0 and _places_itself(input, topk)
        placing = place_by_index(op, indices, row_id_map, have, later)
    pairs, end = _map(op, row_id_map, False), tokens * topk
    _spread_rows(op, input, output, pairs, end=end, placed=True, placing=placing)
    return output, row_id_map


@repeating
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


@repeating
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
        used = _used(pairs, num_rows) if dx.numel() and pairs.tokens else None
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


@repeating
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


@repeating
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
    total = place_by_mask(op, routing_map, row_id_map, bits, permuted_bits, num_out_tokens)
    pairs = _map(op, row_id_map, True)
    _spread_rows(op, input, output, pairs, end_of=total, placed=True)
    return output, permuted, row_id_map


@repeating
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
    if not columns:  # the probs must be moved nevertheless
        rows = rows.new_zeros((rows.shape[0], 1))
    grad_input = _collected(op, rows, pairs, None, raw(moved), raw(grad_probs))
    return grad_input[:, :columns].contiguous(), grad_probs


@repeating
def moe_unpermute_mask_fwd(
    input: Tensor, row_id_map: Tensor, probs: Tensor | None = None
) -> Tensor:
    """``moe_unpermute_mask_fwd`` of the contract."""
    contracts.moe_unpermute_mask_fwd.check(input, row_id_map, probs)
    return _unpermuted("moe_unpermute_mask_fwd", input, row_id_map, probs, mask=True)


@repeating
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
