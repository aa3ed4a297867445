"""Cross entropy: forward, backward, both in one operator, and fused with the linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workloads.workload import (
    Functions,
    Random,
    Sample,
    Shape,
    Workload,
    call,
    fewer_rows,
    reference,
)

_VOCABULARIES: tuple[Shape, ...] = ((8192, 32000), (8192, 128256), (4096, 151936))


def _forward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    random = Random(dtype, device)
    return call(random.normal(*shape), random.integers(shape[1], shape[0]))


def mean_grad(target: Tensor) -> Tensor:
    """The gradient of the mean loss with respect to the loss of each row."""
    return torch.full(target.shape, 1 / target.numel(), device=target.device)


def _backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    logits, target = _forward(shape, dtype, device).args
    lse = logits.float().logsumexp(-1)
    return call(mean_grad(target), logits, target, lse)


def _both(functions: Functions, sample: Sample) -> Any:
    logits, target = sample.args
    loss, _, gradient = functions["cross_entropy_fwd_bwd"](logits, target, mean_grad(target))
    return gradient, loss


def _linear(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    rows, hidden, vocabulary = shape
    random = Random(dtype, device)
    weight = random.normal(vocabulary, hidden) * hidden**-0.5
    return call(random.normal(rows, hidden), weight, random.integers(vocabulary, rows))


def _linear_both(functions: Functions, sample: Sample) -> Any:
    input, weight, target = sample.args
    loss, lse = functions["fused_linear_cross_entropy_fwd"](input, weight, target)
    backward = functions["fused_linear_cross_entropy_bwd"]
    return *backward(mean_grad(target), input, weight, target, lse)[:2], loss


def _linear_at_once(functions: Functions, sample: Sample) -> Any:
    input, weight, target = sample.args
    both = functions["fused_linear_cross_entropy_fwd_bwd"]
    loss, _, *gradients = both(input, weight, target, mean_grad(target))
    return *gradients[:2], loss


def _linear_backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    input, weight, target = _linear(shape, dtype, device).args
    _, lse = reference("fused_linear_cross_entropy_fwd", input, weight, target)
    return call(mean_grad(target), input, weight, target, lse)


def _partial(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    rows, columns = shape
    random = Random(dtype, device)
    target = random.integers(2 * columns, rows)
    return call(random.normal(rows, columns), target, vocab_start=columns)


def _product(times: int) -> Any:
    def flops(shape: Shape) -> float:
        rows, hidden, vocabulary = shape
        return 2.0 * times * rows * hidden * vocabulary

    return flops


_ROWS = "rows x vocabulary"
_LINEAR = "rows x hidden size x vocabulary"
LINEAR_CROSS_ENTROPY = ("fused_linear_cross_entropy fwd+bwd", "fused_linear_cross_entropy at once")
"""Forward and backward by two operators, and by one; the peers are the same for both."""
_LINEAR_BOTH, _LINEAR_AT_ONCE = LINEAR_CROSS_ENTROPY
_THREE = (
    "the three products (logits and two gradients), 2 operations for each multiplication; "
    "recomputing the logits is not counted"
)

WORKLOADS = (
    Workload(
        name="cross_entropy fwd+bwd",
        ops=("cross_entropy_fwd_bwd",),
        make=_forward,
        run=_both,
        shapes=_VOCABULARIES,
        tiny=(6, 40),
        axes=_ROWS,
        check_shape=fewer_rows(512),
    ),
    Workload(
        name="cross_entropy_fwd",
        make=_forward,
        shapes=_VOCABULARIES[1:2],
        tiny=(6, 40),
        axes=_ROWS,
        check_shape=fewer_rows(512),
    ),
    Workload(
        name="cross_entropy_bwd",
        make=_backward,
        shapes=_VOCABULARIES[1:2],
        tiny=(6, 40),
        axes=_ROWS,
        check_shape=fewer_rows(512),
    ),
    Workload(
        name="cross_entropy_partial_fwd",
        make=_partial,
        shapes=((8192, 16032),),
        tiny=(6, 40),
        axes="rows x vocabulary of the shard",
        standard=False,
        check_shape=fewer_rows(512),
    ),
    *(
        Workload(
            name=name,
            ops=ops,
            make=make,
            run=run,
            shapes=((4096, 4096, 128256),),
            tiny=(6, 8, 40),
            axes=_LINEAR,
            flops=_product(products),
            roof="matmul",
            counted=counted,
            check_shape=lambda shape: (min(shape[0], 256), min(shape[1], 512), min(shape[2], 8192)),
            standard=run is not None,
        )
        for name, ops, make, run, products, counted in (
            (
                _LINEAR_BOTH,
                ("fused_linear_cross_entropy_fwd", "fused_linear_cross_entropy_bwd"),
                _linear,
                _linear_both,
                3,
                _THREE,
            ),
            (
                _LINEAR_AT_ONCE,
                ("fused_linear_cross_entropy_fwd_bwd",),
                _linear,
                _linear_at_once,
                3,
                _THREE,
            ),
            (
                "fused_linear_cross_entropy_fwd",
                (),
                _linear,
                None,
                1,
                "the product with the weight",
            ),
            (
                "fused_linear_cross_entropy_bwd",
                (),
                _linear_backward,
                None,
                2,
                "the products of the two gradients; recomputing the logits is not counted",
            ),
        )
    ),
)
