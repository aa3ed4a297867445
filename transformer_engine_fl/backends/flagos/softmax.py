"""The scaled softmax forms in Triton.

One pair of kernels serves all four forwards, another all four backwards. Rows that fit into
registers are read once, and so are wider ones, which are split over several programs, see
``_rows``. Scores that a causal form hides are not read. The forwards' kernels also compute losses
and gradients of cross entropy (:func:`run_with_losses`): its gradients are a softmax minus one at
the target.

The order in which a row is summed depends on its width and dtype alone, so a row's result is the
same whichever rows are beside it and wherever they lie: rows whose stride or address is no multiple
of the access that dense rows of their width allow are copied first.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_engine_fl.backends._cross_entropy import Losses
from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import (
    ALIGNMENT,
    MOST,
    TRITON_TYPES,
    WIDEST_UNIT,
    add_to_cache,
    broadcast_mask,
    check_fresh,
    check_size,
    plain,
    rows_to_sum,
)
from transformer_engine_fl.backends.flagos._cross_entropy import (
    of_z_loss,
    softmax_shift,
    store_loss,
)
from transformer_engine_fl.backends.flagos._fetch import fetch
from transformer_engine_fl.backends.flagos._rows import (
    Cut,
    SharedRows,
    WholeRows,
    as_stored,
    begin_epochs,
    cut,
    cut_choice,
    existing,
    part_of_row,
    per_column,
    per_row,
    post,
    rows_of,
    wait_for,
    within,
)
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.ops import softmax as contracts
from transformer_engine_fl.ops._dtypes import math_dtype

if TYPE_CHECKING:
    from transformer_engine_fl.backends.flagos.tuning import Choice
    from transformer_engine_fl.core.contract import Contract

__all__ = [
    "scaled_aligned_causal_masked_softmax_backward",
    "scaled_aligned_causal_masked_softmax_forward",
    "scaled_masked_softmax_backward",
    "scaled_masked_softmax_forward",
    "scaled_softmax_backward",
    "scaled_softmax_forward",
    "scaled_upper_triang_masked_softmax_backward",
    "scaled_upper_triang_masked_softmax_forward",
]

# ------------------------------------------------------------------------------ kernels
#
# ``columns`` and the row strides count units of UNIT elements. Row r is query r % queries; with a
# mask, of head (r // queries) % heads. ``ahead`` is how many keys the first query of a causal form
# sees. A mask is bytes, nonzero where a key is hidden; its strides over batches, heads and queries
# count units of MASK_UNIT bytes. EXACT: a row's columns fill its tile or pieces, so columns need no
# mask. PTX: inline PTX is available.


@triton.jit  # type: ignore[untyped-decorator]
def _exp(x: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """``exp(x)`` for ``x <= 0``."""
    if PTX and x.dtype == tl.float32:
        # Triton's own takes several instructions to get subnormal results right, which vanish
        # beside the 1 of the highest score.
        return tl.inline_asm_elementwise(
            """{ .reg .f32 t;
            mul.f32 t, $1, 0f3FB8AA3B;
            ex2.approx.ftz.f32 $0, t; }""",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.exp(x)


@triton.jit  # type: ignore[untyped-decorator]
def _bound(
    row: tl.tensor, columns: tl.tensor, queries: tl.tensor, ahead: tl.tensor, CAUSAL: tl.constexpr
) -> tl.tensor:
    """How many keys each row's query sees by the causal rule."""
    if CAUSAL:
        return tl.minimum((row % queries).to(tl.int32) + ahead, columns)
    else:
        return columns


@triton.jit  # type: ignore[untyped-decorator]
def _loaded(
    x_ptr: tl.tensor,
    start: tl.tensor,
    column: tl.tensor,
    exists: tl.tensor,
    columns: tl.tensor,
    bound: tl.tensor,
    CAUSAL: tl.constexpr,
    EXACT: tl.constexpr,
) -> tl.tensor:
    """The values at these columns; beyond the bound up to 15 are read, and the rest are 0."""
    wanted = exists & within(column, columns, EXACT)
    if CAUSAL:
        # Rounded up to whole vectors, so that the load stays vectorised.
        wanted = wanted & (column < (bound + 15) // 16 * 16)
    return fetch(x_ptr + start + column, wanted)


@triton.jit  # type: ignore[untyped-decorator]
def _scores(
    x_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    exists: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    queries: tl.tensor,
    heads: tl.tensor,
    ahead: tl.tensor,
    mask_batch: tl.tensor,
    mask_head: tl.tensor,
    mask_query: tl.tensor,
    scale: tl.tensor,
    MASK_STEP: tl.constexpr,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    EXACT: tl.constexpr,
    MASK_UNIT: tl.constexpr,
) -> tl.tensor:
    """The scaled scores at these columns; minus infinity where hidden."""
    bound = _bound(row, columns, queries, ahead, CAUSAL)
    start = row.to(tl.int64)
    x = _loaded(x_ptr, start * stride, column, exists, columns, bound, CAUSAL, EXACT)
    visible = column < bound if CAUSAL else within(column, columns, EXACT)
    if mask_ptr is not None:
        group = row // queries
        where = (group // heads).to(tl.int64) * mask_batch
        where += (group % heads).to(tl.int64) * mask_head
        where += (row % queries).to(tl.int64) * mask_query
        # With the hint of ``fetch``, as heads share the mask: else L2 would evict it before x.
        hidden = fetch(
            mask_ptr + where * MASK_UNIT + column * MASK_STEP,
            exists & within(column, columns, EXACT),
            other=1,
        )
        visible = visible & (hidden == 0)
    scores = x.to(ACC) * tl.full((), scale, ACC)
    if CAUSAL or mask_ptr is not None or not EXACT:
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit  # type: ignore[untyped-decorator]
def _column_of(target: tl.tensor, columns: tl.tensor) -> tl.tensor:
    """The columns of targets; -1 for targets outside of the row."""
    return tl.where((target >= 0) & (target < columns), target, -1).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _chosen(
    x_ptr: tl.tensor,
    target_ptr: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
) -> tl.tensor:
    """The logit of a row's target, in the program that writes the loss."""
    at = _column_of(tl.load(target_ptr + row, mask=row < rows, other=-1), columns)
    wanted = (at >= 0) & (tl.program_id(0) == 0)
    return tl.load(x_ptr + row.to(tl.int64) * stride + at, mask=wanted, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_share(
    at: tl.tensor, grad_loss: tl.tensor, highest: tl.tensor, total: tl.tensor, z: tl.tensor
) -> tl.tensor:
    """The factor with which rows' weights enter the gradients of their logits."""
    lse = highest + tl.log(total)
    factor = grad_loss + of_z_loss(grad_loss, lse, z)
    return tl.where(at < 0, float("nan"), factor) / total


@triton.jit  # type: ignore[untyped-decorator]
def _forward_tile(
    x_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    target_ptr: tl.tensor,
    grad_loss_ptr: tl.tensor,
    y_ptr: tl.tensor,
    loss_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    tile: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    queries: tl.tensor,
    heads: tl.tensor,
    ahead: tl.tensor,
    mask_batch: tl.tensor,
    mask_head: tl.tensor,
    mask_query: tl.tensor,
    scale: tl.tensor,
    ignore: tl.tensor,
    z: tl.tensor,
    MASK_STEP: tl.constexpr,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    EXACT: tl.constexpr,
    MASK_UNIT: tl.constexpr,
    PTX: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Write the softmax of ROWS rows in PARTS or, with targets, their losses and gradients."""
    AXIS: tl.constexpr = 0 if ROWS == 1 else 1
    row = rows_of(tile, ROWS)
    there = existing(row, rows, ROWS)
    exists = per_row(there, ROWS)
    start = row.to(tl.int64)
    if target_ptr is not None:
        target = tl.load(target_ptr + row, mask=there, other=0)
        grad_loss = tl.load(grad_loss_ptr + row, mask=there, other=0)
        at = _column_of(target, columns)
        chosen = tl.load(x_ptr + start * stride + at, mask=there & (at >= 0), other=0).to(ACC)
    scores = ()
    for part in tl.static_range(len(PARTS)):
        column, _ = part_of_row(PARTS, part, columns, EXACT)
        column = per_column(column, ROWS)
        one = _scores(
            x_ptr, mask_ptr, per_row(row, ROWS), column, exists, columns, stride, queries, heads,
            ahead, mask_batch, mask_head, mask_query, scale, MASK_STEP, CAUSAL, ACC,
            EXACT or len(PARTS) > part + 1, MASK_UNIT,
        )  # fmt: skip
        scores += (one,)  # type: ignore[assignment]
    highest = (row * 0).to(ACC) + float("-inf")
    for part in tl.static_range(len(PARTS)):
        highest = tl.maximum(highest, tl.max(scores[part], axis=AXIS))
    if CAUSAL or mask_ptr is not None or target_ptr is not None:
        # A row may have no visible score: then nothing is subtracted, and the sum is 0.
        highest = softmax_shift(highest)
    weights = ()
    total = (row * 0).to(ACC)
    for part in tl.static_range(len(PARTS)):
        one = _exp(scores[part] - per_row(highest, ROWS), PTX)
        weights += (one,)  # type: ignore[assignment]
        total += tl.sum(one, axis=AXIS)
    if target_ptr is not None:
        ignored = target == ignore
        share = per_row(_gradient_share(at, grad_loss, highest, total, z), ROWS)
        store_loss(
            loss_ptr, lse_ptr, row, there, target, ignored, highest, total, chosen, chosen,
            columns, z, z, z, False, ACC,
        )  # fmt: skip
        at, grad_loss = per_row(at, ROWS), per_row(grad_loss, ROWS)
        ignored = per_row(ignored, ROWS)
    else:
        share = per_row(1 / tl.where(total == 0, 1, total), ROWS)
    y_ptr += per_row(start * columns, ROWS)
    for part in tl.static_range(len(PARTS)):
        column, inside = part_of_row(PARTS, part, columns, EXACT)
        y = weights[part] * share
        if target_ptr is not None:
            y -= tl.where(per_column(column, ROWS) == at, grad_loss, 0)
            y = tl.where(ignored, 0, y)  # whatever its logits are
        y = y.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + per_column(column, ROWS), y, mask=exists & per_column(inside, ROWS))


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "rows", "columns", "stride", "queries", "heads", "ahead",
        "mask_batch", "mask_head", "mask_query", "scale", "ignore", "z",
    ]
)  # fmt: skip
def _forward_rows(
    x_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    target_ptr: tl.tensor,
    grad_loss_ptr: tl.tensor,
    y_ptr: tl.tensor,
    loss_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    stride: tl.int64,
    queries: tl.int32,
    heads: tl.int32,
    ahead: tl.int32,
    mask_batch: tl.int64,
    mask_head: tl.int64,
    mask_query: tl.int64,
    scale: tl.float64,
    ignore: tl.int64,
    z: tl.float64,
    MASK_STEP: tl.constexpr,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    EXACT: tl.constexpr,
    MASK_UNIT: tl.constexpr,
    PTX: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    LOOPED: tl.constexpr,
) -> None:
    """Rows that fit into registers, in tiles of ROWS.

    LOOPED: a program loops over tiles. Otherwise it has one, as a loop of one iteration would take
    registers, and so lower occupancy.
    """
    columns = columns * UNIT
    stride = stride * UNIT
    if LOOPED:
        for tile in tl.range(
            tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES
        ):
            _forward_tile(
                x_ptr, mask_ptr, target_ptr, grad_loss_ptr, y_ptr, loss_ptr, lse_ptr, tile, rows,
                columns, stride, queries, heads, ahead, mask_batch, mask_head, mask_query, scale,
                ignore, z, MASK_STEP, CAUSAL, ACC, EXACT, MASK_UNIT, PTX, ROWS, PARTS,
            )  # fmt: skip
    else:
        _forward_tile(
            x_ptr, mask_ptr, target_ptr, grad_loss_ptr, y_ptr, loss_ptr, lse_ptr, tl.program_id(0),
            rows, columns, stride, queries, heads, ahead, mask_batch, mask_head, mask_query, scale,
            ignore, z, MASK_STEP, CAUSAL, ACC, EXACT, MASK_UNIT, PTX, ROWS, PARTS,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _weights(
    scores: tl.tensor,
    shares_ptr: tl.tensor,
    row: tl.tensor,
    epoch: tl.tensor,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    PTX: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """This piece's weights, ``exp(score - highest)``, and its highest score.

    Posts that score and the sum of the weights.
    """
    highest = tl.max(scores, axis=0)
    shift = softmax_shift(highest)
    weights = _exp(scores - shift, PTX)
    if STEP != "rest":
        post(shares_ptr, row, epoch, highest, tl.sum(weights, axis=0), PIECES, 2, STEP)
    return weights, highest


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "rows", "columns", "stride", "queries", "heads", "ahead",
        "mask_batch", "mask_head", "mask_query", "scale", "ignore", "z", "first_epoch",
    ]
)  # fmt: skip
def _forward_shared(
    x_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    target_ptr: tl.tensor,
    grad_loss_ptr: tl.tensor,
    y_ptr: tl.tensor,
    loss_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    stride: tl.int64,
    queries: tl.int32,
    heads: tl.int32,
    ahead: tl.int32,
    mask_batch: tl.int64,
    mask_head: tl.int64,
    mask_query: tl.int64,
    scale: tl.float64,
    ignore: tl.int64,
    z: tl.float64,
    first_epoch: tl.int64,
    MASK_STEP: tl.constexpr,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    MASK_UNIT: tl.constexpr,
    PTX: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """A piece of BLOCK columns of one row after the other; see ``_rows``."""
    columns = columns * UNIT
    stride = stride * UNIT
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    groups = tl.num_programs(1)
    row = tl.program_id(1)  # there are no more groups than rows
    scores = _scores(
        x_ptr, mask_ptr, row, column, True, columns, stride, queries, heads, ahead,
        mask_batch, mask_head, mask_query, scale, MASK_STEP, CAUSAL, ACC, EXACT, MASK_UNIT,
    )  # fmt: skip
    begin_epochs(shares_ptr, PIECES, 2, STEP)
    epoch = first_epoch.to(tl.int32)
    weights, highest = _weights(scores, shares_ptr, row.to(tl.int64), epoch, PIECES, STEP, PTX)
    if target_ptr is not None:
        chosen = _chosen(x_ptr, target_ptr, row, rows, columns, stride)
    for index in tl.range(tl.program_id(1), rows, groups, num_stages=STAGES):
        row = tl.full((), index, tl.int32)
        start = row.to(tl.int64)
        following = row + groups
        if target_ptr is not None:
            target = tl.load(target_ptr + row)
            grad_loss = tl.load(grad_loss_ptr + row)
        scores = _scores(
            x_ptr, mask_ptr, following, column, following < rows, columns, stride, queries,
            heads, ahead, mask_batch, mask_head, mask_query, scale, MASK_STEP, CAUSAL, ACC, EXACT,
            MASK_UNIT,
        )  # fmt: skip
        place = following.to(tl.int64)
        weights_next, highest_next = _weights(
            scores, shares_ptr, place, epoch + 1, PIECES, STEP, PTX
        )
        if target_ptr is not None:
            chosen_next = _chosen(x_ptr, target_ptr, following, rows, columns, stride)
        if STEP != "sums":
            maxima, totals = wait_for(shares_ptr, start, epoch, float("-inf"), PIECES, 2, STEP)
            most = softmax_shift(tl.max(maxima, axis=0))
            total = tl.sum(totals * _exp(maxima - most, PTX), axis=0)
            # 0 where this piece has no visible score.
            own = _exp(highest - most, PTX)
            if target_ptr is not None:
                at = _column_of(target, columns)
                y = weights * (own * _gradient_share(at, grad_loss, most, total, z))
                writes = tl.program_id(0) == 0  # one of a row's programs
                score = chosen.to(ACC)
                store_loss(
                    loss_ptr, lse_ptr, row, writes, target, target == ignore, most, total, score,
                    score, columns, z, z, z, False, ACC,
                )  # fmt: skip
            else:
                y = weights * (own / tl.where(total == 0, 1, total))
            out = y_ptr + start * columns + column
            inside = within(column, columns, EXACT)
            tl.store(out, y.to(y_ptr.dtype.element_ty), mask=inside)
            if target_ptr is not None:
                # Corrects the target's gradient, or an ignored row, in a second store: each thread
                # stores to addresses of its own again, and other pieces do nothing more.
                ignored = target == ignore
                if ignored | (at // BLOCK == tl.program_id(0)):
                    y = tl.where(ignored, 0, y - grad_loss)  # whatever the logits are
                    again = inside & (ignored | (column == at))
                    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=again)
                chosen = chosen_next
        weights, highest = weights_next, highest_next
        epoch += 1


@triton.jit  # type: ignore[untyped-decorator]
def _backward_tile(
    dy_ptr: tl.tensor,
    y_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    tile: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    dy_stride: tl.tensor,
    y_stride: tl.tensor,
    queries: tl.tensor,
    ahead: tl.tensor,
    scale: tl.tensor,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    EXACT: tl.constexpr,
    PTX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the gradients of ROWS rows."""
    column = tl.arange(0, BLOCK)[None, :]
    row = (tile * ROWS + tl.arange(0, ROWS))[:, None]
    exists = existing(row, rows, ROWS)
    bound = _bound(row, columns, queries, ahead, CAUSAL)
    start = row.to(tl.int64)
    y = _loaded(y_ptr, start * y_stride, column, exists, columns, bound, CAUSAL, EXACT)
    dy = _loaded(dy_ptr, start * dy_stride, column, exists, columns, bound, CAUSAL, EXACT)
    along = tl.sum(y.to(ACC) * dy.to(ACC), axis=1)[:, None]
    y = as_stored(y, PTX).to(ACC)
    dy = as_stored(dy, PTX).to(ACC)
    dx = y * (dy - along) * tl.full((), scale, ACC) + 0.0  # turns -0 into 0
    out = dx_ptr + start * columns + column
    inside = exists & within(column, columns, EXACT)
    tl.store(out, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["rows", "columns", "dy_stride", "y_stride", "queries", "ahead", "scale"]
)
def _backward_rows(
    dy_ptr: tl.tensor,
    y_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    dy_stride: tl.int64,
    y_stride: tl.int64,
    queries: tl.int32,
    ahead: tl.int32,
    scale: tl.float64,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    EXACT: tl.constexpr,
    PTX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    LOOPED: tl.constexpr,
) -> None:
    """Rows that fit into registers, in tiles of ROWS. LOOPED: a program loops over tiles."""
    columns = columns * UNIT
    dy_stride = dy_stride * UNIT
    y_stride = y_stride * UNIT
    if LOOPED:
        for tile in tl.range(
            tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES
        ):
            _backward_tile(
                dy_ptr, y_ptr, dx_ptr, tile, rows, columns, dy_stride, y_stride, queries, ahead,
                scale, CAUSAL, ACC, EXACT, PTX, ROWS, BLOCK,
            )  # fmt: skip
    else:
        _backward_tile(
            dy_ptr, y_ptr, dx_ptr, tl.program_id(0), rows, columns, dy_stride, y_stride, queries,
            ahead, scale, CAUSAL, ACC, EXACT, PTX, ROWS, BLOCK,
        )  # fmt: skip


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "rows", "columns", "dy_stride", "y_stride", "queries", "ahead", "scale", "first_epoch",
    ]
)  # fmt: skip
def _backward_shared(
    dy_ptr: tl.tensor,
    y_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    dy_stride: tl.int64,
    y_stride: tl.int64,
    queries: tl.int32,
    ahead: tl.int32,
    scale: tl.float64,
    first_epoch: tl.int64,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    PTX: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """A piece of BLOCK columns of one row after the other; see ``_rows``."""
    columns = columns * UNIT
    dy_stride = dy_stride * UNIT
    y_stride = y_stride * UNIT
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    groups = tl.num_programs(1)
    begin_epochs(shares_ptr, PIECES, 1, STEP)
    epoch = first_epoch.to(tl.int32)
    row = tl.program_id(1)  # there are no more groups than rows
    start = row.to(tl.int64)
    bound = _bound(row, columns, queries, ahead, CAUSAL)
    y = _loaded(y_ptr, start * y_stride, column, True, columns, bound, CAUSAL, EXACT)
    dy = _loaded(dy_ptr, start * dy_stride, column, True, columns, bound, CAUSAL, EXACT)
    if STEP != "rest":
        along = tl.sum(y.to(ACC) * dy.to(ACC), axis=0)
        post(shares_ptr, start, epoch, along, along, PIECES, 1, STEP)
    for index in tl.range(tl.program_id(1), rows, groups, num_stages=STAGES):
        start = tl.full((), index, tl.int64)
        row = tl.full((), index, tl.int32) + groups
        following = row.to(tl.int64)
        bound = _bound(row, columns, queries, ahead, CAUSAL)
        exists = row < rows
        y_next = _loaded(y_ptr, following * y_stride, column, exists, columns, bound, CAUSAL, EXACT)
        dy_next = _loaded(
            dy_ptr, following * dy_stride, column, exists, columns, bound, CAUSAL, EXACT
        )
        if STEP != "rest":
            along = tl.sum(y_next.to(ACC) * dy_next.to(ACC), axis=0)
            post(shares_ptr, following, epoch + 1, along, along, PIECES, 1, STEP)
        if STEP != "sums":
            products, _ = wait_for(shares_ptr, start, epoch, 0, PIECES, 1, STEP)
            along = tl.sum(products, axis=0)
            dx = y.to(ACC) * (dy.to(ACC) - along) * tl.full((), scale, ACC) + 0.0
            out = dx_ptr + start * columns + column
            inside = within(column, columns, EXACT)
            tl.store(out, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        y, dy = as_stored(y_next, PTX), as_stored(dy_next, PTX)
        epoch += 1


# -------------------------------------------------------------------------------- plans

_PLANS: dict[object, WholeRows | SharedRows] = {}

_ANY = 2**32
_FORWARD_NARROW = {1024: Cut(threads=128, width=2048), 2048: Cut(threads=64, width=2048)}
_FORWARD = cut_choice(
    "softmax_fwd",
    _PLANS,
    {
        **_FORWARD_NARROW,
        4096: Cut(threads=256, width=4096),
        8192: Cut(threads=512, width=8192),
        16384: Cut(threads=1024, width=16384),
        131072: Cut(threads=32, width=1024, programs=16, stages=3, shared=True),
        _ANY: Cut(threads=64, width=2048, programs=8, stages=3, shared=True),
    },
    whole=[(0, 1), (1, 3), (2, 3)],
    most_elements=32,
    half={
        **_FORWARD_NARROW,
        3072: Cut(threads=128, width=2048),
        6144: Cut(threads=256, width=4096),
        7168: Cut(threads=256, width=8192),
        8192: Cut(threads=128, width=8192, resident=5),
        12288: Cut(threads=256, width=8192, resident=3),
        16384: Cut(threads=256, width=16384, resident=3),
        20480: Cut(threads=512, width=16384, resident=2),
        262144: Cut(threads=32, width=2048, programs=12, stages=3, shared=True),
        _ANY: Cut(threads=64, width=4096, programs=6, stages=3, shared=True),
    },
    singly={  # with a mask and without
        1024: _FORWARD_NARROW[1024],
        2048: Cut(threads=64, width=1024, resident=16),
        4096: Cut(threads=128, width=2048, resident=8),
        5120: Cut(threads=128, width=4096, resident=8),
        6144: Cut(threads=256, width=4096, resident=6),
        8192: Cut(threads=256, width=4096, resident=4),
        12288: Cut(threads=256, width=8192, resident=4),
        16384: Cut(threads=256, width=8192, resident=3),
        20480: Cut(threads=512, width=16384, resident=2),
        131072: Cut(threads=32, width=1024, programs=16, stages=2, shared=True),
    },
    parts=True,
)
_BACKWARD_USUAL = {
    1024: Cut(threads=128, width=1024),
    2048: Cut(threads=64, width=2048),
    4096: Cut(threads=128, width=4096),
    8192: Cut(threads=256, width=8192),
    16384: Cut(threads=512, width=16384),
    65536: Cut(threads=64, width=1024, programs=8, stages=3, shared=True),
    131072: Cut(threads=32, width=1024, programs=8, stages=3, shared=True),
    262144: Cut(threads=64, width=2048, programs=6, stages=3, shared=True),
    _ANY: Cut(threads=128, width=2048, programs=8, stages=3, shared=True),
}
_BACKWARD_HALF = _BACKWARD_USUAL | {
    4096: Cut(threads=256, width=4096),
    65536: Cut(threads=64, width=2048, programs=6, stages=3, shared=True),
    131072: Cut(threads=32, width=1024, programs=12, stages=3, shared=True),
    262144: _BACKWARD_USUAL[_ANY],
}
_BACKWARD_SINGLY = Cut(threads=32, width=512, programs=24, stages=2, shared=True)
_BACKWARD = cut_choice(
    "softmax_bwd",
    _PLANS,
    _BACKWARD_USUAL,
    whole=[(0, 1), (1, 3), (2, 3)],
    most_elements=32,
    half=_BACKWARD_HALF,
    singly=_BACKWARD_HALF
    | {
        4096: _BACKWARD_USUAL[4096],
        5120: Cut(threads=32, width=512, programs=16, stages=2, shared=True),
        16384: _BACKWARD_SINGLY,
        32768: _BACKWARD_SINGLY,
        262144: Cut(threads=128, width=4096, programs=3, stages=2, shared=True),
    },
)


def _plan(
    choice: Choice[Cut],
    kernels: tuple[Any, Any],
    device: torch.device,
    columns: int,
    sums: int,
    dtype: torch.dtype,
    column_bytes: int,
    **constants: Any,
) -> WholeRows | SharedRows:
    """The kernel that :func:`cut` gives; ``dtype`` is that of the scores, or of the output."""
    acc = math_dtype(dtype)
    constants |= {"ACC": TRITON_TYPES[acc], "PTX": _launch.has_ptx()}
    return cut(
        choice, kernels, device, columns, sums, acc, dtype.itemsize, column_bytes,
        has_looped=True, **constants,
    )  # fmt: skip


# ---------------------------------------------------------------------------- operators


def _factor(op: Contract[..., Any], scale: float) -> float:
    if not isinstance(scale, int | float):
        raise NotSupportedError(
            f"{op.name}: scale is a {type(scale).__name__}, not a concrete number"
        )
    return float(scale)


def _forward(
    op: Contract[..., Any], input: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> Tensor:
    arguments = (input, scale) if mask is None else (input, mask, scale)
    op.check(*arguments)
    factor = _factor(op, scale)
    name = op.name
    input = plain(name, "input", input)
    output = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    check_fresh(name, output)
    if not input.numel():
        return output
    shape = input.shape
    columns, queries = shape[-1], shape[-2] if input.dim() > 1 else 1
    heads = shape[-3] if input.dim() > 2 else 1
    scores, step = rows_to_sum(name, input)
    strides = (0, 0, 0)
    if mask is not None:
        mask, strides = broadcast_mask(plain(name, "mask", mask), shape)
    sizes = (queries, heads, 1 + columns - queries)
    _run_forward(name, scores, step, output, sizes, mask, strides, factor, causal=causal)
    return output


# Widths, by the bytes of a logit, of rows that are no whole vectors for which two kernels, one for
# losses and one that reads the rows again for gradients, were faster.
_FASTER_IN_TWO_KERNELS: Final = {2: range(131_073, MOST), 4: range(8193, 12_289)}


def run_with_losses(op: str, logits: Tensor, step: int, losses: Losses, out: Tensor) -> bool:
    """Write losses and dense gradients of rows that lie ``step`` apart, which are read once.

    Returns:
        Whether that was done: not for rows that are no whole 16-byte vectors, in the widths of
        :data:`_FASTER_IN_TWO_KERNELS`. Not in place: the target's score is read without regard to
        programs that may have overwritten it.
    """
    columns, size = logits.shape[-1], logits.element_size()
    if columns * size % ALIGNMENT and columns in _FASTER_IN_TWO_KERNELS.get(size, ()):
        return False
    logits, step = rows_to_sum(op, logits)
    _run_forward(op, logits, step, out, (1, 1, columns), losses=losses)
    return True


def _run_forward(
    op: str,
    scores: Tensor,
    step: int,
    output: Tensor,
    sizes: tuple[int, int, int],
    mask: Tensor | None = None,
    strides: tuple[int, ...] = (0, 0, 0),
    factor: float = 1.0,
    *,
    causal: bool = False,
    losses: Losses | None = None,
) -> None:
    """Write the softmax of rows that lie ``step`` apart, or losses and gradients instead of it.

    ``sizes``: queries, heads, how many keys the first query of a causal form sees. ``strides``
    are the mask's, over batches, heads and queries.
    """
    columns = scores.shape[-1]
    rows = scores.numel() // columns
    check_size(op, "columns", columns)
    check_size(op, "rows", rows)
    mask_step = None if mask is None else mask.stride(-1)
    # At most a thread's scores in a 16-byte access, so that it reads the mask in one access too.
    mask_unit = math.gcd(*strides, 16 // scores.itemsize)
    unit = math.gcd(columns, step, WIDEST_UNIT)
    kind = (scores.dtype, output.dtype, mask_step, mask_unit, losses is None)
    key = ("forward", *kind, columns, causal, unit, scores.device)
    plan = _PLANS.get(key) or add_to_cache(
        _PLANS,
        key,
        _plan(
            _FORWARD,
            (_forward_rows, _forward_shared),
            scores.device,
            columns,
            2,
            scores.dtype,
            scores.itemsize + (mask_step is not None),
            MASK_STEP=mask_step,
            MASK_UNIT=mask_unit,
            CAUSAL=causal,
            UNIT=unit,
        ),
    )
    given = (None, None) if losses is None else (losses.target, losses.grad_loss)
    found = (None, None) if losses is None else (losses.loss, losses.lse)
    ignore, z = (0, 0.0) if losses is None else (losses.ignore, losses.z)
    plan(
        rows,
        (scores, mask, *given, output, *found),
        (
            rows,
            columns // unit,
            step // unit,
            *sizes,
            *(stride // mask_unit for stride in strides),
            factor,
            ignore,
            z,
        ),
    )


def _backward(
    op: Contract[..., Any],
    output_grad: Tensor,
    softmax_output: Tensor,
    scale: float,
    causal: bool,
) -> Tensor:
    op.check(output_grad, softmax_output, scale)
    factor = _factor(op, scale)
    name = op.name
    dy = plain(name, "output_grad", output_grad)
    y = plain(name, "softmax_output", softmax_output)
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    check_fresh(name, dx)
    if not y.numel():
        return dx
    columns, queries = y.shape[-1], y.shape[-2] if y.dim() > 1 else 1
    y, y_step = rows_to_sum(name, y)
    dy, dy_step = rows_to_sum(name, dy)
    rows = y.numel() // columns
    check_size(name, "columns", columns)
    check_size(name, "rows", rows)
    unit = math.gcd(columns, y_step, dy_step, WIDEST_UNIT)
    key = ("backward", y.dtype, dy.dtype, columns, causal, unit, y.device)
    plan = _PLANS.get(key) or add_to_cache(
        _PLANS,
        key,
        _plan(
            _BACKWARD,
            (_backward_rows, _backward_shared),
            y.device,
            columns,
            1,
            y.dtype,
            y.itemsize + dy.itemsize,
            CAUSAL=causal,
            UNIT=unit,
        ),
    )
    ahead = 1 + columns - queries
    plan(
        rows,
        (dy, y, dx),
        (rows, columns // unit, dy_step // unit, y_step // unit, queries, ahead, factor),
    )
    return dx


@repeating
def scaled_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
    """``scaled_softmax_forward`` of the contract."""
    return _forward(contracts.scaled_softmax_forward, input, None, scale, False)


@repeating
def scaled_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """``scaled_softmax_backward`` of the contract."""
    return _backward(contracts.scaled_softmax_backward, output_grad, softmax_output, scale, False)


@repeating
def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
    """``scaled_masked_softmax_forward`` of the contract."""
    return _forward(contracts.scaled_masked_softmax_forward, input, mask, scale, False)


@repeating
def scaled_masked_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """``scaled_masked_softmax_backward`` of the contract."""
    return _backward(
        contracts.scaled_masked_softmax_backward, output_grad, softmax_output, scale, False
    )


@repeating
def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
    """``scaled_upper_triang_masked_softmax_forward`` of the contract."""
    return _forward(contracts.scaled_upper_triang_masked_softmax_forward, input, None, scale, True)


@repeating
def scaled_upper_triang_masked_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """``scaled_upper_triang_masked_softmax_backward`` of the contract."""
    return _backward(
        contracts.scaled_upper_triang_masked_softmax_backward,
        output_grad,
        softmax_output,
        scale,
        True,
    )


@repeating
def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
    """``scaled_aligned_causal_masked_softmax_forward`` of the contract."""
    return _forward(
        contracts.scaled_aligned_causal_masked_softmax_forward, input, None, scale, True
    )


@repeating
def scaled_aligned_causal_masked_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """``scaled_aligned_causal_masked_softmax_backward`` of the contract."""
    return _backward(
        contracts.scaled_aligned_causal_masked_softmax_backward,
        output_grad,
        softmax_output,
        scale,
        True,
    )
