"""Context-parallel attention, run in one process, and what its operators promise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from some_tensors import int32, normal
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import ops
from transformer_engine_fl.core.errors import ArgumentError

HEADS, WIDTH = 2, 4
FIRST, SECOND = 0, 1


# ---------------------------------------------------------------- attention, on one rank
#
# Plain torch in float64, one sequence at a time: the attention between the operators.


def scores_of(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """``[h, sq, sk]``; a causal mask needs as many keys as queries."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores


def slices(cu_seqlens: Tensor) -> list[slice]:
    return [slice(begin, end) for begin, end in pairwise(cu_seqlens.tolist())]


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool) -> Tensor:
    """Softmax attention over whole sequences, thd."""
    parts = [
        torch.einsum("hqk,khd->qhd", scores_of(q[it], k[it], causal).softmax(-1), v[it])
        for it in slices(cu_seqlens)
    ]
    return torch.cat([*parts, torch.zeros_like(q[int(cu_seqlens[-1]) :])])


@dataclass
class Step:
    """Queries and keys of one step of a rank, in thd."""

    q: Tensor
    kv: Tensor
    cu_q: Tensor
    cu_k: Tensor
    causal: bool

    def each(self) -> list[tuple[int, slice, slice, Tensor]]:
        """(sequence, its queries, its keys, scores)."""
        sides = zip(slices(self.cu_q), slices(self.cu_k), strict=True)
        return [
            (number, qs, ks, scores_of(self.q[qs], self.kv[0][ks], self.causal))
            for number, (qs, ks) in enumerate(sides)
        ]

    def forward(self, lse: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
        """The output, and its lse in the layout of ``lse``, whose values are not read."""
        out, lse = torch.zeros_like(self.q), torch.full_like(lse, torch.nan)
        for number, qs, ks, scores in self.each():
            out[qs] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), self.kv[1][ks])
            self.rows(lse, packed, number, qs).copy_(scores.logsumexp(-1))
        return out, lse

    def backward(
        self, d_out: Tensor, delta: Tensor, lse: Tensor, packed: bool
    ) -> tuple[Tensor, Tensor]:
        """Gradients of queries, and of keys and values; ``delta`` is the sum of out * d_out."""
        dq, dkv = torch.zeros_like(self.q), torch.zeros_like(self.kv)
        for number, qs, ks, scores in self.each():
            p = (scores - self.rows(lse, packed, number, qs)[..., None]).exp()
            dp = torch.einsum("qhd,khd->hqk", d_out[qs], self.kv[1][ks])
            ds = p * (dp - delta[qs].T[..., None]) / math.sqrt(WIDTH)
            dq[qs] = torch.einsum("hqk,khd->qhd", ds, self.kv[0][ks])
            dkv[0][ks] = torch.einsum("hqk,qhd->khd", ds, self.q[qs])
            dkv[1][ks] = torch.einsum("hqk,qhd->khd", p, d_out[qs])
        return dq, dkv

    @staticmethod
    def rows(lse: Tensor, packed: bool, number: int, qs: slice) -> Tensor:
        return lse[:, qs] if packed else lse[number, :, : qs.stop - qs.start]


# ------------------------------------------------------------------------------ the ring


class Rank:
    """A rank's tensors and its steps; the operators do everything between the steps."""

    def __init__(
        self,
        rank: int,
        world: list[Rank],
        q: Tensor,
        kv: Tensor,
        cu_seqlens: Tensor,
        causal: bool,
        packed: bool,
    ) -> None:
        self.rank, self.world, self.causal, self.packed = rank, world, causal, packed
        self.q, self.kv, self.cu = q, kv, cu_seqlens
        self.longest = int(cu_seqlens.diff().max())
        self.dq, self.dkv = torch.full_like(q, torch.nan), torch.full_like(kv, torch.nan)
        self.begun: dict[str, set[int]] = {"dq": set(), "dkv": set()}

    def empty_lse(self, half: bool) -> Tensor:
        if self.packed:
            return self.q.new_empty((HEADS, self.q.shape[0] // (1 + half)))
        return self.q.new_empty((len(self.cu) - 1, HEADS, self.longest // (1 + half)))

    def steps(self) -> list[tuple[Rank, Step, bool, bool]]:
        """(owner of the keys, the step, half the queries?, half the keys?), its own keys first."""
        found = []
        for distance in range(len(self.world)):
            other = self.world[self.rank - distance]
            half_q = self.causal and other.rank > self.rank
            half_k = self.causal and other.rank < self.rank
            q, cu_q, kv, cu_k = self.q, self.cu, other.kv, self.cu
            if half_q:
                q, cu_q = ops.thd_read_half_tensor(q, self.cu, SECOND), self.cu // 2
            if half_k:
                kv, cu_k = ops.thd_read_half_tensor(kv, self.cu, FIRST), self.cu // 2
            step = Step(q, kv, cu_q, cu_k, self.causal and other is self)
            found.append((other, step, half_q, half_k))
        return found

    def forward(self) -> Tensor:
        given = []
        for _, step, half_q, _ in self.steps():
            out, lse = step.forward(self.empty_lse(half_q), self.packed)
            given.append((out, lse, half_q))
            if len(given) == 1:
                self.lse = lse.clone()
            elif half_q:
                ops.thd_second_half_lse_correction(self.lse, lse, self.cu, lse_packed=self.packed)
            else:
                self.lse = self.lse.logaddexp(lse)
        self.out = torch.zeros_like(self.q)
        for out, lse, half_q in given:
            ops.thd_out_correction(
                self.out,
                out,
                self.lse,
                lse,
                self.cu,
                only_second_half=half_q,
                lse_packed=self.packed,
            )
        return self.out

    def backward(self, d_out: Tensor) -> None:
        delta = (self.out * d_out).sum(-1)
        for other, step, half_q, half_k in reversed(self.steps()):
            lse, own_d_out, own_delta = self.lse, d_out, delta
            if half_q:
                size = self.empty_lse(half=True).shape[-1]
                lse = ops.thd_read_second_half_lse(lse, self.cu, size, lse_packed=self.packed)
                own_d_out = ops.thd_read_half_tensor(d_out, self.cu, SECOND)
                own_delta = (ops.thd_read_half_tensor(self.out, self.cu, SECOND) * own_d_out).sum(
                    -1
                )
            dq, dkv = step.backward(own_d_out, own_delta, lse, self.packed)
            self.merge("dq", dq, {SECOND} if half_q else {FIRST, SECOND})
            other.merge("dkv", dkv, {FIRST} if half_k else {FIRST, SECOND})

    def merge(self, name: str, gradient: Tensor, halves: set[int]) -> None:
        """The first gradient of a half is copied over what is there; later ones are added."""
        begun = self.begun[name]
        changes = [
            "none" if half not in halves else "add" if half in begun else "copy"
            for half in (FIRST, SECOND)
        ]
        begun |= halves
        total = getattr(self, name)
        ops.thd_grad_correction(
            total, gradient, self.cu, first_half=changes[0], second_half=changes[1]
        )


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_together_are_attention_over_whole_sequences(
    size: int, causal: bool, packed: bool
) -> None:
    lengths = [16, 0, 8, 32, 8]
    cu_seqlens = int32(*[sum(lengths[:n]) for n in range(len(lengths) + 1)])
    total = sum(lengths)
    q, k, v = (normal(total, HEADS, WIDTH, seed=seed).requires_grad_() for seed in (1, 2, 3))
    d_out = normal(total, HEADS, WIDTH, seed=4)
    expected = attention(q, k, v, cu_seqlens, causal)
    expected_grads = torch.autograd.grad(expected, (q, k, v), d_out)

    world: list[Rank] = []
    shares = [ops.thd_get_partitioned_indices(cu_seqlens, total, size, it) for it in range(size)]
    kv = torch.stack([k, v]).detach()
    for rank, share in enumerate(shares):
        own = q.detach()[share], kv[:, share]
        world.append(Rank(rank, world, *own, cu_seqlens // size, causal, packed))
    got = torch.full_like(q, torch.nan)
    for rank, share in zip(world, shares, strict=True):
        got[share] = rank.forward()
    torch.testing.assert_close(got, expected)

    for rank, share in zip(world, shares, strict=True):
        rank.backward(d_out[share])
    grads = [torch.full_like(q, torch.nan) for _ in range(3)]
    for rank, share in zip(world, shares, strict=True):
        for whole, part in zip(grads, (rank.dq, *rank.dkv), strict=True):
            whole[share] = part
    torch.testing.assert_close(grads, list(expected_grads))


# -------------------------------------------------------------------------------- shares


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [0, 1])
def test_ranks_share_every_token_once(size: int, after: int) -> None:
    unit = 2 * size
    cu_seqlens = int32(0, 3 * unit, 3 * unit, 4 * unit)
    total = (4 + after) * unit
    shares = [ops.thd_get_partitioned_indices(cu_seqlens, total, size, it) for it in range(size)]
    assert {it.dtype for it in shares} == {torch.int32}
    assert sorted(torch.cat(shares).tolist()) == list(range(total))


def test_the_share_of_a_rank_matches_rotary_embedding_with_cp_rank() -> None:
    cu_seqlens, size = int32(0, 8, 8, 32), 4
    x, freqs = normal(32, HEADS, WIDTH), normal(32, 1, 1, WIDTH, dtype=torch.float32)
    options = {"qkv_format": "thd", "cu_seqlens": cu_seqlens}
    whole = ops.fused_rope_forward(x, freqs, **options)
    for rank in range(size):
        share = ops.thd_get_partitioned_indices(cu_seqlens, 32, size, rank)
        got = ops.fused_rope_forward(x[share], freqs, cp_size=size, cp_rank=rank, **options)
        assert torch.equal(got, whole[share])


@pytest.mark.parametrize("dtype", [getattr(torch, it) for it in ops.thd_read_half_tensor.dtypes])
def test_halves_are_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (2, 10, 3, 32 * dtype.itemsize)
    whole = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(dtype)
    cu_seqlens, order = int32(0, 4, 10), ([0, 1, 4, 5, 6], [2, 3, 7, 8, 9])
    for half, rows in enumerate(order):
        got = ops.thd_read_half_tensor(whole, cu_seqlens, half)
        assert torch.equal(got.view(torch.uint8), whole[:, rows].view(torch.uint8))


# --------------------------------------------------------------------------------- merging


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merging_two_lse_of_minus_infinity_gives_minus_infinity(dtype: torch.dtype) -> None:
    lse = torch.tensor([[1.0, 2.0, -math.inf, -math.inf, 4.0, 5e30]], dtype=dtype)
    step = torch.tensor([[-math.inf, 3.0, 5e30]], dtype=dtype)
    expected = torch.tensor([[1.0, 2.0, -math.inf, -math.inf, 4.0, 5e30]], dtype=dtype)
    expected[0, 4] = 4 + math.log1p(math.exp(-1))
    ops.thd_second_half_lse_correction(lse, step, int32(0, 2, 6), lse_packed=True)
    # Corrected are token 1 of the first sequence (2 tokens), and tokens 4 and 5 of the second.
    torch.testing.assert_close(lse, expected)


@pytest.mark.parametrize("dtype", [getattr(torch, it) for it in ops.thd_out_correction.dtypes])
def test_a_query_that_sees_nothing_stays_as_it_is(dtype: torch.dtype) -> None:
    out = normal(4, 1, 3, dtype=dtype)
    out[1, 0, 0] = -0.0
    step = torch.full_like(out, torch.nan)
    step[3] = 1
    lse = torch.tensor([[-math.inf, 0.5, -math.inf, 0.5]])
    per_step = torch.tensor([[-math.inf, -math.inf, 2.0, 0.5]])
    before = out.clone()
    ops.thd_out_correction(out, step, lse, per_step, int32(0, 4), lse_packed=True)
    assert torch.equal(out[:3].view(torch.uint8), before[:3].view(torch.uint8))
    torch.testing.assert_close(out[3], before[3] + 1)


def test_what_belongs_to_no_sequence_is_left_or_is_zero() -> None:
    cu_seqlens = int32(0, 4)
    whole, lse = normal(7, 1, 3), normal(1, 7)
    assert not ops.thd_read_half_tensor(whole, cu_seqlens, SECOND)[2:].any()
    assert not ops.thd_read_second_half_lse(lse, cu_seqlens, 5, lse_packed=True)[:, 2:].any()
    before = whole.clone(), lse.clone()
    ops.thd_out_correction(whole, whole + 1, lse, lse + 1, cu_seqlens, lse_packed=True)
    ops.thd_grad_correction(whole, whole + 1, cu_seqlens, first_half="copy", second_half="add")
    ops.thd_second_half_lse_correction(lse, lse[:, :3] + 1, cu_seqlens, lse_packed=True)
    assert torch.equal(whole[4:], before[0][4:])
    assert torch.equal(lse[:, 4:], before[1][:, 4:])
    assert not (whole[:4] == before[0][:4]).any()


@pytest.mark.parametrize("dtype", [getattr(torch, it) for it in ops.thd_grad_correction.dtypes])
def test_a_half_that_is_copied_has_the_bits_and_one_that_is_left_keeps_them(
    dtype: torch.dtype,
) -> None:
    grad = torch.full((2, 4, 1, 3), torch.nan, dtype=dtype)
    step = normal(2, 2, 1, 3, dtype=dtype)
    step[0, 0, 0] = torch.tensor([-0.0, torch.nan, torch.inf])
    before = grad.clone()
    ops.thd_grad_correction(grad, step, int32(0, 4), first_half="none", second_half="copy")
    assert torch.equal(grad[:, :2].view(torch.uint8), before[:, :2].view(torch.uint8))
    assert torch.equal(grad[:, 2:].view(torch.uint8), step.view(torch.uint8))


def test_a_correction_of_narrow_values_is_rounded_once() -> None:
    # The product is a little less than half a unit in the last place of the sum. If it were rounded
    # first it would be exactly half, and the sum would round to the even neighbour.
    out = torch.full((2, 1, 1), 1 + 2**-7, dtype=torch.bfloat16)
    step, lse = torch.full_like(out, 2**-8), torch.zeros(1, 2)
    ops.thd_out_correction(out, step, lse, lse - 2**-12, int32(0, 2), lse_packed=True)
    assert torch.equal(out, torch.full_like(out, 1 + 2**-7))


# --------------------------------------------------------------------------- circumstances


def every_call(cu_seqlens: Tensor, device: str = "cpu") -> list[Tensor]:
    """Calls of all six operators on six tokens, in both layouts of lse: results and mutations."""
    cu_seqlens = cu_seqlens.to(device)
    sequences = cu_seqlens.shape[0] - 1

    def fresh(*shape: int, seed: int = 1) -> Tensor:
        values = torch.arange(math.prod(shape), device=device) * (0.7 * seed)
        return values.sin().view(shape)

    results = [ops.thd_get_partitioned_indices(cu_seqlens, 8, 2, 1)]
    results += [ops.thd_read_half_tensor(fresh(6, 2, 3), cu_seqlens, it) for it in (FIRST, SECOND)]
    for halves in (("add", "copy"), ("none", "copy"), ("add", "none")):
        grad = fresh(2, 6, 2, 3)
        step = fresh(2, 3 if "none" in halves else 6, 2, 3)
        changes = dict(zip(("first_half", "second_half"), halves, strict=True))
        ops.thd_grad_correction(grad, step, cu_seqlens, **changes)
        results.append(grad)
    for packed in (True, False):
        shape = (2,) if packed else (sequences, 2)
        options = {"lse_packed": packed}
        lse, half_lse = fresh(*shape, 6), fresh(*shape, 3, seed=2) - 4
        results.append(ops.thd_read_second_half_lse(lse, cu_seqlens, 4, **options))
        for second, step_lse in ((False, lse - 1), (True, half_lse)):
            out, step = fresh(6, 2, 3), fresh(3 if second else 6, 2, 3, seed=3)
            ops.thd_out_correction(
                out, step, lse, step_lse, cu_seqlens, only_second_half=second, **options
            )
            results.append(out)
        ops.thd_second_half_lse_correction(lse, half_lse, cu_seqlens, **options)
        results.append(lse)
    return results


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 9), min_size=2, max_size=4))
def test_any_offsets_give_indices_in_range_and_no_nan(offsets: list[int]) -> None:
    indices, *others = every_call(int32(*offsets))
    assert bool(((indices >= 0) & (indices < 8)).all())
    assert not any(it.isnan().any() for it in others)


def test_no_values_are_read_back() -> None:
    # Reading a value of a meta tensor fails.
    with te.with_preference("reference"):
        for it in every_call(int32(0, 4, 6), "meta"):
            assert it.device.type == "meta"


def test_they_write_in_compiled_code_too() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(every_call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(int32(0, 4, 6)), every_call(int32(0, 4, 6)))


# ---------------------------------------------------------------------------------- errors

THD, LSE, HALF = normal(6, 2, 3), normal(2, 6), normal(2, 3)
BOUNDS = int32(0, 4, 6)
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a third half": (
        ops.thd_read_half_tensor,
        {"tensor": THD, "cu_seqlens": BOUNDS, "half_idx": 2},
        "half_idx",
    ),
    "three tensors of tokens": (
        ops.thd_read_half_tensor,
        {"tensor": normal(3, 6, 2, 3), "cu_seqlens": BOUNDS, "half_idx": 0},
        "tensor",
    ),
    "offsets of another dtype": (
        ops.thd_read_half_tensor,
        {"tensor": THD, "cu_seqlens": BOUNDS.long(), "half_idx": 0},
        "cu_seqlens",
    ),
    "a packed lse that is not": (
        ops.thd_second_half_lse_correction,
        {"lse": LSE, "lse_per_step": HALF, "cu_seqlens": BOUNDS},
        "lse",
    ),
    "an lse of other sequences": (
        ops.thd_read_second_half_lse,
        {"lse": normal(3, 2, 4), "cu_seqlens": BOUNDS, "second_half_lse_seqlen": 2},
        "lse",
    ),
    "a half too short to be read": (
        ops.thd_read_second_half_lse,
        {"lse": LSE, "cu_seqlens": BOUNDS, "second_half_lse_seqlen": 2, "lse_packed": True},
        "second_half_lse_seqlen",
    ),
    "a half too short": (
        ops.thd_second_half_lse_correction,
        {"lse": LSE, "lse_per_step": HALF[:, :2], "cu_seqlens": BOUNDS, "lse_packed": True},
        "lse_per_step",
    ),
    "a half of another dtype": (
        ops.thd_second_half_lse_correction,
        {"lse": LSE, "lse_per_step": HALF.float(), "cu_seqlens": BOUNDS, "lse_packed": True},
        "lse_per_step",
    ),
    "an lse that is expanded": (
        ops.thd_second_half_lse_correction,
        {
            "lse": LSE[:1].expand(2, 6),
            "lse_per_step": HALF,
            "cu_seqlens": BOUNDS,
            "lse_packed": True,
        },
        "lse",
    ),
    "a whole step for second halves": (
        ops.thd_out_correction,
        {
            "out": THD,
            "out_per_step": THD,
            "lse": LSE,
            "lse_per_step": HALF,
            "cu_seqlens": BOUNDS,
            "only_second_half": True,
            "lse_packed": True,
        },
        "out_per_step",
    ),
    "an lse of other heads": (
        ops.thd_out_correction,
        {
            "out": THD,
            "out_per_step": THD,
            "lse": normal(3, 6),
            "lse_per_step": LSE,
            "cu_seqlens": BOUNDS,
            "lse_packed": True,
        },
        "lse",
    ),
    "an lse of half the step": (
        ops.thd_out_correction,
        {
            "out": THD,
            "out_per_step": THD,
            "lse": LSE,
            "lse_per_step": HALF,
            "cu_seqlens": BOUNDS,
            "lse_packed": True,
        },
        "lse_per_step",
    ),
    "a step of another dtype": (
        ops.thd_out_correction,
        {
            "out": THD,
            "out_per_step": THD.float(),
            "lse": LSE,
            "lse_per_step": LSE,
            "cu_seqlens": BOUNDS,
            "lse_packed": True,
        },
        "out_per_step",
    ),
    "a change of neither half": (
        ops.thd_grad_correction,
        {
            "grad": THD,
            "grad_per_step": THD,
            "cu_seqlens": BOUNDS,
            "first_half": "none",
            "second_half": "none",
        },
        "second_half",
    ),
    "a change of another name": (
        ops.thd_grad_correction,
        {
            "grad": THD,
            "grad_per_step": THD,
            "cu_seqlens": BOUNDS,
            "first_half": "sum",
            "second_half": "add",
        },
        "first_half",
    ),
    "half a gradient for both halves": (
        ops.thd_grad_correction,
        {
            "grad": THD,
            "grad_per_step": THD[:3],
            "cu_seqlens": BOUNDS,
            "first_half": "add",
            "second_half": "add",
        },
        "grad_per_step",
    ),
    "tokens that cannot be shared out": (
        ops.thd_get_partitioned_indices,
        {"cu_seqlens": BOUNDS, "total_tokens": 6, "world_size": 2, "rank": 0},
        "total_tokens",
    ),
    "a rank past the last": (
        ops.thd_get_partitioned_indices,
        {"cu_seqlens": BOUNDS, "total_tokens": 8, "world_size": 2, "rank": 2},
        "rank",
    ),
    "no ranks": (
        ops.thd_get_partitioned_indices,
        {"cu_seqlens": BOUNDS, "total_tokens": 8, "world_size": 0, "rank": 0},
        "world_size",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_call_that_breaks_the_contract_names_the_argument(what: str) -> None:
    operator, call, argument = REFUSED[what]
    with pytest.raises(ArgumentError) as raised:
        operator(**call)
    assert raised.value.argument == argument
