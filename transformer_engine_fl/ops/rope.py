"""Rotary position embedding, of one tensor or of packed queries, keys and values.

Tokens come in one of three formats: ``sbhd`` is ``[s, b, h, d]``, ``bshd`` is
``[b, s, h, d]``, and ``thd`` is ``[t, h, d]``, where sequences of several lengths follow
one another and ``cu_seqlens`` says where each begins.

**Pairs.** The first d2 of the d features are rotated, in pairs ``(i, i + d2 / 2)``, or
``(2 * i, 2 * i + 1)`` if ``interleaved``; the others are copied. Feature ``i`` of a
token at position p is rotated by the angle ``freqs[p, 0, 0, i]``. The two features of a pair
commonly have the same angle, but each is rotated by its own entry.

**Positions.** A token's position is its place in its sequence, plus ``start_positions`` of
that sequence. Under context parallelism each full sequence is cut into ``2 * cp_size``
chunks of equal length, and rank r holds chunk r followed by chunk ``2 * cp_size - 1 - r``,
so that causal attention costs every rank the same. A call sees the tokens of its rank;
their positions are those in the full sequence.

**Out of range.** A position for which ``freqs`` has no row makes the rotated features NaN:
raising an error would make the host wait for the device. Tokens of ``thd`` after the last
sequence belong to none, and are copied as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.core.contract import Backward, Sample, Tolerance, contract
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.ops import _checks as check

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "fused_qkv_rope_backward",
    "fused_qkv_rope_forward",
    "fused_rope_backward",
    "fused_rope_forward",
]

DTYPES = ("float32", "bfloat16", "float16", "float64")

AXES = {"sbhd": "[s, b, h, d]", "bshd": "[b, s, h, d]", "thd": "[t, h, d]"}

TOLERANCE = {
    "float32": Tolerance(rtol=1e-6, atol=1e-6),
    "bfloat16": Tolerance(rtol=2**-8, atol=2**-9),
    "float16": Tolerance(rtol=2**-10, atol=2**-11),
    "float64": Tolerance(rtol=1e-13, atol=1e-13),
}


# ------------------------------------------------------------------------------ checks


def _check_tokens(op: str, name: str, value: Any, qkv_format: Any) -> Tensor:
    check.is_choice(op, "qkv_format", qkv_format, AXES)
    tensor = check.is_tensor(op, name, value, dtypes=DTYPES)
    axes = AXES[qkv_format]
    if tensor.ndim != axes.count(",") + 1:
        raise ArgumentError(op, name, check.describe(value), f"{axes}, for {qkv_format!r}")
    return tensor


def _check_positions(
    op: str,
    tokens: Tensor,
    start_positions: Any,
    qkv_format: str,
    cu_seqlens: Any,
    cp_size: Any,
    cp_rank: Any,
) -> int:
    """Check the arguments that determine positions; returns the least number of rows of freqs."""
    check.is_integer(op, "cp_size", cp_size, at_least=1)
    check.is_integer(op, "cp_rank", cp_rank, below=cp_size)
    if qkv_format == "thd":
        sequences, rows = check.is_cu_seqlens(op, "cu_seqlens", cu_seqlens), 0
    else:
        if cu_seqlens is not None:
            expected = f"None: sequences in {qkv_format!r} all have the same length"
            raise ArgumentError(op, "cu_seqlens", check.describe(cu_seqlens), expected)
        axis = qkv_format.index("s")
        length, sequences = tokens.shape[axis], tokens.shape[1 - axis]
        if cp_size > 1 and length % 2:
            expected = "an even number of tokens (two chunks), as cp_size is above 1"
            raise ArgumentError(op, "qkv_format", f"{qkv_format!r} with s = {length}", expected)
        rows = length * cp_size
    if start_positions is not None:
        starts = check.is_tensor(op, "start_positions", start_positions, dtypes=("int32",))
        check.has_shape(op, "start_positions", starts, (sequences,), "one for each sequence")
    return rows


def _check_freqs(op: str, name: str, value: Any, width: int, rows: int) -> None:
    freqs = check.is_tensor(op, name, value, dtypes=("float32",))
    if freqs.ndim != 4 or freqs.shape[1] != 1 or freqs.shape[2] != 1:
        raise ArgumentError(op, name, check.describe(value), "shape [positions, 1, 1, d2]")
    rotated = freqs.shape[3]
    if rotated % 2 or not 2 <= rotated <= width:
        expected = f"an even d2 (the last dimension) of at least 2 and at most d, {width}"
        raise ArgumentError(op, name, check.describe(value), expected)
    if freqs.shape[0] < rows:
        expected = f"a row for each position of a full sequence, at least {rows}"
        raise ArgumentError(op, name, check.describe(value), expected)


def _check_rope(
    op: str,
    *,
    freqs: Any,
    start_positions: Any,
    qkv_format: Any,
    interleaved: Any,
    cu_seqlens: Any,
    cp_size: Any,
    cp_rank: Any,
    **tokens: Any,
) -> None:
    ((name, value),) = tokens.items()
    tensor = _check_tokens(op, name, value, qkv_format)
    rows = _check_positions(op, tensor, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank)
    _check_freqs(op, "freqs", freqs, tensor.shape[-1], rows)
    check.is_flag(op, "interleaved", interleaved)
    others = {"freqs": freqs, "start_positions": start_positions, "cu_seqlens": cu_seqlens}
    check.same_device(op, name, {name: tensor, **others})


def _check_split(op: str, value: Any) -> tuple[int, int, int]:
    expected = "three positive integers (dq, dk, dv), dq a multiple of dk"
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 3:
        raise ArgumentError(op, "qkv_split", check.describe(value), expected)
    for width in value:
        check.is_integer(op, "qkv_split", width, at_least=1)
    dq, dk, dv = value
    if dq % dk:
        raise ArgumentError(op, "qkv_split", check.describe(value), expected)
    return dq, dk, dv


def _check_qkv_rope(
    op: str,
    *,
    q_freqs: Any,
    k_freqs: Any,
    qkv_split: Any,
    start_positions: Any,
    qkv_format: Any,
    interleaved: Any,
    cu_seqlens: Any,
    cp_size: Any,
    cp_rank: Any,
    **tokens: Any,
) -> None:
    """The checks that forward and backward share; the first of ``tokens`` is the reference."""
    _, dk, _ = _check_split(op, qkv_split)
    name, value = next(iter(tokens.items()))
    tensor = _check_tokens(op, name, value, qkv_format)
    rows = _check_positions(op, tensor, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank)
    _check_freqs(op, "q_freqs", q_freqs, dk, rows)
    _check_freqs(op, "k_freqs", k_freqs, dk, rows)
    check.is_flag(op, "interleaved", interleaved)
    others = {
        "q_freqs": q_freqs,
        "k_freqs": k_freqs,
        "start_positions": start_positions,
        "cu_seqlens": cu_seqlens,
    }
    check.same_device(op, name, {**tokens, **others})


def _check_qkv_forward(op: str, qkv_input: Any, qkv_split: Any, **others: Any) -> None:
    _check_qkv_rope(op, qkv_input=qkv_input, qkv_split=qkv_split, **others)
    check.has_shape(
        op,
        "qkv_input",
        qkv_input,
        (*qkv_input.shape[:-1], sum(qkv_split)),
        "the widths of qkv_split together",
    )


def _check_qkv_backward(
    op: str, q_grad: Any, k_grad: Any, v_grad: Any, qkv_split: Any, qkv_format: Any, **others: Any
) -> None:
    dq, dk, dv = _check_split(op, qkv_split)
    k_grad = _check_tokens(op, "k_grad", k_grad, qkv_format)
    leading, groups = k_grad.shape[:-2], k_grad.shape[-2]
    wanted = {
        "k_grad": (k_grad, groups, dk),
        "q_grad": (q_grad, groups * (dq // dk), dk),
        "v_grad": (v_grad, groups, dv),
    }
    dtype = check.dtype_name(k_grad.dtype)
    for name, (value, heads, width) in wanted.items():
        tensor = check.is_tensor(op, name, value, dtypes=(dtype,))
        why = "as 'k_grad' and qkv_split have it"
        check.has_shape(op, name, tensor, (*leading, heads, width), why)
    tokens = {"q_grad": q_grad, "k_grad": k_grad, "v_grad": v_grad}
    _check_qkv_rope(op, qkv_split=qkv_split, qkv_format=qkv_format, **tokens, **others)


# ------------------------------------------------------------------------------ oracles


def _share(length: int, cp_size: int, cp_rank: int) -> list[int]:
    """The places of the tokens that a rank holds of a full sequence of ``length`` tokens."""
    if cp_size == 1:
        return list(range(length))
    chunk = length // (2 * cp_size)
    places: list[int] = []
    for number in (cp_rank, 2 * cp_size - 1 - cp_rank):
        places += range(number * chunk, (number + 1) * chunk)
    return places


def _angles(
    tokens: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: str,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """The angle of every token and feature of a sequence, float64 ``[..., 1, d2]``."""
    import torch

    table = freqs.double()[:, 0, 0]
    missing = table.new_full((1, table.shape[1]), torch.nan)

    def sequence(length: int, number: int) -> Tensor:
        start = int(start_positions[number]) if start_positions is not None else 0
        places = [start + place for place in _share(length, cp_size, cp_rank)]
        known = [table[p : p + 1] if 0 <= p < len(table) else missing for p in places]
        return torch.cat([*known, missing[:0]])

    if qkv_format == "thd":
        assert cu_seqlens is not None
        offsets = cu_seqlens.tolist()
        lengths = [end - begin for begin, end in pairwise(offsets)]
        parts = [sequence(length, number) for number, length in enumerate(lengths)]
        return torch.cat([*parts, missing[:0]]).unsqueeze(-2)
    axis = qkv_format.index("s")
    length, batch = tokens.shape[axis] * cp_size, tokens.shape[1 - axis]
    if not batch:
        return table.new_zeros((*tokens.shape[:2], 1, table.shape[1]))
    return torch.stack([sequence(length, n) for n in range(batch)], 1 - axis).unsqueeze(-2)


def _rotated(tokens: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Each pair (u, v) becomes (u cos a - v sin a, v cos b + u sin b)."""
    rotated = angles.shape[-1]
    first = slice(0, rotated, 2) if interleaved else slice(0, rotated // 2)
    second = slice(1, rotated, 2) if interleaved else slice(rotated // 2, rotated)
    u, v = tokens[..., first], tokens[..., second]
    a, b = angles[..., first], angles[..., second]
    output = tokens.clone()
    output[..., first] = u * a.cos() - v * a.sin()
    output[..., second] = v * b.cos() + u * b.sin()
    return output


def _rope_oracle(
    input: Tensor,
    freqs: Tensor,
    *,
    start_positions: Tensor | None = None,
    qkv_format: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    import torch

    angles = _angles(input, freqs, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank)
    rotated = _rotated(input[: len(angles)].double(), angles, interleaved)
    return torch.cat([rotated, input[len(angles) :].double()])


def _rope_backward_oracle(output_grads: Tensor, freqs: Tensor, **options: Any) -> Tensor:
    """Differentiates the forward; it is linear, so any input will do."""
    import torch

    with torch.enable_grad():
        leaf = torch.zeros_like(output_grads, dtype=torch.float64).requires_grad_()
        output = _rope_oracle(leaf, freqs, **options)
        (gradient,) = torch.autograd.grad(output, leaf, output_grads.double())
    return gradient


def _qkv_rope_oracle(
    qkv_input: Tensor, q_freqs: Tensor, k_freqs: Tensor, *, qkv_split: Sequence[int], **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    dq, dk, _ = qkv_split
    queries = [
        qkv_input[..., group, start : start + dk]
        for group in range(qkv_input.shape[-2])
        for start in range(0, dq, dk)
    ]
    empty = qkv_input[..., :0, :dk]
    q = torch.stack(queries, -2) if queries else empty
    k, v = qkv_input[..., dq : dq + dk], qkv_input[..., dq + dk :]
    return _rope_oracle(q, q_freqs, **options), _rope_oracle(k, k_freqs, **options), v.double()


def _qkv_rope_backward_oracle(
    q_grad: Tensor,
    k_grad: Tensor,
    v_grad: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    *,
    qkv_split: Sequence[int],
    **options: Any,
) -> Tensor:
    import torch

    with torch.enable_grad():
        shape = (*k_grad.shape[:-1], sum(qkv_split))
        leaf = k_grad.new_zeros(shape, dtype=torch.float64).requires_grad_()
        outputs = _qkv_rope_oracle(leaf, q_freqs, k_freqs, qkv_split=qkv_split, **options)
        grads = [grad.double() for grad in (q_grad, k_grad, v_grad)]
        (gradient,) = torch.autograd.grad(outputs, leaf, grads)
    return gradient


# ------------------------------------------------------------------------------ samples

_CASES: dict[str, tuple[tuple[int, ...], tuple[int, int], dict[str, Any]]] = {
    # label: shape of the tokens, (rows, d2) of freqs, options; lists are int32 tensors
    "typical": ((6, 2, 3, 8), (6, 8), {}),
    "bshd": ((2, 6, 3, 8), (6, 8), {"qkv_format": "bshd"}),
    "interleaved": ((6, 2, 3, 8), (6, 8), {"interleaved": True}),
    "interleaved bshd": ((2, 6, 3, 8), (6, 8), {"interleaved": True, "qkv_format": "bshd"}),
    "partial": ((5, 2, 3, 16), (5, 6), {}),
    "partial interleaved": ((5, 2, 3, 16), (5, 6), {"interleaved": True}),
    "odd sizes": ((7, 3, 5, 11), (9, 10), {}),
    "one token": ((1, 1, 1, 2), (1, 2), {}),
    "wide": ((3, 2, 4, 256), (64, 192), {}),
    "many tokens": ((130, 3, 1, 4), (130, 4), {}),
    "no tokens": ((0, 2, 3, 8), (4, 8), {}),
    "no tokens, no rows": ((0, 2, 3, 8), (0, 8), {}),
    "no sequences": ((6, 0, 3, 8), (6, 8), {"start_positions": []}),
    "no heads": ((6, 2, 0, 8), (6, 8), {}),
    "start positions": ((4, 3, 2, 8), (12, 8), {"start_positions": [0, 8, 3]}),
    "start positions bshd": (
        (3, 4, 2, 8),
        (12, 6),
        {"start_positions": [5, 0, 8], "qkv_format": "bshd", "interleaved": True},
    ),
    "outside freqs": ((4, 3, 2, 8), (6, 4), {"start_positions": [0, 4, -2]}),
    "first of two ranks": ((6, 2, 3, 8), (12, 8), {"cp_size": 2}),
    "last of two ranks": ((6, 2, 3, 8), (12, 8), {"cp_size": 2, "cp_rank": 1}),
    "last of four ranks": (
        (2, 4, 3, 8),
        (16, 4),
        {"cp_size": 4, "cp_rank": 3, "qkv_format": "bshd", "interleaved": True},
    ),
    "start positions and ranks": (
        (4, 2, 3, 8),
        (20, 8),
        {"cp_size": 3, "cp_rank": 1, "start_positions": [0, 7]},
    ),
    "thd": ((9, 3, 8), (5, 8), {"qkv_format": "thd", "cu_seqlens": [0, 3, 3, 8, 9]}),
    "thd, tokens of no sequence": (
        (9, 3, 8),
        (5, 6),
        {"qkv_format": "thd", "cu_seqlens": [0, 4, 6], "interleaved": True},
    ),
    "thd, no tokens": ((0, 3, 8), (5, 8), {"qkv_format": "thd", "cu_seqlens": [0, 0]}),
    "thd, start positions": (
        (9, 3, 8),
        (12, 8),
        {"qkv_format": "thd", "cu_seqlens": [0, 3, 9], "start_positions": [9, 2]},
    ),
    "thd, ranks": (
        (10, 3, 8),
        (12, 4),
        {"qkv_format": "thd", "cu_seqlens": [0, 8, 8, 20], "cp_size": 2, "cp_rank": 1},
    ),
    "thd, outside freqs": ((7, 2, 8), (3, 4), {"qkv_format": "thd", "cu_seqlens": [0, 5, 6]}),
    "thd, no rows": ((2, 1, 8), (0, 4), {"qkv_format": "thd", "cu_seqlens": [0, 2]}),
}


def _normal(*shape: int, seed: int) -> Tensor:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _table(rows: int, rotated: int, device: str) -> Tensor:
    """Angles as they commonly are: ``position / 10000 ** (2 i / d2)``, once for each half."""
    import torch

    slowness = 10000 ** (torch.arange(0, rotated, 2) / rotated)
    angles = torch.arange(rows).unsqueeze(-1) / slowness
    return torch.cat([angles, angles], -1)[:, None, None].to(device)


def _options(options: dict[str, Any], device: str) -> dict[str, Any]:
    import torch

    return {
        name: torch.tensor(value, dtype=torch.int32, device=device)
        if isinstance(value, list)
        else value
        for name, value in options.items()
    }


def _rope_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    for label, (shape, (rows, rotated), options) in _CASES.items():
        tokens = _normal(*shape, seed=30).to(device, kind)
        freqs = _table(rows, rotated, device)
        yield Sample(label, (tokens, freqs), _options(options, device))
    freqs = _table(6, 8, device)
    layouts = {
        "transposed": _normal(8, 3, 2, 6, seed=31).to(device, kind).permute(3, 2, 1, 0),
        "strided features": _normal(6, 2, 3, 16, seed=32).to(device, kind)[..., ::2],
        "a part of packed heads": _normal(6, 2, 9, 8, seed=33).to(device, kind)[:, :, 3:6],
        "expanded": _normal(6, 2, 1, 8, seed=34).to(device, kind).expand(-1, -1, 3, -1),
        "unaligned start": _normal(6 * 16 + 1, seed=35).to(device, kind)[1:].view(6, 2, 1, 8),
        "small values": (_normal(6, 2, 3, 8, seed=36) * 1e-3).to(device, kind),
        "large values": (_normal(6, 2, 3, 8, seed=37).clamp(-2, 2) * 1.5e4).to(device, kind),
    }
    for label, tokens in layouts.items():
        yield Sample(label, (tokens, freqs))
    last = _normal(6, 3, 8, 2, seed=49).to(device, kind).permute(0, 3, 1, 2)
    yield Sample("channels_last, four features rotated", (last, _table(6, 4, device)))
    tokens = _normal(6, 2, 3, 8, seed=38).to(device, kind)
    for interleaved in (False, True):
        name = "interleaved" if interleaved else "halves"
        own = _normal(6, 1, 1, 8, seed=39).to(device) * 4
        yield Sample(
            f"an angle for each feature, {name}", (tokens, own), {"interleaved": interleaved}
        )
    yield Sample("large angles", (tokens, _normal(6, 1, 1, 8, seed=40).to(device) * 1e5))
    padded = _normal(12, 2, 1, 12, seed=41).to(device)[::2, :1, :, 1:9]
    yield Sample("freqs that are not contiguous", (tokens, padded))
    packed = _normal(9, 3, 8, seed=47).to(device, kind)
    packed[6, :, 0], packed[7, :, 3], packed[8] = torch.inf, torch.nan, -torch.inf
    for interleaved in (False, True):
        name = "interleaved" if interleaved else "halves"
        given = {"qkv_format": "thd", "cu_seqlens": [0, 4, 6], "interleaved": interleaved}
        yield Sample(
            f"thd, anything in tokens of no sequence, {name}",
            (packed, _table(5, 6, device)),
            _options(given, device),
        )


_QKV_CASES: dict[
    str, tuple[tuple[int, ...], tuple[int, int, int], int, int, int, dict[str, Any]]
] = {
    # label: tokens and groups, qkv_split, rows, d2 of q and of k, options
    "typical": ((6, 2, 3), (16, 8, 8), 6, 8, 8, {}),
    "one head for each": ((6, 2, 3), (8, 8, 8), 6, 8, 8, {"interleaved": True}),
    "bshd, widths that differ": ((2, 5, 3), (24, 8, 5), 9, 6, 4, {"qkv_format": "bshd"}),
    "one token": ((1, 1, 1), (8, 8, 8), 1, 8, 8, {}),
    "wide": ((3, 2, 2), (512, 128, 128), 8, 128, 64, {"interleaved": True}),
    "no tokens": ((0, 2, 3), (16, 8, 8), 0, 8, 8, {}),
    "no heads": ((6, 2, 0), (16, 8, 8), 6, 8, 8, {}),
    "start positions": ((4, 3, 2), (16, 8, 8), 12, 8, 6, {"start_positions": [0, 8, 3]}),
    "outside freqs": ((4, 2, 2), (16, 8, 8), 6, 4, 4, {"start_positions": [0, 4]}),
    "last of two ranks": ((6, 2, 3), (16, 8, 8), 12, 8, 8, {"cp_size": 2, "cp_rank": 1}),
    "first of four ranks": (
        (2, 4, 3),
        (8, 4, 8),
        16,
        4,
        2,
        {"cp_size": 4, "qkv_format": "bshd", "interleaved": True},
    ),
    "thd": ((9, 3), (16, 8, 8), 5, 8, 8, {"qkv_format": "thd", "cu_seqlens": [0, 3, 3, 7]}),
    "thd, ranks and start positions": (
        (10, 2),
        (16, 8, 6),
        24,
        8,
        4,
        {
            "qkv_format": "thd",
            "cu_seqlens": [0, 8, 20],
            "start_positions": [3, 12],
            "cp_size": 2,
            "cp_rank": 1,
        },
    ),
}


def _qkv_forward_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    for label, (leading, split, rows, of_q, of_k, options) in _QKV_CASES.items():
        packed = _normal(*leading, sum(split), seed=42).to(device, kind)
        freqs = (_table(rows, of_q, device), _table(rows, of_k, device) * 0.5)
        given = {"qkv_split": split, **_options(options, device)}
        yield Sample(label, (packed, *freqs), given)
    freqs = (_table(6, 8, device), _table(6, 6, device))
    layouts = {
        "transposed": _normal(32, 3, 2, 6, seed=43).to(device, kind).permute(3, 2, 1, 0),
        "strided features": _normal(6, 2, 3, 64, seed=44).to(device, kind)[..., ::2],
        "unaligned start": _normal(6 * 96 + 1, seed=45).to(device, kind)[1:].view(6, 1, 3, 32),
        "expanded": _normal(6, 1, 3, 32, seed=46).to(device, kind).expand(-1, 2, -1, -1),
        "channels_last": _normal(6, 3, 32, 2, seed=50).to(device, kind).permute(0, 3, 1, 2),
    }
    for label, packed in layouts.items():
        yield Sample(label, (packed, *freqs), {"qkv_split": [16, 8, 8]})
    packed = _normal(6, 3, 32, seed=48).to(device, kind)
    packed[4, :, ::5], packed[5, :, 3::8] = torch.nan, torch.inf
    options = {"qkv_format": "thd", "cu_seqlens": [0, 1, 4], "qkv_split": (16, 8, 8)}
    yield Sample(
        "thd, anything in tokens of no sequence", (packed, *freqs), _options(options, device)
    )


def _qkv_backward_samples(dtype: str, device: str) -> Iterator[Sample]:
    for sample in _qkv_forward_samples(dtype, device):
        packed, q_freqs, k_freqs = sample.args
        dq, dk, _ = sample.kwargs["qkv_split"]
        q, k, v = packed.split(list(sample.kwargs["qkv_split"]), -1)
        q = q.reshape(*q.shape[:-2], q.shape[-2] * (dq // dk), dk)
        # k and v stay views of the packed tensor: gradients need not be contiguous.
        yield Sample(sample.label, (q, k, v, q_freqs, k_freqs), sample.kwargs)


# ---------------------------------------------------------------------------- contracts


@contract(
    family="rope",
    check=_check_rope,
    samples=_rope_samples,
    tolerance=TOLERANCE,
    oracle=_rope_oracle,
    backward=Backward(
        "fused_rope_backward",
        saves={
            "freqs": "freqs",
            "start_positions": "start_positions",
            "cu_seqlens": "cu_seqlens",
        },
        gradients=("input",),
        options=("qkv_format", "interleaved", "cp_size", "cp_rank"),
    ),
    aliases=("rope_fwd",),
)
def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    *,
    start_positions: Tensor | None = None,
    qkv_format: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Rotary position embedding (Su et al., 2021, arXiv:2104.09864).

    For a pair of features ``(i, j)`` of a token at position p, with ``a = freqs[p, 0, 0, i]``
    and ``b = freqs[p, 0, 0, j]``:
    ``output[i] = input[i] * cos(a) - input[j] * sin(a)`` and
    ``output[j] = input[j] * cos(b) + input[i] * sin(b)``.
    The head of this module defines which features form a pair, a token's position and the result
    for positions outside ``freqs``. Computed in float32 (float64 for
    float64) and rounded once. The backward needs only ``freqs`` and the options.

    Args:
        input: ``[s, b, h, d]``, ``[b, s, h, d]`` or ``[t, h, d]``, as ``qkv_format`` says;
            float32, bfloat16, float16 or float64.
        freqs: ``[positions, 1, 1, d2]``, float32, angles in radians; d2 is even, at least 2
            and at most d. There are at least ``s * cp_size`` positions. A constant: it
            has no gradient.
        start_positions: ``[b]``, int32, added to the positions of each sequence; zeros
            unless given.
        qkv_format: ``"sbhd"``, ``"bshd"`` or ``"thd"``.
        interleaved: a pair is two neighbouring features, instead of one from each half.
        cu_seqlens: ``[b + 1]``, int32, for ``thd`` and only for it: where each sequence
            begins, from 0, and the last one ends, not decreasing. The values count the tokens
            of full sequences, of all ranks together; with ``cp_size`` above 1 every length
            is a multiple of ``2 * cp_size``.
        cp_size: number of context-parallel ranks; above 1, s is even.
        cp_rank: this rank, from 0.

    Returns:
        output: shape and dtype of ``input``, contiguous.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    return input.new_empty(input.shape)


@contract(
    family="rope",
    check=_check_rope,
    samples=_rope_samples,
    tolerance=TOLERANCE,
    oracle=_rope_backward_oracle,
    aliases=("rope_bwd",),
)
def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    *,
    start_positions: Tensor | None = None,
    qkv_format: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Gradient of :func:`fused_rope_forward` with respect to its input.

    For a pair ``(i, j)`` with the angles a and b, and ``g`` for ``output_grads``:
    ``dx[i] = g[i] * cos(a) + g[j] * sin(b)`` and ``dx[j] = g[j] * cos(b) - g[i] * sin(a)``.

    Args:
        output_grads: as the forward's output; float32, bfloat16, float16 or float64.
        freqs: as in the forward.
        start_positions: as in the forward.
        qkv_format: as in the forward.
        interleaved: as in the forward.
        cu_seqlens: as in the forward.
        cp_size: as in the forward.
        cp_rank: as in the forward.

    Returns:
        dx: shape and dtype of ``output_grads``, contiguous.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    return output_grads.new_empty(output_grads.shape)


@contract(
    family="rope",
    check=_check_qkv_forward,
    samples=_qkv_forward_samples,
    tolerance=TOLERANCE,
    oracle=_qkv_rope_oracle,
    backward=Backward(
        "fused_qkv_rope_backward",
        saves={
            "q_freqs": "q_freqs",
            "k_freqs": "k_freqs",
            "start_positions": "start_positions",
            "cu_seqlens": "cu_seqlens",
        },
        gradients=("qkv_input",),
        options=("qkv_split", "qkv_format", "interleaved", "cp_size", "cp_rank"),
        output_grads=("q_grad", "k_grad", "v_grad"),
    ),
)
def fused_qkv_rope_forward(
    qkv_input: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    *,
    qkv_split: Sequence[int],
    start_positions: Tensor | None = None,
    qkv_format: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits packed queries, keys and values, and rotates the first two.

    With ``qkv_split = (dq, dk, dv)`` the features of each of h groups are ``dq / dk`` query
    heads, one key head (both of width dk) and one value head of width dv, in that order.
    Head ``i * dq / dk + n`` of the queries is the n-th of group i. Queries and keys are
    rotated as in :func:`fused_rope_forward` with ``q_freqs`` and ``k_freqs``; values
    are copied. The backward needs only the freqs and the options.

    Args:
        qkv_input: ``[s, b, h, dq + dk + dv]``, ``[b, s, h, dq + dk + dv]`` or
            ``[t, h, dq + dk + dv]``; float32, bfloat16, float16 or float64.
        q_freqs: ``[positions, 1, 1, d2]``, float32, as ``freqs`` of
            :func:`fused_rope_forward`; d2 at most dk.
        k_freqs: the same for the keys; its d2 may differ.
        qkv_split: ``(dq, dk, dv)``, positive, dq a multiple of dk.
        start_positions: as in :func:`fused_rope_forward`.
        qkv_format: as in :func:`fused_rope_forward`.
        interleaved: as in :func:`fused_rope_forward`.
        cu_seqlens: as in :func:`fused_rope_forward`.
        cp_size: as in :func:`fused_rope_forward`.
        cp_rank: as in :func:`fused_rope_forward`.

    Returns:
        q: ``[..., h * dq / dk, dk]``, dtype of ``qkv_input``, contiguous.
        k: ``[..., h, dk]``, likewise.
        v: ``[..., h, dv]``, likewise; not a view of ``qkv_input``.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    dq, dk, dv = qkv_split
    *tokens, groups, _ = qkv_input.shape
    return (
        qkv_input.new_empty((*tokens, groups * (dq // dk), dk)),
        qkv_input.new_empty((*tokens, groups, dk)),
        qkv_input.new_empty((*tokens, groups, dv)),
    )


@contract(
    family="rope",
    check=_check_qkv_backward,
    samples=_qkv_backward_samples,
    tolerance=TOLERANCE,
    oracle=_qkv_rope_backward_oracle,
)
def fused_qkv_rope_backward(
    q_grad: Tensor,
    k_grad: Tensor,
    v_grad: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    *,
    qkv_split: Sequence[int],
    start_positions: Tensor | None = None,
    qkv_format: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Gradient of :func:`fused_qkv_rope_forward` with respect to its input.

    ``q_grad`` and ``k_grad`` are rotated back as in :func:`fused_rope_backward`, then all
    three are packed in the layout of the forward's input.

    Args:
        q_grad: ``[..., h * dq / dk, dk]``, the gradient of q; float32, bfloat16, float16 or
            float64.
        k_grad: ``[..., h, dk]``, the gradient of k; dtype of ``q_grad``.
        v_grad: ``[..., h, dv]``, the gradient of v; dtype of ``q_grad``.
        q_freqs: as in the forward.
        k_freqs: as in the forward.
        qkv_split: as in the forward.
        start_positions: as in the forward.
        qkv_format: as in the forward.
        interleaved: as in the forward.
        cu_seqlens: as in the forward.
        cp_size: as in the forward.
        cp_rank: as in the forward.

    Returns:
        dqkv: ``[..., h, dq + dk + dv]``, dtype of ``q_grad``, contiguous.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    return k_grad.new_empty((*k_grad.shape[:-1], sum(qkv_split)))
