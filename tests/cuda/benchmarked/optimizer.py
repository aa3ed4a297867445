"""The kernels over lists of tensors that the benchmarks launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda._launch import Limits
from transformer_engine_fl.backends.vendor.cuda.optimizer import TILES, source


def sources(device: Limits) -> Iterator[Specialisation]:
    """The kernels for float32 and bfloat16 tensors, all aligned."""
    low, full = torch.bfloat16, torch.float32
    for kind in (low, full):
        vec = 16 // kind.itemsize
        same = {"X": kind, "ACC": full}
        cut = {name: TILES[name](kind.itemsize) for name in ("scale", "l2norm")}
        yield source("scale", (None, None), 2, vec, cut["scale"], Y=kind, **same)[0]
        yield source("squares", (None, full), 2, vec, cut["l2norm"], **same)[0]
        adam = {"G": kind, "P": kind, "M": full, "ACC": full, "DECOUPLED": True, "SHORT": False}
        others = (torch.int32, None, None, None)
        for form, w in (("plain", None), ("master", full)):
            kinds = {**adam, "W": w, "FORM": form, "MANTISSA": None}
            yield source("adam", others, 4 + (w is not None), 4, TILES["adam"](4), **kinds)[0]
        sgd = {"G": kind, "P": full, "B": full, "C": None, "ACC": full}
        how = {"FIRST": False, "NESTEROV": False, "DECAY_LAST": False}
        yield source("sgd", (None,), 3, 4, TILES["sgd"](4), **sgd, **how)[0]


def bits(source: Specialisation) -> tuple[int, int]:
    """Bits of a read and of a write; a kernel that only sums writes little."""
    return 128, 0 if source.kernel == "squares" else 128
