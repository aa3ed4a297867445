"""A small GPT trained on a real GPU in the usual ways.

The expected values are those of the definitions in float32 for the same parameters. The error
allowed to a set is relative to the error of the definitions in bfloat16. Tests that expect the
same bits require implementations that claim to be deterministic.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import small_gpt
import torch
from small_gpt import GPT, LARGE, SETS, TIMES, Trainer, batches, check_same, error, exact, gradients
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl.backends._lists import MOST_TABLES

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
DTYPE = torch.bfloat16
SHAPES = {
    "dense": LARGE,
    "experts": dataclasses.replace(LARGE, experts=4),
    "chosen experts": dataclasses.replace(LARGE, experts=4, topk=2),
}
"""If every expert gets every token, the host knows the number of rows of each expert."""
STEPS = 4
LR = 3e-3
LOSS = 2.0**-7
"""Relative tolerance of losses: the spacing of bfloat16."""


@contextmanager
def policy(prefer: str, *traits: str, strict: bool = True) -> Iterator[None]:
    """A global policy, as autograd recomputes checkpointed parts in threads of its own."""
    wanted = te.SelectionPolicy(prefer=prefer, strict=strict, require=frozenset(traits))
    before = te.set_global_policy(wanted)
    try:
        yield
    finally:
        te.set_global_policy(before)


@dataclasses.dataclass(frozen=True)
class Expected:
    """The expected results, and the error of the definitions in bfloat16."""

    losses: Tensor
    gradients: list[Tensor]
    error: float


@functools.cache
def expected(kind: str) -> Expected:
    with policy("reference"):
        model = GPT(SHAPES[kind], DEVICE, DTYPE)
        given = batches(SHAPES[kind], STEPS, DEVICE)
        right = exact(model)
        at_first = gradients(right, right(*given[0]))
        losses = Trainer(right, LR).train(given)
        narrow = gradients(model, model(*given[0]))
    return Expected(torch.stack(losses), at_first, error(narrow, at_first))


def start(prefer: str, kind: str = "dense") -> tuple[GPT, list[tuple[Tensor, Tensor]]]:
    """A model and batches that are the same each time."""
    model = GPT(small_gpt.suited(SHAPES[kind], prefer), DEVICE, DTYPE)
    return model, batches(SHAPES[kind], STEPS, DEVICE)


def check_gradients(found: list[Tensor], kind: str = "dense") -> None:
    right = expected(kind)
    assert error(found, right.gradients) <= TIMES * right.error


def check_losses(losses: list[Tensor], kind: str = "dense") -> None:
    right = expected(kind).losses
    found = torch.stack(losses)
    assert bool(((found - right).abs() <= LOSS * right).all()), (found, right)
    assert found[-1] < found[0] - 1  # more than the tolerance: the model has learnt


def trained(prefer: str, kind: str = "dense") -> list[Tensor]:
    """The losses, and everything that training changes."""
    model, given = start(prefer, kind)
    trainer = Trainer(model, LR)
    losses = trainer.train(given)
    return [*losses, *(it.detach() for it in trainer.state())]


# --------------------------------------------------------------------- beside the definitions


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("prefer", SETS)
def test_losses_and_gradients_are_those_of_the_definitions(prefer: str, kind: str) -> None:
    expected(kind)
    with policy(prefer):
        for way in ("fused", "at once", "logits"):
            model, given = start(prefer, kind)
            check_gradients(gradients(model, model(*given[0], way=way)), kind)
            check_losses(Trainer(model, LR).train(given, way=way), kind)


@pytest.mark.parametrize("prefer", SETS)
def test_under_autocast_parameters_are_float32_and_products_are_not(prefer: str) -> None:
    """torch computes the products; the rest is dispatched and keeps the dtypes of its inputs."""
    expected("dense")  # under a policy of its own
    model, given = start(prefer)
    model = exact(model)
    for module in model.modules():
        if isinstance(module, small_gpt.Linear):
            module.native = True
    trainer, losses, first = Trainer(model, LR), [], None
    with policy(prefer):
        for number, batch in enumerate(given):
            with torch.autocast(torch.device(DEVICE).type, DTYPE):
                loss = model(*batch, step=number)
            loss.backward()
            grads = [it.grad.clone() for it in model.parameters()]
            first = first or grads
            trainer.update()
            small_gpt.leave_no_gradients(model)
            losses.append(loss.detach())
    assert {it.dtype for it in first} == {torch.float32}
    check_losses(losses)
    check_gradients(first)


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("prefer", SETS)
def test_gradients_of_parts_of_a_batch_add_up(prefer: str, kind: str) -> None:
    """Gradients accumulate in ``grad``, and in float32 where the products write them directly."""
    bound = TIMES * expected(kind).error
    model, given = start(prefer, kind)
    parts = list(zip(*(it.split(1) for it in given[0]), strict=True))
    with policy("reference"):
        right = exact(model)
        wanted = gradients(right, sum(right(*part) for part in parts) / len(parts))

    def accumulate() -> None:
        for part in parts:
            (model(*part) / len(parts)).backward()

    with policy(prefer):
        accumulate()
        assert error([it.grad for it in model.parameters()], wanted) <= bound
        small_gpt.leave_no_gradients(model)
        named = {f"{name}.weight": it for name, it in model.named_modules() if name != "head"}
        layers = {name: it for name, it in named.items() if isinstance(it, small_gpt.Linear)}
        for layer in layers.values():
            layer.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
        accumulate()
    found = []
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name in layers)
        found.append(layers[name].main_grad if name in layers else parameter.grad)
    assert error(found, wanted) <= bound


# ----------------------------------------------------------------------- ways of the same bits


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("prefer", SETS)
def test_training_twice_gives_the_same_bits(prefer: str, kind: str) -> None:
    with policy(prefer, "deterministic"):
        check_same(trained(prefer, kind), trained(prefer, kind))


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("prefer", SETS)
def test_checkpointing_gives_the_same_bits(prefer: str, kind: str) -> None:
    model, given = start(prefer, kind)
    with policy(prefer, "deterministic"):
        ordinary = gradients(model, model(*given[0], step=3))
        model.checkpointed = True
        check_same(gradients(model, model(*given[0], step=3)), ordinary)
        other = gradients(model, model(*given[0], step=4))
    assert not all(map(torch.equal, other, ordinary))  # dropout draws other masks


@pytest.mark.parametrize("prefer", SETS)
def test_on_a_side_stream_it_gives_the_same_bits(prefer: str) -> None:
    with policy(prefer, "deterministic"):
        right = trained(prefer)
        model, given = start(prefer)
        trainer = Trainer(model, LR)
        late = [tuple(torch.zeros_like(it) for it in batch) for batch in given]
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for batch, values in zip(late, given, strict=True):
                for tensor, value in zip(batch, values, strict=True):
                    tensor.copy_(value)
            losses = trainer.train(late)
        stream.synchronize()
        check_same([*losses, *(it.detach() for it in trainer.state())], right)


# ------------------------------------------------------------------------------ CUDA graphs


@pytest.mark.parametrize("way", ["fused", "at once", "logits"])
@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("prefer", SETS)
def test_a_whole_step_in_a_graph_gives_the_same_bits(prefer: str, kind: str, way: str) -> None:
    results = []
    with policy(prefer, "deterministic", "graph_safe"):
        for graphed in (False, True):
            model, given = start(prefer, kind)
            trainer = Trainer(model, LR)
            if graphed:
                losses = trainer.train_in_a_graph(given, way=way)
            else:
                losses = [it for batch in given for it in trainer.train([batch], way=way)]
            results.append([*losses, *(it.detach() for it in trainer.state())])
        check_same(*results)


# A warning of torch's: it captures on another stream than the one of the warm-up.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("prefer", SETS)
def test_blocks_made_graphed_callables_give_the_same_bits(prefer: str) -> None:
    with policy(prefer, "deterministic", "graph_safe"):
        model, given = start(prefer)
        x = torch.nn.functional.embedding(given[0][0], model.tokens).detach()
        outer = [torch.randn_like(x) for _ in range(2)]

        class Both(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = copy.deepcopy(model.blocks)

            def forward(self, x: Tensor) -> Tensor:
                for block in self.blocks:
                    x, _ = block(x, model.freqs)
                return x

        ordinary, both = Both(), Both()
        graphed = torch.cuda.make_graphed_callables(both, (x.clone().requires_grad_(),))
        for number, dy in enumerate(outer):
            results = []
            for module, called in ((ordinary, ordinary), (both, graphed)):
                leaf = (x + number).requires_grad_()
                output = called(leaf)
                grads = torch.autograd.grad(output, (leaf, *module.parameters()), dy)
                results.append([it.clone() for it in (output.detach(), *grads)])
            check_same(*results)


# --------------------------------------------------------------------------------- compiled


# A warning of torch's, whose CUDA graphs begin with an empty one.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("prefer", SETS)
def test_a_compiled_model_trains_as_an_ordinary_one(prefer: str, kind: str, mode: str) -> None:
    torch._dynamo.reset()
    expected(kind)  # under a policy of its own
    model, given = start(prefer, kind)
    trainer = Trainer(model, LR)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    losses = []
    with policy(prefer):
        for number, batch in enumerate(given):
            torch.compiler.cudagraph_mark_step_begin()
            # The step number stays the same: dropout would be recompiled for each new one.
            loss = compiled(*batch)
            loss.backward()
            if not number:
                found = [it.grad.clone() for it in model.parameters()]
                check_gradients(found, kind)
            trainer.update()
            losses.append(loss.detach().clone())
            small_gpt.leave_no_gradients(model)
            del loss
    of_one_mask = ordinary_losses(prefer, kind)
    difference = (torch.stack(losses) - torch.stack(of_one_mask)).abs()
    assert bool((difference <= LOSS * torch.stack(of_one_mask)).all())
    assert losses[-1] < losses[0] - 1


def ordinary_losses(prefer: str, kind: str) -> list[Tensor]:
    """The losses of an eager run in which dropout has the same masks in every step."""
    model, given = start(prefer, kind)
    trainer = Trainer(model, LR)
    with policy(prefer):
        return [loss for batch in given for loss in trainer.train([batch])]


# ------------------------------------------------------------------ what a step costs besides


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("prefer", SETS)
def test_memory_does_not_grow_from_step_to_step(prefer: str, kind: str) -> None:
    model, given = start(prefer, kind)
    trainer = Trainer(model, LR)
    seen, period = [], 2 * MOST_TABLES
    with policy(prefer):
        for _ in range(4 * period):
            trainer.train(given[:1])
            seen.append(torch.cuda.memory_allocated())
    # In each step gradients have new addresses, and so new tables; a full cache is cleared.
    grown = max(seen[-period:]) - max(seen[period : 2 * period])
    assert grown < 2**14, seen


# A warning of torch's: the debug mode does not find every synchronisation.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("way", ["fused", "at once", "logits"])
@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("prefer", SETS)
def test_a_step_does_not_wait_for_the_device(prefer: str, kind: str, way: str) -> None:
    model, given = start(prefer, kind)
    trainer = Trainer(model, LR)
    with policy(prefer):
        trainer.train(given[:2], way=way)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            losses = trainer.train(given[2:], way=way)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(bool(it.isfinite()) for it in losses)


@pytest.mark.parametrize("prefer", SETS)
def test_a_gradient_that_is_not_finite_skips_the_step(prefer: str) -> None:
    model, given = start(prefer)
    trainer = Trainer(model, LR)
    with policy(prefer):
        trainer.train(given[:1])
        before = [it.detach().clone() for it in trainer.state()[:-1]]  # without the step number
        model(*given[1]).backward()
        model.blocks[1].down.weight.grad[3, 5] = torch.inf
        trainer.update()
        check_same([it.detach() for it in trainer.state()[:-1]], before)
        small_gpt.leave_no_gradients(model)
        trainer.noop.zero_()
        trainer.train(given[1:2])
    assert not any(map(torch.equal, trainer.masters, before[len(trainer.params) :]))
