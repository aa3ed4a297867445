"""Triton's softmax where several programs share a row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from against_contract import checking

from transformer_engine_fl.backends.flagos import softmax as flagos
from transformer_engine_fl.backends.flagos._rows import Cut
from transformer_engine_fl.ops import softmax as contracts

check = checking(flagos)

NAMES = (
    "scaled_softmax",
    "scaled_masked_softmax",
    "scaled_aligned_causal_masked_softmax",
)


@pytest.fixture(params=[None, 16], ids=["as wide rows are", "in pieces of 16"])
def pieces(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Cuts rows into pieces of 16 columns, or leaves the usual pieces of wide rows."""
    if request.param is None:
        yield False
        return
    cut = Cut(threads=32, width=request.param, programs=7, shared=True)
    with flagos._FORWARD.trial(cut), flagos._BACKWARD.trial(cut):
        yield True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_in_pieces(name: str, dtype: torch.dtype, pieces: bool, device: str) -> None:
    shape = (2, 5, 100) if pieces else (1, 2, 70001)
    scores = (torch.randn(shape) * 3).to(device, dtype)
    hidden = ()
    if name != "scaled_softmax":
        scores[..., -1, :] = float("-inf")
    if name == "scaled_masked_softmax":
        mask = torch.randn(shape, device=device) > 0.4
        mask[..., 0, :] = True
        mask[..., 1, :48] = True
        hidden = (mask,)
    check(f"{name}_forward", scores, *hidden)
    output = getattr(contracts, f"{name}_forward").oracle(scores, *hidden).to(dtype)
    check(f"{name}_backward", torch.randn(shape).to(scores), output)


@pytest.mark.parametrize("cut", [Cut(128, 2048), Cut(128, 512, 2, 2), Cut(64, 512, resident=4)])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_in_parts(name: str, cut: Cut, device: str) -> None:
    scores = (torch.randn(2, 3, 2600) * 3).to(device, torch.bfloat16)
    scores[0, 0, :2048] = float("-inf")  # all columns of a part
    scores[1, 1] = float("-inf")
    hidden = ()
    if name == "scaled_masked_softmax":
        mask = torch.randn(scores.shape, device=device) > 0.4
        mask[..., 1, :] = True
        hidden = (mask,)
    with flagos._FORWARD.trial(cut):
        check(f"{name}_forward", scores, *hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wider", [3, 8])
def test_rows_of_any_alignment_are_summed_as_dense_ones(
    wider: int, dtype: torch.dtype, device: str
) -> None:
    """Rows that a dense row's accesses cannot read are copied: the accesses decide the sums."""
    memory = torch.randn(2, 3, 5, 64 + wider).to(device, dtype)
    shifted = memory.view(-1)[1 : 1 + 30 * 64].view(2, 3, 5, 64)
    flagos._PLANS.clear()
    for scores in (memory[..., :64], memory[:1, :1, :1, :64], shifted, shifted[:1, :1, 1:2]):
        check("scaled_softmax_forward", scores)
        output = scores.softmax(-1)
        check("scaled_softmax_backward", scores, output)
        check("scaled_softmax_backward", output, scores)
    units = {key[-2] for key in flagos._PLANS if isinstance(key, tuple)}
    assert all(unit % (16 // dtype.itemsize) == 0 for unit in units), units


@pytest.mark.parametrize("wider", [0, 1, 4, 8])
def test_a_mask_of_whatever_strides(wider: int, device: str) -> None:
    scores = torch.randn(2, 3, 5, 64, device=device).to(torch.bfloat16)
    mask = torch.rand(2, 1, 5, 64 + wider, device=device) > 0.5
    check("scaled_masked_softmax_forward", scores, mask[..., :64])
    check("scaled_masked_softmax_forward", scores, mask[..., wider:])


def test_pieces_far_below_the_highest_score_give_zeros(pieces: bool, device: str) -> None:
    scores = torch.full((1, 100 if pieces else 70001), -3e38, device=device)
    scores[0, 40] = 3e38
    assert flagos.scaled_softmax_forward(scores)[0].nonzero().flatten().tolist() == [40]
