"""The optimizer's operators in Triton: few launches, however many tensors there are.

A launch covers all rows of a table (see ``_lists.py``); each program takes a chunk of one row. A
chunk is processed tile by tile: whole tiles with full vectors, the last tile of a tensor with a
mask.

What an operator writes under a flag is not written while the flag is set: each program reads the
flag and returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_engine_fl.backends._optimizer import ListOperators
from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import launch_for, loaded_launch
from transformer_engine_fl.backends.flagos._fetch import fetch
from transformer_engine_fl.backends.flagos._lists import (
    ALIGNMENT,
    LIST_PREPARER,
    Demand,
    Group,
    Tiles,
    tiles_choice,
    whole_chunk,
)
from transformer_engine_fl.backends.flagos._narrow import LARGEST_FLOAT32
from transformer_engine_fl.backends.flagos._narrow import rounded as _as

__all__ = [
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_param_remainder",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_compute_scale_inv_e8m0",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]

_ALIGNMENT = tl.constexpr(ALIGNMENT)
_INFINITE = tl.constexpr(0x7F800000)
_MISSING = tl.constexpr(0x7FC00000)  # the NaN that is written where its bits matter

# ------------------------------------------------------------------------------ kernels
#
# In all kernels: the first pointer is the table, ``rows`` its number of rows, FIELDS the numbers of
# a row in it. ALIGNED says that every tensor of the table is aligned; RUN is the number of elements
# of the widest dtype that fill a vector: loads of narrower dtypes are cut to as many, so that every
# tensor of a tile is distributed over the threads in the same way. A tile has TILE elements and a
# chunk CHUNK.


@triton.jit  # type: ignore[untyped-decorator]
def _chunk(
    table_ptr: tl.tensor,
    rows: tl.tensor,
    FIELDS: tl.constexpr,
    CHUNK: tl.constexpr,
    SEARCH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """This program's chunk: the place of its row's addresses, its first element, its length."""
    chunk = tl.program_id(0)
    begun = tl.zeros((SEARCH,), tl.int32)
    for first in tl.range(0, rows, SEARCH):
        row = first + tl.arange(0, SEARCH)
        start = tl.load(table_ptr + row, mask=row < rows, other=1 << 40)
        begun += (start <= chunk).to(tl.int32)
    row = tl.sum(begun, axis=0) - 1
    entry = table_ptr + rows + row.to(tl.int64) * FIELDS
    element = (chunk - tl.load(table_ptr + row)) * CHUNK
    return entry + 1, element, tl.minimum(tl.load(entry) - element, CHUNK).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _at(
    entry: tl.tensor,
    FIELD: tl.constexpr,
    element: tl.tensor,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tensor:
    """A pointer to an element of a row's tensor."""
    pointer = tl.load(entry + FIELD).to(tl.pointer_type(KIND))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, _ALIGNMENT)
    return pointer + element


@triton.jit  # type: ignore[untyped-decorator]
def _places(tile: tl.tensor, TILE: tl.constexpr, RUN: tl.constexpr) -> tl.tensor:
    """The elements of a tile, as offsets from the chunk's first."""
    return tl.max_contiguous(tl.multiple_of(tile + tl.arange(0, TILE), RUN), RUN)


@triton.jit  # type: ignore[untyped-decorator]
def _is_up(flag_ptr: tl.tensor) -> tl.tensor:
    """Whether the flag is set, so that nothing is to be written."""
    if flag_ptr is None:
        return False
    else:
        return tl.load(flag_ptr) != 0


@triton.jit  # type: ignore[untyped-decorator]
def _root(x: tl.tensor) -> tl.tensor:
    """The square root, rounded correctly."""
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit  # type: ignore[untyped-decorator]
def _quotient(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """x over y, rounded correctly."""
    if x.dtype == tl.float32:
        return tl.div_rn(x, y)
    else:
        return x / y


@triton.jit  # type: ignore[untyped-decorator]
def _factor(number_ptr: tl.tensor, number: tl.tensor, ACC: tl.constexpr) -> tl.tensor:
    """A number on the device, or the one that was passed."""
    if number_ptr is None:
        return tl.full((), number, ACC)
    else:
        return tl.load(number_ptr).to(ACC)


# --------------------------------------------------------------------- scaling and norms


@triton.jit  # type: ignore[untyped-decorator]
def _scale_tile(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    mask: tl.tensor,
    factor: tl.tensor,
    Y: tl.constexpr,
) -> tl.tensor:
    """Write a tile; returns where the input is not finite."""
    x = fetch(x_ptr, mask).to(factor.dtype)
    tl.store(y_ptr, _as(x * factor, Y), mask=mask)
    return (tl.abs(x) < float("inf")) == 0


@triton.jit(do_not_specialize=["rows", "scale"])  # type: ignore[untyped-decorator]
def _scale(
    table_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    rows: tl.int32,
    scale: tl.float64,
    X: tl.constexpr,
    Y: tl.constexpr,
    ACC: tl.constexpr,
    FIELDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    SEARCH: tl.constexpr,
) -> None:
    """y = x * scale; sets the flag if an x is not finite."""
    entry, element, length = _chunk(table_ptr, rows, FIELDS, CHUNK, SEARCH)
    x_ptr = _at(entry, 0, element, X, ALIGNED)
    y_ptr = _at(entry, 1, element, Y, ALIGNED)
    factor = _factor(scale_ptr, scale, ACC)
    if flag_ptr is None and X == Y:
        # Multiplying by 1 in place changes nothing, so nothing is read.
        same = tl.load(entry) == tl.load(entry + 1)
        length = tl.where(same & (factor == 1), 0, length)
    found = tl.zeros((TILE,), tl.int1)
    for tile in tl.range(0, length, TILE):
        place = _places(tile, TILE, RUN)
        if tile + TILE <= length:
            found = found | _scale_tile(x_ptr + place, y_ptr + place, None, factor, Y)
        else:
            inside = place < length
            found = found | _scale_tile(x_ptr + place, y_ptr + place, inside, factor, Y)
    if flag_ptr is not None:
        tl.store(flag_ptr, 1, mask=tl.max(found.to(tl.int32), axis=0) != 0)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _squares(
    table_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    rows: tl.int32,
    X: tl.constexpr,
    ACC: tl.constexpr,
    FIELDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    SEARCH: tl.constexpr,
) -> None:
    """The sum of (x * scale)**2 over each chunk."""
    entry, element, length = _chunk(table_ptr, rows, FIELDS, CHUNK, SEARCH)
    x_ptr = _at(entry, 0, element, X, ALIGNED)
    slot = tl.load(entry + 1) + element // CHUNK
    total = tl.zeros((TILE,), ACC)
    for tile in tl.range(0, length, TILE):
        place = _places(tile, TILE, RUN)
        if tile + TILE <= length:
            x = fetch(x_ptr + place).to(ACC)
        else:
            x = fetch(x_ptr + place, place < length).to(ACC)
        if scale_ptr is not None:
            # Elements beyond the end must stay 0: times an infinite scale they would be NaN.
            x = tl.where(place < length, x * tl.load(scale_ptr).to(ACC), 0)
        total += x * x
    tl.store(sums_ptr + slot, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["chunks"])  # type: ignore[untyped-decorator]
def _norms(
    sums_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    norms_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    chunks: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    """The root of the sum of all chunks in program 0, of row r's chunks in program r + 1."""
    row = tl.program_id(0) - 1
    first = 0
    end = chunks
    if norms_ptr is not None:  # noqa: SIM102 - the compiler's condition, and the device's
        if row >= 0:
            first = tl.load(slots_ptr + row).to(tl.int32)
            end = tl.load(slots_ptr + row + 1).to(tl.int32)
    total = tl.zeros((BLOCK,), sums_ptr.dtype.element_ty)
    for block in tl.range(first, end, BLOCK):
        slot = block + tl.arange(0, BLOCK)
        total += tl.load(sums_ptr + slot, mask=slot < end, other=0)
    norm = _root(tl.sum(total, axis=0))
    if norms_ptr is not None:
        tl.store(norms_ptr + row, norm, mask=row >= 0)
    tl.store(norm_ptr, norm, mask=row < 0)
    if flag_ptr is not None:
        finite = norm < float("inf")
        tl.store(flag_ptr, 1, mask=(row < 0) & (finite == 0))


# ---------------------------------------------------------------------------------- Adam


@triton.jit  # type: ignore[untyped-decorator]
def _joined(high: tl.tensor, low: tl.tensor) -> tl.tensor:
    """The float32 with this rounded upper half and this lower half, both int16."""
    low = low.to(tl.int32)
    high = high.to(tl.int32) - (low < 0).to(tl.int32)
    return ((high << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _halves(master: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """A float32's rounded upper half and its lower half, as int16."""
    bits = tl.where(master == master, master.to(tl.int32, bitcast=True), _MISSING)
    low = (bits << 16) >> 16
    high = (bits >> 16) + (low < 0).to(tl.int32)
    return high.to(tl.int16), low.to(tl.int16)


@triton.jit  # type: ignore[untyped-decorator]
def _float8(x: tl.tensor, MANTISSA: tl.constexpr) -> tl.tensor:
    """The byte of the nearest float8 with MANTISSA bits; too large a value gives the largest."""
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    LARGEST: tl.constexpr = 0x43E00000 if MANTISSA == 3 else 0x47600000  # 448, 57344
    CUT: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, LARGEST)
    code = (size + ((1 << (CUT - 1)) - 1) + ((size >> CUT) & 1)) >> CUT
    # Below the least normal number: add a number whose last bit is worth the least subnormal.
    SUM: tl.constexpr = (151 - BIAS - MANTISSA) << 23
    carrier = tl.full((), SUM, tl.int32).to(tl.float32, bitcast=True)
    below = (size.to(tl.float32, bitcast=True) + carrier).to(tl.int32, bitcast=True) - SUM
    normal = size >= ((128 - BIAS) << 23)
    code = tl.where(normal, code - ((127 - BIAS) << MANTISSA), below)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def _adam_tile(
    g_ptr: tl.tensor,
    p_ptr: tl.tensor,
    m_ptr: tl.tensor,
    v_ptr: tl.tensor,
    w_ptr: tl.tensor,
    mask: tl.tensor,
    keep1: tl.tensor,
    take1: tl.tensor,
    keep2: tl.tensor,
    take2: tl.tensor,
    share1: tl.tensor,
    share2: tl.tensor,
    eps: tl.tensor,
    decay: tl.tensor,
    lr: tl.tensor,
    inv_scale: tl.tensor,
    scale8: tl.tensor,
    P: tl.constexpr,
    M: tl.constexpr,
    ACC: tl.constexpr,
    FORM: tl.constexpr,
    DECOUPLED: tl.constexpr,
    SHORT: tl.constexpr,
    MANTISSA: tl.constexpr,
) -> tl.tensor:
    """A step on a tile; returns the parameters after it."""
    g = fetch(g_ptr, mask).to(ACC)
    m = fetch(m_ptr, mask).to(ACC)
    v = fetch(v_ptr, mask).to(ACC)
    if FORM == "plain":
        p = fetch(p_ptr, mask).to(ACC)
    elif FORM == "remainder":
        high = fetch(p_ptr, mask)
        p = _joined(high, fetch(w_ptr, mask))
    else:
        p = fetch(w_ptr, mask)
    if inv_scale is not None:
        g = g * inv_scale
    if not DECOUPLED:
        g = g + decay * p
    # Interpolate from the nearer end, which loses less accuracy where m and g cancel.
    if SHORT:
        m = g + (m - g) * keep1
    else:
        m = m + (g - m) * take1
    v = keep2 * v + take2 * g * g
    update = _quotient(m * share1, _root(v) * share2 + eps)
    if DECOUPLED:
        update = update + decay * p
    p = p - lr * update
    tl.store(m_ptr, _as(m, M), mask=mask)
    tl.store(v_ptr, _as(v, M), mask=mask)
    if FORM == "remainder":
        high, low = _halves(p)
        tl.store(p_ptr, high, mask=mask)
        tl.store(w_ptr, low, mask=mask)
    else:
        if FORM != "plain":
            tl.store(w_ptr, p, mask=mask)
        if FORM == "fp8":
            tl.store(p_ptr, _float8(p * scale8, MANTISSA), mask=mask)
        else:
            tl.store(p_ptr, _as(p, P), mask=mask)
    if mask is None:
        return p
    else:
        return tl.where(mask, p, 0)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "rows", "beta1", "beta2", "rest1", "rest2",
        "eps", "weight_decay", "rate", "power1", "power2",
    ]
)  # fmt: skip
def _adam(
    table_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    lr_ptr: tl.tensor,
    step_ptr: tl.tensor,
    inv_scale_ptr: tl.tensor,
    rows: tl.int32,
    beta1: tl.float64,
    beta2: tl.float64,
    rest1: tl.float64,
    rest2: tl.float64,
    eps: tl.float64,
    weight_decay: tl.float64,
    rate: tl.float64,
    power1: tl.float64,
    power2: tl.float64,
    G: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    W: tl.constexpr,
    ACC: tl.constexpr,
    FORM: tl.constexpr,
    DECOUPLED: tl.constexpr,
    SHORT: tl.constexpr,
    MANTISSA: tl.constexpr,
    FIELDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    SEARCH: tl.constexpr,
) -> None:
    """A step of Adam on tables of g, p, m, v.

    FORM says how the parameter is stored: "plain", or with w after v as "master", "remainder" (w is
    the lower half, p the upper) or "fp8" (w is a master; then follow scale, amax and scale_inv).
    ``rest`` is ``1 - beta``; SHORT: beta1 is below a half. ``power`` is ``1 - beta**step``, or if
    the step is on the device the logarithm of beta.
    """
    skip = _is_up(flag_ptr)
    entry, element, length = _chunk(table_ptr, rows, FIELDS, CHUNK, SEARCH)
    if skip:
        return
    g_ptr = _at(entry, 0, element, G, ALIGNED)
    p_ptr = _at(entry, 1, element, P, ALIGNED)
    m_ptr = _at(entry, 2, element, M, ALIGNED)
    v_ptr = _at(entry, 3, element, M, ALIGNED)
    w_ptr = p_ptr
    if FORM != "plain":
        w_ptr = _at(entry, 4, element, W, ALIGNED)
    lr = _factor(lr_ptr, rate, ACC)
    correction1 = tl.full((), power1, tl.float64)
    correction2 = tl.full((), power2, tl.float64)
    if step_ptr is not None:
        step = tl.load(step_ptr).to(tl.float64)
        correction1 = 1 - tl.exp(step * correction1)
        correction2 = 1 - tl.exp(step * correction2)
    share1 = (1 / correction1).to(ACC)
    share2 = (1 / tl.sqrt(correction2)).to(ACC)
    keep1 = tl.full((), beta1, ACC)
    keep2 = tl.full((), beta2, ACC)
    take1 = tl.full((), rest1, ACC)
    take2 = tl.full((), rest2, ACC)
    small = tl.full((), eps, ACC)
    decay = tl.full((), weight_decay, ACC)
    inv_scale = None
    if inv_scale_ptr is not None:
        inv_scale = tl.load(inv_scale_ptr).to(ACC)
    scale8 = None
    if FORM == "fp8":
        scale8 = tl.load(tl.load(entry + 5).to(tl.pointer_type(tl.float32)))
    largest = tl.zeros((TILE,), ACC)
    for tile in tl.range(0, length, TILE):
        place = _places(tile, TILE, RUN)
        if tile + TILE <= length:
            p = _adam_tile(
                g_ptr + place, p_ptr + place, m_ptr + place, v_ptr + place, w_ptr + place, None,
                keep1, take1, keep2, take2, share1, share2, small, decay, lr, inv_scale, scale8,
                P, M, ACC, FORM, DECOUPLED, SHORT, MANTISSA,
            )  # fmt: skip
        else:
            p = _adam_tile(
                g_ptr + place, p_ptr + place, m_ptr + place, v_ptr + place, w_ptr + place,
                place < length,
                keep1, take1, keep2, take2, share1, share2, small, decay, lr, inv_scale, scale8,
                P, M, ACC, FORM, DECOUPLED, SHORT, MANTISSA,
            )  # fmt: skip
        if FORM == "fp8":
            largest = tl.maximum(largest, tl.where(p == p, tl.abs(p), 0))
    if FORM == "fp8":
        # Magnitudes are ordered like their bits as integers, and an integer maximum does not depend
        # on the order of the atomics.
        amax_ptr = tl.load(entry + 6).to(tl.pointer_type(tl.int32))
        found = tl.max(largest, axis=0).to(tl.int32, bitcast=True)
        tl.atomic_max(amax_ptr, found, mask=length > 0, sem="relaxed")
        inverse_ptr = tl.load(entry + 7).to(tl.pointer_type(tl.float32))
        tl.store(inverse_ptr, tl.div_rn(tl.full((), 1, tl.float32), scale8), mask=element == 0)


# ----------------------------------------------------------------------------------- SGD


@triton.jit  # type: ignore[untyped-decorator]
def _sgd_tile(
    g_ptr: tl.tensor,
    p_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    mask: tl.tensor,
    lr: tl.tensor,
    decay: tl.tensor,
    momentum: tl.tensor,
    share: tl.tensor,
    scale: tl.tensor,
    P: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    ACC: tl.constexpr,
    FIRST: tl.constexpr,
    NESTEROV: tl.constexpr,
    DECAY_LAST: tl.constexpr,
) -> None:
    """A step on a tile."""
    g = fetch(g_ptr, mask).to(ACC) * scale
    p = fetch(p_ptr, mask).to(ACC)
    if not DECAY_LAST:
        g = g + decay * p
    if B is not None:
        if FIRST:
            b = g
        else:
            b = momentum * fetch(b_ptr, mask).to(ACC) + share * g
        tl.store(b_ptr, _as(b, B), mask=mask)
        if NESTEROV:
            g = g + momentum * b
        else:
            g = b
    if DECAY_LAST:
        g = g + decay * p
    p = _as(p - lr * g, P)
    tl.store(p_ptr, p, mask=mask)
    if C is not None:
        tl.store(c_ptr, _as(p.to(ACC), C), mask=mask)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["rows", "lr", "weight_decay", "momentum", "share", "scale"]
)
def _sgd(
    table_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    rows: tl.int32,
    lr: tl.float64,
    weight_decay: tl.float64,
    momentum: tl.float64,
    share: tl.float64,
    scale: tl.float64,
    G: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    ACC: tl.constexpr,
    FIRST: tl.constexpr,
    NESTEROV: tl.constexpr,
    DECAY_LAST: tl.constexpr,
    FIELDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    SEARCH: tl.constexpr,
) -> None:
    """A step of SGD on tables of g, p, b and a copy of p.

    B is None without momentum, C without a copy. ``share`` is ``1 - dampening``.
    """
    skip = _is_up(flag_ptr)
    entry, element, length = _chunk(table_ptr, rows, FIELDS, CHUNK, SEARCH)
    if skip:
        return
    g_ptr = _at(entry, 0, element, G, ALIGNED)
    p_ptr = _at(entry, 1, element, P, ALIGNED)
    b_ptr = p_ptr
    if B is not None:
        b_ptr = _at(entry, 2, element, B, ALIGNED)
    c_ptr = p_ptr
    if C is not None:
        c_ptr = _at(entry, 3, element, C, ALIGNED)
    rate = tl.full((), lr, ACC)
    decay = tl.full((), weight_decay, ACC)
    kept = tl.full((), momentum, ACC)
    taken = tl.full((), share, ACC)
    factor = tl.full((), scale, ACC)
    for tile in tl.range(0, length, TILE):
        place = _places(tile, TILE, RUN)
        if tile + TILE <= length:
            _sgd_tile(
                g_ptr + place, p_ptr + place, b_ptr + place, c_ptr + place, None,
                rate, decay, kept, taken, factor, P, B, C, ACC, FIRST, NESTEROV, DECAY_LAST,
            )  # fmt: skip
        else:
            _sgd_tile(
                g_ptr + place, p_ptr + place, b_ptr + place, c_ptr + place, place < length,
                rate, decay, kept, taken, factor, P, B, C, ACC, FIRST, NESTEROV, DECAY_LAST,
            )  # fmt: skip


# -------------------------------------------------------------------------------- scales


@triton.jit(do_not_specialize=["rows", "largest", "epsilon"])  # type: ignore[untyped-decorator]
def _float_scales(
    table_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    rows: tl.int32,
    largest: tl.float64,
    epsilon: tl.float64,
    POWERS: tl.constexpr,
    FIELDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    SEARCH: tl.constexpr,
) -> None:
    """On tables of amax, scale, scale_inv; POWERS: only powers of two."""
    skip = _is_up(flag_ptr)
    entry, element, length = _chunk(table_ptr, rows, FIELDS, CHUNK, SEARCH)
    if skip:
        return
    amax_ptr = _at(entry, 0, element, tl.float32, ALIGNED)
    scale_ptr = _at(entry, 1, element, tl.float32, ALIGNED)
    inverse_ptr = _at(entry, 2, element, tl.float32, ALIGNED)
    least = tl.full((), epsilon, tl.float32)
    for tile in tl.range(0, length, TILE):
        place = _places(tile, TILE, RUN)
        inside = place < length
        amax = tl.load(amax_ptr + place, mask=inside, other=1)
        amax = tl.where(amax < least, least, amax)
        usable = (amax != 0) & (tl.abs(amax) < float("inf"))
        scale = tl.div_rn(tl.full((TILE,), largest, tl.float32), amax)
        scale = tl.minimum(tl.where(usable, scale, 1), LARGEST_FLOAT32)
        if POWERS:
            # A subnormal scale has no exponent bits: take those of 2**64 times it.
            high = scale >= 2.0**-126
            raised = tl.where(high, scale, scale * 2.0**64).to(tl.int32, bitcast=True)
            power = (raised & _INFINITE).to(tl.float32, bitcast=True)
            scale = tl.where(high, power, power * 2.0**-64)
        tl.store(scale_ptr + place, scale, mask=inside)
        inverse = tl.div_rn(tl.full((TILE,), 1, tl.float32), scale)
        tl.store(inverse_ptr + place, inverse, mask=inside)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _e8m0_scales(
    table_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    rows: tl.int32,
    FIELDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    SEARCH: tl.constexpr,
) -> None:
    """On tables of amax, as bits of bfloat16, and the byte of its scale."""
    skip = _is_up(flag_ptr)
    entry, element, length = _chunk(table_ptr, rows, FIELDS, CHUNK, SEARCH)
    if skip:
        return
    amax_ptr = _at(entry, 0, element, tl.int16, ALIGNED)
    byte_ptr = _at(entry, 1, element, tl.uint8, ALIGNED)
    for tile in tl.range(0, length, TILE):
        place = _places(tile, TILE, RUN)
        inside = place < length
        bits = tl.load(amax_ptr + place, mask=inside, other=0).to(tl.int32) & 0x7FFF
        # 448 is 1.75 * 2**8: the exponent, plus one where the fraction is above 0.75.
        byte = tl.maximum((bits >> 7) - 8 + ((bits & 0x7F) > 0x60).to(tl.int32), 0)
        byte = tl.where(bits < 0x7F80, byte, tl.where(bits == 0x7F80, 254, 255))
        tl.store(byte_ptr + place, byte.to(tl.uint8), mask=inside)


# ------------------------------------------------------------------------------ launches


_THREADS, _TILE_SIZES, _COUNTS = (128, 256), (1024, 2048, 4096), (1, 2, 4, 8)
_TILES = {
    name: tiles_choice(f"multi_tensor_{name}", usual, _THREADS, _TILE_SIZES, _COUNTS)
    for name, usual in {
        "scale": whole_chunk(256),
        "l2norm": lambda itemsize: Tiles(256, 4096, 16384),
        "adam": whole_chunk(256),
        "sgd": whole_chunk(256),
        "compute_scale": lambda itemsize: Tiles(128, 1024, 4096),
    }.items()
}
_SEARCH = 512  # rows that a program searches at once
_NORMS = (512, 4096)  # threads, and chunks that are summed at once
_KERNELS = {
    "scale": _scale,
    "squares": _squares,
    "norms": _norms,
    "adam": _adam,
    "sgd": _sgd,
    "float_scales": _float_scales,
    "e8m0_scales": _e8m0_scales,
}
_KINDS = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int16: tl.int16,
    torch.uint8: tl.uint8,
}


class _Operators(ListOperators):
    """The operators over these kernels."""

    def _launch_of(
        self,
        name: str,
        demand: Demand,
        group: Group,
        others: tuple[Tensor | None, ...],
        numbers: tuple[float, ...],
        **constants: Any,
    ) -> Callable[[], None]:
        widest = max([it.itemsize for it in group.dtypes])
        tiles = group.tiles
        named = {
            constant: _KINDS[value] if isinstance(value, torch.dtype) else value
            for constant, value in constants.items()
        }
        return loaded_launch(
            _KERNELS[name],
            group.table.device,
            tiles.threads,
            group.chunks,
            (group.table, *others),
            (group.rows, *numbers),
            **named,
            FIELDS=1 + len(demand.names) + demand.chunk_starts,
            ALIGNED=group.aligned,
            RUN=ALIGNMENT // widest,
            TILE=tiles.tile,
            CHUNK=tiles.chunk,
            SEARCH=_SEARCH,
        )

    def _finish_norms(
        self,
        sums: Tensor,
        chunk_starts: Tensor | None,
        norm: Tensor,
        norms: Tensor | None,
        flag: Tensor | None,
    ) -> None:
        threads, block = _NORMS
        programs = 1 if norms is None else 1 + norms.numel()
        tensors = (sums, chunk_starts, norm, norms, flag)
        launch = launch_for(_KERNELS["norms"], norm.device, threads, tensors, BLOCK=block)
        launch((programs, 1), tensors, (sums.numel(),))


# ---------------------------------------------------------------------------- operators

_operators = _Operators(LIST_PREPARER, _TILES, _launch.unsupported_device)
multi_tensor_adam = _operators.multi_tensor_adam
multi_tensor_adam_capturable = _operators.multi_tensor_adam_capturable
multi_tensor_adam_capturable_master = _operators.multi_tensor_adam_capturable_master
multi_tensor_adam_fp8 = _operators.multi_tensor_adam_fp8
multi_tensor_adam_param_remainder = _operators.multi_tensor_adam_param_remainder
multi_tensor_compute_scale_and_scale_inv = _operators.multi_tensor_compute_scale_and_scale_inv
multi_tensor_compute_scale_inv_e8m0 = _operators.multi_tensor_compute_scale_inv_e8m0
multi_tensor_l2norm = _operators.multi_tensor_l2norm
multi_tensor_scale = _operators.multi_tensor_scale
multi_tensor_scale_tensor = _operators.multi_tensor_scale_tensor
multi_tensor_sgd = _operators.multi_tensor_sgd
multi_tensor_unscale_l2norm = _operators.multi_tensor_unscale_l2norm
