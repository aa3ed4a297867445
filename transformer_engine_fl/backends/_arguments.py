"""How the sets with kernels of their own take a call's arguments.

A kernel needs plain memory: any other tensor is unwrapped, made dense, or declined with a reason.
Each set defines the devices it runs on (:class:`TensorPreparer`); the contracts in ``ops``
define what an argument may be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from transformer_engine_fl.backends import _repeats
from transformer_engine_fl.backends._memory import PLAIN, extent
from transformer_engine_fl.core.errors import NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "NOT_A_TENSOR",
    "PLAIN",
    "TensorPreparer",
    "Written",
    "add_to_cache",
    "address_of",
    "broadcast_mask",
    "by_rows",
    "check_fresh",
    "check_integers",
    "check_numbers",
    "check_size",
    "extent",
    "fresh",
    "is_vector",
]

T = TypeVar("T")

NOT_A_TENSOR = (AttributeError, IndexError, RuntimeError, TypeError)
"""What the quick inspection may raise for a value that is no plain tensor."""
_MOST_PLANS = 1024


def add_to_cache(plans: dict[object, T], key: object, plan: T, most: int = _MOST_PLANS) -> T:
    """Cache a plan. Plans are cheap to make again, so a full cache is simply cleared."""
    if len(plans) >= most:
        plans.clear()
    plans[key] = plan
    return plan


# ----------------------------------------------------------------------------- tensors


class TensorPreparer:
    """Makes plain tensors, which a set's kernels can take, of a call's arguments.

    Args:
        refusal: gives why the set's kernels cannot run on a device; None if they can.
    """

    __slots__ = ("_refusal",)

    def __init__(self, refusal: Callable[[torch.device], str | None]) -> None:
        self._refusal = refusal

    def plain(self, op: str, name: str, tensor: Tensor) -> Tensor:
        """The same memory as a plain tensor; declines a tensor without such memory."""
        kind = type(tensor)
        if kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
            raise NotSupportedError(
                f"{op}: {name!r} is a {kind.__name__}, which has its own __torch_dispatch__; "
                "a kernel needs a tensor with memory"
            )
        if tensor.layout is not torch.strided:
            raise NotSupportedError(f"{op}: {name!r} has layout {tensor.layout}, not strided")
        reason = self._refusal(tensor.device)
        if reason:
            raise NotSupportedError(f"{op}: {name!r} is on {tensor.device}: {reason}")
        return _unwrapped(tensor).resolve_neg()

    def dense(self, op: str, name: str, tensor: Tensor) -> Tensor:
        """The tensor, plain and with a dense last dimension, copied if necessary."""
        return _with_dense_columns(self.plain(op, name, tensor))

    def addressed(self, op: str, name: str, tensor: Tensor) -> Tensor:
        """The tensor, plain; declines one without an address before anything runs."""
        tensor = self.plain(op, name, tensor)
        address_of(op, tensor)
        return tensor

    def in_place(self, op: str, name: str, tensor: Tensor) -> Tensor:
        """The tensor, plain, to be written in place."""
        if tensor.is_neg():
            raise NotSupportedError(
                f"{op}: {name!r} has its negative bit set, which a kernel would ignore"
            )
        return self.plain(op, name, tensor)


def _unwrapped(tensor: Tensor) -> Tensor:
    return (tensor if type(tensor) in PLAIN else tensor.as_subclass(torch.Tensor)).detach()


def _with_dense_columns(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


class Written:
    """A tensor that a kernel writes.

    Attributes:
        dense: plain and with a dense last dimension: the same memory, or a copy of it.
    """

    __slots__ = ("_memory", "dense")

    def __init__(self, preparer: TensorPreparer, op: str, name: str, tensor: Tensor) -> None:
        resolved = preparer.plain(op, name, tensor)
        self._memory = _unwrapped(tensor)
        self.dense = _with_dense_columns(resolved)

    def finish(self) -> None:
        """Copy the result back if ``dense`` is a copy; else report the write to autograd."""
        if self.dense.data_ptr() != self._memory.data_ptr():
            self._memory.copy_(self.dense)
        else:
            _repeats.written(self._memory)


def address_of(op: str, tensor: Tensor) -> int:
    """The tensor's address; declines a tensor without memory of its own."""
    try:
        return tensor.data_ptr()
    except RuntimeError as error:  # a wrapper that torch's transforms put around a tensor
        raise NotSupportedError(f"{op}: a tensor has no memory of its own: {error}") from None


def by_rows(tensor: Tensor, multiple: int = 1) -> tuple[Tensor, int]:
    """The tensor with dense columns and a single row stride, copied if necessary.

    A single row keeps the stride that it had: it may be a row of a larger tensor.

    Args:
        tensor: of one dimension or more.
        multiple: the row stride of a copy is a multiple of it.
    """
    if tensor.is_contiguous():
        return tensor, _distance_of_dense(tensor)
    step = _row_distance(tensor)
    if step is not None:
        return tensor, step
    columns = tensor.shape[-1]
    step = -(-columns // multiple) * multiple
    if step == columns:
        return tensor.contiguous(), columns
    copied = tensor.new_empty((*tensor.shape[:-1], step))[..., :columns]
    return copied.copy_(tensor), step


def _distance_of_dense(tensor: Tensor) -> int:
    columns = tensor.shape[-1]
    if tensor.dim() > 1 and tensor.shape[-2] == 1 and tensor.numel() == columns:
        step = tensor.stride(-2)
        return columns if 0 < step < columns else step  # rows would overlap: meaningless
    return columns


def _row_distance(tensor: Tensor) -> int | None:
    """The row stride; None if there is no single one or the columns are not dense."""
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


def broadcast_mask(mask: Tensor, shape: torch.Size) -> tuple[Tensor, tuple[int, int, int]]:
    """The mask as bytes, and its strides over batch, head and query, for scores of ``shape``."""
    mask = mask.expand(shape)
    if len(shape) > 4 or mask.stride(-1) not in (0, 1):
        mask = mask.contiguous()
    if len(shape) > 4:
        mask = mask.flatten(0, -4)
    batch, head, query = (0,) * (4 - mask.dim()) + mask.stride()[:-1]
    return mask.view(torch.uint8), (batch, head, query)


def check_size(op: str, name: str, size: int, most: int) -> None:
    """Decline a size that a kernel cannot count."""
    if size > most:
        raise NotSupportedError(f"{op}: {size} {name} exceed the kernel's limit of {most}")


def check_fresh(op: str, tensor: Tensor) -> None:
    """Decline if a mode (fake tensors, tracing) gives outputs that have no memory."""
    if type(tensor) is not torch.Tensor:
        raise NotSupportedError(
            f"{op}: torch allocates a {type(tensor).__name__} here; a kernel needs memory to write"
        )


def check_integers(op: str, *values: object) -> None:
    """Decline integers that are not known yet, as while torch traces."""
    if not all(isinstance(value, int) for value in values):
        raise NotSupportedError(f"{op}: its options are symbolic, not concrete numbers")


def check_numbers(op: str, *values: object) -> None:
    """Like :func:`check_integers`, for numbers of any kind."""
    if not all(isinstance(value, int | float) for value in values):
        raise NotSupportedError(f"{op}: its options are symbolic, not concrete numbers")


def fresh(op: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """New memory on the device of ``like``, with its dtype if no other is given."""
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
        and not tensor.is_neg()
        and tensor.device == device
    )
