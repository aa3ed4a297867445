"""Quantisation in compiled code: one graph, and the bits of eager code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.ops._formats import FORMATS


def bits(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [bits(it) for it in value]
    return value if value is None else (value.dtype, value.view(torch.uint8).tolist())


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_compiles_to_the_same_bits(format: str) -> None:
    torch._dynamo.reset()

    def program(x: Tensor, w: Tensor) -> Any:
        whole = ops.rmsnorm_fwd_quantize(x, w, format=format, columnwise=True)
        return whole, ops.quantize(x, format=format), ops.split_quantize(x, [2, 4], format=format)

    x, w = torch.randn(6, 160), torch.randn(160)
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    assert bits(compiled(x, w)) == bits(program(x, w))
