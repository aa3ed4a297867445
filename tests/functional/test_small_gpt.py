"""The small GPT of the GPU tests, on a CPU: what those tests rely on holds there as well."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import ranks
import torch
from small_gpt import GPT, TINY, Cache, Trainer, batches, error, gradients


def test_it_learns_and_checkpointing_changes_no_bit() -> None:
    given = batches(TINY, 5, "cpu")
    model = GPT(TINY)
    ordinary = gradients(model, model(*given[0]))
    model.checkpointed = True
    assert all(map(torch.equal, gradients(model, model(*given[0])), ordinary))
    losses = Trainer(model, 2e-2).train(given)
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("way", ["at once", "logits"])
def test_each_way_of_the_loss_is_the_same_loss(way: str) -> None:
    model = GPT(TINY, dtype=torch.float64)
    (batch,) = batches(TINY, 1, "cpu")
    found, right = (gradients(model, model(*batch, way=it)) for it in (way, "fused"))
    # The sums of the losses are float64, but the counts of rows and drops are not.
    assert error(found, right) <= 1e-7


def test_what_is_served_from_the_cache_is_what_is_calculated_without() -> None:
    model = GPT(TINY, dtype=torch.float64).eval()
    (words, _) = batches(TINY, 1, "cpu")[0]
    with torch.inference_mode():
        right = model.logits(words)
        cache = Cache(model, 2)
        lengths = [3, 7]
        found = model.serve(words[:, :7], torch.tensor(lengths, dtype=torch.int32), cache)
        assert error(found, [right[0, 2], right[1, 6]]) <= 1e-12
        one = words[[1, 0], [7, 3]][:, None]
        cache.keep(torch.tensor([1, 0], dtype=torch.int32))
        found = model.serve(one, torch.tensor([1, 1], dtype=torch.int32), cache)
        assert error(found, [right[1, 7], right[0, 3]]) <= 1e-12


def test_ranks_finish_all_of_their_works(tmp_path: Path) -> None:
    found = ranks.of_all_ranks(tmp_path, "cpu", "reference", TINY, torch.float32, 200)
    for results in found:
        assert not [it for it in results.values() if isinstance(it, str)]
        assert list(results) == list(ranks.WORKS)
    (_, *one), (_, *other) = (it["data parallel"] for it in found)
    for mine, theirs in zip(one, other, strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_ranks_that_do_not_end_in_time_are_ended(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        ranks.of_all_ranks(tmp_path, "cpu", "reference", TINY, torch.float32, 0.2)
    assert time.monotonic() - begun < 60
