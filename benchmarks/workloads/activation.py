"""Activations between the two products of a feed-forward block, plain and gated.

A shape is rows x columns of the second product's input; a gated input is twice as wide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workloads.workload import Random, Sample, Shape, Workload, call

if TYPE_CHECKING:
    import torch

PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
GATED = ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu")

_WIDTHS: tuple[Shape, ...] = ((8192, 14336), (8192, 11008), (4096, 28672))
_STANDARD = {
    "gelu": _WIDTHS,
    "swiglu": _WIDTHS,
    "dswiglu": _WIDTHS,
    **dict.fromkeys(("geglu", "srelu", "dgelu", "dgeglu", "dbias_dgelu"), _WIDTHS[:1]),
}


def plain_forward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(Random(dtype, device).normal(*shape))


def gated_forward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    return call(Random(dtype, device).normal(shape[0], 2 * shape[1]))


def plain_backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    random = Random(dtype, device)
    return call(random.normal(*shape), random.normal(*shape))


def gated_backward(shape: Shape, dtype: torch.dtype, device: str) -> Sample:
    random = Random(dtype, device)
    return call(random.normal(*shape), random.normal(shape[0], 2 * shape[1]))


MAKERS = {
    **dict.fromkeys((*PLAIN,), plain_forward),
    **dict.fromkeys((*GATED, "clamped_swiglu"), gated_forward),
    **dict.fromkeys((f"d{name}" for name in PLAIN), plain_backward),
    **dict.fromkeys((*(f"d{name}" for name in GATED), "clamped_dswiglu"), gated_backward),
    **dict.fromkeys((f"dbias_d{name}" for name in PLAIN), plain_backward),
}

WORKLOADS = tuple(
    Workload(
        name=name,
        make=make,
        shapes=_STANDARD.get(name, _WIDTHS[:1]),
        tiny=(6, 40),
        axes="rows x columns of the forward's output",
        standard=name in _STANDARD,
    )
    for name, make in MAKERS.items()
)
