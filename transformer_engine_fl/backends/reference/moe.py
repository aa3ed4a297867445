"""Moving tokens to their experts and back in plain PyTorch.

Either map is converted to the rows of all possible pairs, ``[T, S]`` (S is topk, or the number of
experts), and to its inverse, the pair of every row. Sums are calculated in float32 (float64 for
float64).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends.reference._values import as_written
from transformer_engine_fl.ops._dtypes import math_dtype
from transformer_engine_fl.ops.moe import rows_of_indices

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


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The mapping between pairs and rows.

    Attributes:
        rows: ``[T, S]``, int64: the row of each pair, -1 for none.
        pairs: ``[N]``, int64: the pair of each row, counted in ``rows``, -1 for none.
    """

    rows: Tensor
    pairs: Tensor

    @staticmethod
    def of(rows: Tensor, count: int) -> _Pairs:
        """From the rows of the pairs; rows below 0, or of ``count`` and more, count as none."""
        rows = torch.where((rows >= 0) & (rows < count), rows, -1).long().contiguous()
        # Pairs without a row write to an extra element, which is cut off.
        place = torch.where(rows < 0, count, rows).flatten()
        numbers = torch.arange(rows.numel(), device=rows.device)
        pairs = rows.new_full((count + 1,), -1).scatter(0, place, numbers)
        return _Pairs(rows, pairs[:count])

    @property
    def tokens(self) -> Tensor:
        """``[N]``: the token of each row, -1 for none."""
        return self.pairs.div(self.rows.shape[1], rounding_mode="floor")

    def to_rows(self, values: Tensor) -> Tensor:
        """``[T, C]`` -> ``[N, C]``: the values of each row's token, or zeros."""
        return _with_zeros(values)[self.tokens]

    def to_rows_of_pairs(self, values: Tensor) -> Tensor:
        """``[T, S]`` -> ``[N]``: the value of each row's pair, or zero."""
        return _with_zeros(values.flatten())[self.pairs]

    def from_rows_of_pairs(self, values: Tensor) -> Tensor:
        """``[N]`` -> ``[T, S]``: the value of each pair's row, or zero."""
        return _with_zeros(values)[self.rows]

    def summed(self, values: Tensor, weights: Tensor | None) -> Tensor:
        """``[N, C]`` -> ``[T, C]``: for each token the sum of its rows, each times its weight."""
        tokens, _ = self.rows.shape
        if not values.shape[1]:  # embedding_bag does not take rows without features
            return values.new_empty((tokens, 0))
        # A bag for each token, and one more for rows without a token.
        owner = torch.where(self.pairs < 0, tokens, self.tokens)
        order = owner.argsort(stable=True)
        # Counted by rows: an invalid map, with a row twice, has more pairs than rows.
        begins = torch.searchsorted(owner[order], torch.arange(tokens + 1, device=order.device))
        if weights is not None:
            weights = weights[order]
        bags = F.embedding_bag(
            order, values.contiguous(), begins, mode="sum", per_sample_weights=weights
        )
        return bags[:tokens]


def _with_zeros(values: Tensor) -> Tensor:
    """The values with zeros appended, which index -1 selects."""
    return torch.cat([values, values.new_zeros((1, *values.shape[1:]))])


def _by_index(row_id_map: Tensor, count: int) -> _Pairs:
    return _Pairs.of(row_id_map.t(), count)


def _by_mask(row_id_map: Tensor, count: int) -> _Pairs:
    tokens, experts = row_id_map.shape[0], row_id_map.shape[1] // 2
    rows, owners, routed = torch.split(row_id_map.long(), [experts, experts, 1], 1)
    used = torch.arange(experts, device=rows.device) < routed
    place = torch.where(used & (owners >= 0) & (owners < experts), owners, experts)
    by_expert = rows.new_full((tokens, experts + 1), -1).scatter(1, place, rows)
    return _Pairs.of(by_expert[:, :experts], count)


def _wide(values: Tensor) -> Tensor:
    return values.to(math_dtype(values.dtype))


def _sum(input: Tensor, pairs: _Pairs, probs: Tensor | None) -> Tensor:
    wide = _wide(input)
    weights = None if probs is None else pairs.to_rows_of_pairs(probs.to(wide.dtype))
    return pairs.summed(wide, weights).to(input.dtype)


def _sum_gradients(
    grad_output: Tensor, pairs: _Pairs, input: Tensor | None, probs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if input is None or probs is None:
        return pairs.to_rows(grad_output), None
    grad_rows = pairs.to_rows(_wide(grad_output))
    weights = pairs.to_rows_of_pairs(probs.to(grad_rows.dtype)).unsqueeze(-1)
    products = (grad_rows * input.to(grad_rows.dtype)).sum(-1)
    grad_probs = pairs.from_rows_of_pairs(products)
    return (grad_rows * weights).to(grad_output.dtype), grad_probs.to(math_dtype(probs.dtype))


@as_written
def moe_permute_fwd(
    input: Tensor, indices: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor]:
    """Copies tokens into rows ordered by expert."""
    ops.moe_permute_fwd.check(input, indices, num_out_tokens)
    order = indices.flatten().argsort(stable=True)
    numbers = torch.arange(order.shape[0], device=order.device)
    rows = torch.empty_like(order).scatter(0, order, numbers).view(indices.shape)
    pairs = _Pairs.of(rows, rows_of_indices(indices, num_out_tokens))
    return pairs.to_rows(input), pairs.rows.t().to(torch.int32).contiguous()


@as_written
def moe_permute_bwd(grad_output: Tensor, row_id_map: Tensor) -> Tensor:
    """Gradient of :func:`moe_permute_fwd`."""
    ops.moe_permute_bwd.check(grad_output, row_id_map)
    return _sum(grad_output, _by_index(row_id_map, grad_output.shape[0]), None)


@as_written
def moe_unpermute_fwd(input: Tensor, row_id_map: Tensor, probs: Tensor | None = None) -> Tensor:
    """Sums the rows of each token."""
    ops.moe_unpermute_fwd.check(input, row_id_map, probs)
    return _sum(input, _by_index(row_id_map, input.shape[0]), probs)


@as_written
def moe_unpermute_bwd(
    grad_output: Tensor,
    row_id_map: Tensor,
    input: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    num_rows: int,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of :func:`moe_unpermute_fwd`."""
    ops.moe_unpermute_bwd.check(grad_output, row_id_map, input, probs, num_rows=num_rows)
    return _sum_gradients(grad_output, _by_index(row_id_map, num_rows), input, probs)


@as_written
def moe_permute_mask_fwd(
    input: Tensor, routing_map: Tensor, probs: Tensor | None = None, *, num_out_tokens: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Copies tokens and probs into rows ordered by expert."""
    ops.moe_permute_mask_fwd.check(input, routing_map, probs, num_out_tokens=num_out_tokens)
    tokens, experts = routing_map.shape
    routed = routing_map.t().flatten()
    rows = torch.where(routed, routed.cumsum(0) - 1, -1).view(experts, tokens).t()
    pairs = _Pairs.of(rows, num_out_tokens)
    found, owners = pairs.rows.sort(1, descending=True)
    owners = torch.where(found < 0, -1, owners)
    row_id_map = torch.cat([found, owners, (found >= 0).sum(1, keepdim=True)], 1)
    permuted_probs = None if probs is None else pairs.to_rows_of_pairs(probs)
    return pairs.to_rows(input), permuted_probs, row_id_map.to(torch.int32)


@as_written
def moe_permute_mask_bwd(
    grad_output: Tensor, row_id_map: Tensor, grad_permuted_probs: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of :func:`moe_permute_mask_fwd`."""
    ops.moe_permute_mask_bwd.check(grad_output, row_id_map, grad_permuted_probs)
    pairs = _by_mask(row_id_map, grad_output.shape[0])
    grad_input = _sum(grad_output, pairs, None)
    if grad_permuted_probs is None:
        return grad_input, None
    return grad_input, pairs.from_rows_of_pairs(grad_permuted_probs)


@as_written
def moe_unpermute_mask_fwd(
    input: Tensor, row_id_map: Tensor, probs: Tensor | None = None
) -> Tensor:
    """Sums the rows of each token."""
    ops.moe_unpermute_mask_fwd.check(input, row_id_map, probs)
    return _sum(input, _by_mask(row_id_map, input.shape[0]), probs)


@as_written
def moe_unpermute_mask_bwd(
    grad_output: Tensor,
    row_id_map: Tensor,
    input: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    num_rows: int,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of :func:`moe_unpermute_mask_fwd`."""
    ops.moe_unpermute_mask_bwd.check(grad_output, row_id_map, input, probs, num_rows=num_rows)
    return _sum_gradients(grad_output, _by_mask(row_id_map, num_rows), input, probs)
