"""Expert permutation in eager torch, in the dtype of the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["COMPOSITIONS"]


def _of_indices(row_id_map: Tensor, count: int) -> Tensor:
    """``[T, S]``: the row of each pair, or -1."""
    return row_id_map.t().long().masked_fill(row_id_map.t() >= count, -1)


def _of_mask(row_id_map: Tensor, count: int) -> Tensor:
    tokens, experts = row_id_map.shape[0], row_id_map.shape[1] // 2
    rows = torch.full((tokens, experts), -1, device=row_id_map.device)
    for place in range(experts):
        for token in (row_id_map[:, -1] > place).nonzero().flatten().tolist():
            row, expert = row_id_map[token, place], row_id_map[token, experts + place]
            rows[token, expert] = row if row < count else -1
    return rows


def _unpermute(rows_of: Callable[[Tensor, int], Tensor]) -> Callable[..., Any]:
    def unpermute(input: Tensor, row_id_map: Tensor, probs: Tensor | None = None) -> Any:
        rows = rows_of(row_id_map, input.shape[0])
        output = input.new_zeros((rows.shape[0], input.shape[1]))
        for place in range(rows.shape[1]):
            tokens = (rows[:, place] >= 0).nonzero().flatten()
            values = input[rows[tokens, place]]
            if probs is not None:
                values = values * probs[tokens, place].unsqueeze(-1).to(input.dtype)
            output = output.index_add(0, tokens, values)
        return (output,)

    return unpermute


def _unpermute_backward(rows_of: Callable[[Tensor, int], Tensor]) -> Callable[..., Any]:
    def gradients(
        grad_output: Tensor,
        row_id_map: Tensor,
        input: Tensor | None = None,
        probs: Tensor | None = None,
        *,
        num_rows: int,
    ) -> Any:
        rows = rows_of(row_id_map, num_rows)
        tokens, places = (rows >= 0).nonzero(as_tuple=True)
        owned = rows[tokens, places]
        values = grad_output[tokens]
        grad_input = grad_output.new_zeros((num_rows, grad_output.shape[1]))
        if input is None or probs is None:
            return grad_input.index_copy(0, owned, values), None
        weights = probs[tokens, places].unsqueeze(-1).to(values.dtype)
        grad_probs = torch.zeros_like(probs, dtype=values.dtype)
        grad_probs[tokens, places] = (values * input[owned].to(values.dtype)).sum(-1)
        return grad_input.index_copy(0, owned, values * weights), grad_probs.to(probs.dtype)

    return gradients


def moe_permute_bwd(grad_output: Tensor, row_id_map: Tensor) -> Any:
    return _unpermute(_of_indices)(grad_output, row_id_map)


def moe_permute_mask_bwd(
    grad_output: Tensor, row_id_map: Tensor, grad_permuted_probs: Tensor | None = None
) -> Any:
    return *_unpermute(_of_mask)(grad_output, row_id_map), None


COMPOSITIONS: dict[str, Callable[..., Any]] = {
    "moe_permute_bwd": moe_permute_bwd,
    "moe_permute_mask_bwd": moe_permute_mask_bwd,
    "moe_unpermute_bwd": _unpermute_backward(_of_indices),
    "moe_unpermute_fwd": _unpermute(_of_indices),
    "moe_unpermute_mask_bwd": _unpermute_backward(_of_mask),
    "moe_unpermute_mask_fwd": _unpermute(_of_mask),
}
