"""Checks of arguments that all families of this set share, and caches keyed by them.

An operator first checks its arguments cheaply (:func:`is_plain`, dtypes, sizes). If that fails
it calls :func:`decline`: the contract's check raises for invalid arguments, and valid ones that
these kernels do not support are declined, so that the next set serves the call. A plan is made
once for each key of all that a kernel depends on (:class:`Plans`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import torch
from torch import Tensor

from transformer_engine_fl.backends import _arguments, _repeats
from transformer_engine_fl.backends._arguments import (
    NOT_A_TENSOR,
    PLAIN,
    address_of,
    broadcast_mask,
    by_rows,
    check_fresh,
    check_integers,
    check_numbers,
    check_size,
    fresh,
)
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.core.locks import ForkSafeLock

if TYPE_CHECKING:
    from transformer_engine_fl.core.contract import Contract

__all__ = [
    "MOST_COLUMNS",
    "NAMES",
    "NOT_A_TENSOR",
    "PLAIN",
    "SIZES",
    "KnownCalls",
    "Plans",
    "Written",
    "access_width",
    "address_of",
    "addressed",
    "as_plain",
    "broadcast_mask",
    "by_rows",
    "check_fresh",
    "check_integers",
    "check_numbers",
    "check_size",
    "contiguous",
    "decline",
    "dense",
    "dense_rows",
    "fresh",
    "in_place",
    "is_number",
    "is_plain",
    "no_memory",
    "on_device",
    "plain",
    "pointer",
    "real",
    "refusal",
    "refuse",
    "vector_width",
]

T = TypeVar("T")

NAMES: Final = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}
"""The dtypes that kernels compute with, and their names in ``include/numeric.cuh``."""
SIZES: Final = {dtype: dtype.itemsize for dtype in NAMES}
MOST_COLUMNS: Final = 2**30
"""Kernels count columns in 32-bit integers."""
_MOST_PLANS = 1024

# The set's device type, and the attribute of its tensors that is true. The emulated tests, which
# run the kernels on the CPU, replace both.
DEVICE_TYPE = "cuda"
IS_THERE = "is_cuda"


def on_device(tensor: Tensor) -> bool:
    """Whether the tensor is on a device that the kernels run on."""
    found: bool = getattr(tensor, IS_THERE)
    return found


def refusal(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device; None if they can."""
    return None if device.type == DEVICE_TYPE else "vendor.cuda runs on CUDA devices"


_preparer = _arguments.TensorPreparer(refusal)
plain = _preparer.plain
dense = _preparer.dense
addressed = _preparer.addressed
in_place = _preparer.in_place


class Written(_arguments.Written):
    """A tensor that a kernel of this set writes."""

    __slots__ = ()

    def __init__(self, op: str, name: str, tensor: Tensor) -> None:
        super().__init__(_preparer, op, name, tensor)


# ----------------------------------------------------------------------- the quick look


def is_plain(value: object) -> bool:
    """Whether it is a strided tensor, or a subclass of one, without a dispatch of its own."""
    return (
        isinstance(value, Tensor)
        and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__
        and value.layout is torch.strided
    )


def is_number(value: object) -> bool:
    """Whether it is an int of 64 bits or a float; not a bool, nor a symbolic number."""
    if type(value) is int:
        return -(2**63) < value < 2**63
    return isinstance(value, int | float) and not isinstance(value, bool)


def decline(op: Contract[..., Any], *args: Any, **kwargs: Any) -> NoReturn:
    """Raise the contract's error for invalid arguments, or else :class:`NotSupportedError`."""
    arguments = op.check(*args, **kwargs)
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    for tensor in tensors:
        if not is_plain(tensor):
            raise NotSupportedError(
                f"vendor.cuda: {op.name} needs tensors with memory of their own, "
                f"not {type(tensor).__name__}"
            )
    for tensor in tensors:
        if not on_device(tensor):
            raise NotSupportedError(
                f"vendor.cuda: {op.name} runs on CUDA devices, not on {tensor.device}"
            )
    raise NotSupportedError(f"vendor.cuda: {op.name} does not support these arguments: {arguments}")


def refuse(op: str, reason: str | None) -> None:
    """Decline the call if there is a reason to."""
    if reason is not None:
        raise NotSupportedError(f"vendor.cuda: {op}: {reason}")


def no_memory(op: Contract[..., Any], error: Exception | None) -> NotSupportedError:
    """The error that declines a call with a tensor, allocated here or passed in, without memory."""
    reason = f": {error}" if error else ""
    return NotSupportedError(
        f"vendor.cuda: {op.name} needs tensors with memory of their own{reason}"
    )


def contiguous(value: Tensor) -> Tensor:
    """The tensor as a contiguous one, copied only if necessary."""
    # A lazily negated tensor may be contiguous, but its memory holds the values before negation.
    return (value.resolve_neg() if value.is_neg() else value).contiguous()


def dense_rows(value: Tensor) -> tuple[Tensor, int]:
    """The tensor, copied only if necessary, and its row stride in elements."""
    if value.is_neg():  # its memory holds the values before negation
        value = value.resolve_neg()
    return by_rows(value)


# -------------------------------------------------------------- how memory is accessed


def pointer(tensor: Tensor | None) -> int:
    """The tensor's address; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def vector_width(columns: int, size: int) -> int:
    """Elements per vector: a power of two that divides the columns, up to 16 bytes."""
    return min(16 // size, columns & -columns)


def access_width(vec: int, *parts: tuple[int, int]) -> int:
    """Elements that one access may cover, from (address or row stride in bytes, itemsize)."""
    access = vec
    while access > 1 and any(value % min(16, access * size) for value, size in parts):
        access //= 2
    return access


def real(dtype: torch.dtype) -> str:
    """The ``struct`` format of the type that a kernel computes in, for an input of ``dtype``."""
    return "d" if dtype == torch.float64 else "f"


# -------------------------------------------------------------------------------- plans


class Plans(dict[tuple[Any, ...], T]):
    """Plans by a key of all that they depend on, each made on first use.

    A look-up takes no lock: ``plans.get(key) or plans.get_or_create(key, make)``.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        super().__init__()
        self._lock = ForkSafeLock()

    def clear(self) -> None:
        """Forget every plan, and the repeated calls that were recorded with them."""
        super().clear()
        _repeats.forget()

    def get_or_create(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The plan of a key, made if necessary; a full cache is emptied, since plans are cheap."""
        with self._lock:
            plan = self.get(key)
            if plan is None:
                if len(self) >= _MOST_PLANS:
                    super().clear()  # plans are remade the same, so repeated calls stay valid
                plan = self[key] = make()
            return plan


# --------------------------------------------------------------------- calls seen before


def as_plain(op: str, name: str, tensor: Tensor, known: bool) -> Tensor:
    """The tensor as a plain one; the argument of a known call often is one already."""
    if known and not (tensor.requires_grad or tensor.is_neg()):
        return tensor
    return plain(op, name, tensor)


class KnownCalls:
    """Calls that passed the contract's check and are supported, keyed by what the check depends on.

    The check takes longer than a call of a library; a call with a known key skips it.
    """

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    @staticmethod
    def like(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
        """The key of a call: everything about its tensors except addresses and contents."""
        facts = (
            (it.shape, it.dtype, it.stride(), it.device)
            if type(it) in PLAIN and it.layout is torch.strided
            else it
            for it in tensors
        )
        return (*facts, options, *map(type, options))

    def __contains__(self, call: tuple[Any, ...]) -> bool:
        try:
            return call in self._seen
        except TypeError:  # unhashable: a list, say, where none belongs
            return False

    def add(self, call: tuple[Any, ...]) -> None:
        """Remember a call; a full cache is emptied first."""
        if any(isinstance(it, Tensor) for it in call):
            return  # a tensor subclass, which has no such key
        if len(self._seen) >= _MOST_PLANS:
            self._seen.clear()
        self._seen.add(call)
