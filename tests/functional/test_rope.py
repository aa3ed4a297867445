"""Rotary embedding: gradients, and what the contract promises beyond its samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from some_tensors import normal, with_tensors
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import functional, ops
from transformer_engine_fl.core.errors import ArgumentError

CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "sbhd": ((4, 2, 2, 6), {}),
    "bshd": ((2, 4, 2, 6), {"qkv_format": "bshd"}),
    "thd": ((5, 2, 6), {"qkv_format": "thd", "cu_seqlens": [0, 3, 4]}),
    "start positions": ((4, 2, 2, 6), {"start_positions": [1, 5]}),
    "ranks": ((4, 2, 2, 6), {"cp_size": 2, "cp_rank": 1}),
    "thd, all of it": (
        (5, 2, 6),
        {
            "qkv_format": "thd",
            "cu_seqlens": [0, 4, 8],
            "start_positions": [2, 0],
            "cp_size": 2,
            "cp_rank": 1,
        },
    ),
}
ROWS = 12


def angles(rows: int = ROWS, rotated: int = 6, *, alike: bool = False) -> Tensor:
    """Angles that are all different, or (alike) the same for both features of a pair."""
    freqs = torch.randn(rows, 1, 1, rotated, generator=torch.Generator().manual_seed(2)) * 3
    return torch.cat([freqs[..., : rotated // 2]] * 2, -1) if alike else freqs


# --------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [4, 6])
@pytest.mark.parametrize("case", CASES)
def test_rope_passes_gradcheck(case: str, rotated: int, interleaved: bool) -> None:
    shape, options = CASES[case]
    x = normal(*shape).requires_grad_()
    freqs, options = angles(rotated=rotated), with_tensors(options)
    assert torch.autograd.gradcheck(
        lambda it: functional.rope(it, freqs, interleaved=interleaved, **options), (x,)
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_qkv_rope_passes_gradcheck(case: str, interleaved: bool) -> None:
    shape, options = CASES[case]
    x = normal(*shape[:-1], 8 + 4 + 3).requires_grad_()
    call = {"qkv_split": (8, 4, 3), "interleaved": interleaved, **with_tensors(options)}
    freqs = angles(rotated=4), angles(rotated=2)
    assert torch.autograd.gradcheck(lambda it: functional.qkv_rope(it, *freqs, **call), (x,))


def test_the_gradient_of_one_output_of_three() -> None:
    x = normal(4, 2, 2, 15).requires_grad_()
    _, _, v = functional.qkv_rope(x, angles(rotated=4), angles(rotated=2), qkv_split=[8, 4, 3])
    (gradient,) = torch.autograd.grad(v.sum(), x)
    expected = torch.cat([torch.zeros(4, 2, 2, 12), torch.ones(4, 2, 2, 3)], -1).double()
    torch.testing.assert_close(gradient, expected)


def test_nothing_is_saved_but_the_table() -> None:
    x, freqs = normal(4, 2, 2, 6).requires_grad_(), angles(4)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it):
        functional.rope(x, freqs)
    assert [it.data_ptr() for it in saved if it is not None] == [freqs.data_ptr()]


def test_a_table_that_requires_grad_gets_none() -> None:
    x, freqs = normal(4, 2, 2, 6).requires_grad_(), angles(4).requires_grad_()
    functional.rope(x, freqs).sum().backward()
    assert x.grad is not None
    assert freqs.grad is None


def test_rope_compiles_with_its_gradient() -> None:
    torch._dynamo.reset()
    options = with_tensors(CASES["thd, all of it"][1])
    freqs = angles()

    def program(x: Tensor, freqs: Tensor) -> Tensor:
        q, k, v = functional.qkv_rope(x, freqs, freqs, qkv_split=(6, 6, 6), **options)
        return (functional.rope(q, freqs, **options) * k + v).square().sum()

    gradients = []
    for run in (program, torch.compile(program, fullgraph=True, backend="aot_eager")):
        x = normal(5, 2, 18).requires_grad_()
        run(x, freqs).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


# ---------------------------------------------------------------------------- meaning


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_depend_on_the_distance_alone(interleaved: bool) -> None:
    # The purpose of rotary embedding. The same query and key at every position.
    slowness = torch.tensor([1.0, 0.3, 0.01])
    pairs = slowness.repeat_interleave(2) if interleaved else slowness.repeat(2)
    freqs = (torch.arange(ROWS).unsqueeze(-1) * pairs)[:, None, None]
    q, k = (normal(1, 1, 1, 6, seed=seed).expand(ROWS, -1, -1, -1) for seed in (3, 4))
    q = functional.rope(q, freqs, interleaved=interleaved)[:, 0, 0]
    k = functional.rope(k, freqs, interleaved=interleaved)[:, 0, 0]
    products = q @ k.T
    for distance in range(-ROWS + 1, ROWS):
        same = products.diagonal(distance)
        torch.testing.assert_close(same, same[:1].expand_as(same), rtol=1e-6, atol=1e-6)


def test_rotation_is_that_of_complex_numbers() -> None:
    freqs, x = angles(4, alike=True), normal(4, 2, 3, 6)
    unit = torch.polar(torch.ones(4, 1, 1, 3).double(), freqs[..., :3].double())
    turned = torch.complex(x[..., :3], x[..., 3:]) * unit
    expected = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(functional.rope(x, freqs), expected)
    freqs = freqs[..., :3].repeat_interleave(2, -1)
    expected = torch.view_as_real(torch.view_as_complex(x.view(4, 2, 3, 3, 2)) * unit).flatten(-2)
    torch.testing.assert_close(functional.rope(x, freqs, interleaved=True), expected)


def test_the_backward_undoes_the_forward_where_pairs_have_one_angle() -> None:
    freqs, x = angles(4, alike=True), normal(4, 2, 3, 6)
    torch.testing.assert_close(ops.fused_rope_backward(ops.fused_rope_forward(x, freqs), freqs), x)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_formats_agree(interleaved: bool) -> None:
    x, freqs, starts = normal(4, 3, 2, 8), angles(), torch.tensor([0, 8, 3], dtype=torch.int32)
    options = {"start_positions": starts, "interleaved": interleaved}
    expected = ops.fused_rope_forward(x, freqs, **options)
    batch_first = x.transpose(0, 1)
    bshd = ops.fused_rope_forward(batch_first, freqs, qkv_format="bshd", **options)
    assert torch.equal(bshd.transpose(0, 1), expected)
    cu_seqlens = torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    thd = ops.fused_rope_forward(
        batch_first.flatten(0, 1), freqs, qkv_format="thd", cu_seqlens=cu_seqlens, **options
    )
    assert torch.equal(thd.view(3, 4, 2, 8).transpose(0, 1), expected)


def rank_chunks(sequence: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """The part of a full sequence (first dimension) that a rank holds."""
    chunks = sequence.chunk(2 * cp_size)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


@pytest.mark.parametrize("cp_size", [2, 3])
@pytest.mark.parametrize("starts", [None, [0, 5]])
def test_each_rank_has_its_chunks_of_the_whole(cp_size: int, starts: list[int] | None) -> None:
    x, freqs = normal(4 * cp_size, 2, 3, 8), angles(4 * cp_size + 5)
    options = with_tensors({"start_positions": starts} if starts else {})
    whole = ops.fused_rope_forward(x, freqs, **options)
    for rank in range(cp_size):
        own = rank_chunks(x, cp_size, rank)
        got = ops.fused_rope_forward(own, freqs, cp_size=cp_size, cp_rank=rank, **options)
        assert torch.equal(got, rank_chunks(whole, cp_size, rank))


def test_each_rank_has_its_chunks_of_every_sequence() -> None:
    lengths, cp_size = [8, 0, 12], 2
    x, freqs = normal(sum(lengths), 3, 8), angles(12)
    cu_seqlens = torch.tensor([0, 8, 8, 20], dtype=torch.int32)
    options = {"qkv_format": "thd", "cu_seqlens": cu_seqlens}
    whole = ops.fused_rope_forward(x, freqs, **options)
    for rank in range(cp_size):

        def held(packed: Tensor, rank: int = rank) -> Tensor:
            sequences = packed.split(lengths)
            return torch.cat([rank_chunks(it, cp_size, rank) for it in sequences if len(it)])

        got = ops.fused_rope_forward(held(x), freqs, cp_size=cp_size, cp_rank=rank, **options)
        assert torch.equal(got, held(whole))


def test_qkv_rope_is_a_split_and_two_ropes() -> None:
    packed, q_freqs, k_freqs = normal(4, 2, 3, 8 + 4 + 5), angles(4, 4), angles(4, 2)
    q, k, v = ops.fused_qkv_rope_forward(packed, q_freqs, k_freqs, qkv_split=(8, 4, 5))
    of_group = packed[..., :8].reshape(4, 2, 6, 4)  # query heads 2 i and 2 i + 1 belong to group i
    assert torch.equal(q, ops.fused_rope_forward(of_group, q_freqs))
    assert torch.equal(k, ops.fused_rope_forward(packed[..., 8:12], k_freqs))
    assert torch.equal(v, packed[..., 12:])


def test_values_are_a_copy_even_where_they_could_be_a_view() -> None:
    packed = normal(1, 1, 1, 12)
    _, _, v = ops.fused_qkv_rope_forward(packed, angles(1, 4), angles(1, 4), qkv_split=(4, 4, 4))
    packed.zero_()
    assert bool(v.all())


# ------------------------------------------------------------------- out of bounds


def test_positions_outside_the_table_are_nan_in_the_rotated_features_only() -> None:
    x, freqs = normal(3, 2, 1, 6), angles(4, 4)
    starts = torch.tensor([-2, 2], dtype=torch.int32)
    for op in (ops.fused_rope_forward, ops.fused_rope_backward):
        output = op(x, freqs, start_positions=starts)
        missing = torch.tensor([[True, False], [True, False], [False, True]])
        assert torch.equal(output[..., :4].isnan().all(-1).squeeze(-1), missing)
        assert torch.equal(output[..., :4].isnan().any(-1).squeeze(-1), missing)
        assert torch.equal(output[..., 4:], x[..., 4:])


def test_tokens_after_the_last_sequence_are_copied_bit_by_bit() -> None:
    x = normal(5, 1, 4)
    x[3, 0] = torch.tensor([-0.0, math.inf, 1.0, -math.inf])
    cu_seqlens = torch.tensor([0, 2, 3], dtype=torch.int32)
    for op in (ops.fused_rope_forward, ops.fused_rope_backward):
        output = op(x, angles(2, 4), qkv_format="thd", cu_seqlens=cu_seqlens)
        assert torch.equal(output[3:].view(torch.int64), x[3:].view(torch.int64))
        assert not torch.equal(output[1], x[1])


def test_no_values_are_read_back() -> None:
    # Reading a value of a meta tensor fails.
    x, freqs = normal(5, 2, 6).to("meta"), angles().to("meta")
    options = {
        name: it.to("meta") if isinstance(it, Tensor) else it
        for name, it in with_tensors(CASES["thd, all of it"][1]).items()
    }
    with te.with_preference("reference"):
        assert ops.fused_rope_forward(x, freqs, **options).shape == x.shape
        assert ops.fused_rope_backward(x, freqs, **options).shape == x.shape


# ----------------------------------------------------------------------------- errors

INT = torch.int32
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a format of another name": ({"qkv_format": "hsbd"}, "qkv_format"),
    "a format that is no text": ({"qkv_format": 3}, "qkv_format"),
    "tokens of another format": ({"qkv_format": "thd", "cu_seqlens": [0, 6]}, "input"),
    "sequences that need no offsets": ({"cu_seqlens": [0, 6]}, "cu_seqlens"),
    "offsets that are missing": ({"qkv_format": "thd", "input": normal(6, 2, 8)}, "cu_seqlens"),
    "offsets of no sequence": (
        {"qkv_format": "thd", "input": normal(6, 2, 8), "cu_seqlens": [0]},
        "cu_seqlens",
    ),
    "offsets of another dtype": (
        {"qkv_format": "thd", "input": normal(6, 2, 8), "cu_seqlens": torch.tensor([0, 6])},
        "cu_seqlens",
    ),
    "start positions of another dtype": ({"start_positions": torch.zeros(2)}, "start_positions"),
    "too few start positions": ({"start_positions": [0]}, "start_positions"),
    "start positions elsewhere": (
        {"start_positions": torch.zeros(2, dtype=INT, device="meta")},
        "start_positions",
    ),
    "no ranks": ({"cp_size": 0}, "cp_size"),
    "a rank past the last": ({"cp_size": 2, "cp_rank": 2, "freqs": angles(12)}, "cp_rank"),
    "a negative rank": ({"cp_size": 2, "cp_rank": -1, "freqs": angles(12)}, "cp_rank"),
    "a number of ranks that is no integer": ({"cp_size": 2.0}, "cp_size"),
    "tokens that make no two chunks": (
        {"cp_size": 2, "input": normal(5, 2, 3, 8), "freqs": angles(12)},
        "qkv_format",
    ),
    "a table too short": ({"freqs": angles(5)}, "freqs"),
    "a table too short for every rank": ({"freqs": angles(6), "cp_size": 2}, "freqs"),
    "an odd number of angles": ({"freqs": angles(6, 8)[..., :5]}, "freqs"),
    "no angles": ({"freqs": angles(6, 8)[..., :0]}, "freqs"),
    "more angles than features": ({"freqs": angles(6, 10)}, "freqs"),
    "angles of another dtype": ({"freqs": angles(6).double()}, "freqs"),
    "a table for each sequence": ({"freqs": angles(6).expand(-1, 2, -1, -1)}, "freqs"),
    "a table elsewhere": ({"freqs": angles(6).to("meta")}, "freqs"),
    "interleaved that is no flag": ({"interleaved": 1}, "interleaved"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_call_that_breaks_the_contract_names_the_argument(what: str) -> None:
    change, argument = REFUSED[what]
    call = {"input": normal(6, 2, 3, 8), "freqs": angles(6), **with_tensors(change)}
    with pytest.raises(ArgumentError) as raised:
        ops.fused_rope_forward(call.pop("input"), call.pop("freqs"), **call)
    assert raised.value.argument == argument


@pytest.mark.parametrize(
    "split", [(8, 4), (8, 4, 4, 4), (6, 4, 6), (0, 4, 4), (8, 4, 0), (8.0, 4, 4), "abc", 16]
)
def test_a_split_that_makes_no_heads_is_refused(split: Any) -> None:
    with pytest.raises(ArgumentError, match="qkv_split"):
        ops.fused_qkv_rope_forward(normal(6, 2, 3, 16), angles(6, 4), angles(6, 4), qkv_split=split)


def test_a_split_of_another_width_is_refused() -> None:
    with pytest.raises(ArgumentError, match="qkv_input"):
        ops.fused_qkv_rope_forward(
            normal(6, 2, 3, 17), angles(6, 4), angles(6, 4), qkv_split=(8, 4, 4)
        )


def test_gradients_of_three_dtypes_are_refused() -> None:
    q, k, v = normal(6, 2, 6, 4), normal(6, 2, 3, 4), normal(6, 2, 3, 4).float()
    with pytest.raises(ArgumentError, match="v_grad"):
        ops.fused_qkv_rope_backward(q, k, v, angles(6, 4), angles(6, 4), qkv_split=(8, 4, 4))


def test_the_short_names_are_the_same_operators() -> None:
    manager = te.get_default_manager()
    x, freqs = normal(6, 2, 3, 8), angles(6)
    expected = ops.fused_rope_forward(x, freqs)
    assert torch.equal(manager.call("rope_fwd", x, freqs), expected)
    expected = ops.fused_rope_backward(x, freqs)
    assert torch.equal(manager.call("rope_bwd", x, freqs), expected)
