"""Real text that every machine has: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from transformer_engine_fl.core.errors import TeFlError

__all__ = ["VOCABULARY", "Corpus", "load_corpus"]

VOCABULARY = 256
"""Bytes are the tokens."""

_HELD_OUT_EVERY = 10
"""One source file in this many is held out: never trained on."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text to train on, and other files to measure the loss on."""

    training: Tensor
    held_out: Tensor

    def batch(self, rows: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random windows of the training text: (tokens, the token after each)."""
        last = len(self.training) - context
        starts = torch.randint(last, (rows,), generator=generator)
        return _windows(self.training, starts.tolist(), context)

    def evaluation(self, rows: int, context: int) -> tuple[Tensor, Tensor]:
        """Windows spread evenly over the held-out text: the same at each call."""
        step = (len(self.held_out) - context - 1) // rows
        return _windows(self.held_out, range(0, step * rows, step), context)


def load_corpus() -> Corpus:
    """Read the ``.py`` files of the standard library's folder.

    Raises:
        TeFlError: there is not enough text there.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    sources = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    held_out = b"\n".join(sources[::_HELD_OUT_EVERY])
    del sources[::_HELD_OUT_EVERY]
    training = b"\n".join(sources)
    if min(len(training), len(held_out)) < 100_000:
        raise TeFlError(
            f"found {len(training) + len(held_out)} bytes of .py files in {folder}, too few to "
            "train on; is this a Python whose standard library has no sources?"
        )
    return Corpus(_tokens(training), _tokens(held_out))


def _tokens(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: Tensor, starts: Sequence[int], context: int) -> tuple[Tensor, Tensor]:
    windows = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return windows[:, :-1], windows[:, 1:]
