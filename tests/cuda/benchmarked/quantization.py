"""The kernels of quantization that the benchmarks launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transformer_engine_fl.backends.vendor.cuda._casting import (
    amax_source,
    cast_source,
    identity_key,
    recipes,
    rows_ahead,
)
from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda._launch import Limits
from transformer_engine_fl.backends.vendor.cuda._sums import sum_source
from transformer_engine_fl.backends.vendor.cuda.quantization import (
    dequantize_source,
    shard_source,
    swap_source,
    transpose_source,
)
from transformer_engine_fl.ops._formats import FORMATS


def sources(device: Limits) -> Iterator[Specialisation]:
    """The kernels for bfloat16 tensors."""
    low = torch.bfloat16
    key = identity_key(low)
    ahead = rows_ahead(key)
    for recipe in recipes():
        computed = recipe.form.by_tensor
        yield cast_source(key, recipe, device, dependent=computed, inside=True, ahead=ahead)[0]
        if computed:
            yield cast_source(key, recipe, device, amax=True, inside=True, ahead=ahead)[0]
        if recipe.form.name == "mxfp8":
            yield cast_source(key, recipe, device, sums=True, inside=True)[0]
    yield amax_source(key, 32, 8, device)[0]
    yield sum_source(8192, torch.float32, low, device)[0]
    for form in FORMATS.values():
        data: torch.dtype = getattr(torch, form.dtypes[0])
        yield dequantize_source(form.name, data, low, 8, 8 // form.values_per_byte, True)[0]
    yield transpose_source(16, aligned=True)[0]
    yield swap_source(16)[0]
    for casts in (False, True):
        yield shard_source(low, 8, "e4m3", casts)[0]


def bits(source: Specialisation) -> tuple[int, int]:
    """Bits of a read and of a write: codes are narrower than the values they stand for."""
    defines = dict(source.defines)
    if source.kernel == "dequantize":
        return 0 if defines["KIND"] == "e2m1" else 64, 128
    if source.kernel == "amax_tiles" or defines.get("CASTS") == 0:
        return 128, 0
    if source.kernel == "shard" or (source.kernel, defines.get("KIND")) == ("cast_rows", "e2m1"):
        return 128, 64
    return 128, 128
