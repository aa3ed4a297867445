"""The layouts around attention: packed projections, padded sequences, the cache of keys and values.

These operators only move values, so results are bit-exact for every dtype, and the data of
quantised tensors can be moved as well.

**Sequences.** ``cu_seqlens`` says where each sequence begins, from 0, and where the last one
ends, not decreasing. ``thd`` is ``[t, h, d]``, where sequences follow one another; rows
after the last sequence belong to none. ``bshd`` is ``[b, s, h, d]`` and ``sbhd`` is
``[s, b, h, d]``, where a sequence of fewer than s tokens has the first places.

The values of ``cu_seqlens`` and of other index tensors are not checked, because the host would
have to wait for the device. A token whose destination does not exist is left out, and
nothing is read or written outside the tensors, whatever the indices are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.core.contract import Backward, Sample, Tolerance, contract
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.ops import _checks as check
from transformer_engine_fl.ops._dtypes import COPIED
from transformer_engine_fl.ops._samples import arranged, data, int32, with_extremes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "convert_bshd_to_thd",
    "convert_thd_to_bshd",
    "copy_to_kv_cache",
    "fa_prepare_bwd",
    "fa_prepare_fwd",
]

AXES = {"sbhd": "[s, b, h, d]", "bshd": "[b, s, h, d]", "thd": "[t, h, d]"}

EXACT = dict.fromkeys(COPIED, Tolerance(rtol=0.0, atol=0.0))


# ------------------------------------------------------------------------------ checks


def _check_prepare(op: str, qkv: Any) -> None:
    tensor = check.is_tensor(op, "qkv", qkv, dtypes=COPIED)
    check.has_axes(op, "qkv", tensor, "[s, b, n, 3 * h]")
    if tensor.shape[3] % 3:
        expected = "[s, b, n, 3 * h]: the last dimension three heads wide"
        raise ArgumentError(op, "qkv", check.describe(qkv), expected)


def _check_prepare_backward(op: str, q_grad: Any, k_grad: Any, v_grad: Any) -> None:
    first = check.is_tensor(op, "q_grad", q_grad, dtypes=COPIED)
    check.has_axes(op, "q_grad", first, "[b, s, n, h]")
    for name, value in (("k_grad", k_grad), ("v_grad", v_grad)):
        tensor = check.is_tensor(op, name, value, dtypes=(check.dtype_name(first.dtype),))
        check.has_shape(op, name, tensor, first.shape, "the shape of 'q_grad'")
    check.same_device(op, "q_grad", {"q_grad": q_grad, "k_grad": k_grad, "v_grad": v_grad})


def _check_thd_to_bshd(op: str, tensor: Any, cu_seqlens: Any, max_seq_len: Any) -> None:
    tokens = check.is_tensor(op, "tensor", tensor, dtypes=COPIED)
    check.has_axes(op, "tensor", tokens, AXES["thd"])
    check.is_cu_seqlens(op, "cu_seqlens", cu_seqlens)
    check.is_integer(op, "max_seq_len", max_seq_len)
    check.same_device(op, "tensor", {"tensor": tensor, "cu_seqlens": cu_seqlens})


def _check_bshd_to_thd(op: str, tensor: Any, cu_seqlens: Any, total_tokens: Any) -> None:
    tokens = check.is_tensor(op, "tensor", tensor, dtypes=COPIED)
    check.has_axes(op, "tensor", tokens, AXES["bshd"])
    sequences = check.is_cu_seqlens(op, "cu_seqlens", cu_seqlens)
    shape = (sequences, *tokens.shape[1:])
    check.has_shape(op, "tensor", tokens, shape, "the sequences of 'cu_seqlens'")
    check.is_integer(op, "total_tokens", total_tokens)
    check.same_device(op, "tensor", {"tensor": tensor, "cu_seqlens": cu_seqlens})


def _check_cache(
    op: str,
    new_k: Any,
    new_v: Any,
    k_cache: Any,
    v_cache: Any,
    cu_new_lens: Any,
    cu_cached_lens: Any,
    page_table: Any,
    batch_indices: Any,
    qkv_format: Any,
) -> None:
    check.is_choice(op, "qkv_format", qkv_format, AXES)
    keys = check.is_tensor(op, "new_k", new_k, dtypes=COPIED)
    check.has_axes(op, "new_k", keys, AXES[qkv_format])
    same = (check.dtype_name(keys.dtype),)
    values = check.is_tensor(op, "new_v", new_v, dtypes=same, min_ndim=1)
    shape = (*keys.shape[:-1], values.shape[-1])
    check.has_shape(op, "new_v", values, shape, "as 'new_k' but for the last dimension")
    sequences = check.is_cu_seqlens(op, "cu_new_lens", cu_new_lens)
    cached = check.is_tensor(op, "cu_cached_lens", cu_cached_lens, dtypes=("int32",))
    check.has_shape(op, "cu_cached_lens", cached, cu_new_lens.shape, "as 'cu_new_lens'")
    if qkv_format != "thd":
        batch = list(keys.shape)
        batch[qkv_format.index("b")] = sequences
        check.has_shape(op, "new_k", keys, batch, "the sequences of 'cu_new_lens'")

    k_pages = check.is_tensor(op, "k_cache", k_cache, dtypes=same)
    check.has_axes(op, "k_cache", k_pages, "[pages, page_size, h, d]")
    shape = (*k_pages.shape[:2], *keys.shape[-2:])
    check.has_shape(op, "k_cache", k_pages, shape, "the heads of 'new_k'")
    v_pages = check.is_tensor(op, "v_cache", v_cache, dtypes=same)
    shape = (*k_pages.shape[:2], *values.shape[-2:])
    check.has_shape(op, "v_cache", v_pages, shape, "the pages of 'k_cache', the heads of 'new_v'")
    check.is_writable(op, "k_cache", k_pages)
    check.is_writable(op, "v_cache", v_pages)

    if page_table is not None:
        pages = check.is_tensor(op, "page_table", page_table, dtypes=("int32",), min_ndim=1)
        shape = (sequences, pages.shape[-1])
        check.has_shape(op, "page_table", pages, shape, "the pages of each sequence")
        if batch_indices is not None:
            expected = "None: with a page_table a sequence moves by its pages"
            raise ArgumentError(op, "batch_indices", check.describe(batch_indices), expected)
    elif k_pages.shape[0] < sequences:
        expected = f"a row for each of {sequences} sequences, as there is no page_table"
        raise ArgumentError(op, "k_cache", check.describe(k_cache), expected)
    if batch_indices is not None:
        rows = check.is_tensor(op, "batch_indices", batch_indices, dtypes=("int32",))
        check.has_shape(op, "batch_indices", rows, (sequences,), "one for each sequence")
    given = {
        "new_k": new_k,
        "new_v": new_v,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "cu_new_lens": cu_new_lens,
        "cu_cached_lens": cu_cached_lens,
        "page_table": page_table,
        "batch_indices": batch_indices,
    }
    check.same_device(op, "new_k", given)


# ------------------------------------------------------------------------------ oracles


def _prepare_oracle(qkv: Tensor) -> Tensor:
    import torch

    head = qkv.shape[-1] // 3
    parts = [qkv.double()[..., i * head : (i + 1) * head] for i in range(3)]
    return torch.stack([part.transpose(0, 1) for part in parts])


def _prepare_backward_oracle(q_grad: Tensor, k_grad: Tensor, v_grad: Tensor) -> Tensor:
    """Does not use autograd, whose sums turn -0.0 into 0.0."""
    import torch

    batch, tokens, heads, head = q_grad.shape
    output = q_grad.new_empty((tokens, batch, heads, 3 * head), dtype=torch.float64)
    for i, grad in enumerate((q_grad, k_grad, v_grad)):
        output[..., i * head : (i + 1) * head] = grad.double().transpose(0, 1)
    return output


def _thd_to_bshd_oracle(tensor: Tensor, cu_seqlens: Tensor, max_seq_len: int) -> Tensor:
    import torch

    bounds = list(pairwise(cu_seqlens.tolist()))
    output = tensor.new_zeros((len(bounds), max_seq_len, *tensor.shape[1:]), dtype=torch.float64)
    for sequence, (begin, end) in enumerate(bounds):
        tokens = tensor[begin:end].double()[:max_seq_len]
        output[sequence, : tokens.shape[0]] = tokens
    return output


def _bshd_to_thd_oracle(tensor: Tensor, cu_seqlens: Tensor, total_tokens: int) -> Tensor:
    import torch

    output = tensor.new_zeros((total_tokens, *tensor.shape[2:]), dtype=torch.float64)
    for sequence, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        tokens = tensor[sequence].double()[: end - begin][: max(total_tokens - begin, 0)]
        output[begin : begin + tokens.shape[0]] = tokens
    return output


def _cache_oracle(
    new_k: Tensor,
    new_v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_new_lens: Tensor,
    cu_cached_lens: Tensor,
    *,
    page_table: Tensor | None = None,
    batch_indices: Tensor | None = None,
    qkv_format: str = "thd",
) -> tuple[Tensor, Tensor]:
    """Copies token by token, with Python's integers."""
    new, cached = cu_new_lens.tolist(), cu_cached_lens.tolist()
    lengths = [(new[i + 1] - new[i], cached[i + 1] - cached[i]) for i in range(len(new) - 1)]

    def filled(tokens: Tensor, cache: Tensor) -> Tensor:
        tokens, before = tokens.double(), cache.double()
        after = before.clone()
        pages, page_size = cache.shape[:2]
        for sequence, (added, total) in enumerate(lengths):
            if batch_indices is not None:
                row = int(batch_indices[sequence])
                stays = min(max(total - added, 0), page_size)
                if 0 <= row < pages:
                    after[sequence, :stays] = before[row, :stays]
            for place in range(added):
                if qkv_format == "thd":
                    token = tokens[new[sequence] + place :][:1]
                else:
                    own = tokens.select(qkv_format.index("b"), sequence)
                    token = own[place : place + 1]
                position = total - added + place
                page = sequence
                if page_table is not None:
                    listed = page_table[sequence].tolist()
                    number, position = divmod(position, page_size) if page_size else (-1, -1)
                    page = listed[number] if 0 <= number < len(listed) else -1
                if token.shape[0] and 0 <= page < pages and 0 <= position < page_size:
                    after[page, position] = token[0]
        return after

    return filled(new_k, k_cache), filled(new_v, v_cache)


# ------------------------------------------------------------------------------ samples


_PACKED = {
    "typical": (6, 2, 3, 24),
    "odd sizes": (5, 3, 7, 33),
    "one token": (1, 1, 1, 3),
    "one token of one head in a batch": (1, 4, 1, 6),
    "many tokens": (130, 2, 1, 6),
    "wide": (2, 2, 2, 768),
    "no tokens": (0, 2, 3, 24),
    "no sequences": (6, 0, 3, 24),
    "no width": (6, 2, 3, 0),
}


def _prepare_samples(dtype: str, device: str) -> Iterator[Sample]:
    for seed, (label, shape) in enumerate(_PACKED.items()):
        yield Sample(label, (data(shape, dtype, device, seed),))
    for label, tensor in arranged(_PACKED["typical"], dtype, device, seed=60):
        yield Sample(label, (tensor,))
    yield Sample("special values", (with_extremes(_PACKED["typical"], dtype, device, seed=61),))


def _prepare_backward_samples(dtype: str, device: str) -> Iterator[Sample]:
    for sample in _prepare_samples(dtype, device):
        (packed,) = sample.args
        parts = packed.transpose(0, 1).unflatten(-1, (3, packed.shape[-1] // 3)).unbind(-2)
        yield Sample(f"{sample.label}, parts of one tensor", parts)
    shape = (2, 6, 3, 8)
    apart = tuple(data(shape, dtype, device, seed) for seed in (62, 63, 64))
    yield Sample("three tensors", apart)
    yield Sample(
        "three layouts", (apart[0], apart[1].mT.contiguous().mT, apart[2][:1].expand(shape))
    )


_SEQUENCES: dict[str, tuple[int, list[int], int]] = {
    # label: number of tokens, cu_seqlens, max_seq_len
    "typical": (9, [0, 3, 8, 9], 5),
    "one sequence": (7, [0, 7], 7),
    "empty sequences": (9, [0, 0, 3, 3, 3, 9, 9], 6),
    "no tokens at all": (0, [0, 0, 0], 4),
    "more places than tokens": (9, [0, 3, 8, 9], 11),
    "fewer places than tokens": (9, [0, 3, 8, 9], 2),
    "no places": (9, [0, 3, 8, 9], 0),
    "tokens of no sequence": (12, [0, 3, 8, 9], 5),
    "fewer tokens than the sequences have": (7, [0, 3, 8, 9], 5),
    "many sequences": (260, list(range(0, 261, 2)), 2),
}


def _thd_to_bshd_samples(dtype: str, device: str) -> Iterator[Sample]:
    for label, (tokens, bounds, longest) in _SEQUENCES.items():
        tensor = data((tokens, 2, 5), dtype, device, seed=70)
        yield Sample(label, (tensor, int32(bounds, device), longest))
    offsets = int32([0, 3, 8, 9], device)
    for label, tensor in arranged((9, 3, 8), dtype, device, seed=71):
        yield Sample(label, (tensor, offsets, 5))
    yield Sample("special values", (with_extremes((9, 3, 8), dtype, device, seed=72), offsets, 6))
    yield Sample("no heads", (data((9, 0, 8), dtype, device, seed=73), offsets, 5))
    yield Sample("wide", (data((9, 2, 256), dtype, device, seed=74), offsets, 5))
    strided = int32([0, 1, 3, 2, 8, 7, 9, 5], device)[::2]
    yield Sample("strided cu_seqlens", (data((9, 3, 8), dtype, device, seed=75), strided, 5))


def _bshd_to_thd_samples(dtype: str, device: str) -> Iterator[Sample]:
    for label, (tokens, bounds, longest) in _SEQUENCES.items():
        tensor = data((len(bounds) - 1, longest, 2, 5), dtype, device, seed=80)
        yield Sample(label, (tensor, int32(bounds, device), tokens))
    offsets = int32([0, 3, 8, 9], device)
    for label, tensor in arranged((3, 5, 3, 8), dtype, device, seed=81):
        yield Sample(label, (tensor, offsets, 9))
    yield Sample(
        "special values", (with_extremes((3, 6, 3, 8), dtype, device, seed=82), offsets, 9)
    )
    yield Sample("no heads", (data((3, 5, 0, 8), dtype, device, seed=83), offsets, 9))
    yield Sample("wide", (data((3, 5, 2, 256), dtype, device, seed=84), offsets, 9))


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of generation.

    Attributes:
        added: the number of new tokens of each sequence.
        lengths: the number of cached tokens of each sequence, including the new ones.
        pages: the number of pages, and of tokens in each.
        options: of the call; lists become int32 tensors.
    """

    added: list[int]
    lengths: list[int]
    pages: tuple[int, int]
    options: dict[str, list[Any]] = field(default_factory=dict)

    def sample(
        self, label: str, dtype: str, device: str, qkv_format: str = "thd", **other: Tensor
    ) -> Sample:
        """A call with two heads, six features in keys and four in values; ``other`` arguments
        replace those of the same name.
        """
        leading = {
            "thd": (sum(self.added),),
            "bshd": (len(self.added), max(self.added)),
            "sbhd": (max(self.added), len(self.added)),
        }[qkv_format]
        given = {
            "new_k": data((*leading, 2, 6), dtype, device, seed=85),
            "new_v": data((*leading, 2, 4), dtype, device, seed=86),
            "k_cache": data((*self.pages, 2, 6), dtype, device, seed=87),
            "v_cache": data((*self.pages, 2, 4), dtype, device, seed=88),
            "cu_new_lens": int32([0, *accumulate(self.added)], device),
            "cu_cached_lens": int32([0, *accumulate(self.lengths)], device),
        }
        options: dict[str, Any] = {name: int32(it, device) for name, it in self.options.items()}
        if qkv_format != "thd":
            label, options["qkv_format"] = f"{label}, {qkv_format}", qkv_format
        return Sample(label, tuple((given | other).values()), options)


_STEPS = {
    "typical": _Step(
        [1, 3, 2],
        [4, 3, 7],
        (8, 2),
        {"page_table": [[5, 1, 0, 0], [2, 7, 0, 0], [6, 3, 4, 0]]},
    ),
    "one page each": _Step([1, 3, 2], [4, 3, 7], (3, 8), {"page_table": [[2], [0], [1]]}),
    "no page table": _Step([1, 3, 2], [4, 3, 7], (3, 8)),
    "more rows than sequences": _Step([1, 3, 2], [4, 3, 7], (5, 8)),
    "one new token each": _Step([1, 1, 1], [1, 8, 5], (3, 8)),
    "sequences without a new token": _Step([0, 3, 0], [4, 3, 0], (3, 8)),
    "nothing new": _Step([0, 0], [4, 3], (2, 8)),
    "one sequence": _Step([5], [5], (1, 5)),
    "pages of one token": _Step([2, 1], [2, 3], (6, 1), {"page_table": [[4, 2, 0], [0, 5, 3]]}),
    "sequences that move": _Step([1, 1, 1], [4, 6, 1], (4, 8), {"batch_indices": [1, 3, 2]}),
    "sequences that swap rows": _Step([0, 2], [4, 6], (2, 8), {"batch_indices": [1, 0]}),
    "moves from no row": _Step([1, 1], [4, 6], (2, 8), {"batch_indices": [2, -1]}),
    "more tokens than the cache holds": _Step([6, 1], [9, 9], (2, 8)),
    "more tokens than the pages hold": _Step(
        [3, 2], [5, 2], (4, 2), {"page_table": [[3, 0], [1, 2]]}
    ),
    "more new tokens than cached ones": _Step([3, 2], [2, 2], (2, 8)),
    "pages that there are not": _Step([2, 4], [2, 4], (4, 2), {"page_table": [[9, 0], [-1, 2]]}),
    "no pages": _Step([2, 1], [2, 1], (0, 2), {"page_table": [[0], [0]]}),
    "pages of no tokens": _Step([2, 1], [2, 1], (3, 0)),
    "a page table of no pages": _Step([2, 1], [2, 1], (3, 4), {"page_table": [[], []]}),
}


def _cache_samples(dtype: str, device: str) -> Iterator[Sample]:
    for label, step in _STEPS.items():
        yield step.sample(label, dtype, device)
        if label in ("typical", "no page table"):
            yield step.sample(label, dtype, device, "bshd")
            yield step.sample(label, dtype, device, "sbhd")

    def typical(label: str, **other: Tensor) -> Sample:
        return _STEPS["typical"].sample(label, dtype, device, "thd", **other)

    for label, tensor in arranged((6, 2, 6), dtype, device, seed=91):
        yield typical(f"{label} new_k", new_k=tensor)
    for label, tensor in arranged((8, 2, 2, 6), dtype, device, seed=92):
        if label != "expanded":
            yield typical(f"{label} k_cache", k_cache=tensor)
    whole = data((8, 2, 2, 10), dtype, device, seed=93)
    yield typical("caches in one tensor", k_cache=whole[..., :6], v_cache=whole[..., 6:])
    yield typical("special values", new_k=with_extremes((6, 2, 6), dtype, device, seed=94))
    tokens = {"tokens of no sequence": 9, "fewer tokens than are new": 5, "no tokens": 0}
    for label, count in tokens.items():
        keys = data((count, 2, 6), dtype, device, seed=95)
        yield typical(label, new_k=keys, new_v=keys[..., 2:])


# ---------------------------------------------------------------------------- contracts


@contract(
    family="attention_layout",
    check=_check_prepare,
    samples=_prepare_samples,
    tolerance=EXACT,
    oracle=_prepare_oracle,
    backward=Backward(
        "fa_prepare_bwd",
        saves={},
        gradients=("qkv",),
        output_grads=("q_grad", "k_grad", "v_grad"),
        unbind=True,
    ),
)
def fa_prepare_fwd(qkv: Tensor) -> Tensor:
    """Queries, keys and values out of an interleaved projection, batch first.

    ``output[i, b, s, n, j] = qkv[s, b, n, i * h + j]``: from the layout that a projection writes
    to the one that flash attention reads. (Transformer Engine's operator of this name takes only
    the queries, an ``[s, b, n, h]`` view with the strides of the whole tensor, and reads past
    their end. Here the whole tensor is the argument.)

    Args:
        qkv: ``[s, b, n, 3 * h]``, for each of n heads its query, its key and its value; any
            strides; float32, bfloat16, float16, float64, float8_e4m3fn, float8_e5m2 or uint8.

    Returns:
        ``[3, b, s, n, h]``, queries, keys and values; the dtype of ``qkv``, contiguous.
        :func:`transformer_engine_fl.functional.fa_prepare` returns three tensors. The
        backward needs nothing from the forward.

    Raises:
        ArgumentError: a shape or dtype is not as above.
    """
    tokens, batch, heads, width = qkv.shape
    return qkv.new_empty((3, batch, tokens, heads, width // 3))


@contract(
    family="attention_layout",
    check=_check_prepare_backward,
    samples=_prepare_backward_samples,
    tolerance=EXACT,
    oracle=_prepare_backward_oracle,
)
def fa_prepare_bwd(q_grad: Tensor, k_grad: Tensor, v_grad: Tensor) -> Tensor:
    """Gradient of :func:`fa_prepare_fwd`: interleaves the three gradients, sequence first.

    ``dqkv[s, b, n, i * h + j] = grad_i[b, s, n, j]``, where grad_0, grad_1 and grad_2 are
    ``q_grad``, ``k_grad`` and ``v_grad``.

    Args:
        q_grad: ``[b, s, n, h]``, the gradient of the queries; any strides; float32, bfloat16,
            float16, float64, float8_e4m3fn, float8_e5m2 or uint8.
        k_grad: of the keys; shape and dtype of ``q_grad``.
        v_grad: of the values; shape and dtype of ``q_grad``.

    Returns:
        dqkv: ``[s, b, n, 3 * h]``, the dtype of ``q_grad``, contiguous.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    batch, tokens, heads, head = q_grad.shape
    return q_grad.new_empty((tokens, batch, heads, 3 * head))


@contract(
    family="attention_layout",
    check=_check_thd_to_bshd,
    samples=_thd_to_bshd_samples,
    tolerance=EXACT,
    oracle=_thd_to_bshd_oracle,
    backward=Backward(
        "convert_bshd_to_thd",
        saves={"cu_seqlens": "cu_seqlens"},
        gradients=("tensor",),
        sizes={"total_tokens": ("tensor", 0)},
    ),
)
def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, max_seq_len: int) -> Tensor:
    """Puts sequences that follow one another into a row each.

    ``output[i, p] = tensor[cu_seqlens[i] + p]`` for p below the length of sequence i,
    ``cu_seqlens[i + 1] - cu_seqlens[i]``, and 0 for larger p. The tokens of a sequence from
    number ``max_seq_len`` on are left out. The gradient is :func:`convert_bshd_to_thd`.

    Args:
        tensor: ``[t, h, d]``; float32, bfloat16, float16, float64, float8_e4m3fn,
            float8_e5m2 or uint8.
        cu_seqlens: ``[b + 1]``, int32, as at the head of this module.
        max_seq_len: at least 0; no token is lost if it is the length of the longest sequence.

    Returns:
        ``[b, max_seq_len, h, d]``, the dtype of ``tensor``, contiguous.

    Raises:
        ArgumentError: a shape, dtype, number or device does not agree.
    """
    return tensor.new_empty((cu_seqlens.shape[0] - 1, max_seq_len, *tensor.shape[1:]))


@contract(
    family="attention_layout",
    check=_check_bshd_to_thd,
    samples=_bshd_to_thd_samples,
    tolerance=EXACT,
    oracle=_bshd_to_thd_oracle,
    backward=Backward(
        "convert_thd_to_bshd",
        saves={"cu_seqlens": "cu_seqlens"},
        gradients=("tensor",),
        sizes={"max_seq_len": ("tensor", 1)},
    ),
)
def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, total_tokens: int) -> Tensor:
    """Puts sequences that have a row each one after another.

    ``output[cu_seqlens[i] + p] = tensor[i, p]`` for p below the length of sequence i. Tokens
    that ``tensor`` does not have, and those after the last sequence, are 0. The gradient is
    :func:`convert_thd_to_bshd`.

    Args:
        tensor: ``[b, s, h, d]``; float32, bfloat16, float16, float64, float8_e4m3fn,
            float8_e5m2 or uint8.
        cu_seqlens: ``[b + 1]``, int32, as at the head of this module.
        total_tokens: t, at least 0; ``cu_seqlens[b]``, or more where the tensor is padded.

    Returns:
        ``[t, h, d]``, the dtype of ``tensor``, contiguous.

    Raises:
        ArgumentError: a shape, dtype, number or device does not agree.
    """
    return tensor.new_empty((total_tokens, *tensor.shape[2:]))


@contract(
    family="attention_layout",
    check=_check_cache,
    samples=_cache_samples,
    tolerance=EXACT,
    oracle=_cache_oracle,
    mutates=("k_cache", "v_cache"),
)
def copy_to_kv_cache(
    new_k: Tensor,
    new_v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_new_lens: Tensor,
    cu_cached_lens: Tensor,
    *,
    page_table: Tensor | None = None,
    batch_indices: Tensor | None = None,
    qkv_format: str = "thd",
) -> None:
    """Appends the new keys and values of each sequence to its cache, in place.

    Sequence i has ``n = cu_new_lens[i + 1] - cu_new_lens[i]`` new tokens, and
    ``c = cu_cached_lens[i + 1] - cu_cached_lens[i]`` cached tokens including these. Its new token
    j goes to position ``p = c - n + j``, which is

    - ``cache[page_table[i, p // page_size], p % page_size]`` with a ``page_table`` (paged
      attention; Kwon et al., 2023, arXiv:2309.06180),
    - ``cache[i, p]`` without one, where each sequence has a row of the cache.

    Without a ``page_table``, ``batch_indices`` may give the row that each sequence had
    before this step: ``cache[i, p]`` for p below ``c - n`` is then what
    ``cache[batch_indices[i], p]`` was before the call, whatever the order of the rows.
    (Transformer Engine's operator of this name takes these indices as its ``page_table`` if
    ``is_non_paged``.)

    A token is left out where ``new_k`` has no such token, or p or its page is outside the
    cache or the table; rows are moved with the same exceptions. Everything else in the caches
    stays as it is. Where two tokens go to the same place, which of them stays is not defined.

    Args:
        new_k: as ``qkv_format`` says, with h heads of d features. In ``thd`` the new tokens
            of sequence i begin at ``cu_new_lens[i]``; otherwise they are its first ones.
            float32, bfloat16, float16, float64, float8_e4m3fn, float8_e5m2 or uint8.
        new_v: the same for the values, whose d may differ; dtype of ``new_k``.
        k_cache: ``[pages, page_size, h, d]``, or ``[rows, max_seq_len, h, d]`` with at least
            b rows; any strides, dtype of ``new_k``. Written.
        v_cache: the same for the values. Written.
        cu_new_lens: ``[b + 1]``, int32, cumulative numbers of new tokens, from 0.
        cu_cached_lens: ``[b + 1]``, int32, cumulative numbers of cached tokens, including the
            new ones.
        page_table: ``[b, max_pages_per_seq]``, int32; the pages of each sequence, in order.
        batch_indices: ``[b]``, int32; only without ``page_table``.
        qkv_format: ``"thd"``, ``"bshd"`` or ``"sbhd"``, the layout of ``new_k`` and ``new_v``.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
