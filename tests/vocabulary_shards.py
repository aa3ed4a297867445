"""Cross entropy on a vocabulary that is sharded over two ranks; each rank is a process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from transformer_engine_fl import functional

__all__ = ["CALLS", "WIDTHS", "check_ranks", "results_of", "run"]

WORDS: Final = 14

CALLS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "rows": {"reduction": "none"},
    "label smoothing": {"label_smoothing": 0.2},
    "z-loss": {"z_loss": 0.03},
    "soft cap": {"softcap": 1.5},
    "a word as ignore index": {"ignore_index": 5},
    "everything": {"label_smoothing": 0.1, "z_loss": 0.03, "softcap": 2.0, "ignore_index": 9},
}

WIDTHS: Final[dict[str, tuple[int, int]]] = {"equal": (7, 7), "unequal": (10, 4)}

GRADIENTS: Final = torch.tensor([1.0, -2.0], dtype=torch.float64)
"""The output gradients of the loss and of its z-loss part."""


def logits_and_targets(
    label_smoothing: float = 0.0, ignore_index: int = -100, **options: Any
) -> tuple[Tensor, Tensor]:
    """Full logits and targets, the same on every rank: targets at both ends of the shards, ignored
    ones, and others.

    In one row, all 7 words of the first of two equal shards are masked (-inf); not with label
    smoothing, which would make its loss infinite.
    """
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn((3, 4, WORDS), generator=generator, dtype=torch.float64)
    if not label_smoothing:
        logits[0, 0, :7] = -torch.inf
    none = ignore_index
    return logits, torch.tensor([[7, 6, 0, 13], [none, 3, 9, 10], [5, 9, none, 12]])


def results_of(rank: int, device: Any = "cpu") -> dict[Any, tuple[Tensor, ...]]:
    """For each way of sharding and each call, the losses and the gradient of the rank's shard."""
    group = dist.group.WORLD
    assert group is not None
    results = {}
    for way, widths in WIDTHS.items():
        start = sum(widths[:rank])
        place = {} if way == "equal" else {"vocab_start": start, "vocab_size": WORDS}
        for name, options in CALLS.items():
            logits, target = (it.to(device) for it in logits_and_targets(**options))
            shard = logits[..., start : start + widths[rank]].requires_grad_()
            losses = functional.cross_entropy(
                shard, target, return_z_loss=True, process_group=group, **options, **place
            )
            torch.autograd.backward(
                losses, [it.expand_as(losses[0]) for it in GRADIENTS.to(device)]
            )
            results[way, name] = (*(loss.detach() for loss in losses), shard.grad)
    return results


def check_ranks(found: list[dict[Any, tuple[Tensor, ...]]], way: str, name: str) -> None:
    """Compare all ranks' results of a way and a call with those for the whole vocabulary."""
    options = CALLS[name]
    x, target = logits_and_targets(**options)
    x.requires_grad_()
    losses = functional.cross_entropy(x, target, return_z_loss=True, **options)
    torch.autograd.backward(losses, [it.expand_as(losses[0]) for it in GRADIENTS])
    for loss, part, _ in (results[way, name] for results in found):
        torch.testing.assert_close((loss, part), losses)
    gradient = torch.cat([results[way, name][2] for results in found], -1)
    torch.testing.assert_close(gradient, x.grad)


def run(rank: int, folder: Path) -> None:
    """Save the results of one of two ranks; warnings are errors, as in the other tests."""
    warnings.simplefilter("error")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.save(results_of(rank), folder / f"{rank}.pt")
    dist.destroy_process_group()
