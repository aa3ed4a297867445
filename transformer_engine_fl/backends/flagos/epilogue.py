"""Quantised epilogues in Triton: an operator and the cast of its output, in one pass.

What casts is in ``_casting``, which calculates what it casts: for activations there is
nothing to add but the operators' arguments. A norm comes from whole rows. Rows that fit
into registers are normalized and cast along their rows by one kernel; where the cast needs
more than that, a transposed tensor, square blocks or a scale that follows from all values,
the kernel leaves the statistics and the amaxes, and the cast normalizes what it reads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine_fl.backends.flagos._arguments import by_rows, check_numbers, plain
from transformer_engine_fl.backends.flagos._casting import (
    Quantized,
    Recipe,
    Source,
    cast,
    cast_with_sums,
)
from transformer_engine_fl.backends.flagos.activation import ACTIVATIONS
from transformer_engine_fl.ops.epilogue import EPILOGUES, Epilogue

Operator = Callable[..., Any]


def _by_rows(op: str, name: str, tensor: Tensor) -> tuple[Tensor, int]:
    """The plain tensor with dense columns, and the distance of its rows."""
    tensor = plain(op, name, tensor)
    return by_rows(tensor) if tensor.numel() else (tensor, tensor.shape[-1])


def _activation(
    epilogue: Epilogue, recipe: Recipe, given: Mapping[str, Any], scale: Tensor | None
) -> tuple[Any, ...]:
    """An activation or its gradient, quantised; before it the gradient of a bias."""
    base = epilogue.base
    of = ACTIVATIONS[base.name]
    limit, alpha = given.get("limit", 0.0), given.get("alpha", 0.0)
    check_numbers(recipe.op, limit, alpha)
    x, x_stride = _by_rows(recipe.op, base.dispatch_on, given[base.dispatch_on])
    grad, grad_stride = None, 0
    if of.backward:
        grad, grad_stride = _by_rows(recipe.op, "grad", given["grad"])
    source = Source(
        of.kind,
        tuple(epilogue.shape(given)),
        x,
        x_stride,
        grad,
        grad_stride,
        of.gated,
        limit=float(limit),
        alpha=float(alpha),
    )
    if not epilogue.place:
        return cast(recipe, source, scale)
    assert grad is not None
    dbias, quantized = cast_with_sums(recipe, source, grad.dtype, scale)
    return dbias, *quantized


def _quantizing(epilogue: Epilogue, calculate: Operator) -> Operator:
    """The operator that checks its arguments and then calculates."""
    contract = epilogue.contract

    def operator(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = contract.check(*args, **kwargs)
        arguments, scale, options = epilogue.divided(given)
        outputs: tuple[Any, ...] = calculate(
            epilogue, Recipe.of(contract.name, **options), arguments, scale
        )
        return outputs

    operator.__name__ = operator.__qualname__ = contract.name
    operator.__signature__ = contract.signature  # type: ignore[attr-defined]
    operator.__doc__ = f"``{contract.name}`` of the contract."
    return operator


globals().update(
    (name, _quantizing(epilogue, _activation))
    for name, epilogue in EPILOGUES.items()
    if epilogue.base.family == "activation"
)
