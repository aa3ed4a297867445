"""Context parallelism: what a rank does between the steps of attention over shared sequences.

**Shares.** Each sequence is cut into ``2 * world_size`` chunks of equal length, and rank r
holds chunk r followed by chunk ``2 * world_size - 1 - r``, so that causal attention costs
every rank the same. The two chunks are the halves of the rank's share of the sequence. In
each step of a ring, a rank attends to the keys of one rank. Under a causal mask, all its queries
see only the first half of a lower rank's keys, and only the second half of its queries see the
keys of a higher rank.

**Merging.** For each query, a step yields the output ``o_i`` over the keys of the step, and the
logarithm ``l_i`` of the sum of the exponentials of their scores (lse). Over all keys these are
``l = log(sum over i of exp(l_i))`` and ``o = sum over i of exp(l_i - l) * o_i``. A query that
sees no key in a step has ``l_i = -inf`` there, and its ``o_i`` is ignored.

**Layouts.** Tokens are ``thd``, ``[t, h, d]``, sequences following one another.
``cu_seqlens``, ``[b + 1]``, says where in t each begins, from 0, and where the last ends, not
decreasing. Every length is even, and the second half begins at ``length / 2``. Tensors of
halves have the same layout with all offsets halved. A packed lse is ``[h, t]``; otherwise it is
``[b, h, s]``, where a sequence has the first places of its row, and s is at least its length.
In results, elements that belong to no sequence are 0; in written arguments they stay unchanged.

The values of ``cu_seqlens`` are not checked, because the host would have to wait for the device.
With an odd length the values of that sequence are not defined. If offsets point beyond a tensor,
a token that the tensor does not have is 0 in a result and changes nothing in a written argument.
Nothing is read or written outside the tensors, whatever the offsets are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.core.contract import Sample, Tolerance, contract
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.ops import _checks as check
from transformer_engine_fl.ops._dtypes import COPIED, FLOATS
from transformer_engine_fl.ops._samples import arranged, data, int32, normal, with_extremes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "thd_get_partitioned_indices",
    "thd_grad_correction",
    "thd_out_correction",
    "thd_read_half_tensor",
    "thd_read_second_half_lse",
    "thd_second_half_lse_correction",
]

LSE_DTYPES = ("float32", "float64")

CHANGES = ("add", "copy", "none")

EXACT = Tolerance(rtol=0.0, atol=0.0)

LSE_TOLERANCE = {
    "float32": Tolerance(rtol=3e-7, atol=3e-7),
    "float64": Tolerance(rtol=4e-16, atol=4e-16),
}
# Half a unit in the last place, plus the error of the exponential in float32.
OUT_TOLERANCE = {
    "float32": Tolerance(rtol=5e-7, atol=5e-7),
    "bfloat16": Tolerance(rtol=2**-8 + 2**-19, atol=5e-7),
    "float16": Tolerance(rtol=2**-11 + 2**-19, atol=2e-6),
    "float64": Tolerance(rtol=2e-15, atol=2e-15),
}
SUM_TOLERANCE = {
    "float32": Tolerance(rtol=2**-24, atol=0.0),
    "bfloat16": Tolerance(rtol=2**-8 + 2**-24, atol=0.0),
    "float16": Tolerance(rtol=2**-11 + 2**-24, atol=0.0),
    "float64": Tolerance(rtol=0.0, atol=0.0),
}


# ------------------------------------------------------------------------------ checks


def _check_tokens(op: str, name: str, value: Any, dtypes: tuple[str, ...]) -> Tensor:
    tensor = check.is_tensor(op, name, value, dtypes=dtypes)
    check.has_axes(op, name, tensor, "[t, h, d]", "[2, t, h, d]")
    if tensor.ndim == 4:
        check.has_shape(op, name, tensor, (2, *tensor.shape[1:]), "keys and values")
    return tensor


def _check_lse(op: str, value: Any, lse_packed: Any, sequences: int) -> Tensor:
    check.is_flag(op, "lse_packed", lse_packed)
    lse = check.is_tensor(op, "lse", value, dtypes=LSE_DTYPES)
    check.has_axes(op, "lse", lse, "[h, t]" if lse_packed else "[b, h, s]")
    if not lse_packed:
        shape = (sequences, *lse.shape[1:])
        check.has_shape(op, "lse", lse, shape, "the sequences of 'cu_seqlens'")
    return lse


def _check_step(op: str, value: Any, lse: Tensor, at_least: int) -> None:
    """Check the lse of a step against ``lse``, that over all keys."""
    dtypes = (check.dtype_name(lse.dtype),)
    step = check.is_tensor(op, "lse_per_step", value, dtypes=dtypes, min_ndim=1)
    shape = (*lse.shape[:-1], step.shape[-1])
    check.has_shape(op, "lse_per_step", step, shape, "as 'lse' but for the last dimension")
    if step.shape[-1] < at_least:
        expected = f"a last dimension of at least {at_least}, as 'lse' has {lse.shape[-1]}"
        raise ArgumentError(op, "lse_per_step", check.describe(value), expected)


def _check_read_half(op: str, tensor: Any, cu_seqlens: Any, half_idx: Any) -> None:
    _check_tokens(op, "tensor", tensor, COPIED)
    check.is_cu_seqlens(op, "cu_seqlens", cu_seqlens)
    check.is_integer(op, "half_idx", half_idx, below=2)
    check.same_device(op, "tensor", {"tensor": tensor, "cu_seqlens": cu_seqlens})


def _check_lse_correction(
    op: str, lse: Any, lse_per_step: Any, cu_seqlens: Any, lse_packed: Any
) -> None:
    sequences = check.is_cu_seqlens(op, "cu_seqlens", cu_seqlens)
    merged = _check_lse(op, lse, lse_packed, sequences)
    check.is_writable(op, "lse", merged)
    _check_step(op, lse_per_step, merged, merged.shape[-1] // 2)
    given = {"lse": lse, "lse_per_step": lse_per_step, "cu_seqlens": cu_seqlens}
    check.same_device(op, "lse", given)


def _check_read_lse(
    op: str, lse: Any, cu_seqlens: Any, second_half_lse_seqlen: Any, lse_packed: Any
) -> None:
    sequences = check.is_cu_seqlens(op, "cu_seqlens", cu_seqlens)
    merged = _check_lse(op, lse, lse_packed, sequences)
    least = merged.shape[-1] // 2
    check.is_integer(op, "second_half_lse_seqlen", second_half_lse_seqlen, at_least=least)
    check.same_device(op, "lse", {"lse": lse, "cu_seqlens": cu_seqlens})


def _check_out_correction(
    op: str,
    out: Any,
    out_per_step: Any,
    lse: Any,
    lse_per_step: Any,
    cu_seqlens: Any,
    only_second_half: Any,
    lse_packed: Any,
) -> None:
    check.is_flag(op, "only_second_half", only_second_half)
    tokens = check.is_tensor(op, "out", out, dtypes=FLOATS)
    check.has_axes(op, "out", tokens, "[t, h, d]")
    check.is_writable(op, "out", tokens)
    step = check.is_tensor(
        op, "out_per_step", out_per_step, dtypes=(check.dtype_name(tokens.dtype),)
    )
    total, heads, width = tokens.shape
    part, why = (total // 2, "half of 'out'") if only_second_half else (total, "as 'out'")
    check.has_shape(op, "out_per_step", step, (part, heads, width), why)
    sequences = check.is_cu_seqlens(op, "cu_seqlens", cu_seqlens)
    merged = _check_lse(op, lse, lse_packed, sequences)
    shape = (heads, total) if lse_packed else (sequences, heads, merged.shape[-1])
    check.has_shape(op, "lse", merged, shape, "the heads and tokens of 'out'")
    longest = merged.shape[-1]
    _check_step(op, lse_per_step, merged, longest // 2 if only_second_half else longest)
    given = {
        "out": out,
        "out_per_step": out_per_step,
        "lse": lse,
        "lse_per_step": lse_per_step,
        "cu_seqlens": cu_seqlens,
    }
    check.same_device(op, "out", given)


def _check_grad_correction(
    op: str, grad: Any, grad_per_step: Any, cu_seqlens: Any, first_half: Any, second_half: Any
) -> None:
    check.is_choice(op, "first_half", first_half, CHANGES)
    check.is_choice(op, "second_half", second_half, CHANGES)
    if first_half == second_half == "none":
        expected = "'add' or 'copy' for one half at least: 'first_half' is 'none'"
        raise ArgumentError(op, "second_half", check.describe(second_half), expected)
    tokens = _check_tokens(op, "grad", grad, FLOATS)
    check.is_writable(op, "grad", tokens)
    step = check.is_tensor(
        op, "grad_per_step", grad_per_step, dtypes=(check.dtype_name(tokens.dtype),)
    )
    *leading, total, heads, width = tokens.shape
    half = "none" in (first_half, second_half)
    part, why = (total // 2, "half of 'grad'") if half else (total, "as 'grad'")
    check.has_shape(op, "grad_per_step", step, (*leading, part, heads, width), why)
    check.is_cu_seqlens(op, "cu_seqlens", cu_seqlens)
    given = {"grad": grad, "grad_per_step": grad_per_step, "cu_seqlens": cu_seqlens}
    check.same_device(op, "grad", given)


def _check_indices(op: str, cu_seqlens: Any, total_tokens: Any, world_size: Any, rank: Any) -> None:
    check.is_cu_seqlens(op, "cu_seqlens", cu_seqlens)
    check.is_integer(op, "world_size", world_size, at_least=1)
    check.is_integer(op, "rank", rank, below=world_size)
    check.is_integer(op, "total_tokens", total_tokens)
    if total_tokens % (2 * world_size):
        expected = f"a multiple of 2 * world_size, {2 * world_size}"
        raise ArgumentError(op, "total_tokens", check.describe(total_tokens), expected)


# ------------------------------------------------------------------------------ oracles
#
# They work token by token, with Python's integers. ``_tokens`` yields (sequence, place in it,
# length of the sequence, row in thd).


def _tokens(cu_seqlens: Tensor) -> Iterator[tuple[int, int, int, int]]:
    for sequence, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        for place in range(end - begin):
            yield sequence, place, end - begin, begin + place


def _second_halves(cu_seqlens: Tensor) -> Iterator[tuple[int, int, int, int, int]]:
    """(sequence, place, row) of each token of a second half, and its (place, row) among halves."""
    for sequence, place, length, row in _tokens(cu_seqlens):
        half = length // 2
        if place >= half:
            begin = row - place
            yield sequence, place, row, place - half, begin // 2 + place - half


def _lse_of(lse: Tensor, lse_packed: bool, sequence: int, place: int, row: int) -> Tensor | None:
    """``[h]``, a view; None if there is no such token."""
    column = row if lse_packed else place
    if column >= lse.shape[-1]:
        return None
    return lse[:, column] if lse_packed else lse[sequence, :, column]


def _read_half_oracle(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    import torch

    total = tensor.shape[-3]
    shape = (*tensor.shape[:-3], total // 2, *tensor.shape[-2:])
    output = tensor.new_zeros(shape, dtype=torch.float64)
    for _, place, length, row in _tokens(cu_seqlens):
        half = length // 2
        if place // half == half_idx and row < total:
            to = (row - place) // 2 + place % half
            if to < total // 2:
                output[..., to, :, :] = tensor[..., row, :, :].double()
    return output


def _lse_correction_oracle(
    lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, *, lse_packed: bool = False
) -> Tensor:
    merged, step = lse.double(), lse_per_step.double()
    if merged is lse:
        merged = lse.clone()
    for sequence, place, row, half_place, half_row in _second_halves(cu_seqlens):
        both = _lse_of(merged, lse_packed, sequence, place, row)
        new = _lse_of(step, lse_packed, sequence, half_place, half_row)
        if both is not None and new is not None:
            highest = both.maximum(new)
            highest = highest.masked_fill(highest.isinf(), 0)
            both.copy_(highest + ((both - highest).exp() + (new - highest).exp()).log())
    return merged


def _read_lse_oracle(
    lse: Tensor, cu_seqlens: Tensor, second_half_lse_seqlen: int, *, lse_packed: bool = False
) -> Tensor:
    import torch

    output = lse.new_zeros((*lse.shape[:-1], second_half_lse_seqlen), dtype=torch.float64)
    for sequence, place, row, half_place, half_row in _second_halves(cu_seqlens):
        here = _lse_of(lse, lse_packed, sequence, place, row)
        there = _lse_of(output, lse_packed, sequence, half_place, half_row)
        if here is not None and there is not None:
            there.copy_(here)
    return output


def _out_correction_oracle(
    out: Tensor,
    out_per_step: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    *,
    only_second_half: bool = False,
    lse_packed: bool = False,
) -> Tensor:
    import torch

    output, step = out.to(torch.float64, copy=True), out_per_step.double()
    if only_second_half:
        places = list(_second_halves(cu_seqlens))
    else:
        places = [(seq, place, row, place, row) for seq, place, _, row in _tokens(cu_seqlens)]
    for sequence, place, row, step_place, step_row in places:
        all_keys = _lse_of(lse.double(), lse_packed, sequence, place, row)
        some = _lse_of(lse_per_step.double(), lse_packed, sequence, step_place, step_row)
        known = row < out.shape[0] and step_row < step.shape[0]
        if not known or all_keys is None or some is None:
            continue
        seen = (some > -torch.inf) & (all_keys > -torch.inf)
        share = (some - all_keys)[seen, None].exp()
        output[row][seen] += share * step[step_row][seen]
    return output


def _grad_correction_oracle(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, *, first_half: str, second_half: str
) -> Tensor:
    import torch

    output, step = grad.to(torch.float64, copy=True), grad_per_step.double()
    changes = (first_half, second_half)
    for _, place, length, row in _tokens(cu_seqlens):
        half = length // 2
        change = changes[place // half]
        if change == "none":
            continue
        begin = row - place
        source = begin // 2 + place % half if "none" in changes else row
        if row < output.shape[-3] and source < step.shape[-3]:
            before = output[..., row, :, :] if change == "add" else 0
            output[..., row, :, :] = before + step[..., source, :, :]
    return output


def _indices_oracle(cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int) -> Tensor:
    import torch

    indices: list[int] = []
    for begin, end in pairwise([*cu_seqlens.tolist(), total_tokens]):
        chunk = (end - begin) // (2 * world_size)
        for number in (rank, 2 * world_size - 1 - rank):
            indices += range(begin + number * chunk, begin + (number + 1) * chunk)
    return torch.tensor(indices, dtype=torch.float64, device=cu_seqlens.device)


# ------------------------------------------------------------------------------ samples

_SEQUENCES: dict[str, tuple[int, list[int]]] = {
    # label: tokens, the lengths of the sequences
    "typical": (12, [4, 6, 2]),
    "one sequence": (8, [8]),
    "empty sequences": (12, [0, 4, 0, 8, 0]),
    "no tokens at all": (0, [0, 0]),
    "tokens of no sequence": (17, [4, 6, 2]),
    "fewer tokens than the sequences have": (10, [4, 6, 2]),
    "many sequences": (160, [2] * 80),
}


def _offsets(lengths: list[int], device: str) -> Tensor:
    return int32([0, *accumulate(lengths)], device)


def _strided_offsets(device: str) -> Tensor:
    """The offsets of the typical sequences, in a strided tensor."""
    return int32([0, 7, 4, 9, 10, 3, 12, 5], device)[::2]


def _read_half_samples(dtype: str, device: str) -> Iterator[Sample]:
    for seed, (label, (total, lengths)) in enumerate(_SEQUENCES.items(), 100):
        offsets = _offsets(lengths, device)
        yield Sample(label, (data((total, 2, 5), dtype, device, seed), offsets, 0))
        pair = data((2, total, 2, 3), dtype, device, seed)
        yield Sample(f"{label}, keys and values", (pair, offsets, 1))
    offsets = _offsets([4, 6, 2], device)
    yield Sample("second half", (data((12, 3, 8), dtype, device, 110), offsets, 1))
    for label, tensor in arranged((12, 3, 8), dtype, device, seed=111):
        yield Sample(label, (tensor, offsets, 1))
    for label, tensor in arranged((2, 12, 3, 8), dtype, device, seed=112):
        yield Sample(f"{label} keys and values", (tensor, offsets, 0))
    yield Sample("special values", (with_extremes((12, 3, 8), dtype, device, 113), offsets, 1))
    yield Sample("no heads", (data((12, 0, 8), dtype, device, 114), offsets, 1))
    yield Sample("wide", (data((12, 2, 256), dtype, device, 115), offsets, 1))
    tensor = data((12, 3, 8), dtype, device, 116)
    yield Sample("strided cu_seqlens", (tensor, _strided_offsets(device), 1))
    beyond = _offsets([0, 14], device)
    yield Sample("offsets beyond the rows", (data((11, 3, 8), dtype, device, 117), beyond, 0))


@dataclass(frozen=True, slots=True)
class _Lses:
    """An lse, a second one of at least half its length, and the sequences of both."""

    label: str
    lse: Tensor
    half: Tensor
    cu_seqlens: Tensor
    packed: bool

    @property
    def options(self) -> dict[str, Any]:
        return {"lse_packed": True} if self.packed else {}


def _lses(dtype: str, device: str) -> Iterator[_Lses]:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    lengths = [4, 6, 2]
    typical = _offsets(lengths, device)

    def pair(leading: tuple[int, ...], whole: int, half: int) -> tuple[Tensor, Tensor]:
        lse = normal((*leading, whole), kind, device, seed=120) * 3
        return lse, normal((*leading, half), kind, device, seed=121) * 3

    def padded(label: str, lses: tuple[Tensor, Tensor], offsets: Tensor = typical) -> _Lses:
        return _Lses(label, *lses, offsets, False)

    def packed(label: str, lses: tuple[Tensor, Tensor], offsets: Tensor = typical) -> _Lses:
        return _Lses(f"{label}, packed", *lses, offsets, True)

    for label, (total, given) in _SEQUENCES.items():
        offsets, longest = _offsets(given, device), max(given)
        yield padded(label, pair((len(given), 3), longest, longest // 2), offsets)
        yield packed(label, pair((3,), total, total // 2), offsets)
    yield padded("rows longer than the sequences", pair((3, 2), 9, 5))
    yield padded("rows shorter than a sequence", pair((3, 2), 5, 2))
    yield packed("a longer half", pair((3,), 12, 7))
    yield padded("no heads", pair((3, 0), 6, 3))
    yield padded("strided cu_seqlens", pair((3, 2), 6, 3), _strided_offsets(device))
    for label, half in arranged((3, 2, 3), dtype, device, seed=122):
        yield padded(f"{label} half", (pair((3, 2), 6, 3)[0], half))
    for label, lse in arranged((3, 2, 6), dtype, device, seed=123):
        if label != "expanded":
            yield padded(f"{label} lse", (lse, pair((3, 2), 6, 3)[1]))
    for label, lse in arranged((3, 12), dtype, device, seed=124):
        if label != "expanded":
            yield packed(f"{label} lse", (lse, pair((3,), 12, 6)[1]))
    for label, factor in (("large values", 1e4), ("small values", 1e-5)):
        one, other = pair((3, 2), 6, 3)
        yield padded(label, (one * factor, other * factor))
    one, other = pair((3, 2), 6, 3)
    yield padded("where nothing is seen", (_unseen(one), _unseen(other)))
    one, other = pair((3,), 12, 6)
    yield packed("where nothing is seen", (_unseen(one), _unseen(other)))


def _unseen(lse: Tensor) -> Tensor:
    """Puts -inf in some places, such that two lse have it in the first, the second or both."""
    import torch

    lse[..., 1 + lse.shape[-1] // 2 :] = -torch.inf
    lse[..., :1, ::2] = -torch.inf
    return lse


def _lse_correction_samples(dtype: str, device: str) -> Iterator[Sample]:
    for it in _lses(dtype, device):
        yield Sample(it.label, (it.lse, it.half, it.cu_seqlens), it.options)


def _read_lse_samples(dtype: str, device: str) -> Iterator[Sample]:
    for it in _lses(dtype, device):
        yield Sample(it.label, (it.lse, it.cu_seqlens, it.half.shape[-1]), it.options)


def _out_correction_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    def tokens(total: int, heads: int, seed: int, width: int = 5) -> Tensor:
        return data((total, heads, width), dtype, device, seed)

    kind = "float64" if dtype == "float64" else "float32"
    for it in _lses(kind, device):
        heads = it.lse.shape[-2]
        total = it.lse.shape[-1] if it.packed else int(it.cu_seqlens[-1])
        out, lse = tokens(total, heads, 141), it.lse
        # The lse of a step does not exceed that over all keys.
        step = lse - normal(tuple(lse.shape), lse.dtype, device, 140).abs()
        args = (out, tokens(total, heads, 142), lse, step, it.cu_seqlens)
        yield Sample(it.label, args, it.options)
        half = _read_lse_oracle(lse, it.cu_seqlens, it.half.shape[-1], **it.options)
        half -= normal(tuple(half.shape), half.dtype, device, 143).abs()
        if 0 in it.half.stride():
            half = half[:1].expand(half.shape) - 9
        else:
            half = it.half.copy_(half)  # keeps its layout
        args = (out, tokens(total // 2, heads, 144), lse, half.to(lse.dtype), it.cu_seqlens)
        yield Sample(f"{it.label}, half", args, it.options | {"only_second_half": True})

    offsets = _offsets([4, 6, 2], device)
    lse = normal((2, 12), getattr(torch, kind), device, 145)
    step = lse - 1
    rest = (lse, step, offsets)
    yield Sample(
        "wide", (tokens(12, 2, 146, 256), tokens(12, 2, 147, 256), *rest), {"lse_packed": True}
    )
    for label, tensor in arranged((12, 2, 8), dtype, device, seed=148):
        other = tokens(12, 2, 149, 8)
        yield Sample(f"{label} out_per_step", (other, tensor, *rest), {"lse_packed": True})
        if label != "expanded":
            yield Sample(f"{label} out", (tensor, other, *rest), {"lse_packed": True})
    hidden = lse.clone()
    hidden[:, ::3] = -torch.inf
    strange = tokens(12, 2, 150)
    strange[::3] = torch.nan
    args = (tokens(12, 2, 151), strange, hidden, hidden, offsets)
    yield Sample("steps that see nothing and are NaN", args, {"lse_packed": True})
    args = (tokens(12, 2, 151), strange, hidden, step, offsets)
    yield Sample("an lse that leaves out the step", args, {"lse_packed": True})
    other_kind = torch.float64 if kind == "float32" else torch.float32
    lses = lse.to(other_kind), step.to(other_kind)
    args = (tokens(12, 2, 152), tokens(12, 2, 153), *lses, offsets)
    yield Sample("lse of another dtype", args, {"lse_packed": True})
    args = (tokens(12, 2, 152), tokens(12, 2, 153), lse, lse - 1000, offsets)
    yield Sample("a step that counts for nothing", args, {"lse_packed": True})


def _grad_correction_samples(dtype: str, device: str) -> Iterator[Sample]:
    def call(
        label: str,
        total: int,
        offsets: Tensor,
        first_half: str,
        second_half: str,
        *,
        pair: bool = False,
        grad: Tensor | None = None,
        step: Tensor | None = None,
    ) -> Sample:
        part = total // 2 if "none" in (first_half, second_half) else total
        leading = (2,) if pair else ()
        if grad is None:
            grad = data((*leading, total, 3, 8), dtype, device, 160)
        if step is None:
            step = data((*leading, part, 3, 8), dtype, device, 161)
        options = {"first_half": first_half, "second_half": second_half}
        return Sample(label, (grad, step, offsets), options)

    typical = _offsets([4, 6, 2], device)
    yield call("typical", 12, typical, "add", "copy")
    for first_half in CHANGES:
        for second_half in CHANGES:
            if {first_half, second_half} != {"none"}:
                changes = first_half, second_half
                yield call(f"{first_half} and {second_half}", 12, typical, *changes)
                yield call(
                    f"{first_half} and {second_half}, pair", 12, typical, *changes, pair=True
                )
    for label, (total, lengths) in _SEQUENCES.items():
        offsets = _offsets(lengths, device)
        yield call(f"{label}, of whole ones", total, offsets, "copy", "add")
        yield call(f"{label}, of halves", total, offsets, "none", "add")
    for label, tensor in arranged((12, 3, 8), dtype, device, seed=162):
        yield call(f"{label} grad_per_step", 12, typical, "add", "copy", step=tensor)
        if label != "expanded":
            yield call(f"{label} grad", 12, typical, "add", "copy", grad=tensor)
    for label, tensor in arranged((2, 12, 3, 8), dtype, device, seed=163):
        if label != "expanded":
            yield call(
                f"{label} grad of a pair", 12, typical, "add", "none", pair=True, grad=tensor
            )
    special = with_extremes((12, 3, 8), dtype, device, 164)
    yield call("special values", 12, typical, "copy", "copy", step=special)
    grad = data((12, 3, 8), dtype, device, 165) * 1e-4
    yield call("small values", 12, typical, "add", "add", grad=grad)
    yield call("strided cu_seqlens", 12, _strided_offsets(device), "add", "copy")


def _indices_samples(dtype: str, device: str) -> Iterator[Sample]:
    calls = {
        "typical": ([8, 16, 4], 28, 2, 0),
        "last of two ranks": ([8, 16, 4], 28, 2, 1),
        "one rank": ([2, 6], 8, 1, 0),
        "third of four ranks": ([8, 0, 24, 8], 40, 4, 2),
        "last of three ranks": ([6, 12], 18, 3, 2),
        "empty sequences": ([0, 4, 0], 4, 2, 1),
        "no tokens": ([0, 0], 0, 2, 1),
        "tokens of no sequence": ([8, 16], 32, 2, 0),
        "many sequences": ([4] * 80, 320, 2, 1),
        "a long sequence": ([2048], 2048, 8, 3),
    }
    for label, (lengths, *numbers) in calls.items():
        yield Sample(label, (_offsets(lengths, device), *numbers))
    strided = int32([0, 7, 8, 9, 24, 3, 28, 5], device)[::2]
    yield Sample("strided cu_seqlens", (strided, 28, 2, 1))


# ---------------------------------------------------------------------------- contracts


@contract(
    family="context_parallel",
    check=_check_read_half,
    samples=_read_half_samples,
    tolerance=dict.fromkeys(COPIED, EXACT),
    oracle=_read_half_oracle,
)
def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    """Reads the first or the second half of every sequence.

    ``output[cu_seqlens[i] / 2 + p] = tensor[cu_seqlens[i] + half_idx * length_i / 2 + p]`` for p
    below ``length_i / 2``. The head of this module defines the layouts.

    Args:
        tensor: ``[t, h, d]``, or ``[2, t, h, d]``, keys and values together; float32,
            bfloat16, float16, float64, float8_e4m3fn, float8_e5m2 or uint8.
        cu_seqlens: ``[b + 1]``, int32, of ``tensor``.
        half_idx: 0 for the first half, 1 for the second.

    Returns:
        ``[t // 2, h, d]`` or ``[2, t // 2, h, d]``, the dtype of ``tensor``, contiguous.

    Raises:
        ArgumentError: a shape, dtype, number or device does not agree.
    """
    *leading, total, heads, width = tensor.shape
    return tensor.new_empty((*leading, total // 2, heads, width))


@contract(
    family="context_parallel",
    check=_check_lse_correction,
    samples=_lse_correction_samples,
    tolerance=LSE_TOLERANCE,
    oracle=_lse_correction_oracle,
    mutates=("lse",),
)
def thd_second_half_lse_correction(
    lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, *, lse_packed: bool = False
) -> None:
    """Merges a step's lse into the lse of every second half, in place.

    ``lse = log(exp(lse) + exp(lse_per_step))``, computed with the larger of the two factored out
    so that nothing overflows; where both are -inf the result is -inf. First halves stay as they
    are. The head of this module defines the layouts.

    Args:
        lse: ``[b, h, s]``, or ``[h, t]`` if packed; float32 or float64. Written.
        lse_per_step: ``[b, h, s2]`` or ``[h, t2]``, of second halves alone; s2 is at least
            ``s // 2``, t2 at least ``t // 2``; dtype of ``lse``.
        cu_seqlens: ``[b + 1]``, int32, of whole sequences.
        lse_packed: whether lse is ``[h, t]``.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """


@contract(
    family="context_parallel",
    check=_check_read_lse,
    samples=_read_lse_samples,
    tolerance=dict.fromkeys(LSE_DTYPES, EXACT),
    oracle=_read_lse_oracle,
)
def thd_read_second_half_lse(
    lse: Tensor, cu_seqlens: Tensor, second_half_lse_seqlen: int, *, lse_packed: bool = False
) -> Tensor:
    """The lse of the second half of every sequence.

    ``output[i, :, p] = lse[i, :, length_i / 2 + p]`` for p below ``length_i / 2``, or, packed,
    ``output[:, cu_seqlens[i] / 2 + p] = lse[:, cu_seqlens[i] + length_i / 2 + p]``; 0 elsewhere.
    The head of this module defines the layouts.

    Args:
        lse: ``[b, h, s]``, or ``[h, t]`` if packed; float32 or float64.
        cu_seqlens: ``[b + 1]``, int32, of whole sequences.
        second_half_lse_seqlen: the last dimension of the output; at least ``s // 2`` or
            ``t // 2``.
        lse_packed: whether lse is ``[h, t]``.

    Returns:
        ``[b, h, second_half_lse_seqlen]`` or ``[h, second_half_lse_seqlen]``, the dtype of
        ``lse``, contiguous.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    return lse.new_empty((*lse.shape[:-1], second_half_lse_seqlen))


@contract(
    family="context_parallel",
    check=_check_out_correction,
    samples=_out_correction_samples,
    tolerance=OUT_TOLERANCE,
    oracle=_out_correction_oracle,
    mutates=("out",),
)
def thd_out_correction(
    out: Tensor,
    out_per_step: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    *,
    only_second_half: bool = False,
    lse_packed: bool = False,
) -> None:
    """Adds a step's contribution to the output of attention, in place.

    ``out = out + exp(lse_per_step - lse) * out_per_step`` for every query and head, or for
    those of second halves alone. ``out`` starts as zeros, and is the output over all keys
    once every step has been added with the lse over all keys. Computed in float32
    (float64 if ``out`` or ``lse`` is) and rounded once. Where ``lse`` or ``lse_per_step`` is
    -inf, ``out`` stays as it is, whatever ``out_per_step`` holds. The head of this module
    defines the layouts.

    Args:
        out: ``[t, h, d]``; float32, bfloat16, float16 or float64. Written.
        out_per_step: ``[t, h, d]``, or ``[t // 2, h, d]`` with ``only_second_half``; dtype of
            ``out``.
        lse: over all keys: ``[b, h, s]``, or ``[h, t]`` if packed; float32 or float64.
        lse_per_step: over the keys of the step: shape of ``lse``, but the last dimension may be
            larger, or with ``only_second_half`` as small as half of it; dtype of ``lse``.
        cu_seqlens: ``[b + 1]``, int32, of ``out``.
        only_second_half: the step has only the second half of each sequence's queries.
        lse_packed: whether lse is ``[h, t]``.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """


@contract(
    family="context_parallel",
    check=_check_grad_correction,
    samples=_grad_correction_samples,
    tolerance=SUM_TOLERANCE,
    oracle=_grad_correction_oracle,
    mutates=("grad",),
)
def thd_grad_correction(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, *, first_half: str, second_half: str
) -> None:
    """Adds or copies a step's gradient into the sum over the steps, half by half, in place.

    ``first_half`` says what happens to the first half of every sequence and ``second_half`` what
    happens to the second: ``"add"`` is ``grad = grad + grad_per_step``, ``"copy"`` is
    ``grad = grad_per_step``, and ``"none"`` leaves it unchanged. Sums are computed in float32
    (float64 for float64) and rounded once; copies are exact. The head of this module defines the
    layouts.

    Args:
        grad: ``[t, h, d]``, or ``[2, t, h, d]``, of keys and values; float32, bfloat16,
            float16 or float64. Written.
        grad_per_step: the shape of ``grad``; if one half is ``"none"``, only the other halves,
            with ``t // 2`` instead of t. Dtype of ``grad``.
        cu_seqlens: ``[b + 1]``, int32, of ``grad``.
        first_half: ``"add"``, ``"copy"`` or ``"none"``.
        second_half: the same; ``"none"`` for one of them at most.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """


@contract(
    family="context_parallel",
    check=_check_indices,
    samples=_indices_samples,
    tolerance={"int32": EXACT},
    oracle=_indices_oracle,
)
def thd_get_partitioned_indices(
    cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int
) -> Tensor:
    """Which tokens a rank holds: its two chunks of each sequence, as at the head of this module.

    For each sequence, the indices of chunk ``rank`` and then of chunk
    ``2 * world_size - 1 - rank``, out of ``2 * world_size``. Tokens after the last sequence are
    treated as one more sequence, so that all ranks together have each token once.

    Args:
        cu_seqlens: ``[b + 1]``, int32, of all ranks' tokens together. Every length is a
            multiple of ``2 * world_size``. With other lengths, or more tokens than
            ``total_tokens``, the indices are not defined, but still at least 0
            and below ``total_tokens``.
        total_tokens: t, a multiple of ``2 * world_size``.
        world_size: number of ranks.
        rank: this rank, from 0.

    Returns:
        ``[t // world_size]``, int32.

    Raises:
        ArgumentError: a shape, dtype or number is not as above.
    """
    return cu_seqlens.new_empty((total_tokens // world_size,))
