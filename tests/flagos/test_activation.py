"""Activations in Triton: what the samples of the contracts do not cover."""

from __future__ import annotations

import pytest
from against_contract import RECTIFIERS, checking, with_nan

from transformer_engine_fl.backends.flagos import activation

check = checking(activation)


@pytest.mark.parametrize("op", RECTIFIERS)
def test_the_gradient_of_a_rectifier_passes_where_its_input_is_nan(op: str, device: str) -> None:
    check(op, *with_nan(op, device))
