"""The kernels of quantised epilogues that the benchmarks launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transformer_engine_fl.backends.vendor.cuda._casting import cast_source, recipes, row_way
from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda._launch import Limits
from transformer_engine_fl.backends.vendor.cuda._sums import sum_source
from transformer_engine_fl.backends.vendor.cuda.epilogue import activation_key, norm_sources


def sources(device: Limits) -> Iterator[Specialisation]:
    """The kernels for bfloat16 tensors."""
    low = torch.bfloat16
    along_rows = [it for it in recipes() if not (it.columnwise or it.square)]
    for recipe in along_rows:
        amax = recipe.form.by_tensor
        for kind, gated, backward in (
            ("Gelu", False, False),
            ("Silu", True, False),
            ("Silu", True, True),
        ):
            key = activation_key(kind, gated, backward, low, both=True)
            ahead = row_way(key, recipe)[0]
            yield cast_source(key, recipe, device, amax=amax, ahead=ahead)[0]
        gradient = activation_key("Gelu", False, True, low)
        yield cast_source(gradient, recipe, device, amax=amax, sums=True)[0]
    yield sum_source(14336, torch.float32, low, device)[0]
    for columns in (7168, 8192):
        for centred, added in ((False, False), (False, True), (True, False)):
            yield from (it for it, _ in norm_sources(device, columns, low, centred, added))


def bits(source: Specialisation) -> tuple[int, int]:
    """Bits of a read and of a write: codes are narrower than the values they stand for."""
    defines = dict(source.defines)
    if source.kernel in ("forward", "forward_stream") and not defines["ADDED"]:
        if defines["CAST"] == 2:  # writes statistics only
            return 128, 0
        bits = int(defines["SPAN"]) * (4 if defines["KIND"] == "e2m1" else 8)
        return 128, bits if bits >= 64 else 0
    if source.kernel == "cast_rows" and defines["KIND"] == "e2m1":
        return 128, 64
    return 128, 128
