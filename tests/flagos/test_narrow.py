"""Triton's casts to four bits, by PTX instructions and without."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_engine_fl.backends.flagos._launch import has_ptx
from transformer_engine_fl.backends.flagos._narrow import nibble_pair, nibble_word

TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
COLUMNS = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _by_words(x_ptr, word_ptr, LEAVES_NAN: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    y = tl.reshape(tl.load(x_ptr + at), (1, COLUMNS // 8, 8))
    word = tl.program_id(0) * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
    tl.store(word_ptr + word[None, :], nibble_word(y, LEAVES_NAN))


@triton.jit  # type: ignore[untyped-decorator]
def _by_pairs(x_ptr, byte_ptr, LEAVES_NAN: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    low, high = tl.load(x_ptr + 2 * at), tl.load(x_ptr + 2 * at + 1)
    tl.store(byte_ptr + at, nibble_pair(low, high, LEAVES_NAN).to(tl.uint8))


def numbers() -> Tensor:
    """All of bfloat16 except NaN with a sign, and the float32 neighbours of each tie."""
    every = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16).float()
    every = every[~(every.isnan() & every.signbit())]
    tie = torch.tensor(TIES)
    infinite = torch.tensor(torch.inf)
    near = torch.cat([tie.nextafter(-infinite), tie.nextafter(infinite)])
    found = torch.cat([every, near, -near])
    return torch.cat([found, torch.zeros(-len(found) % COLUMNS)])


def nearest(x: Tensor) -> Tensor:
    """The code with the nearest value, the even one in a tie; 7 for NaN."""
    size = x.double().abs().nan_to_num(nan=6.0).clamp_max(6.0)
    distance = (size[:, None] - torch.tensor(SIZES, dtype=torch.float64)).abs()
    # argmin finds the first of equal distances: even codes come first.
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    code = order[distance[:, order].argmin(1)]
    return code | (x.signbit().long() << 3)


@pytest.mark.parametrize("leaves_nan", [False, True])
def test_every_number_goes_to_the_nearest_e2m1_code(leaves_nan: bool, device: str) -> None:
    if leaves_nan and not has_ptx():
        pytest.skip("needs a GPU that takes PTX")
    x = numbers()
    codes = nearest(x).view(-1, 2)
    expected = (codes[:, 0] | codes[:, 1] << 4).to(torch.uint8)
    grid = (len(x) // COLUMNS,)
    words = torch.empty(len(x) // 8, dtype=torch.int32, device=device)
    _by_words[grid](x.to(device), words, leaves_nan, COLUMNS)
    assert torch.equal(words.cpu().view(torch.uint8), expected)
    pairs = torch.empty(len(x) // 2, dtype=torch.uint8, device=device)
    _by_pairs[grid](x.to(device), pairs, leaves_nan, COLUMNS)
    assert torch.equal(pairs.cpu(), expected)
