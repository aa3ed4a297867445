"""The steps between the ranks of context-parallel attention in Triton.

Tokens are moved and added by whole rows. The destination is computed once per row, and the weight
of a step once per row and head.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import (
    TRITON_TYPES,
    Written,
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
    launch_rows,
    move,
    piece,
    place,
    raw,
    steps,
    token_at,
)
from transformer_engine_fl.ops import context_parallel as contracts
from transformer_engine_fl.ops._dtypes import math_dtype

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "thd_get_partitioned_indices",
    "thd_grad_correction",
    "thd_out_correction",
    "thd_read_half_tensor",
    "thd_read_second_half_lse",
    "thd_second_half_lse_correction",
]

_INTERPRETED = tl.constexpr(_launch.INTERPRETED)

# ------------------------------------------------------------------------------ kernels
#
# Tokens are ``[outer, inner, h, d]``; outer is keys and values if there are both. A tensor of
# halves is a packed tensor whose offsets are halved.


@triton.jit  # type: ignore[untyped-decorator]
def _exp(x: tl.tensor) -> tl.tensor:
    if _INTERPRETED:
        return tl.exp(x)
    else:  # Triton's own is an approximation
        return libdevice.exp(x)


@triton.jit  # type: ignore[untyped-decorator]
def _log_add_exp(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """``log(exp(a) + exp(b))``; for two equal infinities, that infinity."""
    smaller = _exp(-tl.abs(a - b))
    if _INTERPRETED:
        more = tl.log(1 + smaller)
    else:
        more = libdevice.log1p(smaller)
    return tl.where((a == b) & (tl.abs(a) == float("inf")), a, tl.maximum(a, b) + more)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "rows", "inner", "tokens", "sequences", "highest", "second", "heads", "width",
        "x_outer", "x_token", "x_head", "y_row", "y_head",
    ]
)  # fmt: skip
def _read_half(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    rows: tl.int32,
    inner: tl.int32,
    tokens: tl.int32,
    sequences: tl.int32,
    highest: tl.int32,
    second: tl.int32,
    heads: tl.int32,
    width: tl.int32,
    x_outer: tl.int64,
    x_token: tl.int64,
    x_head: tl.int64,
    y_row: tl.int64,
    y_head: tl.int64,
    UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy the first or ``second`` halves of sequences from a tensor of ``tokens`` whole rows."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    sequence, number, half, known = token_at(offsets_ptr, row % inner, sequences, highest, 2)
    token = tl.load(offsets_ptr + sequence).to(tl.int64) + number + second * half
    known = known & (token >= 0) & (token < tokens)
    start = (row // inner).to(tl.int64) * x_outer + token * x_token
    move(
        x_ptr, start, x_head, y_ptr, row.to(tl.int64) * y_row, y_head,
        known, row < rows, heads, width, UNIT, HEADS, BLOCK,
    )  # fmt: skip


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "rows", "inner", "tokens", "sequences", "highest", "heads", "width",
        "step_outer", "step_token", "step_head", "grad_outer", "grad_token", "grad_head",
    ]
)  # fmt: skip
def _add_or_copy(
    step_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    rows: tl.int32,
    inner: tl.int32,
    tokens: tl.int32,
    sequences: tl.int32,
    highest: tl.int32,
    heads: tl.int32,
    width: tl.int32,
    step_outer: tl.int64,
    step_token: tl.int64,
    step_head: tl.int64,
    grad_outer: tl.int64,
    grad_token: tl.int64,
    grad_head: tl.int64,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add or copy ``inner`` rows of a step's gradient to ``tokens`` rows of the sum."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    within = row % inner
    if FIRST == "none" or SECOND == "none":
        sequence, number, half, known = token_at(offsets_ptr, within, sequences, highest, 2)
        token = tl.load(offsets_ptr + sequence).to(tl.int64) + number
        if FIRST == "none":
            token += half
        adds = known & (FIRST == "add" or SECOND == "add")
    else:
        _, number, length, known = token_at(offsets_ptr, within, sequences, highest, 1)
        token = within.to(tl.int64)
        second = number >= length // 2
        adds = known & ((second & (SECOND == "add")) | (~second & (FIRST == "add")))
    known = known & (row < rows) & (token >= 0) & (token < tokens)
    outer = (row // inner).to(tl.int64)
    head, column, inside = piece(heads, width, UNIT, HEADS, BLOCK)
    step_row = outer * step_outer + within.to(tl.int64) * step_token
    step_ptr += place(step_row, head * step_head, column, UNIT)
    grad_ptr += place(outer * grad_outer + token * grad_token, head * grad_head, column, UNIT)
    inside = known[:, None, None] & inside
    step = fetch(step_ptr, inside, other=None)
    if FIRST == "add" or SECOND == "add":
        adds = adds[:, None, None]
        grad = fetch(grad_ptr, inside & adds)
        total = (grad.to(ACC) + step.to(ACC)).to(step.dtype)
        step = tl.where(adds, total, step)
    tl.store(grad_ptr, step, mask=inside)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "rows", "tokens", "sequences", "highest", "longest", "step_longest",
        "lse_sequence", "lse_head", "lse_column", "some_sequence", "some_head", "some_column",
        "heads", "width", "step_token", "step_head", "out_token", "out_head",
    ]
)  # fmt: skip
def _add_share(
    step_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    some_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    rows: tl.int32,
    tokens: tl.int32,
    sequences: tl.int32,
    highest: tl.int32,
    longest: tl.int32,
    step_longest: tl.int32,
    lse_sequence: tl.int64,
    lse_head: tl.int64,
    lse_column: tl.int64,
    some_sequence: tl.int64,
    some_head: tl.int64,
    some_column: tl.int64,
    heads: tl.int32,
    width: tl.int32,
    step_token: tl.int64,
    step_head: tl.int64,
    out_token: tl.int64,
    out_head: tl.int64,
    PACKED: tl.constexpr,
    HALF: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add a step's output, weighted by the step's share of the denominator, to the sum.

    ``longest`` and ``step_longest`` are the columns of the two lse: ``lse`` over all keys, ``some``
    over those of the step.
    """
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if HALF:
        sequence, of_some, half, known = token_at(offsets_ptr, row, sequences, highest, 2)
        of_lse = of_some + half
        token = tl.load(offsets_ptr + sequence).to(tl.int64) + of_lse
    else:
        sequence, of_lse, _, known = token_at(offsets_ptr, row, sequences, highest, 1)
        of_some = of_lse
        token = row.to(tl.int64)
    if PACKED:
        of_lse, of_some = token, row.to(tl.int64)
        sequence = sequence * 0
    known = known & (row < rows) & (token >= 0) & (token < tokens)
    known = known & (of_lse >= 0) & (of_lse < longest)
    known = known & (of_some >= 0) & (of_some < step_longest)
    head, column, inside = piece(heads, width, UNIT, HEADS, BLOCK)
    weighed = known[:, None] & (head < heads)[None, :]
    sequence = sequence.to(tl.int64)
    lse_ptr += (sequence * lse_sequence + of_lse * lse_column)[:, None]
    some_ptr += (sequence * some_sequence + of_some * some_column)[:, None]
    hidden = float("-inf")
    lse = tl.load(lse_ptr + (head * lse_head)[None, :], mask=weighed, other=hidden).to(ACC)
    some = tl.load(some_ptr + (head * some_head)[None, :], mask=weighed, other=hidden).to(ACC)
    seen = (lse > hidden) & (some > hidden)
    # No share is negative: -1 marks, in the same tensor, what is left unchanged.
    share = tl.where(seen, _exp(tl.where(seen, some - lse, 0)), -1)[:, :, None]
    inside = inside & ~(share < 0)
    step_ptr += place(row.to(tl.int64) * step_token, head * step_head, column, UNIT)
    out_ptr += place(token * out_token, head * out_head, column, UNIT)
    step = fetch(step_ptr, inside).to(ACC)
    out = fetch(out_ptr, inside).to(ACC)
    tl.store(out_ptr, (out + share * step).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "heads", "longest", "step_longest", "sequences", "highest", "lse_sequence", "lse_head",
        "lse_column", "step_sequence", "step_head", "step_column",
    ]
)  # fmt: skip
def _second_half_lse(
    lse_ptr: tl.tensor,
    step_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    heads: tl.int32,
    longest: tl.int32,
    step_longest: tl.int32,
    sequences: tl.int32,
    highest: tl.int32,
    lse_sequence: tl.int64,
    lse_head: tl.int64,
    lse_column: tl.int64,
    step_sequence: tl.int64,
    step_head: tl.int64,
    step_column: tl.int64,
    PACKED: tl.constexpr,
    READ: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Columns of second halves, for HEADS heads of one sequence, or of all if they are packed.

    READ: copy them from the whole lse; otherwise add them to it.
    """
    across = tl.cdiv(step_longest, COLUMNS)
    above = tl.program_id(0) // across
    blocks = tl.cdiv(heads, HEADS)
    padded = above // blocks
    head = (above % blocks) * HEADS + tl.arange(0, HEADS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    if PACKED:
        sequence, number, half, known = token_at(offsets_ptr, column, sequences, highest, 2)
        whole = tl.load(offsets_ptr + sequence).to(tl.int64) + number + half
    else:
        begin = (tl.load(offsets_ptr + padded) // 2).to(tl.int64)
        half = (tl.load(offsets_ptr + padded + 1) // 2).to(tl.int64) - begin
        known = column < half
        whole = column + half
    known = known & (whole >= 0) & (whole < longest)
    exists = (head < heads)[:, None] & (column < step_longest)[None, :]
    changes = exists & known[None, :]
    lse_ptr += padded.to(tl.int64) * lse_sequence + head.to(tl.int64)[:, None] * lse_head
    lse_ptr += (whole * lse_column)[None, :]
    step_ptr += padded.to(tl.int64) * step_sequence + head.to(tl.int64)[:, None] * step_head
    step_ptr += (column.to(tl.int64) * step_column)[None, :]
    lse = tl.load(lse_ptr, mask=changes, other=0)
    if READ:
        tl.store(step_ptr, lse, mask=exists)
    else:
        step = tl.load(step_ptr, mask=changes, other=0)
        tl.store(lse_ptr, _log_add_exp(lse, step), mask=changes)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["size", "sequences", "highest", "total", "world_size", "rank"]
)
def _indices(
    offsets_ptr: tl.tensor,
    y_ptr: tl.tensor,
    size: tl.int32,
    sequences: tl.int32,
    highest: tl.int32,
    total: tl.int32,
    world_size: tl.int32,
    rank: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    """The tokens of a rank; tokens after the last sequence count as one more sequence."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sequence, number, length, known = token_at(offsets_ptr, row, sequences, highest, world_size)
    begin = tl.load(offsets_ptr + sequence).to(tl.int64)
    end = tl.load(offsets_ptr + sequences).to(tl.int64)
    begin = tl.where(known, begin, end)
    number = tl.where(known, number, row - end // world_size)
    length = tl.where(known, length, total // world_size - end // world_size)
    chunk = length // 2
    before = tl.where(number < chunk, rank, 2 * world_size - 2 - rank) * chunk
    token = tl.minimum(tl.maximum(begin + number + before, 0), total - 1)
    tl.store(y_ptr + row, token.to(tl.int32), mask=row < size)


# ---------------------------------------------------------------------------- operators

_THREADS = 128
_TILE_BYTES = {"read": 8192, "grad": 4096, "out": 4096}  # of each tensor of a program
_LSE_TILE = (8, 128)  # heads by columns
_INDICES = 512  # per program


def _offsets(op: str, cu_seqlens: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Dense offsets, and the numbers that :func:`token_at` needs besides."""
    sequences = cu_seqlens.shape[0] - 1
    check_size(op, "sequences", sequences)
    return plain(op, "cu_seqlens", cu_seqlens).contiguous(), (sequences, highest_power(sequences))


def _paired(tokens: Tensor) -> Tensor:
    """``[1 or 2, t, h, d]``."""
    return tokens if tokens.dim() == 4 else tokens.unsqueeze(0)


def _by_sequence(lse: Tensor) -> Tensor:
    """``[1 or b, h, s or t]``."""
    return lse if lse.dim() == 3 else lse.unsqueeze(0)


@repeating
def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    """``thd_read_half_tensor`` of the contract."""
    contract = contracts.thd_read_half_tensor
    contract.check(tensor, cu_seqlens, half_idx)
    op = contract.name
    check_integers(op, half_idx)
    tensor = dense(op, "tensor", tensor)
    offsets, found = _offsets(op, cu_seqlens)
    *leading, total, heads, width = tensor.shape
    check_size(op, "tokens", total)
    output = fresh(op, tensor, (*leading, total // 2, heads, width))
    if output.numel():
        x, y = joined(raw(_paired(tensor)), raw(_paired(output)))
        outer, inner, heads, width = y.shape
        launch_rows(
            op,
            _read_half,
            (x, y, offsets),
            (inner, total, *found, half_idx),
            (width, *steps(x), heads * width, width),
            rows=outer * inner,
            heads=heads,
            threads=_THREADS,
            tile_bytes=_TILE_BYTES["read"],
        )
    return output


@repeating
def thd_grad_correction(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, *, first_half: str, second_half: str
) -> None:
    """``thd_grad_correction`` of the contract."""
    contract = contracts.thd_grad_correction
    options = {"first_half": first_half, "second_half": second_half}
    contract.check(grad, grad_per_step, cu_seqlens, **options)
    op = contract.name
    step = dense(op, "grad_per_step", grad_per_step)
    offsets, found = _offsets(op, cu_seqlens)
    written = Written(op, "grad", grad)
    if not step.numel():
        return
    step, total = joined(_paired(step), _paired(written.dense))
    check_size(op, "tokens", total.shape[1])
    if "add" not in (first_half, second_half):
        step, total = raw(step), raw(total)
    outer, inner, heads, width = step.shape
    launch_rows(
        op,
        _add_or_copy,
        (step, total, offsets),
        (inner, total.shape[1], *found),
        (width, *steps(step), *steps(total)),
        rows=outer * inner,
        heads=heads,
        threads=_THREADS,
        tile_bytes=_TILE_BYTES["grad"],
        FIRST=first_half,
        SECOND=second_half,
        ACC=TRITON_TYPES[math_dtype(step.dtype)],
    )
    written.finish()


@functools.cache
def _accumulator(out: torch.dtype, lse: torch.dtype) -> Any:
    """The dtype in which a share of an output is computed."""
    return TRITON_TYPES[torch.promote_types(math_dtype(out), lse)]


@repeating
def thd_out_correction(
    out: Tensor,
    out_per_step: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    *,
    only_second_half: bool = False,
    lse_packed: bool = False,
) -> None:
    """``thd_out_correction`` of the contract."""
    contract = contracts.thd_out_correction
    contract.check(
        out,
        out_per_step,
        lse,
        lse_per_step,
        cu_seqlens,
        only_second_half=only_second_half,
        lse_packed=lse_packed,
    )
    op = contract.name
    step = dense(op, "out_per_step", out_per_step)
    all_keys = _by_sequence(plain(op, "lse", lse))
    some_keys = _by_sequence(plain(op, "lse_per_step", lse_per_step))
    offsets, found = _offsets(op, cu_seqlens)
    written = Written(op, "out", out)
    if not step.numel():
        return
    rows, heads, width = step.shape
    lses = (all_keys, some_keys)
    check_size(op, "tokens", max(out.shape[0], *(it.shape[-1] for it in lses)))
    launch_rows(
        op,
        _add_share,
        (step, written.dense, *lses, offsets),
        (
            out.shape[0],
            *found,
            *(it.shape[-1] for it in lses),
            *(stride for it in lses for stride in it.stride()),
        ),
        (width, *steps(step), *steps(written.dense)),
        rows=rows,
        heads=heads,
        threads=_THREADS,
        tile_bytes=_TILE_BYTES["out"],
        PACKED=lse_packed,
        HALF=only_second_half,
        ACC=_accumulator(out.dtype, lse.dtype),
    )
    written.finish()


def _halves_of_lse(
    op: str, lse: Tensor, half: Tensor, cu_seqlens: Tensor, *, packed: bool, read: bool
) -> None:
    """Copy ``half`` from the second halves of ``lse``, or add it to them."""
    offsets, found = _offsets(op, cu_seqlens)
    if not half.numel():
        return
    lse, half = _by_sequence(lse), _by_sequence(half)
    outer, heads, columns = half.shape
    above, beside = _LSE_TILE
    programs = outer * -(-heads // above) * -(-columns // beside)
    check_size(op, "programs", programs)
    check_size(op, "tokens", lse.shape[-1])
    launch = launch_of(
        _second_half_lse,
        half.device,
        (half.dtype,),
        threads=_THREADS,
        PACKED=packed,
        READ=read,
        HEADS=above,
        COLUMNS=beside,
    )
    numbers = (heads, lse.shape[-1], columns, *found, *lse.stride(), *half.stride())
    launch((programs, 1), (lse, half, offsets), numbers)


@repeating
def thd_second_half_lse_correction(
    lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, *, lse_packed: bool = False
) -> None:
    """``thd_second_half_lse_correction`` of the contract."""
    contract = contracts.thd_second_half_lse_correction
    contract.check(lse, lse_per_step, cu_seqlens, lse_packed=lse_packed)
    op = contract.name
    step = plain(op, "lse_per_step", lse_per_step)
    written = Written(op, "lse", lse)
    _halves_of_lse(op, written.dense, step, cu_seqlens, packed=lse_packed, read=False)
    written.finish()


@repeating
def thd_read_second_half_lse(
    lse: Tensor, cu_seqlens: Tensor, second_half_lse_seqlen: int, *, lse_packed: bool = False
) -> Tensor:
    """``thd_read_second_half_lse`` of the contract."""
    contract = contracts.thd_read_second_half_lse
    contract.check(lse, cu_seqlens, second_half_lse_seqlen, lse_packed=lse_packed)
    op = contract.name
    check_integers(op, second_half_lse_seqlen)
    lse = plain(op, "lse", lse)
    output = fresh(op, lse, (*lse.shape[:-1], second_half_lse_seqlen))
    _halves_of_lse(op, raw(lse), raw(output), cu_seqlens, packed=lse_packed, read=True)
    return output


@repeating
def thd_get_partitioned_indices(
    cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int
) -> Tensor:
    """``thd_get_partitioned_indices`` of the contract."""
    contract = contracts.thd_get_partitioned_indices
    contract.check(cu_seqlens, total_tokens, world_size, rank)
    op = contract.name
    check_integers(op, total_tokens, world_size, rank)
    check_size(op, "tokens", total_tokens)
    offsets, found = _offsets(op, cu_seqlens)
    output = fresh(op, offsets, (total_tokens // world_size,))
    if size := output.shape[0]:
        launch = launch_of(
            _indices, offsets.device, (offsets.dtype,), threads=_THREADS, BLOCK=_INDICES
        )
        numbers = (size, *found, total_tokens, world_size, rank)
        launch((-(-size // _INDICES), 1), (offsets, output), numbers)
    return output
