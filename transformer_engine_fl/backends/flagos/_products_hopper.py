"""Large matrix products on Hopper: warp-specialised kernels.

One warp issues the loads of the operands' tiles by the tensor memory accelerator (TMA); two or
three warp groups multiply them. Each has 64 of a tile's rows and its own progress, so that one of
them adds float8's sums, or finishes a tile, while the others keep the tensor cores busy. Triton's
own pipelining gives all warps the same work, so these kernels are written in Gluon, which can
specialise warps.

Accumulating into a large float32 D moves so much data that it takes a good part of the time of
multiplying. D is loaded and stored by TMA too, through the operands' shared memory: after a tile's
last step the loading warp issues four more steps, each with a quarter of D's columns.

The numbers of a launch are explained in ``_products``, and so is how scales are applied. Terms are
added in the same order as there: the bits are the same. ``gemm`` decides which products are made
here; those with a GELU's gradient or with scales of single columns are not.
"""

from __future__ import annotations

from typing import Any

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

from transformer_engine_fl.backends.flagos._products import _NUMBERS_OF_PRODUCT, _added, _place
from transformer_engine_fl.backends.flagos.activation import _value_and_slope

__all__ = ["grouped_product", "product"]

_VECTOR = 16  # bytes that a thread stores at a time
_HEIGHT = gl.constexpr(64)  # rows of a tile that one warp group multiplies


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def _box(outer: Any, terms: Any, k_major: Any) -> Any:
    return [outer, terms] if k_major else [terms, outer]


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def _boxes(count: Any, outer: Any, terms: Any, k_major: Any) -> Any:
    return [count, outer, terms] if k_major else [count, terms, outer]


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def _shared_layout(outer: Any, terms: Any, k_major: Any, dtype: Any) -> Any:
    return gl.NVMMASharedLayout.get_default_for(_box(outer, terms, k_major), dtype)


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def _sum_layout(columns: Any, dtype: Any) -> Any:
    return gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[4, 1],
        instr_shape=[16, columns, 256 // dtype.primitive_bitwidth],
    )


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def _stored_layout(columns: Any, dtype: Any) -> Any:
    vector = _VECTOR * 8 // dtype.primitive_bitwidth
    across = min(32, columns // vector)
    return gl.BlockedLayout([1, vector], [32 // across, across], [4, 1], [1, 0])


@gluon.jit  # type: ignore[untyped-decorator]
def _described(
    ptr: gl.tensor,
    outer: gl.tensor,
    k: gl.tensor,
    stride: gl.tensor,
    K_MAJOR: gl.constexpr,
    OUTER: gl.constexpr,
    TERMS: gl.constexpr,
) -> gl.tensor:
    """A descriptor of an operand, for boxes of OUTER by TERMS."""
    shape = (outer, k) if K_MAJOR else (k, outer)
    return tma.make_tensor_descriptor(
        ptr, shape, [stride, 1], _box(OUTER, TERMS, K_MAJOR),
        _shared_layout(OUTER, TERMS, K_MAJOR, ptr.dtype.element_ty),
    )  # fmt: skip


@gluon.jit  # type: ignore[untyped-decorator]
def _copy(
    described: gl.tensor,
    start: gl.tensor,
    term: gl.tensor,
    ready: gl.tensor,
    shared: gl.tensor,
    there: gl.tensor,
    K_MAJOR: gl.constexpr,
) -> None:
    at = (start, term) if K_MAJOR else (term, start)
    tma.async_copy_global_to_shared(described, at, ready, shared, pred=there)


@gluon.jit  # type: ignore[untyped-decorator]
def _group_of(
    table_ptr: gl.tensor, tile: gl.tensor, GROUPS: gl.constexpr, WARPS: gl.constexpr
) -> gl.tensor:
    """The last group that begins at or before a tile."""
    EACH: gl.constexpr = (GROUPS + 31) // 32
    layout: gl.constexpr = gl.BlockedLayout([EACH], [32], [WARPS], [0])
    firsts = gl.load(table_ptr + gl.arange(0, GROUPS, layout))
    return gl.sum((firsts <= tile).to(gl.int32), axis=0) - 1


# ------------------------------------------------------------------------------- loading


@gluon.jit  # type: ignore[untyped-decorator]
def _load_terms(
    a: gl.tensor, b: gl.tensor, row: gl.tensor, column: gl.tensor, m: gl.tensor, k: gl.tensor,
    done: gl.tensor,
    a_shared: gl.tensor, b_shared: gl.tensor, ready: gl.tensor, free: gl.tensor,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, TERMS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Issue the loads of one tile's operands; returns the number of steps issued so far.

    Nothing is loaded for a warp group whose rows are all below D: a TMA load beyond a tensor's end
    moves no data, but takes longer than others. What is in shared memory instead has no effect on
    other rows.
    """
    WARP_GROUPS: gl.constexpr = ROWS // _HEIGHT
    WIDTH: gl.constexpr = COLUMNS // PARTS
    BYTES_OF_TERM: gl.constexpr = TERMS * (a.dtype.primitive_bitwidth // 8)
    LEAST: gl.constexpr = _HEIGHT + COLUMNS
    left = m - row
    for step in range(gl.cdiv(k, TERMS)):
        stage = done % STAGES
        barrier = ready.index(stage)
        mbarrier.wait(free.index(stage), (done // STAGES & 1) ^ 1)
        for which in gl.static_range(WARP_GROUPS):
            last = left > which * _HEIGHT
            if which + 1 < WARP_GROUPS:
                last = last & (left <= (which + 1) * _HEIGHT)
            mbarrier.expect(barrier, (which * _HEIGHT + LEAST) * BYTES_OF_TERM, pred=last)
        for which in gl.static_range(WARP_GROUPS):
            it = b_shared.index(stage * WARP_GROUPS + which)
            start = row + which * _HEIGHT
            _copy(b, start, step * TERMS, barrier, it, left > which * _HEIGHT, B_K_MAJOR)
        for part in gl.static_range(PARTS):
            it = a_shared.index(stage * PARTS + part)
            _copy(a, column + part * WIDTH, step * TERMS, barrier, it, True, A_K_MAJOR)
        done += 1
    return done


@gluon.jit  # type: ignore[untyped-decorator]
def _staged(a_shared: gl.tensor, stage: gl.tensor, COLUMNS: gl.constexpr) -> gl.tensor:
    """A step's tile of a as two buffers, each for a quarter of the columns of a warp group."""
    QUARTER: gl.constexpr = COLUMNS // 4
    layout: gl.constexpr = _shared_layout(_HEIGHT, QUARTER, True, gl.float32)
    return a_shared.index(stage)._reinterpret(gl.float32, [2, _HEIGHT, QUARTER], layout)


@gluon.jit  # type: ignore[untyped-decorator]
def _load_staged(
    d: gl.tensor, row: gl.tensor, column: gl.tensor, done: gl.tensor,
    a_shared: gl.tensor, ready: gl.tensor, free: gl.tensor,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Issue the loads of a tile of D, as four steps after those of its operands."""
    QUARTER: gl.constexpr = COLUMNS // 4
    for quarter in gl.static_range(4):
        stage = done % STAGES
        barrier = ready.index(stage)
        mbarrier.wait(free.index(stage), (done // STAGES & 1) ^ 1)
        mbarrier.expect(barrier, 2 * _HEIGHT * QUARTER * 4)
        both = _staged(a_shared, stage, COLUMNS)
        for which in gl.static_range(2):
            at = [row + which * _HEIGHT, column + quarter * QUARTER]
            tma.async_copy_global_to_shared(d, at, barrier, both.index(which))
        done += 1
    return done


@gluon.jit  # type: ignore[untyped-decorator]
def _load_group(
    a_ptr: gl.tensor, b_ptr: gl.tensor, table_ptr: gl.tensor, tile: gl.tensor, n: gl.tensor,
    done: gl.tensor, last: gl.tensor,
    a_shared: gl.tensor, b_shared: gl.tensor, ready: gl.tensor, free: gl.tensor,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, UNIT: gl.constexpr,
    UNIT_M: gl.constexpr, UNIT_K: gl.constexpr, SUPER: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, TERMS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Issue the loads of one tile of a group, with descriptors of its own.

    The descriptors reuse the memory of an earlier tile's, after which ``last`` steps had been
    issued: none of the loads by those descriptors may still be in flight.
    """
    group = _group_of(table_ptr, tile, GROUPS, 1)
    field = table_ptr + group
    first = gl.load(field).to(gl.int32)
    m = gl.load(field + GROUPS).to(gl.int32) * UNIT_M
    k = gl.load(field + 2 * GROUPS).to(gl.int32) * UNIT_K
    a_start = a_ptr + gl.load(field + 3 * GROUPS) * UNIT
    a_stride = gl.load(field + 4 * GROUPS) * UNIT
    b_start = b_ptr + gl.load(field + 9 * GROUPS) * UNIT
    b_stride = gl.load(field + 10 * GROUPS) * UNIT
    before = gl.maximum(last - 1, 0)
    mbarrier.wait(
        free.index(before % STAGES),
        before // STAGES & 1,
        pred=(last > 0) & (done <= before + STAGES),
    )
    some = gl.maximum(k, 1)  # a descriptor must not be empty; nothing is read by it
    a = _described(a_start, n, some, a_stride, A_K_MAJOR, COLUMNS // PARTS, TERMS)
    b = _described(b_start, m, some, b_stride, B_K_MAJOR, _HEIGHT, TERMS)
    row, column = _place(tile - first, gl.cdiv(m, ROWS), gl.cdiv(n, COLUMNS), SUPER)
    return _load_terms(
        a, b, row * ROWS, column * COLUMNS, m, k, done, a_shared, b_shared, ready, free,
        A_K_MAJOR, B_K_MAJOR, ROWS, COLUMNS, TERMS, PARTS, STAGES,
    )  # fmt: skip


@gluon.jit  # type: ignore[untyped-decorator]
def _load_all(
    tensors: gl.tensor, numbers: gl.tensor, shared: gl.tensor,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, UNIT: gl.constexpr,
    UNIT_M: gl.constexpr, UNIT_K: gl.constexpr, SUPER: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, TERMS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
) -> None:  # fmt: skip
    """The work of the loading warp."""
    a, b, table_ptr, d_described = tensors
    tiles, m, n, k = numbers
    a_shared, b_shared, ready, free = shared
    programs = gl.num_programs(0)
    done = gl.to_tensor(0)
    if GROUPS == 0:
        down = gl.cdiv(m, ROWS)
        across = gl.cdiv(n, COLUMNS)
        for tile in range(gl.program_id(0), tiles, programs):
            row, column = _place(tile, down, across, SUPER)
            done = _load_terms(
                a, b, row * ROWS, column * COLUMNS, m, k, done, a_shared, b_shared, ready, free,
                A_K_MAJOR, B_K_MAJOR, ROWS, COLUMNS, TERMS, PARTS, STAGES,
            )  # fmt: skip
            if d_described is not None:
                done = _load_staged(
                    d_described, row * ROWS, column * COLUMNS, done, a_shared, ready, free,
                    COLUMNS, STAGES,
                )  # fmt: skip
    else:
        # Two sets of descriptors, so that there is no need to wait for the previous tile.
        even = gl.to_tensor(0)
        odd = gl.to_tensor(0)
        for tile in range(gl.program_id(0), tiles, 2 * programs):
            done = _load_group(
                a, b, table_ptr, tile, n, done, even, a_shared, b_shared, ready, free,
                A_K_MAJOR, B_K_MAJOR, UNIT, UNIT_M, UNIT_K, SUPER, ROWS, COLUMNS, TERMS,
                PARTS, STAGES, GROUPS,
            )  # fmt: skip
            even = done
            if tile + programs < tiles:
                done = _load_group(
                    a, b, table_ptr, tile + programs, n, done, odd,
                    a_shared, b_shared, ready, free,
                    A_K_MAJOR, B_K_MAJOR, UNIT, UNIT_M, UNIT_K, SUPER, ROWS, COLUMNS, TERMS,
                    PARTS, STAGES, GROUPS,
                )  # fmt: skip
                odd = done


# --------------------------------------------------------------------------- multiplying


@gluon.jit  # type: ignore[untyped-decorator]
def _tile_of(shared: gl.tensor, place: gl.tensor, K_MAJOR: gl.constexpr) -> gl.tensor:
    """A tile in shared memory as [outer, terms]."""
    it = shared.index(place)
    return it if K_MAJOR else it.permute((1, 0))


@gluon.jit  # type: ignore[untyped-decorator]
def _sum(
    k: gl.tensor, done: gl.tensor, shared: gl.tensor,
    WHICH: gl.constexpr, A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr,
    COLUMNS: gl.constexpr, TERMS: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """A warp group's sums, accumulated in the tensor cores, and the count of steps so far."""
    a_shared, b_shared, ready, free = shared
    WARP_GROUPS: gl.constexpr = b_shared.shape[0] // STAGES
    total = gl.zeros((_HEIGHT, COLUMNS), gl.float32, LAYOUT)
    for step in range(gl.cdiv(k, TERMS)):
        stage = done % STAGES
        mbarrier.wait(ready.index(stage), done // STAGES & 1)
        b = _tile_of(b_shared, stage * WARP_GROUPS + WHICH, B_K_MAJOR)
        a = _tile_of(a_shared, stage, A_K_MAJOR).permute((1, 0))
        total = warpgroup_mma(b, a, total, is_async=True)
        total = warpgroup_mma_wait(1, deps=(total,))
        before = gl.maximum(done - 1, 0) % STAGES
        mbarrier.arrive(free.index(before), pred=step > 0)
        done += 1
    total = warpgroup_mma_wait(0, deps=(total,))
    mbarrier.arrive(free.index(gl.maximum(done - 1, 0) % STAGES), pred=k > 0)
    return total, done


@gluon.jit  # type: ignore[untyped-decorator]
def _scaled_sum(
    a: gl.tensor, b: gl.tensor, a_scale: gl.tensor, b_scale: gl.tensor, total: gl.tensor,
) -> gl.tensor:  # fmt: skip
    """``total`` plus the product of two tiles of float8, which is scaled in float32."""
    nothing = gl.zeros_like(total)
    part = warpgroup_mma(b, a.permute((1, 0)), nothing, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=(part,))
    if b_scale is not None:
        part *= b_scale[:, None]
    if a_scale is not None:
        part *= a_scale
    return total + part


@gluon.jit  # type: ignore[untyped-decorator]
def _sum_of_steps(
    m: gl.tensor, n: gl.tensor, k: gl.tensor, row: gl.tensor, column: gl.tensor,
    done: gl.tensor, shared: gl.tensor, scales: gl.tensor,
    WHICH: gl.constexpr, A_SCALES: gl.constexpr, A_HEIGHT: gl.constexpr,
    B_SCALES: gl.constexpr, B_HEIGHT: gl.constexpr, PARTS: gl.constexpr,
    COLUMNS: gl.constexpr, TERMS: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """The same for float8, whose steps are added in float32; the columns are in one part or two.

    The sum of a step takes registers for only one part at a time. A part has one scale of a.
    """
    a_shared, b_shared, ready, free = shared
    WARP_GROUPS: gl.constexpr = b_shared.shape[0] // STAGES
    a_scale, a_down, a_along, b_scale, b_first, b_down, b_along = scales
    left = gl.zeros((_HEIGHT, COLUMNS // PARTS), gl.float32, LAYOUT)
    right = left
    # Beyond the last row or column any scale will do; positions are kept in few registers.
    if A_SCALES == "steps":
        block = column // A_HEIGHT
        next_block = gl.minimum((column + COLUMNS // PARTS) // A_HEIGHT, (n - 1) // A_HEIGHT)
        next_scale = (next_block - block).to(gl.int64) * a_down
        a_scale += block.to(gl.int64) * a_down
    if B_SCALES == "steps":
        start = b_first + gl.minimum(row, m - 1)
        r = gl.arange(0, _HEIGHT, gl.SliceLayout(1, LAYOUT))
        r = gl.minimum(r, gl.maximum(m - 1 - row, 0))
        r = ((start % B_HEIGHT).to(gl.int32) + r) // B_HEIGHT * b_down.to(gl.int32)
        b_scale += start // B_HEIGHT * b_down
    for _ in range(gl.cdiv(k, TERMS)):
        stage = done % STAGES
        # The scales are loaded while the tiles are waited for and multiplied.
        of_rows = None
        of_left = None
        of_right = None
        if B_SCALES == "steps":
            of_rows = gl.load(b_scale + r)
            b_scale += b_along
        if A_SCALES == "steps":
            of_left = gl.load(a_scale)
            if PARTS == 2:
                of_right = gl.load(a_scale + next_scale)
            a_scale += a_along
        mbarrier.wait(ready.index(stage), done // STAGES & 1)
        b = b_shared.index(stage * WARP_GROUPS + WHICH)
        left = _scaled_sum(a_shared.index(stage * PARTS), b, of_left, of_rows, left)
        if PARTS == 2:
            right = _scaled_sum(a_shared.index(stage * 2 + 1), b, of_right, of_rows, right)
        mbarrier.arrive(free.index(stage))
        done += 1
    return left, right, done


@gluon.jit  # type: ignore[untyped-decorator]
def _store(
    ptr: gl.tensor, z: gl.tensor, row: gl.tensor, column: gl.tensor,
    m: gl.tensor, n: gl.tensor, stride: gl.tensor, LAYOUT: gl.constexpr,
) -> None:  # fmt: skip
    """Store a warp group's part of a tile, by vectors."""
    it = z.to(ptr.dtype.element_ty)
    # For float32, four threads already hold a whole sector side by side.
    wide: gl.constexpr = it.dtype.primitive_bitwidth == 32
    stored: gl.constexpr = LAYOUT if wide else _stored_layout(z.shape[1], it.dtype)
    r = row + gl.arange(0, z.shape[0], gl.SliceLayout(1, stored))[:, None]
    c = column + gl.arange(0, z.shape[1], gl.SliceLayout(0, stored))[None, :]
    it = gl.convert_layout(it, stored)
    gl.store(ptr + r.to(gl.int64) * stride + c, it, mask=(r < m) & (c < n))


@gluon.jit  # type: ignore[untyped-decorator]
def _finish(
    z: gl.tensor, row: gl.tensor, column: gl.tensor,
    d_ptr: gl.tensor, pre_ptr: gl.tensor, bias_ptr: gl.tensor,
    m: gl.tensor, n: gl.tensor, d_stride: gl.tensor, alpha: gl.tensor, beta: gl.tensor,
    GELU: gl.constexpr, ACCUMULATE: gl.constexpr, PTX: gl.constexpr, LAYOUT: gl.constexpr,
) -> None:  # fmt: skip
    """Apply the epilogue to some sums and store the results."""
    r = row + gl.arange(0, z.shape[0], gl.SliceLayout(1, LAYOUT))
    c = column + gl.arange(0, z.shape[1], gl.SliceLayout(0, LAYOUT))
    z = _added(z, r, c, d_ptr, bias_ptr, m, n, d_stride, alpha, beta, ACCUMULATE)
    if GELU:
        _store(pre_ptr, z, row, column, m, n, n, LAYOUT)
        z, _ = _value_and_slope(z, z, "gelu", PTX)
    _store(d_ptr, z, row, column, m, n, d_stride, LAYOUT)


@gluon.jit  # type: ignore[untyped-decorator]
def _halves(z: gl.tensor, LAYOUT: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    """The left and the right half of the columns; no value moves between threads."""
    ROWS: gl.constexpr = z.shape[0]
    HALF: gl.constexpr = z.shape[1] // 2
    left, right = gl.split(gl.permute(gl.reshape(z, (ROWS, 2, HALF)), (0, 2, 1)))
    return gl.convert_layout(left, LAYOUT), gl.convert_layout(right, LAYOUT)


@gluon.jit  # type: ignore[untyped-decorator]
def _finish_staged(
    z: gl.tensor, row: gl.tensor, column: gl.tensor, d: gl.tensor,
    alpha: gl.tensor, beta: gl.tensor, done: gl.tensor, shared: gl.tensor,
    WHICH: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Add sums to the tile of D that ``_load_staged`` loads, and store it from the same memory.

    That memory is free for operands once the store has read it; this is waited for a quarter later.
    """
    a_shared, _, ready, free = shared
    HALF: gl.constexpr = _sum_layout(COLUMNS // 2, DTYPE)
    QUARTER: gl.constexpr = _sum_layout(COLUMNS // 4, DTYPE)
    left, right = _halves(z, HALF)
    first, second = _halves(left, QUARTER)
    third, fourth = _halves(right, QUARTER)
    quarters = (first, second, third, fourth)
    for quarter in gl.static_range(4):
        stage = done % STAGES
        mbarrier.wait(ready.index(stage), done // STAGES & 1)
        it = _staged(a_shared, stage, COLUMNS).index(WHICH)
        sums = quarters[quarter] * alpha
        sums += beta * it.load(QUARTER)
        it.store(sums)
        fence_async_shared()
        tma.async_copy_shared_to_global(d, [row, column + quarter * (COLUMNS // 4)], it)
        if quarter > 0:
            tma.store_wait(1)
            mbarrier.arrive(free.index((done - 1) % STAGES))
        done += 1
    tma.store_wait(0)
    mbarrier.arrive(free.index((done - 1) % STAGES))
    return done


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply_all(
    tensors: gl.tensor, numbers: gl.tensor, scales: gl.tensor, shared: gl.tensor,
    WHICH: gl.constexpr, A_K_MAJOR: gl.constexpr, A_SCALES: gl.constexpr,
    A_HEIGHT: gl.constexpr, B_K_MAJOR: gl.constexpr, B_SCALES: gl.constexpr,
    B_HEIGHT: gl.constexpr, STEPWISE: gl.constexpr, GELU: gl.constexpr,
    ACCUMULATE: gl.constexpr, PTX: gl.constexpr, UNIT_M: gl.constexpr,
    UNIT_N: gl.constexpr, UNIT_K: gl.constexpr, SUPER: gl.constexpr,
    PARTS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TERMS: gl.constexpr,
    STAGES: gl.constexpr, GROUPS: gl.constexpr, DTYPE: gl.constexpr,
) -> None:  # fmt: skip
    """The work of a multiplying warp group."""
    d_ptr, pre_ptr, bias_ptr, table_ptr, d_described = tensors
    tiles, m, n, k, d_stride, alpha, beta = numbers
    a_scale_ptr, a_down, a_along, b_scale_ptr, b_first, b_down, b_along = scales
    LAYOUT: gl.constexpr = _sum_layout(COLUMNS // PARTS, DTYPE)
    done = gl.to_tensor(0)
    across = gl.cdiv(n, COLUMNS)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        inside = tile
        d = d_ptr
        pre = pre_ptr
        bias = bias_ptr
        a_scale = a_scale_ptr
        b_scale = b_scale_ptr
        if GROUPS > 0:
            group = _group_of(table_ptr, tile, GROUPS, 4)
            field = table_ptr + group
            inside = tile - gl.load(field).to(gl.int32)
            m = gl.load(field + GROUPS).to(gl.int32) * UNIT_M
            k = gl.load(field + 2 * GROUPS).to(gl.int32) * UNIT_K
            d += gl.load(field + 15 * GROUPS) * UNIT_N
            d_stride = gl.load(field + 16 * GROUPS) * UNIT_N
            if pre_ptr is not None:
                pre += gl.load(field + 17 * GROUPS) * n
            if bias_ptr is not None:
                bias += group.to(gl.int64) * n
            if A_SCALES != "none":
                a_scale += gl.load(field + 6 * GROUPS)
                a_down = gl.load(field + 7 * GROUPS)
                a_along = gl.load(field + 8 * GROUPS)
            if B_SCALES != "none":
                b_first = gl.load(field + 11 * GROUPS)
                b_scale += gl.load(field + 12 * GROUPS)
                b_down = gl.load(field + 13 * GROUPS)
                b_along = gl.load(field + 14 * GROUPS)
        factor = alpha
        if A_SCALES == "whole":
            factor *= gl.load(a_scale)
        if B_SCALES == "whole":
            factor *= gl.load(b_scale)
        row, column = _place(inside, gl.cdiv(m, ROWS), across, SUPER)
        row = row * ROWS + WHICH * _HEIGHT
        column = column * COLUMNS
        if STEPWISE:
            z, right, done = _sum_of_steps(
                m, n, k, row, column, done, shared,
                (a_scale, a_down, a_along, b_scale, b_first, b_down, b_along),
                WHICH, A_SCALES, A_HEIGHT, B_SCALES, B_HEIGHT, PARTS, COLUMNS, TERMS, STAGES,
                LAYOUT,
            )  # fmt: skip
        else:
            z, done = _sum(
                k, done, shared, WHICH, A_K_MAJOR, B_K_MAJOR, COLUMNS, TERMS, STAGES, LAYOUT
            )
        if d_described is not None:
            done = _finish_staged(
                z, row, column, d_described, factor, beta, done, shared,
                WHICH, COLUMNS, STAGES, DTYPE,
            )  # fmt: skip
        else:
            _finish(
                z, row, column, d, pre, bias, m, n, d_stride, factor, beta,
                GELU, ACCUMULATE, PTX, LAYOUT,
            )  # fmt: skip
        if PARTS == 2:
            _finish(
                right, row, column + COLUMNS // 2, d, pre, bias, m, n, d_stride, factor, beta,
                GELU, ACCUMULATE, PTX, LAYOUT,
            )  # fmt: skip


@gluon.jit  # type: ignore[untyped-decorator]
def _ring(
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, TERMS: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """The operands' tiles in shared memory, and barriers for stages that are ready, or free."""
    WIDTH: gl.constexpr = COLUMNS // PARTS
    WARP_GROUPS: gl.constexpr = ROWS // _HEIGHT
    a_shared = gl.allocate_shared_memory(
        DTYPE,
        _boxes(STAGES * PARTS, WIDTH, TERMS, A_K_MAJOR),
        _shared_layout(WIDTH, TERMS, A_K_MAJOR, DTYPE),
    )
    b_shared = gl.allocate_shared_memory(
        DTYPE,
        _boxes(STAGES * WARP_GROUPS, _HEIGHT, TERMS, B_K_MAJOR),
        _shared_layout(_HEIGHT, TERMS, B_K_MAJOR, DTYPE),
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=WARP_GROUPS)
    fence_async_shared()  # TMA must see the initialised barriers
    return a_shared, b_shared, ready, free


@gluon.jit  # type: ignore[untyped-decorator]
def _start(
    a: gl.tensor, b: gl.tensor, tensors: gl.tensor, numbers: gl.tensor, scales: gl.tensor,
    A_K_MAJOR: gl.constexpr, A_SCALES: gl.constexpr, A_HEIGHT: gl.constexpr,
    B_K_MAJOR: gl.constexpr, B_SCALES: gl.constexpr, B_HEIGHT: gl.constexpr,
    STEPWISE: gl.constexpr, GELU: gl.constexpr, ACCUMULATE: gl.constexpr,
    PTX: gl.constexpr, UNIT: gl.constexpr,
    UNIT_M: gl.constexpr, UNIT_N: gl.constexpr, UNIT_K: gl.constexpr, SUPER: gl.constexpr,
    PARTS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TERMS: gl.constexpr,
    STAGES: gl.constexpr, MULTIPLYING: gl.constexpr, LOADING: gl.constexpr,
    GROUPS: gl.constexpr, DTYPE: gl.constexpr,
) -> None:  # fmt: skip
    """Start the specialised warps. ``a`` and ``b`` are descriptors, or pointers if GROUPS > 0."""
    shared = _ring(A_K_MAJOR, B_K_MAJOR, PARTS, ROWS, COLUMNS, TERMS, STAGES, DTYPE)
    tiles, m, n, k, _, _, _ = numbers
    WARP_GROUPS: gl.constexpr = ROWS // _HEIGHT
    gl.warp_specialize(
        [
            (_multiply_all, (
                tensors, numbers, scales, shared, which, A_K_MAJOR, A_SCALES, A_HEIGHT, B_K_MAJOR,
                B_SCALES, B_HEIGHT, STEPWISE, GELU, ACCUMULATE, PTX, UNIT_M, UNIT_N, UNIT_K, SUPER,
                PARTS, ROWS, COLUMNS, TERMS, STAGES, GROUPS, DTYPE,
            )) if which < WARP_GROUPS else (_load_all, (
                (a, b, tensors[3], tensors[4]), (tiles, m, n, k), shared, A_K_MAJOR, B_K_MAJOR,
                UNIT, UNIT_M, UNIT_K, SUPER, ROWS, COLUMNS, TERMS, PARTS, STAGES, GROUPS,
            ))
            for which in ((0, 1, 2) if WARP_GROUPS == 2 else (0, 1, 2, 3))
        ],
        [4, 1] if WARP_GROUPS == 2 else [4, 4, 1],
        [MULTIPLYING, LOADING] if WARP_GROUPS == 2 else [MULTIPLYING, MULTIPLYING, LOADING],
    )  # fmt: skip


@gluon.jit(do_not_specialize=_NUMBERS_OF_PRODUCT)  # type: ignore[untyped-decorator]
def product(
    a_ptr: gl.tensor,
    a_scale_ptr: gl.tensor,
    b_ptr: gl.tensor,
    b_scale_ptr: gl.tensor,
    d_ptr: gl.tensor,
    pre_ptr: gl.tensor,
    gelu_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    m: tl.int32,
    n: tl.int32,
    k: tl.int32,
    a_stride: tl.int64,
    b_stride: tl.int64,
    d_stride: tl.int64,
    a_scale_row: tl.int64,
    a_scale_column: tl.int64,
    b_scale_row: tl.int64,
    b_scale_column: tl.int64,
    alpha: tl.float32,
    beta: tl.float32,
    A_K_MAJOR: gl.constexpr,
    A_SCALES: gl.constexpr,
    A_HEIGHT: gl.constexpr,
    B_K_MAJOR: gl.constexpr,
    B_SCALES: gl.constexpr,
    B_HEIGHT: gl.constexpr,
    STEPWISE: gl.constexpr,
    GELU: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    PTX: gl.constexpr,
    UNIT: gl.constexpr,
    UNIT_M: gl.constexpr,
    UNIT_N: gl.constexpr,
    UNIT_K: gl.constexpr,
    SUPER: gl.constexpr,
    PARTS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    TERMS: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLYING: gl.constexpr,
    LOADING: gl.constexpr,
    STAGED: gl.constexpr,
) -> None:
    """``product`` of ``_products``.

    STAGED: D is float32, is added to sums of 16-bit terms, and can be loaded by TMA; there are two
    warp groups, since a stage has no room for more.
    """
    m = m * UNIT_M
    n = n * UNIT_N
    k = k * UNIT_K
    a = _described(a_ptr, n, k, a_stride * UNIT, A_K_MAJOR, COLUMNS // PARTS, TERMS)
    b = _described(b_ptr, m, k, b_stride * UNIT, B_K_MAJOR, _HEIGHT, TERMS)
    d_stride = d_stride * UNIT_N
    tiles = gl.cdiv(m, ROWS) * gl.cdiv(n, COLUMNS)
    zero = gl.to_tensor(0).to(gl.int64)
    _start(
        a, b,
        (
            d_ptr, pre_ptr, bias_ptr, None,
            _described(d_ptr, m, n, d_stride, True, _HEIGHT, COLUMNS // 4) if STAGED else None,
        ),
        (tiles, m, n, k, d_stride, alpha, beta),
        (
            a_scale_ptr, a_scale_row, a_scale_column,
            b_scale_ptr, zero, b_scale_row, b_scale_column,
        ),
        A_K_MAJOR, A_SCALES, A_HEIGHT, B_K_MAJOR, B_SCALES, B_HEIGHT, STEPWISE, GELU,
        ACCUMULATE, PTX, UNIT, UNIT_M, UNIT_N, UNIT_K, SUPER, PARTS, ROWS, COLUMNS, TERMS, STAGES,
        MULTIPLYING, LOADING, 0, a_ptr.dtype.element_ty,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["tiles", "n", "alpha", "beta"])  # type: ignore[untyped-decorator]
def grouped_product(
    a_ptr: gl.tensor,
    a_scale_ptr: gl.tensor,
    b_ptr: gl.tensor,
    b_scale_ptr: gl.tensor,
    d_ptr: gl.tensor,
    pre_ptr: gl.tensor,
    gelu_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    table_ptr: gl.tensor,
    tiles: tl.int32,
    n: tl.int32,
    alpha: tl.float32,
    beta: tl.float32,
    A_K_MAJOR: gl.constexpr,
    A_SCALES: gl.constexpr,
    A_HEIGHT: gl.constexpr,
    B_K_MAJOR: gl.constexpr,
    B_SCALES: gl.constexpr,
    B_HEIGHT: gl.constexpr,
    STEPWISE: gl.constexpr,
    GELU: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    PTX: gl.constexpr,
    UNIT: gl.constexpr,
    UNIT_M: gl.constexpr,
    UNIT_N: gl.constexpr,
    UNIT_K: gl.constexpr,
    SUPER: gl.constexpr,
    PARTS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    TERMS: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLYING: gl.constexpr,
    LOADING: gl.constexpr,
    GROUPS: gl.constexpr,
) -> None:
    """``grouped_product`` of ``_products``; its table is described there."""
    n = n * UNIT_N
    zero = gl.to_tensor(0).to(gl.int64)  # the table has the number
    _start(
        a_ptr, b_ptr,
        (d_ptr, pre_ptr, bias_ptr, table_ptr, None),
        (tiles, n, n, n, zero, alpha, beta),
        (a_scale_ptr, zero, zero, b_scale_ptr, zero, zero, zero),
        A_K_MAJOR, A_SCALES, A_HEIGHT, B_K_MAJOR, B_SCALES, B_HEIGHT, STEPWISE, GELU,
        ACCUMULATE, PTX, UNIT, UNIT_M, UNIT_N, UNIT_K, SUPER, PARTS, ROWS, COLUMNS, TERMS, STAGES,
        MULTIPLYING, LOADING, GROUPS, a_ptr.dtype.element_ty,
    )  # fmt: skip
