"""A routed operator's results have the memory layout of the results of torch's own kernel.

Strides inside and outside of a block are compared, for dimensions of more than one element.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_engine_fl import get_default_manager
from transformer_engine_fl.integrations import aten
from transformer_engine_fl.integrations.aten import use_aten_ops

ATEN = torch.ops.aten
SHAPE = (2, 3, 4, 8)
OURS = "reference.torch"

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(SHAPE),
    "transposed": lambda: torch.randn(2, 3, 8, 4).mT,
    "heads second in memory": lambda: torch.randn(2, 4, 3, 8).transpose(1, 2),
    "batch third in memory": lambda: torch.randn(4, 3, 2, 8).transpose(0, 2),
    "channels_last": lambda: torch.randn(SHAPE).to(memory_format=torch.channels_last),
    "one of three": lambda: torch.randn(2, 4, 3, 3, 8)[:, :, 0].transpose(1, 2),
    "every second row": lambda: torch.randn(2, 3, 8, 8)[:, :, ::2],
    "every second column": lambda: torch.randn(2, 3, 4, 16)[..., ::2],
    "expanded batch": lambda: torch.randn(1, 3, 4, 8).expand(SHAPE),
    "expanded rows": lambda: torch.randn(2, 3, 1, 8).expand(SHAPE),
    "expanded columns": lambda: torch.randn(2, 3, 4, 1).expand(SHAPE),
}

WEIGHT = torch.linspace(0.5, 1.5, 8)

UNARY: dict[str, Callable[[Tensor], Any]] = {
    "relu": ATEN.relu,
    "silu": ATEN.silu,
    "gelu": lambda x: ATEN.gelu(x, approximate="tanh"),
    "_softmax": lambda x: ATEN._softmax(x, -1, False),
    "_log_softmax": lambda x: ATEN._log_softmax(x, -1, False),
    "native_layer_norm": lambda x: ATEN.native_layer_norm(x, (8,), WEIGHT, None, 1e-5),
    "rms_norm": lambda x: ATEN.rms_norm(x, (8,), WEIGHT, 1e-5),
    "dropout": lambda x: F.dropout(x, 0.5),
    "mm": lambda x: ATEN.mm(x[0, 0], torch.ones(8, 5)),
    "addmm": lambda x: ATEN.addmm(x[0, 0], x[0, 1], torch.ones(8, 8), beta=0.5),
    "bmm": lambda x: ATEN.bmm(x[0], x[1].mT),
}

BINARY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "threshold_backward": lambda grad, x: ATEN.threshold_backward(grad, x, 0),
    "silu_backward": ATEN.silu_backward,
    "gelu_backward": lambda grad, x: ATEN.gelu_backward(grad, x, approximate="tanh"),
    "_softmax_backward_data": lambda grad, y: ATEN._softmax_backward_data(grad, y, -1, y.dtype),
}

ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "with a mask": {"attn_mask": torch.ones(4, 4).tril().bool()},
    "with a mask that has a gradient": {"attn_mask": torch.zeros(4, 4, requires_grad=True)},
    "with dropout": {"dropout_p": 0.5},
}


@pytest.fixture
def served() -> Iterator[dict[str, str]]:
    """The id of the implementation that last served each ATen operator."""
    seen: dict[str, str] = {}
    undo = get_default_manager().monitor(lambda name, impl: seen.update({name: impl.impl_id}))
    yield seen
    undo()


def steps(result: Any) -> list[list[int]]:
    tensors = result if isinstance(result, tuple) else (result,)
    return [
        [step for size, step in zip(it.shape, it.stride(), strict=True) if size > 1]
        for it in tensors
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", UNARY)
def test_an_output_has_torchs_strides(name: str, layout: str, served: dict[str, str]) -> None:
    x = LAYOUTS[layout]()
    expected = UNARY[name](x)
    with use_aten_ops():
        output = UNARY[name](x)
    assert steps(output) == steps(expected)
    if (name, layout) != ("rms_norm", "channels_last"):
        assert served[f"aten::{name}"] == OURS
    if name != "dropout":
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BINARY)
def test_the_strides_of_a_binary_output_follow_the_same_argument_as_torchs(
    name: str, layout: str, served: dict[str, str]
) -> None:
    x = LAYOUTS[layout]()
    for other in LAYOUTS:
        grad = LAYOUTS[other]()
        expected = BINARY[name](grad, x)
        with use_aten_ops():
            output = BINARY[name](grad, x)
        assert steps(output) == steps(expected), f"of a gradient that is {other}"
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    assert served[f"aten::{name}"] == OURS


def test_dimensions_that_cannot_be_told_apart_are_ordered_as_torch_does() -> None:
    chance = random.Random(0)
    for _ in range(400):
        shape = [chance.randint(1, 4) for _ in range(chance.randint(1, 5))]
        grad, x = (arbitrary(shape, chance) for _ in range(2))
        for function in (ATEN.silu_backward, lambda grad, x: ATEN.threshold_backward(grad, x, 0)):
            expected = function(grad, x)
            with use_aten_ops():
                output = function(grad, x)
            assert steps(output) == steps(expected), (shape, grad.stride(), x.stride())


def arbitrary(shape: list[int], chance: random.Random) -> Tensor:
    """A tensor with its dimensions in random order in memory, some expanded, some with gaps."""
    expanded = [chance.random() < 0.2 for _ in shape]
    gaps = [chance.choice((1, 1, 1, 2)) for _ in shape]
    order = chance.sample(range(len(shape)), len(shape))
    sizes = [1 if one else size * gap for size, one, gap in zip(shape, expanded, gaps, strict=True)]
    inverse = [order.index(dimension) for dimension in range(len(shape))]
    tensor = torch.randn([sizes[dimension] for dimension in order]).permute(inverse)
    taken = tuple(
        slice(None, None, 1 if one else gap) for one, gap in zip(expanded, gaps, strict=True)
    )
    return tensor[taken].expand(shape)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_outputs_have_torchs_strides(
    kind: str, layout: str, served: dict[str, str]
) -> None:
    options = ATTENTION[kind]
    query, key = LAYOUTS[layout](), torch.randn(SHAPE)
    for value in (key, key[..., :6].contiguous()):
        expected = F.scaled_dot_product_attention(query, key, value, **options)
        with use_aten_ops():
            output = F.scaled_dot_product_attention(query, key, value, **options)
        assert steps(output) == steps(expected)
        assert served["aten::scaled_dot_product_attention"] == OURS


def test_code_that_relies_on_the_layout_runs_in_a_block_too() -> None:
    x = torch.randn(3, 4, dtype=torch.float64).t().requires_grad_()
    with use_aten_ops():
        flat = F.relu(x).t().view(-1)
        dropped = F.dropout(F.silu(x), 0.5)
        dropped += 1
        (gradient,) = torch.autograd.grad(flat.sum() + dropped.t().view(-1).sum(), x)
    assert gradient.stride() == x.stride()


def test_gradients_of_what_was_turned_are_right() -> None:
    x = torch.randn(2, 4, 3, 8, dtype=torch.float64).transpose(1, 2).requires_grad_()
    images = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    with use_aten_ops():
        assert torch.autograd.gradcheck(F.silu, images)
        assert torch.autograd.gradgradcheck(lambda x: F.gelu(x, approximate="tanh"), images)
        assert torch.autograd.gradcheck(F.scaled_dot_product_attention, (x, x, images))


def test_explain_says_why_torch_normalises_images_that_are_channels_last() -> None:
    images = torch.randn(2, 3, 4, 8).to(memory_format=torch.channels_last)
    decision = aten.explain("rms_norm", images, (8,))
    assert decision.selected is not None
    assert decision.selected.impl_id == "native.aten"
    assert "the result must be channels_last" in str(decision)
