"""Moving tokens to their experts and back.

T tokens of C features go to experts. A token and an expert that it goes to form a **pair**, and
each pair gets a row of the permuted tensor. Rows are ordered by expert, so that the rows
of an expert follow one another; within an expert they have the order of the tokens.

The experts of each token are given in one of two ways. Each way has its own operators and its own
**row id map**, int32, which the forward returns and the other operators use:

- **Indices** ``[T, topk]``: the k-th expert of each token. The map is ``[topk, T]``, and entry
  ``(k, t)`` is the row of token t for its k-th expert, or -1 if it has none. (Other libraries
  have it flattened to ``[topk * T]``.)
- **A mask** ``[T, E]``, bool: whether the token goes to the expert. The map is
  ``[T, 2 * E + 1]``. In line t the last entry is n, the number of the token's rows; the first n
  entries are these rows in descending order, and the n entries from E on are the experts
  they belong to. All other entries are -1 and are never read.

The number of rows is an argument, because counting pairs would make the host wait for the device.
Pairs past the last row are **dropped**: they have no row. Rows past the last pair are zero.

A map may be used with any number of rows N: an entry of N or more counts as no row. No row may
occur twice in a map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.core.contract import (
    Backward,
    Sample,
    SampleMaker,
    Tolerance,
    contract,
)
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.ops import _checks as check
from transformer_engine_fl.ops._dtypes import COPIED, FLOATS, math_dtype
from transformer_engine_fl.ops._samples import layouts, normal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "moe_permute_bwd",
    "moe_permute_fwd",
    "moe_permute_mask_bwd",
    "moe_permute_mask_fwd",
    "moe_unpermute_bwd",
    "moe_unpermute_fwd",
    "moe_unpermute_mask_bwd",
    "moe_unpermute_mask_fwd",
]

INDEX_DTYPES = ("int32", "int64")

COPY_TOLERANCE = {dtype: Tolerance(rtol=0.0, atol=0.0) for dtype in COPIED}
# For the narrow dtypes: half a unit in the last place, plus the error of float32 arithmetic.
SUM_TOLERANCE = {
    "float32": Tolerance(rtol=1e-6, atol=1e-6),
    "bfloat16": Tolerance(rtol=2**-8 + 2**-15, atol=2**-18),
    "float16": Tolerance(rtol=2**-11 + 2**-16, atol=2**-18),
    "float64": Tolerance(rtol=1e-14, atol=1e-14),
}


def rows_of_indices(indices: Tensor, num_out_tokens: int) -> int:
    """The number of rows that :func:`moe_permute_fwd` returns."""
    return num_out_tokens if num_out_tokens > 0 else indices.shape[0] * indices.shape[1]


# ------------------------------------------------------------------------------ checks


@dataclass(frozen=True, slots=True)
class _Map:
    """What differs between the two kinds of row id map.

    Attributes:
        axes: the map's dimensions.
        sizes: computes from the map's shape the number of tokens and the number S of experts
            that a token may have; None if the shape is not that of a map.
        pairs: lists (token, which of S, row) for each pair that has a row, from the map's
            entries as lists and the number of rows.
    """

    axes: str
    sizes: Callable[[Sequence[int]], tuple[int, int] | None]
    pairs: Callable[[list[list[int]], int], list[tuple[int, int, int]]]

    def check(self, op: str, value: Any) -> tuple[int, int]:
        """Check ``row_id_map`` by itself; returns its sizes."""
        tensor = check.is_tensor(op, "row_id_map", value, dtypes=("int32",))
        check.has_axes(op, "row_id_map", tensor, self.axes)
        sizes = self.sizes(tensor.shape)
        if sizes is None:
            expected = f"{self.axes} of at least one expert"
            raise ArgumentError(op, "row_id_map", check.describe(value), expected)
        return sizes

    def check_gathered(self, op: str, name: str, value: Any, row_id_map: Any) -> tuple[int, int]:
        """Check rows ``[N, C]`` that a map gathers from; returns the map's sizes."""
        rows = check.is_tensor(op, name, value, dtypes=FLOATS)
        check.has_axes(op, name, rows, "[rows, C]")
        sizes = self.check(op, row_id_map)
        check.same_device(op, name, {name: rows, "row_id_map": row_id_map})
        return sizes

    def check_permute_backward(self, op: str, grad_output: Any, row_id_map: Any) -> None:
        """Check ``(grad_output, row_id_map)``."""
        self.check_gathered(op, "grad_output", grad_output, row_id_map)

    def check_permute_probs_backward(
        self, op: str, grad_output: Any, row_id_map: Any, grad_permuted_probs: Any
    ) -> None:
        """Check ``(grad_output, row_id_map, grad_permuted_probs)``."""
        self.check_gathered(op, "grad_output", grad_output, row_id_map)
        if grad_permuted_probs is not None:
            name = "grad_permuted_probs"
            grad = check.is_tensor(op, name, grad_permuted_probs, dtypes=FLOATS)
            shape = grad_output.shape[:1]
            check.has_shape(op, name, grad, shape, "one for each row of 'grad_output'")
            check.same_device(op, "grad_output", {"grad_output": grad_output, name: grad})

    def check_unpermute(self, op: str, input: Any, row_id_map: Any, probs: Any) -> None:
        """Check ``(input, row_id_map, probs)``."""
        sizes = self.check_gathered(op, "input", input, row_id_map)
        _check_probs(op, probs, sizes, "'row_id_map'", "input", input)

    def check_unpermute_backward(
        self, op: str, grad_output: Any, row_id_map: Any, input: Any, probs: Any, num_rows: Any
    ) -> None:
        """Check ``(grad_output, row_id_map, input, probs, num_rows)``."""
        sizes = self.check(op, row_id_map)
        grad = check.is_tensor(op, "grad_output", grad_output, dtypes=FLOATS)
        check.has_axes(op, "grad_output", grad, "[T, C]")
        if grad.shape[0] != sizes[0]:
            expected = f"{sizes[0]} rows: the tokens of 'row_id_map'"
            raise ArgumentError(op, "grad_output", check.describe(grad), expected)
        check.is_integer(op, "num_rows", num_rows)
        _check_probs(op, probs, sizes, "'row_id_map'", "grad_output", grad)
        if (input is None) != (probs is None):
            expected = "a tensor if 'probs' is given, otherwise None"
            raise ArgumentError(op, "input", check.describe(input), expected)
        if input is not None:
            input = check.is_tensor(op, "input", input, dtypes=FLOATS)
            shape = (num_rows, grad.shape[1])
            check.has_shape(op, "input", input, shape, "num_rows, and C of 'grad_output'")
        given = {"grad_output": grad, "row_id_map": row_id_map, "input": input}
        check.same_device(op, "grad_output", given)


def _check_probs(
    op: str, value: Any, shape: Sequence[int], source: str, anchor: str, anchored: Tensor
) -> None:
    if value is not None:
        probs = check.is_tensor(op, "probs", value, dtypes=FLOATS)
        check.has_shape(op, "probs", probs, shape, f"one for each pair there may be in {source}")
        check.same_device(op, anchor, {anchor: anchored, "probs": probs})


def _check_permute(op: str, input: Any, indices: Any, num_out_tokens: Any) -> None:
    tokens = check.is_tensor(op, "input", input, dtypes=COPIED)
    check.has_axes(op, "input", tokens, "[T, C]")
    experts = check.is_tensor(op, "indices", indices, dtypes=INDEX_DTYPES)
    check.has_axes(op, "indices", experts, "[T, topk]")
    if experts.shape[0] != tokens.shape[0] or not experts.shape[1]:
        expected = f"[T, topk] with T = {tokens.shape[0]} as 'input' has, topk at least 1"
        raise ArgumentError(op, "indices", check.describe(indices), expected)
    check.is_integer(op, "num_out_tokens", num_out_tokens, at_least=-1)
    check.same_device(op, "input", {"input": tokens, "indices": experts})


def _check_permute_mask(
    op: str, input: Any, routing_map: Any, probs: Any, num_out_tokens: Any
) -> None:
    tokens = check.is_tensor(op, "input", input, dtypes=COPIED)
    check.has_axes(op, "input", tokens, "[T, C]")
    routed = check.is_tensor(op, "routing_map", routing_map, dtypes=("bool",))
    check.has_axes(op, "routing_map", routed, "[T, E]")
    if routed.shape[0] != tokens.shape[0] or not routed.shape[1]:
        expected = f"[T, E] with T = {tokens.shape[0]} as 'input' has, E at least 1"
        raise ArgumentError(op, "routing_map", check.describe(routing_map), expected)
    check.same_device(op, "input", {"input": tokens, "routing_map": routed})
    _check_probs(op, probs, routed.shape, "'routing_map'", "input", tokens)
    check.is_integer(op, "num_out_tokens", num_out_tokens)


# ------------------------------------------------------------------------------ oracles
#
# Each oracle works on a list of pairs (token, which of its experts, row). The forwards are
# differentiable, and the oracles of the backwards differentiate them by autograd.

_Pairs = list[tuple[int, int, int]]


def _index_pairs(entries: list[list[int]], rows: int) -> _Pairs:
    return [
        (t, k, row)
        for k, of_tokens in enumerate(entries)
        for t, row in enumerate(of_tokens)
        if 0 <= row < rows
    ]


def _mask_pairs(entries: list[list[int]], rows: int) -> _Pairs:
    pairs = []
    for t, line in enumerate(entries):
        experts = line[len(line) // 2 : -1]
        routed = zip(line, experts, range(line[-1]), strict=False)
        pairs += [(t, expert, row) for row, expert, _ in routed if row < rows]
    return pairs


_INDEX_MAP = _Map(
    axes="[topk, T]",
    sizes=lambda shape: (shape[1], shape[0]) if shape[0] else None,
    pairs=_index_pairs,
)
_MASK_MAP = _Map(
    axes="[T, 2 * E + 1]",
    sizes=lambda shape: (shape[0], shape[1] // 2) if shape[1] % 2 and shape[1] > 2 else None,
    pairs=_mask_pairs,
)


def _columns(pairs: _Pairs, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, which of their experts, rows: int64."""
    import torch

    columns = torch.tensor(pairs, dtype=torch.int64, device=like.device).view(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def _gathered(rows: Tensor, pairs: _Pairs, tokens: int, probs: Tensor | None) -> Tensor:
    """``[T, C]``: for each token the sum of its rows, each times its prob."""
    token, expert, row = _columns(pairs, rows)
    values = rows[row]
    if probs is not None:
        values = values * probs[token, expert].unsqueeze(-1)
    return rows.new_zeros((tokens, rows.shape[1])).index_add(0, token, values)


def _scattered(values: Tensor, pairs: _Pairs, rows: int) -> Tensor:
    """``[rows, C]``: each row holds the values of its token."""
    token, _, row = _columns(pairs, values)
    return values.new_zeros((rows, values.shape[1])).index_copy(0, row, values[token])


def _permute_oracle(
    input: Tensor, indices: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor]:
    import torch

    tokens, topk = indices.shape
    order = sorted(
        (expert, t, k) for t, line in enumerate(indices.tolist()) for k, expert in enumerate(line)
    )
    rows = rows_of_indices(indices, num_out_tokens)
    pairs = [(t, k, row) for row, (_, t, k) in enumerate(order[:rows])]
    row_id_map = torch.full((topk, tokens), -1.0, dtype=torch.float64, device=input.device)
    for t, k, row in pairs:
        row_id_map[k, t] = row
    return _scattered(input.double(), pairs, rows), row_id_map


def _permute_mask_oracle(
    input: Tensor, routing_map: Tensor, probs: Tensor | None = None, *, num_out_tokens: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    import torch

    tokens, experts = routing_map.shape
    routed = routing_map.tolist()
    order = [(t, e) for e in range(experts) for t in range(tokens) if routed[t][e]]
    pairs = [(t, e, row) for row, (t, e) in enumerate(order[:num_out_tokens])]
    lines = []
    for t in range(tokens):
        own = [(row, e) for token, e, row in reversed(pairs) if token == t]
        unused = [-1] * (experts - len(own))
        rows, numbers = [row for row, _ in own], [e for _, e in own]
        lines.append([*rows, *unused, *numbers, *unused, len(own)])
    row_id_map = torch.tensor(lines, dtype=torch.float64, device=input.device)
    permuted_probs = None
    if probs is not None:
        token, expert, _ = _columns(pairs, input)
        permuted_probs = probs.new_zeros((num_out_tokens,), dtype=torch.float64)
        permuted_probs[: len(pairs)] = probs[token, expert].double()
    output = _scattered(input.double(), pairs, num_out_tokens)
    return output, permuted_probs, row_id_map.view(tokens, 2 * experts + 1)


def _sizes_and_pairs(form: _Map, row_id_map: Tensor, rows: int) -> tuple[int, int, _Pairs]:
    sizes = form.sizes(row_id_map.shape)
    assert sizes is not None  # guaranteed by the check
    return *sizes, form.pairs(row_id_map.tolist(), rows)


def _unpermute_oracle(form: _Map) -> Callable[..., Tensor]:
    def oracle(input: Tensor, row_id_map: Tensor, probs: Tensor | None = None) -> Tensor:
        tokens, _, pairs = _sizes_and_pairs(form, row_id_map, input.shape[0])
        wide = None if probs is None else probs.double()
        return _gathered(input.double(), pairs, tokens, wide)

    return oracle


def _unpermute_backward_oracle(form: _Map) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def oracle(
        grad_output: Tensor,
        row_id_map: Tensor,
        input: Tensor | None = None,
        probs: Tensor | None = None,
        *,
        num_rows: int,
    ) -> tuple[Tensor, Tensor | None]:
        import torch

        tokens, _, pairs = _sizes_and_pairs(form, row_id_map, num_rows)
        with torch.enable_grad():
            shape = (num_rows, grad_output.shape[1])
            rows = grad_output.new_zeros(shape) if input is None else input.detach()
            wide = [it.detach().double().requires_grad_() for it in (rows, probs) if it is not None]
            output = _gathered(wide[0], pairs, tokens, wide[1] if len(wide) > 1 else None)
            gradients = torch.autograd.grad(output, wide, grad_output.double())
        return gradients[0], None if probs is None else gradients[1]

    return oracle


def _permute_backward_oracle(grad_output: Tensor, row_id_map: Tensor) -> Tensor:
    return _permute_gradient(_INDEX_MAP, grad_output, row_id_map)


def _permute_gradient(form: _Map, grad_output: Tensor, row_id_map: Tensor) -> Tensor:
    """Differentiates the forward; it is linear, so any input will do."""
    import torch

    rows, columns = grad_output.shape
    tokens, _, pairs = _sizes_and_pairs(form, row_id_map, rows)
    with torch.enable_grad():
        leaf = grad_output.new_zeros((tokens, columns), dtype=torch.float64).requires_grad_()
        output = _scattered(leaf, pairs, rows)
        (gradient,) = torch.autograd.grad(output, leaf, grad_output.double())
    return gradient


def _permute_mask_backward_oracle(
    grad_output: Tensor, row_id_map: Tensor, grad_permuted_probs: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    import torch

    grad_probs = None
    if grad_permuted_probs is not None:
        tokens, experts, pairs = _sizes_and_pairs(_MASK_MAP, row_id_map, grad_output.shape[0])
        grad_probs = grad_output.new_zeros((tokens, experts), dtype=torch.float64)
        for t, expert, row in pairs:
            grad_probs[t, expert] = grad_permuted_probs[row].double()
    return _permute_gradient(_MASK_MAP, grad_output, row_id_map), grad_probs


# ------------------------------------------------------------------------------ samples

_TOKENS = {
    "typical": (16, 32),
    "odd sizes": (13, 37),
    "many tokens": (301, 5),
    "wide rows": (3, 2051),
    "one token": (1, 8),
    "one feature": (9, 1),
    "no tokens": (0, 8),
    "no features": (4, 0),
}


def _indices(tokens: int, topk: int, experts: int, device: str) -> Tensor:
    """Different experts for each token, as a router chooses them."""
    import torch

    generator = torch.Generator().manual_seed(70)
    chosen = torch.rand((tokens, experts), generator=generator).argsort(-1)[:, :topk]
    return chosen.to(device, torch.int32)


def _routing_map(tokens: int, topk: int, experts: int, device: str) -> Tensor:
    import torch

    chosen = _indices(tokens, topk, experts, device).long()
    routed = torch.zeros((tokens, experts), dtype=torch.bool, device=device)
    return routed.scatter(1, chosen, True)


def _special(dtype: str, device: str) -> Tensor:
    """``[16, 8]``, with infinities, NaN and -0.0."""
    import torch

    values = normal((16, 8), torch.float32, device, seed=71)
    values[::3, ::2] = torch.inf
    values[1::4, 1::3] = torch.nan
    values[2] = -0.0
    return values.to(getattr(torch, dtype))


def _permute_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    for label, input in layouts(_TOKENS, 12, 24, dtype, device):
        indices = _indices(input.shape[0], 2, 8, device)
        yield Sample(label, (input, indices))
        if label == "no tokens":
            yield Sample("rows without tokens", (input, indices, 3))
        if label != "typical" or dtype not in FLOATS:
            continue
        for rows in (0, 1, 5, 31, 32, 40):
            yield Sample(f"num_out_tokens={rows}", (input, indices, rows))
        wide = indices.repeat_interleave(2, 1)
        yield Sample("int64 indices", (input, indices.long()))
        yield Sample("strided indices", (input, wide[:, ::2]))
        yield Sample("transposed indices", (input, indices.t().contiguous().t()))
        yield Sample("the same expert twice", (input, wide))
        yield Sample("one expert", (input, torch.zeros_like(indices[:, :1])))
        yield Sample("experts without tokens", (input, indices * 9 + 3))
        past = indices.masked_fill(indices == 5, 2**31 - 1)
        count = int((indices != 5).sum())
        yield Sample("an expert past all others, dropped", (input, past, count))
        for topk, experts in ((1, 8), (8, 8), (8, 256)):
            label = f"{topk} of {experts} experts"
            yield Sample(label, (input, _indices(16, topk, experts, device)))
    if dtype in FLOATS:
        yield Sample("infinite values", (_special(dtype, device), _indices(16, 2, 4, device)))


def _permute_mask_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    kind = getattr(torch, dtype) if dtype in FLOATS else torch.bfloat16
    for label, input in layouts(_TOKENS, 12, 24, dtype, device):
        tokens = input.shape[0]
        routed = _routing_map(tokens, 2, 8, device)
        probs = normal((tokens, 8), torch.float32, device, seed=72)
        yield Sample(label, (input, routed, probs), {"num_out_tokens": 2 * tokens})
        if label != "typical" or dtype not in FLOATS:
            continue
        yield Sample("no probs", (input, routed), {"num_out_tokens": 32})
        for rows in (0, 1, 5, 31, 40):
            yield Sample(f"num_out_tokens={rows}", (input, routed, probs), {"num_out_tokens": rows})
        rows32 = {"num_out_tokens": 32}
        turned = probs.t().contiguous().t()
        yield Sample("probs of another dtype", (input, routed, probs.to(kind)), rows32)
        yield Sample("transposed probs", (input, routed, turned), rows32)
        yield Sample("a prob that is zero", (input, routed, probs.clamp_min(0)), rows32)
        transposed = routed.t().contiguous().t()
        yield Sample("transposed routing_map", (input, transposed, probs), rows32)
        some = normal((16, 8), torch.float32, device, seed=73) > 0
        some[3] = False
        some[:, 2] = False
        yield Sample("some with more, some with no experts", (input, some, probs), rows32)
        everywhere = torch.ones_like(routed)
        yield Sample("every expert", (input, everywhere, probs), {"num_out_tokens": 128})
        yield Sample("no expert", (input, ~everywhere, probs), {"num_out_tokens": 4})
        one = (input, everywhere[:, :1], probs[:, :1])
        yield Sample("one expert", one, {"num_out_tokens": 16})
        many = _routing_map(16, 8, 256, device)
        probs = normal((16, 256), torch.float32, device, seed=72)
        yield Sample("8 of 256 experts", (input, many, probs), {"num_out_tokens": 128})
    if dtype in FLOATS:
        routed = _routing_map(16, 2, 4, device)
        special = (_special(dtype, device), routed, _special("float32", device)[:, :4])
        yield Sample("infinite values", special, {"num_out_tokens": 32})


def _index_map(tokens: int, topk: int, experts: int, rows: int, device: str) -> Tensor:
    import torch

    indices = _indices(tokens, topk, experts, device)
    empty = torch.empty((tokens, 0), device=device)
    return _permute_oracle(empty, indices, rows)[1].to(torch.int32)


def _mask_map(tokens: int, topk: int, experts: int, rows: int, device: str) -> Tensor:
    import torch

    routed = _routing_map(tokens, topk, experts, device)
    empty = torch.empty((tokens, 0), device=device)
    return _permute_mask_oracle(empty, routed, num_out_tokens=rows)[2].to(torch.int32)


def _mapped(
    form: _Map, dtype: str, device: str
) -> Iterator[tuple[str, Tensor, Tensor, tuple[int, int]]]:
    """(label, rows ``[N, C]``, a map of them, its sizes) in every shape and layout."""
    import torch

    make = _index_map if form is _INDEX_MAP else _mask_map

    def mapped(
        label: str, rows: Tensor, tokens: int, topk: int = 2, experts: int = 8
    ) -> tuple[str, Tensor, Tensor, tuple[int, int]]:
        row_id_map = make(tokens, topk, experts, max(rows.shape[0], 1), device)
        sizes = form.sizes(row_id_map.shape)
        assert sizes is not None
        return label, rows, row_id_map, sizes

    for label, rows in layouts(_TOKENS, 12, 24, dtype, device):
        yield mapped(label, rows, (rows.shape[0] + 1) // 2)
        if label == "typical":
            yield mapped("dropped pairs", rows, 15)
            yield mapped("unused rows", rows, 5)
            yield mapped("no tokens, some rows", rows, 0)
            yield mapped("one expert", rows, 16, 1, 1)
            yield mapped("8 of 256 experts", rows, 2, 8, 256)
            name, _, row_id_map, sizes = mapped("a transposed map", rows, 8)
            yield name, rows, row_id_map.t().contiguous().t(), sizes
            yield "a map of more rows", rows[:9], row_id_map, sizes
            yield "no rows", rows[:0], row_id_map, sizes
    special = _special(dtype, device)
    yield mapped("infinite values", special, 8)
    kind = getattr(torch, dtype)
    missing = torch.full_like(special, torch.nan)
    unused = torch.cat([normal((12, 8), kind, device, seed=74), missing])
    yield mapped("missing values where nothing is read", unused, 6)
    large = normal((16, 8), torch.float64, device, seed=75).clamp(-2, 2)
    # Products and sums of these stay within float32, the dtype of the gradient of probs.
    largest = min(torch.finfo(kind).max, 1e36)
    yield mapped("large values", (large * (largest / 32)).to(kind), 8)


def _permute_backward_samples(dtype: str, device: str) -> Iterator[Sample]:
    for label, grad, row_id_map, _ in _mapped(_INDEX_MAP, dtype, device):
        yield Sample(label, (grad, row_id_map))


def _permute_mask_backward_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    kind = getattr(torch, dtype)
    for label, grad, row_id_map, _ in _mapped(_MASK_MAP, dtype, device):
        grad_probs = normal((grad.shape[0],), torch.float32, device, seed=76)
        yield Sample(label, (grad, row_id_map, grad_probs))
        if label == "typical":
            yield Sample("no probs", (grad, row_id_map))
            same = (grad, row_id_map, grad_probs.to(kind))
            yield Sample("probs of the same dtype", same)
            strided = grad_probs.repeat_interleave(2)[::2]
            yield Sample("strided grad_permuted_probs", (grad, row_id_map, strided))
            yield Sample("expanded grad_output", (grad[:1].expand(16, -1), row_id_map, grad_probs))


def _probs_of(row_id_map: Tensor, sizes: tuple[int, int], form: _Map, rows: int) -> Tensor:
    """Probs of the pairs that have a row; infinite for all others, which must not be used."""
    import torch

    probs = torch.full(sizes, torch.inf, device=row_id_map.device)
    token, expert, _ = _columns(form.pairs(row_id_map.tolist(), rows), row_id_map)
    probs[token, expert] = normal((token.shape[0],), torch.float32, "cpu", seed=77).to(probs)
    return probs


def _unpermute_samples(form: _Map) -> SampleMaker:
    def samples(dtype: str, device: str) -> Iterator[Sample]:
        import torch

        kind = getattr(torch, dtype)
        for label, rows, row_id_map, sizes in _mapped(form, dtype, device):
            probs = _probs_of(row_id_map, sizes, form, rows.shape[0])
            yield Sample(label, (rows, row_id_map, probs))
            if label in ("typical", "dropped pairs", "unused rows", "large values"):
                yield Sample(f"{label}, no probs", (rows, row_id_map))
            if label == "typical":
                turned = probs.t().contiguous().t()
                yield Sample("probs of the same dtype", (rows, row_id_map, probs.to(kind)))
                yield Sample("probs of float64", (rows, row_id_map, probs.double()))
                yield Sample("transposed probs", (rows, row_id_map, turned))

    return samples


def _unpermute_backward_samples(form: _Map) -> SampleMaker:
    def samples(dtype: str, device: str) -> Iterator[Sample]:
        import torch

        kind = getattr(torch, dtype)
        for label, rows, row_id_map, sizes in _mapped(form, dtype, device):
            probs = _probs_of(row_id_map, sizes, form, rows.shape[0])
            grad = normal((sizes[0], rows.shape[1]), kind, device, seed=78)
            count = {"num_rows": rows.shape[0]}
            yield Sample(label, (grad, row_id_map, rows, probs), count)
            if label in ("typical", "dropped pairs", "unused rows"):
                yield Sample(f"{label}, no probs", (grad, row_id_map), count)
            if label == "typical":
                other = torch.float32 if dtype != "float32" else torch.bfloat16
                turned = grad.t().contiguous().t()
                expanded = grad[:1].expand_as(grad)
                same = (grad, row_id_map, rows, probs.to(kind))
                yield Sample("probs of the same dtype", same, count)
                yield Sample(
                    "input of another dtype", (grad, row_id_map, rows.to(other), probs), count
                )
                yield Sample("transposed grad_output", (turned, row_id_map, rows, probs), count)
                yield Sample("expanded grad_output", (expanded, row_id_map, rows, probs), count)

    return samples


# ---------------------------------------------------------------------------- contracts


@contract(
    family="moe",
    check=_check_permute,
    samples=_permute_samples,
    tolerance=COPY_TOLERANCE,
    oracle=_permute_oracle,
    backward=Backward("moe_permute_bwd", saves={"row_id_map": "output[1]"}, gradients=("input",)),
)
def moe_permute_fwd(
    input: Tensor, indices: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor]:
    """Copies tokens into rows that are ordered by expert, the experts given by index.

    The pairs (token t, its k-th expert) are sorted by expert; pairs of the same expert stay
    in the order of ``t * topk + k``. The i-th pair has row i, ``output[i] = input[t]``,
    if i is below the number of rows; otherwise it is dropped.

    Expert numbers are only compared, so any integers will do. The expert with the highest number
    comes last, and its pairs are the first to be dropped.

    Args:
        input: ``[T, C]``, of any dtype of the contract: values are copied bit by bit.
        indices: ``[T, topk]``, int32 or int64, the experts of each token; topk at least 1.
        num_out_tokens: the number of rows N, if positive; 0 and -1 stand for ``T * topk``.

    Returns:
        output: ``[N, C]``, dtype of ``input``, contiguous; rows past the last pair are zero.
        row_id_map: ``[topk, T]``, int32, contiguous: the row of each pair, -1 if it was
            dropped. Saved for the backward.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    import torch

    tokens, topk = indices.shape
    rows = rows_of_indices(indices, num_out_tokens)
    row_id_map = indices.new_empty((topk, tokens), dtype=torch.int32)
    return input.new_empty((rows, input.shape[1])), row_id_map


@contract(
    family="moe",
    check=_INDEX_MAP.check_permute_backward,
    samples=_permute_backward_samples,
    tolerance=SUM_TOLERANCE,
    oracle=_permute_backward_oracle,
)
def moe_permute_bwd(grad_output: Tensor, row_id_map: Tensor) -> Tensor:
    """Gradient of :func:`moe_permute_fwd` with respect to its input.

    ``grad_input[t] = sum over k of grad_output[row_id_map[k, t]]``, without the pairs that have no
    row. This is what :func:`moe_unpermute_fwd` computes without probs.

    Args:
        grad_output: ``[N, C]``, float32, bfloat16, float16 or float64.
        row_id_map: ``[topk, T]``, int32, as the forward returned it.

    Returns:
        grad_input: ``[T, C]``, dtype of ``grad_output``, contiguous; summed in float32
            (float64 for float64).

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    return grad_output.new_empty((row_id_map.shape[1], grad_output.shape[1]))


def _unpermute_gradients(op: str) -> Backward:
    return Backward(
        op,
        saves={"row_id_map": "row_id_map", "input": "input", "probs": "probs"},
        saved_with={"input": "probs"},
        sizes={"num_rows": ("input", 0)},
        gradients=("input", "probs"),
    )


@contract(
    family="moe",
    check=_INDEX_MAP.check_unpermute,
    samples=_unpermute_samples(_INDEX_MAP),
    tolerance=SUM_TOLERANCE,
    oracle=_unpermute_oracle(_INDEX_MAP),
    backward=_unpermute_gradients("moe_unpermute_bwd"),
)
def moe_unpermute_fwd(input: Tensor, row_id_map: Tensor, probs: Tensor | None = None) -> Tensor:
    """Sums the rows of each token, by the map of :func:`moe_permute_fwd`.

    ``output[t] = sum over k of probs[t, k] * input[row_id_map[k, t]]``; pairs without a row
    are left out, whatever their prob. Without probs each prob counts as 1.

    Args:
        input: ``[N, C]``, float32, bfloat16, float16 or float64.
        row_id_map: ``[topk, T]``, int32.
        probs: ``[T, topk]``, any of the same dtypes, or None.

    Returns:
        output: ``[T, C]``, dtype of ``input``, contiguous; multiplied and summed in float32
            (float64 for a float64 input) and rounded once. Input and probs are saved for the
            backward, the input only where there are probs.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    return input.new_empty((row_id_map.shape[1], input.shape[1]))


@contract(
    family="moe",
    check=_INDEX_MAP.check_unpermute_backward,
    samples=_unpermute_backward_samples(_INDEX_MAP),
    tolerance=SUM_TOLERANCE,
    oracle=_unpermute_backward_oracle(_INDEX_MAP),
)
def moe_unpermute_bwd(
    grad_output: Tensor,
    row_id_map: Tensor,
    input: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    num_rows: int,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of :func:`moe_unpermute_fwd`.

    For each pair with a row i: ``grad_input[i] = probs[t, k] * grad_output[t]`` and
    ``grad_probs[t, k] = sum over c of grad_output[t, c] * input[i, c]``. Everything else is
    zero.

    Args:
        grad_output: ``[T, C]``, float32, bfloat16, float16 or float64.
        row_id_map: ``[topk, T]``, int32, as in the forward.
        input: ``[N, C]``, any of the same dtypes, as in the forward; None if probs is.
        probs: ``[T, topk]``, as in the forward, or None.
        num_rows: N, the rows of the forward's input.

    Returns:
        grad_input: ``[N, C]``, dtype of ``grad_output``, contiguous; calculated in float32
            (float64 for float64).
        grad_probs: ``[T, topk]``, float32 (float64 for float64 probs), contiguous; None
            without probs.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    grad_input = grad_output.new_empty((num_rows, grad_output.shape[1]))
    return grad_input, _empty_grad_probs(probs)


def _empty_grad_probs(probs: Tensor | None) -> Tensor | None:
    if probs is None:
        return None
    return probs.new_empty(probs.shape, dtype=math_dtype(probs.dtype))


@contract(
    family="moe",
    check=_check_permute_mask,
    samples=_permute_mask_samples,
    tolerance=COPY_TOLERANCE,
    oracle=_permute_mask_oracle,
    backward=Backward(
        "moe_permute_mask_bwd",
        saves={"row_id_map": "output[2]"},
        gradients=("input", "probs"),
        output_grads=("grad_output", "grad_permuted_probs"),
    ),
)
def moe_permute_mask_fwd(
    input: Tensor, routing_map: Tensor, probs: Tensor | None = None, *, num_out_tokens: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Copies tokens, and their probs, into rows that are ordered by expert, given by a mask.

    The pairs (token t, expert e) for which ``routing_map[t, e]`` is true are ordered by expert,
    and within an expert by token. The i-th pair has row i, ``output[i] = input[t]``
    and ``permuted_probs[i] = probs[t, e]``, if i is below the number of rows; otherwise it is
    dropped.

    Args:
        input: ``[T, C]``, of any dtype of the contract: values are copied bit by bit.
        routing_map: ``[T, E]``, bool; E at least 1.
        probs: ``[T, E]``, float32, bfloat16, float16 or float64, or None.
        num_out_tokens: the number of rows N.

    Returns:
        output: ``[N, C]``, dtype of ``input``, contiguous; rows past the last pair are zero.
        permuted_probs: ``[N]``, dtype of ``probs``; zero past the last pair; None without
            probs.
        row_id_map: ``[T, 2 * E + 1]``, int32, contiguous, the map of a mask at the head of
            this module. Saved for the backward.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    import torch

    tokens, experts = routing_map.shape
    return (
        input.new_empty((num_out_tokens, input.shape[1])),
        None if probs is None else probs.new_empty((num_out_tokens,)),
        routing_map.new_empty((tokens, 2 * experts + 1), dtype=torch.int32),
    )


@contract(
    family="moe",
    check=_MASK_MAP.check_permute_probs_backward,
    samples=_permute_mask_backward_samples,
    tolerance=SUM_TOLERANCE,
    oracle=_permute_mask_backward_oracle,
)
def moe_permute_mask_bwd(
    grad_output: Tensor, row_id_map: Tensor, grad_permuted_probs: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of :func:`moe_permute_mask_fwd`.

    ``grad_input[t]`` is the sum of ``grad_output[i]`` over the rows i of token t.
    ``grad_probs[t, e]`` is ``grad_permuted_probs[i]`` if i is the row of (t, e), otherwise zero.

    Args:
        grad_output: ``[N, C]``, float32, bfloat16, float16 or float64.
        row_id_map: ``[T, 2 * E + 1]``, int32, as the forward returned it.
        grad_permuted_probs: ``[N]``, any of the same dtypes; None where there were no probs.

    Returns:
        grad_input: ``[T, C]``, dtype of ``grad_output``, contiguous; summed in float32
            (float64 for float64).
        grad_probs: ``[T, E]``, dtype of ``grad_permuted_probs``, contiguous; None without it.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    tokens, experts = row_id_map.shape[0], row_id_map.shape[1] // 2
    grad_input = grad_output.new_empty((tokens, grad_output.shape[1]))
    if grad_permuted_probs is None:
        return grad_input, None
    return grad_input, grad_permuted_probs.new_empty((tokens, experts))


@contract(
    family="moe",
    check=_MASK_MAP.check_unpermute,
    samples=_unpermute_samples(_MASK_MAP),
    tolerance=SUM_TOLERANCE,
    oracle=_unpermute_oracle(_MASK_MAP),
    backward=_unpermute_gradients("moe_unpermute_mask_bwd"),
)
def moe_unpermute_mask_fwd(
    input: Tensor, row_id_map: Tensor, probs: Tensor | None = None
) -> Tensor:
    """Sums the rows of each token, by the map of :func:`moe_permute_mask_fwd`.

    ``output[t]`` is the sum of ``probs[t, e] * input[i]`` over the rows i of token t, where e is
    the expert of the row. Without probs each prob counts as 1.

    Args:
        input: ``[N, C]``, float32, bfloat16, float16 or float64.
        row_id_map: ``[T, 2 * E + 1]``, int32.
        probs: ``[T, E]``, any of the same dtypes, or None. Probs of pairs without a row are
            ignored.

    Returns:
        output: ``[T, C]``, dtype of ``input``, contiguous; multiplied and summed in float32
            (float64 for a float64 input) and rounded once. Input and probs are saved for the
            backward, the input only where there are probs.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    return input.new_empty((row_id_map.shape[0], input.shape[1]))


@contract(
    family="moe",
    check=_MASK_MAP.check_unpermute_backward,
    samples=_unpermute_backward_samples(_MASK_MAP),
    tolerance=SUM_TOLERANCE,
    oracle=_unpermute_backward_oracle(_MASK_MAP),
)
def moe_unpermute_mask_bwd(
    grad_output: Tensor,
    row_id_map: Tensor,
    input: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    num_rows: int,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of :func:`moe_unpermute_mask_fwd`.

    For each row i, of token t and expert e: ``grad_input[i] = probs[t, e] * grad_output[t]``
    and ``grad_probs[t, e] = sum over c of grad_output[t, c] * input[i, c]``. Everything else
    is zero.

    Args:
        grad_output: ``[T, C]``, float32, bfloat16, float16 or float64.
        row_id_map: ``[T, 2 * E + 1]``, int32, as in the forward.
        input: ``[N, C]``, any of the same dtypes, as in the forward; None if probs is.
        probs: ``[T, E]``, as in the forward, or None.
        num_rows: N, the rows of the forward's input.

    Returns:
        grad_input: ``[N, C]``, dtype of ``grad_output``, contiguous; calculated in float32
            (float64 for float64).
        grad_probs: ``[T, E]``, float32 (float64 for float64 probs), contiguous; None without
            probs.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    grad_input = grad_output.new_empty((num_rows, grad_output.shape[1]))
    return grad_input, _empty_grad_probs(probs)
