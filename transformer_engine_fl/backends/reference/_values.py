"""Helpers shared by the families of the reference set: how they run and what they return."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from transformer_engine_fl.ops._tensors import first_tensor

__all__ = ["as_output", "as_written", "over_rows"]

Operator = TypeVar("Operator", bound=Callable[..., Any])


# A constant, which Dynamo can look up: Dynamo of torch 2.11 cannot trace the query itself.
_WITH_AUTOCAST = frozenset(
    it
    for it in ("cpu", "cuda", "hpu", "mps", "mtia", "xpu", "xla")
    if torch.amp.is_autocast_available(it)
)


def _has_autocast(device_type: str) -> bool:
    if torch.compiler.is_compiling():
        return device_type in _WITH_AUTOCAST
    return torch.amp.is_autocast_available(device_type)


def as_written(operator: Operator) -> Operator:
    """Decorate an operator: autograd does not record it, and autocast does not change its dtypes.

    The dtypes of the computation and of the output are part of an operator's definition.
    """

    @functools.wraps(operator)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch._C._is_any_autocast_enabled():
            tensor = first_tensor([*args, *kwargs.values()])
            if tensor is not None and _has_autocast(tensor.device.type):
                with torch.autocast(tensor.device.type, enabled=False):
                    return operator(*args, **kwargs)
        return operator(*args, **kwargs)

    return torch.no_grad()(run)  # type: ignore[return-value]


def as_output(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in the output's dtype, contiguous; it may share the memory of ``value``."""
    return value.to(dtype).contiguous()


def over_rows(value: Tensor) -> Tensor:
    """The sum over all dimensions but the last."""
    return value.unsqueeze(0).sum(tuple(range(value.ndim)))
