"""Dropout in CUDA C++: what the samples of the contracts do not cover."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_engine_fl import testing
from transformer_engine_fl.backends.reference import dropout as reference
from transformer_engine_fl.backends.vendor.cuda import dropout
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.ops.dropout import philox_block

DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def values(size: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, generator=generator).to(device, dtype)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("probability", "options", "named"),
    [
        (1.5, {"seed": 1}, "dropout_probability"),
        (0.5, {"seed": -1}, "seed"),
        (0.5, {"seed": 1, "offset": 2**63}, "offset"),
    ],
)
def test_wrong_numbers_are_named(probability: float, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        dropout.dropout_fwd(torch.ones(4), probability, **options)
    assert raised.value.argument == named


# A block of threads processes 1024 or 2048 elements.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 8, 1023, 2047, 2048, 2049, 5003])
@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_tails_and_unaligned_memory(
    skipped: int, size: int, dtype: torch.dtype, device: str
) -> None:
    """Mask and values have the reference's bits: both round each value once."""
    x = values(size + skipped, dtype, device)[skipped:]
    options = {"seed": 77, "offset": 5}
    with testing.Guarded() as memory:
        output, mask = dropout.dropout_fwd(x, 0.4, **options)
        gradient = dropout.dropout_bwd(x, mask, 0.4)
    assert memory.broken() is None
    expected, bits = reference.dropout_fwd(x, 0.4, **options)
    assert torch.equal(mask, bits)
    assert torch.equal(output, expected)
    assert torch.equal(gradient, expected)


@pytest.mark.gpu
def test_places_whose_bytes_are_beyond_32_bits() -> None:
    size = 2**35 + 24
    if torch.cuda.mem_get_info()[0] < 4.125 * size:
        pytest.skip("needs 132 GiB of the GPU's memory")
    _, mask = dropout.dropout_fwd(torch.ones(size, dtype=torch.float16, device="cuda"), 0.5, seed=3)
    for byte in range(2**32 - 2, 2**32 + 3):
        words = philox_block(byte, 3)
        numbers = [half for word in words for half in (word & 0xFFFF, word >> 16)]
        assert int(mask[byte]) == sum((it >= 2**15) << bit for bit, it in enumerate(numbers))


@pytest.mark.gpu
def test_it_can_be_captured_and_replayed() -> None:
    x = values(100_003, torch.bfloat16, "cuda")
    dropout._kernels.clear()  # so the capture includes loading
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, mask = dropout.dropout_fwd(x, 0.3, seed=1)
    for _ in range(2):
        x.normal_()
        graph.replay()
        expected, bits = dropout.dropout_fwd(x, 0.3, seed=1)
        assert torch.equal(output, expected)
        assert torch.equal(mask, bits)
