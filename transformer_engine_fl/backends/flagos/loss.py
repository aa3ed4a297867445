"""Cross entropy in Triton: of logits, of shards of a vocabulary, and of a linear layer.

Forward, a program reads its rows once, in chunks with several vectors in flight; each lane keeps
the highest score and the sum of exponentials of what it has read. Backward, each tile of the logits
is read once and its gradient computed from lse. Forward and backward in one call are a softmax
minus one at the target, in the kernels of ``softmax``, so that logits are read only once. The
linear forms compute the logits of some words at a time, in float32, by torch's matrix product; the
kernels are the same. On Hopper the product itself continues with the logits in its registers
(``_loss_hopper``), and only their gradients are stored.

The order of summation in a row depends on its width and on the width of accesses, which follows
from the row stride: so a row's result does not depend on the other rows of the call. A row sliced
from a matrix (``x[3:4]``) keeps the stride; a copy, or the row as a vector (``x[3]``), counts as
dense, and if the stride was a different one, its last bits may differ. For the linear forms this is
up to torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_engine_fl.backends._cross_entropy import (
    LinearCrossEntropy,
    Options,
    Rows,
    options_of,
    run_both,
    vector_of,
)
from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import (
    ALIGNMENT,
    TRITON_TYPES,
    add_to_cache,
    address_of,
    addressed,
    block_of,
    by_rows,
    check_numbers,
    check_size,
    fresh,
    is_block,
    launch_of,
    listed,
    rows_of_tile,
)
from transformer_engine_fl.backends.flagos._cross_entropy import (
    of_z_loss,
    softmax_shift,
    store_loss,
)
from transformer_engine_fl.backends.flagos._fetch import fetch
from transformer_engine_fl.backends.flagos._tiles import Tile
from transformer_engine_fl.backends.flagos.gemm import generic_gemm
from transformer_engine_fl.backends.flagos.softmax import run_with_losses
from transformer_engine_fl.backends.flagos.tuning import Choice
from transformer_engine_fl.ops import loss as contracts
from transformer_engine_fl.ops._dtypes import math_dtype

__all__ = [
    "cross_entropy_bwd",
    "cross_entropy_fwd",
    "cross_entropy_fwd_bwd",
    "cross_entropy_merge",
    "cross_entropy_partial_fwd",
    "fused_linear_cross_entropy_bwd",
    "fused_linear_cross_entropy_fwd",
    "fused_linear_cross_entropy_fwd_bwd",
]

# ------------------------------------------------------------------------------ kernels
#
# Rows are read in vectors of VEC elements, 16 bytes where alignment allows it. ``step`` is the row
# stride in elements. Words are indices into the whole vocabulary, columns into the logits at hand,
# the first of which is word ``start``.

_LOG2E = tl.constexpr(1 / math.log(2))
# tanh(u) = u + u**3 * P(u**2), for u up to _NEAR: fitted with a relative error of 1e-8
_NEAR = tl.constexpr(0.625)
_P0 = tl.constexpr(-0.3333328068256378)
_P1 = tl.constexpr(0.13331441581249237)
_P2 = tl.constexpr(-0.05373971164226532)
_P3 = tl.constexpr(0.020639078691601753)
_P4 = tl.constexpr(-0.005704978480935097)
_LAST_TERM = tl.constexpr(15)  # of the continued fraction in float64: a relative error of 2e-16


@triton.jit  # type: ignore[untyped-decorator]
def _exp(x: tl.tensor) -> tl.tensor:
    return tl.exp2(x * tl.full((), _LOG2E, x.dtype))


@triton.jit  # type: ignore[untyped-decorator]
def _capped(x: tl.tensor, cap: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Scores of logits under a soft cap, and their derivatives."""
    one = tl.full((), 1.0, x.dtype)
    bound = tl.full((), cap, x.dtype)
    u = x * (one / bound)
    shrunk = _exp(-2 * tl.abs(u))
    share = one / (one + shrunk)
    far = one - 2 * shrunk * share
    tanh = tl.where(u < 0, -far, far)
    square = u * u  # for small u the above cancels too much
    if x.dtype == tl.float32:
        series = _P0 + square * (_P1 + square * (_P2 + square * (_P3 + square * _P4)))
        near = u + u * square * series
    else:  # Lambert's continued fraction: u / (1 + u**2 / (3 + u**2 / (5 + ...)))
        tail = tl.full((), _LAST_TERM, x.dtype)
        for back in tl.static_range(2, _LAST_TERM + 1, 2):
            tail = (_LAST_TERM - back) + square / tail
        near = u / tail
    tanh = tl.where(tl.abs(u) < _NEAR, near, tanh)
    # As 1 - tanh**2 the derivative would cancel where tanh is near 1.
    return bound * tanh, 4 * shrunk * share * share


@triton.jit  # type: ignore[untyped-decorator]
def _scores(x: tl.tensor, cap: tl.tensor, CAPPED: tl.constexpr) -> tl.tensor:
    if CAPPED:
        scores, _ = _capped(x, cap)
        return scores
    else:
        return x


@triton.jit  # type: ignore[untyped-decorator]
def _row_of_lane(ROWS: tl.constexpr, LANES: tl.constexpr) -> tl.tensor:
    """The row of each of ROWS * LANES lanes; for one row a single element for all lanes."""
    if ROWS == 1:
        return tl.zeros((1,), tl.int32)
    else:
        return tl.arange(0, ROWS * LANES) // LANES


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "rows", "columns", "step", "start", "ignore", "last", "words", "smoothing", "z", "cap",
    ]
)  # fmt: skip
def _forward(
    x_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    target_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    loss_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    step: tl.int64,
    start: tl.int64,
    ignore: tl.int64,
    last: tl.int64,
    words: tl.float64,
    smoothing: tl.float64,
    z: tl.float64,
    cap: tl.float64,
    CAPPED: tl.constexpr,
    SUMMED: tl.constexpr,
    TAIL: tl.constexpr,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """ROWS rows in chunks of DEPTH times LANES vectors: their statistics, or loss and lse.

    VEC divides the step; TAIL: it does not divide the columns, so the last vector is partial.
    """
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)
    exists = row < rows
    target = tl.load(target_ptr + row, mask=exists, other=0)
    ignored = target == ignore
    read = exists & (target != ignore)
    start_of_row = x_ptr + row.to(tl.int64) * (step // VEC) * VEC
    # The target's score is loaded on its own: its vector is read with the others anyway.
    word = target - start
    inside = read & (target >= start) & (word < columns)
    word = tl.where(inside, word, 0)
    chosen = tl.load(start_of_row + word, mask=inside, other=0).to(ACC)
    if bias_ptr is not None:
        chosen += fetch(bias_ptr + word, inside).to(ACC)
    at_target = tl.where(inside, _scores(chosen, cap, CAPPED), 0)

    own = first_row + _row_of_lane(ROWS, LANES)
    wanted = (own < rows) & (tl.load(target_ptr + own, mask=own < rows, other=0) != ignore)
    wanted = wanted[:, None]
    # Declared by VEC, so that the order of sums does not depend on the tensor's own alignment.
    BYTES: tl.constexpr = VEC * (x_ptr.dtype.element_ty.primitive_bitwidth // 8)
    if ROWS == 1:
        x_ptr = tl.multiple_of(x_ptr + first_row.to(tl.int64) * (step // VEC) * VEC, BYTES)
    else:
        x_ptr += (own.to(tl.int64) * (step // VEC) * VEC)[:, None]
        x_ptr = tl.multiple_of(x_ptr, (BYTES, BYTES))
    # The first score is subtracted before summing: a large common part would round off the rest.
    center = tl.zeros((ROWS,), ACC)
    if SUMMED and stats_ptr is None:
        center = tl.load(start_of_row, mask=read, other=0).to(ACC)
        if bias_ptr is not None:
            center += fetch(bias_ptr + tl.zeros_like(row), read).to(ACC)
        center = softmax_shift(_scores(center, cap, CAPPED))
    center_of_lane = tl.broadcast_to(center[:, None], (ROWS, LANES))
    center_of_lane = tl.reshape(center_of_lane, (ROWS * LANES, 1))
    lane = (tl.arange(0, ROWS * LANES) % LANES)[:, None]
    place = tl.arange(0, VEC)[None, :]
    vectors = columns // VEC
    chunks = tl.cdiv(vectors, DEPTH * LANES)
    chunks = tl.where(tl.max(read.to(tl.int32), axis=0) > 0, chunks, 0)
    highest = tl.full((ROWS * LANES,), float("-inf"), ACC)
    total = tl.zeros((ROWS * LANES,), ACC)
    summed = tl.zeros((ROWS * LANES,), ACC)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        # All vectors of the chunk are loaded before the first is used.
        tiles = tl.tuple(())
        for part in tl.static_range(DEPTH):
            vector = (chunk * DEPTH + part) * LANES + lane
            tiles += (
                fetch(
                    x_ptr + (vector * VEC + place), wanted & (vector < vectors), other=float("-inf")
                ),
            )
        above = highest
        scores = tl.tuple(())
        for part in tl.static_range(DEPTH):
            x = tiles[part].to(ACC)
            vector = (chunk * DEPTH + part) * LANES + lane
            if bias_ptr is not None:
                column = vector * VEC + place
                x += fetch(bias_ptr + column, vector < vectors).to(ACC)
            if CAPPED:
                x = tl.where(vector < vectors, _scores(x, cap, CAPPED), float("-inf"))
            above = tl.maximum(above, tl.max(x, axis=1))
            scores += (x,)
        shift = softmax_shift(above)
        total *= _exp(highest - shift)
        highest = above
        for part in tl.static_range(DEPTH):
            total += tl.sum(_exp(scores[part] - shift[:, None]), axis=1)
            if SUMMED:
                vector = (chunk * DEPTH + part) * LANES + lane
                less = scores[part] - center_of_lane
                summed += tl.sum(tl.where(vector < vectors, less, 0), axis=1)
    highest = tl.reshape(highest, (ROWS, LANES))
    most = tl.max(highest, axis=1)
    total = tl.reshape(total, (ROWS, LANES)) * _exp(highest - softmax_shift(most)[:, None])
    sum_of_all = tl.sum(total, axis=1)
    sum_of_scores = tl.sum(tl.reshape(summed, (ROWS, LANES)), axis=1)
    if TAIL:
        column = vectors * VEC + place
        there = read[:, None] & (column < columns)
        x = fetch(start_of_row[:, None] + column, there, other=float("-inf")).to(ACC)
        if bias_ptr is not None:
            x += fetch(bias_ptr + column, column < columns).to(ACC)
        last_scores = tl.where(there, _scores(x, cap, CAPPED), float("-inf"))
        before = most
        most = tl.maximum(most, tl.max(last_scores, axis=1))
        shift_at_last = softmax_shift(most)
        sum_of_all *= _exp(before - shift_at_last)
        sum_of_all += tl.sum(_exp(last_scores - shift_at_last[:, None]), axis=1)
        if SUMMED:
            sum_of_scores += tl.sum(tl.where(there, last_scores - center[:, None], 0), axis=1)

    if stats_ptr is not None:
        stats_ptr += row.to(tl.int64) * 4
        tl.store(stats_ptr, tl.where(ignored, 0, most), mask=exists)
        tl.store(stats_ptr + 1, tl.where(ignored, 0, sum_of_all), mask=exists)
        tl.store(stats_ptr + 2, at_target, mask=exists)
        tl.store(stats_ptr + 3, tl.where(ignored, 0, sum_of_scores), mask=exists)
    else:
        store_loss(
            loss_ptr, lse_ptr, row, exists, target, ignored,
            most, sum_of_all, at_target, sum_of_scores,
            last, words, smoothing, z, SUMMED, ACC, center,
        )  # fmt: skip


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["rows", "shards", "ignore", "last", "words", "smoothing", "z"]
)
def _merge(
    stats_ptr: tl.tensor,
    target_ptr: tl.tensor,
    loss_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    rows: tl.int32,
    shards: tl.int32,
    ignore: tl.int64,
    last: tl.int64,
    words: tl.float64,
    smoothing: tl.float64,
    z: tl.float64,
    SUMMED: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Loss and lse of ROWS rows from the statistics of their shards, in the order of shards."""
    ACC: tl.constexpr = loss_ptr.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    target = tl.load(target_ptr + row, mask=exists, other=0)
    highest = tl.full((ROWS,), float("-inf"), ACC)
    for shard in tl.range(0, shards):
        where = stats_ptr + (tl.full((), shard, tl.int64) * rows + row) * 4
        highest = tl.maximum(highest, tl.load(where, mask=exists, other=0))
    shift = softmax_shift(highest)
    total = tl.zeros((ROWS,), ACC)
    at_target = tl.zeros((ROWS,), ACC)
    summed = tl.zeros((ROWS,), ACC)
    for shard in tl.range(0, shards):
        where = stats_ptr + (tl.full((), shard, tl.int64) * rows + row) * 4
        own = tl.load(where, mask=exists, other=0)
        total += tl.load(where + 1, mask=exists, other=0) * _exp(own - shift)
        at_target += tl.load(where + 2, mask=exists, other=0)
        if SUMMED:
            summed += tl.load(where + 3, mask=exists, other=0)
    store_loss(
        loss_ptr, lse_ptr, row, exists, target, target == ignore,
        highest, total, at_target, summed,
        last, words, smoothing, z, SUMMED, ACC,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _gradients(
    x: tl.tensor,
    column: tl.tensor,
    word: tl.tensor,
    lse: tl.tensor,
    factor: tl.tensor,
    pull: tl.tensor,
    uniform: tl.tensor,
    cap: tl.tensor,
    CAPPED: tl.constexpr,
) -> tl.tensor:
    """The gradients of a 2D tile of logits; other arguments have one element for each row."""
    scores = x
    if CAPPED:
        scores, slopes = _capped(x, cap)
    d = factor[:, None] * _exp(scores - lse[:, None])
    d -= tl.where(column == word[:, None], pull[:, None], uniform[:, None])
    if CAPPED:
        d *= slopes
    return d


@triton.jit  # type: ignore[untyped-decorator]
def _factors(
    row: tl.tensor,
    exists: tl.tensor,
    target_ptr: tl.tensor,
    grad_loss_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    grad_lse_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    ignore: tl.tensor,
    last: tl.tensor,
    smoothing: tl.tensor,
    share: tl.tensor,
    z: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """``(target, read, lse, factor, pull, uniform)`` of each row, for :func:`_gradients`."""
    ACC: tl.constexpr = lse_ptr.dtype.element_ty
    target = tl.load(target_ptr + row, mask=exists, other=0)
    grad_loss = tl.load(grad_loss_ptr + row, mask=exists, other=0)
    lse = tl.load(lse_ptr + row, mask=exists, other=0)
    read = exists & (target != ignore)
    # These are 0 for a row that is not read.
    grad_loss = tl.where(read, grad_loss, 0)
    lse = tl.where(read, lse, 0)
    factor = grad_loss
    if grad_lse_ptr is not None:
        factor += tl.where(read, tl.load(grad_lse_ptr + row, mask=exists, other=0), 0)
    factor += of_z_loss(grad_loss, lse, z)
    uniform = tl.where(smoothing == 0, 0, tl.full((), share, ACC) * grad_loss)
    pull = tl.full((), 1 - smoothing, ACC) * grad_loss + uniform
    factor = tl.where(read & ((target < 0) | (target >= last)), float("nan"), factor)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
        factor *= scale
        uniform *= scale
        pull *= scale
    return target, read, lse, factor, pull, uniform


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["rows", "ignore", "last", "smoothing", "share", "z"]
)
def _row_factors(
    target_ptr: tl.tensor,
    grad_loss_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    grad_lse_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.int32,
    ignore: tl.int64,
    last: tl.int64,
    smoothing: tl.float64,
    share: tl.float64,
    z: tl.float64,
    ROWS: tl.constexpr,
) -> None:
    """``[4, rows]``: lse, factor, pull and uniform; a row that is not read has an infinite lse."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    _, read, lse, factor, pull, uniform = _factors(
        row, exists, target_ptr, grad_loss_ptr, lse_ptr, grad_lse_ptr, scale_ptr,
        ignore, last, smoothing, share, z,
    )  # fmt: skip
    far = tl.full((), rows, tl.int64)
    tl.store(out_ptr + row, tl.where(read, lse, float("inf")), mask=exists)
    tl.store(out_ptr + far + row, factor, mask=exists)
    tl.store(out_ptr + 2 * far + row, pull, mask=exists)
    tl.store(out_ptr + 3 * far + row, uniform, mask=exists)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "rows", "columns", "step", "out_step", "start", "ignore", "last",
        "smoothing", "share", "z", "cap",
    ]
)  # fmt: skip
def _backward(
    x_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    target_ptr: tl.tensor,
    grad_loss_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    grad_lse_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    step: tl.int64,
    out_step: tl.int64,
    start: tl.int64,
    ignore: tl.int64,
    last: tl.int64,
    smoothing: tl.float64,
    share: tl.float64,
    z: tl.float64,
    cap: tl.float64,
    CAPPED: tl.constexpr,
    EDGES: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    VECTORS: tl.constexpr,
) -> None:
    """A tile of ROWS rows by VECTORS vectors.

    EDGES, with ROWS = 1: rows may begin and end inside a vector, at the same offset in ``x`` and
    ``out``; the first tile of a row handles the partial vectors at both ends.
    """
    ACC: tl.constexpr = lse_ptr.dtype.element_ty
    blocks = tl.cdiv(columns + (VEC - 1) * EDGES, VEC * VECTORS)
    # From the last tile: what the forward read last is most likely still in the cache.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (tile // blocks) * ROWS + _row_of_lane(ROWS, VECTORS)
    block = tile % blocks
    exists = row < rows
    target, read, lse, factor, pull, uniform = _factors(
        row, exists, target_ptr, grad_loss_ptr, lse_ptr, grad_lse_ptr, scale_ptr,
        ignore, last, smoothing, share, z,
    )  # fmt: skip
    word = target - start
    word = tl.where((target >= start) & (word < columns), word, -1).to(tl.int32)

    exists = exists[:, None]
    read = read[:, None]
    where = row.to(tl.int64)[:, None]
    first = where * step // VEC
    x_ptr += first * VEC
    out_ptr += where * out_step // VEC * VEC
    place = tl.arange(0, VEC)[None, :]
    lane = (tl.arange(0, ROWS * VECTORS) % VECTORS)[:, None]
    vector = block * VECTORS + lane
    shift = 0
    if EDGES:
        shift = (where * step - first * VEC).to(tl.int32)
    begin = vector * VEC - shift
    whole = (begin >= 0) & (begin + VEC <= columns)
    column = begin + place
    x = fetch(x_ptr + (vector * VEC + place), whole & read).to(ACC)
    if bias_ptr is not None:
        x += fetch(bias_ptr + column, whole & read).to(ACC)
    d = _gradients(x, column, word, lse, factor, pull, uniform, cap, CAPPED)
    out = out_ptr + (vector * VEC + place)
    tl.store(out, d.to(out_ptr.dtype.element_ty), mask=whole & exists)
    if EDGES:  # noqa: SIM102 - known when it is compiled, the other when it runs
        if block == 0:
            # The elements before a row's first whole vector and after its last one.
            edge = tl.arange(0, 2 * VEC)[None, :]
            head = (VEC - shift) % VEC
            behind = tl.maximum(head, (shift + columns) // VEC * VEC - shift)
            at = tl.where(edge < VEC, edge, behind + edge - VEC)
            inside = ((edge < head) | (edge >= VEC)) & (at < columns)
            few = fetch(x_ptr + (shift + at), inside & read).to(ACC)
            if bias_ptr is not None:
                few += fetch(bias_ptr + at, inside & read).to(ACC)
            d_few = _gradients(few, at, word, lse, factor, pull, uniform, cap, CAPPED)
            out_few = out_ptr + (shift + at)
            tl.store(out_few, d_few.to(out_ptr.dtype.element_ty), mask=inside & exists)


# -------------------------------------------------------------------------------- plans

_FORWARD_TILES = {8192: (32, 1024), 2**32: (128, 4096)}
"""By width: (threads of a program, elements that it reads at a time).

A width is columns rounded up to a power of two, float64 counting double.
"""
_BACKWARD_TILE, _BACKWARD_THREADS = 4096, 128
_FORWARD_STAGES = 1
_MERGE_ROWS = 128  # one per thread

_LAST = 2**63 - 1


class _Plan(NamedTuple):
    """How to run a kernel.

    Attributes:
        launch: the kernel.
        rows: rows of a program.
        columns: columns of a program; 0 if each has whole rows.
        before: most columns by which a row's first vector may begin before the row.
    """

    launch: _launch.Launch
    rows: int
    columns: int = 0
    before: int = 0


_PLANS: dict[object, _Plan] = {}


def _double(itemsize: int) -> int:
    return 2 if itemsize == 8 else 1


def _forward_rule(device: torch.device, columns: int, itemsize: int) -> Tile:
    threads, tile = listed(_FORWARD_TILES, columns * _double(itemsize))
    return Tile(threads, tile // _double(itemsize))


def _backward_rule(device: torch.device, columns: int, itemsize: int) -> Tile:
    return Tile(_BACKWARD_THREADS, _BACKWARD_TILE // _double(itemsize))


def _candidates(columns: int, itemsize: int) -> Iterator[Tile]:
    """8 to 64 elements per thread, half as many of float64."""
    for threads in (32, 64, 128, 256, 512):
        for elements in (1024, 2048, 4096, 8192, 16384):
            if 8 <= elements * _double(itemsize) // threads <= 64:
                yield Tile(threads, elements)


def _wrong(tile: Tile) -> str | None:
    if is_block(tile.threads, 32, 1024) and is_block(tile.elements, tile.threads, 2**16):
        return None
    return "threads (32 to 1024) and elements (threads to 65536) must be powers of two"


def _choice(name: str, rule: Callable[..., Tile]) -> Choice[Tile]:
    return Choice(
        name,
        Tile,
        key=("columns", "itemsize"),
        rounded=("columns",),
        candidates=_candidates,
        heuristic=rule,
        wrong=_wrong,
        plans=(_PLANS,),
    )


_FORWARD = _choice("cross_entropy_fwd", _forward_rule)
_BACKWARD = _choice("cross_entropy_bwd", _backward_rule)


def _lies_at(op: str, tensor: Tensor) -> int:
    """The address of a tensor, in elements; 1 (odd) if it is not a multiple of the item size."""
    address = address_of(op, tensor)
    return address // tensor.element_size() if address % tensor.element_size() == 0 else 1


def _aligned_rows(op: str, input: Tensor) -> tuple[Tensor, int, int]:
    """Logits with dense columns, their row stride, and what divides the places of their rows.

    The order of sums depends on the last, so that must not depend on how many rows a call has. A
    slice keeps all strides of its tensor, those of dimensions of which it has one element too; but
    rows that have no single stride are copied, and a single one of them is not. What divides their
    places is therefore told by the tensor as given, and a copy's rows are no worse aligned. Rows
    that are not dense are always copied.
    """
    columns = input.shape[-1]
    logits, step = by_rows(input, ALIGNMENT // input.element_size())
    if input.stride(-1) != 1 and columns != 1:
        return logits, step, step
    strides = [stride for stride in input.stride()[:-1] if stride >= columns]
    return logits, step, math.gcd(_lies_at(op, input), *strides)


def _forward_plan(
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    vec: int,
    *,
    capped: bool,
    summed: bool,
) -> _Plan:
    threads, tile = _FORWARD(device, columns, dtype.itemsize)
    block = min(block_of(columns), tile)
    rows = rows_of_tile(tile, block)
    lanes = min(threads, block // vec)
    launch = _launch.Launch(
        _forward,
        device,
        threads=threads,
        CAPPED=capped,
        SUMMED=summed,
        TAIL=bool(columns % vec),
        ACC=TRITON_TYPES[math_dtype(dtype)],
        VEC=vec,
        ROWS=rows,
        DEPTH=block // (lanes * vec),
        LANES=lanes,
        STAGES=_FORWARD_STAGES,
    )
    return _Plan(launch, rows)


def _backward_plan(
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    vec: int,
    widest: int,
    *,
    capped: bool,
    alike: bool,
) -> _Plan:
    """For rows aligned to ``vec`` elements; ``alike``: with the same offsets in both tensors."""
    threads, tile = _BACKWARD(device, columns, dtype.itemsize)
    # Rows with any start, but the same in both tensors: most of a wide row still is whole vectors.
    edges = alike and vec < widest and columns >= tile
    if edges:
        vec = widest
    block = min(max(vec, block_of(columns)), tile)
    rows = rows_of_tile(tile, block)
    launch = _launch.Launch(
        _backward,
        device,
        threads=threads,
        CAPPED=capped,
        EDGES=edges,
        VEC=vec,
        ROWS=rows,
        VECTORS=block // vec,
    )
    return _Plan(launch, rows, block, (vec - 1) * edges)


# --------------------------------------------------------------------------- on logits


def _run_forward(
    op: str,
    logits: Tensor,
    step: int,
    bias: Tensor | None,
    target: Tensor,
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None],
    start: int,
    options: Options,
    alignment: int = 0,
) -> None:
    """Write (statistics, None, None) or (None, loss, lse) for rows with stride ``step``.

    ``alignment`` is what divides the places of rows in the tensor given by the caller, of which
    ``logits`` may be a copy, in elements.
    """
    columns, rows = logits.shape[-1], target.numel()
    check_size(op, "columns", columns)
    check_size(op, "rows", rows)
    widest = ALIGNMENT // logits.element_size()
    vec = math.gcd(step, _lies_at(op, logits), alignment, widest)
    summed = outputs[0] is not None or bool(options.smoothing)
    capped = options.softcap is not None
    dtypes = (logits.dtype, None if bias is None else bias.dtype, outputs[0] is None)
    key = ("forward", *dtypes, columns, vec, capped, summed, logits.device)
    plan = _PLANS.get(key) or add_to_cache(
        _PLANS,
        key,
        _forward_plan(columns, logits.dtype, logits.device, vec, capped=capped, summed=summed),
    )
    words = (min(start + columns, _LAST), float(columns))
    plan.launch(
        (-(-rows // plan.rows), 1),
        (logits, bias, target, *outputs),
        (rows, columns, step, start, options.ignore, *words,
         options.smoothing, options.z, options.cap),
    )  # fmt: skip


def _run_merge(
    op: str, stats: Tensor, target: Tensor, loss: Tensor, lse: Tensor, words: int, options: Options
) -> None:
    """Write loss and lse of dense statistics."""
    rows = target.numel()
    check_size(op, "rows", rows)
    check_size(op, "shards", stats.shape[0])
    summed = bool(options.smoothing)
    key = ("merge", stats.dtype, summed, stats.device)
    plan = _PLANS.get(key) or add_to_cache(
        _PLANS,
        key,
        _Plan(
            _launch.Launch(
                _merge, stats.device, threads=_MERGE_ROWS, SUMMED=summed, ROWS=_MERGE_ROWS
            ),
            _MERGE_ROWS,
        ),
    )
    plan.launch(
        (-(-rows // plan.rows), 1),
        (stats, target, loss, lse),
        (rows, stats.shape[0], options.ignore, words, float(words), options.smoothing, options.z),
    )


def _run_backward(
    op: str,
    logits: Tensor,
    step: int,
    bias: Tensor | None,
    rows: Rows,
    out: Tensor,
    out_step: int,
    start: int,
    words: int,
    options: Options,
) -> None:
    """Write the gradients of logits with row stride ``step`` to rows with stride ``out_step``."""
    columns, count, device = logits.shape[-1], rows.target.numel(), logits.device
    check_size(op, "columns", columns)
    check_size(op, "rows", count)
    widest = ALIGNMENT // min(logits.element_size(), out.element_size())
    at = math.gcd(_lies_at(op, logits), _lies_at(op, out))
    vec = math.gcd(columns, step, out_step, at, widest)
    alike = at % widest == 0 and (step - out_step) % widest == 0
    capped = options.softcap is not None
    present = (bias is None, rows.grad_lse is None, rows.scale is None)
    kind = (logits.dtype, out.dtype, None if bias is None else bias.dtype, *present)
    key = ("backward", *kind, columns, vec, alike, capped, device)
    plan = _PLANS.get(key) or add_to_cache(
        _PLANS,
        key,
        _backward_plan(columns, logits.dtype, device, vec, widest, capped=capped, alike=alike),
    )
    blocks = -(-(columns + plan.before) // plan.columns)
    tiles = -(-count // plan.rows) * blocks
    check_size(op, "tiles", tiles)
    plan.launch(
        (tiles, 1),
        (logits, bias, *rows, out),
        (count, columns, step, out_step, start, options.ignore, words,
         options.smoothing, options.smoothing / words, options.z, options.cap),
    )  # fmt: skip


# ---------------------------------------------------------------------------- operators


@repeating
def cross_entropy_fwd(
    input: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``cross_entropy_fwd`` of the contract."""
    op = "cross_entropy_fwd"
    contracts.cross_entropy_fwd.check(
        input,
        target,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        z_loss=z_loss,
        softcap=softcap,
    )
    options = options_of(op, label_smoothing, ignore_index, z_loss, softcap)
    input, target = addressed(op, "input", input), addressed(op, "target", target)
    shape, dtype = tuple(target.shape), math_dtype(input.dtype)
    loss, lse = (fresh(op, input, shape, dtype) for _ in range(2))
    if target.numel():
        logits, step, aligned = _aligned_rows(op, input)
        outputs = (None, loss, lse)
        _run_forward(op, logits, step, None, vector_of(target), outputs, 0, options, aligned)
    return loss, lse


@repeating
def cross_entropy_partial_fwd(
    input: Tensor,
    target: Tensor,
    *,
    vocab_start: int = 0,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> Tensor:
    """``cross_entropy_partial_fwd`` of the contract."""
    op = "cross_entropy_partial_fwd"
    contracts.cross_entropy_partial_fwd.check(
        input, target, vocab_start=vocab_start, ignore_index=ignore_index, softcap=softcap
    )
    options = options_of(op, ignore_index=ignore_index, softcap=softcap)
    check_numbers(op, vocab_start)
    input, target = addressed(op, "input", input), addressed(op, "target", target)
    stats = fresh(op, input, (*target.shape, 4), math_dtype(input.dtype))
    if target.numel():
        logits, step, aligned = _aligned_rows(op, input)
        outputs, words = (stats, None, None), vector_of(target)
        _run_forward(op, logits, step, None, words, outputs, vocab_start, options, aligned)
    return stats


@repeating
def cross_entropy_merge(
    stats: Tensor,
    target: Tensor,
    *,
    vocab_size: int,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``cross_entropy_merge`` of the contract."""
    op = "cross_entropy_merge"
    contracts.cross_entropy_merge.check(
        stats,
        target,
        vocab_size=vocab_size,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        z_loss=z_loss,
    )
    options = options_of(op, label_smoothing, ignore_index, z_loss)
    check_numbers(op, vocab_size)
    stats, target = addressed(op, "stats", stats), addressed(op, "target", target)
    loss, lse = (fresh(op, stats, tuple(target.shape), stats.dtype) for _ in range(2))
    if target.numel():
        _run_merge(op, stats.contiguous(), vector_of(target), loss, lse, vocab_size, options)
    return loss, lse


@repeating
def cross_entropy_bwd(
    grad_loss: Tensor,
    input: Tensor,
    target: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> Tensor:
    """``cross_entropy_bwd`` of the contract."""
    op = "cross_entropy_bwd"
    contracts.cross_entropy_bwd.check(
        grad_loss,
        input,
        target,
        lse,
        grad_lse,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        z_loss=z_loss,
        softcap=softcap,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
    )
    options = options_of(op, label_smoothing, ignore_index, z_loss, softcap)
    words = vocab_start + input.shape[-1] if vocab_size is None else vocab_size
    check_numbers(op, vocab_start, words)
    words = min(words, _LAST)
    input = addressed(op, "input", input)
    rows = _linear.rows_of(op, target, grad_loss, lse, grad_lse)
    grad_input = fresh(op, input, tuple(input.shape), input.dtype)
    if target.numel():
        logits, step = by_rows(input)
        columns = input.shape[-1]
        _run_backward(
            op, logits, step, None, rows, grad_input, columns, vocab_start, words, options
        )
    return grad_input


@repeating
def cross_entropy_fwd_bwd(
    input: Tensor,
    target: Tensor,
    grad_loss: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``cross_entropy_fwd_bwd`` of the contract."""
    op = "cross_entropy_fwd_bwd"
    contracts.cross_entropy_fwd_bwd.check(
        input,
        target,
        grad_loss,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        z_loss=z_loss,
        softcap=softcap,
    )
    options = options_of(op, label_smoothing, ignore_index, z_loss, softcap)
    input = addressed(op, "input", input)
    shape, dtype = tuple(target.shape), math_dtype(input.dtype)
    loss, lse = (fresh(op, input, shape, dtype) for _ in range(2))
    grad_input = fresh(op, input, tuple(input.shape), input.dtype)
    if not target.numel():
        return loss, lse, grad_input
    logits, step, aligned = _aligned_rows(op, input)
    rows = _linear.rows_of(op, target, grad_loss, lse, None)
    forward = functools.partial(_run_forward, alignment=aligned)
    kernels = (forward, _run_backward, run_with_losses)
    run_both(*kernels, op, logits, step, None, rows, loss, grad_input, logits.shape[-1], options)
    return loss, lse, grad_input


def _fused_statistics(
    op: str, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: Options
) -> Tensor | None:
    """The statistics of blocks of words, without storing logits; None if that is not supported."""
    if (hopper := _for_hopper(input, weight, options)) is None:
        return None
    shape = (-(-weight.shape[0] // hopper.COLUMNS), target.numel(), 4)
    stats = fresh(op, input, shape, torch.float32)
    hopper.store_statistics(op, input, weight, bias, target, stats)
    return stats


def _fused_gradients(
    op: str, input: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, options: Options
) -> Callable[[slice, Tensor], None] | None:
    """A function that writes the gradients of some words' logits; None if that is not supported."""
    if (hopper := _for_hopper(input, weight, options)) is None:
        return None
    factors = _factors_of_rows(op, rows, weight.shape[0], options)

    def store(words: slice, out: Tensor) -> None:
        of_words = None if bias is None else bias[words]
        hopper.store_gradients(
            op, input, weight[words], of_words, rows.target, factors, out, words.start
        )

    return store


def _factors_of_rows(op: str, rows: Rows, words: int, options: Options) -> Tensor:
    """``[4, rows]``: what ``_row_factors`` writes."""
    count, device = rows.target.numel(), rows.target.device
    check_size(op, "rows", count)
    factors = fresh(op, rows.lse, (4, count), rows.lse.dtype)
    kinds = (rows.lse.dtype, rows.grad_lse is None, rows.scale is None)
    launch = launch_of(_row_factors, device, kinds, threads=_MERGE_ROWS, ROWS=_MERGE_ROWS)
    launch(
        (-(-count // _MERGE_ROWS), 1),
        (*rows, factors),
        (count, options.ignore, words, options.smoothing, options.smoothing / words, options.z),
    )
    return factors


def _for_hopper(input: Tensor, weight: Tensor, options: Options) -> Any:
    """The module that fuses the loss into the product, or None; a cap takes too many registers."""
    if options.softcap is not None or not _launch.has_gluon():
        return None
    from transformer_engine_fl.backends.flagos import _loss_hopper

    return _loss_hopper if _loss_hopper.serves(input, weight) else None


def _product(op: str, left: Tensor, right: Tensor, out: Tensor, beta: float = 0.0) -> None:
    generic_gemm(right, left, transa=False, accumulate_into=out, beta=beta)


_linear = LinearCrossEntropy(
    addressed, _run_forward, _run_merge, _run_backward, run_with_losses, _product,
    fused_statistics=_fused_statistics, fused_gradients=_fused_gradients, exact=_product,
)  # fmt: skip
fused_linear_cross_entropy_fwd = _linear.fused_linear_cross_entropy_fwd
fused_linear_cross_entropy_bwd = _linear.fused_linear_cross_entropy_bwd
fused_linear_cross_entropy_fwd_bwd = _linear.fused_linear_cross_entropy_fwd_bwd
