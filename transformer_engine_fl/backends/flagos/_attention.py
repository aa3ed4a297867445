"""The Triton kernels of attention; ``attention`` decides how they are launched.

No kernel holds more than a tile of the scores. The forward and the pass for dq iterate over the
keys of ROWS queries, the pass for dk and dv over the queries of COLUMNS keys, and the one for dbias
over the dimensions to which the bias was expanded: each gradient is summed by one program in a
fixed order. All formats look the same to the kernels: a tensor is a start and the strides of its
sequences, tokens and heads, in units of UNIT elements, so that the compiler knows their divisors.

The part of the other side that a tile sees is cut in three phases. In the middle phase every token
is seen, and no mask is applied; tokens that none of the tile's tokens see are in no phase.

NATURAL: exponentials are powers of e, for dtypes that need that accuracy; otherwise powers of 2,
where one multiplication both scales the scores and converts the exponent.

``cu_seqlens`` come from users: whatever they contain, no token outside of the tensors is read or
written.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from transformer_engine_fl.backends.flagos.dropout import philox

__all__ = ["LEAST_FOLDED", "backward_bias", "backward_keys", "backward_queries", "forward"]

LEAST_FOLDED: Final = 1e-30
"""Least scale that may be folded into the exponent: it must not become 0 in any unit."""
_LOG2_E, _LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)

_SIZES = ["heads", "group", "sq", "skv", "tq", "tkv", "left", "right", "scale"]
_RANDOM = ["seed", "offset", "threshold", "kept_scale"]
_OF_STATISTICS = ["lse_batch", "lse_head"]
_OF_BIAS = ["bias_batch", "bias_head", "bias_row", "bias_column"]
_OF_TOKENS = [
    "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "v_batch", "v_token", "v_head",
]  # fmt: skip
_NUMBERS = [*_SIZES, *_RANDOM, *_OF_STATISTICS, *_OF_BIAS, *_OF_TOKENS]
_OF_OUT = ["out_batch", "out_token", "out_head"]
_OF_DOUT = ["dout_batch", "dout_token", "dout_head"]
_OF_DQ = ["dq_batch", "dq_token", "dq_head"]
_OF_DK = ["dk_batch", "dk_token", "dk_head"]
_OF_DV = ["dv_batch", "dv_token", "dv_head"]


# -------------------------------------------------------------------------------- parts


@triton.jit  # type: ignore[untyped-decorator]
def _sequence(
    ends_ptr: tl.tensor,
    begins_ptr: tl.tensor,
    n: tl.tensor,
    longest: tl.tensor,
    tokens: tl.tensor,
    PACKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The first token of sequence n, and how many it has."""
    if ends_ptr is None:
        return tl.full((), 0, tl.int64), tl.full((), longest, tl.int32)
    else:
        begin = tl.load(ends_ptr + n).to(tl.int64)
        length = tl.load(ends_ptr + n + 1).to(tl.int64) - begin
        if begins_ptr is not None:
            begin = tl.load(begins_ptr + n).to(tl.int64)
        if not PACKED:
            begin = tl.full((), 0, tl.int64)
        begin = tl.minimum(tl.maximum(begin, 0), tokens)
        length = tl.minimum(tl.maximum(length, 0), tl.minimum(tokens - begin, longest))
        return begin, length.to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _phases(
    start: tl.tensor,
    own: tl.tensor,
    others: tl.tensor,
    shift: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    OWN: tl.constexpr,
    STEP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The range of ``others`` tokens that OWN tokens from ``start`` on see.

    Token i sees j from ``i + shift - before`` up to ``i + shift + after``.

    Returns:
        begin, full, partial, end: some of the OWN tokens see the others in [begin, end), all of
        them see those in [full, partial). All but end are multiples of STEP.
    """
    others = tl.where(start < own, others, 0)
    first = start + shift
    last = tl.minimum(start + OWN, own) - 1 + shift
    begin = tl.full((), 0, tl.int32)
    full = tl.full((), 0, tl.int32)
    end = others
    partial = others // STEP * STEP
    if BEFORE:
        begin = tl.maximum(first - before, 0) // STEP * STEP
        full = tl.cdiv(tl.maximum(last - before, 0), STEP) * STEP
    if AFTER:
        end = tl.minimum(end, last + after + 1)
        partial = tl.minimum(partial, tl.maximum(first + after + 1, 0) // STEP * STEP)
    return begin, full, partial, end


@triton.jit  # type: ignore[untyped-decorator]
def _bounds(
    begin: tl.tensor, full: tl.tensor, partial: tl.tensor, end: tl.tensor, PHASE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The begin and end of a phase."""
    if PHASE == 0:
        return begin, tl.minimum(full, end)
    elif PHASE == 1:
        return full, partial
    else:
        return tl.maximum(full, partial), end


@triton.jit  # type: ignore[untyped-decorator]
def _tokens(
    ptr: tl.tensor,
    described: tl.tensor,
    first: tl.tensor,
    length: tl.tensor,
    step: tl.tensor,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    """The features of COUNT tokens of a sequence, 0 outside; WHOLE: all of them are in it."""
    if described is not None:
        return described.load([first, 0])
    else:
        token = first + tl.arange(0, COUNT)[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        at = ptr + token.to(tl.int64) * step + column
        if WHOLE and WIDTH == BLOCK:
            return tl.load(at)
        elif WHOLE:
            return tl.load(at, mask=column < WIDTH, other=0)
        elif WIDTH == BLOCK:
            return tl.load(at, mask=token < length, other=0)
        else:
            return tl.load(at, mask=(token < length) & (column < WIDTH), other=0)


@triton.jit  # type: ignore[untyped-decorator]
def _write_tokens(
    ptr: tl.tensor,
    values: tl.tensor,
    first: tl.tensor,
    length: tl.tensor,
    longest: tl.tensor,
    step: tl.tensor,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
) -> None:
    """Store the features of tokens; zeros for tokens beyond the sequence, unless PACKED."""
    token = first + tl.arange(0, values.shape[0])[:, None]
    column = tl.arange(0, values.shape[1])[None, :]
    exists = token < length
    at = ptr + token.to(tl.int64) * step + column
    values = tl.where(exists, values, 0).to(ptr.dtype.element_ty)
    if PACKED:
        tl.store(at, values, mask=exists & (column < WIDTH))
    else:
        tl.store(at, values, mask=(token < longest) & (column < WIDTH))


@triton.jit  # type: ignore[untyped-decorator]
def _descriptor(
    ptr: tl.tensor,
    length: tl.tensor,
    step: tl.tensor,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """A descriptor of a sequence's tokens; for an empty one it has a token that is never read."""
    return tl.make_tensor_descriptor(ptr, [tl.maximum(length, 1), WIDTH], [step, 1], [COUNT, BLOCK])


@triton.jit  # type: ignore[untyped-decorator]
def _seen(
    i: tl.tensor,
    j: tl.tensor,
    lkv: tl.tensor,
    shift: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
) -> tl.tensor:
    """Whether query i sees key j."""
    seen = j < lkv
    if LEFT:
        seen &= i + shift - left <= j
    if RIGHT:
        seen &= j <= i + shift + right
    return seen


@triton.jit  # type: ignore[untyped-decorator]
def _bias_of(
    ptr: tl.tensor,
    i: tl.tensor,
    j: tl.tensor,
    lq: tl.tensor,
    lkv: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    ACC: tl.constexpr,
    NATURAL: tl.constexpr,
) -> tl.tensor:
    """The bias of queries i and keys j, in the units of the exponent."""
    at = ptr + i.to(tl.int64) * row + j.to(tl.int64) * column
    bias = tl.load(at, mask=(i < lq) & (j < lkv), other=0).to(ACC)
    return bias if NATURAL else bias * _LOG2_E


@triton.jit  # type: ignore[untyped-decorator]
def _kept(
    row: tl.tensor,
    first_query: tl.tensor,
    first_key: tl.tensor,
    seed: tl.tensor,
    offset: tl.tensor,
    threshold: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Which weights dropout keeps, ``[ROWS, COLUMNS]``; ``row`` is n * h + head.

    One block of the generator gives the words of four keys.
    """
    query = (tl.full((), row, tl.int64) << 22) + first_query + tl.arange(0, ROWS)
    block = first_key // 4 + tl.arange(0, COLUMNS // 4)
    c0, c1, c2, c3 = philox((query[:, None] << 20) + block[None, :], seed, offset)
    least = tl.full((), threshold, tl.int64).to(tl.uint32)
    even = tl.join((c0 >= least).to(tl.int8), (c2 >= least).to(tl.int8))
    odd = tl.join((c1 >= least).to(tl.int8), (c3 >= least).to(tl.int8))
    return tl.reshape(tl.join(even, odd), (ROWS, COLUMNS)) != 0


@triton.jit  # type: ignore[untyped-decorator]
def _exp(x: tl.tensor, NATURAL: tl.constexpr) -> tl.tensor:
    return tl.exp(x) if NATURAL else tl.exp2(x)


@triton.jit  # type: ignore[untyped-decorator]
def _factor(scale: tl.tensor, ACC: tl.constexpr, NATURAL: tl.constexpr) -> tl.tensor:
    """The factor from products of queries and keys to the units of the exponent."""
    factor = tl.full((), scale, ACC)
    return factor if NATURAL else factor * _LOG2_E


@triton.jit  # type: ignore[untyped-decorator]
def _subtrahends(
    lse_ptr: tl.tensor, i: tl.tensor, lq: tl.tensor, NATURAL: tl.constexpr
) -> tl.tensor:
    """lse of queries i in the units of the exponent; -inf becomes inf, for weights of 0."""
    lse = tl.load(lse_ptr + i, mask=i < lq, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    return lse if NATURAL else lse * _LOG2_E


# ------------------------------------------------------------------------------ kernels


@triton.jit(do_not_specialize=[*_NUMBERS, *_OF_OUT])  # type: ignore[untyped-decorator]
def forward(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    q_ends_ptr: tl.tensor,
    kv_ends_ptr: tl.tensor,
    q_begins_ptr: tl.tensor,
    kv_begins_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    heads: tl.int32,
    group: tl.int32,
    sq: tl.int32,
    skv: tl.int32,
    tq: tl.int32,
    tkv: tl.int32,
    left: tl.int32,
    right: tl.int32,
    scale: tl.float64,
    seed: tl.int64,
    offset: tl.int64,
    threshold: tl.int64,
    kept_scale: tl.float64,
    lse_batch: tl.int64,
    lse_head: tl.int64,
    bias_batch: tl.int64,
    bias_head: tl.int64,
    bias_row: tl.int64,
    bias_column: tl.int64,
    q_batch: tl.int64,
    q_token: tl.int64,
    q_head: tl.int64,
    k_batch: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    v_batch: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    out_batch: tl.int64,
    out_token: tl.int64,
    out_head: tl.int64,
    ACC: tl.constexpr,
    NATURAL: tl.constexpr,
    PRECISION: tl.constexpr,
    FOLDED: tl.constexpr,
    SINK: tl.constexpr,
    DROPOUT: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PACKED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
) -> None:
    """The outputs of ROWS queries of a head.

    FOLDED: the scale is positive and there is no bias, so the maximum is taken of unscaled scores.
    """
    tiles = tl.cdiv(sq, ROWS)
    row = tl.program_id(0) // tiles
    n = row // heads
    head = row % heads
    # Under causal masks the last tiles take longest, so they go first.
    first = (tiles - 1 - tl.program_id(0) % tiles) * ROWS
    q_begin, lq = _sequence(q_ends_ptr, q_begins_ptr, n, sq, tq, PACKED)
    kv_begin, lkv = _sequence(kv_ends_ptr, kv_begins_ptr, n, skv, tkv, PACKED)
    batch = n.to(tl.int64)
    q_token = q_token * UNIT
    k_token = k_token * UNIT
    v_token = v_token * UNIT
    out_token = out_token * UNIT
    q_ptr += batch * (q_batch * UNIT) + q_begin * q_token + head * (q_head * UNIT)
    k_ptr += batch * (k_batch * UNIT) + kv_begin * k_token + head // group * (k_head * UNIT)
    v_ptr += batch * (v_batch * UNIT) + kv_begin * v_token + head // group * (v_head * UNIT)
    k_described = None
    v_described = None
    if DESCRIBED:
        k_described = _descriptor(k_ptr, lkv, k_token, WIDTH, COLUMNS, BLOCK)
        v_described = _descriptor(v_ptr, lkv, v_token, V_WIDTH, COLUMNS, V_BLOCK)
    if bias_ptr is not None:
        bias_ptr += batch * bias_batch + head * bias_head
    q = _tokens(q_ptr, None, first, lq, q_token, WIDTH, ROWS, BLOCK, False)
    i = first + tl.arange(0, ROWS)
    to_exponent = _factor(scale, ACC, NATURAL)
    factor = to_exponent
    if not FOLDED:
        factor = tl.full((), 1, ACC)
    shift = tl.full((), 0, tl.int32) if TOP_LEFT else lkv - lq
    begin, full, partial, end = _phases(
        first, lq, lkv, shift, left, right, LEFT, RIGHT, ROWS, COLUMNS
    )
    highest = tl.full((ROWS,), float("-inf"), ACC)
    total = tl.zeros((ROWS,), ACC)
    out = tl.zeros((ROWS, V_BLOCK), ACC)
    for phase in tl.static_range(0 if LEFT else 1, 3):
        start, stop = _bounds(begin, full, partial, end, phase)
        for column in tl.range(start, stop, COLUMNS):
            j = column + tl.arange(0, COLUMNS)
            k = _tokens(k_ptr, k_described, column, lkv, k_token, WIDTH, COLUMNS, BLOCK, phase == 1)
            scores = tl.dot(q, k.T, input_precision=PRECISION, out_dtype=ACC)
            if not FOLDED:
                scores *= to_exponent
            if bias_ptr is not None:
                scores += _bias_of(
                    bias_ptr, i[:, None], j[None, :], lq, lkv, bias_row, bias_column, ACC, NATURAL
                )
            if phase != 1:
                seen = _seen(i[:, None], j[None, :], lkv, shift, left, right, LEFT, RIGHT)
                scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, axis=1))
            finite_max = tl.where(higher == float("-inf"), 0.0, higher)
            base = finite_max * factor
            weights = _exp(scores * factor - base[:, None], NATURAL)
            # Exactly 1 while the maximum stays. As a difference of two products it would not be,
            # because a fused multiply-add rounds only one of them: each block would scale the
            # earlier sums by that error.
            kept = _exp((highest - finite_max) * factor, NATURAL)
            total = total * kept + tl.sum(weights, axis=1)
            out *= kept[:, None]
            highest = higher
            if DROPOUT:
                drawn = _kept(row, first, column, seed, offset, threshold, ROWS, COLUMNS)
                weights = tl.where(drawn, weights, 0.0)
            v = _tokens(
                v_ptr, v_described, column, lkv, v_token, V_WIDTH, COLUMNS, V_BLOCK, phase == 1
            )
            out = tl.dot(weights.to(v.dtype), v, out, input_precision=PRECISION, out_dtype=ACC)
    # Both tests are needed. The highest score alone ignores NaN; the total of a NaN query is NaN.
    # The total alone may be 0 for a query that sees keys: a fused multiply-add rounds only one of
    # the two products in an exponent, so that beyond 2**30 or so even the highest score may get
    # weight 0. That is not hidden: the result is NaN.
    nothing = ((total == 0) & (highest == float("-inf"))) | (i >= lq)
    highest *= factor
    if SINK:
        sink = tl.full((), 0, ACC)
        if sink_ptr is not None:
            sink = tl.load(sink_ptr + head).to(ACC)
            if not NATURAL:
                sink *= _LOG2_E
        higher = tl.maximum(highest, sink)
        kept = _exp(tl.where(nothing, 0.0, highest - higher), NATURAL)
        total = total * kept + _exp(tl.where(nothing, 0.0, sink - higher), NATURAL)
        out *= kept[:, None]
        highest = higher
    total = tl.where(nothing, 1.0, total)
    share = 1 / total
    if DROPOUT:
        share *= tl.full((), kept_scale, ACC)
    out = tl.where(nothing[:, None], 0.0, out * share[:, None])
    out_ptr += batch * (out_batch * UNIT) + q_begin * out_token + head * (out_head * UNIT)
    _write_tokens(out_ptr, out, first, lq, sq, out_token, V_WIDTH, PACKED)
    if NATURAL:
        lse = highest + tl.log(total)
    else:
        lse = (highest + tl.log2(total)) * _LN_2
    lse_ptr += batch * lse_batch + head * lse_head + q_begin
    lse = tl.where(nothing, float("-inf"), lse)
    tl.store(lse_ptr + i, lse, mask=i < (lq if PACKED else sq))


@triton.jit(do_not_specialize=[*_NUMBERS, *_OF_OUT, *_OF_DOUT, *_OF_DQ])  # type: ignore[untyped-decorator]
def backward_queries(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    q_ends_ptr: tl.tensor,
    kv_ends_ptr: tl.tensor,
    q_begins_ptr: tl.tensor,
    kv_begins_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    dout_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    heads: tl.int32,
    group: tl.int32,
    sq: tl.int32,
    skv: tl.int32,
    tq: tl.int32,
    tkv: tl.int32,
    left: tl.int32,
    right: tl.int32,
    scale: tl.float64,
    seed: tl.int64,
    offset: tl.int64,
    threshold: tl.int64,
    kept_scale: tl.float64,
    lse_batch: tl.int64,
    lse_head: tl.int64,
    bias_batch: tl.int64,
    bias_head: tl.int64,
    bias_row: tl.int64,
    bias_column: tl.int64,
    q_batch: tl.int64,
    q_token: tl.int64,
    q_head: tl.int64,
    k_batch: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    v_batch: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    out_batch: tl.int64,
    out_token: tl.int64,
    out_head: tl.int64,
    dout_batch: tl.int64,
    dout_token: tl.int64,
    dout_head: tl.int64,
    dq_batch: tl.int64,
    dq_token: tl.int64,
    dq_head: tl.int64,
    ACC: tl.constexpr,
    NATURAL: tl.constexpr,
    PRECISION: tl.constexpr,
    DROPOUT: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PACKED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
) -> None:
    """dq of ROWS queries of a head, their deltas, and their partial sum of a sink's gradient."""
    tiles = tl.cdiv(sq, ROWS)
    row = tl.program_id(0) // tiles
    n = row // heads
    head = row % heads
    tile = tiles - 1 - tl.program_id(0) % tiles
    first = tile * ROWS
    q_begin, lq = _sequence(q_ends_ptr, q_begins_ptr, n, sq, tq, PACKED)
    kv_begin, lkv = _sequence(kv_ends_ptr, kv_begins_ptr, n, skv, tkv, PACKED)
    batch = n.to(tl.int64)
    q_token = q_token * UNIT
    k_token = k_token * UNIT
    v_token = v_token * UNIT
    out_token = out_token * UNIT
    dout_token = dout_token * UNIT
    dq_token = dq_token * UNIT
    q_ptr += batch * (q_batch * UNIT) + q_begin * q_token + head * (q_head * UNIT)
    k_ptr += batch * (k_batch * UNIT) + kv_begin * k_token + head // group * (k_head * UNIT)
    v_ptr += batch * (v_batch * UNIT) + kv_begin * v_token + head // group * (v_head * UNIT)
    out_ptr += batch * (out_batch * UNIT) + q_begin * out_token + head * (out_head * UNIT)
    dout_ptr += batch * (dout_batch * UNIT) + q_begin * dout_token + head * (dout_head * UNIT)
    dq_ptr += batch * (dq_batch * UNIT) + q_begin * dq_token + head * (dq_head * UNIT)
    k_described = None
    v_described = None
    if DESCRIBED:
        k_described = _descriptor(k_ptr, lkv, k_token, WIDTH, COLUMNS, BLOCK)
        v_described = _descriptor(v_ptr, lkv, v_token, V_WIDTH, COLUMNS, V_BLOCK)
    if bias_ptr is not None:
        bias_ptr += batch * bias_batch + head * bias_head
    statistic = batch * lse_batch + head * lse_head + q_begin
    i = first + tl.arange(0, ROWS)
    q = _tokens(q_ptr, None, first, lq, q_token, WIDTH, ROWS, BLOCK, False)
    dout = _tokens(dout_ptr, None, first, lq, dout_token, V_WIDTH, ROWS, V_BLOCK, False)
    o = _tokens(out_ptr, None, first, lq, out_token, V_WIDTH, ROWS, V_BLOCK, False)
    if dout_ptr.dtype.element_ty == tl.float32:
        # Summed in the same order as the slopes that it is subtracted from: for a query that sees
        # one key, or hardly more, the difference must be 0.
        products = tl.dot(dout, o.T, input_precision=PRECISION, out_dtype=ACC)
        own = tl.arange(0, ROWS)[:, None] == tl.arange(0, ROWS)[None, :]
        delta = tl.sum(tl.where(own, products, 0.0), axis=1)
    else:
        delta = tl.sum(dout.to(ACC) * o.to(ACC), axis=1)
    tl.store(delta_ptr + statistic + i, delta, mask=i < lq)
    lse = _subtrahends(lse_ptr + statistic, i, lq, NATURAL)
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head).to(ACC)
        if not NATURAL:
            sink *= _LOG2_E
        beside = tl.where(i < lq, _exp(sink - lse, NATURAL) * delta, 0.0)
        at = (batch * tiles + tile) * heads + head
        tl.store(partial_ptr + at, -tl.sum(beside, axis=0))
    factor = _factor(scale, ACC, NATURAL)
    shift = tl.full((), 0, tl.int32) if TOP_LEFT else lkv - lq
    begin, full, partial, end = _phases(
        first, lq, lkv, shift, left, right, LEFT, RIGHT, ROWS, COLUMNS
    )
    dq = tl.zeros((ROWS, BLOCK), ACC)
    for phase in tl.static_range(0 if LEFT else 1, 3):
        start, stop = _bounds(begin, full, partial, end, phase)
        for column in tl.range(start, stop, COLUMNS):
            j = column + tl.arange(0, COLUMNS)
            k = _tokens(k_ptr, k_described, column, lkv, k_token, WIDTH, COLUMNS, BLOCK, phase == 1)
            v = _tokens(
                v_ptr, v_described, column, lkv, v_token, V_WIDTH, COLUMNS, V_BLOCK, phase == 1
            )
            scores = tl.dot(q, k.T, input_precision=PRECISION, out_dtype=ACC) * factor
            if bias_ptr is not None:
                scores += _bias_of(
                    bias_ptr, i[:, None], j[None, :], lq, lkv, bias_row, bias_column, ACC, NATURAL
                )
            weights = _exp(scores - lse[:, None], NATURAL)
            if phase != 1:
                seen = _seen(i[:, None], j[None, :], lkv, shift, left, right, LEFT, RIGHT)
                weights = tl.where(seen, weights, 0.0)
            slopes = tl.dot(dout, v.T, input_precision=PRECISION, out_dtype=ACC)
            if DROPOUT:
                drawn = _kept(row, first, column, seed, offset, threshold, ROWS, COLUMNS)
                slopes = tl.where(drawn, slopes * tl.full((), kept_scale, ACC), 0.0)
            slopes = weights * (slopes - delta[:, None])
            dq = tl.dot(slopes.to(k.dtype), k, dq, input_precision=PRECISION, out_dtype=ACC)
    dq *= tl.full((), scale, ACC)
    _write_tokens(dq_ptr, dq, first, lq, sq, dq_token, WIDTH, PACKED)


@triton.jit(do_not_specialize=[*_NUMBERS, *_OF_DOUT, *_OF_DK, *_OF_DV])  # type: ignore[untyped-decorator]
def backward_keys(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    q_ends_ptr: tl.tensor,
    kv_ends_ptr: tl.tensor,
    q_begins_ptr: tl.tensor,
    kv_begins_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    dout_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    heads: tl.int32,
    group: tl.int32,
    sq: tl.int32,
    skv: tl.int32,
    tq: tl.int32,
    tkv: tl.int32,
    left: tl.int32,
    right: tl.int32,
    scale: tl.float64,
    seed: tl.int64,
    offset: tl.int64,
    threshold: tl.int64,
    kept_scale: tl.float64,
    lse_batch: tl.int64,
    lse_head: tl.int64,
    bias_batch: tl.int64,
    bias_head: tl.int64,
    bias_row: tl.int64,
    bias_column: tl.int64,
    q_batch: tl.int64,
    q_token: tl.int64,
    q_head: tl.int64,
    k_batch: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    v_batch: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    dout_batch: tl.int64,
    dout_token: tl.int64,
    dout_head: tl.int64,
    dk_batch: tl.int64,
    dk_token: tl.int64,
    dk_head: tl.int64,
    dv_batch: tl.int64,
    dv_token: tl.int64,
    dv_head: tl.int64,
    ACC: tl.constexpr,
    NATURAL: tl.constexpr,
    PRECISION: tl.constexpr,
    DROPOUT: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PACKED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
) -> None:
    """dk and dv of COLUMNS keys of a key head, summed over the query heads of its group.

    Scores are transposed here, so that the left operands of the last two products already are in
    the registers where the first two products left them.
    """
    tiles = tl.cdiv(skv, COLUMNS)
    kv_row = tl.program_id(0) // tiles
    kv_heads = heads // group
    n = kv_row // kv_heads
    kv_head = kv_row % kv_heads
    first = tl.program_id(0) % tiles * COLUMNS
    q_begin, lq = _sequence(q_ends_ptr, q_begins_ptr, n, sq, tq, PACKED)
    kv_begin, lkv = _sequence(kv_ends_ptr, kv_begins_ptr, n, skv, tkv, PACKED)
    batch = n.to(tl.int64)
    q_token = q_token * UNIT
    k_token = k_token * UNIT
    v_token = v_token * UNIT
    dout_token = dout_token * UNIT
    dk_token = dk_token * UNIT
    dv_token = dv_token * UNIT
    q_ptr += batch * (q_batch * UNIT) + q_begin * q_token
    k_ptr += batch * (k_batch * UNIT) + kv_begin * k_token + kv_head * (k_head * UNIT)
    v_ptr += batch * (v_batch * UNIT) + kv_begin * v_token + kv_head * (v_head * UNIT)
    dout_ptr += batch * (dout_batch * UNIT) + q_begin * dout_token
    statistics = batch * lse_batch + q_begin
    j = first + tl.arange(0, COLUMNS)
    k = _tokens(k_ptr, None, first, lkv, k_token, WIDTH, COLUMNS, BLOCK, False)
    v = _tokens(v_ptr, None, first, lkv, v_token, V_WIDTH, COLUMNS, V_BLOCK, False)
    factor = _factor(scale, ACC, NATURAL)
    shift = tl.full((), 0, tl.int32) if TOP_LEFT else lkv - lq
    begin, full, partial, end = _phases(
        first, lkv, lq, -shift, right, left, RIGHT, LEFT, COLUMNS, ROWS
    )
    dk = tl.zeros((COLUMNS, BLOCK), ACC)
    dv = tl.zeros((COLUMNS, V_BLOCK), ACC)
    for head in tl.range(kv_head * group, (kv_head + 1) * group):
        q_of_head = q_ptr + tl.full((), head, tl.int64) * (q_head * UNIT)
        dout_of_head = dout_ptr + tl.full((), head, tl.int64) * (dout_head * UNIT)
        statistic = statistics + tl.full((), head, tl.int64) * lse_head
        q_described = None
        dout_described = None
        if DESCRIBED:
            q_described = _descriptor(q_of_head, lq, q_token, WIDTH, ROWS, BLOCK)
            dout_described = _descriptor(dout_of_head, lq, dout_token, V_WIDTH, ROWS, V_BLOCK)
        for phase in tl.static_range(0 if RIGHT else 1, 3):
            start, stop = _bounds(begin, full, partial, end, phase)
            for row in tl.range(start, stop, ROWS):
                i = row + tl.arange(0, ROWS)
                q = _tokens(
                    q_of_head, q_described, row, lq, q_token, WIDTH, ROWS, BLOCK, phase == 1
                )
                dout = _tokens(
                    dout_of_head, dout_described, row, lq, dout_token,
                    V_WIDTH, ROWS, V_BLOCK, phase == 1,
                )  # fmt: skip
                lse = _subtrahends(lse_ptr + statistic, i, lq, NATURAL)
                delta = tl.load(delta_ptr + statistic + i, mask=i < lq, other=0)
                scores = tl.dot(k, q.T, input_precision=PRECISION, out_dtype=ACC) * factor
                if bias_ptr is not None:
                    bias = bias_ptr + batch * bias_batch + tl.full((), head, tl.int64) * bias_head
                    scores += _bias_of(
                        bias, i[None, :], j[:, None], lq, lkv, bias_row, bias_column, ACC, NATURAL
                    )
                weights = _exp(scores - lse[None, :], NATURAL)
                if phase != 1:
                    seen = _seen(i[None, :], j[:, None], lkv, shift, left, right, LEFT, RIGHT)
                    weights = tl.where(seen, weights, 0.0)
                kept = weights
                if DROPOUT:
                    drawn = _kept(
                        n * heads + head, row, first, seed, offset, threshold, ROWS, COLUMNS
                    ).T
                    kept = tl.where(drawn, weights, 0.0)
                dv = tl.dot(kept.to(dout.dtype), dout, dv, input_precision=PRECISION, out_dtype=ACC)
                slopes = tl.dot(v, dout.T, input_precision=PRECISION, out_dtype=ACC)
                if DROPOUT:
                    slopes = tl.where(drawn, slopes * tl.full((), kept_scale, ACC), 0.0)
                slopes = weights * (slopes - delta[None, :])
                dk = tl.dot(slopes.to(q.dtype), q, dk, input_precision=PRECISION, out_dtype=ACC)
    dk *= tl.full((), scale, ACC)
    if DROPOUT:
        dv *= tl.full((), kept_scale, ACC)
    dk_ptr += batch * (dk_batch * UNIT) + kv_begin * dk_token + kv_head * (dk_head * UNIT)
    dv_ptr += batch * (dv_batch * UNIT) + kv_begin * dv_token + kv_head * (dv_head * UNIT)
    _write_tokens(dk_ptr, dk, first, lkv, skv, dk_token, WIDTH, PACKED)
    _write_tokens(dv_ptr, dv, first, lkv, skv, dv_token, V_WIDTH, PACKED)


@triton.jit(do_not_specialize=["sequences", *_NUMBERS, *_OF_DOUT])  # type: ignore[untyped-decorator]
def backward_bias(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    q_ends_ptr: tl.tensor,
    kv_ends_ptr: tl.tensor,
    q_begins_ptr: tl.tensor,
    kv_begins_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    dout_ptr: tl.tensor,
    dbias_ptr: tl.tensor,
    sequences: tl.int32,
    heads: tl.int32,
    group: tl.int32,
    sq: tl.int32,
    skv: tl.int32,
    tq: tl.int32,
    tkv: tl.int32,
    left: tl.int32,
    right: tl.int32,
    scale: tl.float64,
    seed: tl.int64,
    offset: tl.int64,
    threshold: tl.int64,
    kept_scale: tl.float64,
    lse_batch: tl.int64,
    lse_head: tl.int64,
    bias_batch: tl.int64,
    bias_head: tl.int64,
    bias_row: tl.int64,
    bias_column: tl.int64,
    q_batch: tl.int64,
    q_token: tl.int64,
    q_head: tl.int64,
    k_batch: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    v_batch: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    dout_batch: tl.int64,
    dout_token: tl.int64,
    dout_head: tl.int64,
    ACC: tl.constexpr,
    NATURAL: tl.constexpr,
    PRECISION: tl.constexpr,
    DROPOUT: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PACKED: tl.constexpr,
    UNIT: tl.constexpr,
    ONE_SEQUENCE: tl.constexpr,
    ONE_HEAD: tl.constexpr,
    ONE_ROW: tl.constexpr,
    ONE_COLUMN: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
) -> None:
    """A tile of dbias, which is dense; ONE_*: that dimension was expanded, so it is summed."""
    across = 1 if ONE_COLUMN else tl.cdiv(skv, COLUMNS)
    down = 1 if ONE_ROW else tl.cdiv(sq, ROWS)
    deep = 1 if ONE_HEAD else heads
    first_column = tl.program_id(0) % across * COLUMNS
    tile = tl.program_id(0) // across
    first_row = tile % down * ROWS
    matrix = tile // down
    first_head = matrix % deep
    first_sequence = matrix // deep
    last_column = skv if ONE_COLUMN else first_column + COLUMNS
    last_row = sq if ONE_ROW else first_row + ROWS
    last_head = heads if ONE_HEAD else first_head + 1
    last_sequence = sequences if ONE_SEQUENCE else first_sequence + 1
    q_token = q_token * UNIT
    k_token = k_token * UNIT
    v_token = v_token * UNIT
    dout_token = dout_token * UNIT
    factor = _factor(scale, ACC, NATURAL)
    dbias = tl.zeros((ROWS, COLUMNS), ACC)
    for n in tl.range(first_sequence, last_sequence):
        q_begin, lq = _sequence(q_ends_ptr, q_begins_ptr, n, sq, tq, PACKED)
        kv_begin, lkv = _sequence(kv_ends_ptr, kv_begins_ptr, n, skv, tkv, PACKED)
        shift = tl.full((), 0, tl.int32) if TOP_LEFT else lkv - lq
        batch = tl.full((), n, tl.int64)
        q_of_sequence = q_ptr + batch * (q_batch * UNIT) + q_begin * q_token
        k_of_sequence = k_ptr + batch * (k_batch * UNIT) + kv_begin * k_token
        v_of_sequence = v_ptr + batch * (v_batch * UNIT) + kv_begin * v_token
        dout_of_sequence = dout_ptr + batch * (dout_batch * UNIT) + q_begin * dout_token
        for head in tl.range(first_head, last_head):
            of_head = tl.full((), head, tl.int64)
            of_keys = tl.full((), head // group, tl.int64)
            q_of_head = q_of_sequence + of_head * (q_head * UNIT)
            k_of_head = k_of_sequence + of_keys * (k_head * UNIT)
            v_of_head = v_of_sequence + of_keys * (v_head * UNIT)
            dout_of_head = dout_of_sequence + of_head * (dout_head * UNIT)
            bias = bias_ptr + batch * bias_batch + of_head * bias_head
            statistic = batch * lse_batch + of_head * lse_head + q_begin
            for row in tl.range(first_row, last_row, ROWS):
                i = row + tl.arange(0, ROWS)
                q = _tokens(q_of_head, None, row, lq, q_token, WIDTH, ROWS, BLOCK, False)
                dout = _tokens(
                    dout_of_head, None, row, lq, dout_token, V_WIDTH, ROWS, V_BLOCK, False
                )
                lse = _subtrahends(lse_ptr + statistic, i, lq, NATURAL)
                delta = tl.load(delta_ptr + statistic + i, mask=i < lq, other=0)
                begin, _, _, end = _phases(
                    row, lq, lkv, shift, left, right, LEFT, RIGHT, ROWS, COLUMNS
                )
                for column in tl.range(
                    tl.maximum(begin, first_column), tl.minimum(end, last_column), COLUMNS
                ):
                    j = column + tl.arange(0, COLUMNS)
                    k = _tokens(k_of_head, None, column, lkv, k_token, WIDTH, COLUMNS, BLOCK, False)
                    v = _tokens(
                        v_of_head, None, column, lkv, v_token, V_WIDTH, COLUMNS, V_BLOCK, False
                    )
                    scores = tl.dot(q, k.T, input_precision=PRECISION, out_dtype=ACC) * factor
                    scores += _bias_of(
                        bias, i[:, None], j[None, :], lq, lkv, bias_row, bias_column, ACC, NATURAL
                    )
                    seen = _seen(i[:, None], j[None, :], lkv, shift, left, right, LEFT, RIGHT)
                    weights = tl.where(seen, _exp(scores - lse[:, None], NATURAL), 0.0)
                    slopes = tl.dot(dout, v.T, input_precision=PRECISION, out_dtype=ACC)
                    if DROPOUT:
                        drawn = _kept(
                            n * heads + head, row, column, seed, offset, threshold, ROWS, COLUMNS
                        )
                        slopes = tl.where(drawn, slopes * tl.full((), kept_scale, ACC), 0.0)
                    dbias += weights * (slopes - delta[:, None])
    if ONE_ROW:
        dbias = tl.sum(dbias, axis=0, keep_dims=True)
    if ONE_COLUMN:
        dbias = tl.sum(dbias, axis=1, keep_dims=True)
    i = first_row + tl.arange(0, dbias.shape[0])[:, None]
    j = first_column + tl.arange(0, dbias.shape[1])[None, :]
    rows = 1 if ONE_ROW else sq
    columns = 1 if ONE_COLUMN else skv
    at = (matrix.to(tl.int64) * rows + i) * columns + j
    tl.store(dbias_ptr + at, dbias.to(dbias_ptr.dtype.element_ty), mask=(i < rows) & (j < columns))
