"""Attention on Hopper, of dense 16-bit tensors: kernels that give each warp its own work.

One warp loads tiles with the tensor memory accelerator (TMA) into rings in shared memory;
two warpgroups multiply them, and take the softmax of one block of scores while the tensor
cores make the next (Shah et al., 2024, arXiv:2407.08608). Triton's own pipelining has
every warp do the same, so these are written in Gluon, where that can be said.

Only plain attention is served: heads of 64 or 128 features, every key or those up to the
diagonal. Everything else is left to the portable kernels, as are the checks.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton.language as tl
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
from transformer_engine_fl.backends.flagos._arguments import fresh

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["forward", "serves"]

# ------------------------------------------------------------------------------ kernels
#
# A ring has STAGES tiles. ``full`` says that a tile has been loaded, ``empty`` that those
# who read it are done; the parity of a barrier's phase changes each time round the ring.
# A position in a ring is (slot, phase). A fresh barrier is one whose phase before, 1, is
# over: whoever fills a ring waits for the opposite phase and so finds it empty at first.
#
# A tile of work is ROWS queries for each consumer, of one head of one sequence. Programs
# take tiles in turns, those with the most keys first, of as many heads at a time as
# ``together`` says, so that their keys and values stay in the L2 cache.


@gluon.jit  # type: ignore[untyped-decorator]
def _after(slot, phase, STAGES: gl.constexpr):
    """The next position in a ring."""
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit  # type: ignore[untyped-decorator]
def _tile(index, blocks, heads, batch, together):
    """``(block, head, sequence)`` of a tile of work."""
    everything = batch * heads
    section = index // (together * blocks)
    within = index - section * together * blocks
    count = gl.minimum(together, everything - section * together)
    row = within // count
    pair = section * together + within - row * count
    return blocks - 1 - row, pair % heads, pair // heads


@gluon.jit  # type: ignore[untyped-decorator]
def _key_blocks(end, skv, shift, CAUSAL: gl.constexpr, KEYS: gl.constexpr):
    """How many blocks of keys the queries before ``end`` look at; at least one."""
    bound = skv
    if CAUSAL:
        bound = gl.minimum(skv, end + shift)
    return gl.maximum((bound + KEYS - 1) // KEYS, 1)


@gluon.jit  # type: ignore[untyped-decorator]
def _exp2(x):
    """2**x by the special function unit alone; results below 2**-126 are 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _softmax(s, m, l, factor, first_row, first_key, skv, shift,
             MASKED: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """``(weights, m, l, alpha)`` after one more block; alpha is what earlier sums are worth.

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
    offset = highest * factor
    if MASKED:
        offset = gl.where(highest == float("-inf"), 0.0, offset)
    alpha = _exp2(m * factor - offset)
    p = _exp2(s * factor - offset[:, None])
    return p, highest, l * alpha + gl.sum(p, 1), alpha


@gluon.jit  # type: ignore[untyped-decorator]
def _scores(q, keys, full, slot, phase, layout: gl.constexpr):
    """Starts the product of the queries and the block of keys at this position."""
    ROWS: gl.constexpr = q.shape[0]
    KEYS: gl.constexpr = keys.shape[3]
    WIDTH: gl.constexpr = keys.shape[4]
    mbarrier.wait(full.index(slot), phase)
    k = keys.index(slot).reshape([KEYS, WIDTH])
    zeros = gl.zeros([ROWS, KEYS], gl.float32, layout)
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _weighted(p, values, full, slot, phase, acc):
    """Starts to add the weighted values at this position to acc."""
    KEYS: gl.constexpr = values.shape[3]
    WIDTH: gl.constexpr = values.shape[4]
    mbarrier.wait(full.index(slot), phase)
    v = values.index(slot).reshape([KEYS, WIDTH])
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _attend(
    q, ring, barriers, position, state, p, factor, first_row, first_key, skv, shift,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """One more block of keys, while the values of the block before are added up."""
    keys, values = ring
    k_full, k_empty, v_full, v_empty = barriers
    k_slot, k_phase, v_slot, v_phase = position
    acc, m, l = state
    s = _scores(q, keys, k_full, k_slot, k_phase, layout)
    acc = _weighted(p, values, v_full, v_slot, v_phase, acc)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_empty.index(k_slot))
    w, m, l, alpha = _softmax(s, m, l, factor, first_row, first_key, skv, shift, MASKED, CAUSAL)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    mbarrier.arrive(v_empty.index(v_slot))
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    next_p = gl.convert_layout(w.to(p.dtype), p.type.layout)
    k_slot, k_phase = _after(k_slot, k_phase, STAGES)
    v_slot, v_phase = _after(v_slot, v_phase, STAGES)
    return (k_slot, k_phase, v_slot, v_phase), (acc, m, l), next_p


@gluon.jit  # type: ignore[untyped-decorator]
def _consumer(
    out, lse_ptr, queries, ring, q_bars, barriers,
    sizes, factor, NUMBER: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The softmax and both products for ROWS queries of each tile."""
    ROWS: gl.constexpr = queries.shape[3]
    KEYS: gl.constexpr = ring[0].shape[3]
    WIDTH: gl.constexpr = queries.shape[4]
    dtype: gl.constexpr = queries.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    batch, heads, groups, sq, skv, shift, together = sizes
    q_full, q_empty = q_bars
    k_full, k_empty, v_full, v_empty = barriers
    keys, values = ring
    blocks = (sq + 2 * ROWS - 1) // (2 * ROWS)
    q_smem = queries.index(NUMBER).reshape([ROWS, WIDTH])
    k_slot = gl.to_tensor(0)
    k_phase = gl.to_tensor(0)
    v_slot = gl.to_tensor(0)
    v_phase = gl.to_tensor(0)
    q_phase = gl.to_tensor(0)
    for index in range(gl.program_id(0), blocks * heads * batch, gl.num_programs(0)):
        block, head, sequence = _tile(index, blocks, heads, batch, together)
        first_row = (2 * block + NUMBER) * ROWS
        count = _key_blocks((block + 1) * 2 * ROWS, skv, shift, CAUSAL, KEYS)
        # Blocks before this one are seen in full by every query here.
        bound = skv
        if CAUSAL:
            bound = gl.minimum(skv, first_row + shift + 1)
        whole = gl.minimum(gl.maximum(bound, 0) // KEYS, count - 1)

        mbarrier.wait(q_full.index(NUMBER), q_phase)
        s = _scores(q_smem, keys, k_full, k_slot, k_phase, s_layout)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(k_slot))
        k_slot, k_phase = _after(k_slot, k_phase, STAGES)
        m = gl.full([ROWS], float("-inf"), gl.float32, rows)
        l = gl.zeros([ROWS], gl.float32, rows)
        w, m, l, _ = _softmax(
            s, m, l, factor, first_row, (count - 1) * KEYS, skv, shift, True, CAUSAL
        )
        p = gl.convert_layout(w.to(dtype), p_layout)
        position = k_slot, k_phase, v_slot, v_phase
        state = gl.zeros([ROWS, WIDTH], gl.float32, acc_layout), m, l
        if CAUSAL:
            for back in range(whole, count - 1):
                key = (count - 2 - (back - whole)) * KEYS
                position, state, p = _attend(
                    q_smem, ring, barriers, position, state, p, factor, first_row, key,
                    skv, shift, True, CAUSAL, STAGES, s_layout,
                )  # fmt: skip
        else:
            whole = count - 1
        for _ in range(0, whole):
            position, state, p = _attend(
                q_smem, ring, barriers, position, state, p, factor, first_row, 0,
                skv, shift, False, CAUSAL, STAGES, s_layout,
            )  # fmt: skip
        k_slot, k_phase, v_slot, v_phase = position
        acc, m, l = state
        acc = _weighted(p, values, v_full, v_slot, v_phase, acc)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(v_empty.index(v_slot))
        v_slot, v_phase = _after(v_slot, v_phase, STAGES)

        share = gl.where(l > 0, 1 / l, 0.0)
        share = gl.convert_layout(share, gl.SliceLayout(1, acc_layout))
        q_smem.store((acc * share[:, None]).to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(
            out, [sequence, head, first_row, 0], queries.index(NUMBER)
        )
        lse = (m * factor + gl.log2(l)) * 0.6931471805599453
        row = first_row + gl.arange(0, ROWS, rows)
        at = lse_ptr + (sequence * heads + head).to(gl.int64) * sq + row
        gl.store(at, gl.where(l > 0, lse, float("-inf")), mask=row < sq)
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(NUMBER))
        q_phase ^= 1


@gluon.jit  # type: ignore[untyped-decorator]
def _load(source, at, tiles, full, empty, slot, phase):
    """Fills a slot of a ring once it is empty."""
    mbarrier.wait(empty.index(slot), phase ^ 1)
    mbarrier.expect(full.index(slot), source.block_type.nbytes)
    tma.async_copy_global_to_shared(source, at, full.index(slot), tiles.index(slot))


@gluon.jit  # type: ignore[untyped-decorator]
def _producer(
    q, k, v, queries, ring, q_bars, barriers, sizes, CAUSAL: gl.constexpr, STAGES: gl.constexpr
):
    """Loads what the consumers multiply, in the order in which they do."""
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
    for index in range(gl.program_id(0), blocks * heads * batch, gl.num_programs(0)):
        block, head, sequence = _tile(index, blocks, heads, batch, together)
        group = head // (heads // groups)
        row = 2 * block * ROWS
        count = _key_blocks(row + 2 * ROWS, skv, shift, CAUSAL, KEYS)
        at = (count - 1) * KEYS
        _load(k, [sequence, group, at, 0], keys, k_full, k_empty, k_slot, k_phase)
        k_slot, k_phase = _after(k_slot, k_phase, STAGES)
        for number in gl.static_range(2):
            here = [sequence, head, row + number * ROWS, 0]
            _load(q, here, queries, q_full, q_empty, number, q_phase)
        for _ in range(1, count):
            _load(k, [sequence, group, at - KEYS, 0], keys, k_full, k_empty, k_slot, k_phase)
            _load(v, [sequence, group, at, 0], values, v_full, v_empty, v_slot, v_phase)
            k_slot, k_phase = _after(k_slot, k_phase, STAGES)
            v_slot, v_phase = _after(v_slot, v_phase, STAGES)
            at -= KEYS
        _load(v, [sequence, group, at, 0], values, v_full, v_empty, v_slot, v_phase)
        v_slot, v_phase = _after(v_slot, v_phase, STAGES)
        q_phase ^= 1


@gluon.jit  # type: ignore[untyped-decorator]
def _barriers(SLOTS: gl.constexpr, READERS: gl.constexpr):
    """``(full, empty)`` of a ring whose tiles so many partitions read."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    return full, empty


@gluon.jit  # type: ignore[untyped-decorator]
def _source(ptr, batch, heads, length, strides, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Tiles of ROWS tokens of one head, in any format of dense features."""
    dtype: gl.constexpr = ptr.dtype.element_ty
    shape: gl.constexpr = [1, 1, ROWS, WIDTH]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, dtype)
    by_batch, by_head, by_token = strides
    return tma.make_tensor_descriptor(
        ptr, [batch, heads, length, WIDTH], [by_batch, by_head, by_token, 1], shape, layout
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _tiles(source, SLOTS: gl.constexpr):
    return gl.allocate_shared_memory(source.dtype, [SLOTS] + source.block_shape, source.layout)


@gluon.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "batch", "heads", "groups", "sq", "skv", "shift", "together", "scale",
        "q_batch", "q_head", "q_token", "k_batch", "k_head", "k_token",
        "v_batch", "v_head", "v_token", "o_batch", "o_head", "o_token",
    ]
)  # fmt: skip
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    batch: tl.int32, heads: tl.int32, groups: tl.int32, sq: tl.int32, skv: tl.int32,
    shift: tl.int32, together: tl.int32, scale: tl.float32,
    q_batch: tl.int64, q_head: tl.int64, q_token: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_token: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64,
    o_batch: tl.int64, o_head: tl.int64, o_token: tl.int64,
    CAUSAL: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, LOADER_REGISTERS: gl.constexpr, REGISTERS: gl.constexpr,
) -> None:  # fmt: skip
    q = _source(q_ptr, batch, heads, sq, (q_batch, q_head, q_token), ROWS, WIDTH)
    k = _source(k_ptr, batch, groups, skv, (k_batch, k_head, k_token), KEYS, WIDTH)
    v = _source(v_ptr, batch, groups, skv, (v_batch, v_head, v_token), KEYS, WIDTH)
    out = _source(out_ptr, batch, heads, sq, (o_batch, o_head, o_token), ROWS, WIDTH)
    queries = _tiles(q, 2)
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
            (_consumer, (out, lse_ptr, queries, ring, q_bars, barriers, sizes, factor,
                         0, CAUSAL, STAGES)),
            (_consumer, (out, lse_ptr, queries, ring, q_bars, barriers, sizes, factor,
                         1, CAUSAL, STAGES)),
            (_producer, (q, k, v, queries, ring, q_bars, barriers, sizes, CAUSAL, STAGES)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


# ------------------------------------------------------------------------------- choice

WIDTHS = (64, 128)
_MASKS = ("no_mask", "causal", "causal_bottom_right")
_L2 = 32 << 20  # bytes of keys and values that shall stay in the L2 cache
_ROWS = 64  # queries of a consumer: what a warpgroup multiplies at once


class Choice(NamedTuple):
    """How a forward is cut.

    Attributes:
        keys: of a block.
        stages: blocks of keys, and as many of values, in shared memory at a time.
        persistent: whether a program stays on its multiprocessor and takes several tiles.
    """

    keys: int
    stages: int
    persistent: bool = True


CHOICES = {64: Choice(128, 2), 128: Choice(128, 2)}


def serves(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
    qkv_format: str = "bshd",
    attn_mask_type: str = "no_mask",
    window_size_left: int = -1,
    window_size_right: int = -1,
    softmax_type: str = "vanilla",
    dropout_p: float = 0.0,
    **others: Any,
) -> bool:
    """Whether these kernels can do it; takes what the operator takes, checked."""
    causal = attn_mask_type != "no_mask"
    return (
        not _launch.INTERPRETED
        and _launch.limits(q.device).capability == 90
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] in WIDTHS
        and "b" in qkv_format
        and attn_mask_type in _MASKS
        and bias is None
        and softmax_type == "vanilla"
        and not dropout_p
        and window_size_left == -1
        and (causal or window_size_right == -1)
        and (scale is None or scale > 0)
        and all(tensor.numel() and _can_be_loaded(tensor) for tensor in (q, k, v))
    )


def _can_be_loaded(tensor: Tensor) -> bool:
    """Whether TMA can: dense features, and everything else in steps of 16 bytes."""
    unit = 16 // tensor.element_size()
    steps = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(size == 1 or (stride > 0 and stride % unit == 0) for size, stride in steps)
    )


def _steps(tensor: Tensor, qkv_format: str) -> tuple[int, ...]:
    """Strides of batch, head and token; of a dimension of one element, any that TMA takes."""
    axes = (qkv_format.index(axis) for axis in "bhs")
    return tuple(tensor.stride(it) if tensor.shape[it] > 1 else tensor.shape[-1] for it in axes)


@cache
def _forward_launch(
    device: torch.device, dtype: torch.dtype, width: int, causal: bool, choice: Choice
) -> _launch.Launch:
    return _launch.Launch(
        _forward,
        device,
        threads=128,
        CAUSAL=causal,
        WIDTH=width,
        ROWS=_ROWS,
        KEYS=choice.keys,
        STAGES=choice.stages,
        LOADER_REGISTERS=24,
        REGISTERS=240,
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    qkv_format: str = "bshd",
    attn_mask_type: str = "no_mask",
    choice: Choice | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out, softmax_lse)`` of what :func:`serves` accepted, as the contract has them."""
    width = q.shape[-1]
    choice = choice or CHOICES[width]
    batch, sq, heads = (q.shape[qkv_format.index(axis)] for axis in "bsh")
    skv, groups = (k.shape[qkv_format.index(axis)] for axis in "sh")
    out = fresh("fused_attn_fwd", q, q.shape)
    lse = fresh("fused_attn_fwd", q, (batch, heads, sq), torch.float32)
    tiles = -(-sq // (2 * _ROWS)) * heads * batch
    programs = min(tiles, _launch.limits(q.device).multiprocessors) if choice.persistent else tiles
    # Heads of one group share their keys and values.
    kept = max(1, _L2 // (2 * skv * width * k.element_size()))
    together = min(batch * heads, kept * (heads // groups))
    causal = attn_mask_type != "no_mask"
    _forward_launch(q.device, q.dtype, width, causal, choice)(
        (programs, 1),
        (q, k, v, out, lse),
        (
            *(batch, heads, groups, sq, skv),
            skv - sq if attn_mask_type == "causal_bottom_right" else 0,
            together,
            width**-0.5 if scale is None else scale,
            *(step for tensor in (q, k, v, out) for step in _steps(tensor, qkv_format)),
        ),
    )
    return out, lse
