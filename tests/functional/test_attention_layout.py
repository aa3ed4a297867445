"""The layouts around attention: gradients, bits, and a cache that many steps have filled."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from some_tensors import int32, normal
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import transformer_engine_fl as te
from transformer_engine_fl import functional, ops
from transformer_engine_fl.core.errors import ArgumentError

DTYPES = [getattr(torch, name) for name in ops.fa_prepare_fwd.dtypes]


def any_bits(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Random bits of a dtype, so that NaNs of every kind occur."""
    generator = torch.Generator().manual_seed(seed)
    width = shape[-1] * dtype.itemsize
    values = torch.randint(0, 256, (*shape[:-1], width), generator=generator, dtype=torch.uint8)
    return values.view(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


# --------------------------------------------------------------------------- gradients


def test_the_projection_in_three_passes_gradcheck() -> None:
    assert torch.autograd.gradcheck(functional.fa_prepare, (normal(3, 2, 2, 6).requires_grad_(),))


def test_the_gradient_of_one_of_three() -> None:
    qkv = normal(3, 2, 2, 6).requires_grad_()
    _, k, _ = functional.fa_prepare(qkv)
    (gradient,) = torch.autograd.grad(k.sum(), qkv)
    expected = torch.zeros(3, 2, 2, 6).double()
    expected[..., 2:4] = 1
    assert torch.equal(gradient, expected)


def test_without_gradients_there_are_three_as_well() -> None:
    qkv = normal(3, 2, 2, 6)
    for part, expected in zip(functional.fa_prepare(qkv), qkv.split(2, -1), strict=True):
        assert torch.equal(part, expected.transpose(0, 1))
        assert part.is_contiguous()


def test_three_gradients_reach_the_backward_as_they_are() -> None:
    seen: list[Tensor] = []

    def backward(q_grad: Tensor, k_grad: Tensor, v_grad: Tensor) -> Tensor:
        seen.extend((q_grad, k_grad, v_grad))
        return torch.zeros(3, 2, 2, 6).double()

    te.get_default_manager().registry.register_impl(
        te.OpImpl("fa_prepare_bwd", "vendor.seeing", "vendor", backward, vendor="seeing")
    )
    given = [normal(2, 3, 2, 2, seed=seed) for seed in (2, 3, 4)]
    with te.with_preference("vendor:seeing"):
        parts = functional.fa_prepare(normal(3, 2, 2, 6).requires_grad_())
    torch.autograd.backward(parts, given)
    assert [it.data_ptr() for it in seen] == [it.data_ptr() for it in given]


LENGTHS: dict[str, tuple[Tensor, int, int]] = {
    # label: cu_seqlens, tokens, room of each sequence
    "as many places as tokens": (int32(0, 3, 3, 5), 5, 3),
    "more": (int32(0, 3, 3, 5), 8, 4),
    "fewer": (int32(0, 3, 3, 5), 4, 2),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_conversions_pass_gradcheck(case: str) -> None:
    cu_seqlens, total, places = LENGTHS[case]
    thd, bshd = normal(total, 2, 3).requires_grad_(), normal(3, places, 2, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda it: functional.thd_to_bshd(it, cu_seqlens, places), thd)
    assert torch.autograd.gradcheck(lambda it: functional.bshd_to_thd(it, cu_seqlens, total), bshd)


def test_conversions_save_no_token() -> None:
    cu_seqlens, saved = int32(0, 3, 5), []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it):
        functional.thd_to_bshd(normal(5, 2, 3).requires_grad_(), cu_seqlens, 3)
        functional.bshd_to_thd(normal(2, 3, 2, 3).requires_grad_(), cu_seqlens, 5)
    assert saved == [cu_seqlens.data_ptr()] * 2


def test_they_compile_with_their_gradients_for_any_sizes() -> None:
    torch._dynamo.reset()

    def program(qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = functional.fa_prepare(qkv)
        total = q.shape[1]
        padded = functional.thd_to_bshd((q * k + v)[0], cu_seqlens, total)
        return functional.bshd_to_thd(padded.sin(), cu_seqlens, total).square().sum()

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager", dynamic=True)
    for total, cu_seqlens in ((5, int32(0, 2, 5)), (7, int32(0, 0, 3, 6))):
        gradients = []
        for run in (program, compiled):
            qkv = normal(total, 1, 2, 9).requires_grad_()
            run(qkv, cu_seqlens).backward()
            gradients.append(qkv.grad)
        torch.testing.assert_close(*gradients)


# -------------------------------------------------------------------------------- bits


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_is_moved_as_it_is(dtype: torch.dtype) -> None:
    qkv = any_bits(5, 2, 3, 96, dtype=dtype)
    q, k, v = ops.fa_prepare_fwd(qkv)
    assert torch.equal(bits(ops.fa_prepare_bwd(q, k, v)), bits(qkv))

    cu_seqlens, thd = int32(0, 3, 3, 8), any_bits(8, 3, 32, dtype=dtype)
    bshd = ops.convert_thd_to_bshd(thd, cu_seqlens, 6)
    assert torch.equal(bits(bshd[2, :5]), bits(thd[3:]))
    assert not bits(bshd[2, 5:]).any()
    assert torch.equal(bits(ops.convert_bshd_to_thd(bshd, cu_seqlens, 8)), bits(thd))

    caches = [any_bits(3, 4, 3, 32, dtype=dtype, seed=seed) for seed in (5, 6)]
    before = [it.clone() for it in caches]
    ops.copy_to_kv_cache(thd, thd, *caches, cu_seqlens, int32(0, 4, 4, 8))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(bits(cache[0, 1:]), bits(thd[:3]))
        assert torch.equal(bits(cache[2]), bits(thd[4:]))  # no room for its first token
        for kept in ((0, slice(0, 1)), (1,)):
            assert torch.equal(bits(cache[kept]), bits(old[kept]))


def test_a_prepared_projection_is_a_copy_even_where_it_could_be_a_view() -> None:
    qkv = normal(1, 1, 1, 3)
    parts = ops.fa_prepare_fwd(qkv)
    packed = ops.fa_prepare_bwd(*parts)
    qkv.zero_()
    assert bool(parts.all())
    parts.zero_()
    assert bool(packed.all())


# ------------------------------------------------------------------------- conversions


def test_padding_is_that_of_torch() -> None:
    lengths = [3, 1, 5]
    thd = normal(9, 2, 4)
    expected = pad_sequence(list(thd.split(lengths)), batch_first=True)
    got = ops.convert_thd_to_bshd(thd, int32(0, 3, 4, 9), 5)
    assert torch.equal(got, expected)
    assert torch.equal(ops.convert_bshd_to_thd(got, int32(0, 3, 4, 9), 9), thd)


def test_each_conversion_is_the_transpose_of_the_other() -> None:
    for cu_seqlens, total, places in LENGTHS.values():
        thd, bshd = normal(total, 2, 3, seed=5), normal(3, places, 2, 3, seed=6)
        there = (ops.convert_thd_to_bshd(thd, cu_seqlens, places) * bshd).sum()
        back = (ops.convert_bshd_to_thd(bshd, cu_seqlens, total) * thd).sum()
        torch.testing.assert_close(there, back)


# ------------------------------------------------------------------------------- cache

FORMATS = ("thd", "bshd", "sbhd")
BIG = 2**31 - 1


class Generation:
    """Growing sequences, as plain lists of tokens, and their caches."""

    def __init__(self, batch: int, page_size: int, pages_each: int, paged: bool, seed: int):
        self.random = random.Random(seed)
        self.said: list[list[Tensor]] = [[] for _ in range(batch)]
        self.longest = page_size * pages_each
        if paged:
            count = batch * pages_each + 2
            order = self.random.sample(range(count), batch * pages_each)
            self.table: Tensor | None = int32(*order).view(batch, pages_each)
            shape = (count, page_size)
        else:
            self.table = None
            shape = (batch, self.longest)
        self.k_cache = torch.full((*shape, 2, 3), -1.0)
        self.v_cache = torch.full((*shape, 2, 1), -1.0)
        self.number = 0

    def step(self, qkv_format: str) -> None:
        added = []
        for sequence in self.said:
            room = self.longest - len(sequence)
            new = [self._token() for _ in range(self.random.randint(0, min(room, 4)))]
            sequence.extend(new)
            added.append(new)
        news = [torch.stack(it) if it else torch.empty(0, 2, 3) for it in added]
        keys = torch.cat(news) if qkv_format == "thd" else pad_sequence(news, qkv_format == "bshd")
        self._call(keys, [len(it) for it in added], qkv_format=qkv_format, page_table=self.table)

    def reorder(self) -> None:
        """Permute the sequences, and add one token to each."""
        order = self.random.sample(range(len(self.said)), len(self.said))
        self.said = [[*self.said[it], self._token()] for it in order]
        keys = torch.stack([sequence[-1] for sequence in self.said])
        self._call(keys, [1] * len(order), batch_indices=int32(*order))

    def _token(self) -> Tensor:
        self.number += 1
        return torch.arange(6.0).view(2, 3) + 10 * self.number

    def _call(self, keys: Tensor, added: list[int], **options: Any) -> None:
        lengths = [len(it) for it in self.said]
        offsets = [int32(*[sum(it[:n]) for n in range(len(it) + 1)]) for it in (added, lengths)]
        ops.copy_to_kv_cache(keys, keys[..., :1], self.k_cache, self.v_cache, *offsets, **options)

    def check(self, *, rows_alone: bool = False) -> None:
        """The caches hold all tokens and, unless rows were left behind, nothing else."""
        written = 0
        for number, sequence in enumerate(self.said):
            if self.table is None:
                rows = self.k_cache[number], self.v_cache[number]
            else:
                pages = self.table[number].long()
                rows = self.k_cache[pages].flatten(0, 1), self.v_cache[pages].flatten(0, 1)
            for place, token in enumerate(sequence):
                assert torch.equal(rows[0][place], token)
                assert torch.equal(rows[1][place], token[:, :1])
            written += len(sequence)
        assert rows_alone or int((self.k_cache >= 0).all(-1).all(-1).sum()) == written


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 4),
    page_size=st.integers(1, 4),
    pages_each=st.integers(1, 4),
    paged=st.booleans(),
    formats=st.lists(st.sampled_from(FORMATS), min_size=1, max_size=6),
    seed=st.integers(0, 2**16),
)
def test_a_cache_holds_all_tokens_after_any_steps(
    batch: int, page_size: int, pages_each: int, paged: bool, formats: list[str], seed: int
) -> None:
    generation = Generation(batch, page_size, pages_each, paged, seed)
    for qkv_format in formats:
        generation.step(qkv_format)
        generation.check()


@pytest.mark.parametrize("seed", range(8))
def test_sequences_that_change_rows_keep_their_tokens(seed: int) -> None:
    generation = Generation(4, page_size=12, pages_each=1, paged=False, seed=seed)
    generation.step("thd")
    for _ in range(3):
        generation.reorder()
        generation.check(rows_alone=True)


@settings(max_examples=80, deadline=None)
@given(
    new=st.lists(st.integers(-BIG - 1, BIG) | st.integers(-3, 12), min_size=3, max_size=3),
    cached=st.lists(st.integers(-BIG - 1, BIG) | st.integers(-3, 12), min_size=3, max_size=3),
    table=st.lists(st.integers(-BIG - 1, BIG) | st.integers(-2, 5), min_size=4, max_size=4),
    qkv_format=st.sampled_from(FORMATS),
    paged=st.booleans(),
)
def test_nothing_outside_the_cache_is_written_whatever_the_indices_are(
    new: list[int], cached: list[int], table: list[int], qkv_format: str, paged: bool
) -> None:
    memory = torch.full((6, 6, 2, 3), -1.0)
    k_cache = v_cache = memory[1:5, 1:4]
    keys = torch.arange(24.0).view(4, 2, 3) if qkv_format == "thd" else torch.ones(2, 2, 2, 3)
    options = (
        {"page_table": int32(*table).view(2, 2)} if paged else {"batch_indices": int32(*table[:2])}
    )
    ops.copy_to_kv_cache(
        keys, keys, k_cache, v_cache, int32(*new), int32(*cached), qkv_format=qkv_format, **options
    )
    outside = torch.ones(6, 6, dtype=torch.bool)
    outside[1:5, 1:4] = False
    assert bool((memory[outside] == -1).all())
    cu_seqlens = int32(*new)
    thd = ops.convert_bshd_to_thd(torch.ones(2, 3, 1, 1), cu_seqlens, 4)
    bshd = ops.convert_thd_to_bshd(torch.ones(4, 1, 1), cu_seqlens, 3)
    assert {*thd.flatten().tolist(), *bshd.flatten().tolist()} <= {0.0, 1.0}


def test_the_cache_is_written_in_compiled_code() -> None:
    torch._dynamo.reset()

    def program(keys: Tensor, cache: Tensor, new: Tensor, cached: Tensor) -> Tensor:
        values = torch.zeros_like(cache)
        ops.copy_to_kv_cache(keys, keys * 2, cache, values, new, cached)
        return cache + values

    keys, results = normal(3, 2, 4), []
    for run in (program, torch.compile(program, fullgraph=True, backend="aot_eager")):
        cache = normal(2, 4, 2, 4, seed=9)
        results.append((run(keys, cache, int32(0, 1, 3), int32(0, 3, 5)), cache))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert torch.equal(results[0][1][0, 2], keys[0])


def test_no_values_are_read_back() -> None:
    # Reading a value of a meta tensor fails.
    thd, bshd = normal(5, 2, 6).to("meta"), normal(2, 4, 2, 6).to("meta")
    offsets, table = int32(0, 2, 5).to("meta"), int32([0, 1], [2, 3]).to("meta")
    with te.with_preference("reference"):
        assert ops.convert_thd_to_bshd(thd, offsets, 4).shape == bshd.shape
        assert ops.convert_bshd_to_thd(bshd, offsets, 5).shape == thd.shape
        ops.copy_to_kv_cache(thd, thd, bshd, bshd.clone(), offsets, offsets)
        ops.copy_to_kv_cache(thd, thd, bshd, bshd.clone(), offsets, offsets, page_table=table)
        ops.copy_to_kv_cache(
            thd, thd, bshd, bshd.clone(), offsets, offsets, batch_indices=offsets[:2]
        )


# ------------------------------------------------------------------------------ errors

CACHE_CALL = {
    "new_k": normal(5, 2, 6),
    "new_v": normal(5, 2, 4),
    "k_cache": normal(3, 4, 2, 6),
    "v_cache": normal(3, 4, 2, 4),
    "cu_new_lens": int32(0, 2, 5),
    "cu_cached_lens": int32(0, 2, 5),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a format of another name": ({"qkv_format": "hsbd"}, "qkv_format"),
    "tokens of another format": ({"qkv_format": "bshd"}, "new_k"),
    "a batch of another size": (
        {"qkv_format": "bshd", "new_k": normal(3, 4, 2, 6), "new_v": normal(3, 4, 2, 4)},
        "new_k",
    ),
    "values of other tokens": ({"new_v": normal(4, 2, 4)}, "new_v"),
    "values of another dtype": ({"new_v": normal(5, 2, 4).float()}, "new_v"),
    "a cache of another dtype": ({"k_cache": normal(3, 4, 2, 6).float()}, "k_cache"),
    "a cache of other heads": ({"k_cache": normal(3, 4, 3, 6)}, "k_cache"),
    "a cache of other widths": ({"v_cache": normal(3, 4, 2, 6)}, "v_cache"),
    "caches of different pages": ({"v_cache": normal(2, 4, 2, 4)}, "v_cache"),
    "an expanded cache": ({"k_cache": normal(1, 4, 2, 6).expand(3, -1, -1, -1)}, "k_cache"),
    "a cache with too few rows": (
        {"k_cache": normal(1, 4, 2, 6), "v_cache": normal(1, 4, 2, 4)},
        "k_cache",
    ),
    "lengths of no sequence": ({"cu_new_lens": int32(0)}, "cu_new_lens"),
    "lengths of other sequences": ({"cu_cached_lens": int32(0, 2, 3, 5)}, "cu_cached_lens"),
    "lengths of another dtype": ({"cu_new_lens": int32(0, 2, 5).long()}, "cu_new_lens"),
    "pages of other sequences": ({"page_table": int32([0], [1], [2])}, "page_table"),
    "pages elsewhere": ({"page_table": int32([0], [1]).to("meta")}, "page_table"),
    "rows beside pages": (
        {"page_table": int32([0], [1]), "batch_indices": int32(0, 1)},
        "batch_indices",
    ),
    "rows of other sequences": ({"batch_indices": int32(0, 1, 2)}, "batch_indices"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_call_that_breaks_the_contract_names_the_argument(what: str) -> None:
    change, argument = REFUSED[what]
    call = CACHE_CALL | change
    before = {name: call[name].clone() for name in ("k_cache", "v_cache")}
    with pytest.raises(ArgumentError) as raised:
        ops.copy_to_kv_cache(**call)
    assert raised.value.argument == argument
    assert all(torch.equal(call[name], it) for name, it in before.items())


def test_other_calls_that_break_their_contracts() -> None:
    cu_seqlens = int32(0, 2, 5)
    with pytest.raises(ArgumentError, match="'qkv'"):
        ops.fa_prepare_fwd(normal(3, 2, 2, 7))
    with pytest.raises(ArgumentError, match="'qkv'"):
        ops.fa_prepare_fwd(normal(3, 2, 6))
    with pytest.raises(ArgumentError, match="'v_grad'"):
        ops.fa_prepare_bwd(normal(3, 2, 2, 7), normal(3, 2, 2, 7), normal(3, 2, 2, 6))
    with pytest.raises(ArgumentError, match="'max_seq_len'"):
        ops.convert_thd_to_bshd(normal(5, 2, 3), cu_seqlens, -1)
    with pytest.raises(ArgumentError, match="'tensor'"):
        ops.convert_thd_to_bshd(normal(5, 2, 3, 1), cu_seqlens, 3)
    with pytest.raises(ArgumentError, match="'tensor'"):
        ops.convert_bshd_to_thd(normal(3, 5, 2, 3), cu_seqlens, 5)
