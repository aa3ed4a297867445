"""Conversions between the layouts of attention, and copies into a key-value cache."""

from __future__ import annotations

import torch
from torch import Tensor

from workloads.workload import Random, Sample, Shape, Workload, call, size


def uneven(count: int, total: int, device: str, multiple: int = 1) -> Tensor:
    """int32 offsets of ``count`` sequences of two lengths, with ``total`` tokens together."""
    mean = total // count
    longer = (mean // 2) // multiple * multiple
    lengths = [mean + (longer if place % 2 else -longer) for place in range(count)]
    lengths[-1] += total - sum(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return offsets.to(device, torch.int32)


def _prepare(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    tokens, batch, heads, width = shape
    return call(Random(dtype, device).normal(tokens, batch, heads, 3 * width))


def _prepare_backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    tokens, batch, heads, width = shape
    random = Random(dtype, device)
    return call(*(random.normal(batch, tokens, heads, width) for _ in range(3)))


def _longest(offsets: Tensor) -> int:
    return int(offsets.diff().max())


def _to_bshd(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    tokens, batch, heads, width = shape
    offsets = uneven(batch, tokens, device)
    return call(Random(dtype, device).normal(tokens, heads, width), offsets, _longest(offsets))


def _to_thd(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    tokens, batch, heads, width = shape
    offsets = uneven(batch, tokens, device)
    rows = Random(dtype, device).normal(batch, _longest(offsets), heads, width)
    return call(rows, offsets, tokens)


def _cache(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    tokens, batch, heads, width = shape
    random = Random(dtype, device)
    new = [random.normal(tokens, heads, width) for _ in range(2)]
    offsets = uneven(batch, tokens, device)
    caches = [random.normal(batch, 2 * _longest(offsets), heads, width) for _ in range(2)]
    return call(*new, *caches, offsets, 2 * offsets)


def _moved(sample: Sample) -> int:
    """The bytes of the tokens without padding, read and written."""
    tokens = next(it for it in sample.args if isinstance(it, Tensor) and it.dtype != torch.int32)
    offsets = next(it for it in sample.args if isinstance(it, Tensor) and it.dtype == torch.int32)
    existing = int(offsets[-1]) * tokens.shape[-2:].numel() * tokens.element_size()
    return 2 * existing + size(offsets)


def _cached(sample: Sample) -> int:
    return 2 * size(sample.args[:2]) + size(sample.args[4:])


_AXES = "tokens x batch x heads x features"

WORKLOADS = (
    Workload(
        name="fa_prepare_fwd",
        make=_prepare,
        shapes=((4096, 2, 32, 128),),
        tiny=(6, 2, 2, 8),
        axes=_AXES,
    ),
    Workload(
        name="fa_prepare_bwd",
        make=_prepare_backward,
        shapes=((4096, 2, 32, 128),),
        tiny=(6, 2, 2, 8),
        axes=_AXES,
        standard=False,
    ),
    *(
        Workload(
            name=name,
            make=make,
            shapes=((16384, 8, 32, 128),),
            tiny=(16, 2, 2, 8),
            axes="tokens of all sequences x sequences of two lengths x heads x features",
            bytes=count,
            counted=counted,
            standard=standard,
        )
        for name, make, count, counted, standard in (
            (
                "convert_thd_to_bshd",
                _to_bshd,
                None,
                "the output with its padding, which is written too",
                True,
            ),
            ("convert_bshd_to_thd", _to_thd, _moved, "the tokens without the padding", False),
            ("copy_to_kv_cache", _cache, _cached, "the new tokens, read and written", True),
        )
    ),
)
