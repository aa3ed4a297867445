"""The router's choice of experts and its auxiliary loss. A shape is tokens x experts x topk."""

from __future__ import annotations

import torch

from workloads.workload import Random, Sample, Shape, Workload, call, reference


def _forward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    tokens, experts, topk = shape
    return call(Random(dtype, device).normal(tokens, experts), topk)


def _backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    logits, topk = _forward(shape, dtype, device).args
    _, routing_map, intermediate = reference("fused_topk_with_score_function_fwd", logits, topk)
    return call(logits.flip(0).contiguous(), routing_map, intermediate, topk)


def _sigmoid(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    tokens, experts, topk = shape
    random = Random(dtype, device)
    bias = random.normal(experts) * 0.1
    groups = {"num_groups": max(experts // 32, 1), "group_topk": max(experts // 64, 1)}
    logits = random.normal(tokens, experts)
    return call(logits, topk, bias, score_function="sigmoid", **groups)


def _score_backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    logits, topk = _forward(shape, dtype, device).args
    intermediate = reference("fused_score_for_moe_aux_loss_fwd", logits, topk)[2]
    return call(logits.flip(0).contiguous(), intermediate, topk)


def _aux_loss(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    tokens, experts, topk = shape
    random = Random(dtype, device)
    probs = random.normal(tokens, experts).softmax(-1)
    counts = random.choices(experts, tokens, topk).flatten().bincount(minlength=experts)
    return call(probs, counts.to(torch.int32), tokens, topk, 0.01)


def _aux_loss_backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    probs, counts, *numbers = _aux_loss(shape, dtype, device).args
    loss, constant = reference("fused_moe_aux_loss_fwd", probs, counts, *numbers)
    return call(torch.ones_like(loss), constant, counts, probs.shape[0])


WORKLOADS = tuple(
    Workload(
        name=name,
        ops=(name.partition(" ")[0],),
        make=make,
        shapes=((32768, 128, 8),),
        tiny=(12, 16, 2),
        axes="tokens x experts x topk",
        dtype="float32",
        check_shape=lambda shape: (min(shape[0], 4096), *shape[1:]),
        standard=standard,
    )
    for name, make, standard in (
        ("fused_topk_with_score_function_fwd", _forward, True),
        ("fused_topk_with_score_function_fwd sigmoid, bias, groups", _sigmoid, False),
        ("fused_topk_with_score_function_bwd", _backward, True),
        ("fused_score_for_moe_aux_loss_fwd", _forward, False),
        ("fused_score_for_moe_aux_loss_bwd", _score_backward, False),
        ("fused_moe_aux_loss_fwd", _aux_loss, True),
        ("fused_moe_aux_loss_bwd", _aux_loss_backward, False),
    )
)
