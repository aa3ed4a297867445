"""Expert permutation: gradients, and what the contracts promise beyond their samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from some_tensors import normal
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import functional, ops
from transformer_engine_fl.core.errors import ArgumentError

TOKENS, EXPERTS, TOPK, FEATURES = 6, 5, 2, 3


def some_indices(tokens: int = TOKENS, topk: int = TOPK, experts: int = EXPERTS) -> Tensor:
    """Different experts for each token, in random order."""
    chances = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(2))
    return chances.argsort(-1)[:, :topk]


def as_mask(indices: Tensor, experts: int = EXPERTS) -> Tensor:
    return torch.zeros(len(indices), experts, dtype=torch.bool).scatter(1, indices, True)


def routing(map_type: str, indices: Tensor, experts: int = EXPERTS) -> Tensor:
    return indices if map_type == "index" else as_mask(indices, experts)


def leaf(*shape: int, seed: int = 1) -> Tensor:
    return normal(*shape, seed=seed).requires_grad_()


MAPS = pytest.mark.parametrize("map_type", ["mask", "index"])
ROWS = pytest.mark.parametrize("rows", [5, TOKENS * TOPK, 15])  # dropped, exact, padded


# --------------------------------------------------------------------------- gradients


@MAPS
@ROWS
def test_permute_passes_gradcheck(map_type: str, rows: int) -> None:
    routed = routing(map_type, some_indices())
    assert torch.autograd.gradcheck(
        lambda it: functional.moe_permute(it, routed, rows, map_type=map_type)[0],
        (leaf(TOKENS, FEATURES),),
    )


@ROWS
def test_permute_with_probs_passes_gradcheck(rows: int) -> None:
    mask = as_mask(some_indices())
    assert torch.autograd.gradcheck(
        lambda x, probs: functional.moe_permute_with_probs(x, probs, mask, rows)[:2],
        (leaf(TOKENS, FEATURES), leaf(TOKENS, EXPERTS, seed=3)),
    )


@MAPS
@ROWS
@pytest.mark.parametrize("with_probs", [False, True])
def test_unpermute_passes_gradcheck(map_type: str, rows: int, with_probs: bool) -> None:
    routed = routing(map_type, some_indices())
    _, row_id_map = functional.moe_permute(
        normal(TOKENS, FEATURES), routed, rows, map_type=map_type
    )
    probs = leaf(*routed.shape, seed=3) if with_probs else None
    assert torch.autograd.gradcheck(
        lambda x, p: functional.moe_unpermute(x, row_id_map, p, map_type=map_type),
        (leaf(rows, FEATURES), probs),
    )


def test_the_gradient_of_probs_alone_and_of_tokens_alone() -> None:
    x, probs, mask = normal(TOKENS, FEATURES), normal(TOKENS, EXPERTS), as_mask(some_indices())
    rows = TOKENS * TOPK
    only_probs = probs.clone().requires_grad_()
    _, permuted, _ = functional.moe_permute_with_probs(x, only_probs, mask, rows)
    permuted.sum().backward()
    assert torch.equal(only_probs.grad, mask.double())
    only_x = x.clone().requires_grad_()
    output, _, _ = functional.moe_permute_with_probs(only_x, probs, mask, rows)
    output.sum().backward()
    assert torch.equal(only_x.grad, torch.full_like(x, TOPK))


@MAPS
def test_the_map_is_the_same_with_and_without_grad_and_has_none(map_type: str) -> None:
    routed = routing(map_type, some_indices())
    results = [
        functional.moe_permute(x, routed, 12, map_type=map_type)
        for x in (normal(TOKENS, FEATURES), leaf(TOKENS, FEATURES))
    ]
    assert results[1][0].requires_grad
    assert not results[1][1].requires_grad
    assert torch.equal(results[0][1], results[1][1])


def kept_by(run: Any) -> list[tuple[int, ...]]:
    """The shapes of what a function saves for its backward."""
    kept: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it):
        run()
    return kept


@MAPS
def test_the_rows_are_kept_for_the_backward_only_where_there_are_probs(map_type: str) -> None:
    routed = routing(map_type, some_indices())
    x = leaf(TOKENS, FEATURES)
    permuted, row_id_map = functional.moe_permute(x, routed, 12, map_type=map_type)
    probs = normal(*routed.shape)
    options = {"map_type": map_type}
    size = tuple(row_id_map.shape)
    run = functional.moe_unpermute
    assert kept_by(lambda: functional.moe_permute(x, routed, 12, **options)) == [size]
    assert kept_by(lambda: run(permuted, row_id_map, **options)) == [size]
    everything = kept_by(lambda: run(permuted, row_id_map, probs, **options))
    assert sorted(everything) == sorted([size, (12, FEATURES), tuple(routed.shape)])


def test_narrow_probs_get_gradients_of_their_own_dtype() -> None:
    indices = some_indices()
    permuted, row_id_map = functional.moe_permute(
        normal(TOKENS, FEATURES, dtype=torch.bfloat16), indices, -1, map_type="index"
    )
    probs = normal(TOKENS, TOPK, dtype=torch.bfloat16).requires_grad_()
    functional.moe_unpermute(permuted, row_id_map, probs, map_type="index").sum().backward()
    assert probs.grad is not None
    assert probs.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dynamic", [False, True])
@MAPS
def test_permutation_compiles_with_its_gradient(map_type: str, dynamic: bool) -> None:
    torch._dynamo.reset()

    def program(x: Tensor, probs: Tensor, routed: Tensor) -> Tensor:
        rows = routed.shape[0] * TOPK
        permuted, row_id_map = functional.moe_permute(x, routed, rows, map_type=map_type)
        merged = functional.moe_unpermute(permuted, row_id_map, probs, map_type=map_type)
        plain = functional.moe_unpermute(permuted * 2, row_id_map, map_type=map_type)
        return (merged * plain).sum()

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (TOKENS, 9):
        routed = routing(map_type, some_indices(tokens))
        inputs = [leaf(tokens, FEATURES), leaf(*routed.shape, seed=3)]
        gradients = [
            torch.autograd.grad(run(*inputs, routed), inputs) for run in (program, compiled)
        ]
        torch.testing.assert_close(*gradients)


# ---------------------------------------------------------------------------- meaning


def test_rows_are_ordered_by_expert_and_then_by_token() -> None:
    x = torch.arange(4.0).unsqueeze(-1)
    indices = torch.tensor([[2, 0], [1, 2], [0, 2], [0, 1]])
    output, row_id_map = ops.moe_permute_fwd(x, indices)
    assert output.flatten().tolist() == [0, 2, 3, 1, 3, 0, 1, 2]
    # The rows of the tokens' first choices, then those of their second choices.
    assert row_id_map.tolist() == [[5, 3, 1, 2], [0, 6, 7, 4]]
    assert row_id_map.dtype == torch.int32


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Tests have one thread otherwise, with which torch sums rows in another way."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@MAPS
@pytest.mark.usefixtures("two_threads")
def test_tokens_without_features_are_moved_too(map_type: str) -> None:
    routed, count = routing(map_type, some_indices()), TOKENS * TOPK
    x, probs = (torch.ones(it).requires_grad_() for it in ((TOKENS, 0), routed.shape))
    rows, row_id_map = functional.moe_permute(x, routed, count, map_type=map_type)
    assert rows.shape == (count, 0)
    output = functional.moe_unpermute(rows, row_id_map, probs, map_type=map_type)
    assert output.shape == (TOKENS, 0)
    gradients = torch.autograd.grad(output.sum(), (x, probs))
    assert gradients[0].shape == x.shape
    assert torch.equal(gradients[1], torch.zeros_like(probs))


def test_the_map_of_a_mask_lists_the_rows_and_the_experts_of_each_token() -> None:
    x = torch.arange(3.0).unsqueeze(-1)
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    output, _, row_id_map = ops.moe_permute_mask_fwd(x, mask, num_out_tokens=5)
    assert output.flatten().tolist() == [0, 2, 2, 0, 2]
    assert row_id_map.tolist() == [
        [3, 0, -1, 2, 0, -1, 2],
        [-1, -1, -1, -1, -1, -1, 0],
        [4, 2, 1, 2, 1, 0, 3],
    ]
    assert row_id_map.dtype == torch.int32


def test_pairs_past_the_last_row_are_dropped_from_the_last_experts() -> None:
    x = torch.arange(1.0, 4.0).unsqueeze(-1)
    indices = torch.tensor([[0, 1], [0, 1], [1, 0]])
    output, row_id_map = ops.moe_permute_fwd(x, indices, 4)
    assert output.flatten().tolist() == [1, 2, 3, 1]
    assert row_id_map.tolist() == [[0, 1, -1], [3, -1, 2]]
    output, probs, row_id_map = ops.moe_permute_mask_fwd(
        x, as_mask(indices, 2), torch.tensor([[1, 2], [3, 4], [5, 6.0]]), num_out_tokens=4
    )
    assert output.flatten().tolist() == [1, 2, 3, 1]
    assert probs.tolist() == [1, 3, 5, 2]
    assert row_id_map.tolist() == [[3, 0, 1, 0, 2], [1, -1, 0, -1, 1], [2, -1, 0, -1, 1]]
    assert ops.moe_unpermute_mask_fwd(output, row_id_map).flatten().tolist() == [2, 2, 3]


@pytest.mark.parametrize("rows", [0, -1])
def test_no_number_of_rows_stands_for_all_pairs_of_indices(rows: int) -> None:
    x, indices = normal(TOKENS, FEATURES), some_indices()
    expected = ops.moe_permute_fwd(x, indices, TOKENS * TOPK)
    torch.testing.assert_close(ops.moe_permute_fwd(x, indices, rows), expected, rtol=0, atol=0)
    assert ops.moe_permute_mask_fwd(x, as_mask(indices), num_out_tokens=0)[0].shape == (0, 3)


CASES = {
    "usual": (TOKENS, TOPK, EXPERTS),
    "one expert": (TOKENS, 1, 1),
    "256 experts": (9, 8, 256),
    "more experts than pairs": (2, 1, 40),
    "every expert": (TOKENS, EXPERTS, EXPERTS),
    "no tokens": (0, TOPK, EXPERTS),
}


@pytest.mark.parametrize("case", CASES)
@MAPS
def test_there_and_back_is_the_identity_where_probs_sum_to_one(map_type: str, case: str) -> None:
    tokens, topk, experts = CASES[case]
    x, indices = normal(tokens, FEATURES), some_indices(tokens, topk, experts)
    probs = normal(tokens, topk).softmax(-1)
    routed = routing(map_type, indices, experts)
    if map_type == "mask":
        probs = torch.zeros(tokens, experts).double().scatter(1, indices, probs)
    permuted, row_id_map = functional.moe_permute(x, routed, tokens * topk, map_type=map_type)
    back = functional.moe_unpermute(permuted, row_id_map, probs, map_type=map_type)
    torch.testing.assert_close(back, x)


def test_probs_may_be_applied_between() -> None:
    x, mask = normal(TOKENS, FEATURES), as_mask(some_indices())
    probs = normal(TOKENS, EXPERTS)
    permuted, permuted_probs, row_id_map = functional.moe_permute_with_probs(x, probs, mask, 12)
    between = functional.moe_unpermute(permuted * permuted_probs.unsqueeze(-1), row_id_map)
    after = functional.moe_unpermute(permuted, row_id_map, probs)
    torch.testing.assert_close(between, after)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [None, 3, 90])
def test_values_are_those_of_a_loop_over_experts(case: str, rows: int | None) -> None:
    tokens, topk, experts = CASES[case]
    rows = tokens * topk if rows is None else rows
    x, mask = normal(tokens, FEATURES), as_mask(some_indices(tokens, topk, experts), experts)
    probs, work = normal(tokens, experts, seed=3), normal(experts, seed=4)
    permuted, row_id_map = functional.moe_permute(x, mask, rows)
    expected, blocks = torch.zeros_like(x), []
    room = rows
    for expert in range(experts):
        mine = mask[:, expert].nonzero().flatten()[:room]
        room -= len(mine)
        blocks.append(x[mine])
        expected[mine] += x[mine] * work[expert] * probs[mine, expert].unsqueeze(-1)
    assert torch.equal(permuted[: rows - room], torch.cat(blocks))
    assert not permuted[rows - room :].any()
    computed = torch.zeros_like(permuted)
    sizes = [len(block) for block in blocks]
    computed[: sum(sizes)] = torch.cat(
        [block * work[i] for i, block in enumerate(permuted[: sum(sizes)].split(sizes))]
    )
    merged = functional.moe_unpermute(computed, row_id_map, probs)
    torch.testing.assert_close(merged, expected)


def test_a_mask_and_ascending_indices_say_the_same() -> None:
    x, indices = normal(TOKENS, FEATURES), some_indices().sort(-1).values
    probs = normal(TOKENS, EXPERTS, seed=3)
    for rows in (5, 12, 20):
        by_index, index_map = ops.moe_permute_fwd(x, indices, rows)
        by_mask, _, mask_map = ops.moe_permute_mask_fwd(x, as_mask(indices), num_out_tokens=rows)
        assert torch.equal(by_index, by_mask)
        torch.testing.assert_close(
            ops.moe_unpermute_fwd(by_index, index_map, probs.gather(1, indices)),
            ops.moe_unpermute_mask_fwd(by_mask, mask_map, probs),
        )


def test_an_expert_may_be_any_number() -> None:
    x, indices = normal(TOKENS, FEATURES), some_indices()
    expected = ops.moe_permute_fwd(x, indices)
    renamed = ops.moe_permute_fwd(x, indices * 1_000_003 - 2_000_000)
    torch.testing.assert_close(renamed, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@MAPS
def test_values_are_copied_bit_by_bit(map_type: str, dtype: torch.dtype) -> None:
    bits = torch.tensor([[0x7FC1, -0x8000, 0x7F81, 0x0001]], dtype=torch.int16)
    x = bits.view(torch.bfloat16)
    if dtype == torch.float32:
        x = bits.view(torch.float32)
    routed = routing(map_type, torch.tensor([[0, 1]]), 2)
    permuted, _ = functional.moe_permute(x, routed, 3, map_type=map_type)
    assert torch.equal(permuted.view(torch.int16)[:2], bits.expand(2, -1))


def test_the_bytes_of_a_quantised_tensor_may_be_moved() -> None:
    x, indices = normal(TOKENS, FEATURES).to(torch.float8_e4m3fn), some_indices()
    permuted, row_id_map = functional.moe_permute(x, indices, -1, map_type="index")
    bytes_, _ = ops.moe_permute_fwd(x.view(torch.uint8), indices)
    assert permuted.dtype == torch.float8_e4m3fn
    assert torch.equal(permuted.view(torch.uint8), bytes_)
    wide, _ = ops.moe_permute_fwd(x.float(), indices)
    assert torch.equal(permuted.float(), wide)
    with pytest.raises(ArgumentError, match="float8"):
        ops.moe_unpermute_fwd(permuted, row_id_map)


def test_a_map_s_numbers_below_minus_one_are_none_too() -> None:
    call = normal(3, FEATURES), normal(4, FEATURES, seed=2), normal(3, 1, seed=3)
    missing, far = (torch.tensor([[3, last, 0]], dtype=torch.int32) for last in (-1, -2))
    with te.with_preference("reference"):
        expected = ops.moe_unpermute_bwd(call[0], missing, *call[1:], num_rows=4)
        found = ops.moe_unpermute_bwd(call[0], far, *call[1:], num_rows=4)
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert torch.equal(one, other)


def test_a_map_that_is_wrong_reads_nothing_outside() -> None:
    x = torch.ones(3, 4)
    twice = torch.zeros(2, 3, dtype=torch.int32)  # six pairs share one row
    experts = torch.tensor([[1, 0, 2, -1, 2], [2, -1, 0, 9, 7]], dtype=torch.int32)
    with te.with_preference("reference"):
        assert ops.moe_unpermute_fwd(x, twice).sum() <= 6 * 4
        assert ops.moe_permute_bwd(x, twice).sum() <= 6 * 4
        found = ops.moe_unpermute_mask_fwd(x, experts, torch.tensor([[2.0, 3.0]] * 2))
        _, probs = ops.moe_permute_mask_bwd(x, experts, torch.tensor([5.0, 6.0, 7.0]))
    # Experts that do not exist have no rows.
    assert found.tolist() == [[0.0] * 4, [2.0] * 4]
    assert probs is not None
    assert probs.tolist() == [[0.0, 0.0], [7.0, 0.0]]


def test_no_values_are_read_back() -> None:
    # Reading a value of a meta tensor fails.
    x, probs = normal(TOKENS, FEATURES).to("meta"), normal(TOKENS, EXPERTS).to("meta")
    indices, mask = some_indices().to("meta"), as_mask(some_indices()).to("meta")
    with te.with_preference("reference"):
        permuted, row_id_map = ops.moe_permute_fwd(x, indices)
        few = probs[:, :TOPK]
        assert ops.moe_permute_bwd(permuted, row_id_map).shape == x.shape
        assert ops.moe_unpermute_fwd(permuted, row_id_map, few).shape == x.shape
        gradients = ops.moe_unpermute_bwd(x, row_id_map, permuted, few, num_rows=12)
        assert [it.shape for it in gradients] == [(12, FEATURES), (TOKENS, TOPK)]
        permuted, own, row_id_map = ops.moe_permute_mask_fwd(x, mask, probs, num_out_tokens=9)
        gradients = ops.moe_permute_mask_bwd(permuted, row_id_map, own)
        assert [it.shape for it in gradients] == [x.shape, probs.shape]
        assert ops.moe_unpermute_mask_fwd(permuted, row_id_map, probs).shape == x.shape
        gradients = ops.moe_unpermute_mask_bwd(x, row_id_map, permuted, probs, num_rows=9)
        assert [it.shape for it in gradients] == [(9, FEATURES), (TOKENS, EXPERTS)]


# ----------------------------------------------------------------------------- errors

X = normal(TOKENS, FEATURES)
INDEX_MAP = torch.zeros(TOPK, TOKENS, dtype=torch.int32)
MASK_MAP = torch.zeros(TOKENS, 2 * EXPERTS + 1, dtype=torch.int32)
MASK = as_mask(some_indices())

REFUSED: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], str]] = {
    "indices of other tokens": (ops.moe_permute_fwd, (X, some_indices(5)), {}, "indices"),
    "no choice": (ops.moe_permute_fwd, (X, some_indices()[:, :0]), {}, "indices"),
    "indices that are a mask": (ops.moe_permute_fwd, (X, MASK), {}, "indices"),
    "rows below -1": (ops.moe_permute_fwd, (X, some_indices(), -2), {}, "num_out_tokens"),
    "a mask of indices": (
        ops.moe_permute_mask_fwd,
        (X, some_indices()),
        {"num_out_tokens": 3},
        "routing_map",
    ),
    "a mask of no experts": (
        ops.moe_permute_mask_fwd,
        (X, MASK[:, :0]),
        {"num_out_tokens": 3},
        "routing_map",
    ),
    "rows of a mask below 0": (
        ops.moe_permute_mask_fwd,
        (X, MASK),
        {"num_out_tokens": -1},
        "num_out_tokens",
    ),
    "probs of other experts": (
        ops.moe_permute_mask_fwd,
        (X, MASK, X),
        {"num_out_tokens": 3},
        "probs",
    ),
    "a map of no choice": (ops.moe_unpermute_fwd, (X, INDEX_MAP[:0]), {}, "row_id_map"),
    "a map of int64": (ops.moe_unpermute_fwd, (X, INDEX_MAP.long()), {}, "row_id_map"),
    "probs the other way": (ops.moe_unpermute_fwd, (X, INDEX_MAP, X[:2]), {}, "probs"),
    "a map with an even width": (
        ops.moe_unpermute_mask_fwd,
        (X, MASK_MAP[:, 1:]),
        {},
        "row_id_map",
    ),
    "a map of one column": (ops.moe_permute_mask_bwd, (X, MASK_MAP[:, :1]), {}, "row_id_map"),
    "a gradient for fewer rows": (
        ops.moe_permute_mask_bwd,
        (X, MASK_MAP, X[:5, 0]),
        {},
        "grad_permuted_probs",
    ),
    "a gradient of other tokens": (
        ops.moe_unpermute_bwd,
        (X[:5], INDEX_MAP),
        {"num_rows": 12},
        "grad_output",
    ),
    "probs without the rows": (
        ops.moe_unpermute_bwd,
        (X, INDEX_MAP, None, X[:, :2]),
        {"num_rows": 12},
        "input",
    ),
    "the rows without probs": (
        ops.moe_unpermute_mask_bwd,
        (X, MASK_MAP, X, None),
        {"num_rows": TOKENS},
        "input",
    ),
    "another number of rows": (
        ops.moe_unpermute_bwd,
        (X, INDEX_MAP, X, X[:, :2]),
        {"num_rows": 12},
        "input",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_call_that_breaks_the_contract_names_the_argument(what: str) -> None:
    op, args, options, argument = REFUSED[what]
    with pytest.raises(ArgumentError) as raised:
        op(*args, **options)
    assert raised.value.argument == argument


@pytest.mark.parametrize("map_type", ["indices", None])
def test_a_map_of_another_type_is_refused(map_type: Any) -> None:
    with pytest.raises(ArgumentError, match="map_type"):
        functional.moe_permute(X, MASK, 12, map_type=map_type)
    with pytest.raises(ArgumentError, match="map_type"):
        functional.moe_unpermute(X, MASK_MAP, map_type=map_type)
