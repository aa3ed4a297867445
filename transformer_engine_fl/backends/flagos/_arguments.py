"""What every operator of this set asks of its arguments, and how rows are cut into tiles.

A call takes a quick look at its arguments: when they are plain and dense, and the plan
that it needs is known, that look was the validation. Whatever else it finds goes to the
contract's check, is made dense, or is declined, with what is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
import triton
from torch import Tensor
from torch.nn import Parameter

from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.core.errors import NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "MOST",
    "NOT_A_TENSOR",
    "PLAIN",
    "WIDEST_UNIT",
    "Written",
    "block_of",
    "by_rows",
    "check_fresh",
    "check_integers",
    "check_numbers",
    "check_size",
    "dense",
    "fresh",
    "is_vector",
    "keep",
    "listed",
    "plain",
    "rows_of_tile",
]

T = TypeVar("T")

MOST = 2**31 - 2**14
"""Rows, and columns, that a kernel counts: with a tile beyond them, within an int32."""
WIDEST_UNIT = 16
"""Columns and distances are counted in units that divide them, of up to so many elements."""
PLAIN = (torch.Tensor, Parameter)
NOT_A_TENSOR = (AttributeError, IndexError, RuntimeError, TypeError)
"""What a value that is no plain tensor answers to the quick look."""
_MOST_PLANS = 1024


def keep(plans: dict[object, T], key: object, plan: T, most: int = _MOST_PLANS) -> T:
    """Remember a plan; they are cheap to make again, so a full memory simply starts over."""
    if len(plans) >= most:
        plans.clear()
    plans[key] = plan
    return plan


# ----------------------------------------------------------------------------- tensors


def plain(op: str, name: str, tensor: Tensor) -> Tensor:
    """The same memory as a plain tensor, or a decline if there is no such memory."""
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        raise NotSupportedError(
            f"{op}: {name!r} is a {kind.__name__}, which handles operators itself; "
            "a kernel needs a tensor with memory"
        )
    if tensor.layout is not torch.strided:
        raise NotSupportedError(f"{op}: {name!r} is laid out as {tensor.layout}, not strided")
    reason = _launch.unsupported_device(tensor.device)
    if reason:
        raise NotSupportedError(f"{op}: {name!r} is on {tensor.device}: {reason}")
    return _unwrapped(tensor).resolve_neg()


def _unwrapped(tensor: Tensor) -> Tensor:
    return (tensor if type(tensor) in PLAIN else tensor.as_subclass(torch.Tensor)).detach()


def dense(op: str, name: str, tensor: Tensor) -> Tensor:
    """The tensor, plain and with a dense last dimension, copied if need be."""
    return _with_dense_columns(plain(op, name, tensor))


def _with_dense_columns(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


class Written:
    """A tensor that a kernel writes.

    Attributes:
        dense: plain and with a dense last dimension: the same memory, or a copy of it.
    """

    __slots__ = ("_memory", "dense")

    def __init__(self, op: str, name: str, tensor: Tensor) -> None:
        resolved = plain(op, name, tensor)
        self._memory = _unwrapped(tensor)
        self.dense = _with_dense_columns(resolved)

    def finish(self) -> None:
        """What has been written goes where it belongs; autograd is told of it."""
        if self.dense.data_ptr() != self._memory.data_ptr():
            self._memory.copy_(self.dense)
        elif not self._memory.is_inference():
            torch.autograd.graph.increment_version(self._memory)


def by_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensor with dense columns and rows one distance apart, copied if need be."""
    step = _row_distance(tensor)
    return (tensor.contiguous(), tensor.shape[-1]) if step is None else (tensor, step)


def _row_distance(tensor: Tensor) -> int | None:
    """How far rows are apart; None if that is not one number or the columns are not dense."""
    columns = tensor.shape[-1]
    if tensor.stride(-1) != 1 and columns != 1:
        return None
    distance = extent = None
    for size, stride in zip(tensor.shape[-2::-1], tensor.stride()[-2::-1], strict=True):
        if size == 1:
            continue
        if extent is not None and stride != extent:
            return None
        distance = stride if distance is None else distance
        extent = size * stride
    return columns if distance is None else distance


def check_size(op: str, name: str, size: int) -> None:
    """Decline what a kernel cannot count."""
    if size > MOST:
        raise NotSupportedError(f"{op}: {size} {name} are more than a kernel counts ({MOST})")


def check_fresh(op: str, tensor: Tensor) -> None:
    """Decline if a mode (fake tensors, tracing) gives outputs that have no memory."""
    if type(tensor) is not torch.Tensor:
        raise NotSupportedError(
            f"{op}: torch allocates a {type(tensor).__name__} here; a kernel needs memory to write"
        )


def check_integers(op: str, *values: object) -> None:
    """Decline numbers that are not known yet, as while torch traces."""
    if not all(isinstance(value, int) for value in values):
        raise NotSupportedError(f"{op}: its options are no numbers yet")


def check_numbers(op: str, *values: object) -> None:
    """As :func:`check_integers`, for numbers of any kind."""
    if not all(isinstance(value, int | float) for value in values):
        raise NotSupportedError(f"{op}: its options are no numbers yet")


def fresh(op: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """New memory on the device of ``like``, and of its dtype if no other is given."""
    output = torch.empty(tuple(shape), dtype=dtype or like.dtype, device=like.device)
    check_fresh(op, output)
    return output


def is_vector(tensor: Tensor, size: int, device: torch.device) -> bool:
    """Whether it is a plain dense vector of that size on that device."""
    return (
        type(tensor) in PLAIN
        and tensor.dim() == 1
        and tensor.numel() == size
        and tensor.is_contiguous()
        and tensor.device == device
    )


# ------------------------------------------------------------------------------- tiles


def block_of(columns: int) -> int:
    """The width of a tile that holds so many columns."""
    return int(max(16, triton.next_power_of_2(columns)))


def listed(table: Mapping[int, Any], width: int) -> Any:
    """The entry of the narrowest listed width that holds ``width``; None if none does."""
    return next((entry for most, entry in table.items() if width <= most), None)


def rows_of_tile(tile: int, width: int) -> int:
    """How many rows of that width make a tile of ``tile`` elements."""
    return max(1, min(64, tile // width))
