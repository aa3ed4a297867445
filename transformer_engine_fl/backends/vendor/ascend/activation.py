"""GEGLU, and its gradient, for the on-chip buffer of an NPU's vector core.

The kernel is persistent: one program per core loops over its share of the tiles, since starting a
program costs an NPU more than a loop iteration. A tile is narrow enough for its values to fit
into the buffer twice, so that the next tile is read while one is computed. GEGLU itself is defined
by flagos' kernels, which this one calls.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from transformer_engine_fl.backends._arguments import TensorPreparer, by_rows, fresh
from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import block_of, check_size
from transformer_engine_fl.backends.flagos.activation import results
from transformer_engine_fl.backends.vendor.ascend import INFO, AscendBackend
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.ops import activation as contracts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["dgeglu", "geglu"]


@triton.jit(do_not_specialize=["rows", "columns", "grad_stride", "x_stride"])  # type: ignore[untyped-decorator]
def _geglu(
    grad_ptr: tl.tensor,
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.int32,
    columns: tl.int32,
    grad_stride: tl.int64,
    x_stride: tl.int64,
    BLOCK: tl.constexpr,
) -> None:
    """GEGLU, or its gradient if ``grad_ptr`` is given, of every n-th tile."""
    blocks = tl.cdiv(columns, BLOCK)
    tiles = rows.to(tl.int64) * blocks
    for tile in tl.range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        row = tile // blocks
        column = (tile % blocks) * BLOCK + tl.arange(0, BLOCK)
        mask = column < columns
        x = x_ptr + row * x_stride + column
        if grad_ptr is None:
            value, _ = results(None, x, columns, mask, 0.0, 0.0, "gelu", False, True, tl.float32)
            out = out_ptr + row * columns + column
            tl.store(out, value.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            grad = grad_ptr + row * grad_stride + column
            da, db = results(grad, x, columns, mask, 0.0, 0.0, "gelu", False, True, tl.float32)
            out = out_ptr + row * (2 * columns) + column
            tl.store(out, da.to(out_ptr.dtype.element_ty), mask=mask)
            tl.store(out + columns, db.to(out_ptr.dtype.element_ty), mask=mask)


# Float32 values that an element has in the buffer at once, by whether it is the backward.
_LIVE = {False: 6, True: 10}
_BUFFERS = 2  # one is filled while the other is in use
_SHARE = 0.8  # part of the buffer; the compiler needs the rest


def _refusal(device: torch.device) -> str | None:
    if _launch.INTERPRETED:
        return _launch.unsupported_device(device)
    return None if device.type == INFO.device else f"{INFO.device!r} devices only"


_taking = TensorPreparer(_refusal)


class _Plan(NamedTuple):
    """How to run the kernel on a device.

    Attributes:
        launch: the kernel.
        block: the width of a tile.
        programs: the most programs of a launch.
    """

    launch: _launch.Launch
    block: int
    programs: int


def widest_block(backward: bool) -> int:
    """The widest tile that the buffer holds, a power of two."""
    buffer = AscendBackend(INFO).extra_config["buffer_bytes"]
    elements = int(buffer * _SHARE) // (4 * _LIVE[backward] * _BUFFERS)
    return 1 << elements.bit_length() - 1


@functools.cache
def _plan(block: int, dtypes: tuple[torch.dtype | None, ...], device: torch.device) -> _Plan:
    # Two in the interpreter, so that each iterates its loop.
    programs = 2 if _launch.INTERPRETED else AscendBackend(INFO).multiprocessor_count
    launch = _launch.Launch(_geglu, device, threads=None, BLOCK=block)
    return _Plan(launch, block, programs)


def _run(op: str, grad: Tensor | None, x: Tensor) -> Tensor:
    """GEGLU, or its gradient, of arguments that the contract has checked."""
    x, x_step = by_rows(_taking.plain(op, "input" if grad is None else "fwd_input", x))
    grad_step = columns = x.shape[-1] // 2
    if grad is not None:
        grad, grad_step = by_rows(_taking.plain(op, "grad", grad))
    if torch.float64 in (x.dtype, grad.dtype if grad is not None else None):
        raise NotSupportedError(f"{op}: an NPU's vector cores have no float64")
    output = fresh(op, x, (*x.shape[:-1], columns) if grad is None else x.shape)
    if not output.numel():
        return output
    rows = x.numel() // (2 * columns)
    check_size(op, "rows", rows)
    check_size(op, "columns", 2 * columns)
    block = min(block_of(columns), widest_block(grad is not None))
    plan = _plan(block, (x.dtype, grad.dtype if grad is not None else None), x.device)
    programs = min(plan.programs, rows * -(-columns // block))
    plan.launch((programs, 1), (grad, x, output), (rows, columns, grad_step, x_step))
    return output


def geglu(input: Tensor) -> Tensor:
    """``geglu`` of the contract."""
    contracts.geglu.check(input)
    return _run("geglu", None, input)


def dgeglu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """``dgeglu`` of the contract."""
    contracts.dgeglu.check(grad, fwd_input)
    return _run("dgeglu", grad, fwd_input)
