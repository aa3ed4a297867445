"""The optimizer's operators in CUDA C++ (``optimizer.cu``): few launches for many tensors.

A launch processes all rows of a table; each block has a chunk of one row.
``backends/_optimizer.py`` implements the operators over these kernels, ``backends/_lists.py``
turns lists into tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from transformer_engine_fl.backends._lists import (
    ALIGNMENT,
    Demand,
    Group,
    ListPreparer,
    Tiles,
    whole_chunk,
)
from transformer_engine_fl.backends._optimizer import Cut, ListOperators
from transformer_engine_fl.backends.vendor.cuda import _launch
from transformer_engine_fl.backends.vendor.cuda._arguments import (
    NAMES,
    Plans,
    plain,
    pointer,
    refusal,
)
from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda._numbers import numbers_on_device, numbers_sources

__all__ = [
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_param_remainder",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_compute_scale_inv_e8m0",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]

TILES: Final[dict[str, Callable[[int], Tiles]]] = {
    "scale": whole_chunk(256),
    "l2norm": lambda itemsize: Tiles(256, 4096, 16384),
    "adam": whole_chunk(128),
    "sgd": whole_chunk(256),
    "compute_scale": lambda itemsize: Tiles(128, 1024, 4096),
}
"""How lists are cut into chunks, by the item size of their widest tensor."""
_MOST_VECTORS, _MOST_ELEMENTS = 4, 8
"""Of a tensor, in flight in a thread; elements where vectors have one. More need more registers."""
NORM_THREADS: Final = 512
"""Threads of the block that adds up the partial sums of a norm."""

# -------------------------------------------------------------------------------- plans

Kinds = tuple[torch.dtype | None, ...]
Defines = dict[str, str | int]
_KINDS: Final = NAMES | {torch.int16: "int16", torch.int32: "int32", torch.int64: "int64"}
"""The kernels' names of the dtypes of elements and scalars."""
_FORMS: Final = {"plain": 0, "master": 1, "remainder": 2, "fp8": 3}
_FLOAT8: Final = {None: "e4m3", 3: "e4m3", 2: "e5m2"}
_NUMBERS: Final = {
    "scale": 1,
    "squares": 0,
    "adam": 9,
    "sgd": 5,
    "float_scales": 2,
    "e8m0_scales": 0,
}
"""How many floating-point arguments each kernel has, behind the number of rows."""


def _type(dtype: torch.dtype | None) -> str:
    """The kernels' name of a dtype; for a tensor that is absent any name will do."""
    return _KINDS.get(dtype, "float32") if dtype is not None else "float32"


def _scale_defines(others: Kinds, X: torch.dtype, Y: torch.dtype, ACC: torch.dtype) -> Defines:
    return {"TX": _type(X), "TY": _type(Y), "TA": _type(ACC), "TSCALE": _type(others[1])}


def _squares_defines(others: Kinds, X: torch.dtype, ACC: torch.dtype) -> Defines:
    scale = others[0]
    return {
        "TX": _type(X),
        "TA": _type(ACC),
        "SCALED": int(scale is not None),
        "TSCALE": _type(scale),
    }


def _adam_defines(
    others: Kinds,
    G: torch.dtype,
    P: torch.dtype,
    M: torch.dtype,
    W: torch.dtype | None,
    ACC: torch.dtype,
    FORM: str,
    DECOUPLED: bool,
    SHORT: bool,
    MANTISSA: int | None,
) -> Defines:
    return {
        "TG": _type(G),
        "TP": "int16" if FORM == "fp8" else _type(P),
        "TM": _type(M),
        "TW": _type(W),
        "TA": _type(ACC),
        "FORM": _FORMS[FORM],
        "DECOUPLED": int(DECOUPLED),
        "SHORT": int(SHORT),
        "KIND": _FLOAT8[MANTISSA],
        "CAPTURABLE": int(any(others[1:])),
        "TLR": _type(others[1]),
        "TSTEP": _type(others[2]),
        "TSCALE": _type(others[3]),
    }


def _sgd_defines(
    others: Kinds,
    G: torch.dtype,
    P: torch.dtype,
    B: torch.dtype | None,
    C: torch.dtype | None,
    ACC: torch.dtype,
    FIRST: bool,
    NESTEROV: bool,
    DECAY_LAST: bool,
) -> Defines:
    return {
        "TG": _type(G),
        "TP": _type(P),
        "TB": _type(B),
        "TC": _type(C),
        "TA": _type(ACC),
        "MOMENTUM": int(B is not None),
        "COPIES": int(C is not None),
        "FIRST": int(FIRST),
        "NESTEROV": int(NESTEROV),
        "DECAY_LAST": int(DECAY_LAST),
    }


_DEFINES: Final[dict[str, Callable[..., Defines]]] = {
    "scale": _scale_defines,
    "squares": _squares_defines,
    "adam": _adam_defines,
    "sgd": _sgd_defines,
    "float_scales": lambda others, POWERS: {"POWERS": int(POWERS)},
    "e8m0_scales": lambda others: {},
}


def source(
    name: str, others: Kinds, fields: int, vec: int, tiles: Tiles, **constants: Any
) -> tuple[Specialisation, _launch.Geometry]:
    """A kernel that processes lists.

    Args:
        name: the kernel's name.
        others: dtypes of its pointer arguments after the table; None for one that is null.
        fields: addresses and numbers of a row.
        vec: elements per vector.
        tiles: how the lists are cut.
        constants: the constants that ``ListOperators`` passes for the call.
    """
    most = _MOST_ELEMENTS if vec == 1 else _MOST_VECTORS
    defines = {
        **_DEFINES[name](others, **constants),
        "FIELDS": fields,
        "VEC": vec,
        "DEPTH": max(1, min(tiles.tile // (tiles.threads * vec), most)),
        "LANES": tiles.threads,
        "CHUNK": tiles.chunk,
    }
    arguments = "P" * (1 + len(others)) + "i" + "d" * _NUMBERS[name]
    geometry = _launch.Geometry(tiles.threads, arguments)
    return Specialisation("optimizer", name, tuple(defines.items())), geometry


def norms_source(
    dtype: torch.dtype, device: _launch.Limits
) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel that computes norms from sums of squares."""
    defines: Defines = {"TA": NAMES[dtype], "LANES": NORM_THREADS}
    geometry = _launch.Geometry(NORM_THREADS, "PPPPPi", dependent=device.has_clusters)
    return Specialisation("optimizer", "norms", tuple(defines.items())), geometry


def representative_sources(
    device: _launch.Limits,
) -> Iterator[tuple[Specialisation, _launch.Geometry]]:
    """A selection of the operators' kernels for a device: every kind and type."""
    low, full, double, half = torch.bfloat16, torch.float32, torch.float64, torch.float16
    flag = torch.int32
    yield from numbers_sources()
    for x, y, acc, scale in (
        (low, low, full, None),
        (full, low, full, full),
        (double, full, double, double),
        (half, double, full, None),
    ):
        norms = torch.float64 if x == double else full
        yield norms_source(norms, device)
        widest = max(x.itemsize, y.itemsize)
        for vec in (1, 16 // widest):
            cut = TILES["scale"](widest)
            yield source("scale", (flag, scale), 2, vec, cut, X=x, Y=y, ACC=acc)
            cut = TILES["l2norm"](x.itemsize)
            yield source("squares", (scale, norms), 2, vec, cut, X=x, ACC=norms)
    on_device = (flag, full, torch.int64, double)
    for g, p, m, w, acc, form, mantissa, others in (
        (full, full, full, None, full, "plain", None, (flag, None, None, None)),
        (low, low, full, None, full, "plain", None, on_device),
        (low, half, low, full, full, "master", None, (flag, None, None, None)),
        (double, double, double, double, double, "master", None, on_device),
        (low, torch.int16, low, torch.int16, full, "remainder", None, (None, None, None, None)),
        (low, torch.uint8, full, full, full, "fp8", 3, (flag, None, None, None)),
        (full, torch.uint8, full, full, full, "fp8", 2, (flag, None, None, None)),
    ):
        kinds: dict[str, Any] = {"G": g, "P": p, "M": m, "W": w, "ACC": acc, "FORM": form}
        fields = 4 + (w is not None) + 3 * (form == "fp8")
        for vec in (1, 16 // acc.itemsize):
            numbers = {"DECOUPLED": vec > 1, "SHORT": vec == 1, "MANTISSA": mantissa}
            cut = TILES["adam"](acc.itemsize)
            yield source("adam", others, fields, vec, cut, **kinds, **numbers)
    for g, p, b, c, acc in (
        (full, full, full, None, full),
        (low, full, full, low, full),
        (low, half, None, None, full),
        (half, double, double, half, double),
    ):
        for options in (
            {"FIRST": False, "NESTEROV": False, "DECAY_LAST": False},
            {"FIRST": True, "NESTEROV": True, "DECAY_LAST": True},
        ):
            kinds = {"G": g, "P": p, "B": b, "C": c, "ACC": acc, **options}
            vec = 16 // acc.itemsize if not options["FIRST"] else 1
            cut = TILES["sgd"](acc.itemsize)
            yield source("sgd", (flag,), 3 + (c is not None), vec, cut, **kinds)
    for powers in (False, True):
        yield source("float_scales", (flag,), 3, 1, TILES["compute_scale"](4), POWERS=powers)
    yield source("e8m0_scales", (flag,), 2, 1, TILES["compute_scale"](2))


# ---------------------------------------------------------------------------- operators

_kernels: Plans[_launch.Kernel] = Plans()


def _cut(name: str) -> Cut:
    return lambda device, elements, itemsize: TILES[name](itemsize)


class _Operators(ListOperators):
    """The operators, implemented with these kernels."""

    def _launch_of(
        self,
        name: str,
        demand: Demand,
        group: Group,
        others: tuple[Tensor | None, ...],
        numbers: tuple[float, ...],
        **constants: Any,
    ) -> Callable[[], None]:
        kinds = tuple([None if it is None else it.dtype for it in others])
        device = group.table.get_device()
        constant = (group.tiles, group.aligned, group.dtypes, len(demand.names))
        key = (device, name, kinds, *constant, *constants.values())
        kernel = _kernels.get(key)
        if kernel is None:
            widest = max([it.itemsize for it in group.dtypes])
            vec = ALIGNMENT // widest if group.aligned else 1
            fields = len(demand.names) + demand.chunk_starts
            found = source(name, kinds, fields, vec, group.tiles, **constants)
            kernel = _kernels.get_or_create(key, lambda: _launch.load(*found, device))
        addresses = map(pointer, (group.table, *others))
        return partial(kernel.launch, group.chunks, 1, *addresses, group.rows, *numbers)

    def _finish_norms(
        self,
        sums: Tensor,
        chunk_starts: Tensor | None,
        norm: Tensor,
        norms: Tensor | None,
        flag: Tensor | None,
    ) -> None:
        device = norm.get_device()
        key = (device, "norms", norm.dtype)
        kernel = _kernels.get(key) or _kernels.get_or_create(
            key, lambda: _launch.load(*norms_source(norm.dtype, _launch.limits(device)), device)
        )
        blocks = 1 if norms is None else 1 + norms.numel()
        addresses = map(pointer, (sums, chunk_starts, norm, norms, flag))
        kernel.launch(blocks, 1, *addresses, sums.numel())


_operators = _Operators(
    ListPreparer(plain, numbers_on_device), {name: _cut(name) for name in TILES}, refusal
)
multi_tensor_adam = _operators.multi_tensor_adam
multi_tensor_adam_capturable = _operators.multi_tensor_adam_capturable
multi_tensor_adam_capturable_master = _operators.multi_tensor_adam_capturable_master
multi_tensor_adam_fp8 = _operators.multi_tensor_adam_fp8
multi_tensor_adam_param_remainder = _operators.multi_tensor_adam_param_remainder
multi_tensor_compute_scale_and_scale_inv = _operators.multi_tensor_compute_scale_and_scale_inv
multi_tensor_compute_scale_inv_e8m0 = _operators.multi_tensor_compute_scale_inv_e8m0
multi_tensor_l2norm = _operators.multi_tensor_l2norm
multi_tensor_scale = _operators.multi_tensor_scale
multi_tensor_scale_tensor = _operators.multi_tensor_scale_tensor
multi_tensor_sgd = _operators.multi_tensor_sgd
multi_tensor_unscale_l2norm = _operators.multi_tensor_unscale_l2norm
