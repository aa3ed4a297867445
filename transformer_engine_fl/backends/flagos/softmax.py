"""The scaled softmax forms in Triton.

One pair of kernels makes all four forwards, another all four backwards: rows that fit into
registers are read once, wider ones in chunks, twice. What a causal form hides is not read.
The order in which a row is summed depends on its width and dtype alone, so a row's result
is the same whichever rows come with it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import (
    WIDEST_UNIT,
    block_of,
    by_rows,
    check_fresh,
    check_size,
    keep,
    listed,
    plain,
    rows_of_tile,
)
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.ops import softmax as contracts
from transformer_engine_fl.ops._dtypes import math_dtype

if TYPE_CHECKING:
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
# ``columns`` and the row strides count units of UNIT elements. Row r is query
# r % queries; with a mask, of head (r // queries) % heads. ``ahead`` is how many keys the
# first query of a causal form sees. A mask has bytes, not 0 where a key is hidden.


@triton.jit  # type: ignore[untyped-decorator]
def _bound(
    row: tl.tensor, columns: tl.tensor, queries: tl.tensor, ahead: tl.tensor, CAUSAL: tl.constexpr
) -> tl.tensor:
    """How many keys the query of each row sees, as far as that follows from its place."""
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
) -> tl.tensor:
    """The values at these columns, 0 beyond the bound, though some of those are read."""
    wanted = exists & (column < columns)
    if CAUSAL:
        # Rounded up to whole vectors, so that it is loaded in such.
        wanted = wanted & (column < (bound + 15) // 16 * 16)
    return tl.load(x_ptr + start + column, mask=wanted, other=0)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "rows", "columns", "stride", "queries", "heads", "ahead",
        "mask_batch", "mask_head", "mask_query", "scale",
    ]
)  # fmt: skip
def _forward_rows(
    x_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    y_ptr: tl.tensor,
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
    MASK_STEP: tl.constexpr,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Rows that fit into registers, ROWS to a program; EXACT: they fill a tile's width."""
    columns = columns * UNIT
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    exists = row < rows
    bound = _bound(row, columns, queries, ahead, CAUSAL)
    start = row.to(tl.int64)
    x = _loaded(x_ptr, start * (stride * UNIT), column, exists, columns, bound, CAUSAL)
    visible = column < bound
    if mask_ptr is not None:
        where = (start // queries // heads) * mask_batch + (start // queries % heads) * mask_head
        where += start % queries * mask_query
        hidden = tl.load(
            mask_ptr + where + column * MASK_STEP, mask=exists & (column < columns), other=1
        )
        visible = visible & (hidden == 0)
    scores = x.to(ACC) * tl.full((), scale, ACC)
    if CAUSAL or mask_ptr is not None or not EXACT:
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.max(scores, axis=1)[:, None]
    if CAUSAL or mask_ptr is not None:
        # Where nothing is visible there is nothing to take off, and nothing to divide by.
        highest = tl.where(highest == float("-inf"), 0, highest)
    weights = tl.exp(scores - highest)
    total = tl.sum(weights, axis=1)[:, None]
    y = weights * (1 / tl.where(total == 0, 1, total))
    out = y_ptr + start * columns + column
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=exists & (column < columns))


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "rows", "columns", "stride", "queries", "heads", "ahead",
        "mask_batch", "mask_head", "mask_query", "scale",
    ]
)  # fmt: skip
def _forward_wide(
    x_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    y_ptr: tl.tensor,
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
    MASK_STEP: tl.constexpr,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row per program in chunks of PARTS times BLOCK columns, read twice."""
    columns = columns * UNIT
    row = tl.program_id(0)
    bound = _bound(row, columns, queries, ahead, CAUSAL)
    start = row.to(tl.int64)
    x_ptr += start * (stride * UNIT)
    y_ptr += start * columns
    if mask_ptr is not None:
        mask_ptr += (start // queries // heads) * mask_batch
        mask_ptr += (start // queries % heads) * mask_head + start % queries * mask_query
    factor = tl.full((), scale, ACC)
    place = tl.arange(0, PARTS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    highest = tl.full((BLOCK,), float("-inf"), ACC)
    total = tl.zeros((BLOCK,), ACC)
    chunks = tl.cdiv(tl.maximum(bound, 0), PARTS * BLOCK)  # with something to see
    for chunk in tl.range(0, chunks):
        column = chunk * (PARTS * BLOCK) + place
        x = _loaded(x_ptr, 0, column, True, columns, bound, CAUSAL).to(ACC)
        visible = column < bound
        if mask_ptr is not None:
            hidden = tl.load(mask_ptr + column * MASK_STEP, mask=column < columns, other=1)
            visible = visible & (hidden == 0)
        scores = tl.where(visible, x * factor, float("-inf"))
        above = tl.maximum(highest, tl.max(scores, axis=0))
        taken = tl.where(above == float("-inf"), 0, above)
        total = total * tl.exp(highest - taken) + tl.sum(tl.exp(scores - taken[None, :]), axis=0)
        highest = above
    most = tl.max(highest, axis=0)
    most = tl.where(most == float("-inf"), 0, most)
    sum_of_all = tl.sum(total * tl.exp(highest - most), axis=0)
    share = 1 / tl.where(sum_of_all == 0, 1, sum_of_all)
    # From the end: what was read last is the likeliest to be in the cache still.
    for done in tl.range(0, chunks):
        column = (chunks - 1 - done) * (PARTS * BLOCK) + place
        inside = column < columns
        x = _loaded(x_ptr, 0, column, True, columns, bound, CAUSAL).to(ACC)
        visible = column < bound
        if mask_ptr is not None:
            hidden = tl.load(mask_ptr + column * MASK_STEP, mask=inside, other=1)
            visible = visible & (hidden == 0)
        y = tl.where(visible, tl.exp(x * factor - most) * share, 0)
        tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), mask=inside)
    zeros = tl.zeros((PARTS, BLOCK), y_ptr.dtype.element_ty)
    for chunk in tl.range(chunks, tl.cdiv(columns, PARTS * BLOCK)):
        column = chunk * (PARTS * BLOCK) + place
        tl.store(y_ptr + column, zeros, mask=column < columns)


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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Rows that fit into registers, ROWS to a program."""
    columns = columns * UNIT
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    exists = row < rows
    bound = _bound(row, columns, queries, ahead, CAUSAL)
    start = row.to(tl.int64)
    y = _loaded(y_ptr, start * (y_stride * UNIT), column, exists, columns, bound, CAUSAL)
    y = y.to(ACC)
    dy = _loaded(dy_ptr, start * (dy_stride * UNIT), column, exists, columns, bound, CAUSAL)
    dy = dy.to(ACC)
    along = tl.sum(y * dy, axis=1)[:, None]
    dx = y * (dy - along) * tl.full((), scale, ACC) + 0.0  # no zero but the positive one
    out = dx_ptr + start * columns + column
    tl.store(out, dx.to(dx_ptr.dtype.element_ty), mask=exists & (column < columns))


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["rows", "columns", "dy_stride", "y_stride", "queries", "ahead", "scale"]
)
def _backward_wide(
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
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row per program in chunks of PARTS times BLOCK columns, read twice."""
    columns = columns * UNIT
    row = tl.program_id(0)
    bound = _bound(row, columns, queries, ahead, CAUSAL)
    start = row.to(tl.int64)
    y_ptr += start * (y_stride * UNIT)
    dy_ptr += start * (dy_stride * UNIT)
    dx_ptr += start * columns
    factor = tl.full((), scale, ACC)
    place = tl.arange(0, PARTS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    products = tl.zeros((BLOCK,), ACC)
    chunks = tl.cdiv(tl.maximum(bound, 0), PARTS * BLOCK)
    for chunk in tl.range(0, chunks):
        column = chunk * (PARTS * BLOCK) + place
        y = _loaded(y_ptr, 0, column, True, columns, bound, CAUSAL).to(ACC)
        dy = _loaded(dy_ptr, 0, column, True, columns, bound, CAUSAL).to(ACC)
        products += tl.sum(y * dy, axis=0)
    along = tl.sum(products, axis=0)
    for done in tl.range(0, chunks):
        column = (chunks - 1 - done) * (PARTS * BLOCK) + place
        y = _loaded(y_ptr, 0, column, True, columns, bound, CAUSAL).to(ACC)
        dy = _loaded(dy_ptr, 0, column, True, columns, bound, CAUSAL).to(ACC)
        dx = y * (dy - along) * factor + 0.0
        tl.store(dx_ptr + column, dx.to(dx_ptr.dtype.element_ty), mask=column < columns)
    zeros = tl.zeros((PARTS, BLOCK), dx_ptr.dtype.element_ty)
    for chunk in tl.range(chunks, tl.cdiv(columns, PARTS * BLOCK)):
        column = chunk * (PARTS * BLOCK) + place
        tl.store(dx_ptr + column, zeros, mask=column < columns)


# -------------------------------------------------------------------------------- plans

# (threads of a program, width of its tile), by width as in FORWARD_TILES.
_FORWARD_TILES = {
    2048: (128, 2048),
    4096: (256, 4096),
    8192: (512, 8192),
    16384: (1024, 16384),
    32768: (1024, 32768),
}
_BACKWARD_TILES = {
    1024: (128, 1024),
    4096: (128, 4096),
    8192: (256, 8192),
    16384: (512, 16384),
    32768: (1024, 32768),
}
_PARTS, _CHUNK, _CHUNK_THREADS = 2, 8192, 1024


class _Plan(NamedTuple):
    """How to run a kernel.

    Attributes:
        launch: the kernel.
        rows: of a program.
    """

    launch: _launch.Launch
    rows: int


_PLANS: dict[object, _Plan] = {}
_TRITON_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


def _plan(
    kernels: tuple[Any, Any],
    tiles: dict[int, tuple[int, int]],
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    **constants: Any,
) -> _Plan:
    """For the kernel of rows in registers and that of wide ones."""
    double = 2 if dtype == torch.float64 else 1
    block = block_of(columns)
    constants["ACC"] = _TRITON_TYPES[math_dtype(dtype)]
    tile = listed(tiles, block * double)
    if tile is None:
        wide: dict[str, Any] = {"PARTS": _PARTS, "BLOCK": _CHUNK // double}
        return _Plan(
            _launch.Launch(kernels[1], device, threads=_CHUNK_THREADS, **wide, **constants), 1
        )
    threads, width = tile
    rows = rows_of_tile(width, block * double)
    if kernels[0] is _forward_rows:
        constants["EXACT"] = columns == block
    launch = _launch.Launch(
        kernels[0], device, threads=threads, ROWS=rows, BLOCK=block, **constants
    )
    return _Plan(launch, rows)


# ---------------------------------------------------------------------------- operators


def _factor(op: Contract[..., Any], scale: float) -> float:
    if not isinstance(scale, int | float):
        raise NotSupportedError(f"{op.name}: scale is a {type(scale).__name__}, not a number yet")
    return float(scale)


def _laid_over(mask: Tensor, shape: torch.Size) -> tuple[Tensor, tuple[int, int, int]]:
    """The mask as bytes, and its strides over batch, head and query, for scores of ``shape``."""
    mask = mask.expand(shape)
    if len(shape) > 4 or mask.stride(-1) not in (0, 1):
        mask = mask.contiguous()
    if len(shape) > 4:
        mask = mask.flatten(0, -4)
    batch, head, query = (0,) * (4 - mask.dim()) + mask.stride()[:-1]
    return mask.view(torch.uint8), (batch, head, query)


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
    input, step = by_rows(input)
    rows = input.numel() // columns
    check_size(name, "columns", columns)
    check_size(name, "rows", rows)
    strides = (0, 0, 0)
    if mask is not None:
        mask, strides = _laid_over(plain(name, "mask", mask), shape)
    mask_step = None if mask is None else mask.stride(-1)
    unit = math.gcd(columns, step, WIDEST_UNIT)
    key = ("forward", input.dtype, mask_step, columns, causal, unit, input.device)
    plan = _PLANS.get(key) or keep(
        _PLANS,
        key,
        _plan(
            (_forward_rows, _forward_wide),
            _FORWARD_TILES,
            columns,
            input.dtype,
            input.device,
            MASK_STEP=mask_step,
            CAUSAL=causal,
            UNIT=unit,
        ),
    )
    ahead = 1 + columns - queries
    plan.launch(
        (-(-rows // plan.rows), 1),
        (input, mask, output),
        (rows, columns // unit, step // unit, queries, heads, ahead, *strides, factor),
    )
    return output


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
    y, y_step = by_rows(y)
    dy, dy_step = by_rows(dy)
    rows = y.numel() // columns
    check_size(name, "columns", columns)
    check_size(name, "rows", rows)
    unit = math.gcd(columns, y_step, dy_step, WIDEST_UNIT)
    key = ("backward", y.dtype, dy.dtype, columns, causal, unit, y.device)
    plan = _PLANS.get(key) or keep(
        _PLANS,
        key,
        _plan(
            (_backward_rows, _backward_wide),
            _BACKWARD_TILES,
            columns,
            y.dtype,
            y.device,
            CAUSAL=causal,
            UNIT=unit,
        ),
    )
    ahead = 1 + columns - queries
    plan.launch(
        (-(-rows // plan.rows), 1),
        (dy, y, dx),
        (rows, columns // unit, dy_step // unit, y_step // unit, queries, ahead, factor),
    )
    return dx


def scaled_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
    """``scaled_softmax_forward`` of the contract."""
    return _forward(contracts.scaled_softmax_forward, input, None, scale, False)


def scaled_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """``scaled_softmax_backward`` of the contract."""
    return _backward(contracts.scaled_softmax_backward, output_grad, softmax_output, scale, False)


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
    """``scaled_masked_softmax_forward`` of the contract."""
    return _forward(contracts.scaled_masked_softmax_forward, input, mask, scale, False)


def scaled_masked_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """``scaled_masked_softmax_backward`` of the contract."""
    return _backward(
        contracts.scaled_masked_softmax_backward, output_grad, softmax_output, scale, False
    )


def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
    """``scaled_upper_triang_masked_softmax_forward`` of the contract."""
    return _forward(contracts.scaled_upper_triang_masked_softmax_forward, input, None, scale, True)


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


def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
    """``scaled_aligned_causal_masked_softmax_forward`` of the contract."""
    return _forward(
        contracts.scaled_aligned_causal_masked_softmax_forward, input, None, scale, True
    )


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
