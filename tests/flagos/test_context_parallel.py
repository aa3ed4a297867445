"""Triton's steps between ranks: each path through the kernels, and invalid offsets."""

from __future__ import annotations

import pytest
import torch
from against_contract import checking
from some_tensors import offsets, surrounded
from torch import Tensor

from transformer_engine_fl.backends.flagos import context_parallel as flagos
from transformer_engine_fl.testing.allocation import Guarded

check = checking(flagos)

WILD = (-(2**31), -6, 4, 2**31 - 2, 0, 8, 2**30)


def tokens(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(device, dtype)


LENGTHS = [4, 0, 6, 2]


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("shape", [(3, 8), (40, 128), (3, 1000), (5, 1024), (1, 9001)])
def test_tokens_of_every_width(shape: tuple[int, int], pair: bool, device: str) -> None:
    heads, width = shape
    bounds, leading = offsets(LENGTHS, device), (2,) if pair else ()
    x = tokens(*leading, 14, heads, width, device=device)
    apart = tokens(*leading, 14, heads, width + 8, device=device)[..., :width]
    check("thd_read_half_tensor", x, bounds, 1)
    check("thd_read_half_tensor", apart, bounds, 0)
    step = tokens(*leading, 14, heads, width, device=device)
    check("thd_grad_correction", x, step, bounds, first_half="copy", second_half="add")
    half = step[..., :7, :, :]
    check("thd_grad_correction", apart, half, bounds, first_half="none", second_half="copy")
    check("thd_grad_correction", x, half, bounds, first_half="add", second_half="none")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(3, 8), (40, 128), (3, 1000), (70, 24), (1, 9001)])
def test_outputs_of_every_width(shape: tuple[int, int], packed: bool, device: str) -> None:
    heads, width = shape
    bounds = offsets(LENGTHS, device)
    lse = torch.randn((heads, 14) if packed else (4, heads, 9)).to(device)
    options = {"lse_packed": packed}
    out, step = (tokens(14, heads, width, device=device) for _ in range(2))
    check("thd_out_correction", out, step, lse, lse - 1, bounds, **options)
    half = (lse - 2)[..., : 7 if packed else 4]
    options["only_second_half"] = True
    check("thd_out_correction", out, step[:7], lse, half, bounds, **options)


@pytest.mark.parametrize("half", [False, True])
def test_a_token_counts_only_where_both_lse_have_it(half: bool, device: str) -> None:
    bounds = offsets([4, 6], device)
    for columns, of_step in ((5, 7), (6, 6)):
        lse = torch.randn(2, 3, columns, device=device)
        some = torch.randn(2, 3, of_step - 3 * half, device=device)
        out, step = (tokens(rows, 3, 8, device=device) for rows in (10, 5 if half else 10))
        check("thd_out_correction", out, step, lse, some, bounds, only_second_half=half)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads", [1, 19])
def test_many_columns_of_an_lse(heads: int, packed: bool, device: str) -> None:
    bounds = offsets([600, 2, 400], device)
    lse = torch.randn((heads, 1002) if packed else (3, heads, 600)).to(device)
    step = torch.randn((heads, 501) if packed else (3, heads, 300)).to(device)
    check("thd_read_second_half_lse", lse, bounds, 510, lse_packed=packed)
    check("thd_second_half_lse_correction", lse, step, bounds, lse_packed=packed)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64], ids=str)
def test_the_sum_of_an_lse_with_infinities_and_nan(kind: torch.dtype, device: str) -> None:
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 1e30, -3.5], dtype=kind)
    one, other = (it.flatten() for it in torch.meshgrid(special, special, indexing="ij"))
    lse = torch.cat([torch.zeros_like(one), one])[None].to(device)
    bounds = offsets([lse.shape[-1]], device)
    flagos.thd_second_half_lse_correction(lse, other[None].to(device), bounds, lse_packed=True)
    expected = torch.logaddexp(one, other)
    assert torch.allclose(lse[0, len(one) :].cpu(), expected, rtol=1e-6, equal_nan=True)


def test_a_nan_share_gives_a_nan_output(device: str) -> None:
    bounds, infinite = offsets([2], device), torch.full((1, 2), torch.inf, device=device)
    out, step = torch.ones(2, 1, 4, device=device), torch.ones(2, 1, 4, device=device)
    flagos.thd_out_correction(out, step, infinite, infinite, bounds, lse_packed=True)
    assert out.isnan().all()


def test_writing_tells_autograd(device: str) -> None:
    bounds, out = offsets([2, 4], device), tokens(6, 2, 8, device=device)
    before = out._version
    flagos.thd_grad_correction(out, out.clone(), bounds, first_half="add", second_half="add")
    assert out._version > before


@pytest.mark.parametrize("sequences", [1, 2, 3, 200])
def test_indices_of_any_number_of_sequences(sequences: int, device: str) -> None:
    random = torch.randint(0, 4, (sequences,), generator=torch.Generator().manual_seed(1))
    bounds = offsets((random * 6).tolist(), device)
    for rank in range(3):
        check("thd_get_partitioned_indices", bounds, int(bounds[-1]) + 12, 3, rank)


@pytest.mark.parametrize("seed", range(6))
def test_wrong_offsets_read_and_write_nothing_outside(seed: int, device: str) -> None:
    order = torch.randperm(len(WILD), generator=torch.Generator().manual_seed(seed))
    bounds = torch.tensor(WILD, dtype=torch.int32)[order].to(device)
    sequences = len(WILD) - 1

    def inside(*shape: int) -> Tensor:
        return surrounded(tokens(*shape, device=device, dtype=torch.float32))

    written = []
    with Guarded() as allocations:
        found = [flagos.thd_read_half_tensor(inside(8, 2, 8), bounds, half) for half in (0, 1)]
        for packed, shape in ((True, (2, 8)), (False, (sequences, 2, 8))):
            lse, step, half = inside(*shape), inside(*shape), inside(*shape[:-1], 4)
            found.append(flagos.thd_read_second_half_lse(lse, bounds, 4, lse_packed=packed))
            flagos.thd_second_half_lse_correction(lse, half, bounds, lse_packed=packed)
            for only, rows, its in ((False, 8, step), (True, 4, half)):
                out = inside(8, 2, 8)
                flagos.thd_out_correction(
                    out, inside(rows, 2, 8), lse, its, bounds,
                    only_second_half=only, lse_packed=packed,
                )  # fmt: skip
                written.append(out)
            written.append(lse)
        for first, second in (("add", "copy"), ("none", "add"), ("copy", "none")):
            rows = 4 if "none" in (first, second) else 8
            grad = inside(2, 8, 2, 8)
            flagos.thd_grad_correction(
                grad, inside(2, rows, 2, 8), bounds, first_half=first, second_half=second
            )
            written.append(grad)
    indices = flagos.thd_get_partitioned_indices(bounds, 8, 2, 1)
    assert ((indices >= 0) & (indices < 8)).all()
    assert allocations.broken() is None
    for result in found:
        assert not result.isnan().any()
    for result in written:
        assert not result.isnan().any()
        assert result._base[:1024].isnan().all()
        assert result._base[-1024:].isnan().all()
