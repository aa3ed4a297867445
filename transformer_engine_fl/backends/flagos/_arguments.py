"""Argument checks shared by every operator of this set, and how rows are cut into tiles.

A call first inspects its arguments quickly: if they are plain and dense, and a plan for them is
cached, that was the whole validation. Anything else goes to the contract's check, is made dense, or
is declined, by the functions here and in ``backends/_arguments.py``.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from transformer_engine_fl.backends import _arguments
from transformer_engine_fl.backends._arguments import (
    NOT_A_TENSOR,
    PLAIN,
    add_to_cache,
    address_of,
    broadcast_mask,
    by_rows,
    check_fresh,
    check_integers,
    check_numbers,
    fresh,
    is_vector,
)
from transformer_engine_fl.backends.flagos import _launch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

__all__ = [
    "ALIGNMENT",
    "DESCRIBED_ALIGNMENT",
    "DESCRIPTORS_FROM",
    "HOPPER",
    "INTEGERS",
    "MOST",
    "NOT_A_TENSOR",
    "OTHER_BYTES",
    "PLAIN",
    "TRITON_TYPES",
    "WIDEST_UNIT",
    "Written",
    "add_to_cache",
    "address_of",
    "addressed",
    "block_of",
    "broadcast_mask",
    "by_rows",
    "check_across",
    "check_fresh",
    "check_integers",
    "check_numbers",
    "check_size",
    "dense",
    "float32_precision",
    "fresh",
    "in_place",
    "is_block",
    "is_vector",
    "launch_for",
    "launch_of",
    "listed",
    "loaded_launch",
    "plain",
    "rows_of_tile",
    "rows_to_sum",
]

MOST = 2**31 - 2**14
"""Most rows, and most columns, that a kernel counts: with a tile beyond, they fit in an int32."""
ALIGNMENT = 16
"""Bytes of the widest access; also what a compiled kernel assumes of an aligned pointer."""
_MOST_ACROSS = 2**16 - 1  # most programs on the second axis of a grid
WIDEST_UNIT = 16
"""Largest unit, in elements, in which columns and strides are counted; units divide both."""
TRITON_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
"""The types that kernels compute in."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By element size, the type in which values are only moved."""
HOPPER = 90
"""The compute capability that the Gluon kernels are for."""
DESCRIPTORS_FROM = 90
"""The lowest compute capability with tensor descriptors (TMA)."""
DESCRIBED_ALIGNMENT = 16
"""Bytes; required of addresses and strides in a tensor descriptor."""
OTHER_BYTES = 2048
"""Bytes of shared memory that products leave for barriers and the like."""

_LAUNCHES: dict[object, _launch.Launch] = {}

_preparer = _arguments.TensorPreparer(_launch.unsupported_device)
plain = _preparer.plain
dense = _preparer.dense
addressed = _preparer.addressed
in_place = _preparer.in_place


def rows_to_sum(op: str, tensor: Tensor) -> tuple[Tensor, int]:
    """:func:`by_rows`, and a copy if the rows are not aligned as dense rows of their width are.

    How wide an access may be decides which thread has which columns, and so the order of sums,
    which must depend on the width and the dtype alone.
    """
    tensor, step = by_rows(tensor)
    columns = tensor.shape[-1]
    vector = math.gcd(columns, ALIGNMENT // tensor.element_size())
    if vector > 1 and (step % vector or address_of(op, tensor) % ALIGNMENT):
        return tensor.clone(memory_format=torch.contiguous_format), columns
    return tensor, step


class Written(_arguments.Written):
    """A tensor that a kernel of this set writes."""

    __slots__ = ()

    def __init__(self, op: str, name: str, tensor: Tensor) -> None:
        super().__init__(_preparer, op, name, tensor)


def launch_of(
    kernel: Any,
    device: torch.device,
    kinds: tuple[object, ...],
    *,
    options: Mapping[str, Any] = MappingProxyType({}),
    **how: Any,
) -> _launch.Launch:
    """The cached launch of a kernel.

    Args:
        kernel: the jitted function.
        device: where it runs.
        kinds: whatever decides the types of its arguments, such as its tensors' dtypes.
        options, how: those of :class:`_launch.Launch`: threads of a program, and constants.
    """
    # Keyed by the plain function, since hashing a jitted one takes a lock each time.
    key = (kernel.fn, device, kinds, *options.items(), *how.items())
    return _LAUNCHES.get(key) or add_to_cache(
        _LAUNCHES, key, _launch.Launch(kernel, device, options=options, **how)
    )


def launch_for(
    kernel: Any,
    device: torch.device,
    threads: int,
    tensors: tuple[Tensor | None, ...],
    **constants: Any,
) -> _launch.Launch:
    """:func:`launch_of`, keyed by the dtypes of the tensors."""
    dtypes = tuple([None if it is None else it.dtype for it in tensors])
    return launch_of(kernel, device, dtypes, threads=threads, **constants)


def loaded_launch(
    kernel: Any,
    device: torch.device,
    threads: int,
    programs: int,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    **constants: Any,
) -> Callable[[], None]:
    """A function that launches ``programs`` programs of a kernel, which is already compiled.

    Raises:
        KernelCompileError: the kernel cannot be compiled.
    """
    launch = launch_for(kernel, device, threads, tensors, **constants)
    return launch.loaded((programs, 1), tensors, numbers)


def check_size(op: str, name: str, size: int) -> None:
    """Decline sizes that a kernel cannot count."""
    _arguments.check_size(op, name, size, MOST)


def check_across(op: str, programs: int) -> None:
    """Decline more programs than the second axis of a grid can have."""
    _arguments.check_size(op, "programs in a grid's second dimension", programs, _MOST_ACROSS)


def float32_precision(device: torch.device) -> str:
    """The precision of float32 products: three of TF32, as exact, where the device has it."""
    return "tf32x3" if _launch.limits(device).capability else "ieee"


# ------------------------------------------------------------------------------- tiles


def block_of(columns: int) -> int:
    """The width of a tile that holds this many columns."""
    return int(max(16, triton.next_power_of_2(columns)))


def is_block(number: int, least: int, most: int) -> bool:
    """Whether a number is a power of two within these bounds, as tile sizes are."""
    return least <= number <= most and number & (number - 1) == 0


def listed(table: Mapping[int, Any], width: int) -> Any:
    """The entry of the narrowest listed width that holds ``width``; None if none does."""
    narrowest = min((most for most in table if width <= most), default=None)
    return None if narrowest is None else table[narrowest]


def rows_of_tile(tile: int, width: int) -> int:
    """How many rows of that width make a tile of ``tile`` elements."""
    return max(1, min(64, tile // width))
