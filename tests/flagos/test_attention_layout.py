"""Triton's layouts around attention: each path through the kernels, and invalid indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from against_contract import checking
from some_tensors import offsets, surrounded
from torch import Tensor

from transformer_engine_fl.backends.flagos import attention_layout as flagos
from transformer_engine_fl.ops import attention_layout as contracts
from transformer_engine_fl.testing.allocation import Guarded

check = checking(flagos)

WILD = (-(2**31), -5, 3, 2**31 - 1, 0, 7, 2**30)
"""Values that no index should have; their differences do not even fit into 32 bits."""


def tokens(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(device, dtype)


# Rows that fit into a tile, rows cut into pieces, of a power of two or not, and rows wider than a
# tile; with contiguous heads and with heads that are apart.
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("shape", [(3, 8), (40, 128), (3, 1000), (5, 1024), (9, 1000), (1, 9001)])
def test_rows_of_every_width(shape: tuple[int, int], apart: bool, device: str) -> None:
    heads, width = shape
    x = tokens(17, heads, width + 8 * apart, device=device)[..., :width]
    bounds = offsets([5, 0, 10], device)
    padded = check("convert_thd_to_bshd", x, bounds, 9)
    padded = torch.cat([padded, padded], -2)[..., :heads, :] if apart else padded
    check("convert_bshd_to_thd", padded, bounds, 17)


@pytest.mark.parametrize("shape", [(33, 3, 2, 24), (5, 2, 20, 384), (3, 1, 1, 30000)])
def test_projections_of_every_width(shape: tuple[int, ...], device: str) -> None:
    qkv = tokens(*shape, device=device)
    parts = check("fa_prepare_fwd", qkv).unbind()
    assert torch.equal(check("fa_prepare_bwd", *parts), qkv)


@pytest.mark.parametrize("sequences", [1, 2, 3, 64, 1000])
def test_a_token_is_found_among_any_number_of_sequences(sequences: int, device: str) -> None:
    lengths = torch.randint(0, 3, (sequences,), generator=torch.Generator().manual_seed(0))
    bounds = offsets(lengths.tolist(), device)
    x = tokens(sequences, 2, 1, 8, device=device)
    check("convert_bshd_to_thd", x, bounds, int(bounds[-1]) + 3)


@pytest.mark.parametrize("seed", range(6))
def test_wrong_offsets_read_and_write_nothing_outside(seed: int, device: str) -> None:
    order = torch.randperm(len(WILD), generator=torch.Generator().manual_seed(seed))
    bounds = torch.tensor(WILD, dtype=torch.int32)[order].to(device)
    thd = surrounded(tokens(6, 2, 8, device=device))
    bshd = surrounded(tokens(len(WILD) - 1, 4, 2, 8, device=device))
    with Guarded() as allocations:
        padded = flagos.convert_thd_to_bshd(thd, bounds, 4)
        packed = flagos.convert_bshd_to_thd(bshd, bounds, 6)
    assert allocations.broken() is None
    assert not padded.isnan().any()
    assert not packed.isnan().any()


# -------------------------------------------------------------------------------- cache


def check_cache(*args: Any, **kwargs: Any) -> None:
    expected = contracts.copy_to_kv_cache.oracle(*args, **kwargs)
    versions = [cache._version for cache in args[2:4]]
    flagos.copy_to_kv_cache(*args, **kwargs)
    for cache, version, right in zip(args[2:4], versions, expected, strict=True):
        assert torch.equal(cache.double(), right)
        assert cache._version > version


@pytest.mark.parametrize("qkv_format", ["thd", "bshd", "sbhd"])
@pytest.mark.parametrize("widths", [(128, 64), (8, 24), (5000, 8)])
def test_keys_and_values_of_other_widths(
    widths: tuple[int, int], qkv_format: str, device: str
) -> None:
    added, total = [1, 4, 2], [9, 4, 7]
    leading = {"thd": (7,), "bshd": (3, 4), "sbhd": (4, 3)}[qkv_format]
    new = [tokens(*leading, 3, width, device=device) for width in widths]
    caches = [tokens(6, 4, 3, width, device=device) for width in widths]
    table = torch.tensor([[5, 0, 3], [1, 9, 9], [2, 4, 9]], dtype=torch.int32, device=device)
    lengths = offsets(added, device), offsets(total, device)
    check_cache(
        *new, *caches, *lengths, page_table=table.t().contiguous().t(), qkv_format=qkv_format
    )


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("sequences", [2, 5, 12])
def test_rows_that_change_places(
    sequences: int, in_place: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_place:
        monkeypatch.setattr(flagos, "_MOST_IN_PLACE", 2)
    order = torch.randperm(sequences + 2, generator=torch.Generator().manual_seed(sequences))
    order[0] = 0  # stays where it is
    new = [tokens(sequences, 3, width, device=device) for width in (40, 8)]
    caches = [tokens(sequences + 2, 7, 3, width, device=device) for width in (40, 8)]
    total = [1 + place % 9 for place in range(sequences)]
    lengths = offsets([1] * sequences, device), offsets(total, device)
    indices = order[:sequences].to(device, torch.int32)
    check_cache(*new, *caches, *lengths, batch_indices=indices)


@pytest.mark.parametrize("layout", ["transposed", "negated", "heads apart"])
def test_caches_that_a_kernel_does_not_write_as_they_are(layout: str, device: str) -> None:
    def cache(width: int) -> Tensor:
        if layout == "heads apart":
            return tokens(4, 8, 2, 2 * width, device=device, dtype=torch.float32)[..., ::2]
        if layout == "transposed":
            return tokens(width, 2, 8, 4, device=device, dtype=torch.float32).permute(3, 2, 1, 0)
        numbers = torch.randn(4, 8, 2, width, dtype=torch.complex64).to(device)
        assert numbers.conj().imag.is_neg()
        return numbers.conj().imag

    new = [tokens(4, 2, width, device=device, dtype=torch.float32) for width in (6, 4)]
    lengths = offsets([1, 2, 1], device), offsets([3, 2, 8], device)
    indices = torch.tensor([1, 3, 0], dtype=torch.int32, device=device)
    check_cache(*new, cache(6), cache(4), *lengths, batch_indices=indices)


@pytest.mark.parametrize("seed", range(8))
def test_wrong_indices_write_nothing_outside_the_caches(seed: int, device: str) -> None:
    chosen = torch.Generator().manual_seed(seed)

    def wild(*shape: int) -> Tensor:
        places = torch.randint(len(WILD), shape, generator=chosen)
        return torch.tensor(WILD, dtype=torch.int32)[places].to(device)

    new = [surrounded(tokens(3, 4, 2, 8, device=device)) for _ in range(2)]
    for options in ({"page_table": wild(3, 2)}, {"batch_indices": wild(3)}, {}):
        for qkv_format in ("thd", "bshd"):
            tensors = [it.view(12, 2, 8) if qkv_format == "thd" else it for it in new]
            caches = [surrounded(tokens(4, 5, 2, 8, device=device)) for _ in range(2)]
            flagos.copy_to_kv_cache(
                *tensors, *caches, wild(4), wild(4), qkv_format=qkv_format, **options
            )
            for cache in caches:
                assert not cache.isnan().any()
                outside = torch.ones(cache._base.shape, dtype=torch.bool, device=device)
                outside[1024:-1024] = False
                assert cache._base[outside].isnan().all()
