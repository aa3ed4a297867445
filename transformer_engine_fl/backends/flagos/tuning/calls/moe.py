"""Moving rows of tokens to their experts and back, where they are summed, weighted or not."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_engine_fl.backends.flagos.tuning.calls.call import (
    Calls,
    Sample,
    Shape,
    call,
    fewer_rows,
    normal,
)

__all__ = ["CALLS"]


def _permute(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    tokens, columns, experts, topk = shape
    scores = normal((tokens, experts), torch.float32, device, 2)
    return call(normal((tokens, columns), dtype, device, 1), scores.topk(topk).indices.int())


def _permuted(shape: Shape, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    from transformer_engine_fl import ops

    rows, row_id_map = ops.moe_permute_fwd(*_permute(shape, dtype, device).args)
    return rows, row_id_map


def _sum(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(*_permuted(shape, dtype, device))


def _weighted(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    probs = normal((shape[0], shape[3]), torch.float32, device, 3).softmax(-1)
    return call(*_permuted(shape, dtype, device), probs)


CALLS = tuple(
    Calls(
        op=op,
        choices=(choice,),
        make=make,
        shapes=((8192, 4096, 64, 4),),
        axes="tokens x columns x experts x experts of a token",
        check_shape=fewer_rows,
    )
    for op, choice, make in (
        ("moe_permute_fwd", "moe_spread", _permute),
        ("moe_unpermute_fwd", "moe_sum", _sum),
        ("moe_unpermute_fwd", "moe_weighted_sum", _weighted),
    )
)
