"""Softmax of rows, and of attention scores under a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from workloads.workload import COLUMNS, ROWS, Random, Sample, Shape, Workload, call

_SCALE = 0.125
_CAUSAL_COUNTED = "reads of the scores on and below the diagonal, writes of the whole output"


def _forward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(Random(dtype, device).normal(*shape))


def _backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    random = Random(dtype, device)
    return call(random.normal(*shape), random.normal(*shape).softmax(-1))


def _masked(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    random = Random(dtype, device)
    batch, _, queries, keys = shape
    mask = random.integers(3, batch, 1, queries, keys) == 0
    return call(random.normal(*shape), mask, _SCALE)


def _scaled(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(Random(dtype, device).normal(*shape), _SCALE)


def future(scores: Tensor) -> Tensor:
    """A mask of the keys after each query; the last query is aligned with the last key."""
    queries, keys = scores.shape[-2:]
    everywhere = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
    return everywhere.triu(1 + keys - queries)


def _masked_backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    scores, mask, scale = _masked(shape, dtype, device).args
    output = scores.masked_fill(mask, -torch.inf).softmax(-1)
    return call(scores, output, scale)


def _causal_backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    random = Random(dtype, device)
    scores = random.normal(*shape)
    output = scores.masked_fill(future(scores), -torch.inf).softmax(-1)
    return call(random.normal(*shape), output, _SCALE)


def _causal_bytes(sample: Sample) -> int:
    scores = [it for it in sample.args if isinstance(it, Tensor)]
    queries, keys = scores[0].shape[-2:]
    seen = queries * (keys - queries) + queries * (queries + 1) // 2
    groups = scores[0].numel() // (queries * keys)
    read = sum(groups * seen * it.element_size() for it in scores)
    return int(read + scores[0].numel() * scores[0].element_size())


_ROWS = "rows x columns"
_SCORES = "batch x heads x queries x keys"
_BATCHES: tuple[Shape, ...] = ((4, 16, 2048, 2048),)

WORKLOADS = (
    Workload(
        name="scaled_softmax_forward",
        make=_forward,
        shapes=ROWS,
        wide=COLUMNS,
        tiny=(6, 40),
        axes=_ROWS,
    ),
    Workload(
        name="scaled_softmax_backward",
        make=_backward,
        shapes=((8192, 4096), (4096, 8192), (2048, 32768), (16384, 8192)),
        wide=COLUMNS,
        tiny=(6, 40),
        axes=_ROWS,
    ),
    Workload(
        name="scaled_masked_softmax_forward",
        make=_masked,
        shapes=_BATCHES,
        tiny=(2, 2, 4, 8),
        axes=_SCORES,
    ),
    Workload(
        name="scaled_masked_softmax_backward",
        make=_masked_backward,
        shapes=_BATCHES,
        tiny=(2, 2, 4, 8),
        axes=_SCORES,
        standard=False,
    ),
    *(
        Workload(
            name=f"{form}_{direction}",
            make=_scaled if direction == "forward" else _causal_backward,
            shapes=shapes,
            tiny=tiny,
            axes=axes,
            bytes=_causal_bytes,
            counted=_CAUSAL_COUNTED,
        )
        for form, shapes, tiny, axes in (
            (
                "scaled_upper_triang_masked_softmax",
                ((64, 2048, 2048),),
                (2, 8, 8),
                "batch and heads x queries x keys",
            ),
            ("scaled_aligned_causal_masked_softmax", _BATCHES, (2, 2, 4, 8), _SCORES),
        )
        for direction in ("forward", "backward")
    ),
)
