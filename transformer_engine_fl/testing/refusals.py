"""Calls that a contract refuses, each with one wrong argument.

They are not written down for each operator: every parameter is given values of the wrong
kind, and the calls that the contract's own check refuses are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from transformer_engine_fl.core.contract import Contract, Sample
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.testing.arguments import by_name, replaced, tensors

__all__ = ["refused_calls"]


def refused_calls(contract: Contract[..., Any], samples: list[Sample]) -> Iterator[Sample]:
    """Each refused call, labelled ``"what as parameter"``."""
    for name in contract.signature.parameters:
        sample = _passing(contract, samples, name)
        right = by_name(contract, sample).get(name, contract.options.get(name))
        device = next(tensors((sample.args, sample.kwargs))).device
        for what, wrong in _wrong(right, device).items():
            call = replaced(contract, sample, f"{what} as {name}", **{name: wrong})
            if _is_refused(contract, call):
                yield call


def _passing(contract: Contract[..., Any], samples: list[Sample], name: str) -> Sample:
    """The first sample with a tensor (or a non-empty list) for a parameter, else the first one."""

    def passes(sample: Sample) -> bool:
        value = by_name(contract, sample).get(name)
        return isinstance(value, Tensor) or (isinstance(value, list) and bool(value))

    return next(filter(passes, samples), samples[0])


def _wrong(right: Any, device: torch.device) -> Mapping[str, Any]:
    wrong: dict[str, Any] = {
        "a string": "float32",
        "None": None,
        "a dict": {},
        "a negative number": -1.0,
        "NaN": float("nan"),
        "an int": 1,
        "True": True,
    }
    if isinstance(right, Tensor):
        return wrong | _wrong_tensors(right)
    if isinstance(right, list) and right:
        *some, last = right
        wrong |= {
            "no item": [],
            "one item too few": some,
            "one item too many": [*right, last],
            "None inside": [*right, None],
        }
        inside = _wrong_tensors(last) if isinstance(last, Tensor) else {}
        return wrong | {f"{what} in an item": [*some, it] for what, it in inside.items()}
    return wrong | {"a tensor": torch.ones(2, device=device)}


def _wrong_tensors(right: Tensor) -> dict[str, Any]:
    """Tensors like ``right`` but for the shape, dtype or device; their values are arbitrary."""
    shape = tuple(right.shape)
    wrong: dict[str, Any] = {"one dimension too many": right.new_empty((1, *shape))}
    if shape:
        *before, columns = shape
        wrong["one dimension too few"] = right.new_empty(shape[1:])
        wrong["one column too many"] = right.new_empty((*before, columns + 1))
        wrong["one column too few"] = right.new_empty((*before, max(columns - 1, 0)))
        wrong["one row too many"] = right.new_empty((shape[0] + 1, *shape[1:]))
    for dtype in (torch.int32, torch.float32, torch.float64, torch.complex64):
        if dtype != right.dtype:
            name = str(dtype).removeprefix("torch.")
            wrong[f"dtype {name}"] = right.new_empty(shape, dtype=dtype)
    # For a CPU tensor, the meta device is the other device that is always there.
    elsewhere = "meta" if right.device.type == "cpu" else "cpu"
    wrong[f"a tensor on {elsewhere}"] = right.new_empty(shape, device=elsewhere)
    return wrong


def _is_refused(contract: Contract[..., Any], call: Sample) -> bool:
    try:
        contract.check(*call.args, **call.kwargs)
    except ArgumentError:
        return True
    return False
