"""Dropout in CUDA C++ (``dropout.cu``), with the mask that the contract defines, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from transformer_engine_fl.backends._allocation import allocator
from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends.vendor.cuda import _launch
from transformer_engine_fl.backends.vendor.cuda._arguments import (
    NAMES,
    PLAIN,
    SIZES,
    Plans,
    access_width,
    check_fresh,
    check_size,
    contiguous,
    decline,
    is_number,
    is_plain,
    no_memory,
    on_device,
)
from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.ops import dropout as contracts

if TYPE_CHECKING:
    from transformer_engine_fl.core.contract import Contract

__all__ = ["dropout_bwd", "dropout_fwd"]

THREADS: Final = 128
FORWARD_BYTES: Final = {2: 2, 4: 1, 8: 1}
"""Bytes of the mask that a thread has in the forward, by itemsize; their elements are in flight at
once. In the backward, which draws no numbers meanwhile, a thread has one."""
MOST_BLOCKS: Final = 2**31 - 1
KEYS: Final = 20
"""Key words of all rounds."""
LIMIT: Final = 2**63
"""Seeds and offsets are below this."""


def _bytes(dtype: torch.dtype, kernel: str) -> int:
    return FORWARD_BYTES[SIZES[dtype]] if kernel == "forward" else 1


def source(dtype: torch.dtype, access: int, kernel: str) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel of a name, for elements of ``dtype``; one access covers ``access`` of them."""
    defines: dict[str, str | int] = {
        "TX": NAMES[dtype],
        "ACCESS": access,
        "BYTES": _bytes(dtype, kernel),
        "THREADS": THREADS,
    }
    arguments = "PPPqqid" + "I" * KEYS if kernel == "forward" else "PPPqd"
    geometry = _launch.Geometry(THREADS, arguments)
    return Specialisation("dropout", kernel, tuple(defines.items())), geometry


def representative_sources(
    device: _launch.Limits,
) -> Iterator[tuple[Specialisation, _launch.Geometry]]:
    """Kernels of every type and alignment, for any device."""
    for dtype, size in SIZES.items():
        for access in {1, 16 // size}:
            for kernel in ("forward", "backward"):
                yield source(dtype, access, kernel)


_kernels: Plans[_launch.Kernel] = Plans()


def _is_taken(tensor: Tensor) -> bool:
    return (type(tensor) in PLAIN or is_plain(tensor)) and on_device(tensor)


def _is_probability(value: Any) -> bool:
    return (type(value) is float or is_number(value)) and 0 <= value <= 1


def _is_word(value: Any) -> bool:
    return type(value) is int and 0 <= value < LIMIT


@functools.lru_cache(maxsize=64)
def philox_keys(seed: int) -> tuple[int, ...]:
    """The key words of each round, in the order of ``PhiloxKeys`` in ``include/philox.cuh``."""
    keys = []
    for count in range(KEYS // 2):
        for word, step in ((seed, 0x9E3779B9), (seed >> 32, 0xBB67AE85)):
            keys.append((word + count * step) & 0xFFFFFFFF)
    return tuple(keys)


def _launched(
    op: Contract[..., Any], kernel: str, x: Tensor, pointers: tuple[int, int, int], *numbers: float
) -> None:
    """Run a kernel on all elements of ``x``, whose address is the first of ``pointers``."""
    dtype, device, size = x.dtype, x.get_device(), x.numel()
    access = 16 // SIZES[dtype]
    if pointers[0] & 15:
        access = access_width(access, (pointers[0], SIZES[dtype]))
    key = (device, dtype, access, kernel)
    found = _kernels.get(key) or _kernels.get_or_create(
        key, lambda: _launch.load(*source(dtype, access, kernel), device)
    )
    blocks = -(-size // (8 * THREADS * _bytes(dtype, kernel)))
    check_size(op.name, "blocks", blocks, MOST_BLOCKS)
    found.launch(blocks, 1, *pointers, size, *numbers)


def _like(op: Contract[..., Any], tensor: Tensor) -> tuple[Tensor, int, int]:
    """A new dense tensor of the same shape and dtype, and the addresses of both."""
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise no_memory(op, error) from None
    output = allocator(tensor.device)(tuple(tensor.shape), tensor.stride(), tensor.dtype)
    check_fresh(op.name, output)
    return output, address, output.data_ptr()


# ---------------------------------------------------------------------------- operators


def dropout_fwd(
    input: Tensor, dropout_probability: float, *, seed: int, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """``dropout_fwd`` of the contract."""
    op, probability = contracts.dropout_fwd, dropout_probability
    if not (
        _is_taken(input)
        and input.dtype in NAMES
        and _is_probability(probability)
        and _is_word(seed)
        and _is_word(offset)
    ):
        decline(op, input, probability, seed=seed, offset=offset)
    input = contiguous(input)
    output, address, made = _like(op, input)
    size = input.numel()
    mask = allocator(input.device)((contracts.mask_bytes(size),), (1,), torch.uint8)
    if size:
        pointers = (address, made, mask.data_ptr())
        numbers = (offset, int(probability * 2**16), contracts.scale_of_kept(probability))
        _launched(op, "forward", input, pointers, *numbers, *philox_keys(seed))
    return output, mask


@repeating
def dropout_bwd(grad_output: Tensor, mask: Tensor, dropout_probability: float) -> Tensor:
    """``dropout_bwd`` of the contract."""
    op, probability = contracts.dropout_bwd, dropout_probability
    if not (
        _is_taken(grad_output)
        and grad_output.dtype in NAMES
        and _is_taken(mask)
        and mask.dtype == torch.uint8
        and mask.get_device() == grad_output.get_device()
        and mask.shape == (contracts.mask_bytes(grad_output.numel()),)
        and _is_probability(probability)
    ):
        decline(op, grad_output, mask, probability)
    grad_output, mask = contiguous(grad_output), mask.contiguous()
    output, address, made = _like(op, grad_output)
    if grad_output.numel():
        pointers = (address, mask.data_ptr(), made)
        _launched(op, "backward", grad_output, pointers, contracts.scale_of_kept(probability))
    return output
