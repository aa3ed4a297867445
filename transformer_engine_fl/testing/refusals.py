"""Calls that a contract refuses: one argument wrong in each, in many ways.

What is wrong is not written down for each operator: every parameter is given values of
the wrong kind, and those that the contract's own check refuses are kept.
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
    """Each refused call once, labelled ``"what as parameter"``."""
    for name in contract.signature.parameters:
        sample = _passing(contract, samples, name)
        right = by_name(contract, sample).get(name, contract.options.get(name))
        device = next(tensors((sample.args, sample.kwargs))).device
        for what, wrong in _wrong(right, device).items():
            call = replaced(contract, sample, f"{what} as {name}", **{name: wrong})
            if _is_refused(contract, call):
                yield call


def _passing(contract: Contract[..., Any], samples: list[Sample], name: str) -> Sample:
    """The first sample that passes a tensor (or a list) for a parameter, else the first."""
    passed = (it for it in samples if isinstance(by_name(contract, it).get(name), Tensor | list))
    return next(passed, samples[0])


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
        some = [right[0], *right[1:-1]]
        return wrong | {"no item": [], "one item too few": some, "None inside": [*right, None]}
    return wrong | {"a tensor": torch.ones(2, device=device)}


def _wrong_tensors(right: Tensor) -> dict[str, Any]:
    wrong: dict[str, Any] = {"one dimension too many": right.unsqueeze(0)}
    if right.ndim:
        wrong["one dimension too few"] = right.select(0, 0) if right.shape[0] else right.flatten()
        wrong["one column too many"] = torch.cat([right, right[..., :1]], -1)
        wrong["one column too few"] = right[..., :-1]
        wrong["one row too many"] = torch.cat([right, right[:1]], 0)
    for dtype in (torch.int32, torch.float32, torch.float64, torch.complex64):
        if dtype != right.dtype:
            wrong[f"dtype {str(dtype).removeprefix('torch.')}"] = right.to(dtype)
    # Where there is no other device, the one without memory is another one too.
    elsewhere = "meta" if right.device.type == "cpu" else "cpu"
    wrong[f"a tensor on {elsewhere}"] = right.to(elsewhere)
    return wrong


def _is_refused(contract: Contract[..., Any], call: Sample) -> bool:
    try:
        contract.check(*call.args, **call.kwargs)
    except ArgumentError:
        return True
    return False
