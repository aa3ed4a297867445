"""Lazily negated tensors: even if one is dense, a kernel must not read its memory as it is."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from transformer_engine_fl.ops import CATALOGUE
from transformer_engine_fl.testing.arguments import as_tuple

# Operators with a quick check of their arguments.
OPERATORS = [name for name, it in CATALOGUE.items() if it.family in ("activation", "normalization")]


@pytest.mark.parametrize("op", OPERATORS)
def test_a_lazily_negated_tensor_is_taken_at_its_value(op: str, device: str) -> None:
    contract = CATALOGUE[op]
    module = importlib.import_module(f"transformer_engine_fl.backends.flagos.{contract.family}")
    operator = getattr(module, op)
    args = next(iter(contract.samples("float32", device))).args
    expected = as_tuple(operator(*args))  # makes a plan, which later calls find
    for place, given in enumerate(args):
        assert isinstance(given, Tensor)
        negated = torch._neg_view(-given)
        assert negated.is_contiguous()
        found = as_tuple(operator(*args[:place], negated, *args[place + 1 :]))
        assert all(map(torch.equal, found, expected))


def test_a_single_negated_number_is_taken_at_its_value(device: str) -> None:
    """A tensor of one number is dense however it was made, as the statistics of one row are."""
    from transformer_engine_fl.backends.flagos.normalization import rmsnorm_bwd

    dy, x, gamma = torch.randn(3, 8, device=device)
    rsigma = torch.full((1,), 2.0, device=device)
    negated = torch.complex(rsigma, -rsigma).conj().imag
    assert negated.is_neg()
    assert negated.is_contiguous()
    args = dy.view(1, 8), x.view(1, 8)
    expected = rmsnorm_bwd(*args, rsigma, gamma)
    assert all(map(torch.equal, rmsnorm_bwd(*args, negated, gamma), expected))
