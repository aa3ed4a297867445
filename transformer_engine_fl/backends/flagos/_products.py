"""The Triton kernels of matrix products; ``gemm`` decides how they are launched.

One loop over the terms serves all operands: a tile is loaded as it is stored, by a tensor
descriptor where the device has them and the memory is aligned, and transposed in registers or
shared memory if its terms are not along its rows. One epilogue follows the sums. The plain kernel
has its sizes as arguments; the grouped one reads those of each group from a table.

D is ``[m, n]``; each element is a sum of k terms. The outer size of an operand is m or n; it is
stored ``[outer, k]`` (K_MAJOR) or ``[k, outer]``. ``m``, ``n``, ``k`` and strides count units of
UNIT_M, UNIT_N (D's strides too), UNIT_K and UNIT (operands' strides), so that the compiler knows
their divisors.

SCALES says when an operand's scales are applied: "whole" in the epilogue, one for the whole
operand; "steps" to the sum of a step; "blocks" to each element before the product, which then
multiplies operands of type DOT. STEPWISE: a step's products are summed separately and that sum is
added in float32, which for some dtypes is more exact than the accumulator of tensor cores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transformer_engine_fl.backends.flagos.activation import _value_and_slope

__all__ = ["grouped_product", "product", "sum_of_rows"]


@triton.jit  # type: ignore[untyped-decorator]
def _place(
    tile: tl.tensor, down: tl.tensor, across: tl.tensor, SUPER: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Row and column of a tile: in bands of SUPER rows of tiles, column by column in a band."""
    each = SUPER * across
    first = (tile // each) * SUPER
    height = tl.minimum(down - first, SUPER)
    inside = tile % each
    return first + inside % height, inside // height


@triton.jit  # type: ignore[untyped-decorator]
def _descriptor(
    ptr: tl.tensor,
    outer: tl.tensor,
    k: tl.tensor,
    stride: tl.tensor,
    K_MAJOR: tl.constexpr,
    OUTER: tl.constexpr,
    TERMS: tl.constexpr,
) -> tl.tensor:
    """A descriptor of an operand, for tiles of OUTER by TERMS."""
    if K_MAJOR:
        return tl.make_tensor_descriptor(ptr, [outer, k], [stride, 1], [OUTER, TERMS])
    else:
        return tl.make_tensor_descriptor(ptr, [k, outer], [stride, 1], [TERMS, OUTER])


@triton.jit  # type: ignore[untyped-decorator]
def _load(
    ptr: tl.tensor,
    described: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """A tile of a matrix in its stored layout, 0 outside the matrix."""
    if described is None:
        r = row + tl.arange(0, ROWS)[:, None]
        c = column + tl.arange(0, COLUMNS)[None, :]
        mask = (r < rows) & (c < columns)
        return tl.load(ptr + r.to(tl.int64) * stride + c, mask=mask, other=0.0)
    else:
        return described.load([row, column])


@triton.jit  # type: ignore[untyped-decorator]
def _unscaled(
    tile: tl.tensor,
    scale_ptr: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    first_row: tl.tensor,
    scale_row: tl.tensor,
    scale_column: tl.tensor,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Each element of a tile times the scale of its block, in float32.

    Scales of one byte are the exponents that float8_e8m0fnu has.
    """
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1]
    BLOCKS: tl.constexpr = (COLUMNS + WIDTH - 1) // WIDTH
    r = row + tl.arange(0, ROWS)[:, None]
    block = column // WIDTH + tl.arange(0, BLOCKS)[None, :]
    at = ((first_row + r) // HEIGHT).to(tl.int64) * scale_row + block * scale_column
    scale = tl.load(scale_ptr + at, mask=(r < rows) & (block * WIDTH < columns), other=0)
    if scale.dtype == tl.uint8:
        # Exponent 0 is a float32 subnormal: half the value of exponent 1.
        bits = tl.where(scale == 0, 1 << 22, scale.to(tl.int32) << 23)
        scale = tl.where(scale == 255, float("nan"), bits.to(tl.float32, bitcast=True))
    blocks = tl.reshape(tile.to(tl.float32), (ROWS, BLOCKS, COLUMNS // BLOCKS))
    return tl.reshape(blocks * scale[:, :, None], (ROWS, COLUMNS))


@triton.jit  # type: ignore[untyped-decorator]
def _operand_tile(
    ptr: tl.tensor,
    described: tl.tensor,
    stride: tl.tensor,
    scale_ptr: tl.tensor,
    first_row: tl.tensor,
    scale_row: tl.tensor,
    scale_column: tl.tensor,
    start: tl.tensor,
    term: tl.tensor,
    outer: tl.tensor,
    k: tl.tensor,
    K_MAJOR: tl.constexpr,
    SCALES: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DOT: tl.constexpr,
    OUTER: tl.constexpr,
    TERMS: tl.constexpr,
) -> tl.tensor:
    """The tile of an operand that begins at ``start`` and ``term``, as [OUTER, TERMS]."""
    if K_MAJOR:
        tile = _load(ptr, described, start, term, outer, k, stride, OUTER, TERMS)
    else:
        tile = _load(ptr, described, term, start, k, outer, stride, TERMS, OUTER)
    if SCALES == "blocks":
        row = start if K_MAJOR else term
        column = term if K_MAJOR else start
        rows = outer if K_MAJOR else k
        columns = k if K_MAJOR else outer
        tile = _unscaled(
            tile, scale_ptr, row, column, rows, columns,
            first_row, scale_row, scale_column, HEIGHT, WIDTH,
        )  # fmt: skip
    if tl.float64 == DOT:  # float8 cannot be converted to it directly
        tile = tile.to(tl.float32)
    if DOT is not None:
        tile = tile.to(DOT)
    if not K_MAJOR:
        tile = tl.trans(tile)
    return tile


@triton.jit  # type: ignore[untyped-decorator]
def _scale_of_step(
    scale_ptr: tl.tensor,
    start: tl.tensor,
    step: tl.tensor,
    outer: tl.tensor,
    first_row: tl.tensor,
    scale_row: tl.tensor,
    scale_column: tl.tensor,
    HEIGHT: tl.constexpr,
    UNIFORM: tl.constexpr,
    OUTER: tl.constexpr,
) -> tl.tensor:
    """The scales of an operand's tile: one for each of its rows, or a single one if UNIFORM."""
    if UNIFORM:
        at = (first_row + start) // HEIGHT
        return tl.load(scale_ptr + at.to(tl.int64) * scale_row + step * scale_column)
    else:
        r = start + tl.arange(0, OUTER)
        at = ((first_row + r) // HEIGHT).to(tl.int64) * scale_row + step * scale_column
        return tl.load(scale_ptr + at, mask=r < outer, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of_products(
    a_ptr: tl.tensor,
    a_described: tl.tensor,
    a_stride: tl.tensor,
    a_scale_ptr: tl.tensor,
    a_first: tl.tensor,
    a_scale_row: tl.tensor,
    a_scale_column: tl.tensor,
    b_ptr: tl.tensor,
    b_described: tl.tensor,
    b_stride: tl.tensor,
    b_scale_ptr: tl.tensor,
    b_first: tl.tensor,
    b_scale_row: tl.tensor,
    b_scale_column: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    A_K_MAJOR: tl.constexpr,
    A_SCALES: tl.constexpr,
    A_HEIGHT: tl.constexpr,
    A_WIDTH: tl.constexpr,
    A_UNIFORM: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    B_SCALES: tl.constexpr,
    B_HEIGHT: tl.constexpr,
    B_WIDTH: tl.constexpr,
    B_UNIFORM: tl.constexpr,
    STEPWISE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
) -> tl.tensor:
    """A tile of op(B) op(A), in float32."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.range(0, tl.cdiv(k, TERMS)):
        b = _operand_tile(
            b_ptr, b_described, b_stride, b_scale_ptr, b_first, b_scale_row, b_scale_column,
            row, step * TERMS, m, k,
            B_K_MAJOR, B_SCALES, B_HEIGHT, B_WIDTH, DOT, ROWS, TERMS,
        )  # fmt: skip
        a = _operand_tile(
            a_ptr, a_described, a_stride, a_scale_ptr, a_first, a_scale_row, a_scale_column,
            column, step * TERMS, n, k,
            A_K_MAJOR, A_SCALES, A_HEIGHT, A_WIDTH, DOT, COLUMNS, TERMS,
        )  # fmt: skip
        if STEPWISE:
            part = tl.dot(b, a.T, input_precision=PRECISION).to(tl.float32)
            if B_SCALES == "steps":
                scale = _scale_of_step(
                    b_scale_ptr, row, step, m, b_first, b_scale_row, b_scale_column,
                    B_HEIGHT, B_UNIFORM, ROWS,
                )  # fmt: skip
                part *= scale if B_UNIFORM else scale[:, None]
            if A_SCALES == "steps":
                scale = _scale_of_step(
                    a_scale_ptr, column, step, n, a_first, a_scale_row, a_scale_column,
                    A_HEIGHT, A_UNIFORM, COLUMNS,
                )  # fmt: skip
                part *= scale if A_UNIFORM else scale[None, :]
            total += part
        else:
            total = tl.dot(b, a.T, total, input_precision=PRECISION)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _halves(tile: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The left and the right half of a tile's columns."""
    ROWS: tl.constexpr = tile.shape[0]
    HALF: tl.constexpr = tile.shape[1] // 2
    left, right = tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, HALF)), (0, 2, 1)))
    return left, right


@triton.jit  # type: ignore[untyped-decorator]
def _added(
    z: tl.tensor,
    r: tl.tensor,
    c: tl.tensor,
    d_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    d_stride: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    ACCUMULATE: tl.constexpr,
) -> tl.tensor:
    """The tile of sums times alpha, plus beta D and the bias; ``r`` and ``c``: rows and columns."""
    inside = c < n
    z *= alpha
    if ACCUMULATE:
        mask = (r < m)[:, None] & inside[None, :]
        at = r.to(tl.int64)[:, None] * d_stride + c[None, :]
        z += beta * tl.load(d_ptr + at, mask=mask, other=0).to(tl.float32)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + c, mask=inside, other=0).to(tl.float32)[None, :]
    return z


@triton.jit  # type: ignore[untyped-decorator]
def _finish(
    z: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    d_ptr: tl.tensor,
    d_described: tl.tensor,
    pre_ptr: tl.tensor,
    pre_described: tl.tensor,
    gelu_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    d_stride: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    GELU: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    """Apply the epilogue to a tile of sums and store the results."""
    r = row + tl.arange(0, z.shape[0])
    c = column + tl.arange(0, z.shape[1])
    z = _added(z, r, c, d_ptr, bias_ptr, m, n, d_stride, alpha, beta, ACCUMULATE)
    mask = (r < m)[:, None] & (c < n)[None, :]
    dense = r.to(tl.int64)[:, None] * n + c[None, :]
    if GELU:
        if gelu_ptr is not None:
            x = tl.load(gelu_ptr + dense, mask=mask, other=0).to(tl.float32)
            _, slope = _value_and_slope(x, x, "gelu", PTX)
            z *= slope
        else:
            pre = z.to(pre_ptr.dtype.element_ty)
            if pre_described is None:
                tl.store(pre_ptr + dense, pre, mask=mask)
            else:
                pre_described.store([row, column], pre)
            z, _ = _value_and_slope(z, z, "gelu", PTX)
    d = z.to(d_ptr.dtype.element_ty)
    if d_described is None:
        tl.store(d_ptr + r.to(tl.int64)[:, None] * d_stride + c[None, :], d, mask=mask)
    else:
        d_described.store([row, column], d)


@triton.jit  # type: ignore[untyped-decorator]
def _finish_parts(
    z: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    d_ptr: tl.tensor,
    d_described: tl.tensor,
    pre_ptr: tl.tensor,
    pre_described: tl.tensor,
    gelu_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    d_stride: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    GELU: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PTX: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """The same for PARTS of the columns in turn, so that less shared memory is used at a time."""
    if PARTS == 1:
        _finish(
            z, row, column, d_ptr, d_described, pre_ptr, pre_described, gelu_ptr, bias_ptr,
            m, n, d_stride, alpha, beta, GELU, ACCUMULATE, PTX,
        )  # fmt: skip
    else:
        left, right = _halves(z)
        _finish_parts(
            left, row, column, d_ptr, d_described, pre_ptr, pre_described, gelu_ptr, bias_ptr,
            m, n, d_stride, alpha, beta, GELU, ACCUMULATE, PTX, PARTS // 2,
        )  # fmt: skip
        _finish_parts(
            right, row, column + z.shape[1] // 2,
            d_ptr, d_described, pre_ptr, pre_described, gelu_ptr, bias_ptr,
            m, n, d_stride, alpha, beta, GELU, ACCUMULATE, PTX, PARTS // 2,
        )  # fmt: skip


_NUMBERS_OF_PRODUCT = (
    "m", "n", "k", "a_stride", "b_stride", "d_stride",
    "a_scale_row", "a_scale_column", "b_scale_row", "b_scale_column", "alpha", "beta",
)  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS_OF_PRODUCT)  # type: ignore[untyped-decorator]
def product(
    a_ptr: tl.tensor,
    a_scale_ptr: tl.tensor,
    b_ptr: tl.tensor,
    b_scale_ptr: tl.tensor,
    d_ptr: tl.tensor,
    pre_ptr: tl.tensor,
    gelu_ptr: tl.tensor,
    bias_ptr: tl.tensor,
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
    A_K_MAJOR: tl.constexpr,
    A_SCALES: tl.constexpr,
    A_HEIGHT: tl.constexpr,
    A_WIDTH: tl.constexpr,
    A_UNIFORM: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    B_SCALES: tl.constexpr,
    B_HEIGHT: tl.constexpr,
    B_WIDTH: tl.constexpr,
    B_UNIFORM: tl.constexpr,
    STEPWISE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    GELU: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PTX: tl.constexpr,
    UNIT: tl.constexpr,
    UNIT_M: tl.constexpr,
    UNIT_N: tl.constexpr,
    UNIT_K: tl.constexpr,
    DESCRIBED: tl.constexpr,
    D_DESCRIBED: tl.constexpr,
    FLATTEN: tl.constexpr,
    SUPER: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
) -> None:
    """One product; a program makes every ``num_programs``-th tile of it."""
    m = m * UNIT_M
    n = n * UNIT_N
    k = k * UNIT_K
    a_stride = a_stride * UNIT
    b_stride = b_stride * UNIT
    d_stride = d_stride * UNIT_N
    a_described = None
    b_described = None
    d_described = None
    pre_described = None
    if DESCRIBED:
        a_described = _descriptor(a_ptr, n, k, a_stride, A_K_MAJOR, COLUMNS, TERMS)
        b_described = _descriptor(b_ptr, m, k, b_stride, B_K_MAJOR, ROWS, TERMS)
    if D_DESCRIBED:
        d_described = tl.make_tensor_descriptor(
            d_ptr, [m, n], [d_stride, 1], [ROWS, COLUMNS // PARTS]
        )
        if pre_ptr is not None:
            pre_described = tl.make_tensor_descriptor(
                pre_ptr, [m, n], [n, 1], [ROWS, COLUMNS // PARTS]
            )
    if A_SCALES == "whole":
        alpha = alpha * tl.load(a_scale_ptr)
    if B_SCALES == "whole":
        alpha = alpha * tl.load(b_scale_ptr)
    down = tl.cdiv(m, ROWS)
    across = tl.cdiv(n, COLUMNS)
    # Counted separately for the epilogue, which a flattened loop runs after the next tile has
    # begun.
    done = tl.program_id(0) - tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=FLATTEN):
        tile_row, tile_column = _place(tile, down, across, SUPER)
        z = _sum_of_products(
            a_ptr, a_described, a_stride, a_scale_ptr, 0, a_scale_row, a_scale_column,
            b_ptr, b_described, b_stride, b_scale_ptr, 0, b_scale_row, b_scale_column,
            tile_row * ROWS, tile_column * COLUMNS, m, n, k,
            A_K_MAJOR, A_SCALES, A_HEIGHT, A_WIDTH, A_UNIFORM,
            B_K_MAJOR, B_SCALES, B_HEIGHT, B_WIDTH, B_UNIFORM,
            STEPWISE, DOT, PRECISION, ROWS, COLUMNS, TERMS,
        )  # fmt: skip
        done += tl.num_programs(0)
        tile_row, tile_column = _place(done, down, across, SUPER)
        _finish_parts(
            z, tile_row * ROWS, tile_column * COLUMNS,
            d_ptr, d_described, pre_ptr, pre_described, gelu_ptr, bias_ptr,
            m, n, d_stride, alpha, beta, GELU, ACCUMULATE, PTX, PARTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tiles", "n", "alpha", "beta"])  # type: ignore[untyped-decorator]
def grouped_product(
    a_ptr: tl.tensor,
    a_scale_ptr: tl.tensor,
    b_ptr: tl.tensor,
    b_scale_ptr: tl.tensor,
    d_ptr: tl.tensor,
    pre_ptr: tl.tensor,
    gelu_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    table_ptr: tl.tensor,
    tiles: tl.int32,
    n: tl.int32,
    alpha: tl.float32,
    beta: tl.float32,
    A_K_MAJOR: tl.constexpr,
    A_SCALES: tl.constexpr,
    A_HEIGHT: tl.constexpr,
    A_WIDTH: tl.constexpr,
    A_UNIFORM: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    B_SCALES: tl.constexpr,
    B_HEIGHT: tl.constexpr,
    B_WIDTH: tl.constexpr,
    B_UNIFORM: tl.constexpr,
    STEPWISE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    GELU: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PTX: tl.constexpr,
    UNIT: tl.constexpr,
    UNIT_M: tl.constexpr,
    UNIT_N: tl.constexpr,
    UNIT_K: tl.constexpr,
    DESCRIBED: tl.constexpr,
    SUPER: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """The products of all groups; the tiles of a group follow those of the one before.

    The table has rows of GROUPS numbers. Row 0: first tile; 1: m; 2: k. Of a: 3 offset, 4 stride, 5
    first row in its tensor, 6 offset of the scales, 7 and 8 strides of the scales. 9 to 14: the
    same of b. Of D: 15 offset, 16 stride, 17 first row.
    """
    n = n * UNIT_N
    firsts = tl.load(table_ptr + tl.arange(0, GROUPS))
    across = tl.cdiv(n, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        group = tl.sum((firsts <= tile).to(tl.int32), axis=0) - 1
        field = table_ptr + group
        m = tl.load(field + GROUPS).to(tl.int32) * UNIT_M
        k = tl.load(field + 2 * GROUPS).to(tl.int32) * UNIT_K
        a = a_ptr + tl.load(field + 3 * GROUPS) * UNIT
        a_stride = tl.load(field + 4 * GROUPS) * UNIT
        b = b_ptr + tl.load(field + 9 * GROUPS) * UNIT
        b_stride = tl.load(field + 10 * GROUPS) * UNIT
        d = d_ptr + tl.load(field + 15 * GROUPS) * UNIT_N
        d_stride = tl.load(field + 16 * GROUPS) * UNIT_N
        dense = tl.load(field + 17 * GROUPS) * n
        factor = alpha
        a_scale = a_scale_ptr
        b_scale = b_scale_ptr
        if A_SCALES != "none":
            a_scale += tl.load(field + 6 * GROUPS)
        if A_SCALES == "whole":
            factor *= tl.load(a_scale)
        if B_SCALES != "none":
            b_scale += tl.load(field + 12 * GROUPS)
        if B_SCALES == "whole":
            factor *= tl.load(b_scale)
        a_described = None
        b_described = None
        if DESCRIBED:
            some = tl.maximum(k, 1)  # a descriptor must not be empty; nothing is read by it
            a_described = _descriptor(a, n, some, a_stride, A_K_MAJOR, COLUMNS, TERMS)
            b_described = _descriptor(b, m, some, b_stride, B_K_MAJOR, ROWS, TERMS)
        down = tl.cdiv(m, ROWS)
        inside = tile - tl.load(field).to(tl.int32)
        tile_row, tile_column = _place(inside, down, across, SUPER)
        z = _sum_of_products(
            a, a_described, a_stride, a_scale, tl.load(field + 5 * GROUPS),
            tl.load(field + 7 * GROUPS), tl.load(field + 8 * GROUPS),
            b, b_described, b_stride, b_scale, tl.load(field + 11 * GROUPS),
            tl.load(field + 13 * GROUPS), tl.load(field + 14 * GROUPS),
            tile_row * ROWS, tile_column * COLUMNS, m, n, k,
            A_K_MAJOR, A_SCALES, A_HEIGHT, A_WIDTH, A_UNIFORM,
            B_K_MAJOR, B_SCALES, B_HEIGHT, B_WIDTH, B_UNIFORM,
            STEPWISE, DOT, PRECISION, ROWS, COLUMNS, TERMS,
        )  # fmt: skip
        pre = pre_ptr
        gelu = gelu_ptr
        bias = bias_ptr
        if pre_ptr is not None:
            pre += dense
        if gelu_ptr is not None:
            gelu += dense
        if bias_ptr is not None:
            bias += group.to(tl.int64) * n
        _finish_parts(
            z, tile_row * ROWS, tile_column * COLUMNS, d, None, pre, None, gelu, bias,
            m, n, d_stride, factor, beta, GELU, ACCUMULATE, PTX, PARTS,
        )  # fmt: skip


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["rows", "columns", "stride", "first_row", "scale_row", "scale_column"]
)
def sum_of_rows(
    b_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    stride: tl.int64,
    first_row: tl.int64,
    scale_row: tl.int64,
    scale_column: tl.int64,
    SCALES: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program's sum over the rows of every ``num_programs``-th tile of ROWS rows."""
    columns = columns * UNIT
    start = tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS
        value = _load(b_ptr, None, row, start, rows, columns, stride * UNIT, ROWS, BLOCK)
        if SCALES == "blocks":
            value = _unscaled(
                value, scale_ptr, row, start, rows, columns,
                first_row, scale_row, scale_column, HEIGHT, WIDTH,
            )  # fmt: skip
        total += value.to(tl.float32)
    result = tl.sum(total, axis=0)
    if SCALES == "whole":
        result *= tl.load(scale_ptr)
    partial_ptr += tl.program_id(0).to(tl.int64) * columns
    tl.store(partial_ptr + column, result, mask=column < columns)
