"""Attention on Hopper, for dense 16-bit tensors: warp-specialised kernels.

One warp loads tiles with the tensor memory accelerator (TMA) into rings in shared memory; two
warpgroups multiply them, and compute the softmax of one block of scores while the tensor cores make
the next (Shah et al., 2024, arXiv:2407.08608). Triton's own pipelining gives all warps the same
work, so these kernels are written in Gluon, which can specialise warps.

Only plain attention is supported: heads of 64 or 128 features, with all keys or those up to the
diagonal. Everything else is left to the portable kernels of ``_attention``; ``attention`` checks
arguments and chooses between the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton.language as tl  # noqa: TC002 - Gluon looks annotations up
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import (
    HOPPER,
    address_of,
    check_size,
    fresh,
    launch_of,
)
from transformer_engine_fl.backends.flagos._attention import LEAST_FOLDED
from transformer_engine_fl.ops._rounding import LARGEST_FLOAT32

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["backward", "forward", "serves"]


# ------------------------------------------------------------------------------ kernels
#
# A ring has STAGES tiles. ``full`` says that a tile has been loaded, ``empty`` that its readers are
# done; the parity of a barrier's phase flips each time round the ring. A position in a ring is
# (slot, phase). On a fresh barrier the previous phase, 1, counts as complete: a producer waits for
# the opposite phase and so finds the ring empty at first.
#
# A tile of work is ROWS queries for each consumer, of one head of one sequence. Programs take tiles
# round by round, in sections of ``together`` heads, whose keys and values stay in the L2 cache.
# Under a causal mask tiles differ in their amount of work: the last section begins with the largest
# tile, the one before with the smallest, and so on, and every other round is dealt from the last
# program to the first. All programs then get about the same amount.


@gluon.jit  # type: ignore[untyped-decorator]
def _after(slot: gl.tensor, phase: gl.tensor, STAGES: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    """The next position in a ring."""
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit  # type: ignore[untyped-decorator]
def _iterations(tiles: gl.tensor) -> gl.tensor:
    """The number of tiles that this program takes."""
    programs = gl.num_programs(0)
    rounds = tiles // programs
    return rounds + (_assigned_tile(rounds) < tiles).to(gl.int32)


@gluon.jit  # type: ignore[untyped-decorator]
def _assigned_tile(iteration: gl.tensor) -> gl.tensor:
    """The tile of this program in a round, counted by ``iteration``."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    return iteration * programs + gl.where(iteration % 2 == 0, program, programs - 1 - program)


@gluon.jit  # type: ignore[untyped-decorator]
def _tile(
    iteration: gl.tensor, blocks: gl.tensor, heads: gl.tensor, batch: gl.tensor, together: gl.tensor
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """``(size, head, sequence)``; the blocks of a head are ranked by size, 0 the largest."""
    index = _assigned_tile(iteration)
    everything = batch * heads
    section = index // (together * blocks)
    within = index - section * together * blocks
    count = gl.minimum(together, everything - section * together)
    size = within // count
    pair = section * together + within - size * count
    last = (everything - 1) // together
    size = gl.where((last - section) % 2 == 0, size, blocks - 1 - size)
    return size, pair % heads, pair // heads


@gluon.jit  # type: ignore[untyped-decorator]
def _key_blocks(
    end: gl.tensor, skv: gl.tensor, shift: gl.tensor, CAUSAL: gl.constexpr, KEYS: gl.constexpr
) -> gl.tensor:
    """The number of key blocks that the queries before ``end`` see; at least one."""
    bound = skv
    if CAUSAL:
        bound = gl.minimum(skv, end + shift)
    return gl.maximum((bound + KEYS - 1) // KEYS, 1)


@gluon.jit  # type: ignore[untyped-decorator]
def _exp2(x: gl.tensor) -> gl.tensor:
    """2**x by the special function unit alone; results below 2**-126 are 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _softmax(
    s: gl.tensor,
    m: gl.tensor,
    total: gl.tensor,
    factor: gl.tensor,
    first_row: gl.tensor,
    first_key: gl.tensor,
    skv: gl.tensor,
    shift: gl.tensor,
    MASKED: gl.constexpr,
    CAUSAL: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """``(weights, m, total, alpha)`` after one more block; alpha is the factor of earlier sums.

    m is the largest score of a row so far, before it is scaled.
    """
    layout: gl.constexpr = s.type.layout
    if MASKED:
        key = first_key + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))[None, :]
        bound = skv
        if CAUSAL:
            row = first_row + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))[:, None]
            s = gl.where(key < gl.minimum(row + shift + 1, bound), s, float("-inf"))
        else:
            s = gl.where(key < bound, s, float("-inf"))
    highest = gl.maximum(m, gl.max(s, 1))
    finite_max = highest
    if MASKED:
        finite_max = gl.where(highest == float("-inf"), 0.0, highest)
    offset = finite_max * factor
    # Exactly 1 while the maximum stays. As a difference of two products it would not be, because a
    # fused multiply-add rounds only one of them: each block would scale the earlier sums by that
    # error.
    alpha = _exp2((m - finite_max) * factor)
    p = _exp2(s * factor - offset[:, None])
    return p, highest, total * alpha + gl.sum(p, 1), alpha


@gluon.jit  # type: ignore[untyped-decorator]
def _scores(
    q: gl.shared_memory_descriptor,
    keys: gl.shared_memory_descriptor,
    full: gl.shared_memory_descriptor,
    slot: gl.tensor,
    phase: gl.tensor,
    layout: gl.constexpr,
) -> gl.tensor:
    """Start the product of the queries and the key block at this position."""
    ROWS: gl.constexpr = q.shape[0]
    KEYS: gl.constexpr = keys.shape[3]
    WIDTH: gl.constexpr = keys.shape[4]
    mbarrier.wait(full.index(slot), phase)
    k = keys.index(slot).reshape([KEYS, WIDTH])
    zeros = gl.zeros([ROWS, KEYS], gl.float32, layout)
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _weighted(
    p: gl.tensor,
    values: gl.shared_memory_descriptor,
    full: gl.shared_memory_descriptor,
    slot: gl.tensor,
    phase: gl.tensor,
    acc: gl.tensor,
) -> gl.tensor:
    """Start adding the weighted values at this position to acc."""
    KEYS: gl.constexpr = values.shape[3]
    WIDTH: gl.constexpr = values.shape[4]
    mbarrier.wait(full.index(slot), phase)
    v = values.index(slot).reshape([KEYS, WIDTH])
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _attend(
    q: gl.shared_memory_descriptor,
    ring: gl.tuple,
    barriers: gl.tuple,
    position: gl.tuple,
    state: gl.tuple,
    p: gl.tensor,
    factor: gl.tensor,
    first_row: gl.tensor,
    first_key: gl.tensor,
    skv: gl.tensor,
    shift: gl.tensor,
    MASKED: gl.constexpr,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
    layout: gl.constexpr,
) -> tuple[gl.tuple, gl.tuple, gl.tensor]:
    """Process one more key block, while the values of the previous block are added up."""
    keys, values = ring
    k_full, k_empty, v_full, v_empty = barriers
    k_slot, k_phase, v_slot, v_phase = position
    acc, m, total = state
    s = _scores(q, keys, k_full, k_slot, k_phase, layout)
    acc = _weighted(p, values, v_full, v_slot, v_phase, acc)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_empty.index(k_slot))
    w, m, total, alpha = _softmax(
        s, m, total, factor, first_row, first_key, skv, shift, MASKED, CAUSAL
    )
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    mbarrier.arrive(v_empty.index(v_slot))
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    next_p = gl.convert_layout(w.to(p.dtype), p.type.layout)
    k_slot, k_phase = _after(k_slot, k_phase, STAGES)
    v_slot, v_phase = _after(v_slot, v_phase, STAGES)
    return (k_slot, k_phase, v_slot, v_phase), (acc, m, total), next_p


@gluon.jit  # type: ignore[untyped-decorator]
def _consumer(
    out: tma.tensor_descriptor,
    lse_ptr: gl.tensor,
    queries: gl.shared_memory_descriptor,
    outs: gl.shared_memory_descriptor,
    ring: gl.tuple,
    q_bars: gl.tuple,
    barriers: gl.tuple,
    sizes: gl.tuple,
    factor: gl.tensor,
    NUMBER: gl.constexpr,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """The softmax and both products for ROWS queries of each tile."""
    ROWS: gl.constexpr = queries.shape[3]
    KEYS: gl.constexpr = ring[0].shape[3]
    WIDTH: gl.constexpr = queries.shape[4]
    dtype: gl.constexpr = queries.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    batch, heads, _, sq, skv, shift, together = sizes
    q_full, q_empty = q_bars
    k_full, k_empty, v_full, v_empty = barriers
    keys, values = ring
    blocks = (sq + 2 * ROWS - 1) // (2 * ROWS)
    q = queries.index(NUMBER).reshape([ROWS, WIDTH])
    k_slot = gl.to_tensor(0)
    k_phase = gl.to_tensor(0)
    v_slot = gl.to_tensor(0)
    v_phase = gl.to_tensor(0)
    q_phase = gl.to_tensor(0)
    for iteration in range(_iterations(blocks * heads * batch)):
        block, head, sequence = _tile(iteration, blocks, heads, batch, together)
        block = blocks - 1 - block
        first_row = (2 * block + NUMBER) * ROWS
        count = _key_blocks((block + 1) * 2 * ROWS, skv, shift, CAUSAL, KEYS)
        # Every query here sees all keys of the blocks before this one.
        bound = skv
        if CAUSAL:
            bound = gl.minimum(skv, first_row + shift + 1)
        whole = gl.minimum(gl.maximum(bound, 0) // KEYS, count - 1)

        mbarrier.wait(q_full.index(NUMBER), q_phase)
        s = _scores(q, keys, k_full, k_slot, k_phase, s_layout)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(k_slot))
        k_slot, k_phase = _after(k_slot, k_phase, STAGES)
        m = gl.full([ROWS], float("-inf"), gl.float32, rows)
        total = gl.zeros([ROWS], gl.float32, rows)
        w, m, total, _ = _softmax(
            s, m, total, factor, first_row, (count - 1) * KEYS, skv, shift, True, CAUSAL
        )
        p = gl.convert_layout(w.to(dtype), p_layout)
        position = k_slot, k_phase, v_slot, v_phase
        state = gl.zeros([ROWS, WIDTH], gl.float32, acc_layout), m, total
        if CAUSAL:
            for back in range(whole, count - 1):
                key = (count - 2 - (back - whole)) * KEYS
                position, state, p = _attend(
                    q, ring, barriers, position, state, p, factor, first_row, key,
                    skv, shift, True, CAUSAL, STAGES, s_layout,
                )  # fmt: skip
        else:
            whole = count - 1
        for _ in range(whole):
            position, state, p = _attend(
                q, ring, barriers, position, state, p, factor, first_row, 0,
                skv, shift, False, CAUSAL, STAGES, s_layout,
            )  # fmt: skip
        mbarrier.arrive(q_empty.index(NUMBER))
        q_phase ^= 1
        k_slot, k_phase, v_slot, v_phase = position
        acc, m, total = state
        acc = _weighted(p, values, v_full, v_slot, v_phase, acc)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(v_empty.index(v_slot))
        v_slot, v_phase = _after(v_slot, v_phase, STAGES)

        # A row that sees no key has total 0 and maximum -inf. Total 0 alone does not prove it, see
        # ``_attention.forward``; and a total of NaN must stay NaN.
        nothing = (total == 0) & (m == float("-inf"))
        share = gl.where(nothing, 0.0, 1 / total)
        share = gl.convert_layout(share, gl.SliceLayout(1, acc_layout))
        tma.store_wait(0)
        at = [sequence, head, first_row, 0]
        _write(out, at, outs, NUMBER, (acc * share[:, None]).to(dtype))
        lse = (m * factor + gl.log2(total)) * 0.6931471805599453
        row = first_row + gl.arange(0, ROWS, rows)
        at = lse_ptr + (sequence * heads + head).to(gl.int64) * sq + row
        gl.store(at, gl.where(nothing, float("-inf"), lse), mask=row < sq)
    tma.store_wait(0)


@gluon.jit  # type: ignore[untyped-decorator]
def _write(
    target: tma.tensor_descriptor,
    at: list[gl.tensor],
    tiles: gl.shared_memory_descriptor,
    number: gl.tensor,
    x: gl.tensor,
) -> None:
    """Start storing x by TMA, through a tile in shared memory."""
    tiles.index(number).reshape(x.shape).store(x)
    fence_async_shared()
    tma.async_copy_shared_to_global(target, at, tiles.index(number))


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def _bytes(sources: gl.tuple) -> int:
    """The bytes of one tile of each source together."""
    return sum(source.block_type.nbytes for source in sources)


@gluon.jit  # type: ignore[untyped-decorator]
def _load(
    sources: gl.tuple,
    places: gl.tuple,
    rings: gl.tuple,
    full: gl.shared_memory_descriptor,
    empty: gl.shared_memory_descriptor,
    slot: gl.tensor,
    phase: gl.tensor,
) -> None:
    """Fill a slot of rings that share their barriers, once it is empty."""
    mbarrier.wait(empty.index(slot), phase ^ 1)
    size: gl.constexpr = _bytes(sources)
    mbarrier.expect(full.index(slot), size)
    for i in gl.static_range(len(sources)):
        tile = rings[i].index(slot)
        tma.async_copy_global_to_shared(sources[i], places[i], full.index(slot), tile)


@gluon.jit  # type: ignore[untyped-decorator]
def _producer(
    q: tma.tensor_descriptor,
    k: tma.tensor_descriptor,
    v: tma.tensor_descriptor,
    queries: gl.shared_memory_descriptor,
    ring: gl.tuple,
    q_bars: gl.tuple,
    barriers: gl.tuple,
    sizes: gl.tuple,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Load the consumers' operands, in the order in which they use them."""
    ROWS: gl.constexpr = queries.shape[3]
    KEYS: gl.constexpr = ring[0].shape[3]
    batch, heads, groups, sq, skv, shift, together = sizes
    q_full, q_empty = q_bars
    k_full, k_empty, v_full, v_empty = barriers
    keys, values = ring
    blocks = (sq + 2 * ROWS - 1) // (2 * ROWS)
    k_slot = gl.to_tensor(0)
    k_phase = gl.to_tensor(0)
    v_slot = gl.to_tensor(0)
    v_phase = gl.to_tensor(0)
    q_phase = gl.to_tensor(0)
    for iteration in range(_iterations(blocks * heads * batch)):
        block, head, sequence = _tile(iteration, blocks, heads, batch, together)
        block = blocks - 1 - block
        group = head // (heads // groups)
        row = 2 * block * ROWS
        count = _key_blocks(row + 2 * ROWS, skv, shift, CAUSAL, KEYS)
        at = (count - 1) * KEYS
        _load((k,), ([sequence, group, at, 0],), (keys,), k_full, k_empty, k_slot, k_phase)
        k_slot, k_phase = _after(k_slot, k_phase, STAGES)
        for number in gl.static_range(2):
            here = [sequence, head, row + number * ROWS, 0]
            _load((q,), (here,), (queries,), q_full, q_empty, number, q_phase)
        for _ in range(1, count):
            _load(
                (k,), ([sequence, group, at - KEYS, 0],), (keys,), k_full, k_empty, k_slot, k_phase
            )
            _load((v,), ([sequence, group, at, 0],), (values,), v_full, v_empty, v_slot, v_phase)
            k_slot, k_phase = _after(k_slot, k_phase, STAGES)
            v_slot, v_phase = _after(v_slot, v_phase, STAGES)
            at -= KEYS
        _load((v,), ([sequence, group, at, 0],), (values,), v_full, v_empty, v_slot, v_phase)
        v_slot, v_phase = _after(v_slot, v_phase, STAGES)
        q_phase ^= 1


@gluon.jit  # type: ignore[untyped-decorator]
def _barriers(
    SLOTS: gl.constexpr, READERS: gl.constexpr
) -> tuple[gl.shared_memory_descriptor, gl.shared_memory_descriptor]:
    """``(full, empty)`` of a ring whose tiles are read by READERS warpgroups."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    return full, empty


@gluon.jit  # type: ignore[untyped-decorator]
def _source(
    ptr: gl.tensor,
    batch: gl.tensor,
    heads: gl.tensor,
    length: gl.tensor,
    strides: gl.tuple,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
) -> tma.tensor_descriptor:
    """A descriptor for tiles of ROWS tokens of one head, in any format with dense features."""
    dtype: gl.constexpr = ptr.dtype.element_ty
    shape: gl.constexpr = [1, 1, ROWS, WIDTH]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, dtype)
    by_batch, by_head, by_token = strides
    return tma.make_tensor_descriptor(
        ptr, [batch, heads, length, WIDTH], [by_batch, by_head, by_token, 1], shape, layout
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _tiles(source: tma.tensor_descriptor, SLOTS: gl.constexpr) -> gl.shared_memory_descriptor:
    shape: gl.constexpr = [SLOTS] + source.block_shape  # noqa: RUF005 - Triton has no other way
    return gl.allocate_shared_memory(source.dtype, shape, source.layout)


@gluon.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "batch", "heads", "groups", "sq", "skv", "shift", "together", "scale",
        "q_batch", "q_head", "q_token", "k_batch", "k_head", "k_token",
        "v_batch", "v_head", "v_token", "o_batch", "o_head", "o_token",
    ]
)  # fmt: skip
def _forward(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    batch: tl.int32,
    heads: tl.int32,
    groups: tl.int32,
    sq: tl.int32,
    skv: tl.int32,
    shift: tl.int32,
    together: tl.int32,
    scale: tl.float32,
    q_batch: tl.int64,
    q_head: tl.int64,
    q_token: tl.int64,
    k_batch: tl.int64,
    k_head: tl.int64,
    k_token: tl.int64,
    v_batch: tl.int64,
    v_head: tl.int64,
    v_token: tl.int64,
    o_batch: tl.int64,
    o_head: tl.int64,
    o_token: tl.int64,
    CAUSAL: gl.constexpr,
    WIDTH: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
) -> None:
    q = _source(q_ptr, batch, heads, sq, (q_batch, q_head, q_token), ROWS, WIDTH)
    k = _source(k_ptr, batch, groups, skv, (k_batch, k_head, k_token), KEYS, WIDTH)
    v = _source(v_ptr, batch, groups, skv, (v_batch, v_head, v_token), KEYS, WIDTH)
    out = _source(out_ptr, batch, heads, sq, (o_batch, o_head, o_token), ROWS, WIDTH)
    queries, outs = _tiles(q, 2), _tiles(out, 2)
    ring = _tiles(k, STAGES), _tiles(v, STAGES)
    q_bars = _barriers(2, 1)
    k_full, k_empty = _barriers(STAGES, 2)
    v_full, v_empty = _barriers(STAGES, 2)
    fence_async_shared()
    barriers = k_full, k_empty, v_full, v_empty
    sizes = batch, heads, groups, sq, skv, shift, together
    factor = scale * 1.4426950408889634
    gl.warp_specialize(
        [
            (_consumer, (out, lse_ptr, queries, outs, ring, q_bars, barriers, sizes, factor,
                         0, CAUSAL, STAGES)),
            (_consumer, (out, lse_ptr, queries, outs, ring, q_bars, barriers, sizes, factor,
                         1, CAUSAL, STAGES)),
            (_producer, (q, k, v, queries, ring, q_bars, barriers, sizes, CAUSAL, STAGES)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


# The backward is two kernels. Each owns its sums, so that no two programs add to the same number:
# one iterates over the keys of a block of queries, for dq, the other over the queries of a block of
# keys, for dk and dv. The first stores for the second what both need of a query: ``lses``, in units
# of log 2, inf for a query that sees no key or lies beyond the last, and ``deltas``, the dot
# products of its output and that output's gradient; each head has a row of ``padded`` numbers.


@gluon.jit  # type: ignore[untyped-decorator]
def _weights_by_key(
    s: gl.tensor,
    lse: gl.tensor,
    factor: gl.tensor,
    first_row: gl.tensor,
    first_key: gl.tensor,
    shift: gl.tensor,
    MASKED: gl.constexpr,
) -> gl.tensor:
    """The weights of a block of scores of [keys, queries]."""
    layout: gl.constexpr = s.type.layout
    p = _exp2(s * factor - lse[None, :])
    if MASKED:
        key = first_key + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))[:, None]
        row = first_row + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))[None, :]
        p = gl.where(key <= row + shift, p, 0.0)
    return p


@gluon.jit  # type: ignore[untyped-decorator]
def _gather(
    k: gl.shared_memory_descriptor,
    v: gl.shared_memory_descriptor,
    ring: gl.tuple,
    barriers: gl.tuple,
    position: gl.tuple,
    state: gl.tuple,
    s: gl.tensor,
    factor: gl.tensor,
    first_row: gl.tensor,
    first_key: gl.tensor,
    shift: gl.tensor,
    MASKED: gl.constexpr,
    NEXT: gl.constexpr,
    STAGES: gl.constexpr,
) -> tuple[gl.tuple, gl.tuple, gl.tensor]:
    """Add one query block's contribution to dk and dv; NEXT: compute the next block's scores."""
    queries, douts, lses, deltas = ring
    q_full, q_empty, d_full, d_empty = barriers
    q_slot, q_phase, d_slot, d_phase = position
    dk, dv = state
    ROWS: gl.constexpr = queries.shape[3]
    WIDTH: gl.constexpr = queries.shape[4]
    layout: gl.constexpr = s.type.layout
    p_layout: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    queries_of: gl.constexpr = gl.SliceLayout(0, layout)
    mbarrier.wait(d_full.index(d_slot), d_phase)
    dout = douts.index(d_slot).reshape([ROWS, WIDTH])
    zeros = gl.zeros(s.shape, gl.float32, layout)
    dp = warpgroup_mma(v, dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
    lse = lses.index(q_slot).load(queries_of)
    p = _weights_by_key(s, lse, factor, first_row, first_key, shift, MASKED)
    p_narrow = gl.convert_layout(p.to(queries.dtype), p_layout)
    dv = warpgroup_mma(p_narrow, dout, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    delta = deltas.index(d_slot).load(queries_of)
    ds = gl.convert_layout((p * (dp - delta[None, :])).to(queries.dtype), p_layout)
    dk = warpgroup_mma(ds, queries.index(q_slot).reshape([ROWS, WIDTH]), dk, is_async=True)
    after, after_phase = _after(q_slot, q_phase, STAGES)
    if NEXT:
        s = _scores(k, queries, q_full, after, after_phase, layout)
        dv, p_narrow, dk, ds, s = warpgroup_mma_wait(0, deps=(dv, p_narrow, dk, ds, s))
    else:
        dv, p_narrow, dk, ds = warpgroup_mma_wait(0, deps=(dv, p_narrow, dk, ds))
    mbarrier.arrive(q_empty.index(q_slot))
    mbarrier.arrive(d_empty.index(d_slot))
    d_slot, d_phase = _after(d_slot, d_phase, STAGES)
    return (after, after_phase, d_slot, d_phase), (dk, dv), s


@gluon.jit  # type: ignore[untyped-decorator]
def _query_blocks(
    first_key: gl.tensor, sq: gl.tensor, shift: gl.tensor, CAUSAL: gl.constexpr, ROWS: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """``(first, end)`` of the query blocks that see this key or later ones; at least one block."""
    end = (sq + ROWS - 1) // ROWS
    first = gl.to_tensor(0)
    if CAUSAL:
        first = gl.minimum(gl.maximum(first_key - shift, 0) // ROWS, end - 1)
    return first, end


@gluon.jit  # type: ignore[untyped-decorator]
def _key_consumer(
    dk_out: tma.tensor_descriptor,
    dv_out: tma.tensor_descriptor,
    pairs: gl.tuple,
    results: gl.shared_memory_descriptor,
    ring: gl.tuple,
    pair_bars: gl.tuple,
    barriers: gl.tuple,
    sizes: gl.tuple,
    scale: gl.tensor,
    NUMBER: gl.constexpr,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """dk and dv of KEYS keys of each tile."""
    keys, values = pairs
    KEYS: gl.constexpr = keys.shape[3]
    WIDTH: gl.constexpr = keys.shape[4]
    ROWS: gl.constexpr = ring[0].shape[3]
    dtype: gl.constexpr = keys.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    batch, heads, groups, sq, skv, shift, together = sizes
    full, empty = pair_bars
    q_full = barriers[0]
    queries = ring[0]
    blocks = (skv + 2 * KEYS - 1) // (2 * KEYS)
    k = keys.index(NUMBER).reshape([KEYS, WIDTH])
    v = values.index(NUMBER).reshape([KEYS, WIDTH])
    factor = scale * 1.4426950408889634
    zero = gl.to_tensor(0)
    position = zero, zero, zero, zero
    phase = gl.to_tensor(0)
    for iteration in range(_iterations(blocks * groups * batch)):
        block, group, sequence = _tile(iteration, blocks, groups, batch, together)
        first_key = (2 * block + NUMBER) * KEYS
        first, end = _query_blocks(2 * block * KEYS, sq, shift, CAUSAL, ROWS)
        # From this block on, all queries of a block see every key of this tile.
        seen = first
        if CAUSAL:
            seen = gl.maximum(first_key + KEYS - 1 - shift + ROWS - 1, 0) // ROWS
            seen = gl.minimum(gl.maximum(seen, first), end - 1)
        mbarrier.wait(full.index(NUMBER), phase)
        dk = gl.zeros([KEYS, WIDTH], gl.float32, acc_layout)
        dv = gl.zeros([KEYS, WIDTH], gl.float32, acc_layout)
        state = dk, dv
        for _ in range(heads // groups):
            q_slot, q_phase = position[0], position[1]
            s = _scores(k, queries, q_full, q_slot, q_phase, s_layout)
            s = warpgroup_mma_wait(0, deps=(s,))
            if CAUSAL:
                for step in range(first, seen):
                    position, state, s = _gather(
                        k, v, ring, barriers, position, state, s, factor, step * ROWS,
                        first_key, shift, True, True, STAGES,
                    )  # fmt: skip
            for _step in range(seen, end - 1):
                position, state, s = _gather(
                    k, v, ring, barriers, position, state, s, factor, 0,
                    first_key, shift, False, True, STAGES,
                )  # fmt: skip
            position, state, s = _gather(
                k, v, ring, barriers, position, state, s, factor, (end - 1) * ROWS,
                first_key, shift, CAUSAL, False, STAGES,
            )  # fmt: skip
        mbarrier.arrive(empty.index(NUMBER))
        phase ^= 1
        dk, dv = state
        at = [sequence, group, first_key, 0]
        tma.store_wait(0)
        _write(dk_out, at, results, 2 * NUMBER, (dk * scale).to(dtype))
        _write(dv_out, at, results, 2 * NUMBER + 1, dv.to(dtype))
    tma.store_wait(0)


@gluon.jit  # type: ignore[untyped-decorator]
def _key_producer(
    sources: gl.tuple,
    pairs: gl.tuple,
    ring: gl.tuple,
    pair_bars: gl.tuple,
    barriers: gl.tuple,
    sizes: gl.tuple,
    padded: gl.tensor,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Load keys and values of a tile, then the queries of every head that uses them."""
    q, k, v, dout, lse, delta = sources
    keys, values = pairs
    queries, douts, lses, deltas = ring
    KEYS: gl.constexpr = keys.shape[3]
    ROWS: gl.constexpr = queries.shape[3]
    batch, heads, groups, sq, skv, shift, together = sizes
    full, empty = pair_bars
    q_full, q_empty, d_full, d_empty = barriers
    blocks = (skv + 2 * KEYS - 1) // (2 * KEYS)
    slot = gl.to_tensor(0)
    slot_phase = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for iteration in range(_iterations(blocks * groups * batch)):
        block, group, sequence = _tile(iteration, blocks, groups, batch, together)
        first, end = _query_blocks(2 * block * KEYS, sq, shift, CAUSAL, ROWS)
        for number in gl.static_range(2):
            at = [sequence, group, (2 * block + number) * KEYS, 0]
            _load((k, v), (at, at), (keys, values), full, empty, number, phase)
        for member in range(heads // groups):
            head = group * (heads // groups) + member
            begin = (sequence * heads + head) * padded
            for step in range(first, end):
                at = [sequence, head, step * ROWS, 0]
                row = [begin + step * ROWS]
                _load((q, lse), (at, row), (queries, lses), q_full, q_empty, slot, slot_phase)
                _load((dout, delta), (at, row), (douts, deltas), d_full, d_empty, slot, slot_phase)
                slot, slot_phase = _after(slot, slot_phase, STAGES)
        phase ^= 1


@gluon.jit  # type: ignore[untyped-decorator]
def _numbers(ptr: gl.tensor, length: gl.tensor, ROWS: gl.constexpr) -> tma.tensor_descriptor:
    """A descriptor for runs of ROWS float32."""
    layout: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    return tma.make_tensor_descriptor(ptr, [length], [1], [ROWS], layout)


@gluon.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "batch", "heads", "groups", "sq", "skv", "shift", "together", "padded", "scale",
        "q_batch", "q_head", "q_token", "k_batch", "k_head", "k_token",
        "v_batch", "v_head", "v_token", "d_batch", "d_head", "d_token",
        "g_batch", "g_head", "g_token",
    ]
)  # fmt: skip
def _backward_keys(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    dout_ptr: tl.tensor,
    lses_ptr: tl.tensor,
    deltas_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    batch: tl.int32,
    heads: tl.int32,
    groups: tl.int32,
    sq: tl.int32,
    skv: tl.int32,
    shift: tl.int32,
    together: tl.int32,
    padded: tl.int32,
    scale: tl.float32,
    q_batch: tl.int64,
    q_head: tl.int64,
    q_token: tl.int64,
    k_batch: tl.int64,
    k_head: tl.int64,
    k_token: tl.int64,
    v_batch: tl.int64,
    v_head: tl.int64,
    v_token: tl.int64,
    d_batch: tl.int64,
    d_head: tl.int64,
    d_token: tl.int64,
    g_batch: tl.int64,
    g_head: tl.int64,
    g_token: tl.int64,
    CAUSAL: gl.constexpr,
    WIDTH: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
) -> None:
    q = _source(q_ptr, batch, heads, sq, (q_batch, q_head, q_token), ROWS, WIDTH)
    k = _source(k_ptr, batch, groups, skv, (k_batch, k_head, k_token), KEYS, WIDTH)
    v = _source(v_ptr, batch, groups, skv, (v_batch, v_head, v_token), KEYS, WIDTH)
    dout = _source(dout_ptr, batch, heads, sq, (d_batch, d_head, d_token), ROWS, WIDTH)
    dk = _source(dk_ptr, batch, groups, skv, (g_batch, g_head, g_token), KEYS, WIDTH)
    dv = _source(dv_ptr, batch, groups, skv, (g_batch, g_head, g_token), KEYS, WIDTH)
    lse = _numbers(lses_ptr, batch * heads * padded, ROWS)
    delta = _numbers(deltas_ptr, batch * heads * padded, ROWS)
    pairs, results = (_tiles(k, 2), _tiles(v, 2)), _tiles(dk, 4)
    ring = _tiles(q, STAGES), _tiles(dout, STAGES), _tiles(lse, STAGES), _tiles(delta, STAGES)
    pair_bars = _barriers(2, 1)
    q_full, q_empty = _barriers(STAGES, 2)
    d_full, d_empty = _barriers(STAGES, 2)
    fence_async_shared()
    barriers = q_full, q_empty, d_full, d_empty
    sizes = batch, heads, groups, sq, skv, shift, together
    sources = q, k, v, dout, lse, delta
    gl.warp_specialize(
        [
            (_key_consumer, (dk, dv, pairs, results, ring, pair_bars, barriers, sizes, scale,
                             0, CAUSAL, STAGES)),
            (_key_consumer, (dk, dv, pairs, results, ring, pair_bars, barriers, sizes, scale,
                             1, CAUSAL, STAGES)),
            (_key_producer, (sources, pairs, ring, pair_bars, barriers, sizes, padded,
                             CAUSAL, STAGES)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit  # type: ignore[untyped-decorator]
def _weights_by_query(
    s: gl.tensor,
    lse: gl.tensor,
    factor: gl.tensor,
    first_row: gl.tensor,
    first_key: gl.tensor,
    skv: gl.tensor,
    shift: gl.tensor,
    MASKED: gl.constexpr,
    CAUSAL: gl.constexpr,
) -> gl.tensor:
    """The weights of a block of scores of [queries, keys]."""
    layout: gl.constexpr = s.type.layout
    p = _exp2(s * factor - lse[:, None])
    if MASKED:
        key = first_key + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))[None, :]
        if CAUSAL:
            row = first_row + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))[:, None]
            p = gl.where(key < gl.minimum(row + shift + 1, skv), p, 0.0)
        else:
            p = gl.where(key < skv, p, 0.0)
    return p


@gluon.jit  # type: ignore[untyped-decorator]
def _score_gradients(
    q: gl.shared_memory_descriptor,
    dout: gl.shared_memory_descriptor,
    ring: gl.tuple,
    barriers: gl.tuple,
    position: gl.tuple,
    lse: gl.tensor,
    delta: gl.tensor,
    factor: gl.tensor,
    first_row: gl.tensor,
    first_key: gl.tensor,
    skv: gl.tensor,
    shift: gl.tensor,
    ds: gl.tensor,
    dq: gl.tensor,
    FIRST: gl.constexpr,
    MASKED: gl.constexpr,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
    layout: gl.constexpr,
) -> tuple[gl.tuple, gl.tensor, gl.tensor]:
    """``(position, ds, dq)``: ds of a key block, while the previous block's ds is added to dq."""
    keys, values = ring
    k_full, k_empty, v_full, v_empty = barriers
    last, slot, phase, v_slot, v_phase = position
    KEYS: gl.constexpr = keys.shape[3]
    WIDTH: gl.constexpr = keys.shape[4]
    s = _scores(q, keys, k_full, slot, phase, layout)
    dp = _scores(dout, values, v_full, v_slot, v_phase, layout)
    if FIRST:
        s = warpgroup_mma_wait(1, deps=(s,))
    else:
        k_before = keys.index(last).reshape([KEYS, WIDTH])
        dq = warpgroup_mma(ds, k_before, dq, is_async=True)
        s = warpgroup_mma_wait(2, deps=(s,))
    p = _weights_by_query(s, lse, factor, first_row, first_key, skv, shift, MASKED, CAUSAL)
    if FIRST:
        dp = warpgroup_mma_wait(0, deps=(dp,))
    else:
        dp = warpgroup_mma_wait(1, deps=(dp,))
    mbarrier.arrive(v_empty.index(v_slot))
    wide = p * (dp - delta[:, None])
    if not FIRST:
        dq, ds = warpgroup_mma_wait(0, deps=(dq, ds))
        mbarrier.arrive(k_empty.index(last))
    p_layout: gl.constexpr = gl.DotOperandLayout(0, dq.type.layout, 2)
    ds = gl.convert_layout(wide.to(keys.dtype), p_layout)
    after, after_phase = _after(slot, phase, STAGES)
    v_slot, v_phase = _after(v_slot, v_phase, STAGES)
    return (slot, after, after_phase, v_slot, v_phase), ds, dq


@gluon.jit  # type: ignore[untyped-decorator]
def _query_consumer(
    dq_out: tma.tensor_descriptor,
    lse_ptr: gl.tensor,
    lses_ptr: gl.tensor,
    deltas_ptr: gl.tensor,
    trios: gl.tuple,
    results: gl.shared_memory_descriptor,
    ring: gl.tuple,
    trio_bars: gl.tuple,
    barriers: gl.tuple,
    sizes: gl.tuple,
    padded: gl.tensor,
    scale: gl.tensor,
    NUMBER: gl.constexpr,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """dq, lses and deltas of ROWS queries of each tile."""
    queries, outs, douts = trios
    keys = ring[0]
    ROWS: gl.constexpr = queries.shape[3]
    WIDTH: gl.constexpr = queries.shape[4]
    KEYS: gl.constexpr = keys.shape[3]
    dtype: gl.constexpr = queries.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    batch, heads, _, sq, skv, shift, together = sizes
    full, empty = trio_bars
    k_empty = barriers[1]
    blocks = (sq + 2 * ROWS - 1) // (2 * ROWS)
    q = queries.index(NUMBER).reshape([ROWS, WIDTH])
    out = outs.index(NUMBER).reshape([ROWS, WIDTH])
    dout = douts.index(NUMBER).reshape([ROWS, WIDTH])
    infinity: gl.constexpr = float("inf")
    factor = scale * 1.4426950408889634
    zero = gl.to_tensor(0)
    position = zero, zero, zero, zero, zero
    phase = gl.to_tensor(0)
    for iteration in range(_iterations(blocks * heads * batch)):
        block, head, sequence = _tile(iteration, blocks, heads, batch, together)
        block = blocks - 1 - block
        first_row = (2 * block + NUMBER) * ROWS
        count = _key_blocks((block + 1) * 2 * ROWS, skv, shift, CAUSAL, KEYS)
        bound = skv
        if CAUSAL:
            bound = gl.minimum(skv, first_row + shift + 1)
        whole = gl.minimum(gl.maximum(bound, 0) // KEYS, count - 1)
        row = first_row + gl.arange(0, ROWS, rows)
        pair = sequence * heads + head
        lse = gl.load(lse_ptr + pair.to(gl.int64) * sq + row, mask=row < sq, other=infinity)
        lse = gl.where(lse == -infinity, infinity, lse * 1.4426950408889634)
        mbarrier.wait(full.index(NUMBER), phase)
        product = out.load(acc_layout).to(gl.float32) * dout.load(acc_layout).to(gl.float32)
        delta = gl.convert_layout(gl.sum(product, 1), rows)
        gl.store(lses_ptr + pair * padded + row, lse)
        gl.store(deltas_ptr + pair * padded + row, delta)
        dq = gl.zeros([ROWS, WIDTH], gl.float32, acc_layout)
        ds = gl.zeros([ROWS, KEYS], dtype, p_layout)
        position, ds, dq = _score_gradients(
            q, dout, ring, barriers, position, lse, delta, factor, first_row, (count - 1) * KEYS,
            skv, shift, ds, dq, True, True, CAUSAL, STAGES, s_layout,
        )  # fmt: skip
        if CAUSAL:
            for back in range(whole, count - 1):
                key = (count - 2 - (back - whole)) * KEYS
                position, ds, dq = _score_gradients(
                    q, dout, ring, barriers, position, lse, delta, factor, first_row, key,
                    skv, shift, ds, dq, False, True, CAUSAL, STAGES, s_layout,
                )  # fmt: skip
        else:
            whole = count - 1
        for _ in range(whole):
            position, ds, dq = _score_gradients(
                q, dout, ring, barriers, position, lse, delta, factor, first_row, 0,
                skv, shift, ds, dq, False, False, CAUSAL, STAGES, s_layout,
            )  # fmt: skip
        mbarrier.arrive(empty.index(NUMBER))
        phase ^= 1
        last = position[0]
        dq = warpgroup_mma(ds, keys.index(last).reshape([KEYS, WIDTH]), dq, is_async=True)
        dq, ds = warpgroup_mma_wait(0, deps=(dq, ds))
        mbarrier.arrive(k_empty.index(last))
        tma.store_wait(0)
        at = [sequence, head, first_row, 0]
        _write(dq_out, at, results, NUMBER, (dq * scale).to(dtype))
    tma.store_wait(0)


@gluon.jit  # type: ignore[untyped-decorator]
def _query_producer(
    sources: gl.tuple,
    trios: gl.tuple,
    ring: gl.tuple,
    trio_bars: gl.tuple,
    barriers: gl.tuple,
    sizes: gl.tuple,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Load queries, outputs and their gradients, then every key and value that the queries see."""
    q, k, v, out, dout = sources
    queries = trios[0]
    keys, values = ring
    ROWS: gl.constexpr = queries.shape[3]
    KEYS: gl.constexpr = keys.shape[3]
    batch, heads, groups, sq, skv, shift, together = sizes
    full, empty = trio_bars
    k_full, k_empty, v_full, v_empty = barriers
    blocks = (sq + 2 * ROWS - 1) // (2 * ROWS)
    slot = gl.to_tensor(0)
    slot_phase = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for iteration in range(_iterations(blocks * heads * batch)):
        block, head, sequence = _tile(iteration, blocks, heads, batch, together)
        block = blocks - 1 - block
        group = head // (heads // groups)
        row = 2 * block * ROWS
        count = _key_blocks(row + 2 * ROWS, skv, shift, CAUSAL, KEYS)
        for number in gl.static_range(2):
            at = [sequence, head, row + number * ROWS, 0]
            _load((q, out, dout), (at, at, at), trios, full, empty, number, phase)
        for step in range(count):
            at = [sequence, group, (count - 1 - step) * KEYS, 0]
            _load((k,), (at,), (keys,), k_full, k_empty, slot, slot_phase)
            _load((v,), (at,), (values,), v_full, v_empty, slot, slot_phase)
            slot, slot_phase = _after(slot, slot_phase, STAGES)
        phase ^= 1


@gluon.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "batch", "heads", "groups", "sq", "skv", "shift", "together", "padded", "scale",
        "q_batch", "q_head", "q_token", "k_batch", "k_head", "k_token",
        "v_batch", "v_head", "v_token", "o_batch", "o_head", "o_token",
        "d_batch", "d_head", "d_token",
        "g_batch", "g_head", "g_token",
    ]
)  # fmt: skip
def _backward_queries(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    dout_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    lses_ptr: tl.tensor,
    deltas_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    batch: tl.int32,
    heads: tl.int32,
    groups: tl.int32,
    sq: tl.int32,
    skv: tl.int32,
    shift: tl.int32,
    together: tl.int32,
    padded: tl.int32,
    scale: tl.float32,
    q_batch: tl.int64,
    q_head: tl.int64,
    q_token: tl.int64,
    k_batch: tl.int64,
    k_head: tl.int64,
    k_token: tl.int64,
    v_batch: tl.int64,
    v_head: tl.int64,
    v_token: tl.int64,
    o_batch: tl.int64,
    o_head: tl.int64,
    o_token: tl.int64,
    d_batch: tl.int64,
    d_head: tl.int64,
    d_token: tl.int64,
    g_batch: tl.int64,
    g_head: tl.int64,
    g_token: tl.int64,
    CAUSAL: gl.constexpr,
    WIDTH: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
) -> None:
    q = _source(q_ptr, batch, heads, sq, (q_batch, q_head, q_token), ROWS, WIDTH)
    k = _source(k_ptr, batch, groups, skv, (k_batch, k_head, k_token), KEYS, WIDTH)
    v = _source(v_ptr, batch, groups, skv, (v_batch, v_head, v_token), KEYS, WIDTH)
    dout = _source(dout_ptr, batch, heads, sq, (d_batch, d_head, d_token), ROWS, WIDTH)
    out = _source(out_ptr, batch, heads, sq, (o_batch, o_head, o_token), ROWS, WIDTH)
    dq = _source(dq_ptr, batch, heads, sq, (g_batch, g_head, g_token), ROWS, WIDTH)
    trios, results = (_tiles(q, 2), _tiles(out, 2), _tiles(dout, 2)), _tiles(dq, 2)
    ring = _tiles(k, STAGES), _tiles(v, STAGES)
    trio_bars = _barriers(2, 1)
    k_full, k_empty = _barriers(STAGES, 2)
    v_full, v_empty = _barriers(STAGES, 2)
    fence_async_shared()
    barriers = k_full, k_empty, v_full, v_empty
    sizes = batch, heads, groups, sq, skv, shift, together
    gl.warp_specialize(
        [
            (_query_consumer, (dq, lse_ptr, lses_ptr, deltas_ptr, trios, results, ring,
                               trio_bars, barriers, sizes, padded, scale, 0, CAUSAL, STAGES)),
            (_query_consumer, (dq, lse_ptr, lses_ptr, deltas_ptr, trios, results, ring,
                               trio_bars, barriers, sizes, padded, scale, 1, CAUSAL, STAGES)),
            (_query_producer, ((q, k, v, out, dout), trios, ring, trio_bars, barriers, sizes,
                               CAUSAL, STAGES)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


# ----------------------------------------------------------------------------- launches

_ROWS = 64  # queries or keys of a consumer: rows of a warpgroup's instruction
_TILE = 2 * _ROWS
_L2 = 32 << 20  # bytes that should stay in the L2 cache
_WIDTHS = (64, 128)
_REGISTERS: dict[str, Any] = {"REGISTERS": 240, "LOADER_REGISTERS": 24}

_FORWARD = {"ROWS": _ROWS, "KEYS": 128, "STAGES": 2}
_QUERIES = {"ROWS": _ROWS, "KEYS": 64, "STAGES": 3}
_KEYS = {"ROWS": 64, "KEYS": _ROWS, "STAGES": 3}


def serves(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Whether these kernels support a call; of any size, unless it is empty."""
    return (
        _launch.limits(q.device).capability == HOPPER
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] in _WIDTHS
        and LEAST_FOLDED <= scale <= LARGEST_FLOAT32
        and bool(q.numel() and k.numel())
    )


def _loadable(op: str, tensor: Tensor) -> Tensor:
    """The tensor, or a copy for TMA: dense features, other strides multiples of 16 bytes."""
    unit = 16 // tensor.itemsize
    steps = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    if (
        tensor.stride(-1) == 1
        and address_of(op, tensor) % 16 == 0
        and all(size == 1 or (stride > 0 and stride % unit == 0) for size, stride in steps)
    ):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class _Sizes(NamedTuple):
    """The sizes of a call that every kernel needs, besides strides."""

    batch: int
    heads: int
    groups: int
    sq: int
    skv: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, qkv_format: str) -> _Sizes:
        batch, sq, heads = (q.shape[qkv_format.index(axis)] for axis in "bsh")
        skv, groups = (k.shape[qkv_format.index(axis)] for axis in "sh")
        return cls(batch, heads, groups, sq, skv)


def _start(
    kernel: Any,
    constants: dict[str, Any],
    tensors: tuple[Tensor, ...],
    sizes: _Sizes,
    numbers: tuple[float, ...],
    strided: tuple[Tensor, ...],
    qkv_format: str,
    *,
    by_keys: bool = False,
) -> None:
    """Launch a kernel whose tiles are blocks of queries of a head, or of keys of a group."""
    q = tensors[0]
    share = sizes.heads // sizes.groups
    tokens, pairs = (sizes.skv, sizes.groups) if by_keys else (sizes.sq, sizes.heads)
    tiles = -(-tokens // _TILE) * pairs * sizes.batch
    # A tile reads two tensors of tokens entirely: the heads of a group see the same keys.
    streamed = 2 * q.shape[-1] * q.itemsize * (share * sizes.sq if by_keys else sizes.skv)
    kept = max(1, _L2 // streamed) * (1 if by_keys else share)
    launch = launch_of(kernel, q.device, (q.dtype,), threads=128, **constants, **_REGISTERS)
    steps = [step for tensor in strided for step in _steps(tensor, qkv_format)]
    launch(
        (min(tiles, _launch.limits(q.device).multiprocessors), 1),
        tensors,
        (*sizes, *numbers[:1], min(pairs * sizes.batch, kept), *numbers[1:], *steps),
    )


def _steps(tensor: Tensor, qkv_format: str) -> tuple[int, ...]:
    """Strides of batch, head and token; for a dimension of size 1 any stride that TMA accepts."""
    axes = (qkv_format.index(axis) for axis in "bhs")
    return tuple(tensor.stride(it) if tensor.shape[it] > 1 else tensor.shape[-1] for it in axes)


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, qkv_format: str, causal: bool, top_left: bool
) -> tuple[Tensor, Tensor]:
    """``(out, softmax_lse)`` of the contract, for a call that :func:`serves` accepted."""
    op, width = "fused_attn_fwd", q.shape[-1]
    q, k, v = (_loadable(op, it) for it in (q, k, v))
    sizes = _Sizes.of(q, k, qkv_format)
    out = fresh(op, q, q.shape)
    lse = fresh(op, q, (sizes.batch, sizes.heads, sizes.sq), torch.float32)
    _start(
        _forward,
        {"CAUSAL": causal, "WIDTH": width, **_FORWARD},
        (q, k, v, out, lse),
        sizes,
        (0 if top_left else sizes.skv - sizes.sq, scale),
        (q, k, v, out),
        qkv_format,
    )
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    scale: float,
    qkv_format: str,
    causal: bool,
    top_left: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` of the contract, for a call that :func:`serves` accepted."""
    op, width = "fused_attn_bwd", q.shape[-1]
    sizes = _Sizes.of(q, k, qkv_format)
    padded = -(-sizes.sq // _TILE) * _TILE
    check_size(op, "queries of all heads, padded to tiles,", sizes.batch * sizes.heads * padded)
    dout, q, k, v, out = (_loadable(op, it) for it in (dout, q, k, v, out))
    lses = fresh(op, q, (sizes.batch, sizes.heads, padded), torch.float32)
    deltas = fresh(op, q, lses.shape, torch.float32)
    dq, dk, dv = (fresh(op, it, it.shape) for it in (q, k, v))
    numbers = (0 if top_left else sizes.skv - sizes.sq, padded, scale)
    same = {"CAUSAL": causal, "WIDTH": width}
    _start(
        _backward_queries,
        {**same, **_QUERIES},
        (q, k, v, out, dout, softmax_lse, lses, deltas, dq),
        sizes,
        numbers,
        (q, k, v, out, dout, dq),
        qkv_format,
    )
    _start(
        _backward_keys,
        {**same, **_KEYS},
        (q, k, v, dout, lses, deltas, dk, dv),
        sizes,
        numbers,
        (q, k, v, dout, dk),
        qkv_format,
        by_keys=True,
    )
    return dq, dk, dv
