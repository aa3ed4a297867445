"""Functions that check a call's arguments against a contract, on metadata alone.

Each function raises :class:`ArgumentError` naming the operator, the argument, what
was given and what is expected. Nothing here reads a tensor's values.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.core.errors import ArgumentError

if TYPE_CHECKING:
    import torch

__all__ = [
    "are_like",
    "are_tensors",
    "describe",
    "dtype_name",
    "expands_to",
    "has_axes",
    "has_shape",
    "is_choice",
    "is_cu_seqlens",
    "is_dtype",
    "is_flag",
    "is_frozen",
    "is_integer",
    "is_list",
    "is_number",
    "is_tensor",
    "is_writable",
    "same_device",
]


def dtype_name(dtype: object) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def describe(value: object) -> str:
    """A value for an error message: dtype, shape and device of a tensor, repr of other values."""
    import torch

    if isinstance(value, torch.Tensor):
        if not _is_plain(value):
            lies = "nested" if value.is_nested else dtype_name(value.layout)
            return f"a {dtype_name(value.dtype)} tensor, {lies}, on {value.device}"
        return f"a {dtype_name(value.dtype)} tensor of shape {tuple(value.shape)} on {value.device}"
    if isinstance(value, int) and value.bit_length() > 1024:  # Python may refuse to spell it
        return f"{type(value).__name__} of {value.bit_length()} bits"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 60 else text[:57] + '...'}"


def _is_plain(value: torch.Tensor) -> bool:
    """Whether sizes and strides say where a tensor's elements are: neither nested nor sparse.

    True without a look in compiled code: traced tensors are plain, and Dynamo does not know the
    layout of some gradients.
    """
    import torch

    if torch.compiler.is_compiling():
        return True
    return value.layout is torch.strided and not value.is_nested


def is_tensor(
    op: str, name: str, value: Any, *, dtypes: Collection[str], min_ndim: int = 0
) -> torch.Tensor:
    """Require a tensor of one of ``dtypes`` with at least ``min_ndim`` dimensions.

    Nested and sparse tensors are refused.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        raise ArgumentError(op, name, describe(value), f"a tensor ({', '.join(dtypes)})")
    if dtype_name(value.dtype) not in dtypes:
        raise ArgumentError(op, name, describe(value), f"one of the dtypes {', '.join(dtypes)}")
    if not _is_plain(value):
        raise ArgumentError(op, name, describe(value), "a dense tensor, of layout strided")
    if value.ndim < min_ndim:
        raise ArgumentError(op, name, describe(value), f"at least {min_ndim} dimension(s)")
    return value


def has_axes(op: str, name: str, value: torch.Tensor, *axes: str) -> None:
    """Require as many dimensions as one of ``axes`` names.

    Args:
        axes: the layouts that the tensor may have, each as in ``"[t, h, d]"``.
    """
    if value.ndim not in [it.count(",") + 1 for it in axes]:
        raise ArgumentError(op, name, describe(value), " or ".join(axes))


def has_shape(op: str, name: str, value: torch.Tensor, shape: Sequence[int], why: str) -> None:
    """Require exactly ``shape``; ``why`` says where that shape comes from."""
    if tuple(value.shape) != tuple(shape):
        raise ArgumentError(op, name, describe(value), f"shape {tuple(shape)}: {why}")


def expands_to(op: str, name: str, value: torch.Tensor, shape: Sequence[int], why: str) -> None:
    """Require a shape that expands to ``shape``: its last dimensions, each equal or 1."""
    given = tuple(value.shape)
    behind = tuple(shape)[len(shape) - len(given) :] if len(given) <= len(shape) else ()
    fits = len(given) == len(behind) and all(
        a in (1, b) for a, b in zip(given, behind, strict=True)
    )
    if not fits:
        expected = f"a shape that expands to {tuple(shape)}: {why}"
        raise ArgumentError(op, name, describe(value), expected)


def is_list(
    op: str, name: str, value: Any, *, length: int | None = None, why: str = ""
) -> Sequence[Any]:
    """Require a list (or tuple) of ``length`` items, or at least one; ``why`` explains it."""
    if not isinstance(value, list | tuple) or not value:
        raise ArgumentError(op, name, describe(value), "a list of at least one item")
    if length is not None and len(value) != length:
        raise ArgumentError(op, name, f"{len(value)} items", f"{length}: {why}")
    return value


def is_frozen(value: object) -> bool:
    """Whether it is a tensor made in inference mode, while the caller is outside that mode."""
    import torch

    return (
        isinstance(value, torch.Tensor)
        and value.is_inference()
        and not torch.is_inference_mode_enabled()
    )


def is_writable(op: str, name: str, value: torch.Tensor) -> None:
    """Require that a tensor may be written, and that each element has memory of its own.

    Elements of an expanded tensor share memory. A tensor made in inference mode may be written
    only in that mode.
    """
    import torch

    # Compiled code is traced in the mode it runs in, and torch itself checks when it writes.
    if not torch.compiler.is_compiling() and is_frozen(value):
        expected = "a tensor created outside inference mode (clone it), or a call inside it"
        given = f"{describe(value)}, created in inference mode"
        raise ArgumentError(op, name, given, f"{expected}, as it is written")
    shared = (step == 0 and n > 1 for n, step in zip(value.shape, value.stride(), strict=True))
    if value.numel() and any(shared):
        expected = "separate memory for each element, as it is written"
        raise ArgumentError(op, name, f"{describe(value)}, expanded", expected)


def is_cu_seqlens(op: str, name: str, value: Any) -> int:
    """Require a tensor of cumulative sequence lengths; returns the number of sequences."""
    offsets = is_tensor(op, name, value, dtypes=("int32",))
    if offsets.ndim != 1 or offsets.shape[0] < 2:
        expected = "[b + 1] with b >= 1: where each sequence begins and the last one ends"
        raise ArgumentError(op, name, describe(value), expected)
    return offsets.shape[0] - 1


def are_tensors(
    op: str, name: str, value: Any, *, dtypes: Collection[str], written: bool = False
) -> Sequence[torch.Tensor]:
    """Require a list (or tuple), possibly empty, of tensors of ``dtypes`` on one device.

    With ``written`` they must be writable.
    """
    if not isinstance(value, list | tuple):
        raise ArgumentError(op, name, describe(value), "a list of tensors")
    for place, item in enumerate(value):
        tensor = is_tensor(op, f"{name}[{place}]", item, dtypes=dtypes)
        if tensor.device != value[0].device:
            expected = f"device {value[0].device}, as '{name}[0]' has"
            raise ArgumentError(op, f"{name}[{place}]", describe(tensor), expected)
        if written:
            is_writable(op, f"{name}[{place}]", tensor)
    return value


def are_like(
    op: str,
    name: str,
    values: Sequence[torch.Tensor],
    anchor: str,
    others: Sequence[torch.Tensor],
) -> None:
    """Require a tensor for each of ``others`` (argument ``anchor``), of its shape and device."""
    if len(values) != len(others):
        expected = f"{len(others)} tensors, as many as in {anchor!r}"
        raise ArgumentError(op, name, f"{len(values)} tensors", expected)
    for place, (value, other) in enumerate(zip(values, others, strict=True)):
        if value.shape != other.shape or value.device != other.device:
            expected = f"shape and device as '{anchor}[{place}]' has: {describe(other)}"
            raise ArgumentError(op, f"{name}[{place}]", describe(value), expected)


def same_device(op: str, anchor: str, tensors: dict[str, Any]) -> None:
    """Require every tensor to be on the device of the one named ``anchor``."""
    device = tensors[anchor].device
    for name, value in tensors.items():
        if value is not None and value.device != device:
            raise ArgumentError(op, name, describe(value), f"device {device}, as {anchor!r} has")


def is_number(
    op: str,
    name: str,
    value: object,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> None:
    """Require a Python int or float (no tensor, bool or other library's scalar) within the bounds:
    kernels receive it unchanged.
    """
    import torch

    symbolic = isinstance(value, torch.SymInt | torch.SymFloat)
    if isinstance(value, bool) or not (isinstance(value, int | float) or symbolic):
        raise ArgumentError(op, name, describe(value), "a Python number")
    _is_int64(op, name, value, "an integer in the range of int64, or a float")
    if at_least is not None and isinstance(value, int | float) and not value >= at_least:
        raise ArgumentError(op, name, describe(value), f"a number of at least {at_least}")
    if at_most is not None and isinstance(value, int | float) and not value <= at_most:
        raise ArgumentError(op, name, describe(value), f"a number of at most {at_most}")


def _is_int64(op: str, name: str, value: object, expected: str) -> None:
    """Require that a Python integer fits in 64 bits, as torch and kernels need."""
    import torch

    if type(value) is int and not torch.compiler.is_compiling() and abs(value) >= 2**63:
        raise ArgumentError(op, name, describe(value), expected)


def is_integer(
    op: str, name: str, value: object, *, at_least: int = 0, below: int | None = None
) -> None:
    """Require a Python integer (no bool), ``at_least <= value < below``."""
    import torch

    allowed = f"a Python integer of at least {at_least}" + (f" and below {below}" if below else "")
    if isinstance(value, torch.SymInt):
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(op, name, describe(value), allowed)
    if value < at_least or (below is not None and value >= below):
        raise ArgumentError(op, name, describe(value), allowed)
    _is_int64(op, name, value, f"{allowed}, in the range of int64")


def is_flag(op: str, name: str, value: object) -> None:
    """Require a bool."""
    if not isinstance(value, bool):
        raise ArgumentError(op, name, describe(value), "True or False")


def is_choice(op: str, name: str, value: object, choices: Collection[str]) -> None:
    """Require one of the words in ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(op, name, describe(value), f"one of {', '.join(choices)}")


def is_dtype(op: str, name: str, value: object, *, dtypes: Collection[str]) -> None:
    """Require None or a torch dtype out of ``dtypes``."""
    if value is not None and (dtype_name(value) not in dtypes or isinstance(value, str)):
        raise ArgumentError(op, name, describe(value), f"None or one of {', '.join(dtypes)}")
