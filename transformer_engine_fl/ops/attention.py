"""Fused attention: softmax of scaled scores, times the values, in one operator.

**Tokens.** Queries are ``[b, sq, h, d]`` (``bshd``), ``[sq, b, h, d]`` (``sbhd``) or
``[tq, h, d]`` (``thd``, sequences of several lengths in one dimension); keys are the same
with skv, tkv and h_kv heads, and values have a width dv of their own. Query head i uses
key head ``i // (h / h_kv)``. Any strides will do: queries, keys and values that are packed
in one tensor are passed as three views of it. Paged keys and values are not covered.

**Sequences.** Under the ``padding`` masks sequence n has
``cu_seqlens_q[n + 1] - cu_seqlens_q[n]`` queries; ``cu_seqlens_kv`` gives the number of its keys
likewise. In ``bshd`` and ``sbhd`` they are the first tokens of row n. In ``thd`` they begin at
``cu_seqlens_q[n]``, or at ``cu_seqlens_q_padded[n]`` where there is space between sequences,
and no sequence is longer than ``max_seqlen_q`` and ``max_seqlen_kv``, which take the place of sq
and skv. Tokens outside every sequence are ignored: they may be NaN.

**Visible keys.** Let a sequence have lq queries and lkv keys (sq and skv without padding).
Query i has the diagonal ``c = i`` under ``causal`` and ``padding_causal``, and
``c = i + lkv - lq`` under every other mask, which aligns the last query with the last
key. It sees key j if

    ``c - window_size_left <= j``, unless ``window_size_left`` is -1, and
    ``j <= c + window_size_right``, unless ``window_size_right`` is -1, and
    ``j <= c``, under the four causal masks.

**Weights.** ``s_ij = scale * <q_i, k_j> + bias_ij``. A key with the score -inf counts as not
seen. The weight of a key that is seen is ``p_ij = exp(s_ij - lse_i)`` with

    ``lse_i = log(exp(o) + sum over j of exp(s_ij))``,

where o is -inf for the softmax type ``vanilla``, 0 for ``off_by_one``, and the head's
``softmax_offset`` for ``learnable``. For a query that sees no key, and for a place that belongs
to no sequence, the output is 0, lse is -inf whatever the softmax type, and no gradient passes.

**Dropout.** ``out_i = sum over j of D_ij * p_ij * v_j / (1 - dropout_p)``, where D_ij is 0 if
the weight is dropped and 1 otherwise (for dropout_p = 1, out is 0). The weight of query i and
key j of sequence n, both counted within the sequence, has the index

    ``w = ((n * h + head) * 2**22 + i) * 2**22 + j``

and takes word ``w % 4`` of the block that the generator of the dropout family gives for the
counter ``(lo(w // 4), hi(w // 4), lo(offset), hi(offset))`` and the key ``(lo(seed), hi(seed))``.
The weight is kept if its word is at least ``floor(dropout_p * 2**32)``. So neither the format nor
the sizes change what is dropped. The index limits ``b * h`` to 2**21, and sq and skv to 2**22,
with dropout.

**Precision.** Scores, softmax and sums are in float32 (float64 for float64). Weights and their
gradients may be rounded to the dtype of the queries before the matrix products that use them, as
tensor cores need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.core.contract import Backward, Sample, Tolerance, contract
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.ops import _checks as check
from transformer_engine_fl.ops._dtypes import FLOATS, math_dtype
from transformer_engine_fl.ops._samples import normal
from transformer_engine_fl.ops.dropout import philox_block

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["fused_attn_bwd", "fused_attn_fwd"]

QUERIES = {"bshd": "[b, sq, h, d]", "sbhd": "[sq, b, h, d]", "thd": "[tq, h, d]"}
KEYS = {"bshd": "[b, skv, h_kv, d]", "sbhd": "[skv, b, h_kv, d]", "thd": "[tkv, h_kv, d]"}

TOP_LEFT = ("causal", "padding_causal")
"""The masks that align the first query with the first key."""

CAUSAL = (*TOP_LEFT, "causal_bottom_right", "padding_causal_bottom_right")
PADDING = ("padding", "padding_causal", "padding_causal_bottom_right")
MASKS = ("no_mask", "padding", *CAUSAL)
SOFTMAX_TYPES = ("vanilla", "off_by_one", "learnable")

# For the narrow dtypes: half a unit in the last place, plus about the error from rounding the
# weights, and their gradients, before they are multiplied by values and keys. In dq and dk large
# terms cancel out, so the relative error is larger. A row is one head of a token: under a causal
# mask the first rows average few values, and so are larger than most.
FORWARD_TOLERANCE = {
    "float32": Tolerance(rtol=5e-6, atol=5e-6, by_row=True),
    "bfloat16": Tolerance(rtol=2**-8, atol=2**-6, by_row=True),
    "float16": Tolerance(rtol=2**-11, atol=2**-9, by_row=True),
    "float64": Tolerance(rtol=1e-13, atol=1e-13, by_row=True),
}
BACKWARD_TOLERANCE = {
    "float32": Tolerance(rtol=1e-5, atol=1e-5, by_row=True),
    "bfloat16": Tolerance(rtol=2**-8, atol=2**-5, by_row=True),
    "float16": Tolerance(rtol=2**-11, atol=2**-7, by_row=True),
    "float64": Tolerance(rtol=1e-12, atol=1e-12, by_row=True),
}

_LIMIT = 2**63
_POSITIONS = 2**22
"""The largest number of queries, and of keys, that a sequence may have with dropout."""

_HEADS = 2**21


def extents(
    q: Tensor,
    k: Tensor,
    qkv_format: str,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
) -> tuple[int, int, int]:
    """``(b, sq, skv)``: the number of sequences, and the most queries and keys of one."""
    if qkv_format == "thd":
        assert cu_seqlens_q is not None
        assert max_seqlen_q is not None
        assert max_seqlen_kv is not None
        return cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_kv
    batch, length = qkv_format.index("b"), qkv_format.index("s")
    return q.shape[batch], q.shape[length], k.shape[length]


# ------------------------------------------------------------------------------ checks


def _check_tokens(op: str, q: Any, k: Any, v: Any, qkv_format: Any) -> None:
    check.is_choice(op, "qkv_format", qkv_format, QUERIES)
    axes = {"q": QUERIES[qkv_format], "k": KEYS[qkv_format]}
    q = check.is_tensor(op, "q", q, dtypes=FLOATS)
    same = (check.dtype_name(q.dtype),)
    k = check.is_tensor(op, "k", k, dtypes=same)
    v = check.is_tensor(op, "v", v, dtypes=same)
    for name, tensor in (("q", q), ("k", k)):
        if tensor.ndim != len(qkv_format):
            expected = f"{axes[name]}, for {qkv_format!r}"
            raise ArgumentError(op, name, check.describe(tensor), expected)
        if not (tensor.shape[-2] and tensor.shape[-1]):
            raise ArgumentError(op, name, check.describe(tensor), "at least one head and feature")
    if "b" in qkv_format:
        batch = qkv_format.index("b")
        if k.shape[batch] != q.shape[batch]:
            expected = f"{axes['k']} with b = {q.shape[batch]}, as 'q' has"
            raise ArgumentError(op, "k", check.describe(k), expected)
    if k.shape[-1] != q.shape[-1] or q.shape[-2] % k.shape[-2]:
        expected = f"d = {q.shape[-1]}, as 'q' has, and an h_kv that divides {q.shape[-2]}"
        raise ArgumentError(op, "k", check.describe(k), expected)
    if v.ndim != k.ndim or not v.shape[-1]:
        expected = f"{axes['k'][:-2]}dv], a value for each key"
        raise ArgumentError(op, "v", check.describe(v), expected)
    check.has_shape(op, "v", v, (*k.shape[:-1], v.shape[-1]), "a value for each key")


def _check_sequences(
    op: str,
    q: Tensor,
    qkv_format: str,
    attn_mask_type: Any,
    given: dict[str, Any],
    padded: dict[str, Any],
    longest: dict[str, Any],
) -> None:
    """Check that offsets and lengths are given exactly where the format or the mask needs them."""
    check.is_choice(op, "attn_mask_type", attn_mask_type, MASKS)
    packed = qkv_format == "thd"
    if packed and attn_mask_type not in PADDING:
        expected = f"one of {', '.join(PADDING)}, as sequences in 'thd' differ in length"
        raise ArgumentError(op, "attn_mask_type", repr(attn_mask_type), expected)
    needed = attn_mask_type in PADDING
    sequences = None if packed else q.shape[qkv_format.index("b")]
    for name, value in given.items():
        if not needed:
            _is_absent(op, name, value, f"{attn_mask_type!r} has no lengths")
            continue
        offsets = check.is_tensor(op, name, value, dtypes=("int32",))
        if offsets.ndim != 1 or not offsets.shape[0]:
            expected = "[b + 1], the cumulative lengths of all sequences, from 0"
            raise ArgumentError(op, name, check.describe(value), expected)
        if sequences is None:
            sequences = offsets.shape[0] - 1
        check.has_shape(op, name, offsets, (sequences + 1,), "[b + 1], from 0 on")
    for name, value in padded.items():
        if value is None:
            continue
        if not packed:
            _is_absent(op, name, value, f"{qkv_format!r} has none")
        assert sequences is not None
        offsets = check.is_tensor(op, name, value, dtypes=("int32",))
        check.has_shape(op, name, offsets, (sequences + 1,), "[b + 1], as the lengths have")
    for name, value in longest.items():
        if packed:
            check.is_integer(op, name, value)
        else:
            _is_absent(op, name, value, f"{qkv_format!r} has none")


def _is_absent(op: str, name: str, value: Any, why: str) -> None:
    if value is not None:
        raise ArgumentError(op, name, check.describe(value), f"None: {why}")


def _check_forward(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    softmax_offset: Any,
    scale: Any,
    qkv_format: Any,
    attn_mask_type: Any,
    window_size_left: Any,
    window_size_right: Any,
    softmax_type: Any,
    dropout_p: Any,
    seed: Any,
    offset: Any,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any,
    cu_seqlens_q_padded: Any,
    cu_seqlens_kv_padded: Any,
    max_seqlen_q: Any,
    max_seqlen_kv: Any,
) -> None:
    _check_tokens(op, q, k, v, qkv_format)
    given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    padded = {
        "cu_seqlens_q_padded": cu_seqlens_q_padded,
        "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
    }
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv}
    _check_sequences(op, q, qkv_format, attn_mask_type, given, padded, longest)
    b, sq, skv = extents(q, k, qkv_format, cu_seqlens_q, max_seqlen_q, max_seqlen_kv)
    heads = q.shape[-2]
    if scale is not None:
        check.is_number(op, "scale", scale)
    check.is_integer(op, "window_size_left", window_size_left, at_least=-1)
    check.is_integer(op, "window_size_right", window_size_right, at_least=-1)
    if bias is not None:
        bias = check.is_tensor(op, "bias", bias, dtypes=FLOATS, min_ndim=4)
        check.expands_to(op, "bias", bias, (b, heads, sq, skv), "[b, h, sq, skv]")
    check.is_choice(op, "softmax_type", softmax_type, SOFTMAX_TYPES)
    if softmax_type == "learnable":
        offsets = check.is_tensor(op, "softmax_offset", softmax_offset, dtypes=FLOATS)
        check.has_shape(op, "softmax_offset", offsets, (heads,), "[h], as 'q' has heads")
    else:
        _is_absent(op, "softmax_offset", softmax_offset, f"{softmax_type!r} has no offsets")
    _check_dropout(op, dropout_p, seed, offset, (b * heads, sq, skv))
    tensors = {"q": q, "k": k, "v": v, "bias": bias, "softmax_offset": softmax_offset}
    check.same_device(op, "q", {**tensors, **given, **padded})


def _check_dropout(
    op: str, dropout_p: Any, seed: Any, offset: Any, sizes: tuple[int, int, int]
) -> None:
    check.is_number(op, "dropout_p", dropout_p, at_least=0, at_most=1)
    check.is_integer(op, "seed", seed, below=_LIMIT)
    check.is_integer(op, "offset", offset, below=_LIMIT)
    rows, sq, skv = sizes
    if dropout_p > 0 and (rows > _HEADS or sq > _POSITIONS or skv > _POSITIONS):
        given = f"{dropout_p} with b * h = {rows}, sq = {sq}, skv = {skv}"
        expected = f"0, or b * h of at most {_HEADS}, sq and skv of at most {_POSITIONS}"
        raise ArgumentError(op, "dropout_p", given, expected)


def _check_backward(
    op: str, dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, **others: Any
) -> None:
    _check_forward(op, q=q, k=k, v=v, **others)
    of_out = (*q.shape[:-1], v.shape[-1])
    for name, value in (("dout", dout), ("out", out)):
        tensor = check.is_tensor(op, name, value, dtypes=(check.dtype_name(q.dtype),))
        check.has_shape(op, name, tensor, of_out, "that of 'q', with the width of 'v'")
    dtypes = (check.dtype_name(math_dtype(q.dtype)),)
    lse = check.is_tensor(op, "softmax_lse", softmax_lse, dtypes=dtypes)
    shape = _lse_shape(q, others["qkv_format"])
    check.has_shape(op, "softmax_lse", lse, shape, "as the forward returned it")
    check.same_device(op, "q", {"q": q, "dout": dout, "out": out, "softmax_lse": lse})


def _lse_shape(q: Tensor, qkv_format: str) -> tuple[int, ...]:
    """``[b, h, sq]``, or ``[h, tq]`` for thd."""
    return tuple(q.shape[qkv_format.index(axis)] for axis in ("bhs" if "b" in qkv_format else "ht"))


# ------------------------------------------------------------------------------ oracles


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence of a call, and the indices that select it in the call's tensors.

    Attributes:
        number: n.
        queries, keys: index of its tokens in tensors of the format.
        lse: index of its ``[h, lq]`` in softmax_lse.
        lq, lkv: the number of its queries and keys.
    """

    number: int
    queries: tuple[Any, ...]
    keys: tuple[Any, ...]
    lse: tuple[Any, ...]
    lq: int
    lkv: int


def spans(
    q: Tensor,
    k: Tensor,
    *,
    qkv_format: str = "bshd",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    **others: Any,
) -> Iterator[Span]:
    """Every sequence of a call; reads the lengths on the host."""

    def places(
        tokens: Tensor, lengths: Tensor | None, begins: Tensor | None
    ) -> Iterator[tuple[int, int]]:
        """(begin, length) of each sequence; except in thd, each begins at 0."""
        if lengths is None:
            batch, length = (tokens.shape[qkv_format.index(axis)] for axis in "bs")
            yield from [(0, length)] * batch
            return
        ends = lengths.tolist()
        starts = (lengths if begins is None else begins).tolist()
        for place, end in enumerate(ends[1:]):
            yield starts[place] if qkv_format == "thd" else 0, end - ends[place]

    pairs = zip(
        places(q, cu_seqlens_q, cu_seqlens_q_padded),
        places(k, cu_seqlens_kv, cu_seqlens_kv_padded),
        strict=True,
    )
    for n, ((begin, lq), (first, lkv)) in enumerate(pairs):
        rows, columns = slice(begin, begin + lq), slice(first, first + lkv)
        if qkv_format == "thd":
            yield Span(n, (rows,), (columns,), (slice(None), rows), lq, lkv)
        elif qkv_format == "sbhd":
            yield Span(n, (rows, n), (columns, n), (n, slice(None), rows), lq, lkv)
        else:
            yield Span(n, (n, rows), (n, columns), (n, slice(None), rows), lq, lkv)


def hidden_keys(
    lq: int,
    lkv: int,
    *,
    attn_mask_type: str = "no_mask",
    window_size_left: int = -1,
    window_size_right: int = -1,
    **others: Any,
) -> list[list[bool]]:
    """``[lq][lkv]``: whether query i does not see key j."""

    def sees(i: int, j: int) -> bool:
        c = i if attn_mask_type in TOP_LEFT else i + lkv - lq
        return (
            (window_size_left == -1 or c - window_size_left <= j)
            and (window_size_right == -1 or j <= c + window_size_right)
            and (attn_mask_type not in CAUSAL or j <= c)
        )

    return [[not sees(i, j) for j in range(lkv)] for i in range(lq)]


def bias_of(bias: Tensor, it: Span) -> Tensor:
    """``[h or 1, lq or 1, lkv or 1]``: what is added to the scores of one sequence."""
    heads = bias[it.number if bias.shape[0] > 1 else 0]
    rows = heads[:, : it.lq] if bias.shape[2] > 1 else heads
    return rows[..., : it.lkv] if bias.shape[3] > 1 else rows


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, it: Span, *, scale: float | None, **options: Any
) -> Tensor:
    """``[h, lq, lkv]`` of one sequence; -inf where a key is not seen."""
    import torch

    queries, keys = q[it.queries], k[it.keys]
    group = q.shape[-2] // k.shape[-2]
    heads = [queries[:, i] @ keys[:, i // group].T for i in range(q.shape[-2])]
    scores = torch.stack(heads) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias_of(bias, it)
    hidden = torch.tensor(hidden_keys(it.lq, it.lkv, **options), dtype=torch.bool, device=q.device)
    return scores.masked_fill(hidden.view(it.lq, it.lkv), -torch.inf)


def _kept(
    it: Span,
    heads: int,
    device: torch.device,
    *,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    **others: Any,
) -> Tensor:
    """``[h, lq, lkv]``: ``D / (1 - dropout_p)``, float64."""
    import torch

    if dropout_p == 0:
        return torch.ones(heads, it.lq, it.lkv, dtype=torch.float64, device=device)
    flags = torch.zeros(heads, it.lq, it.lkv, dtype=torch.float64)
    for head in range(heads):
        for i in range(it.lq):
            row = ((it.number * heads + head) * 2**22 + i) * 2**22
            words: list[int] = []
            for j in range(0, it.lkv, 4):
                words += philox_block((row + j) // 4 + (offset << 64), seed)
            kept = [float(word >= int(dropout_p * 2**32)) for word in words[: it.lkv]]
            flags[head, i] = torch.tensor(kept, dtype=torch.float64)
    return (flags / (1 - dropout_p) if dropout_p < 1 else flags).to(device)


def _offsets(q: Tensor, softmax_offset: Tensor | None, softmax_type: str) -> Tensor:
    """``[h]``: o of each head."""
    import torch

    if softmax_offset is not None:
        return softmax_offset
    value = 0.0 if softmax_type == "off_by_one" else -torch.inf
    return torch.full((q.shape[-2],), value, dtype=torch.float64, device=q.device)


def _values(v: Tensor, it: Span, heads: int) -> Tensor:
    """``[h, lkv, dv]`` of one sequence."""
    import torch

    values = v[it.keys]
    group = heads // v.shape[-2]
    return torch.stack([values[:, i // group] for i in range(heads)])


def _forward_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    softmax_offset: Tensor | None = None,
    *,
    scale: float | None = None,
    softmax_type: str = "vanilla",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    import torch

    q, k, v = q.double(), k.double(), v.double()
    bias = bias.double() if bias is not None else None
    o = _offsets(q, softmax_offset, softmax_type).double()[:, None]
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full(_lse_shape(q, options.get("qkv_format", "bshd")), -torch.inf)
    for it in spans(q, k, **options):
        scores = _scores(q, k, bias, it, scale=scale, **options)
        logs = torch.logaddexp(o, scores.logsumexp(-1))
        logs = logs.masked_fill((scores == -torch.inf).all(-1), -torch.inf)
        weights = (scores - logs[..., None]).exp().masked_fill(scores == -torch.inf, 0)
        weights = weights * _kept(it, q.shape[-2], q.device, **options)
        out[it.queries] = (weights @ _values(v, it, q.shape[-2])).transpose(0, 1)
        lse[it.lse] = logs
    return out, lse


def _backward_oracle(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    bias: Tensor | None = None,
    softmax_offset: Tensor | None = None,
    *,
    scale: float | None = None,
    softmax_type: str = "vanilla",
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """Differentiates the forward's formula at the saved values.

    If the terms ``a = exp(s - lse)`` of some keys change by da, out becomes
    ``(out + sum of d(a * D * v)) / (1 + sum of da)``. This form takes out and lse as they are
    given: they may be rounded, and cover more keys than this call has.
    """
    import torch

    given = {"q": q, "k": k, "v": v, "bias": bias, "softmax_offset": softmax_offset}
    leaves = {
        name: tensor.detach().double().requires_grad_()
        for name, tensor in given.items()
        if tensor is not None
    }
    heads = q.shape[-2]
    with torch.enable_grad():
        wide = [leaves[name] for name in ("q", "k", "v")]
        o = _offsets(wide[0], leaves.get("softmax_offset"), softmax_type)[:, None]
        total = torch.stack([leaf.flatten()[:0].sum() for leaf in leaves.values()]).sum()
        for it in spans(q, k, **options):
            lse = softmax_lse[it.lse].detach().double()
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # sees no key: every term is 0
            scores = _scores(wide[0], wide[1], leaves.get("bias"), it, scale=scale, **options)
            terms, alone = (scores - lse[..., None]).exp(), (o - lse).exp()
            kept = _kept(it, heads, q.device, **options)
            sums = (terms * kept) @ _values(wide[2], it, heads)
            moved = out[it.queries].detach().double().transpose(0, 1) + sums - sums.detach()
            divisor = 1 + (terms - terms.detach()).sum(-1) + alone - alone.detach()
            grad = dout[it.queries].detach().double().transpose(0, 1)
            total = total + (moved / divisor[..., None] * grad).sum()
        gradients = torch.autograd.grad(total, list(leaves.values()))
    found = dict(zip(leaves, gradients, strict=True))
    return tuple(found.get(name) for name in given)


# ------------------------------------------------------------------------------ samples


@dataclass(frozen=True, slots=True)
class _Case:
    """Sizes and options of a sample.

    Attributes:
        sizes: b, sq, skv, h, h_kv, d, dv; a thd sample ignores the first three.
        options: of the call; lists become int32 tensors.
        bias: its shape, if there is one.
        tokens: the numbers of queries and keys of a thd sample.
    """

    sizes: tuple[int, int, int, int, int, int, int] = (2, 11, 11, 2, 2, 8, 8)
    options: dict[str, Any] = field(default_factory=dict)
    bias: tuple[int, int, int, int] | None = None
    tokens: tuple[int, int] = (0, 0)


def _packed(
    lengths_q: Sequence[int],
    lengths_kv: Sequence[int],
    mask: str = "padding",
    space: int = 0,
    **options: Any,
) -> _Case:
    """A thd sample, with ``space`` unused tokens after each sequence and the offsets to match."""
    sides: dict[str, Any] = {}
    tokens = []
    for side, lengths in (("q", lengths_q), ("kv", lengths_kv)):
        ends, begins = [0], [0]
        for length in lengths:
            ends.append(ends[-1] + length)
            begins.append(begins[-1] + length + space)
        sides[f"cu_seqlens_{side}"] = ends
        if space:
            sides[f"cu_seqlens_{side}_padded"] = begins
        sides[f"max_seqlen_{side}"] = max(lengths, default=0)
        tokens.append(begins[-1])
    options = {"qkv_format": "thd", "attn_mask_type": mask, **sides, **options}
    return _Case((0, 0, 0, 4, 2, 8, 8), options, tokens=(tokens[0], tokens[1]))


_SIZES = (2, 7, 11, 4, 2, 8, 8)
_TALL = (2, 11, 7, 2, 1, 8, 8)
_LENGTHS = {"cu_seqlens_q": [0, 5, 12], "cu_seqlens_kv": [0, 11, 15]}
_WINDOW = {"window_size_left": 2, "window_size_right": 1}
_DROPOUT: dict[str, Any] = {"dropout_p": 0.3, "seed": 1234}

_CASES: dict[str, _Case] = {
    "typical": _Case((2, 16, 16, 4, 4, 16, 16)),
    "causal": _Case(options={"attn_mask_type": "causal"}),
    "more keys": _Case(_SIZES),
    "causal, more keys": _Case(_SIZES, {"attn_mask_type": "causal"}),
    "causal, more queries": _Case(_TALL, {"attn_mask_type": "causal"}),
    "causal at the last key, more keys": _Case(_SIZES, {"attn_mask_type": "causal_bottom_right"}),
    "causal at the last key, queries that see nothing": _Case(
        _TALL, {"attn_mask_type": "causal_bottom_right"}
    ),
    "sbhd": _Case(_SIZES, {"qkv_format": "sbhd", "attn_mask_type": "causal_bottom_right"}),
    "padding": _Case(_SIZES, {"attn_mask_type": "padding", **_LENGTHS}),
    "padding sbhd": _Case(_SIZES, {"qkv_format": "sbhd", "attn_mask_type": "padding", **_LENGTHS}),
    "padding and causal": _Case(_SIZES, {"attn_mask_type": "padding_causal", **_LENGTHS}),
    "padding and causal at the last key": _Case(
        _SIZES, {"attn_mask_type": "padding_causal_bottom_right", **_LENGTHS}
    ),
    "lengths of zero": _Case(
        _SIZES,
        {"attn_mask_type": "padding", "cu_seqlens_q": [0, 0, 7], "cu_seqlens_kv": [0, 11, 11]},
    ),
    "window": _Case(_SIZES, _WINDOW),
    "window, more queries": _Case(_TALL, _WINDOW),
    "window to the left": _Case(_SIZES, {"window_size_left": 3}),
    "window to the right": _Case(_SIZES, {"window_size_right": 0}),
    "window and causal": _Case(_TALL, {"attn_mask_type": "causal", **_WINDOW}),
    "window and padding": _Case(_SIZES, {"attn_mask_type": "padding", **_WINDOW, **_LENGTHS}),
    "one key each": _Case(
        options={"window_size_left": 0, "softmax_type": "off_by_one", "attn_mask_type": "causal"}
    ),
    "scale": _Case(_SIZES, {"scale": 0.125}),
    "negative scale": _Case(_SIZES, {"scale": -1}),
    "widths that differ": _Case((1, 9, 13, 6, 2, 12, 5)),
    "odd sizes": _Case((3, 5, 7, 3, 1, 7, 3), {"attn_mask_type": "causal"}),
    "wide": _Case((1, 3, 70, 2, 1, 128, 128)),
    "long": _Case((1, 130, 3, 1, 1, 4, 4)),
    "one query": _Case((2, 1, 33, 4, 2, 8, 8), {"attn_mask_type": "causal_bottom_right"}),
    "no queries": _Case((2, 0, 5, 2, 2, 8, 8)),
    "no keys": _Case((2, 5, 0, 2, 2, 8, 8)),
    "no sequences": _Case((0, 5, 5, 2, 2, 8, 8)),
    "bias": _Case(_SIZES, bias=(1, 4, 7, 11)),
    "bias of each": _Case(_SIZES, {"attn_mask_type": "causal"}, bias=(2, 4, 7, 11)),
    "bias of a sequence": _Case(_SIZES, bias=(2, 1, 7, 11)),
    "bias of keys": _Case(_SIZES, bias=(2, 1, 1, 11)),
    "off by one": _Case(_SIZES, {"softmax_type": "off_by_one"}),
    "learnable": _Case(_TALL, {"softmax_type": "learnable", **_WINDOW}),
    "learnable and padding": _Case(
        _SIZES, {"softmax_type": "learnable", "attn_mask_type": "padding", **_LENGTHS}
    ),
    "dropout": _Case(_SIZES, _DROPOUT),
    # The threshold is the word of element 0.
    "dropout, a word at the threshold": _Case(_SIZES, {"dropout_p": 0x6627E8D5 / 2**32}),
    "dropout, everything": _Case(
        _SIZES,
        {"dropout_p": 1.0, "seed": 2**63 - 1, "offset": 2**62 + 5, "attn_mask_type": "causal"},
    ),
    "dropout sbhd": _Case(
        _SIZES,
        {**_DROPOUT, "qkv_format": "sbhd", "attn_mask_type": "padding", "offset": 3, **_LENGTHS},
    ),
    "thd": _packed([5, 0, 7], [4, 3, 7]),
    "thd causal": _packed([5, 8, 2], [5, 3, 4], "padding_causal"),
    "thd causal at the last key": _packed([5, 8, 2], [5, 3, 4], "padding_causal_bottom_right"),
    "thd with space": _packed([5, 1, 6], [3, 9, 2], space=3),
    "thd window": _packed([5, 12], [9, 6], "padding_causal_bottom_right", window_size_left=2),
    "thd dropout": _packed([5, 6], [9, 6], space=1, softmax_type="learnable", **_DROPOUT),
    "thd off by one": _packed([6, 2], [6, 2], "padding_causal", softmax_type="off_by_one"),
    "thd bias": replace(_packed([5, 6], [7, 3]), bias=(2, 4, 6, 7)),
    "thd, no tokens": _packed([0], [0]),
    "thd, tokens of no sequence": replace(_packed([3], [4]), tokens=(9, 9)),
}


def _token_shape(options: dict[str, Any], *sizes: int) -> tuple[int, ...]:
    """The sizes of ``b, s, t, h, d`` that the format has, in its order."""
    by_axis = dict(zip("bsthd", sizes, strict=True))
    return tuple(by_axis[axis] for axis in options.get("qkv_format", "bshd"))


def _made(case: _Case, kind: torch.dtype, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments and options; tokens that belong to no sequence are NaN."""
    import torch

    b, sq, skv, heads, groups, d, dv = case.sizes
    tq, tkv = case.tokens
    q = normal(_token_shape(case.options, b, sq, tq, heads, d), kind, device, seed=60)
    k = normal(_token_shape(case.options, b, skv, tkv, groups, d), kind, device, seed=61)
    v = normal(_token_shape(case.options, b, skv, tkv, groups, dv), kind, device, seed=62)
    options: dict[str, Any] = {
        name: torch.tensor(value, dtype=torch.int32, device=device)
        if isinstance(value, list)
        else value
        for name, value in case.options.items()
    }
    inside = list(spans(q, k, **options))
    q, k, v = (
        _outside_is_nan(tensor, [it.queries if tensor is q else it.keys for it in inside])
        for tensor in (q, k, v)
    )
    args: list[Any] = [q, k, v]
    bias = normal(case.bias, kind, device, seed=63) if case.bias else None
    if options.get("softmax_type") == "learnable":
        return (*args, bias, normal((heads,), torch.float32, device, seed=64)), options
    return (*args, bias) if case.bias else tuple(args), options


def _outside_is_nan(tensor: Tensor, inside: list[tuple[Any, ...]]) -> Tensor:
    import torch

    result = torch.full_like(tensor, torch.nan)
    for place in inside:
        result[place] = tensor[place]
    return result


def _layouts(kind: torch.dtype, device: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Queries, keys and values in other memory layouts."""

    def values(*shape: int, seed: int) -> Tensor:
        return normal(shape, kind, device, seed)

    b, s, h, d = 2, 9, 3, 8
    yield "packed, by tensor", values(b, s, 3, h, d, seed=65).unbind(2)
    yield "packed, by head", values(b, s, h, 3, d, seed=66).unbind(3)
    plain = values(b, s, h, d, seed=67)
    yield "keys and values packed", (plain, *values(b, s, h, 2, d, seed=68).unbind(3))
    yield "transposed", values(3, d, h, s, b, seed=69).permute(0, 4, 3, 2, 1).unbind()
    yield "strided features", values(3, b, s, h, 2 * d, seed=70)[..., ::2].unbind()
    unaligned = [values(b * s * h * d + 1, seed=seed)[1:].view(b, s, h, d) for seed in (71, 72, 73)]
    yield "unaligned start", tuple(unaligned)
    expanded = values(2, b, s, 1, d, seed=74).expand(-1, -1, -1, h, -1).unbind()
    yield "one expanded head of keys", (plain, *expanded)


def _inputs(dtype: str, device: str) -> Iterator[Sample]:
    """The samples that forward and backward have in common."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    for label, case in _CASES.items():
        yield Sample(label, *_made(case, kind, device))
    for label, args in _layouts(kind, device):
        yield Sample(label, args, {"attn_mask_type": "causal"})
    (q, k, v), _ = _made(_CASES["more keys"], kind, device)
    bias = normal((1, 4, 7, 11), torch.float32, device, seed=75)
    hidden = bias.masked_fill(bias > 0.5, -torch.inf)
    hidden[:, :, 2] = -torch.inf
    yield Sample("bias that hides", (q, k, v, hidden.to(kind)))
    other = torch.float32 if dtype != "float32" else torch.bfloat16
    strided = normal((11, 7, 1, 2), other, device, seed=76).permute(3, 2, 1, 0)
    yield Sample("transposed bias of another dtype", (q, k, v, strided))
    lengths = {name: torch.tensor(it, dtype=torch.int32) for name, it in _LENGTHS.items()}
    outside = _outside_is_nan(
        normal((2, 1, 7, 11), kind, device, seed=77),
        [(0, 0, slice(5), slice(11)), (1, 0, slice(7), slice(4))],
    )
    options: dict[str, Any] = {name: it.to(device) for name, it in lengths.items()}
    yield Sample("bias of lengths", (q, k, v, outside), {"attn_mask_type": "padding", **options})
    offsets = normal((8,), kind, device, seed=78)[::2]
    yield Sample("strided offsets", (q, k, v, None, offsets), {"softmax_type": "learnable"})
    low = torch.tensor([-torch.inf, -1e4, 1e4, 0.0], device=device)
    yield Sample("offsets far away", (q, k, v, None, low), {"softmax_type": "learnable"})
    # Small integers: the scores are exact in any order of summation.
    whole = (q * 2).round().clamp(-3, 3), (k * 2).round().clamp(-3, 3)
    yield Sample("where exp overflows", (*whole, v), {"scale": 4})
    yield Sample("small values", (q * 1e-3, k * 1e-3, v), {"attn_mask_type": "causal"})


def _forward_samples(dtype: str, device: str) -> Iterator[Sample]:
    yield from _inputs(dtype, device)
    sample = next(_inputs(dtype, device))
    q, k, v = sample.args
    large = 1e4 if dtype == "float16" else 1e30
    yield Sample("large values", (q, k, v.clamp(-2, 2) * large))
    # Many keys, so that an error that each block of keys adds becomes visible.
    sizes = ((1, 16, 1, 128), *[(1, 4096, 1, 128)] * 2)
    many = [normal(size, q.dtype, device, seed=83 + place) for place, size in enumerate(sizes)]
    yield Sample("many keys", tuple(many))


def _backward_samples(dtype: str, device: str) -> Iterator[Sample]:
    for place, sample in enumerate(_inputs(dtype, device)):
        q, k, v, *others = sample.args
        exact, lse = _forward_oracle(*sample.args, **sample.kwargs)
        inside = [it.queries for it in spans(q, k, **sample.kwargs)]
        out = _outside_is_nan(exact.to(q.dtype), inside)
        dout = _outside_is_nan(normal(tuple(out.shape), q.dtype, device, seed=79), inside)
        saved = (q, k, v, out, lse.to(math_dtype(q.dtype)), *others)
        yield Sample(sample.label, (dout, *saved), sample.kwargs)
        if place == 0:
            yield Sample("expanded dout", (dout[:, :1, :1].expand_as(out), *saved))
            turned = dout.transpose(1, 3).contiguous().transpose(1, 3)
            apart = out.transpose(0, 2).contiguous().transpose(0, 2)
            strided = lse.to(saved[4].dtype).transpose(1, 2).contiguous().transpose(1, 2)
            yield Sample("transposed dout, out and lse", (turned, q, k, v, apart, strided))
            # lse of more keys than this call has: one step of attention over keys in parts.
            yield Sample("lse of more keys", (dout, q, k, v, out, saved[4] + 0.7))


# ---------------------------------------------------------------------------- contracts

_OPTIONS = (
    "scale",
    "qkv_format",
    "attn_mask_type",
    "window_size_left",
    "window_size_right",
    "softmax_type",
    "dropout_p",
    "seed",
    "offset",
    "max_seqlen_q",
    "max_seqlen_kv",
)
_SEQUENCES = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_TENSORS = ("q", "k", "v", "bias", "softmax_offset")


@contract(
    family="attention",
    check=_check_forward,
    samples=_forward_samples,
    tolerance=FORWARD_TOLERANCE,
    oracle=_forward_oracle,
    backward=Backward(
        "fused_attn_bwd",
        saves={
            **{name: name for name in (*_TENSORS, *_SEQUENCES)},
            "out": "output[0]",
            "softmax_lse": "output[1]",
        },
        gradients=_TENSORS,
        options=_OPTIONS,
    ),
)
def fused_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    softmax_offset: Tensor | None = None,
    *,
    scale: float | None = None,
    qkv_format: str = "bshd",
    attn_mask_type: str = "no_mask",
    window_size_left: int = -1,
    window_size_right: int = -1,
    softmax_type: str = "vanilla",
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention (Vaswani et al., 2017, arXiv:1706.03762; Dao et al., 2022, arXiv:2205.14135).

    ``out_i = sum over j of exp(s_ij - lse_i) * v_j`` over the keys j that query i sees, with
    ``s_ij = scale * <q_i, k_j> + bias_ij`` and lse_i the logarithm of the denominator. The
    head of this module defines formats, masks, softmax types, dropout and precision.

    Args:
        q: ``[b, sq, h, d]``, ``[sq, b, h, d]`` or ``[tq, h, d]``, as ``qkv_format`` says;
            float32, bfloat16, float16 or float64. h and d are at least 1.
        k: ``[b, skv, h_kv, d]``, ``[skv, b, h_kv, d]`` or ``[tkv, h_kv, d]``, dtype of ``q``;
            h is a multiple of h_kv.
        v: as ``k``, with a width dv of its own.
        bias: added to the scaled scores; four dimensions that expand to ``[b, h, sq, skv]``,
            any dtype of the contract. In every format its rows and columns are positions within
            a sequence. -inf hides a key.
        softmax_offset: ``[h]``, any dtype of the contract; for ``learnable`` and only for it.
        scale: factor of the dot products; ``1 / sqrt(d)`` unless given.
        qkv_format: ``"bshd"``, ``"sbhd"`` or ``"thd"``.
        attn_mask_type: ``"no_mask"``, ``"causal"``, ``"causal_bottom_right"``,
            ``"padding"``, ``"padding_causal"`` or ``"padding_causal_bottom_right"``; one of
            the last three for ``thd``.
        window_size_left: how many keys before the diagonal are seen; -1 for all.
        window_size_right: how many keys after the diagonal are seen; -1 for all.
        softmax_type: ``"vanilla"``, ``"off_by_one"`` or ``"learnable"``.
        dropout_p: probability that a weight is dropped, from 0 to 1.
        seed, offset: of the random numbers, at least 0 and below 2**63, as in
            :func:`dropout_fwd`; unused where ``dropout_p`` is 0.
        cu_seqlens_q: ``[b + 1]``, int32: cumulative lengths from 0, not decreasing; for the
            padding masks and only for them.
        cu_seqlens_kv: the same for the keys.
        cu_seqlens_q_padded: ``[b + 1]``, int32, for ``thd`` alone: where sequences begin,
            if there is space between them.
        cu_seqlens_kv_padded: the same for the keys.
        max_seqlen_q: at least the length of the longest sequence, for ``thd`` and only for it.
        max_seqlen_kv: the same for the keys.

    Returns:
        out: shape of ``q`` with the width dv, dtype of ``q``, contiguous; saved for the
            backward.
        softmax_lse: ``[b, h, sq]``, or ``[h, tq]`` for ``thd``; float32 (float64 for
            float64), contiguous; saved for the backward. It has no gradient.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    lse = q.new_empty(_lse_shape(q, qkv_format), dtype=math_dtype(q.dtype))
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


@contract(
    family="attention",
    check=_check_backward,
    samples=_backward_samples,
    tolerance=BACKWARD_TOLERANCE,
    oracle=_backward_oracle,
    dispatch_on="q",
)
def fused_attn_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    bias: Tensor | None = None,
    softmax_offset: Tensor | None = None,
    *,
    scale: float | None = None,
    qkv_format: str = "bshd",
    attn_mask_type: str = "no_mask",
    window_size_left: int = -1,
    window_size_right: int = -1,
    softmax_type: str = "vanilla",
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of :func:`fused_attn_fwd`.

    With ``p_ij = exp(s_ij - softmax_lse_i)``, the factors ``f_ij = D_ij / (1 - dropout_p)``
    of dropout and ``delta_i = <dout_i, out_i>``:
    ``dv_j = sum over i of f_ij * p_ij * dout_i``,
    ``ds_ij = p_ij * (f_ij * <dout_i, v_j> - delta_i)``,
    ``dq_i = scale * sum over j of ds_ij * k_j``, ``dk_j = scale * sum over i of ds_ij * q_i``,
    ``dbias = ds`` and ``do = -sum over i of exp(o - softmax_lse_i) * delta_i``. dk and dv are
    sums over the query heads of a key head, and dbias is summed over dimensions in which the bias
    was expanded.

    ``out`` and ``softmax_lse`` are used as given. Attention over keys in several parts
    calls this once for each part, with the out and the lse over all keys.

    Args:
        dout: the gradient of out; its shape, dtype of ``q``.
        q: as in the forward.
        k: as in the forward.
        v: as in the forward.
        out: as the forward returned it.
        softmax_lse: as the forward returned it.
        bias: as in the forward.
        softmax_offset: as in the forward.
        scale: as in the forward.
        qkv_format: as in the forward.
        attn_mask_type: as in the forward.
        window_size_left: as in the forward.
        window_size_right: as in the forward.
        softmax_type: as in the forward.
        dropout_p: as in the forward.
        seed, offset: as in the forward; the same weights are dropped.
        cu_seqlens_q: as in the forward.
        cu_seqlens_kv: as in the forward.
        cu_seqlens_q_padded: as in the forward.
        cu_seqlens_kv_padded: as in the forward.
        max_seqlen_q: as in the forward.
        max_seqlen_kv: as in the forward.

    Returns:
        dq: shape and dtype of ``q``, contiguous; 0 for tokens that belong to no sequence.
        dk: likewise of ``k``.
        dv: likewise of ``v``.
        dbias: likewise of ``bias``; None without one.
        dsoftmax_offset: likewise of ``softmax_offset``; None without one.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        None if bias is None else bias.new_empty(bias.shape),
        None if softmax_offset is None else softmax_offset.new_empty(softmax_offset.shape),
    )
