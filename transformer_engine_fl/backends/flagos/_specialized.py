"""Matrix products of warps that do different work, for compute capability 9.

One warp asks for the operands' tiles, two groups of four multiply them; each of the two has
half of a tile's rows and goes its own way. So one of them adds up float8's sums, or finishes
a tile, while the other one keeps the tensor cores busy, which warps that all do the same
cannot. Written in Gluon, in which layouts and barriers are the kernel's own business.

What the numbers of a launch mean is in ``_products``, of which the epilogue and the scales
are too. Terms are added in the same order as there.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from transformer_engine_fl.backends.flagos._products import _NUMBERS_OF_PRODUCT, _finished, _place

__all__ = ["specialized_grouped_product", "specialized_product"]

_VECTOR = 16  # bytes that a thread stores at a time


@gluon.constexpr_function
def _box(outer: Any, terms: Any, k_major: Any) -> Any:
    return [outer, terms] if k_major else [terms, outer]


@gluon.constexpr_function
def _shared_layout(outer: Any, terms: Any, k_major: Any, dtype: Any) -> Any:
    return gl.NVMMASharedLayout.get_default_for(_box(outer, terms, k_major), dtype)


@gluon.constexpr_function
def _sum_layout(columns: Any, dtype: Any) -> Any:
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 256 // dtype.primitive_bitwidth]
    )


@gluon.constexpr_function
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
    K_MAJOR: gl.constexpr,
) -> None:
    if K_MAJOR:
        tma.async_copy_global_to_shared(described, [start, term], ready, shared)
    else:
        tma.async_copy_global_to_shared(described, [term, start], ready, shared)


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
    a: gl.tensor, b: gl.tensor, row: gl.tensor, column: gl.tensor, k: gl.tensor, done: gl.tensor,
    a_shared: gl.tensor, b_shared: gl.tensor, ready: gl.tensor, free: gl.tensor,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, TERMS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Ask for the operands of one tile of D; returns how many steps were asked for so far."""
    HEIGHT: gl.constexpr = ROWS // 2
    WIDTH: gl.constexpr = COLUMNS // PARTS
    BYTES: gl.constexpr = (ROWS + COLUMNS) * TERMS * (a.dtype.primitive_bitwidth // 8)
    for step in range(gl.cdiv(k, TERMS)):
        stage = done % STAGES
        barrier = ready.index(stage)
        mbarrier.wait(free.index(stage), (done // STAGES & 1) ^ 1)
        mbarrier.expect(barrier, BYTES)
        for half in gl.static_range(2):
            it = b_shared.index(stage * 2 + half)
            _copy(b, row + half * HEIGHT, step * TERMS, barrier, it, B_K_MAJOR)
        for part in gl.static_range(PARTS):
            it = a_shared.index(stage * PARTS + part)
            _copy(a, column + part * WIDTH, step * TERMS, barrier, it, A_K_MAJOR)
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
    """The same for a tile of a group, with descriptors of its own.

    Their memory is that of an earlier tile's, of which ``last`` steps were asked for: nothing
    may be underway that was asked for with them.
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
    some = gl.maximum(k, 1)  # there are no empty descriptors; of this none is read
    a = _described(a_start, n, some, a_stride, A_K_MAJOR, COLUMNS // PARTS, TERMS)
    b = _described(b_start, m, some, b_stride, B_K_MAJOR, ROWS // 2, TERMS)
    row, column = _place(tile - first, gl.cdiv(m, ROWS), gl.cdiv(n, COLUMNS), SUPER)
    return _load_terms(
        a, b, row * ROWS, column * COLUMNS, k, done, a_shared, b_shared, ready, free,
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
    """What the loading warp does."""
    a, b, table_ptr = tensors
    tiles, m, n, k = numbers
    a_shared, b_shared, ready, free, _ = shared
    programs = gl.num_programs(0)
    done = gl.to_tensor(0)
    if GROUPS == 0:
        down = gl.cdiv(m, ROWS)
        across = gl.cdiv(n, COLUMNS)
        for tile in range(gl.program_id(0), tiles, programs):
            row, column = _place(tile, down, across, SUPER)
            done = _load_terms(
                a, b, row * ROWS, column * COLUMNS, k, done, a_shared, b_shared, ready, free,
                A_K_MAJOR, B_K_MAJOR, ROWS, COLUMNS, TERMS, PARTS, STAGES,
            )  # fmt: skip
    else:
        # Two places for descriptors, so that there is no need to wait for the tile before.
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
    """Half a tile of sums that the tensor cores add, and the steps so far."""
    a_shared, b_shared, ready, free, _ = shared
    total = gl.zeros((64, COLUMNS), gl.float32, LAYOUT)
    for step in range(gl.cdiv(k, TERMS)):
        stage = done % STAGES
        mbarrier.wait(ready.index(stage), done // STAGES & 1)
        b = _tile_of(b_shared, stage * 2 + WHICH, B_K_MAJOR)
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
def _sum_in_parts(
    k: gl.tensor, done: gl.tensor, shared: gl.tensor,
    WHICH: gl.constexpr, COLUMNS: gl.constexpr, TERMS: gl.constexpr, STAGES: gl.constexpr,
    LAYOUT: gl.constexpr, TURNS: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """The same of float8, in two parts: what a step gives is added in float32.

    Only one part's sum of a step takes registers at a time.
    """
    a_shared, b_shared, ready, free, turns = shared
    nothing = gl.zeros((64, COLUMNS // 2), gl.float32, LAYOUT)
    left = nothing
    right = nothing
    for _ in range(gl.cdiv(k, TERMS)):
        stage = done % STAGES
        mbarrier.wait(ready.index(stage), done // STAGES & 1)
        b = b_shared.index(stage * 2 + WHICH)
        if TURNS == 2:
            mbarrier.wait(turns.index(WHICH), 1 ^ WHICH)
        part = warpgroup_mma(
            b, a_shared.index(stage * 2).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        if TURNS == 2:
            mbarrier.arrive(turns.index(1 - WHICH))
        part = warpgroup_mma_wait(0, deps=(part,))
        if TURNS == 1 and WHICH == 0:
            mbarrier.arrive(turns.index(0), pred=done == 0)
        left += part
        if TURNS == 2:
            mbarrier.wait(turns.index(WHICH), WHICH)
        part = warpgroup_mma(
            b, a_shared.index(stage * 2 + 1).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        if TURNS == 2:
            mbarrier.arrive(turns.index(1 - WHICH))
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(free.index(stage))
        right += part
        done += 1
    return left, right, done


@gluon.jit  # type: ignore[untyped-decorator]
def _store(
    z: gl.tensor, row: gl.tensor, column: gl.tensor,
    d_ptr: gl.tensor, pre_ptr: gl.tensor, gelu_ptr: gl.tensor, bias_ptr: gl.tensor,
    m: gl.tensor, n: gl.tensor, d_stride: gl.tensor, alpha: gl.tensor, beta: gl.tensor,
    GELU: gl.constexpr, ACCUMULATE: gl.constexpr, PTX: gl.constexpr, LAYOUT: gl.constexpr,
) -> None:  # fmt: skip
    """What follows from some sums, stored."""
    COLUMNS: gl.constexpr = z.shape[1]
    r = row + gl.arange(0, z.shape[0], gl.SliceLayout(1, LAYOUT))
    c = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    d = _finished(
        z, r, c, None, row, column, d_ptr, pre_ptr, gelu_ptr, bias_ptr, m, n, d_stride,
        alpha, beta, GELU, ACCUMULATE, PTX,
    )  # fmt: skip
    # Four threads have a whole sector of float32 side by side as it is.
    stored: gl.constexpr = LAYOUT if d.dtype.primitive_bitwidth == 32 else _stored_layout(COLUMNS, d.dtype)
    r = row + gl.arange(0, z.shape[0], gl.SliceLayout(1, stored))[:, None]
    c = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, stored))[None, :]
    at = r.to(gl.int64) * d_stride + c
    gl.store(d_ptr + at, gl.convert_layout(d, stored), mask=(r < m) & (c < n))


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply_all(
    tensors: gl.tensor, numbers: gl.tensor, shared: gl.tensor, WHICH: gl.constexpr,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, GELU: gl.constexpr,
    ACCUMULATE: gl.constexpr, PTX: gl.constexpr, SCALED: gl.constexpr,
    UNIT_M: gl.constexpr, UNIT_N: gl.constexpr, UNIT_K: gl.constexpr, SUPER: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, TERMS: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr, DTYPE: gl.constexpr,
) -> None:  # fmt: skip
    """What one of the two groups of warps does: half the rows of each tile."""
    a_scale_ptr, b_scale_ptr, d_ptr, pre_ptr, gelu_ptr, bias_ptr, table_ptr = tensors
    tiles, m, n, k, d_stride, alpha, beta = numbers
    LAYOUT: gl.constexpr = _sum_layout(COLUMNS // PARTS, DTYPE)
    done = gl.to_tensor(0)
    across = gl.cdiv(n, COLUMNS)
    factor = alpha
    if GROUPS == 0 and SCALED:
        factor *= gl.load(a_scale_ptr) * gl.load(b_scale_ptr)
    if TURNS == 1 and WHICH == 1:
        mbarrier.wait(shared[4].index(0), 0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        inside = tile
        d = d_ptr
        pre = pre_ptr
        gelu = gelu_ptr
        bias = bias_ptr
        if GROUPS > 0:
            group = _group_of(table_ptr, tile, GROUPS, 4)
            field = table_ptr + group
            inside = tile - gl.load(field).to(gl.int32)
            m = gl.load(field + GROUPS).to(gl.int32) * UNIT_M
            k = gl.load(field + 2 * GROUPS).to(gl.int32) * UNIT_K
            d += gl.load(field + 15 * GROUPS) * UNIT_N
            d_stride = gl.load(field + 16 * GROUPS) * UNIT_N
            dense = gl.load(field + 17 * GROUPS) * n
            if pre_ptr is not None:
                pre += dense
            if gelu_ptr is not None:
                gelu += dense
            if bias_ptr is not None:
                bias += group.to(gl.int64) * n
            if SCALED:
                a_scale = gl.load(a_scale_ptr + gl.load(field + 6 * GROUPS))
                b_scale = gl.load(b_scale_ptr + gl.load(field + 12 * GROUPS))
                factor = alpha * (a_scale * b_scale)
        row, column = _place(inside, gl.cdiv(m, ROWS), across, SUPER)
        row = row * ROWS + WHICH * (ROWS // 2)
        column = column * COLUMNS
        if PARTS == 1:
            z, done = _sum(
                k, done, shared, WHICH, A_K_MAJOR, B_K_MAJOR, COLUMNS, TERMS, STAGES, LAYOUT
            )
            _store(
                z, row, column, d, pre, gelu, bias, m, n, d_stride, factor, beta,
                GELU, ACCUMULATE, PTX, LAYOUT,
            )  # fmt: skip
        else:
            left, right, done = _sum_in_parts(
                k, done, shared, WHICH, COLUMNS, TERMS, STAGES, LAYOUT, TURNS
            )
            _store(
                left, row, column, d, pre, gelu, bias, m, n, d_stride, factor, beta,
                GELU, ACCUMULATE, PTX, LAYOUT,
            )  # fmt: skip
            _store(
                right, row, column + COLUMNS // 2, d, pre, gelu, bias, m, n, d_stride, factor,
                beta, GELU, ACCUMULATE, PTX, LAYOUT,
            )  # fmt: skip


@gluon.jit  # type: ignore[untyped-decorator]
def _start(
    a: gl.tensor, b: gl.tensor, tensors: gl.tensor, numbers: gl.tensor, SCALED: gl.constexpr,
    DTYPE: gl.constexpr, A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, GELU: gl.constexpr,
    ACCUMULATE: gl.constexpr, PTX: gl.constexpr, UNIT: gl.constexpr, UNIT_M: gl.constexpr,
    UNIT_N: gl.constexpr, UNIT_K: gl.constexpr, SUPER: gl.constexpr, PARTS: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, TERMS: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr, TURNS: gl.constexpr, MULTIPLYING: gl.constexpr, LOADING: gl.constexpr,
) -> None:  # fmt: skip
    """Give every warp its work. Of groups, a and b are pointers, else descriptors."""
    WIDTH: gl.constexpr = COLUMNS // PARTS
    a_shared = gl.allocate_shared_memory(
        DTYPE,
        [STAGES * PARTS] + _box(WIDTH, TERMS, A_K_MAJOR),
        _shared_layout(WIDTH, TERMS, A_K_MAJOR, DTYPE),
    )
    b_shared = gl.allocate_shared_memory(
        DTYPE,
        [STAGES * 2] + _box(ROWS // 2, TERMS, B_K_MAJOR),
        _shared_layout(ROWS // 2, TERMS, B_K_MAJOR, DTYPE),
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    for which in gl.static_range(2):
        mbarrier.init(turns.index(which), count=1)
    shared = (a_shared, b_shared, ready, free, turns)
    tiles, m, n, k, d_stride, alpha, beta = numbers
    gl.warp_specialize(
        [
            (
                _multiply_all,
                (
                    tensors, numbers, shared, 0, A_K_MAJOR, B_K_MAJOR, GELU, ACCUMULATE, PTX,
                    SCALED, UNIT_M, UNIT_N, UNIT_K, SUPER, ROWS, COLUMNS, TERMS, PARTS, STAGES,
                    GROUPS, TURNS, DTYPE,
                ),
            ),
            (
                _multiply_all,
                (
                    tensors, numbers, shared, 1, A_K_MAJOR, B_K_MAJOR, GELU, ACCUMULATE, PTX,
                    SCALED, UNIT_M, UNIT_N, UNIT_K, SUPER, ROWS, COLUMNS, TERMS, PARTS, STAGES,
                    GROUPS, TURNS, DTYPE,
                ),
            ),
            (
                _load_all,
                (
                    (a, b, tensors[6]), (tiles, m, n, k), shared, A_K_MAJOR, B_K_MAJOR, UNIT,
                    UNIT_M, UNIT_K, SUPER, ROWS, COLUMNS, TERMS, PARTS, STAGES, GROUPS,
                ),
            ),
        ],
        [4, 1],
        [MULTIPLYING, LOADING],
    )  # fmt: skip


@gluon.jit(do_not_specialize=_NUMBERS_OF_PRODUCT)  # type: ignore[untyped-decorator]
def specialized_product(
    a_ptr: gl.tensor,
    a_scale_ptr: gl.tensor,
    b_ptr: gl.tensor,
    b_scale_ptr: gl.tensor,
    d_ptr: gl.tensor,
    pre_ptr: gl.tensor,
    gelu_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    m: gl.int32,
    n: gl.int32,
    k: gl.int32,
    a_stride: gl.int64,
    b_stride: gl.int64,
    d_stride: gl.int64,
    a_scale_row: gl.int64,
    a_scale_column: gl.int64,
    b_scale_row: gl.int64,
    b_scale_column: gl.int64,
    alpha: gl.float32,
    beta: gl.float32,
    A_K_MAJOR: gl.constexpr,
    B_K_MAJOR: gl.constexpr,
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
    TURNS: gl.constexpr,
    MULTIPLYING: gl.constexpr,
    LOADING: gl.constexpr,
) -> None:
    """``product``, for scales of whole operands."""
    m = m * UNIT_M
    n = n * UNIT_N
    k = k * UNIT_K
    a = _described(a_ptr, n, k, a_stride * UNIT, A_K_MAJOR, COLUMNS // PARTS, TERMS)
    b = _described(b_ptr, m, k, b_stride * UNIT, B_K_MAJOR, ROWS // 2, TERMS)
    tiles = gl.cdiv(m, ROWS) * gl.cdiv(n, COLUMNS)
    _start(
        a, b,
        (a_scale_ptr, b_scale_ptr, d_ptr, pre_ptr, gelu_ptr, bias_ptr, None),
        (tiles, m, n, k, d_stride * UNIT_N, alpha, beta),
        a_scale_ptr is not None, a_ptr.dtype.element_ty,
        A_K_MAJOR, B_K_MAJOR, GELU, ACCUMULATE, PTX, UNIT, UNIT_M, UNIT_N, UNIT_K, SUPER,
        PARTS, ROWS, COLUMNS, TERMS, STAGES, 0, TURNS, MULTIPLYING, LOADING,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["tiles", "n", "alpha", "beta"])  # type: ignore[untyped-decorator]
def specialized_grouped_product(
    a_ptr: gl.tensor,
    a_scale_ptr: gl.tensor,
    b_ptr: gl.tensor,
    b_scale_ptr: gl.tensor,
    d_ptr: gl.tensor,
    pre_ptr: gl.tensor,
    gelu_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    table_ptr: gl.tensor,
    tiles: gl.int32,
    n: gl.int32,
    alpha: gl.float32,
    beta: gl.float32,
    A_K_MAJOR: gl.constexpr,
    B_K_MAJOR: gl.constexpr,
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
    TURNS: gl.constexpr,
    MULTIPLYING: gl.constexpr,
    LOADING: gl.constexpr,
    GROUPS: gl.constexpr,
) -> None:
    """``grouped_product``, likewise."""
    n = n * UNIT_N
    _start(
        a_ptr, b_ptr,
        (a_scale_ptr, b_scale_ptr, d_ptr, pre_ptr, gelu_ptr, bias_ptr, table_ptr),
        (tiles, n, n, n, gl.to_tensor(n).to(gl.int64), alpha, beta),
        a_scale_ptr is not None, a_ptr.dtype.element_ty,
        A_K_MAJOR, B_K_MAJOR, GELU, ACCUMULATE, PTX, UNIT, UNIT_M, UNIT_N, UNIT_K, SUPER,
        PARTS, ROWS, COLUMNS, TERMS, STAGES, GROUPS, TURNS, MULTIPLYING, LOADING,
    )  # fmt: skip
