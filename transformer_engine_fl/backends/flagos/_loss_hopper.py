"""Cross entropy of a linear layer on Hopper: the logits stay in the registers of the product.

The product is that of ``_products_hopper``. Instead of storing a tile of logits, its epilogue
stores four numbers for each row (forward; as ``cross_entropy_merge`` takes them for a shard), or
the gradients of the logits in the dtype of the layer (backward). While one warp group runs the
epilogue, the other keeps the tensor cores busy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton.language as tl  # noqa: TC002 - Gluon looks annotations up
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import (
    ALIGNMENT,
    HOPPER,
    check_size,
    launch_of,
)
from transformer_engine_fl.backends.flagos._products import _place
from transformer_engine_fl.backends.flagos._products_hopper import (
    _HEIGHT,
    _described,
    _load_all,
    _ring,
    _store,
    _sum,
    _sum_layout,
)
from transformer_engine_fl.backends.flagos.gemm import REGISTERS, _describable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["COLUMNS", "serves", "store_gradients", "store_statistics"]

_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit  # type: ignore[untyped-decorator]
def _finish_statistics(
    z: gl.tensor, column: gl.tensor, r: gl.tensor, c: gl.tensor,
    tensors: gl.tensor, m: gl.tensor, n: gl.tensor, start: gl.tensor, tile: gl.tensor,
) -> None:  # fmt: skip
    """Store for each row: highest logit, sum of exponentials, target's logit, sum of logits."""
    stats_ptr, target_ptr, _ = tensors
    inside = (c < n)[None, :]
    target = gl.load(target_ptr + r, mask=r < m, other=-1)
    word = (target - start - column).to(gl.int32)
    word = gl.where((target - start >= column) & (target - start < n), word, -1)
    hit = (c - column)[None, :] == word[:, None]
    at_target = gl.sum(gl.where(hit, z, 0.0), axis=1)
    summed = gl.sum(gl.where(inside, z, 0.0), axis=1)
    z = gl.where(inside, z, float("-inf"))
    highest = gl.max(z, axis=1)
    finite_max = gl.where(highest == float("-inf"), 0.0, highest)
    total = gl.sum(gl.exp2((z - finite_max[:, None]) * _LOG2E), axis=1)
    place = stats_ptr + (tile.to(gl.int64) * m + r) * 4
    gl.store(place, highest, mask=r < m)
    gl.store(place + 1, total, mask=r < m)
    gl.store(place + 2, at_target, mask=r < m)
    gl.store(place + 3, summed, mask=r < m)


@gluon.jit  # type: ignore[untyped-decorator]
def _finish_gradients(
    z: gl.tensor, row: gl.tensor, column: gl.tensor, r: gl.tensor, c: gl.tensor,
    tensors: gl.tensor, m: gl.tensor, n: gl.tensor, start: gl.tensor, stride: gl.tensor,
    LAYOUT: gl.constexpr,
) -> None:  # fmt: skip
    """Store the gradients of logits; 0 for a row that is not read, whatever its logits are."""
    d_ptr, target_ptr, rows_ptr = tensors
    there = r < m
    target = gl.load(target_ptr + r, mask=there, other=-1)
    word = gl.where((target >= start) & (target - start < n), target - start, -1).to(gl.int32)
    lse = gl.load(rows_ptr + r, mask=there, other=0.0)
    far = m.to(gl.int64)
    factor = gl.load(rows_ptr + far + r, mask=there, other=0.0)
    pull = gl.load(rows_ptr + 2 * far + r, mask=there, other=0.0)
    uniform = gl.load(rows_ptr + 3 * far + r, mask=there, other=0.0)
    d = factor[:, None] * gl.exp2((z - lse[:, None]) * _LOG2E)
    d -= gl.where(c[None, :] == word[:, None], pull[:, None], uniform[:, None])
    # A row that is not read has an infinite lse and zero factors; a lse of NaN must give NaN.
    read = (lse != float("inf")) | (factor != 0) | (pull != 0)
    d = gl.where(read[:, None], d, 0.0)
    _store(d_ptr, d, row, column, m, n, stride, LAYOUT)


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply_logits(
    outputs: gl.tensor, bias_ptr: gl.tensor, numbers: gl.tensor, shared: gl.tensor,
    WHICH: gl.constexpr, BACKWARD: gl.constexpr, SUPER: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, TERMS: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr,
) -> None:  # fmt: skip
    """The work of one of the two multiplying warp groups: half the rows of each tile."""
    tiles, m, n, k, start, stride = numbers
    LAYOUT: gl.constexpr = _sum_layout(COLUMNS, DTYPE)
    done = gl.to_tensor(0)
    down = gl.cdiv(m, ROWS)
    across = gl.cdiv(n, COLUMNS)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, block = _place(tile, down, across, SUPER)
        row = row * ROWS + WHICH * _HEIGHT
        column = block * COLUMNS
        z, done = _sum(k, done, shared, WHICH, True, True, COLUMNS, TERMS, STAGES, LAYOUT)
        r = row + gl.arange(0, _HEIGHT, gl.SliceLayout(1, LAYOUT))
        c = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
        if bias_ptr is not None:
            z += gl.load(bias_ptr + c, mask=c < n, other=0.0).to(gl.float32)[None, :]
        if BACKWARD:
            _finish_gradients(z, row, column, r, c, outputs, m, n, start, stride, LAYOUT)
        else:
            _finish_statistics(z, column, r, c, outputs, m, n, start, block)


@gluon.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["m", "n", "k", "a_stride", "b_stride", "start", "stride"]
)
def _linear_logits(
    a_ptr: gl.tensor,
    b_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    target_ptr: gl.tensor,
    rows_ptr: gl.tensor,
    out_ptr: gl.tensor,
    m: tl.int32,
    n: tl.int32,
    k: tl.int32,
    a_stride: tl.int64,
    b_stride: tl.int64,
    start: tl.int64,
    stride: tl.int64,
    BACKWARD: gl.constexpr,
    UNIT: gl.constexpr,
    UNIT_N: gl.constexpr,
    SUPER: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    TERMS: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLYING: gl.constexpr,
    LOADING: gl.constexpr,
) -> None:
    """Logits ``b @ a.T`` of m rows and n units of words, the first of which is ``start``.

    ``out`` is [blocks of COLUMNS words, m, 4], or the gradients, whose rows are ``stride`` units
    apart; ``a_stride`` and ``b_stride`` are the row strides of a and b. ``rows`` has a backward's
    numbers by row, see ``loss._row_factors``.
    """
    DTYPE: gl.constexpr = a_ptr.dtype.element_ty
    n = n * UNIT_N
    stride = stride * UNIT
    a = _described(a_ptr, n, k, a_stride * UNIT, True, COLUMNS, TERMS)
    b = _described(b_ptr, m, k, b_stride * UNIT, True, _HEIGHT, TERMS)
    tiles = gl.cdiv(m, ROWS) * gl.cdiv(n, COLUMNS)
    shared = _ring(True, True, 1, ROWS, COLUMNS, TERMS, STAGES, DTYPE)
    numbers = (tiles, m, n, k, start, stride)
    outputs = (out_ptr, target_ptr, rows_ptr)
    gl.warp_specialize(
        [
            (
                _multiply_logits,
                (outputs, bias_ptr, numbers, shared, 0, BACKWARD, SUPER, ROWS, COLUMNS, TERMS,
                 STAGES, DTYPE),
            ),
            (
                _multiply_logits,
                (outputs, bias_ptr, numbers, shared, 1, BACKWARD, SUPER, ROWS, COLUMNS, TERMS,
                 STAGES, DTYPE),
            ),
            (
                _load_all,
                ((a, b, None, None), (tiles, m, n, k), shared, True, True, UNIT, 1, 1, SUPER,
                 ROWS, COLUMNS, TERMS, 1, STAGES, 0),
            ),
        ],
        [4, 1],
        [MULTIPLYING, LOADING],
    )  # fmt: skip


# ------------------------------------------------------------------------------ launches

COLUMNS = 256
"""Words of a tile; each block of them counts as one shard in a forward's statistics."""
_TILE = {"SUPER": 16, "ROWS": 128, "COLUMNS": COLUMNS, "TERMS": 64, "STAGES": 4}
_REGISTERS = REGISTERS[2]
_WORTH = 2**30  # least number of multiplications


def serves(input: Tensor, weight: Tensor) -> bool:
    """Whether the kernels support a call: 16-bit matrices, dense aligned rows, and enough work."""
    return (
        _launch.has_gluon()
        and input.dtype in (torch.bfloat16, torch.float16)
        and _launch.limits(input.device).capability == HOPPER
        and input.shape[0] * input.shape[1] * weight.shape[0] >= _WORTH
        and all(
            it.stride(1) == 1
            and _describable(it.data_ptr(), it.itemsize, it.stride(0), it.shape[1])
            for it in (input, weight)
        )
    )


def _run(
    op: str, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    rows: Tensor | None, out: Tensor, start: int, stride: int,
) -> None:  # fmt: skip
    m, k = input.shape
    n = weight.shape[0]
    tiles = -(-m // _TILE["ROWS"]) * -(-n // COLUMNS)
    for what, size in (("rows", m), ("words", n), ("features", k), ("tiles", tiles)):
        check_size(op, what, size)
    unit = ALIGNMENT // input.itemsize
    unit_n = math.gcd(n, unit)
    device = input.device
    launch = launch_of(
        _linear_logits,
        device,
        (input.dtype, None if bias is None else bias.dtype, rows is None, out.dtype),
        threads=128,
        options={"maxnreg": _REGISTERS.launch},
        BACKWARD=rows is not None,
        UNIT=unit,
        UNIT_N=unit_n,
        **_TILE,
        MULTIPLYING=_REGISTERS.multiplying,
        LOADING=_REGISTERS.loading,
    )
    launch(
        (min(tiles, _launch.limits(device).multiprocessors), 1),
        (weight, input, bias, target, rows, out),
        (
            m,
            n // unit_n,
            k,
            weight.stride(0) // unit,
            input.stride(0) // unit,
            start,
            stride // unit,
        ),
    )


def store_statistics(
    op: str, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, stats: Tensor
) -> None:
    """Write ``[blocks of COLUMNS words, rows, 4]``: each block's statistics of each row."""
    _run(op, input, weight, bias, target, None, stats, 0, 0)


def store_gradients(
    op: str, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    rows: Tensor, out: Tensor, start: int,
) -> None:  # fmt: skip
    """Write the gradients of the logits of some words from ``start`` on.

    Args:
        rows: ``[4, rows]``, see ``loss._row_factors``.
        out: ``[rows, words]``, dense columns; the row stride is a multiple of 16 bytes.
    """
    _run(op, input, weight, bias, target, rows, out, start, out.stride(0))
