"""Training the demo's model, and counting which implementations serve each operator."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from transformer_engine_fl.cli.demo.corpus import Corpus
from transformer_engine_fl.cli.demo.model import Decoder, Shape
from transformer_engine_fl.core.manager import get_default_manager
from transformer_engine_fl.core.types import OpImpl

__all__ = ["OPERATORS", "Job", "Progress", "Run", "ServedCalls", "train"]

OPERATORS = ("rmsnorm_fwd", "rmsnorm_bwd", "layernorm_fwd", "layernorm_bwd")
"""The operators that the model dispatches."""

LEARNING_RATE = 3e-3
WARM_UP = 10

Progress = Callable[[int, float, float | None], object]
"""Called with the steps done, the last loss, and tokens per second once they are known."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to train: the same job gives the same model and the same batches."""

    shape: Shape
    steps: int
    seed: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class ServedCalls:
    """How often an implementation served an operator."""

    op: str
    impl: OpImpl
    calls: int


@dataclass(frozen=True, slots=True)
class Run:
    """The results of a training.

    Attributes:
        losses: of each step, on its batch, before the update.
        loss_before, loss_after: on held-out text.
        parameters: how many the model has.
        seconds: the time of all steps.
        tokens_per_second: over every step but the first, which compiles kernels and warms
            up; None if there was no other. The counting of calls is included: about 30 us
            a call.
        served: how often each implementation served each operator, evaluation included.
    """

    losses: tuple[float, ...]
    loss_before: float
    loss_after: float
    parameters: int
    seconds: float
    tokens_per_second: float | None
    served: tuple[ServedCalls, ...] = ()


def train(corpus: Corpus, job: Job, progress: Progress) -> Run:
    """Train a new model, and count the calls that each implementation serves."""
    counts: Counter[tuple[str, OpImpl]] = Counter()
    undo = get_default_manager().monitor(lambda op, impl: counts.update([(op, impl)]))
    try:
        run = _train(corpus, job, progress)
    finally:
        undo()
    in_order = sorted(counts, key=lambda it: (it[0], it[1].impl_id))
    served = tuple(ServedCalls(op, impl, counts[op, impl]) for op, impl in in_order)
    return dataclasses.replace(run, served=served)


def _train(corpus: Corpus, job: Job, progress: Progress) -> Run:
    shape, device = job.shape, job.device
    # Parameters and batches are drawn on the CPU, so that every device gets the same.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        model = Decoder(shape)
    model.to(device)
    generator = torch.Generator().manual_seed(job.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, job.steps))
    before = _held_out_loss(model, corpus, job)

    losses: list[float] = []
    clock = [time.perf_counter()]
    for step in range(job.steps):
        tokens, following = corpus.batch(shape.batch, shape.context, generator)
        loss = model.loss(tokens.to(device), following.to(device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(loss.item())  # waits for the device
        clock.append(time.perf_counter())
        progress(step + 1, losses[-1], _throughput(clock, shape))

    return Run(
        losses=tuple(losses),
        loss_before=before,
        loss_after=_held_out_loss(model, corpus, job),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        seconds=clock[-1] - clock[0],
        tokens_per_second=_throughput(clock, shape),
    )


def _rate(step: int, steps: int) -> float:
    """The relative learning rate: a short warm-up, then a cosine decay."""
    warm = min(1.0, (step + 1) / WARM_UP)
    return warm * (0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2)


def _throughput(clock: list[float], shape: Shape) -> float | None:
    """Tokens per second after the first step."""
    steps = len(clock) - 2
    return steps * shape.tokens / (clock[-1] - clock[1]) if steps > 0 else None


@torch.no_grad()
def _held_out_loss(model: Decoder, corpus: Corpus, job: Job) -> float:
    tokens, following = corpus.evaluation(job.shape.held_out, job.shape.context)
    return model.loss(tokens.to(job.device), following.to(job.device)).item()
