"""Compares repeated calls of an operator, on new values each time, with ordinary calls.

An ordinary call runs the operator's own function, without a record of earlier calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_engine_fl.backends import _repeats
from transformer_engine_fl.core.contract import Sample
from transformer_engine_fl.core.errors import NotSupportedError, TeFlError

__all__ = [
    "WRITING",
    "check",
    "check_same",
    "check_written",
    "is_repeat",
    "ordinary",
    "renewed",
    "repeat",
    "serves",
]

WRITING = (
    "copy_to_kv_cache",
    "generic_gemm",
    "thd_grad_correction",
    "thd_out_correction",
    "thd_second_half_lse_correction",
)
"""Operators that write to arguments and whose calls can be repeated."""

Operator = Callable[..., Any]


class _Filled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which every byte of newly allocated memory has a given value."""

    def __init__(self, byte: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._byte = byte

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _repeats._EMPTY and result.numel():
            memory = torch.empty(0, dtype=torch.uint8, device=result.device)
            memory.set_(result.untyped_storage()).fill_(self._byte)
        return result


def renewed(
    sample: Sample, seed: int, *, shift: int = 0, apart: int = 0, offset: int = 0
) -> Sample:
    """The call with permuted values in new memory.

    Only floating point values are permuted: integers may be indices or offsets.

    Args:
        sample: the call.
        seed: seeds the permutation.
        shift: offset of each tensor in its allocation, in elements.
        apart: elements of padding between the rows of contiguous tensors.
        offset: further offset of each tensor, in bytes.
    """

    def new(value: Any) -> Any:
        if isinstance(value, list | tuple) and any(isinstance(it, Tensor) for it in value):
            return type(value)(map(new, value))
        if not isinstance(value, Tensor):
            return value
        return _renewed(value, seed, shift + offset // value.itemsize, apart)

    kwargs = {name: new(value) for name, value in sample.kwargs.items()}
    return Sample(sample.label, tuple(map(new, sample.args)), kwargs)


def _renewed(tensor: Tensor, seed: int, shift: int, apart: int) -> Tensor:
    strides = list(tensor.stride())
    if apart and tensor.dim() > 1 and tensor.is_contiguous():
        strides = [it + apart * it // tensor.shape[-1] for it in strides[:-1]] + strides[-1:]
    steps = zip(tensor.shape, strides, strict=True)
    extent = 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0
    memory = torch.zeros(extent + shift, dtype=tensor.dtype, device=tensor.device)
    made = memory.as_strided(tuple(tensor.shape), strides, shift)
    values = tensor.detach()
    if tensor.is_floating_point() and tensor.numel():
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
        whole = values.contiguous().view(-1)
        bits = whole.view(torch.uint8) if tensor.itemsize == 1 else whole
        values = bits[order].view(tensor.dtype).view(tensor.shape)
    # Expanded dimensions (stride 0) are written once.
    once = tuple(slice(None) if stride else slice(1) for stride in strides)
    made[once].copy_(values[once])
    return made.requires_grad_() if tensor.requires_grad else made


def ordinary(operator: Operator, call: Sample, byte: int) -> Any:
    """The result of an ordinary call, with allocated memory filled with ``byte``."""
    plain: Operator = operator.__wrapped__  # type: ignore[attr-defined]
    with _Filled(byte):
        return plain(*call.args, **call.kwargs)


def is_repeat(operator: Any, call: Sample) -> bool:
    """Whether the call can repeat the last recorded call; if so, it runs."""
    bound = inspect.signature(operator).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    return operator.calls.last(*bound.args, **bound.kwargs) is not _repeats.MISS


def check_same(operator: Operator, call: Sample, found: Any = None) -> None:
    """Assert that a call returns the same bits as an ordinary call, wherever that writes any.

    Where the ordinary call raises, the call must raise the same kind of error. Bytes that the
    ordinary call leaves unwritten are those that differ with the fill of the allocated memory.
    """
    try:
        expected = [ordinary(operator, call, byte) for byte in (0, 255)]
    except TeFlError as error:
        try:
            operator(*call.args, **call.kwargs)
        except type(error):
            return
        raise AssertionError("the ordinary way raises an error, and this does not") from error
    if found is None:
        found = operator(*call.args, **call.kwargs)
    for one, zeros, ones in zip(*map(list, map(_flat, (found, *expected))), strict=True):
        if not isinstance(zeros, Tensor):
            assert type(one) is type(zeros)
            assert one == zeros
            continue
        assert (one.dtype, one.shape, one.stride()) == (zeros.dtype, zeros.shape, zeros.stride())
        assert one.requires_grad is zeros.requires_grad
        written = _bytes(zeros) == _bytes(ones)
        assert torch.equal(_bytes(one)[written], _bytes(zeros)[written])


def check_written(operator: Operator, sample: Sample) -> None:
    """Assert that repeated calls write and return the same bits as ordinary calls.

    They must also advance the tensors' version counters, which autograd reads, as far.
    """
    _repeats.forget()
    for seed in range(_repeats.CALLS_BEFORE + 3):
        calls = [renewed(sample, seed), renewed(sample, seed)]
        plain: Operator = operator.__wrapped__  # type: ignore[attr-defined]
        results = []
        for function, call in zip((plain, operator), calls, strict=True):
            given = list(_flat((call.args, list(call.kwargs.values()))))
            tensors = [it for it in given if isinstance(it, Tensor)]
            before = [it._version for it in tensors]
            outputs = function(*call.args, **call.kwargs)
            told = [it._version - old for it, old in zip(tensors, before, strict=True)]
            written = [it for it in _flat((tensors, outputs)) if isinstance(it, Tensor)]
            results.append((told, [_bytes(it) for it in written]))
        (told, written), (again, same) = results
        assert told == again
        assert all(map(torch.equal, written, same))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for it in value:
            yield from _flat(it)
    else:
        yield value


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def serves(operator: Operator, call: Sample) -> bool:
    """Whether the operator takes the call, rather than declining it."""
    try:
        operator.__wrapped__(*call.args, **call.kwargs)  # type: ignore[attr-defined]
    except NotSupportedError:
        return False
    return True


def repeat(operator: Operator, sample: Sample) -> None:
    """Forget all recorded calls, then call the operator until this call is recorded."""
    _repeats.forget()
    for seed in range(_repeats.CALLS_BEFORE):
        call = renewed(sample, seed)
        operator(*call.args, **call.kwargs)


def check(operator: Operator, sample: Sample) -> None:
    """Compare a series of calls, each on new values, with ordinary calls.

    All tensors have the alignment that a repeated call needs; those of the last two calls, at
    offsets of 16 and 48 bytes, have no more than that.
    """
    _repeats.forget()
    for seed in range(_repeats.CALLS_BEFORE + 2):
        check_same(operator, renewed(sample, seed))
    for seed, offset in enumerate((16, 48), _repeats.CALLS_BEFORE + 2):
        check_same(operator, renewed(sample, seed, offset=offset))
