"""A plugin module: reference functions with a different kind of fault each, and a right one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine_fl import OpImpl, OpRegistry
from transformer_engine_fl.backends.reference import activation, normalization, softmax

TE_FL_PLUGIN_API = 1
IMPL_ID = "vendor.broken"

Operator = Callable[..., Any]


def _changed(right: Operator, change: Callable[[Any], Any]) -> Operator:
    """The operator with ``change`` applied to its result, and the signature of ``right``."""

    @functools.wraps(right)
    def operator(*args: Any, **kwargs: Any) -> Any:
        return change(right(*args, **kwargs))

    return operator


def _stale(right: Operator) -> Operator:
    kept: dict[Any, Tensor] = {}
    return _changed(right, lambda output: kept.setdefault((output.shape, output.dtype), output))


def _writing_its_input(right: Operator) -> Operator:
    @functools.wraps(right)
    def operator(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = right(input, *args, **kwargs)
        input.mul_(2)
        return output

    return operator


def _seeding(right: Operator) -> Operator:
    def change(output: Any) -> Any:
        torch.manual_seed(0)
        return output

    return _changed(right, change)


def _drifting(right: Operator) -> Operator:
    calls = itertools.count()
    return _changed(right, lambda output: output * (1 + 1e-7 * next(calls)))


FAULTS: dict[str, tuple[Operator, str]] = {
    # operator -> (the implementation, what the kit must say)
    "rmsnorm_fwd": (  # a statistic of the wrong dtype
        _changed(normalization.rmsnorm_fwd, lambda outputs: (outputs[0], outputs[1].double())),
        "the shape rule says",
    ),
    "layernorm_bwd": (  # outputs swapped: dgamma and dbeta have the same shape and dtype
        _changed(normalization.layernorm_bwd, lambda outputs: (outputs[0], *outputs[:0:-1])),
        "the allowed error",
    ),
    "silu": (  # off by one row
        _changed(activation.silu, lambda output: output.roll(1, 0) if output.ndim else output),
        "the allowed error",
    ),
    "gelu": (_stale(activation.gelu), "the allowed error"),
    "scaled_softmax_forward": (
        _writing_its_input(softmax.scaled_softmax_forward),
        "wrote to its input 'input'",
    ),
    "dsilu": (
        _seeding(activation.dsilu),
        "did not restore: the state of torch's",
    ),
    "srelu": (_drifting(activation.srelu), "differ in their bits"),
}

RIGHT = "relu"


def register(registry: OpRegistry) -> None:
    served = {name: fn for name, (fn, _) in FAULTS.items()} | {RIGHT: activation.relu}
    registry.register_many(
        OpImpl(
            op_name=name,
            impl_id=IMPL_ID,
            kind="vendor",
            vendor="broken",
            fn=fn,
            traits={"deterministic"},
        )
        for name, fn in served.items()
    )
