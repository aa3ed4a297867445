"""Layout conversions around attention in Triton: whole rows are copied.

Elements are copied as integers of their size, so that all dtypes are one of four, and no bit is
changed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from transformer_engine_fl.backends._repeats import repeating, repeating_from_starts
from transformer_engine_fl.backends.flagos._arguments import (
    WIDEST_UNIT,
    Written,
    check_across,
    check_integers,
    check_size,
    dense,
    fresh,
    launch_of,
    plain,
)
from transformer_engine_fl.backends.flagos._fetch import fetch
from transformer_engine_fl.backends.flagos._sequences import (
    highest_power,
    joined,
    launch_of_rows,
    launch_rows,
    move,
    piece,
    place,
    raw,
    steps,
    token_at,
)
from transformer_engine_fl.ops import attention_layout as contracts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = [
    "convert_bshd_to_thd",
    "convert_thd_to_bshd",
    "copy_to_kv_cache",
    "fa_prepare_bwd",
    "fa_prepare_fwd",
]

# ------------------------------------------------------------------------------ kernels


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "rows", "inner", "heads", "width", "q_outer", "q_inner", "q_head", "k_outer", "k_inner",
        "k_head", "v_outer", "v_inner", "v_head", "y_outer", "y_inner", "y_head",
    ]
)  # fmt: skip
def _regroup(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    new_q_ptr: tl.tensor,
    new_k_ptr: tl.tensor,
    new_v_ptr: tl.tensor,
    rows: tl.int32,
    inner: tl.int32,
    heads: tl.int32,
    width: tl.int32,
    q_outer: tl.int64,
    q_inner: tl.int64,
    q_head: tl.int64,
    k_outer: tl.int64,
    k_inner: tl.int64,
    k_head: tl.int64,
    v_outer: tl.int64,
    v_inner: tl.int64,
    v_head: tl.int64,
    y_outer: tl.int64,
    y_inner: tl.int64,
    y_head: tl.int64,
    UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy queries, keys and values of the same tokens, each to its place."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head, column, inside = piece(heads, width, UNIT, HEADS, BLOCK)
    inside = (row < rows)[:, None, None] & inside
    outer = (row // inner).to(tl.int64)
    within = (row % inner).to(tl.int64)
    q_place = place(outer * q_outer + within * q_inner, head * q_head, column, UNIT)
    k_place = place(outer * k_outer + within * k_inner, head * k_head, column, UNIT)
    v_place = place(outer * v_outer + within * v_inner, head * v_head, column, UNIT)
    new_place = place(outer * y_outer + within * y_inner, head * y_head, column, UNIT)
    q = fetch(q_ptr + q_place, inside, other=None)
    k = fetch(k_ptr + k_place, inside, other=None)
    v = fetch(v_ptr + v_place, inside, other=None)
    tl.store(new_q_ptr + new_place, q, mask=inside)
    tl.store(new_k_ptr + new_place, k, mask=inside)
    tl.store(new_v_ptr + new_place, v, mask=inside)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "rows", "inner", "tokens", "sequences", "highest", "heads", "width",
        "x_outer", "x_token", "x_head", "y_row", "y_head",
    ]
)  # fmt: skip
def _convert(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    rows: tl.int32,
    inner: tl.int32,
    tokens: tl.int32,
    sequences: tl.int32,
    highest: tl.int32,
    heads: tl.int32,
    width: tl.int32,
    x_outer: tl.int64,
    x_token: tl.int64,
    x_head: tl.int64,
    y_row: tl.int64,
    y_head: tl.int64,
    PACK: tl.constexpr,
    UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy rows from one layout to the other; PACK: the new layout has packed sequences.

    The new layout has ``inner`` rows per sequence. The old one has ``tokens`` rows, per sequence if
    sequences are padded.
    """
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = row < rows
    if PACK:
        sequence, token, _, known = token_at(offsets_ptr, row, sequences, highest, 1)
        start = sequence.to(tl.int64) * x_outer
    else:
        sequence = tl.minimum(row // inner, sequences - 1)
        begin = tl.load(offsets_ptr + sequence).to(tl.int64)
        length = tl.load(offsets_ptr + sequence + 1).to(tl.int64) - begin
        token = begin + row % inner
        known = row % inner < length
        start = token * 0
    known = known & (token >= 0) & (token < tokens)
    move(
        x_ptr, start + token * x_token, x_head, y_ptr, row.to(tl.int64) * y_row, y_head,
        known, exists, heads, width, UNIT, HEADS, BLOCK,
    )  # fmt: skip


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "rows", "inner", "sequences", "highest", "pages", "page_size", "listed", "table_row",
        "table_column", "heads", "most", "k_width", "v_width", "k_outer", "k_token", "k_head",
        "v_outer", "v_token", "v_head", "k_page", "k_slot", "k_cached", "v_page", "v_slot",
        "v_cached",
    ]
)  # fmt: skip
def _append(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    new_ptr: tl.tensor,
    cached_ptr: tl.tensor,
    table_ptr: tl.tensor,
    rows: tl.int32,
    inner: tl.int32,
    sequences: tl.int32,
    highest: tl.int32,
    pages: tl.int32,
    page_size: tl.int32,
    listed: tl.int32,
    table_row: tl.int64,
    table_column: tl.int64,
    heads: tl.int32,
    most: tl.int32,
    k_width: tl.int32,
    v_width: tl.int32,
    k_outer: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    v_outer: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    k_page: tl.int64,
    k_slot: tl.int64,
    k_cached: tl.int64,
    v_page: tl.int64,
    v_slot: tl.int64,
    v_cached: tl.int64,
    PACKED: tl.constexpr,
    UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy new keys and values to the cache; a new tensor has ``inner`` rows per sequence.

    ``most`` is the larger of the two widths; ``listed`` the number of listed pages per sequence.
    """
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = row < rows
    if PACKED:
        sequence, number, added, known = token_at(new_ptr, row, sequences, highest, 1)
        outer = number * 0
        token = row.to(tl.int64)
    else:
        sequence = tl.minimum(row // inner, sequences - 1)
        number = (row % inner).to(tl.int64)
        begin = tl.load(new_ptr + sequence).to(tl.int64)
        added = tl.load(new_ptr + sequence + 1).to(tl.int64) - begin
        known = number < added
        outer = sequence.to(tl.int64)
        token = number
    before = tl.load(cached_ptr + sequence).to(tl.int64) + added
    slot = tl.load(cached_ptr + sequence + 1).to(tl.int64) - before + number
    known = exists & known & (slot >= 0)
    if table_ptr is None:
        page = sequence.to(tl.int64)
    else:
        entry = slot // page_size
        slot = slot % page_size
        known = known & (entry < listed)
        entry = table_ptr + sequence.to(tl.int64) * table_row + entry * table_column
        page = tl.load(entry, mask=known, other=-1).to(tl.int64)
    known = known & (page >= 0) & (page < pages) & (slot < page_size)
    k_row, v_row = outer * k_outer + token * k_token, outer * v_outer + token * v_token
    k_target, v_target = page * k_page + slot * k_slot, page * v_page + slot * v_slot
    head, column, inside = piece(heads, most, UNIT, HEADS, BLOCK)
    inside = known[:, None, None] & inside
    of_k = inside & (column < k_width * UNIT)[None, None, :]
    of_v = inside & (column < v_width * UNIT)[None, None, :]
    k = fetch(k_ptr + place(k_row, head * k_head, column, UNIT), of_k, other=None)
    v = fetch(v_ptr + place(v_row, head * v_head, column, UNIT), of_v, other=None)
    k_place = place(k_target, head * k_cached, column, UNIT)
    v_place = place(v_target, head * v_cached, column, UNIT)
    tl.store(k_cache_ptr + k_place, k, mask=of_k)
    tl.store(v_cache_ptr + v_place, v, mask=of_v)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "sequences", "slots", "known_rows", "width", "from_row", "from_slot", "from_head",
        "to_row", "to_slot", "to_head",
    ]
)  # fmt: skip
def _reorder(
    from_ptr: tl.tensor,
    to_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    new_ptr: tl.tensor,
    cached_ptr: tl.tensor,
    sequences: tl.int32,
    slots: tl.int32,
    known_rows: tl.int32,
    width: tl.int32,
    from_row: tl.int64,
    from_slot: tl.int64,
    from_head: tl.int64,
    to_row: tl.int64,
    to_slot: tl.int64,
    to_head: tl.int64,
    UNIT: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Move some columns of one slot of all sequences from their previous rows.

    No other program reads or writes them. All are read before any is written, so ``from`` and
    ``to`` may be the same cache if one program has all sequences.
    """
    slot = (tl.program_id(0) % slots).to(tl.int64)
    sequence = (tl.program_id(0) // slots) * SEQUENCES + tl.arange(0, SEQUENCES)
    exists = sequence < sequences
    stood = tl.load(indices_ptr + sequence, mask=exists, other=-1).to(tl.int64)
    now = tl.load(cached_ptr + sequence + 1, mask=exists, other=0).to(tl.int64)
    now -= tl.load(cached_ptr + sequence, mask=exists, other=0)
    added = tl.load(new_ptr + sequence + 1, mask=exists, other=0).to(tl.int64)
    added -= tl.load(new_ptr + sequence, mask=exists, other=0)
    moves = (slot < now - added) & (stood >= 0) & (stood < known_rows) & (stood != sequence)
    columns = width * UNIT
    blocks = tl.cdiv(columns, BLOCK)
    head = (tl.program_id(1) // blocks).to(tl.int64)
    column = (tl.program_id(1) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = moves[:, None] & (column < columns)[None, :]
    source = (stood * from_row + (slot * from_slot + head * from_head))[:, None] * UNIT
    target = (sequence.to(tl.int64) * to_row + (slot * to_slot + head * to_head))[:, None] * UNIT
    values = tl.load(from_ptr + source + column[None, :], mask=inside)
    tl.debug_barrier()
    tl.store(to_ptr + target + column[None, :], values, mask=inside)


# ---------------------------------------------------------------------------- operators

_THREADS = 128
_TILE_BYTES = {"regroup": 4096, "convert": 8192, "append": 4096}  # of each tensor of a program
_REORDER_THREADS = 256
_REORDER_BYTES = 16384
_FEWEST_THREADS = 64  # a warp, on every target
_MOST_IN_PLACE = 1024  # sequences of one program


def _three(op: str, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Copy queries, keys and values, ``[s, b, n, h]`` each; the new ones have the same strides."""
    outer, inner, _, _ = old[0].shape
    if not old[0].numel():
        return
    tensors = joined(*(raw(it) for it in (*old, *new)))
    *_, heads, width = tensors[0].shape
    launch_rows(
        op,
        _regroup,
        tensors,
        (inner,),
        (width, *(step for it in tensors[:4] for step in steps(it))),
        rows=outer * inner,
        heads=heads,
        threads=_THREADS,
        tile_bytes=_TILE_BYTES["regroup"],
    )


@repeating
def fa_prepare_fwd(qkv: Tensor) -> Tensor:
    """``fa_prepare_fwd`` of the contract."""
    op = contracts.fa_prepare_fwd
    op.check(qkv)
    qkv = dense(op.name, "qkv", qkv)
    tokens, batch, heads, width = qkv.shape
    output = fresh(op.name, qkv, (3, batch, tokens, heads, width // 3))
    _three(op.name, qkv.chunk(3, -1), output.transpose(1, 2).unbind())
    return output


@repeating
def fa_prepare_bwd(q_grad: Tensor, k_grad: Tensor, v_grad: Tensor) -> Tensor:
    """``fa_prepare_bwd`` of the contract."""
    op = contracts.fa_prepare_bwd
    op.check(q_grad, k_grad, v_grad)
    grads = [
        dense(op.name, name, grad).transpose(0, 1)
        for name, grad in (("q_grad", q_grad), ("k_grad", k_grad), ("v_grad", v_grad))
    ]
    *leading, width = grads[0].shape
    dqkv = fresh(op.name, grads[0], (*leading, 3 * width))
    _three(op.name, grads, dqkv.chunk(3, -1))
    return dqkv


def _converted(op: str, tensor: Tensor, offsets: Tensor, output: Tensor, *, pack: bool) -> Tensor:
    """Fill ``output``, ``[b, s, h, d]``, or ``[t, h, d]`` if ``pack``, out of the other."""
    if not output.numel():
        return output
    x, y = joined(raw(tensor), raw(output))
    sequences = offsets.shape[0] - 1
    *before, heads, width = x.shape
    check_size(op, "tokens", before[-1])
    check_size(op, "sequences", sequences)
    if pack:
        rows, inner, x_steps = y.shape[0], 1, steps(x)
    else:
        rows, inner, x_steps = y.shape[0] * y.shape[1], y.shape[1], (0, *steps(x))
    launch_rows(
        op,
        _convert,
        (x, y, offsets),
        (inner, before[-1], sequences, highest_power(sequences)),
        (width, *x_steps, heads * width, width),
        rows=rows,
        heads=heads,
        threads=_THREADS,
        tile_bytes=_TILE_BYTES["convert"],
        PACK=pack,
    )
    return output


@repeating
def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, max_seq_len: int) -> Tensor:
    """``convert_thd_to_bshd`` of the contract."""
    op = contracts.convert_thd_to_bshd
    op.check(tensor, cu_seqlens, max_seq_len)
    check_integers(op.name, max_seq_len)
    tensor = dense(op.name, "tensor", tensor)
    offsets = plain(op.name, "cu_seqlens", cu_seqlens).contiguous()
    shape = (offsets.shape[0] - 1, max_seq_len, *tensor.shape[1:])
    return _converted(op.name, tensor, offsets, fresh(op.name, tensor, shape), pack=False)


@repeating
def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, total_tokens: int) -> Tensor:
    """``convert_bshd_to_thd`` of the contract."""
    op = contracts.convert_bshd_to_thd
    op.check(tensor, cu_seqlens, total_tokens)
    check_integers(op.name, total_tokens)
    tensor = dense(op.name, "tensor", tensor)
    offsets = plain(op.name, "cu_seqlens", cu_seqlens).contiguous()
    shape = (total_tokens, *tensor.shape[2:])
    return _converted(op.name, tensor, offsets, fresh(op.name, tensor, shape), pack=True)


@repeating_from_starts
def copy_to_kv_cache(
    new_k: Tensor,
    new_v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_new_lens: Tensor,
    cu_cached_lens: Tensor,
    *,
    page_table: Tensor | None = None,
    batch_indices: Tensor | None = None,
    qkv_format: str = "thd",
) -> None:
    """``copy_to_kv_cache`` of the contract."""
    contract = contracts.copy_to_kv_cache
    op = contract.name
    contract.check(
        new_k,
        new_v,
        k_cache,
        v_cache,
        cu_new_lens,
        cu_cached_lens,
        page_table=page_table,
        batch_indices=batch_indices,
        qkv_format=qkv_format,
    )
    keys, values = dense(op, "new_k", new_k), dense(op, "new_v", new_v)
    added = plain(op, "cu_new_lens", cu_new_lens).contiguous()
    cached = plain(op, "cu_cached_lens", cu_cached_lens).contiguous()
    table = None if page_table is None else plain(op, "page_table", page_table)
    indices = None
    if batch_indices is not None:
        indices = plain(op, "batch_indices", batch_indices).contiguous()
    caches = Written(op, "k_cache", k_cache), Written(op, "v_cache", v_cache)
    # All kernels that write are compiled before the first of them is launched.
    launches = [
        _reordering(op, raw(cache.dense), indices, added, cached)
        for cache in caches
        if indices is not None and cache.dense.numel()
    ]
    if qkv_format == "thd":
        keys, values = keys.unsqueeze(0), values.unsqueeze(0)
    elif qkv_format == "sbhd":
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    packed = qkv_format == "thd"
    launches += _appending(op, (keys, values), caches, added, cached, table, packed=packed)
    for launch in launches:
        launch()
    for cache in caches:
        cache.finish()


def _appending(
    op: str,
    new: tuple[Tensor, Tensor],
    caches: tuple[Written, Written],
    added: Tensor,
    cached: Tensor,
    table: Tensor | None,
    *,
    packed: bool,
) -> list[Callable[[], None]]:
    """Launches that copy new keys and values, ``[b or 1, s or t, h, d]``, to the caches."""
    k_cache, v_cache = caches[0].dense, caches[1].dense
    if not (new[0].numel() or new[1].numel()) or not (k_cache.numel() or v_cache.numel()):
        return []
    tensors = joined(*(raw(it) for it in (*new, k_cache, v_cache)))
    outer, inner, heads, k_width = tensors[0].shape
    v_width = tensors[1].shape[-1]
    sequences = added.shape[0] - 1
    listed = (0, 0, 0) if table is None else (table.shape[1], *table.stride())
    pages, page_size = k_cache.shape[:2]
    check_size(op, "sequences", sequences)
    check_size(op, "pages", max(pages, listed[0]))
    check_size(op, "slots of a page", page_size)
    launch, grid, given, numbers = launch_of_rows(
        op,
        _append,
        (*tensors, added, cached, table),
        (inner, sequences, highest_power(sequences), pages, page_size, *listed),
        (
            max(k_width, v_width),
            k_width,
            v_width,
            *(step for it in tensors for step in steps(it)),
        ),
        rows=outer * inner,
        heads=heads,
        threads=_THREADS,
        tile_bytes=_TILE_BYTES["append"],
        PACKED=packed,
    )
    return [launch.loaded(grid, given, numbers)]


def _reordering(
    op: str, cache: Tensor, indices: Tensor, added: Tensor, cached: Tensor
) -> Callable[[], None]:
    """A launch that moves the rows of a cache to those of their sequences."""
    sequences = indices.shape[0]
    (cache,) = joined(cache)
    rows, slots, heads, width = cache.shape
    of_program = min(triton.next_power_of_2(sequences), _MOST_IN_PLACE)
    in_place = sequences <= of_program
    copy = cache if in_place else torch.empty_like(cache, device="meta")
    distances = (width, *steps(copy), *steps(cache))
    unit = math.gcd(*distances, WIDEST_UNIT)
    room = max(16, _REORDER_BYTES // cache.itemsize // of_program)
    block = min(triton.next_power_of_2(width), room)
    vectors = of_program * block * cache.itemsize // 16
    threads = min(_REORDER_THREADS, max(_FEWEST_THREADS, vectors))
    launch = launch_of(
        _reorder,
        cache.device,
        (cache.dtype,),
        threads=threads,
        UNIT=unit,
        SEQUENCES=of_program,
        BLOCK=block,
    )
    programs = -(-sequences // of_program) * slots
    across = heads * -(-width // block)
    check_size(op, "slots", programs)
    check_size(op, "pages", rows)
    check_across(op, across)
    numbers = (sequences, slots, rows, *(it // unit for it in distances))
    like = cache if in_place else cache.new_empty((0,))
    launch.load((like, cache, indices, added, cached), numbers)

    def start() -> None:  # at most one copy exists at a time
        before = cache if in_place else cache.clone()
        launch((programs, across), (before, cache, indices, added, cached), numbers)

    return start
