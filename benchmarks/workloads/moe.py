"""Permutation of tokens to experts and back. A shape is tokens x hidden size x experts x topk."""

from __future__ import annotations

import torch
from torch import Tensor

from workloads.workload import Random, Sample, Shape, Workload, call, reference


def _indices(shape: Shape, dtype: torch.dtype, device: str) -> tuple[Random, Tensor, Tensor]:
    tokens, hidden, experts, topk = shape
    random = Random(dtype, device)
    return random, random.normal(tokens, hidden), random.choices(experts, tokens, topk)


def _permute(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    _, input, indices = _indices(shape, dtype, device)
    return call(input, indices)


def _permute_backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    _, input, indices = _indices(shape, dtype, device)
    return call(*reference("moe_permute_fwd", input, indices))


def _unpermute(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    rows, row_id_map = _permute_backward(shape, dtype, device).args
    probs = Random(torch.float32, device).normal(shape[0], shape[3]).softmax(-1)
    return call(rows, row_id_map, probs)


def _unpermute_backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    rows, row_id_map, probs = _unpermute(shape, dtype, device).args
    grad = Random(dtype, device).normal(*shape[:2])
    return call(grad, row_id_map, rows, probs, num_rows=rows.shape[0])


def _permute_mask(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    random, input, indices = _indices(shape, dtype, device)
    tokens, _, experts, topk = shape
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool, device=device)
    routing_map.scatter_(1, indices.long(), True)
    probs = random.normal(tokens, experts, dtype=torch.float32).softmax(-1)
    return call(input, routing_map, probs, num_out_tokens=tokens * topk)


def _permuted_by_mask(shape: Shape, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    made = _permute_mask(shape, dtype, device)
    rows, permuted_probs, row_id_map = reference("moe_permute_mask_fwd", *made.args, **made.kwargs)
    return rows, row_id_map, made.args[2], permuted_probs


def _permute_mask_backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    rows, row_id_map, _, permuted_probs = _permuted_by_mask(shape, dtype, device)
    return call(rows, row_id_map, permuted_probs)


def _unpermute_mask(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(*_permuted_by_mask(shape, dtype, device)[:3])


def _unpermute_mask_backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    rows, row_id_map, probs = _unpermute_mask(shape, dtype, device).args
    grad = Random(dtype, device).normal(*shape[:2])
    return call(grad, row_id_map, rows, probs, num_rows=rows.shape[0])


WORKLOADS = tuple(
    Workload(
        name=name,
        make=make,
        shapes=((8192, 4096, 64, 4),),
        tiny=(12, 16, 8, 2),
        axes="tokens x hidden size x experts x topk",
        check_shape=lambda shape: (min(shape[0], 512), *shape[1:]),
        standard=standard,
    )
    for name, make, standard in (
        ("moe_permute_fwd", _permute, True),
        ("moe_permute_bwd", _permute_backward, True),
        ("moe_unpermute_fwd", _unpermute, True),
        ("moe_unpermute_bwd", _unpermute_backward, True),
        ("moe_permute_mask_fwd", _permute_mask, True),
        ("moe_permute_mask_bwd", _permute_mask_backward, False),
        ("moe_unpermute_mask_fwd", _unpermute_mask, True),
        ("moe_unpermute_mask_bwd", _unpermute_mask_backward, False),
    )
)
