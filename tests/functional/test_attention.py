"""Attention: gradients, torch's own function, and what the contract promises beyond its samples."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from some_tensors import with_tensors
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import functional, ops
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.ops.dropout import philox_block

B, SQ, SKV, H, H_KV, D, DV = 2, 3, 5, 4, 2, 3, 2
MASKS = ("no_mask", "causal", "causal_bottom_right")
PADDING = ("padding", "padding_causal", "padding_causal_bottom_right")
LENGTHS = {"cu_seqlens_q": [0, 3, 5], "cu_seqlens_kv": [0, 2, 7]}
PACKED = {"qkv_format": "thd", "max_seqlen_q": SQ, "max_seqlen_kv": SKV, **LENGTHS}
SPACED = {**PACKED, "cu_seqlens_q_padded": [0, 4, 7], "cu_seqlens_kv_padded": [1, 4, 9]}

FORMATS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "bshd": ({"qkv_format": "bshd"}, MASKS),
    "sbhd": ({"qkv_format": "sbhd"}, MASKS),
    "bshd of lengths": ({"qkv_format": "bshd", **LENGTHS}, PADDING),
    "sbhd of lengths": ({"qkv_format": "sbhd", **LENGTHS}, PADDING),
    "thd": (PACKED, PADDING),
    "thd with space": (SPACED, PADDING),
}
FORMAT_MASKS = [(name, mask) for name, (_, masks) in FORMATS.items() for mask in masks]
EXTRAS: dict[str, tuple[dict[str, Any], tuple[int, ...] | None]] = {
    "nothing else": ({}, None),
    "window": ({"window_size_left": 1, "window_size_right": 1}, None),
    "bias": ({"scale": 0.4}, (B, H, SQ, SKV)),
    "bias, expanded": ({}, (1, H, 1, SKV)),
    "off by one": ({"softmax_type": "off_by_one"}, None),
    "dropout": ({"dropout_p": 0.4, "seed": 5}, None),
    "all of it": (
        {
            "softmax_type": "learnable",
            "window_size_left": 2,
            "dropout_p": 0.3,
            "seed": 6,
            "offset": 2,
        },
        (1, 1, SQ, SKV),
    ),
}


def values(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()


def qkv(
    options: dict[str, Any] | None = None, heads: int = H, groups: int = H_KV
) -> tuple[Tensor, Tensor, Tensor]:
    """Float64 leaves, in the format that the options name."""
    qkv_format = (options or {}).get("qkv_format", "bshd")

    def tokens(length: int, heads: int, width: int, seed: int) -> Tensor:
        leading = {"bshd": (B, length), "sbhd": (length, B), "thd": (2 * length,)}[qkv_format]
        return values(*leading, heads, width, seed=seed)

    return tokens(SQ, heads, D, 1), tokens(SKV, groups, D, 2), tokens(SKV, groups, DV, 3)


def together(
    extra: str, options: dict[str, Any]
) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """The differentiable arguments and the options of a case."""
    more, shape = EXTRAS[extra]
    options = {**with_tensors(options), **more}
    bias = values(*shape, seed=4) if shape else None
    offsets = values(H, seed=5) if more.get("softmax_type") == "learnable" else None
    return (*qkv(options), bias, offsets), options


# --------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize(("name", "mask"), FORMAT_MASKS)
def test_attention_passes_gradcheck(name: str, mask: str, extra: str) -> None:
    leaves, options = together(extra, {**FORMATS[name][0], "attn_mask_type": mask})
    assert torch.autograd.gradcheck(lambda *it: functional.attention(*it, **options), leaves)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gradients_of_shared_heads_are_those_of_copies(groups: int) -> None:
    q, k, v = qkv(groups=groups)
    copies = [it.detach().repeat_interleave(H // groups, 2).requires_grad_() for it in (k, v)]
    dout = values(B, SQ, H, DV, seed=7)
    shared = torch.autograd.grad(functional.attention(q, k, v), (k, v), dout)
    single = torch.autograd.grad(functional.attention(q, *copies), copies, dout)
    for gradient, several in zip(shared, single, strict=True):
        expected = several.unflatten(2, (groups, H // groups)).sum(3)
        torch.testing.assert_close(gradient, expected)


def test_parts_of_a_packed_tensor_are_taken_as_they_are() -> None:
    packed = values(B, SQ, 3, H, D, seed=8)
    apart = [it.detach().contiguous().requires_grad_() for it in packed.unbind(2)]
    outputs = [functional.attention(*it) for it in (packed.unbind(2), apart)]
    assert torch.equal(*outputs)
    (gradient,) = torch.autograd.grad(outputs[0].square().sum(), packed)
    expected = torch.autograd.grad(outputs[1].square().sum(), apart)
    torch.testing.assert_close(gradient, torch.stack(expected, 2))


def test_one_tensor_may_be_queries_keys_and_values() -> None:
    x = values(B, SQ, H, D, seed=9)
    assert torch.autograd.gradcheck(lambda it: functional.attention(it, it, it), (x,))


def test_only_what_requires_grad_gets_one() -> None:
    q, k, v = (it.detach() for it in qkv())
    bias = values(1, 1, SQ, SKV, seed=4)
    functional.attention(q, k, v, bias).sum().backward()
    assert bias.grad is not None
    assert q.grad is k.grad is v.grad is None


def test_nothing_is_saved_that_grows_with_the_product_of_the_lengths() -> None:
    q, k, v = qkv()
    saved: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it):
        functional.attention(q, k, v, attn_mask_type="causal", dropout_p=0.1, seed=1)
    out, lse = (B, SQ, H, DV), (B, H, SQ)
    assert sorted(saved) == sorted([*(tuple(it.shape) for it in (q, k, v)), out, lse])


def test_attention_compiles_with_its_gradient() -> None:
    torch._dynamo.reset()
    leaves, options = together("all of it", {**SPACED, "attn_mask_type": "padding_causal"})

    def program(*leaves: Tensor) -> Tensor:
        return functional.attention(*leaves, **options).square().sum()

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(program(*leaves), leaves)
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves), expected)


# -------------------------------------------------------------------- torch's own function


def torch_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """``F.scaled_dot_product_attention`` of bshd."""
    q, k, v = (it.transpose(1, 2) for it in (q, k, v))
    output = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    return output.transpose(1, 2)


def assert_alike(ours: Tensor, theirs: Tensor, leaves: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(ours, theirs)
    dout = values(*ours.shape, seed=7)
    gradients = [torch.autograd.grad(it, leaves, dout) for it in (ours, theirs)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_values_and_gradients_are_torchs(scale: float | None) -> None:
    leaves = qkv()
    assert_alike(
        functional.attention(*leaves, scale=scale), torch_attention(*leaves, scale=scale), leaves
    )


def test_causal_from_the_first_key_is_torchs() -> None:
    leaves = qkv()
    ours = functional.attention(*leaves, attn_mask_type="causal")
    assert_alike(ours, torch_attention(*leaves, is_causal=True), leaves)


def test_causal_to_the_last_key_is_torchs() -> None:
    leaves = qkv()
    ours = functional.attention(*leaves, attn_mask_type="causal_bottom_right")
    mask = torch.ones(SQ, SKV, dtype=torch.bool).tril(SKV - SQ)
    assert_alike(ours, torch_attention(*leaves, attn_mask=mask), leaves)


@pytest.mark.parametrize("shape", [(1, 1, SQ, SKV), (B, H, SQ, SKV), (1, H, 1, SKV)])
def test_a_bias_is_torchs(shape: tuple[int, ...]) -> None:
    leaves = (*qkv(), values(*shape, seed=4))
    ours = functional.attention(*leaves)
    assert_alike(ours, torch_attention(*leaves[:3], attn_mask=leaves[3]), leaves)


def test_a_bias_of_minus_infinity_is_torchs_mask() -> None:
    leaves = qkv()
    visible = values(B, H, SQ, SKV, seed=10) > -0.3
    visible[:, 1, 2] = False  # a query that sees no key
    bias = torch.zeros(visible.shape).masked_fill(~visible, -math.inf)
    ours = functional.attention(*leaves, bias)
    assert_alike(ours, torch_attention(*leaves, attn_mask=visible), leaves)


@pytest.mark.parametrize("where", ["queries and their gradients", "keys and values"])
def test_a_query_that_sees_no_key_has_no_part_in_what_is_not_finite(where: str) -> None:
    q, k, v = (values(1, tokens, 2, 8, seed=tokens).detach() for tokens in (5, 3, 4))
    k, v, dout = k[:, :3], v[:, :3], torch.ones_like(q)
    options = {"attn_mask_type": "causal_bottom_right"}  # the first two see none
    out, lse = ops.fused_attn_fwd(q, k, v, **options)
    expected = ops.fused_attn_bwd(dout, q, k, v, out, lse, **options)
    if where == "keys and values":
        k[:, 2], v[:, 2] = math.nan, math.inf
    else:
        q[:, 0], dout[:, :2] = math.nan, math.inf
    with te.with_preference("reference"):
        found, its_lse = ops.fused_attn_fwd(q, k, v, **options)
        dq, dk, dv, _, _ = ops.fused_attn_bwd(dout, q, k, v, out, lse, **options)
    assert not found[:, :2].any()
    assert bool((its_lse[..., :2] == -math.inf).all())
    assert not dq[:, :2].any()
    if where == "queries and their gradients":
        torch.testing.assert_close((dk, dv), expected[1:3])


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_torchs_one_by_one(causal: bool) -> None:
    leaves = qkv(PACKED)
    mask = "padding_causal" if causal else "padding"
    ours = functional.attention(*leaves, attn_mask_type=mask, **with_tensors(PACKED))
    sides = (LENGTHS["cu_seqlens_q"], *[LENGTHS["cu_seqlens_kv"]] * 2)
    parts = [
        torch_attention(
            *(it[a:b].unsqueeze(0) for it, (a, b) in zip(leaves, spans, strict=True)),
            is_causal=causal,
        ).squeeze(0)
        for spans in zip(*(pairwise(side) for side in sides), strict=True)
    ]
    after = ours.new_zeros(len(ours) - LENGTHS["cu_seqlens_q"][-1], H, DV)
    assert_alike(ours, torch.cat([*parts, after]), leaves)


# ---------------------------------------------------------------------------- the formats


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mask", PADDING)
def test_the_formats_agree(mask: str, extra: str) -> None:
    (q, k, v, bias, offsets), options = together(extra, {"attn_mask_type": mask, **LENGTHS})
    q, k, v = q.detach(), k.detach(), v.detach()
    out, lse = ops.fused_attn_fwd(q, k, v, bias, offsets, **options)
    swapped = (it.transpose(0, 1) for it in (q, k, v))
    sbhd, lse_of_sbhd = ops.fused_attn_fwd(*swapped, bias, offsets, qkv_format="sbhd", **options)
    assert torch.equal(sbhd.transpose(0, 1), out)
    assert torch.equal(lse_of_sbhd, lse)

    # In memory the second sequence comes first, with padding before and after both.
    begins = {"cu_seqlens_q_padded": [4, 1, 7], "cu_seqlens_kv_padded": [6, 0, 9]}
    packed = [torch.full((9, *it.shape[2:]), math.nan).double() for it in (q, k, v)]
    spans = []
    for n in range(B):
        for tensor, source, side in zip(packed, (q, k, v), ("q", "kv", "kv"), strict=True):
            begin, ends = begins[f"cu_seqlens_{side}_padded"][n], LENGTHS[f"cu_seqlens_{side}"]
            length = ends[n + 1] - ends[n]
            tensor[begin : begin + length] = source[n, :length]
            spans.append((n, begin, length)) if tensor is packed[0] else None
    call = {"qkv_format": "thd", "max_seqlen_q": SQ, "max_seqlen_kv": SKV, **with_tensors(begins)}
    thd, lse_of_thd = ops.fused_attn_fwd(*packed, bias, offsets, **options, **call)
    outside = torch.ones(9, dtype=torch.bool)
    for n, begin, length in spans:
        rows = slice(begin, begin + length)
        outside[rows] = False
        torch.testing.assert_close(thd[rows], out[n, :length])
        torch.testing.assert_close(lse_of_thd[:, rows], lse[n, :, :length])
    assert not thd[outside].any()
    assert lse_of_thd[:, outside].eq(-math.inf).all()


def test_longer_limits_than_needed_change_nothing() -> None:
    leaves, options = together("dropout", {**PACKED, "attn_mask_type": "padding"})
    expected = functional.attention(*leaves, **options)
    options |= {"max_seqlen_q": SQ + 4, "max_seqlen_kv": SKV + 3}
    torch.testing.assert_close(functional.attention(*leaves, **options), expected)


# --------------------------------------------------------------- which keys a query sees


def weights(
    sq: int, skv: int, *, queries: Tensor | None = None, heads: int = 1, **options: Any
) -> Tensor:
    """``[h, sq, skv]``: the weights of one sequence; all scores are 0 unless queries are given."""
    q = torch.zeros(1, sq, heads, 2) if queries is None else queries
    k = torch.zeros(1, skv, heads, 2)
    v = torch.eye(skv)[None, :, None].expand(-1, -1, heads, -1)
    return ops.fused_attn_fwd(q, k, v, **options)[0][0].transpose(0, 1)


SEEN: dict[str, tuple[dict[str, Any], list[str]]] = {
    # For each query, the keys that it sees (x).
    "everything": ({}, ["xxxxx", "xxxxx", "xxxxx"]),
    "causal": ({"attn_mask_type": "causal"}, ["x----", "xx---", "xxx--"]),
    "causal, more queries": ({"attn_mask_type": "causal"}, ["x-", "xx", "xx", "xx"]),
    "bottom right": ({"attn_mask_type": "causal_bottom_right"}, ["xxx--", "xxxx-", "xxxxx"]),
    "bottom right, more queries": (
        {"attn_mask_type": "causal_bottom_right"},
        ["--", "--", "x-", "xx"],
    ),
    "to the left": ({"window_size_left": 1}, ["-xxxx", "--xxx", "---xx"]),
    "to the right": ({"window_size_right": 1}, ["xxxx-", "xxxxx", "xxxxx"]),
    "only the diagonal": (
        {"window_size_left": 0, "window_size_right": 0},
        ["--x--", "---x-", "----x"],
    ),
    "both, more queries": (
        {"window_size_left": 1, "window_size_right": 0},
        ["--", "x-", "xx"],
    ),
    "causal and to the left": (
        {"attn_mask_type": "causal", "window_size_left": 1},
        ["x----", "xx---", "-xx--"],
    ),
    "bottom right and to the left": (
        {"attn_mask_type": "causal_bottom_right", "window_size_left": 1},
        ["-xx--", "--xx-", "---xx"],
    ),
    "causal, which a window to the right does not undo": (
        {"attn_mask_type": "causal", "window_size_right": 2},
        ["x----", "xx---", "xxx--"],
    ),
    "lengths": (
        {"attn_mask_type": "padding", "cu_seqlens_q": [0, 2], "cu_seqlens_kv": [0, 3]},
        ["xxx--", "xxx--", "-----"],
    ),
    "lengths, causal": (
        {"attn_mask_type": "padding_causal", "cu_seqlens_q": [0, 2], "cu_seqlens_kv": [0, 3]},
        ["x----", "xx---", "-----"],
    ),
    "lengths, bottom right": (
        {
            "attn_mask_type": "padding_causal_bottom_right",
            "cu_seqlens_q": [0, 2],
            "cu_seqlens_kv": [0, 3],
        },
        ["xx---", "xxx--", "-----"],
    ),
    "lengths and a window": (
        {
            "attn_mask_type": "padding",
            "cu_seqlens_q": [0, 2],
            "cu_seqlens_kv": [0, 3],
            "window_size_left": 0,
        },
        ["-xx--", "--x--", "-----"],
    ),
}


@pytest.mark.parametrize("case", SEEN)
def test_each_query_sees_its_keys(case: str) -> None:
    options, rows = SEEN[case]
    found = weights(len(rows), len(rows[0]), **with_tensors(options))[0]
    expected = [[float(key == "x") / max(row.count("x"), 1) for key in row] for row in rows]
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("softmax_type", ["vanilla", "off_by_one", "learnable"])
def test_a_query_that_sees_no_key_is_zero_and_passes_no_gradient_on(softmax_type: str) -> None:
    q, k, v = values(1, 4, 2, D, seed=1), values(1, 2, 2, D, seed=2), values(1, 2, 2, D, seed=3)
    offsets = values(2, seed=5) if softmax_type == "learnable" else None
    options = {"attn_mask_type": "causal_bottom_right", "softmax_type": softmax_type}
    out = functional.attention(q, k, v, None, offsets, **options)
    _, lse = ops.fused_attn_fwd(q, k, v, None, offsets, **options)
    assert not out[:, :2].any()
    assert lse[..., :2].eq(-math.inf).all()
    assert lse[..., 2:].isfinite().all()
    leaves = [it for it in (q, k, v, offsets) if it is not None]
    gradients = torch.autograd.grad(out[:, :2].sum(), leaves)
    assert not any(bool(it.any()) for it in gradients)


# ------------------------------------------------------------- the denominator and its log


@pytest.mark.parametrize("softmax_type", ["vanilla", "off_by_one", "learnable"])
def test_lse_is_the_logarithm_of_the_denominator(softmax_type: str) -> None:
    q, k, v = qkv()
    offsets = values(H, seed=5) if softmax_type == "learnable" else None
    out, lse = ops.fused_attn_fwd(q, k, v, None, offsets, softmax_type=softmax_type)
    terms = (torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / math.sqrt(D)).exp()
    more = {"vanilla": 0.0, "off_by_one": 1.0}.get(softmax_type)
    if offsets is not None:
        more = offsets.exp()[:, None]
    total = terms.sum(-1) + more
    torch.testing.assert_close(lse, total.log())
    summed = torch.einsum("bhij,bjhd->bihd", terms, v.repeat_interleave(2, 2))
    torch.testing.assert_close(out, summed / total.transpose(1, 2)[..., None])


def test_lse_of_a_narrow_dtype_is_float32() -> None:
    q, k, v = (it.detach().bfloat16() for it in qkv())
    out, lse = ops.fused_attn_fwd(q, k, v)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def test_keys_in_parts_make_the_whole() -> None:
    # As in a ring of devices: the backward of each part gets the lse of the whole.
    q, k, v = (it.detach() for it in qkv())
    dout = values(B, SQ, H, DV, seed=7).detach()
    out, lse = ops.fused_attn_fwd(q, k, v)
    parts = [(k[:, some], v[:, some]) for some in (slice(0, 2), slice(2, None))]
    outs, logs = zip(*(ops.fused_attn_fwd(q, *part) for part in parts), strict=True)
    torch.testing.assert_close(torch.logaddexp(*logs), lse)
    shares = [(log - lse).exp().transpose(1, 2)[..., None] for log in logs]
    torch.testing.assert_close(outs[0] * shares[0] + outs[1] * shares[1], out)
    dq, dk, dv, *_ = ops.fused_attn_bwd(dout, q, k, v, out, lse)
    first, second = (ops.fused_attn_bwd(dout, q, *part, out, lse) for part in parts)
    torch.testing.assert_close(first[0] + second[0], dq)
    torch.testing.assert_close(torch.cat([first[1], second[1]], 1), dk)
    torch.testing.assert_close(torch.cat([first[2], second[2]], 1), dv)


# ------------------------------------------------------------------------------- dropout


def test_the_first_row_is_dropped_by_the_words_of_the_first_blocks() -> None:
    options = {"seed": 77, "offset": 9}
    found = weights(2, 41, dropout_p=0.4, **options)[0, 0]
    words = [word for block in range(11) for word in philox_block(block + (9 << 64), 77)]
    kept = torch.tensor([word >= int(0.4 * 2**32) for word in words[:41]])
    torch.testing.assert_close(found, kept / (41 * 0.6))


def test_what_is_dropped_depends_on_neither_sizes_nor_masks() -> None:
    options = {"dropout_p": 0.5, "seed": 3}
    kept = weights(9, 14, heads=2, **options) > 0
    assert torch.equal(weights(4, 6, heads=2, **options) > 0, kept[:, :4, :6])
    causal = weights(9, 14, heads=2, attn_mask_type="causal", **options) > 0
    assert torch.equal(causal, kept.tril())
    assert not torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[0, 0], kept[0, 1])


def test_each_sequence_drops_its_own() -> None:
    q = torch.zeros(2, 4, 1, 2)
    v = torch.eye(4)[None, :, None].expand(2, -1, -1, -1)
    out, _ = ops.fused_attn_fwd(q, q, v, dropout_p=0.5, seed=3)
    assert not torch.equal(out[0], out[1])


@pytest.mark.parametrize("probability", [0.1, 0.7])
def test_as_many_are_dropped_as_asked_for_and_the_mean_is_kept(probability: float) -> None:
    found = weights(100, 100, dropout_p=probability, seed=11)[0]
    deviation = math.sqrt(probability * (1 - probability) / found.numel())
    assert found.eq(0).double().mean().item() == pytest.approx(probability, abs=4 * deviation)
    assert found[found > 0].unique().tolist() == pytest.approx([1 / (100 * (1 - probability))])


def test_another_seed_and_another_offset_drop_others() -> None:
    calls = [{"seed": 1}, {"seed": 2}, {"seed": 1, "offset": 1}, {"seed": 1, "offset": 2**32}]
    found = {tuple((weights(8, 8, dropout_p=0.5, **it) > 0).flatten().tolist()) for it in calls}
    assert len(found) == len(calls)


def test_the_statistics_know_nothing_of_dropout() -> None:
    q, k, v = qkv()
    expected = ops.fused_attn_fwd(q, k, v)[1]
    assert torch.equal(ops.fused_attn_fwd(q, k, v, dropout_p=0.9, seed=1)[1], expected)


# ------------------------------------------------------------------------------- the host


@pytest.mark.parametrize("qkv_format", ["bshd", "thd"])
def test_an_infinite_gradient_stays_in_its_sequence(qkv_format: str) -> None:
    """Gradients of other sequences, and of tokens in no sequence, are not affected."""
    lengths = {name: torch.tensor(it, dtype=torch.int32) for name, it in LENGTHS.items()}
    options: dict[str, Any] = {"attn_mask_type": "padding_causal", **lengths}
    if qkv_format == "thd":
        options |= {"qkv_format": "thd", "max_seqlen_q": SQ, "max_seqlen_kv": SKV}
    sizes = ((B, SQ), (B, SKV)) if qkv_format == "bshd" else ((7,), (9,))
    q = torch.randn(*sizes[0], H, D)
    k, v = torch.randn(*sizes[1], H, D), torch.randn(*sizes[1], H, D)
    dout = torch.randn_like(q)
    with te.with_preference("reference"):
        out, lse = ops.fused_attn_fwd(q, k, v, **options)
        usual = ops.fused_attn_bwd(dout, q, k, v, out, lse, **options)[:3]
        (dout[0] if qkv_format == "bshd" else dout)[1] = torch.inf
        found = ops.fused_attn_bwd(dout, q, k, v, out, lse, **options)[:3]
    for gradient, before, ends in zip(found, usual, ("q", "kv", "kv"), strict=True):
        end = LENGTHS[f"cu_seqlens_{ends}"][1]
        first, others = (gradient, gradient[end:])
        if qkv_format == "bshd":
            first, others = gradient[0], gradient[1:]
            assert not first[end:].any()
        assert not first[:end].isfinite().all()
        assert torch.equal(others, before[end:] if qkv_format == "thd" else before[1:])


def test_no_values_are_read_back() -> None:
    # Reading a value of a meta tensor fails.
    leaves, options = together("all of it", {**SPACED, "attn_mask_type": "padding_causal"})
    q, k, v, bias, offsets = (it.detach().to("meta") for it in leaves if it is not None)
    options = {
        name: it.to("meta") if isinstance(it, Tensor) else it for name, it in options.items()
    }
    with te.with_preference("reference"):
        out, lse = ops.fused_attn_fwd(q, k, v, bias, offsets, **options)
        gradients = ops.fused_attn_bwd(out, q, k, v, out, lse, bias, offsets, **options)
    assert [it.shape for it in gradients] == [it.shape for it in (q, k, v, bias, offsets)]


# --------------------------------------------------------------------------------- errors

INT = torch.int32
ENDS = torch.tensor([0, 3, 5], dtype=INT)
BOTH = {"cu_seqlens_q": ENDS, "cu_seqlens_kv": ENDS}
THD: dict[str, Any] = {
    "q": torch.zeros(6, H, D),
    "k": torch.zeros(10, H_KV, D),
    "v": torch.zeros(10, H_KV, DV),
    "qkv_format": "thd",
    "attn_mask_type": "padding",
    "max_seqlen_q": 3,
    "max_seqlen_kv": 3,
    **BOTH,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a format of another name": ({"qkv_format": "bhsd"}, "qkv_format"),
    "queries of another format": ({"q": torch.zeros(6, H, D)}, "q"),
    "keys of another format": ({"k": torch.zeros(10, H_KV, D)}, "k"),
    "keys of another batch": ({"k": torch.zeros(3, SKV, H_KV, D)}, "k"),
    "keys of another width": ({"k": torch.zeros(B, SKV, H_KV, D + 1)}, "k"),
    "keys of another dtype": ({"k": torch.zeros(B, SKV, H_KV, D, dtype=torch.half)}, "k"),
    "heads that make no groups": ({"k": torch.zeros(B, SKV, 3, D)}, "k"),
    "no heads of keys": ({"k": torch.zeros(B, SKV, 0, D)}, "k"),
    "no features": ({"q": torch.zeros(B, SQ, H, 0)}, "q"),
    "fewer values than keys": ({"v": torch.zeros(B, SKV - 1, H_KV, DV)}, "v"),
    "fewer heads of values": ({"v": torch.zeros(B, SKV, 1, DV)}, "v"),
    "values of no width": ({"v": torch.zeros(B, SKV, H_KV, 0)}, "v"),
    "a mask of another name": ({"attn_mask_type": "arbitrary"}, "attn_mask_type"),
    "lengths without a mask of lengths": (BOTH, "cu_seqlens_q"),
    "a mask of lengths without lengths": ({"attn_mask_type": "padding"}, "cu_seqlens_q"),
    "lengths of the queries alone": (
        {"attn_mask_type": "padding", "cu_seqlens_q": ENDS},
        "cu_seqlens_kv",
    ),
    "lengths of more sequences": (
        {"attn_mask_type": "padding", **BOTH, "cu_seqlens_kv": torch.zeros(4, dtype=INT)},
        "cu_seqlens_kv",
    ),
    "lengths of another dtype": (
        {"attn_mask_type": "padding", **BOTH, "cu_seqlens_q": ENDS.long()},
        "cu_seqlens_q",
    ),
    "space in a format without": (
        {"attn_mask_type": "padding", **BOTH, "cu_seqlens_q_padded": ENDS},
        "cu_seqlens_q_padded",
    ),
    "a limit in a format without": ({"max_seqlen_kv": 5}, "max_seqlen_kv"),
    "thd without a mask of lengths": ({**THD, "attn_mask_type": "causal"}, "attn_mask_type"),
    "thd without lengths": ({**THD, "cu_seqlens_kv": None}, "cu_seqlens_kv"),
    "thd without a limit": ({**THD, "max_seqlen_q": None}, "max_seqlen_q"),
    "thd with a limit that is no integer": ({**THD, "max_seqlen_kv": 3.0}, "max_seqlen_kv"),
    "space of fewer sequences": (
        {**THD, "cu_seqlens_kv_padded": ENDS[:2]},
        "cu_seqlens_kv_padded",
    ),
    "a window below -1": ({"window_size_left": -2}, "window_size_left"),
    "a window that is no integer": ({"window_size_right": 1.0}, "window_size_right"),
    "a bias of other lengths": ({"bias": torch.zeros(1, 1, SQ, SKV - 1)}, "bias"),
    "a bias of three dimensions": ({"bias": torch.zeros(1, SQ, SKV)}, "bias"),
    "a bias elsewhere": ({"bias": torch.zeros(1, 1, SQ, SKV, device="meta")}, "bias"),
    "a softmax of another name": ({"softmax_type": "none"}, "softmax_type"),
    "learnable offsets that are missing": ({"softmax_type": "learnable"}, "softmax_offset"),
    "offsets of too few heads": (
        {"softmax_type": "learnable", "softmax_offset": torch.zeros(H - 1)},
        "softmax_offset",
    ),
    "offsets that nobody looks at": ({"softmax_offset": torch.zeros(H)}, "softmax_offset"),
    "a probability above 1": ({"dropout_p": 1.5}, "dropout_p"),
    "a negative seed": ({"seed": -1}, "seed"),
    "an offset of 64 bits": ({"offset": 2**63}, "offset"),
    "a scale that is no number": ({"scale": "1"}, "scale"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_call_that_breaks_the_contract_names_the_argument(what: str) -> None:
    change, argument = REFUSED[what]
    q, k, v = (it.detach().float() for it in qkv())
    with pytest.raises(ArgumentError) as raised:
        ops.fused_attn_fwd(**{"q": q, "k": k, "v": v, **change})
    assert raised.value.argument == argument


@pytest.mark.parametrize("sizes", [(2**11 + 1, 1, 1, 2**10), (1, 2**22 + 1, 1, 1)])
def test_dropout_refuses_sizes_for_which_it_has_no_numbers(sizes: tuple[int, ...]) -> None:
    b, sq, skv, heads = sizes
    q, k = (torch.zeros(1, device="meta").expand(b, it, heads, 1) for it in (sq, skv))
    ops.fused_attn_fwd.check(q, k, k)
    with pytest.raises(ArgumentError, match="dropout_p"):
        ops.fused_attn_fwd.check(q, k, k, dropout_p=0.1)
    with pytest.raises(ArgumentError, match="dropout_p"):
        ops.fused_attn_fwd.check(k, q, q, dropout_p=0.1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dout", torch.zeros(B, SQ, H, DV + 1)),
        ("dout", torch.zeros(B, SQ, H, DV).double()),
        ("out", torch.zeros(B, SQ, H_KV, DV)),
        ("softmax_lse", torch.zeros(B, SQ, H)),
        ("softmax_lse", torch.zeros(B, H, SQ).double()),
        ("softmax_lse", torch.zeros(B, H, SQ, device="meta")),
    ],
)
def test_the_backward_refuses_what_the_forward_did_not_return(name: str, value: Tensor) -> None:
    q, k, v = (it.detach().float() for it in qkv())
    out, lse = ops.fused_attn_fwd(q, k, v)
    call = {"dout": out, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse, name: value}
    with pytest.raises(ArgumentError) as raised:
        ops.fused_attn_bwd(**call)
    assert raised.value.argument == name
