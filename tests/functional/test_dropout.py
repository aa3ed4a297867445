"""Dropout: the generator against published values, the mask bit by bit, gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_engine_fl import functional, ops
from transformer_engine_fl.backends.reference.dropout import philox
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.ops.dropout import philox_block

# Counter, key, block: philox4x32 with 10 rounds, from Random123's kat_vectors.
PUBLISHED = [
    ("00000000" * 4, "00000000" * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff" * 4, "ffffffff" * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> list[int]:
    text = text.replace(" ", "")
    return [int(text[place : place + 8], 16) for place in range(0, len(text), 8)]


def joined(parts: list[int]) -> int:
    return sum(part << 32 * place for place, part in enumerate(parts))


def bits(mask: Tensor) -> list[int]:
    return [byte >> bit & 1 for byte in mask.tolist() for bit in range(8)]


def dropped(count: int, p: float, **options: int) -> list[int]:
    """1 for each element that is kept, from the words of the published generator."""
    seed, offset = options["seed"], options.get("offset", 0)
    found: list[int] = []
    for block in range(math.ceil(count / 8)):
        for word in philox_block(block + (offset << 64), seed):
            found += [word % 2**16, word // 2**16]
    return [int(number >= math.floor(p * 2**16)) for number in found[:count]]


# --------------------------------------------------------------------------- generator


@pytest.mark.parametrize(("counter", "key", "block"), PUBLISHED)
def test_the_generator_gives_the_published_blocks(counter: str, key: str, block: str) -> None:
    given = [torch.tensor([word]) for word in words(counter)]
    found = philox((given[0], given[1], given[2], given[3]), (words(key)[0], words(key)[1]))
    assert [int(word) for word in found] == words(block)
    assert philox_block(joined(words(counter)), joined(words(key))) == words(block)


def test_both_generators_agree_on_random_counters_and_keys() -> None:
    source = torch.Generator().manual_seed(3)
    counters = torch.randint(0, 2**32, (4, 50), generator=source)
    keys = torch.randint(0, 2**32, (2, 50), generator=source)
    for (*counter,), (k0, k1) in zip(counters.T.tolist(), keys.T.tolist(), strict=True):
        c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
        found = [int(word) for word in philox((c0, c1, c2, c3), (k0, k1))]
        assert found == philox_block(joined(counter), joined([k0, k1]))


def test_words_stay_within_32_bits_for_a_vector_of_counters() -> None:
    edge = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 1])
    for word in philox((edge, edge, edge, edge), (2**32 - 1, 2**32 - 1)):
        assert int(word.min()) >= 0
        assert int(word.max()) < 2**32


# -------------------------------------------------------------------------------- mask


@pytest.mark.parametrize("count", [0, 1, 3, 7, 8, 9, 64, 1001])
def test_every_bit_is_where_the_contract_says(count: int) -> None:
    options = {"seed": 0x123456789ABCDEF0, "offset": 0x0FEDCBA987654321}
    x = torch.ones(count)
    output, mask = ops.dropout_fwd(x, 0.3, **options)
    kept = dropped(count, 0.3, **options)
    assert mask.dtype == torch.uint8
    assert bits(mask) == kept + [0] * (-count % 8)
    assert output.ne(0).tolist() == [bool(keep) for keep in kept]


def test_the_first_mask_of_all_in_full() -> None:
    # The block of counter 0 under seed 0: a change of the definition would show.
    _, mask = ops.dropout_fwd(torch.ones(8), 0.5, seed=0)
    # Of the halves of 6627e8d5, e169c58d, bc57ac4c and 9b00dbd8 only 6627 is below 8000.
    assert mask.tolist() == [0b11111101]


@pytest.mark.parametrize("step", [-1, 0, 1])
def test_a_number_that_equals_the_threshold_is_kept(step: int) -> None:
    number = 0xE8D5
    _, mask = ops.dropout_fwd(torch.ones(1), (number + step) / 2**16, seed=0)
    assert mask.tolist() == [int(step <= 0)]


def test_the_threshold_is_rounded_down() -> None:
    number = 0xE8D5
    _, mask = ops.dropout_fwd(torch.ones(1), (number + 0.75) / 2**16, seed=0)
    assert mask.tolist() == [1]


def test_strides_and_dtypes_do_not_change_the_mask() -> None:
    x = torch.randn(24, 13)
    _, expected = ops.dropout_fwd(x, 0.4, seed=7)
    views = [x.t().contiguous().t(), torch.cat([x, x], 1)[:, :13], x.flatten(), x[None]]
    views += [x.to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)]
    for view in views:
        assert torch.equal(ops.dropout_fwd(view, 0.4, seed=7)[1], expected)


def test_a_larger_tensor_begins_with_the_mask_of_a_smaller_one() -> None:
    small = ops.dropout_fwd(torch.ones(64), 0.4, seed=7)[1]
    assert torch.equal(ops.dropout_fwd(torch.ones(6400), 0.4, seed=7)[1][:8], small)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_the_probability_says(p: float) -> None:
    count = 200_000
    kept = torch.tensor(bits(ops.dropout_fwd(torch.ones(count), p, seed=11)[1])).double()
    deviation = math.sqrt(p * (1 - p) / count)
    assert abs(float(kept.mean()) - (1 - p)) < 5 * deviation
    # Elements at several distances are independent, also across blocks.
    for distance in (1, 2, 4, 8, 128):
        both = float((kept[distance:] * kept[:-distance]).mean())
        assert abs(both - (1 - p) ** 2) < 10 * deviation


def test_seeds_and_offsets_give_masks_that_have_nothing_in_common() -> None:
    x, calls = torch.ones(100_000), [(1, 0), (2, 0), (1, 1), (1, 2**32), (1 + 2**32, 0)]
    masks = [
        torch.tensor(bits(ops.dropout_fwd(x, 0.5, seed=seed, offset=offset)[1]))
        for seed, offset in calls
    ]
    for place, mask in enumerate(masks):
        for other in masks[:place]:
            agreeing = float((mask == other).double().mean())
            assert abs(agreeing - 0.5) < 5 * 0.5 / math.sqrt(100_000)


# ------------------------------------------------------------------------------ values


def test_the_mean_is_kept() -> None:
    output, _ = ops.dropout_fwd(torch.ones(100_000), 0.25, seed=5)
    assert output.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float(output.mean()) == pytest.approx(1.0, abs=0.01)


def test_what_is_dropped_is_zero_whatever_it_was() -> None:
    x = torch.full((64,), math.inf)
    x[::2] = math.nan
    output, mask = ops.dropout_fwd(x, 0.5, seed=5)
    kept = torch.tensor(bits(mask)).bool()
    assert not output[~kept].any()
    assert not output[kept].isfinite().any()
    everything, _ = ops.dropout_fwd(x, 1.0, seed=5)
    assert not everything.any()


def test_nothing_is_dropped_at_probability_zero() -> None:
    x = torch.randn(5, 13)
    output, _ = ops.dropout_fwd(x, 0.0, seed=5)
    assert torch.equal(output, x)


# --------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_passes_gradcheck(p: float) -> None:
    x = torch.randn(3, 11, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda it: functional.dropout(it, p, seed=3, offset=4), (x,))


def test_the_gradient_passes_where_the_value_passed() -> None:
    x = torch.randn(1000, requires_grad=True)
    output = functional.dropout(x, 0.3, seed=3)
    output.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad != 0, output != 0)


def test_bits_after_the_last_element_are_not_looked_at() -> None:
    grad = torch.randn(9)
    some, all_of_them = torch.tensor([[0xFF, 0x01], [0xFF, 0xFF]], dtype=torch.uint8)
    assert torch.equal(ops.dropout_bwd(grad, some, 0.5), ops.dropout_bwd(grad, all_of_them, 0.5))


def test_only_the_bits_are_saved() -> None:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(1000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it):
        functional.dropout(x, 0.3, seed=3)
    assert [it.untyped_storage().nbytes() for it in saved] == [125]


def test_dropout_compiles_and_a_new_seed_is_no_new_program() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def program(x: Tensor, seed: int) -> Tensor:
        return functional.dropout(x, 0.3, seed=seed, offset=seed)

    compiled = torch.compile(program, fullgraph=True, backend=counter)
    for seed in (3, 5, 2**40 + 1, 2**62 + 12345, 9):
        x = torch.randn(4, 33, requires_grad=True)
        output = compiled(x, seed)
        assert torch.equal(output, program(x, seed))
        output.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad != 0, output != 0)
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_inductor_draws_the_same_mask_and_comes_to_an_end() -> None:
    # Inductor expands each use of a value: longer code for a round would take it minutes.
    torch._dynamo.reset()
    x, options = torch.randn(5, 33), {"seed": 2**62 + 5, "offset": 2**40}
    compiled = torch.compile(lambda it: ops.dropout_fwd(it, 0.3, **options), fullgraph=True)
    torch.testing.assert_close(compiled(x), ops.dropout_fwd(x, 0.3, **options))


# ----------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"p": -0.1}, "dropout_probability"),
        ({"p": 1.1}, "dropout_probability"),
        ({"p": math.nan}, "dropout_probability"),
        ({"p": "half"}, "dropout_probability"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"seed": True}, "seed"),
        ({"offset": -1}, "offset"),
        ({"offset": 2**63}, "offset"),
        ({"x": torch.ones(3, dtype=torch.int32)}, "input"),
    ],
)
def test_a_call_that_breaks_the_contract_names_the_argument(
    change: dict[str, Any], argument: str
) -> None:
    call = {"x": torch.ones(3), "p": 0.1, "seed": 1, "offset": 0, **change}
    with pytest.raises(ArgumentError) as raised:
        ops.dropout_fwd(call["x"], call["p"], seed=call["seed"], offset=call["offset"])
    assert raised.value.argument == argument


def test_a_seed_must_be_given() -> None:
    with pytest.raises(TypeError, match="seed"):
        ops.dropout_fwd(torch.ones(3), 0.1)  # type: ignore[call-arg]
