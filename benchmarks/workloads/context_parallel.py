"""The corrections between the steps of context-parallel attention, on packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from workloads.attention_layout import uneven
from workloads.workload import Random, Sample, Shape, Workload, call, size


def _lse(tokens: int, heads: int, device: str) -> Tensor:
    return Random(torch.float32, device).normal(heads, tokens)


def _out_correction(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    tokens, batch, heads, width = shape
    random = Random(dtype, device)
    out, step = (random.normal(tokens, heads, width) for _ in range(2))
    lse = _lse(tokens, heads, device)
    offsets = uneven(batch, tokens, device, 2)
    return call(out, step, lse, lse - 1, offsets, lse_packed=True)


def _lse_correction(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    tokens, batch, heads, _ = shape
    lse = _lse(tokens, heads, device)
    step = _lse(tokens // 2, heads, device)
    return call(lse, step, uneven(batch, tokens, device, 2), lse_packed=True)


def _grad_correction(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    tokens, batch, heads, width = shape
    random = Random(dtype, device)
    grad, step = (random.normal(tokens, heads, width) for _ in range(2))
    offsets = uneven(batch, tokens, device, 2)
    return call(grad, step, offsets, first_half="add", second_half="add")


def _read_half(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    tokens, batch, heads, width = shape
    tensor = Random(dtype, device).normal(tokens, heads, width)
    return call(tensor, uneven(batch, tokens, device, 2), 1)


def _half_read_and_written(sample: Sample) -> int:
    return size(sample.args)


def _half_of_lse(sample: Sample) -> int:
    lse, step, offsets = sample.args
    return size(lse) + size(step) + size(offsets)


WORKLOADS = tuple(
    Workload(
        name=name,
        make=make,
        shapes=((16384, 8, 32, 128),),
        tiny=(32, 2, 2, 8),
        axes="tokens of all sequences x sequences of two lengths x heads x features",
        bytes=count,
        counted=counted,
        standard=name == "thd_out_correction",
        check_shape=lambda shape: (min(shape[0], 1024), *shape[1:]),
    )
    for name, make, count, counted in (
        ("thd_out_correction", _out_correction, None, ""),
        ("thd_grad_correction", _grad_correction, None, ""),
        (
            "thd_read_half_tensor",
            _read_half,
            _half_read_and_written,
            "the halves that are copied, read and written",
        ),
        (
            "thd_second_half_lse_correction",
            _lse_correction,
            _half_of_lse,
            "the second halves, read and written, and the lse of the step, read",
        ),
    )
)
