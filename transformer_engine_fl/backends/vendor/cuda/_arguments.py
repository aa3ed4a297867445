"""What every family of this set asks of its arguments, and what it remembers of them.

A call takes a quick look at its arguments (:func:`is_plain`, dtypes, sizes). What the look
does not like goes to :func:`decline`: the contract's check names what is wrong, and what is
merely not for these kernels is left to the next set. What a kernel depends on is the key of
a plan, made once (:class:`Plans`).
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
    by_rows,
    check_fresh,
    check_integers,
    check_numbers,
    check_size,
    fresh,
    laid_over,
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
    "laid_over",
    "no_memory",
    "on_device",
    "plain",
    "pointer",
    "real",
    "refusal",
    "refuse",
    "taken",
    "vector_width",
]

T = TypeVar("T")

NAMES: Final = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}
"""The dtypes that kernels calculate with, as ``include/numeric.cuh`` calls them."""
SIZES: Final = {dtype: dtype.itemsize for dtype in NAMES}
MOST_COLUMNS: Final = 2**30
"""Columns are 32-bit numbers in the kernels."""
_MOST_PLANS = 1024

# What the set runs on. The tests, which run the kernels on the CPU, say something else.
DEVICE_TYPE = "cuda"
IS_THERE = "is_cuda"


def on_device(tensor: Tensor) -> bool:
    """Whether it is where the kernels run."""
    found: bool = getattr(tensor, IS_THERE)
    return found


def refusal(device: torch.device) -> str | None:
    """Why the kernels cannot run there; None if they can."""
    return None if device.type == DEVICE_TYPE else "vendor.cuda runs on CUDA devices"


_taking = _arguments.Taking(refusal)
plain = _taking.plain
dense = _taking.dense
addressed = _taking.addressed
in_place = _taking.in_place


class Written(_arguments.Written):
    """A tensor that a kernel of this set writes."""

    __slots__ = ()

    def __init__(self, op: str, name: str, tensor: Tensor) -> None:
        super().__init__(_taking, op, name, tensor)


# ----------------------------------------------------------------------- the quick look


def is_plain(value: object) -> bool:
    """Whether it is a tensor whose memory is its own, subclass or not."""
    return (
        isinstance(value, Tensor)
        and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__
        and value.layout is torch.strided
    )


def is_number(value: object) -> bool:
    """Whether it is a number that is known, no bool, and if an integer one of 64 bits."""
    if type(value) is int:
        return -(2**63) < value < 2**63
    return isinstance(value, int | float) and not isinstance(value, bool)


def decline(op: Contract[..., Any], *args: Any, **kwargs: Any) -> NoReturn:
    """Say what is wrong with the arguments, or that they are not for this set."""
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
    raise NotSupportedError(f"vendor.cuda: {op.name} does not take these arguments: {arguments}")


def refuse(op: str, reason: str | None) -> None:
    """Decline for a reason, if there is one."""
    if reason is not None:
        raise NotSupportedError(f"vendor.cuda: {op}: {reason}")


def no_memory(op: Contract[..., Any], error: Exception | None) -> NotSupportedError:
    """The decline of a tensor, of ours or of the caller's, that has no address."""
    reason = f": {error}" if error else ""
    return NotSupportedError(
        f"vendor.cuda: {op.name} needs tensors with memory of their own{reason}"
    )


def contiguous(value: Tensor) -> Tensor:
    """The tensor, copied only if it must be."""
    # Lazily negated it may be contiguous, and yet its sign is kept apart.
    return (value.resolve_neg() if value.is_neg() else value).contiguous()


def dense_rows(value: Tensor) -> tuple[Tensor, int]:
    """The tensor, copied only if it must be, and the elements from row to row."""
    if value.is_neg():  # dense, and yet its sign is kept apart
        value = value.resolve_neg()
    return by_rows(value)


# -------------------------------------------------------------- how memory is accessed


def pointer(tensor: Tensor | None) -> int:
    """The address of its memory; 0 if there is none."""
    return 0 if tensor is None else tensor.data_ptr()


def vector_width(columns: int, size: int) -> int:
    """Elements per vector: 16 bytes, or as many as divide the columns."""
    return min(16 // size, columns & -columns)


def access_width(vec: int, *parts: tuple[int, int]) -> int:
    """Elements that one access may cover, from (address or bytes between rows, size)."""
    access = vec
    while access > 1 and any(value % min(16, access * size) for value, size in parts):
        access //= 2
    return access


def real(dtype: torch.dtype) -> str:
    """The ``struct`` format of a kernel's own arithmetic, for an input of ``dtype``."""
    return "d" if dtype == torch.float64 else "f"


# -------------------------------------------------------------------------------- plans


class Plans(dict[tuple[Any, ...], T]):
    """Plans by what they depend on, each made by the first who asks.

    A look-up takes no lock: ``plans.get(key) or plans.made(key, make)``.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        super().__init__()
        self._lock = ForkSafeLock()

    def clear(self) -> None:
        """Forget every plan, and the calls that were made by one."""
        super().clear()
        _repeats.forget()

    def made(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The plan of that key; a full memory starts over, since plans are cheap."""
        with self._lock:
            plan = self.get(key)
            if plan is None:
                if len(self) >= _MOST_PLANS:
                    super().clear()  # they come again as they were, and so do calls
                plan = self[key] = make()
            return plan


# --------------------------------------------------------------------- calls seen before


def taken(op: str, name: str, tensor: Tensor, known: bool) -> Tensor:
    """The tensor, plain; one that a known call had may be it already."""
    if known and not (tensor.requires_grad or tensor.is_neg()):
        return tensor
    return plain(op, name, tensor)


class KnownCalls:
    """Calls that were found to be right and for this set, by all that such a look sees.

    A contract's check takes longer than a library's call; a call like one before needs none.
    """

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    @staticmethod
    def like(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
        """What is seen of a call: of tensors all but where they are and what they hold."""
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
        except TypeError:  # a list, say, where none belongs
            return False

    def add(self, call: tuple[Any, ...]) -> None:
        """Remember a call; a full memory starts over."""
        if any(isinstance(it, Tensor) for it in call):
            return  # of a kind of its own
        if len(self._seen) >= _MOST_PLANS:
            self._seen.clear()
        self._seen.add(call)
