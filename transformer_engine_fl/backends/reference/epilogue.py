"""Quantised epilogues in plain PyTorch: the operator in float32, then the cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine_fl.backends.reference import activation, normalization
from transformer_engine_fl.backends.reference._values import as_written
from transformer_engine_fl.backends.reference.quantization import Recipe
from transformer_engine_fl.ops.epilogue import EPILOGUES, Epilogue

Operator = Callable[..., Any]


def _quantizing(epilogue: Epilogue, calculate: Operator) -> Operator:
    """The operator that casts the float32 result of ``calculate``."""

    @as_written
    def operator(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = epilogue.contract.check(*args, **kwargs)
        arguments, scale, options = epilogue.divided(given)
        outputs = calculate(**arguments)
        return epilogue.outputs(outputs, Recipe(**options).cast(epilogue.of(outputs), scale))

    name = epilogue.contract.name
    operator.__name__ = operator.__qualname__ = name
    operator.__signature__ = epilogue.contract.signature  # type: ignore[attr-defined]
    operator.__doc__ = (epilogue.contract.__doc__ or "").partition("\n")[0]
    return operator


def _norm_in_float32(norm: Operator) -> Operator:
    return lambda **arguments: norm(**arguments, out_dtype=torch.float32)


def _activation_in_float32(function: Operator) -> Operator:
    def calculate(**arguments: Any) -> Any:
        wide = {
            name: it.float() if isinstance(it, Tensor) else it for name, it in arguments.items()
        }
        outputs = function(**wide)
        if isinstance(outputs, tuple):  # the gradient of a bias, then the output to quantise
            dbias, dact = outputs
            return dbias.to(arguments["grad"].dtype), dact
        return outputs

    return calculate


def _made() -> dict[str, Operator]:
    """Every quantised epilogue, made of the set's own operators."""
    made = {}
    for name, epilogue in EPILOGUES.items():
        if epilogue.base.family == "normalization":
            calculate = _norm_in_float32(getattr(normalization, epilogue.base.name))
        else:
            calculate = _activation_in_float32(getattr(activation, epilogue.base.name))
        made[name] = _quantizing(epilogue, calculate)
    return made


globals().update(_made())
