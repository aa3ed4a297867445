"""Dropout in Triton; the mask is the contract's, bit for bit.

A tile has two axes: bytes of the mask, and the eight elements of a byte, which share one Philox
block.
"""

# mypy: disable-error-code="assignment,unreachable"
# A kernel builds a tuple step by step, which a type checker takes for changes of type.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import (
    TRITON_TYPES,
    add_to_cache,
    check_fresh,
    check_numbers,
    check_size,
    plain,
)
from transformer_engine_fl.backends.flagos._fetch import fetch
from transformer_engine_fl.backends.flagos._tiles import bounded
from transformer_engine_fl.backends.flagos.tuning import Choice
from transformer_engine_fl.ops import dropout as contracts
from transformer_engine_fl.ops._dtypes import math_dtype

__all__ = ["dropout_bwd", "dropout_fwd", "philox"]

# ------------------------------------------------------------------------------ kernels


_FACTOR_0, _FACTOR_1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_STEP_0, _STEP_1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)


@triton.jit  # type: ignore[untyped-decorator]
def philox(
    counter: tl.tensor, seed: tl.tensor, offset: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The four words of the Philox block with each counter."""
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    c0, c1, c2, c3 = _rounds(low, (counter >> 32).to(tl.uint32), seed, offset)
    return c0, c1, c2, c3


@triton.jit  # type: ignore[untyped-decorator]
def _rounds(
    c0: tl.tensor, c1: tl.tensor, seed: tl.tensor, offset: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The same for a counter's low and high words.

    Both words of a product come from one wide multiplication; tl.philox takes two.
    """
    # The interpreter treats a small number as int32 or uint32 until something is added to it.
    seed = tl.full((), seed, tl.int64) + tl.full((), 0, tl.int64)
    offset = tl.full((), offset, tl.int64) + tl.full((), 0, tl.int64)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c2 = (offset & 0xFFFFFFFF).to(tl.uint32)
    c3 = (offset >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        left = c0.to(tl.uint64) * tl.full((), _FACTOR_0, tl.uint64)
        right = c2.to(tl.uint64) * tl.full((), _FACTOR_1, tl.uint64)
        c0 = (right >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = right.to(tl.uint32)
        c2 = (left >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = left.to(tl.uint32)
        k0 = tl.add(k0, tl.full((), _STEP_0, tl.uint32), sanitize_overflow=False)
        k1 = tl.add(k1, tl.full((), _STEP_1, tl.uint32), sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit  # type: ignore[untyped-decorator]
def _bits(
    first: tl.tensor,
    seed: tl.tensor,
    offset: tl.tensor,
    threshold: tl.tensor,
    BYTES: tl.constexpr,
) -> tl.tensor:
    """BYTES bytes of the mask, beginning with ``first``.

    ``first`` is a multiple of BYTES, a power of two, so that all have the same high counter word.
    """
    low = (first & 0xFFFFFFFF).to(tl.uint32) + tl.arange(0, BYTES).to(tl.uint32)
    c0, c1, c2, c3 = _rounds(low, (first >> 32).to(tl.uint32), seed, offset)
    bits = _pair(c0, threshold, 1) | _pair(c1, threshold, 4)
    return bits | _pair(c2, threshold, 16) | _pair(c3, threshold, 64)


@triton.jit  # type: ignore[untyped-decorator]
def _pair(word: tl.tensor, threshold: tl.tensor, BIT: tl.constexpr) -> tl.tensor:
    """The two bits of a word's halves, the lower one at BIT."""
    lower = tl.where((word & 0xFFFF).to(tl.int32) >= threshold, BIT, 0)
    return lower | tl.where((word >> 16).to(tl.int32) >= threshold, 2 * BIT, 0)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["size", "seed", "offset", "threshold", "scale"]
)
def _forward(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    size: tl.int64,
    seed: tl.int64,
    offset: tl.int64,
    threshold: tl.int32,
    scale: tl.float64,
    ACC: tl.constexpr,
    WHOLE: tl.constexpr,
    CHUNKS: tl.constexpr,
    BYTES: tl.constexpr,
) -> None:
    """CHUNKS times BYTES bytes of the mask, and their elements; WHOLE: the last byte is full.

    With BYTES threads each thread has one byte of a chunk. Otherwise Triton would give a thread
    several bytes to write, and draw the numbers a second time for the elements.
    """
    first = tl.program_id(0).to(tl.int64) * (CHUNKS * BYTES)
    left = tl.minimum(size - first * 8, 8 * CHUNKS * BYTES).to(tl.int32)
    place = tl.arange(0, 8)[None, :]
    # Loaded first, so that loads are in flight while the numbers are drawn.
    read = ()
    for chunk in tl.static_range(CHUNKS):
        byte = chunk * BYTES + tl.arange(0, BYTES)
        element = byte[:, None] * 8 + place
        inside = (byte * 8 < left)[:, None] if WHOLE else element < left
        read += (fetch(x_ptr + first * 8 + element, inside),)
    for chunk in tl.static_range(CHUNKS):
        byte = chunk * BYTES + tl.arange(0, BYTES)
        element = byte[:, None] * 8 + place
        inside = (byte * 8 < left)[:, None] if WHOLE else element < left
        bits = _bits(first + chunk * BYTES, seed, offset, threshold, BYTES)
        if not WHOLE:
            bits &= 0xFF >> tl.minimum(tl.maximum(byte * 8 + 8 - left, 0), 8)
        tl.store(mask_ptr + first + byte, bits.to(tl.uint8), mask=byte * 8 < left)
        kept = (bits[:, None] >> place) & 1
        y = tl.where(kept != 0, read[chunk].to(ACC) * tl.full((), scale, ACC), 0)
        tl.store(y_ptr + first * 8 + element, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["size", "scale"])  # type: ignore[untyped-decorator]
def _backward(
    dy_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    size: tl.int64,
    scale: tl.float64,
    ACC: tl.constexpr,
    WHOLE: tl.constexpr,
    BYTES: tl.constexpr,
) -> None:
    """BYTES bytes of the mask, and their elements."""
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    element = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    if WHOLE:
        inside = (byte * 8 < size)[:, None]
    else:
        inside = element < size
    dy = fetch(dy_ptr + element, inside)
    bits = fetch(mask_ptr + byte, byte * 8 < size).to(tl.int32)
    kept = (bits[:, None] >> tl.arange(0, 8)[None, :]) & 1
    dx = tl.where(kept != 0, dy.to(ACC) * tl.full((), scale, ACC), 0)
    tl.store(dx_ptr + element, dx.to(dx_ptr.dtype.element_ty), mask=inside)


# -------------------------------------------------------------------------------- plans


class _Plan(NamedTuple):
    """How to run a kernel.

    Attributes:
        launch: the kernel.
        elements: elements of a program.
    """

    launch: _launch.Launch
    elements: int


class _Share(NamedTuple):
    """A program's share of the mask.

    Attributes:
        threads: threads of a program, each with one byte of a chunk.
        chunks: chunks of a program.
    """

    threads: int
    chunks: int


class _BackwardShare(NamedTuple):
    """The same for the backward, where each thread has a single byte."""

    threads: int


_PLANS: dict[object, _Plan] = {}
_FORWARD = Choice(
    "dropout_fwd",
    _Share,
    key=("itemsize",),
    candidates=lambda itemsize: [_Share(t, chunks) for t in (64, 128, 256) for chunks in (1, 2)],
    heuristic=lambda device, itemsize: _Share(128, 2),
    wrong=bounded(threads=(32, 1024), chunks=range(1, 9)),
    plans=(_PLANS,),
)
_BACKWARD = Choice(
    "dropout_bwd",
    _BackwardShare,
    key=("itemsize",),
    candidates=lambda itemsize: map(_BackwardShare, (64, 128, 256, 512)),
    heuristic=lambda device, itemsize: _BackwardShare(128),
    wrong=bounded(threads=(32, 1024)),
    plans=(_PLANS,),
)


def _start(op: str, tensors: tuple[Tensor, Tensor, Tensor], size: int, *numbers: float) -> None:
    """Launch the operator's kernel, for ``size`` elements."""
    value = tensors[0]
    whole = not size % 8
    key = (op, value.dtype, whole, value.device)
    plan = _PLANS.get(key) or add_to_cache(_PLANS, key, _plan(op, value.dtype, whole, value.device))
    programs = -(-size // plan.elements)
    check_size(op, "tiles", programs)
    plan.launch((programs, 1), tensors, (size, *numbers))


def _plan(op: str, dtype: torch.dtype, whole: bool, device: torch.device) -> _Plan:
    chunks: dict[str, Any] = {}
    if op == "dropout_fwd":
        kernel = _forward
        threads, chunks["CHUNKS"] = _FORWARD(device, dtype.itemsize)
    else:
        kernel = _backward
        (threads,) = _BACKWARD(device, dtype.itemsize)
    acc = TRITON_TYPES[math_dtype(dtype)]
    launch = _launch.Launch(
        kernel, device, threads=threads, ACC=acc, WHOLE=whole, BYTES=threads, **chunks
    )
    return _Plan(launch, 8 * threads * chunks.get("CHUNKS", 1))


# ---------------------------------------------------------------------------- operators


def dropout_fwd(
    input: Tensor, dropout_probability: float, *, seed: int, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """``dropout_fwd`` of the contract."""
    contracts.dropout_fwd.check(input, dropout_probability, seed=seed, offset=offset)
    check_numbers("dropout_fwd", dropout_probability, seed, offset)
    input = plain("dropout_fwd", "input", input)
    output = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    check_fresh("dropout_fwd", output)
    size = input.numel()
    mask = torch.empty((contracts.mask_bytes(size),), dtype=torch.uint8, device=input.device)
    if size:
        threshold = int(dropout_probability * 2**16)
        numbers = (seed, offset, threshold, contracts.scale_of_kept(dropout_probability))
        _start("dropout_fwd", (input.contiguous(), output, mask), size, *numbers)
    return output, mask


@repeating
def dropout_bwd(grad_output: Tensor, mask: Tensor, dropout_probability: float) -> Tensor:
    """``dropout_bwd`` of the contract."""
    contracts.dropout_bwd.check(grad_output, mask, dropout_probability)
    check_numbers("dropout_bwd", dropout_probability)
    grad_output = plain("dropout_bwd", "grad_output", grad_output)
    mask = plain("dropout_bwd", "mask", mask)
    grad_input = torch.empty(grad_output.shape, dtype=grad_output.dtype, device=grad_output.device)
    check_fresh("dropout_bwd", grad_input)
    if size := grad_output.numel():
        tensors = (grad_output.contiguous(), mask.contiguous(), grad_input)
        _start("dropout_bwd", tensors, size, contracts.scale_of_kept(dropout_probability))
    return grad_input
