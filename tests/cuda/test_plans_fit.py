"""Every plan fits every generation of GPU, at widths that no sample has; no device is needed.

Shared memory is what a launch asks for, according to its plan, and what the kernel declares,
according to :func:`declared`. The plans nearest to the limit are compiled to check the latter.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda_binaries import DEVICES, own_shared_bytes

from transformer_engine_fl.backends.vendor.cuda import (
    _casting,
    _compile,
    activation,
    epilogue,
    loss,
    moe,
    normalization,
    router,
    softmax,
)
from transformer_engine_fl.backends.vendor.cuda._arguments import vector_width
from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation, architecture
from transformer_engine_fl.backends.vendor.cuda._launch import Geometry, Limits
from transformer_engine_fl.backends.vendor.cuda._tiles import COUNTER_BYTES, EXCHANGE_OPTIONS
from transformer_engine_fl.core.errors import NotSupportedError

COMPILED = ("sm_80", "sm_86", "sm_90", "sm_120")
"""One device for each combination of shared memory and support of clusters."""
MOST_THREADS = 1024
LARGE_CLUSTERS = {
    ("normalization", "backward"),
    ("normalization", "forward"),
    ("normalization", "forward_stream"),
    ("softmax", "backward"),
    ("softmax", "forward"),
}
"""Kernels that are planned with 8 blocks where a device has no room for clusters of 16."""
IN_REGISTERS = {("normalization", "backward_registers"), ("normalization", "backward_pairs")}
LOW, FULL, DOUBLE = torch.bfloat16, torch.float32, torch.float64
DTYPES = (LOW, FULL, DOUBLE)
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
WIDTHS = sorted(
    {
        *(size + by for size in (2**p for p in range(22)) for by in (-8, -1, 0, 1, 8)),
        *(24_576 * n for n in range(1, 11)),
        *range(196_609, 262_145, 8192),
        *range(196_616, 262_145, 8192),
        *(2050, 3072, 4100, 5120, 8194, 8196, 12_288, 14_336, 16_388, 50_257, 81_918, 151_936),
    }
    - set(range(-8, 1))
)
Plan = tuple[Specialisation, Geometry]


def normalizations(device: Limits) -> Iterator[Plan]:
    recipes = [it for it in _casting.recipes() if not (it.columnwise or it.square)]
    casts = [None, normalization.STATISTICS, normalization.Cast(None, True)]
    casts += [normalization.Cast(it, it.form.by_tensor) for it in recipes]
    parameters = ((LOW, LOW), (FULL, LOW), (DOUBLE, DOUBLE))
    options = list(itertools.product(parameters, (False, True), (False, True), casts))
    for columns, x in itertools.product(WIDTHS, DTYPES):
        access = vector_width(columns, x.itemsize)
        for (weight, bias), centred, added, cast in options:
            key = normalization.ForwardKey(
                columns, access, x, weight, bias, weight, centred, False, added, cast
            )
            tile = key.tile(device)
            if cast not in (None, normalization.STATISTICS) and (x == DOUBLE or tile is None):
                continue
            if cast is not None and cast.recipe is not None:
                width = cast.recipe.width
                if columns % 16 or (tile and width // tile.vec > 32 and tile.lanes >= 32):
                    continue  # the kernels of casts do this
            for way in EXCHANGE_OPTIONS if cast is None else EXCHANGE_OPTIONS[:1]:
                yield normalization.forward_source(key, device, *way)[:2]
        for dy, gamma, add in (
            (LOW, LOW, None),
            (x, x, x),
            (x, FULL, None),
            (DOUBLE, LOW, None),
            (DOUBLE, DOUBLE, DOUBLE),
        ):
            both = (False, True)[: 2 - bool(add)]
            for centred, way in itertools.product(both, EXCHANGE_OPTIONS):
                back = normalization.BackwardKey(columns, access, x, dy, gamma, centred, False, add)
                yield from normalization.backward_sources(back, device, *way)[0]


def softmaxes(device: Limits) -> Iterator[Plan]:
    for columns, x, dy in itertools.product(WIDTHS, DTYPES, (None, *DTYPES)):
        key = softmax.Key(columns, vector_width(columns, x.itemsize), x, dy)
        for way in EXCHANGE_OPTIONS:
            yield softmax.source(key, device, *way)[:2]
            if dy is None and key.striped:
                for other in ({"causal": True}, {"mask_step": 1}, {"gradients": x}):
                    yield softmax.source(replace(key, **other), device, *way)[:2]


def routers(device: Limits) -> Iterator[Plan]:
    for experts, x in itertools.product(WIDTHS, DTYPES):
        if experts > router.most_experts(x):
            continue
        for groups in {0, 1, experts & -experts, experts}:
            rest = (groups, False, True, False, device)
            # A call with groups that do not fit is declined, and the next set serves it.
            with contextlib.suppress(*([NotSupportedError] if groups else [])):
                yield router.choosing(experts, 1, x, FULL, "sigmoid", *rest)[:2]
        yield router.choosing_backward(experts, 1, x, DOUBLE, "sigmoid", True, True, device)[:2]


def casts(device: Limits) -> Iterator[Plan]:
    made = [_casting.identity_key(dtype) for dtype in (LOW, FULL)]
    made += [epilogue.activation_key("Gelu", False, True, FULL), epilogue.norm_key(FULL, True)]
    flags = list(itertools.product((False, True), repeat=3))
    for source, recipe, (sums, amax, inside) in itertools.product(made, _casting.recipes(), flags):
        if not (sums and source.kind == "norm"):
            options: dict[str, Any] = {"sums": sums, "amax": amax, "inside": inside}
            yield _casting.cast_source(source, recipe, device, dependent=True, **options)


def others(device: Limits) -> Iterator[Plan]:
    """Plans that ask for no shared memory besides what the kernel declares."""
    for columns, x in itertools.product(WIDTHS, DTYPES):
        vec = vector_width(columns, x.itemsize)
        wide = activation.bias_width(columns, x, FULL)
        bias = activation.Key("Gelu", False, True, x, FULL, False, wide, wide)
        yield activation.bias_source(bias, columns)
        yield loss.forward_source(loss.ForwardKey(columns // vec, 1, x))
        yield loss.backward_source(loss.BackwardKey(-(-columns // vec), 1, x, x))
        yield moe.collecting(columns, 1, x, x, 8, True, device)[:2]
        yield moe.weighting(columns, 1, x, x, x, True, device)[:2]
        yield moe.permuting(1, columns, None, 8, device)[:2]


FAMILIES = (normalizations, softmaxes, routers, casts, others)


def declared(source: Specialisation) -> int:
    """An upper bound of the bytes of shared memory that a kernel declares."""
    macros: dict[str, Any] = dict(source.defines)
    kernel = (source.source, source.kernel)

    def exchange(values: int, blocks: int = macros.get("CLUSTER", 1)) -> int:
        """Bytes for a reduction, or an exchange, of ``values`` numbers over a row's threads."""
        warps = max(1, macros["LANES"] // 32) * blocks
        return int(2 * values * warps * max(4, SIZES[macros["TX"]])) if warps > 1 else 0

    if kernel in {("normalization", "forward"), ("normalization", "forward_stream")}:
        values = 1 if not macros["CENTRED"] else 2 if macros["FULL"] else 3
        counters = COUNTER_BYTES if macros.get("EXCHANGE") else 0
        return exchange(values) * (1 + macros["AMAX"]) + counters
    if kernel == ("normalization", "forward_pieces"):
        return exchange(1 + macros["CENTRED"], 1)
    if kernel == ("normalization", "backward"):
        if macros["EXCHANGE"] == normalization.EXCHANGE_THROUGH_MEMORY:
            return exchange(1 + macros["CENTRED"], 1)
        return exchange(1 + macros["CENTRED"]) + (COUNTER_BYTES if macros["EXCHANGE"] else 0)
    if kernel in IN_REGISTERS:
        return exchange(macros.get("BATCH", 1) * (1 + macros["CENTRED"]))
    if kernel == ("softmax", "forward"):
        return exchange(2) + (COUNTER_BYTES if macros["CLUSTER"] > 1 else 0)
    if kernel == ("softmax", "backward"):
        return exchange(1)
    if kernel == ("softmax", "forward_pieces"):
        return exchange(2, 1)
    if kernel == ("softmax", "backward_pieces"):
        return exchange(1, 1)
    if kernel == ("router", "choose"):
        return router.EXCHANGED
    if kernel == ("casting", "cast_tiles"):
        blocks = 128 // macros["WIDTH"] if macros["WIDTH"] and macros["TRANSPOSED"] else 0
        scales = 128 * blocks * {"float32": 4, "e8m0": 1, "e4m3": 1}[macros["SCALES"]]
        columns = 4 * 64 * 8 if macros["WIDTH"] > 32 and macros["TRANSPOSED"] else 0
        return int(32 + scales + columns + macros["SUMS"] * 8 * 8 * 17 * 4)
    return 0  # their launches ask for no shared memory


def plans(device: Limits) -> dict[Specialisation, Geometry]:
    return dict(plan for family in FAMILIES for plan in family(device))


@pytest.mark.parametrize("name", DEVICES)
def test_every_plan_is_within_the_limits_of_its_device(name: str) -> None:
    device = DEVICES[name]
    kernels = set()
    for source, geometry in plans(device).items():
        kernel = (source.source, source.kernel)
        if geometry.shared_bytes:
            kernels.add(kernel)
            shared = geometry.shared_bytes + declared(source)
            assert shared <= device.shared_per_block, (source, shared)
        assert 1 <= geometry.threads <= MOST_THREADS, source
        most = 1 if not device.has_clusters else 16 if kernel in LARGE_CLUSTERS else 8
        assert 1 <= geometry.cluster <= most, source
        assert device.has_clusters or not geometry.dependent, source
        assert geometry.cluster == 1 or geometry.together == 1, source
        assert geometry.carveout is None or 0 <= geometry.carveout <= 100, source
    dynamic = {
        ("normalization", "forward"),
        ("normalization", "backward"),
        ("softmax", "forward"),
        ("softmax", "backward"),
        ("router", "choose"),
        ("casting", "cast_tiles"),
    }
    persistent = {("normalization", "forward_stream"), *IN_REGISTERS}
    if device.has_clusters and device.shared_per_block > 128 * 1024:
        persistent.add(("normalization", "forward_pieces"))
        persistent |= {("softmax", "forward_pieces"), ("softmax", "backward_pieces")}
    assert kernels == (dynamic | persistent if device.has_clusters else dynamic)


@pytest.mark.usefixtures("compiler", "cache")
@pytest.mark.parametrize("name", COMPILED)
def test_the_plans_nearest_to_the_limit_fit_as_they_are_compiled(name: str) -> None:
    device = DEVICES[name]
    nearest: dict[tuple[str, str], tuple[int, Specialisation, Geometry]] = {}
    for source, geometry in plans(device).items():
        shared = geometry.shared_bytes + declared(source)
        kernel = (source.source, source.kernel)
        if geometry.shared_bytes and shared > nearest.get(kernel, (0,))[0]:
            nearest[kernel] = shared, source, geometry
    for shared, source, geometry in nearest.values():
        own = own_shared_bytes(_compile.cubin(source, architecture(device.major, device.minor)))
        assert 0 <= own <= declared(source), (source, own)
        assert geometry.shared_bytes + own <= device.shared_per_block, (source, shared)
