"""A call's arguments: their tensors at any depth, copies, bytes, rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from transformer_engine_fl.backends._arguments import extent
from transformer_engine_fl.core.contract import Between, Contract, Sample
from transformer_engine_fl.testing.allocation import FENCE, PATTERN

__all__ = [
    "as_tuple",
    "bits",
    "by_name",
    "changed",
    "clone",
    "copy_into",
    "cropped",
    "flipped",
    "leaves",
    "memory",
    "overlaps",
    "replaced",
    "rows_of",
    "taking_rows",
    "tensors",
    "tiled",
    "transformed",
]


def by_name(contract: Contract[..., Any], sample: Sample) -> dict[str, Any]:
    """What the sample passes, by parameter; defaults are not filled in."""
    names = contract.signature.parameters
    return {**dict(zip(names, sample.args, strict=False)), **sample.kwargs}


def replaced(contract: Contract[..., Any], sample: Sample, label: str, **new: Any) -> Sample:
    """The same call with other values for some parameters, by position or keyword as before."""
    names = list(contract.signature.parameters)
    args = tuple(new.pop(name, it) for name, it in zip(names, sample.args, strict=False))
    return Sample(label, args, {**sample.kwargs, **new})


def transformed(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The value with each of its tensors changed, in tuples, lists and dicts too."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: transformed(it, change) for name, it in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(transformed(it, change) for it in value)
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    """Each tensor in the value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for it in value.values() if isinstance(value, dict) else value:
            yield from tensors(it)


def leaves(value: Any) -> Iterator[Any]:
    """Each tensor in what an oracle returns, and each pair of bounds."""
    if isinstance(value, Between):
        yield value
    elif isinstance(value, list | tuple):
        for it in value:
            yield from leaves(it)
    else:
        yield from tensors(value)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """What an operator returned, as a tuple of its outputs; a list is one output."""
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def clone(value: Any) -> Any:
    """A copy with the same strides, alignment and aliasing within each tensor, fenced.

    The copy's storage has a fence before and after the copied bytes, so that :func:`memory`
    shows writes out of bounds.
    """
    return transformed(value, _clone)


def _clone(tensor: Tensor) -> Tensor:
    if tensor.device.type == "meta":
        return tensor
    fence = torch.full((FENCE,), PATTERN, dtype=torch.uint8, device=tensor.device)
    raw = torch.cat([fence, memory(tensor), fence])
    return _over(raw, FENCE // tensor.element_size(), tensor)


def _over(raw: Tensor, offset: int, tensor: Tensor) -> Tensor:
    """``raw`` viewed as the tensor views its storage, whose copy starts ``offset`` elements in."""
    base = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    start = tensor.storage_offset() + offset
    made = base.set_(raw.untyped_storage(), start, tensor.shape, tensor.stride())
    return torch._neg_view(made) if tensor.is_neg() else made


def cropped(value: Any) -> Any:
    """A copy as :func:`clone` makes one, but its memory ends where each tensor does."""
    return transformed(value, _cropped)


def _cropped(tensor: Tensor) -> Tensor:
    end = (tensor.storage_offset() + extent(tensor)) * tensor.element_size()
    return _over(memory(tensor)[:end].clone(), 0, tensor)


def bits(value: Tensor) -> Tensor:
    """The elements' bytes, so that NaN equals itself and -0.0 differs from 0.0."""
    # A single element is contiguous whatever its stride, and torch asks for 1 to view its bytes.
    flat = value.detach().contiguous().flatten()
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def memory(value: Tensor) -> Tensor:
    """The bytes of the whole storage, including those between and around the elements."""
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())


def flipped(value: Tensor) -> Tensor:
    """The elements in the opposite order; torch does not flip types of one byte itself."""
    raw = value.view(torch.uint8) if value.element_size() == 1 else value
    return raw.flip(tuple(range(value.ndim))).view(value.dtype)


def overlaps(value: Tensor) -> bool:
    """Whether elements share memory, so that the tensor cannot be written."""
    return any(step == 0 and n > 1 for n, step in zip(value.shape, value.stride(), strict=True))


def changed(sample: Sample, change: Callable[[Tensor], Tensor]) -> Sample:
    """The call with other values in its floating-point tensors; integers may be positions."""

    def other(value: Tensor) -> Tensor:
        fixed = not value.is_floating_point() or overlaps(value)
        return _clone(value) if fixed else _clone(value).copy_(change(value))

    args, kwargs = transformed((sample.args, sample.kwargs), other)
    return Sample(sample.label, args, kwargs)


def copy_into(call: Sample, values: Sample) -> None:
    """Write the values of another call into the tensors of this one."""
    sources = tensors((values.args, values.kwargs))
    for place, source in zip(tensors((call.args, call.kwargs)), sources, strict=True):
        if not overlaps(place):
            place.copy_(source)


# --------------------------------------------------------------------------------- rows
#
# Rows are the leading dimension of the dispatch tensor; a tensor argument has rows if its
# leading size is the same. The contract's check tells whether that is a coincidence.


def rows_of(contract: Contract[..., Any], sample: Sample) -> int:
    """How many rows a call has; 0 if its dispatch tensor has fewer than two dimensions."""
    tensor = by_name(contract, sample).get(contract.dispatch_on)
    return tensor.shape[0] if isinstance(tensor, Tensor) and tensor.ndim > 1 else 0


def taking_rows(contract: Contract[..., Any], sample: Sample, first: int, end: int) -> Sample:
    """The call on a slice of the rows: strides are those of all rows, alignment may be another."""
    rows = rows_of(contract, sample)

    def take(tensor: Tensor) -> Tensor:
        copy = _clone(tensor)
        return copy[first:end] if tensor.ndim and tensor.shape[0] == rows else copy

    args, kwargs = transformed((sample.args, sample.kwargs), take)
    return Sample(f"rows {first} to {end} of {sample.label}", args, kwargs)


def tiled(contract: Contract[..., Any], sample: Sample, least: int) -> Sample:
    """The call with its rows repeated until there are ``least`` of them."""
    rows = rows_of(contract, sample)
    times = -(-least // rows)

    def repeat(tensor: Tensor) -> Tensor:
        has_rows = tensor.ndim > 0 and tensor.shape[0] == rows
        return torch.cat([tensor] * times) if has_rows else tensor

    args, kwargs = transformed((sample.args, sample.kwargs), repeat)
    return Sample(f"{sample.label}, {rows * times} rows", args, kwargs)
