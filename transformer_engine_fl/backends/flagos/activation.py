"""Activations in Triton: elementwise and gated, their gradients, and a bias's gradient.

Each activation is defined once, in ``_value_and_slope``; one kernel computes all forwards and
backwards, and a second one the backwards that also sum over the rows. Elementwise tensors without
gaps are treated as one long row, whatever their shape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import (
    NOT_A_TENSOR,
    PLAIN,
    TRITON_TYPES,
    WIDEST_UNIT,
    add_to_cache,
    block_of,
    by_rows,
    check_across,
    check_fresh,
    check_size,
    plain,
    rows_of_tile,
)
from transformer_engine_fl.backends.flagos._fetch import fetch
from transformer_engine_fl.backends.flagos._sums import SumOfPrograms
from transformer_engine_fl.backends.flagos._tiles import MOST_ELEMENTS, Tile, bounded, tile_choice
from transformer_engine_fl.backends.flagos.tuning import Choice
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.ops import activation as contracts
from transformer_engine_fl.ops._dtypes import FLOATS, math_dtype

if TYPE_CHECKING:
    from transformer_engine_fl.core.contract import Contract

__all__ = [
    "ACTIVATIONS",
    "clamped_dswiglu",
    "clamped_swiglu",
    "dbias_dgelu",
    "dbias_dqgelu",
    "dbias_drelu",
    "dbias_dsilu",
    "dbias_dsrelu",
    "dgeglu",
    "dgelu",
    "dglu",
    "dqgeglu",
    "dqgelu",
    "dreglu",
    "drelu",
    "dsilu",
    "dsreglu",
    "dsrelu",
    "dswiglu",
    "geglu",
    "gelu",
    "glu",
    "qgeglu",
    "qgelu",
    "reglu",
    "relu",
    "silu",
    "sreglu",
    "srelu",
    "swiglu",
]

# ------------------------------------------------------------------------------ kernels
#
# ``columns`` and the row strides count units of UNIT elements. A gated row holds the
# activated half and, ``columns`` further on, the gate. Arithmetic is in ACC.

_LOG2E = 1 / math.log(2)
_GELU_SLOPE = tl.constexpr(2 * math.sqrt(2 / math.pi))
_GELU_CUBE = tl.constexpr(0.044715)
_QGELU_SLOPE = tl.constexpr(1.702)
_PER_E = tl.constexpr(_LOG2E)
_GELU_LINEAR = tl.constexpr(2 * math.sqrt(2 / math.pi) * _LOG2E)
_GELU_CUBIC = tl.constexpr(2 * math.sqrt(2 / math.pi) * _LOG2E * 0.044715)
_QGELU_LINEAR = tl.constexpr(1.702 * _LOG2E)
_FAR = tl.constexpr(32.0**2)  # a square from which on a gelu is 0 or x, in float64 too


@triton.jit  # type: ignore[untyped-decorator]
def _sigmoid(z: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """``1 / (1 + 2 ** -z)``: the logit is in powers of 2, not of e."""
    if PTX and z.dtype == tl.float32:
        # Triton's own functions take several instructions each, to keep numbers that vanish beside
        # 1 and subnormal ones; these instructions have errors of two ulp and of one.
        return tl.inline_asm_elementwise(
            """{ .reg .f32 t;
            neg.f32 t, $1;
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t; }""",
            "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        one = _constant(1.0, z.dtype)
        return one / (one + tl.exp2(-z))


@triton.jit  # type: ignore[untyped-decorator]
def _constant(value: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """A number with the precision of ``dtype``."""
    if dtype == tl.float64:
        return tl.full((), value, dtype)
    else:  # Gluon calls this too, and makes no tensor of it
        return value


@triton.jit  # type: ignore[untyped-decorator]
def _clamp(x: tl.tensor, most: tl.tensor) -> tl.tensor:
    """Clamp to ``most`` of either sign; NaN stays, for which tl.clamp has no float64 code."""
    return tl.where(x > most, most, tl.where(x < -most, -most, x))


@triton.jit  # type: ignore[untyped-decorator]
def _value_and_slope(
    x: tl.tensor, steepness: tl.tensor, KIND: tl.constexpr, PTX: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """An activation and its derivative; the compiler removes what is not used."""
    if KIND == "relu":
        below = x <= 0  # false for NaN
        return tl.where(below, 0.0, x), 1 - below.to(x.dtype)
    elif KIND == "srelu":
        above = tl.where(x <= 0, 0.0, x)
        return above * above, above + above
    elif KIND == "sigmoid":
        logit = x * tl.full((), _PER_E, x.dtype)
        s = _sigmoid(logit, PTX)
        return s, s * _sigmoid(-logit, PTX)
    else:
        # x * sigmoid(logit(x)); (1 + tanh(u)) / 2 is sigmoid(2 * u)
        if KIND == "gelu":
            # The minimum loses a NaN, but x still is one.
            square = tl.minimum(x * x, _constant(_FAR, x.dtype))
            cubic = _constant(_GELU_CUBIC, x.dtype)
            logit = x * (square * cubic + _constant(_GELU_LINEAR, x.dtype))
            bent = _constant(3 * _GELU_SLOPE * _GELU_CUBE, x.dtype)
            logit_slope = square * bent + _constant(_GELU_SLOPE, x.dtype)
        elif KIND == "silu":
            logit = x * tl.full((), _PER_E, x.dtype)
            logit_slope = tl.full((), 1.0, x.dtype)
        elif KIND == "qgelu":
            logit = x * tl.full((), _QGELU_LINEAR, x.dtype)
            logit_slope = tl.full((), _QGELU_SLOPE, x.dtype)
        else:
            logit = x * (steepness * tl.full((), _PER_E, x.dtype))
            logit_slope = steepness
        s = _sigmoid(logit, PTX)
        # The slope of sigmoid falls faster than x grows, so it comes first in the product.
        return x * s, s + (s * (1 - s)) * x * logit_slope


@triton.jit  # type: ignore[untyped-decorator]
def results(
    grad_ptr: tl.tensor,
    x_ptr: tl.tensor,
    columns: tl.tensor,
    mask: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    KIND: tl.constexpr,
    PTX: tl.constexpr,
    GATED: tl.constexpr,
    ACC: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The activation, or if ``grad_ptr`` is given its gradient and that of the gate.

    The gate lies ``columns`` further on; a single result is returned twice.
    """
    x = fetch(x_ptr, mask).to(ACC)
    clamped: tl.constexpr = KIND == "clamped"
    if GATED:
        gate = fetch(x_ptr + columns, mask).to(ACC)
        if clamped:
            most = tl.full((), limit, ACC)
            outside = x > most  # false for NaN
            gate_outside = (gate > most) | (gate < -most)
            x = tl.where(x > most, most, x)
            gate = _clamp(gate, most) + 1
    steepness = tl.full((), alpha, ACC)
    value, slope = _value_and_slope(x, steepness, KIND, PTX)
    if grad_ptr is None:
        if GATED:
            value *= gate
        return value, value
    else:
        grad = fetch(grad_ptr, mask).to(ACC)
        if GATED:
            dx = grad * gate * slope
            dgate = grad * value
            if clamped:
                dx = tl.where(outside, 0, dx)
                dgate = tl.where(gate_outside, 0, dgate)
            return dx, dgate
        else:
            dx = grad * slope
            return dx, dx


@triton.jit(do_not_specialize=["rows", "columns", "grad_stride", "x_stride", "limit", "alpha"])  # type: ignore[untyped-decorator]
def _elementwise(
    grad_ptr: tl.tensor,
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int64,
    grad_stride: tl.int64,
    x_stride: tl.int64,
    limit: tl.float64,
    alpha: tl.float64,
    KIND: tl.constexpr,
    PTX: tl.constexpr,
    GATED: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The activation of one tile, or if ``grad_ptr`` is given its gradient."""
    columns = columns * UNIT
    blocks = tl.cdiv(columns, BLOCK).to(tl.int32)  # at most the number of tiles
    tile = tl.program_id(0)
    above = tile // blocks
    row = above.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tile - above * blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < columns)
    x_ptr += row * (x_stride * UNIT) + column
    if grad_ptr is not None:
        grad_ptr += row * (grad_stride * UNIT) + column
    first, second = results(grad_ptr, x_ptr, columns, mask, limit, alpha, KIND, PTX, GATED, ACC)
    if GATED and grad_ptr is not None:
        out = out_ptr + row * (2 * columns) + column
        tl.store(out, first.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(out + columns, second.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        out = out_ptr + row * columns + column
        tl.store(out, first.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "columns", "grad_stride", "x_stride"])  # type: ignore[untyped-decorator]
def _with_bias(
    grad_ptr: tl.tensor,
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    grad_stride: tl.int64,
    x_stride: tl.int64,
    KIND: tl.constexpr,
    PTX: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """The gradient of many tiles, one below the other, and its sum over the rows."""
    ACC: tl.constexpr = partial_ptr.dtype.element_ty
    columns = columns * UNIT
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((ROWS, BLOCK), ACC)
    last = tl.cdiv(rows, ROWS)
    for tile in tl.range(tl.program_id(0), last, tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        start = row.to(tl.int64)[:, None]
        grad = fetch(grad_ptr + start * (grad_stride * UNIT) + column[None, :], mask).to(ACC)
        x = fetch(x_ptr + start * (x_stride * UNIT) + column[None, :], mask).to(ACC)
        _, slope = _value_and_slope(x, x, KIND, PTX)
        dx = grad * slope
        total += dx
        out = out_ptr + start * columns + column[None, :]
        tl.store(out, dx.to(out_ptr.dtype.element_ty), mask=mask)
    partial_ptr += tl.program_id(0).to(tl.int64) * columns
    tl.store(partial_ptr + column, tl.sum(total, axis=0), mask=inside)


# -------------------------------------------------------------------------------- plans

_BIAS_STAGES = 5  # pipeline stages, where loads can be pipelined


class _Activation(NamedTuple):
    """An operator.

    Attributes:
        contract: its contract, which says whether it takes a gradient, and which options.
        kind: see the kernels.
        gated: whether a row has two halves.
        backward: whether it takes a gradient.
    """

    contract: Contract[..., Any]
    kind: str
    gated: bool = False
    backward: bool = False


class _Plan(NamedTuple):
    """How to run an activation or its gradient.

    Attributes:
        launch: the kernel.
        unit, rows, block: see the kernels.
    """

    launch: _launch.Launch
    unit: int
    rows: int
    block: int


class _BiasPlan(NamedTuple):
    """How to run a gradient together with that of a bias.

    Attributes:
        launch: the kernel.
        total: the sum over its programs.
        unit, rows, block: see the kernels.
        most: most programs for each block of columns.
        sums: dtype of the sums.
    """

    launch: _launch.Launch
    total: SumOfPrograms
    unit: int
    rows: int
    block: int
    most: int
    sums: torch.dtype


_PLANS: dict[object, _Plan] = {}
_BIAS_PLANS: dict[object, _BiasPlan] = {}


class _BiasTile(NamedTuple):
    """How a gradient is cut whose rows are summed.

    Attributes:
        threads: threads of a program.
        elements: elements of a tile.
        columns: most columns of a tile.
        programs: programs per multiprocessor.
    """

    threads: int
    elements: int
    columns: int
    programs: int


# By whether it is gated (the tile is of one half of a row), and whether it is a backward.
_TILES = {
    (gated, backward): tile_choice(
        f"{'gated_' * gated}activation_{'bwd' if backward else 'fwd'}",
        _PLANS,
        Tile(128, 2048 if gated else 4096),
        in_bytes=True,
    )
    for gated in (False, True)
    for backward in (False, True)
}


def _bias_candidates(columns: int, itemsize: int) -> Iterator[_BiasTile]:
    for threads, elements, widest in itertools.product((128, 256), (1024, 2048), (512, 1024)):
        yield _BiasTile(threads, elements, widest, 3)


_BIAS_TILE = Choice(
    "activation_bwd_with_bias",
    _BiasTile,
    key=("columns", "itemsize"),
    rounded=("columns",),
    candidates=_bias_candidates,
    heuristic=lambda device, columns, itemsize: _BiasTile(128, 1024, 1024, 3),
    wrong=bounded(
        threads=(32, 1024), elements=(128, 2**14), columns=(16, 2**14), programs=range(1, 33)
    ),
    plans=(_BIAS_PLANS,),
)
_FLOATS = frozenset(getattr(torch, name) for name in FLOATS)


def _plan(
    of: _Activation, dtype: torch.dtype, columns: int, unit: int, device: torch.device
) -> _Plan:
    threads, tile = _TILES[of.gated, of.backward](device, dtype.itemsize)
    block = min(block_of(columns), tile)
    rows = rows_of_tile(tile, block)
    launch = _launch.Launch(
        _elementwise,
        device,
        threads=threads,
        KIND=of.kind,
        PTX=_launch.has_ptx(),
        GATED=of.gated,
        ACC=TRITON_TYPES[math_dtype(dtype)],
        UNIT=unit,
        ROWS=rows,
        BLOCK=block,
    )
    return _Plan(launch, unit, rows, block)


def _bias_plan(
    of: _Activation, dtype: torch.dtype, columns: int, unit: int, device: torch.device
) -> _BiasPlan:
    tile = _BIAS_TILE(device, columns, dtype.itemsize)
    block = min(block_of(columns), tile.columns)
    rows = rows_of_tile(tile.elements, block)
    launch = _launch.Launch(
        _with_bias,
        device,
        threads=tile.threads,
        KIND=of.kind,
        PTX=_launch.has_ptx(),
        UNIT=unit,
        ROWS=rows,
        BLOCK=block,
        STAGES=_BIAS_STAGES if _launch.has_ptx() else 1,
    )
    blocks = -(-columns // block)
    most = max(1, tile.programs * _launch.limits(device).multiprocessors // blocks)
    total = SumOfPrograms(columns, unit, device)
    return _BiasPlan(launch, total, unit, rows, block, most, math_dtype(dtype))


# ---------------------------------------------------------------------------- operators


def _is_dense(of: _Activation, grad: Tensor | None, x: Tensor) -> bool:
    """Whether a quick inspection finds plain tensors without gaps that fit together."""
    try:
        return bool(
            type(x) in PLAIN
            and x.is_contiguous()
            and x.dim()
            and not x.is_neg()  # a dense tensor may be negated lazily
            and x.dtype in _FLOATS
            and not (of.gated and x.shape[-1] % 2)
            and _launch.unsupported_device(x.device) is None
            and (
                not of.backward
                or (
                    grad is not None
                    and type(grad) in PLAIN
                    and grad.is_contiguous()
                    and not grad.is_neg()
                    and grad.dtype in _FLOATS
                    and grad.dim() == x.dim()
                    and grad.shape[:-1] == x.shape[:-1]
                    and grad.shape[-1] << of.gated == x.shape[-1]
                    and grad.device == x.device
                )
            )
        )
    except NOT_A_TENSOR:
        return False


def _examined(
    of: _Activation, grad: Tensor | None, x: Tensor, options: dict[str, Any]
) -> tuple[Tensor | None, Tensor, int, int]:
    """The tensors after every check, with dense columns, and their row strides."""
    op = of.contract
    if of.backward:
        op.check(grad, x, **options)
    else:
        op.check(x, **options)
    if grad is not None:
        grad = plain(op.name, "grad", grad)
    x = plain(op.name, op.dispatch_on, x)
    if not all(isinstance(value, int | float) for value in options.values()):
        raise NotSupportedError(f"{op.name}: its options are symbolic, not concrete numbers")
    if not x.dim():
        return grad, x, 1, 1
    x, x_step = by_rows(x)
    grad_step = x_step if x_step != x.shape[-1] else x.shape[-1] >> of.gated
    if grad is not None:
        grad, grad_step = by_rows(grad)
    return grad, x, grad_step, x_step


def _run(
    of: _Activation, grad: Tensor | None, x: Tensor, limit: float = 0.0, alpha: float = 0.0
) -> Tensor:
    """The activation of ``x``, or its gradient."""
    options = {"limit": limit, "alpha": alpha} if of.kind == "clamped" else {}
    if not options and _is_dense(of, grad, x):
        x_step = x.shape[-1]
        grad_step = x_step >> of.gated
    else:
        grad, x, grad_step, x_step = _examined(of, grad, x, options)
    shape = tuple(x.shape)
    columns = shape[-1] >> of.gated if shape else 1
    if of.gated and grad is None:
        shape = (*shape[:-1], columns)
    output = torch.empty(shape, dtype=x.dtype, device=x.device)
    check_fresh(of.contract.name, output)
    size = x.numel() >> of.gated
    if not size:
        return output
    if not of.gated and x_step == columns == grad_step:
        columns = x_step = grad_step = size
    unit = math.gcd(columns, grad_step, x_step, WIDEST_UNIT)
    dtypes = (x.dtype, None if grad is None else grad.dtype)
    key = (of.kind, of.gated, dtypes, min(columns, MOST_ELEMENTS), unit, x.device)
    plan = _PLANS.get(key) or add_to_cache(_PLANS, key, _plan(of, x.dtype, columns, unit, x.device))
    rows = size // columns
    check_size(of.contract.name, "rows", rows)
    tiles = -(-rows // plan.rows) * -(-columns // plan.block)
    check_size(of.contract.name, "tiles", tiles)
    plan.launch(
        (tiles, 1),
        (grad, x, output),
        (rows, columns // unit, grad_step // unit, x_step // unit, float(limit), float(alpha)),
    )
    return output


def _run_with_bias(of: _Activation, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over the rows of the activation's gradient, and that gradient."""
    if _is_dense(of, grad, x):
        grad_step = x_step = x.shape[-1]
        given: Tensor | None = grad
    else:
        given, x, grad_step, x_step = _examined(of, grad, x, {})
    assert given is not None
    columns = x.shape[-1]
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    check_fresh(of.contract.name, output)
    if not x.numel():
        return grad.new_zeros((columns,)), output
    rows = x.numel() // columns
    check_size(of.contract.name, "rows", rows)
    check_size(of.contract.name, "columns", columns)
    unit = math.gcd(columns, grad_step, x_step, WIDEST_UNIT)
    key = (of.kind, x.dtype, given.dtype, columns, unit, x.device)
    plan = _BIAS_PLANS.get(key) or add_to_cache(
        _BIAS_PLANS, key, _bias_plan(of, x.dtype, columns, unit, x.device)
    )
    programs, across = min(-(-rows // plan.rows), plan.most), -(-columns // plan.block)
    check_across(of.contract.name, across)
    partial = torch.empty((programs, columns), dtype=plan.sums, device=x.device)
    dbias = torch.empty((columns,), dtype=given.dtype, device=x.device)
    plan.launch(
        (programs, across),
        (given, x, output, partial),
        (rows, columns // unit, grad_step // unit, x_step // unit),
    )
    plan.total(partial, dbias, None, programs)
    return dbias, output


_GELU = _Activation(contracts.gelu, "gelu")
_DGELU = _Activation(contracts.dgelu, "gelu", backward=True)
_DBIAS_DGELU = _Activation(contracts.dbias_dgelu, "gelu", backward=True)
_QGELU = _Activation(contracts.qgelu, "qgelu")
_DQGELU = _Activation(contracts.dqgelu, "qgelu", backward=True)
_DBIAS_DQGELU = _Activation(contracts.dbias_dqgelu, "qgelu", backward=True)
_RELU = _Activation(contracts.relu, "relu")
_DRELU = _Activation(contracts.drelu, "relu", backward=True)
_DBIAS_DRELU = _Activation(contracts.dbias_drelu, "relu", backward=True)
_SRELU = _Activation(contracts.srelu, "srelu")
_DSRELU = _Activation(contracts.dsrelu, "srelu", backward=True)
_DBIAS_DSRELU = _Activation(contracts.dbias_dsrelu, "srelu", backward=True)
_SILU = _Activation(contracts.silu, "silu")
_DSILU = _Activation(contracts.dsilu, "silu", backward=True)
_DBIAS_DSILU = _Activation(contracts.dbias_dsilu, "silu", backward=True)
_GLU = _Activation(contracts.glu, "sigmoid", gated=True)
_DGLU = _Activation(contracts.dglu, "sigmoid", gated=True, backward=True)
_GEGLU = _Activation(contracts.geglu, "gelu", gated=True)
_DGEGLU = _Activation(contracts.dgeglu, "gelu", gated=True, backward=True)
_QGEGLU = _Activation(contracts.qgeglu, "qgelu", gated=True)
_DQGEGLU = _Activation(contracts.dqgeglu, "qgelu", gated=True, backward=True)
_REGLU = _Activation(contracts.reglu, "relu", gated=True)
_DREGLU = _Activation(contracts.dreglu, "relu", gated=True, backward=True)
_SREGLU = _Activation(contracts.sreglu, "srelu", gated=True)
_DSREGLU = _Activation(contracts.dsreglu, "srelu", gated=True, backward=True)
_SWIGLU = _Activation(contracts.swiglu, "silu", gated=True)
_DSWIGLU = _Activation(contracts.dswiglu, "silu", gated=True, backward=True)
_CLAMPED_SWIGLU = _Activation(contracts.clamped_swiglu, "clamped", gated=True)
_CLAMPED_DSWIGLU = _Activation(contracts.clamped_dswiglu, "clamped", gated=True, backward=True)

ACTIVATIONS = {it.contract.name: it for it in tuple(globals().values()) if type(it) is _Activation}
"""By the operator's name; also used by the quantised epilogues."""


@repeating
def gelu(input: Tensor) -> Tensor:
    """``gelu`` of the contract."""
    return _run(_GELU, None, input)


@repeating
def qgelu(input: Tensor) -> Tensor:
    """``qgelu`` of the contract."""
    return _run(_QGELU, None, input)


@repeating
def relu(input: Tensor) -> Tensor:
    """``relu`` of the contract."""
    return _run(_RELU, None, input)


@repeating
def srelu(input: Tensor) -> Tensor:
    """``srelu`` of the contract."""
    return _run(_SRELU, None, input)


@repeating
def silu(input: Tensor) -> Tensor:
    """``silu`` of the contract."""
    return _run(_SILU, None, input)


@repeating
def glu(input: Tensor) -> Tensor:
    """``glu`` of the contract."""
    return _run(_GLU, None, input)


@repeating
def geglu(input: Tensor) -> Tensor:
    """``geglu`` of the contract."""
    return _run(_GEGLU, None, input)


@repeating
def qgeglu(input: Tensor) -> Tensor:
    """``qgeglu`` of the contract."""
    return _run(_QGEGLU, None, input)


@repeating
def reglu(input: Tensor) -> Tensor:
    """``reglu`` of the contract."""
    return _run(_REGLU, None, input)


@repeating
def sreglu(input: Tensor) -> Tensor:
    """``sreglu`` of the contract."""
    return _run(_SREGLU, None, input)


@repeating
def swiglu(input: Tensor) -> Tensor:
    """``swiglu`` of the contract."""
    return _run(_SWIGLU, None, input)


@repeating
def clamped_swiglu(input: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """``clamped_swiglu`` of the contract."""
    return _run(_CLAMPED_SWIGLU, None, input, limit, alpha)


@repeating
def dgelu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """``dgelu`` of the contract."""
    return _run(_DGELU, grad, fwd_input)


@repeating
def dqgelu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """``dqgelu`` of the contract."""
    return _run(_DQGELU, grad, fwd_input)


@repeating
def drelu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """``drelu`` of the contract."""
    return _run(_DRELU, grad, fwd_input)


@repeating
def dsrelu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """``dsrelu`` of the contract."""
    return _run(_DSRELU, grad, fwd_input)


@repeating
def dsilu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """``dsilu`` of the contract."""
    return _run(_DSILU, grad, fwd_input)


@repeating
def dglu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """``dglu`` of the contract."""
    return _run(_DGLU, grad, fwd_input)


@repeating
def dgeglu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """``dgeglu`` of the contract."""
    return _run(_DGEGLU, grad, fwd_input)


@repeating
def dqgeglu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """``dqgeglu`` of the contract."""
    return _run(_DQGEGLU, grad, fwd_input)


@repeating
def dreglu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """``dreglu`` of the contract."""
    return _run(_DREGLU, grad, fwd_input)


@repeating
def dsreglu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """``dsreglu`` of the contract."""
    return _run(_DSREGLU, grad, fwd_input)


@repeating
def dswiglu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """``dswiglu`` of the contract."""
    return _run(_DSWIGLU, grad, fwd_input)


@repeating
def clamped_dswiglu(
    grad: Tensor, fwd_input: Tensor, limit: float = 7.0, alpha: float = 1.702
) -> Tensor:
    """``clamped_dswiglu`` of the contract."""
    return _run(_CLAMPED_DSWIGLU, grad, fwd_input, limit, alpha)


@repeating
def dbias_dgelu(grad: Tensor, fwd_input: Tensor) -> tuple[Tensor, Tensor]:
    """``dbias_dgelu`` of the contract."""
    return _run_with_bias(_DBIAS_DGELU, grad, fwd_input)


@repeating
def dbias_dqgelu(grad: Tensor, fwd_input: Tensor) -> tuple[Tensor, Tensor]:
    """``dbias_dqgelu`` of the contract."""
    return _run_with_bias(_DBIAS_DQGELU, grad, fwd_input)


@repeating
def dbias_drelu(grad: Tensor, fwd_input: Tensor) -> tuple[Tensor, Tensor]:
    """``dbias_drelu`` of the contract."""
    return _run_with_bias(_DBIAS_DRELU, grad, fwd_input)


@repeating
def dbias_dsrelu(grad: Tensor, fwd_input: Tensor) -> tuple[Tensor, Tensor]:
    """``dbias_dsrelu`` of the contract."""
    return _run_with_bias(_DBIAS_DSRELU, grad, fwd_input)


@repeating
def dbias_dsilu(grad: Tensor, fwd_input: Tensor) -> tuple[Tensor, Tensor]:
    """``dbias_dsilu`` of the contract."""
    return _run_with_bias(_DBIAS_DSILU, grad, fwd_input)
