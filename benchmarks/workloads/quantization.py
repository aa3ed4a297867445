"""Casts to the scaling formats and back, and the copies and transpositions around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workloads.workload import Random, Sample, Shape, Workload, call, fewer_rows, reference

Maker = Callable[[Shape, torch.dtype, str], Sample]

_SHAPE: Shape = (16384, 8192)
_TINY: Shape = (128, 256)

FORMATS: dict[str, dict[str, Any]] = {
    "current scaling": {},
    "1x128": {"format": "block_1x128"},
    "128x128": {"format": "block_128x128"},
    "mxfp8": {"format": "mxfp8"},
    "nvfp4": {"format": "nvfp4"},
}


def _quantize(options: dict[str, Any]) -> Maker:
    return lambda shape, dtype, device: call(Random(dtype, device).normal(*shape), **options)


def _delayed(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(Random(dtype, device).normal(*shape), torch.tensor([64.0], device=device))


def _dequantize(options: dict[str, Any]) -> Maker:
    def make(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
        input = Random(dtype, device).normal(*shape)
        data, scale_inv, _, global_scale_inv, *_ = reference("quantize", input, **options)
        return call(data, scale_inv, global_scale_inv, out_dtype=dtype, **options)

    return make


def _float8(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(Random(torch.float8_e4m3fn, device).normal(*shape))


def _plain(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(Random(dtype, device).normal(*shape))


def _split(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    rows = shape[0] // 4
    input = Random(dtype, device).normal(*shape)
    return call(input, [rows, rows, rows, shape[0] - 3 * rows], format="mxfp8")


def _group(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    sizes = torch.full((4,), shape[0] // 4, device=device, dtype=torch.int64)
    return call(Random(dtype, device).normal(*shape), sizes)


def _several(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    random = Random(dtype, device)
    return call([random.normal(shape[0] // 4, shape[1]) for _ in range(4)], format="mxfp8")


def _shard(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(Random(dtype, device).normal(shape[0] * shape[1] // 2), *shape, 128)


def _shard_cast(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    blocks = tuple(-(-size // 128) for size in shape)
    part, *where = _shard(shape, dtype, device).args
    return call(part, torch.full(blocks, 64.0, device=device), *where)


# The scale follows from the amax of the tensor, so all values are read before the first is cast.
_OWN_AMAX: dict[str, Any] = {
    "twice": ("input",),
    "counted": "the input, read twice (for its amax and for the cast), and the result",
}


def _of_format(name: str, make: Maker, **options: Any) -> Workload:
    own_amax = _OWN_AMAX if "current scaling" in name or "nvfp4" in name else {}
    return _workload(name, make, **own_amax, **options)


def _workload(name: str, make: Maker, **options: Any) -> Workload:
    given: dict[str, Any] = {"check_shape": fewer_rows(1024), "axes": "rows x columns"}
    given |= {"shapes": (_SHAPE,), "tiny": _TINY, "ops": (name.partition(" ")[0],)}
    return Workload(name=name, make=make, **given | options)


WORKLOADS = (
    _workload("quantize delayed scaling", _delayed),
    *(_of_format(f"quantize {name}", _quantize(options)) for name, options in FORMATS.items()),
    *(
        _of_format(
            f"quantize {name} both ways",
            _quantize(FORMATS[name] | {"columnwise": True}),
            standard=name in ("1x128", "mxfp8"),
        )
        for name in FORMATS
    ),
    _workload("bgrad_quantize mxfp8", _quantize({"format": "mxfp8"}), standard=False),
    _workload("split_quantize mxfp8", _split, standard=False),
    _of_format("group_quantize current scaling", _group, standard=False),
    _workload("multi_tensor_quantize mxfp8", _several, standard=False),
    *(
        _workload(f"dequantize {name}", _dequantize(options), standard=name in ("1x128", "nvfp4"))
        for name, options in FORMATS.items()
    ),
    _workload("compute_amax", _plain),
    _workload("fp8_transpose", _float8),
    _workload(
        "swap_first_dims",
        _plain,
        shapes=((4096, 4, 4096),),
        tiny=(6, 4, 8),
        axes="tokens x batch x columns",
        check_shape=None,
    ),
    _workload("fp8_block_scaling_compute_partial_amax", _shard, standard=False),
    _workload("fp8_block_scaling_partial_cast", _shard_cast, standard=False),
)
