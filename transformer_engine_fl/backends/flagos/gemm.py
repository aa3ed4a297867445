"""Matrix products in Triton, single and grouped, with fused epilogues.

Operands are multiplied in the layout they have. Copied are only operands with neither dense rows
nor dense columns, float8 operands whose terms are not along their rows (the instructions require
that), and, for large products, operands that tensor descriptors cannot describe.

The order of summation depends on the number of terms and on dtypes alone, not on the number of
rows: every tile is large enough for the same instructions, and where the sum of a step is added in
float32, every tile takes the same number of terms per step.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_engine_fl.backends import _repeats
from transformer_engine_fl.backends._groups import GroupedCall, KnownGroups
from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import (
    DESCRIBED_ALIGNMENT,
    DESCRIPTORS_FROM,
    HOPPER,
    NOT_A_TENSOR,
    OTHER_BYTES,
    PLAIN,
    add_to_cache,
    address_of,
    by_rows,
    check_across,
    check_fresh,
    check_size,
    float32_precision,
    plain,
)
from transformer_engine_fl.backends.flagos._numbers import numbers_on_device
from transformer_engine_fl.backends.flagos._products import (
    grouped_product,
    product,
    sum_of_rows,
)
from transformer_engine_fl.backends.flagos._sums import SumOfPrograms
from transformer_engine_fl.backends.flagos._tiles import bounded
from transformer_engine_fl.backends.flagos.tuning import Choice
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.ops import gemm as contracts
from transformer_engine_fl.ops._checks import is_frozen
from transformer_engine_fl.ops._rounding import LARGEST_FLOAT32

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["generic_gemm", "te_general_grouped_gemm"]

# -------------------------------------------------------------------------------- tiles


_WARP_GROUP_ROWS = 64


class _Tile(NamedTuple):
    """A way to cut D into tiles.

    Attributes:
        rows, columns: size of a tile.
        threads: threads of a program.
        stages: pipeline stages: the most tiles of the operands in shared memory at a time.
        described: use tensor descriptors where possible.
        flatten: merge the loops over tiles and terms, so that a tile's first operands are
            loaded while the previous tile is finished. With descriptors only.
        specialize: use the warp-specialised kernels of ``_products_hopper``. ``threads`` are
            those of one multiplying warp group, which has 64 of the rows.
        resident: persistent programs per multiprocessor; each makes several tiles. 0: a
            program makes one tile.
        parts: least number of parts of a tile's columns that run the epilogue in turn.
        band: rows of tiles that are made together, so that columns are read from the cache.
        speed: throughput relative to the other listed tiles, if there are enough tiles.
        alone: if not 0, only where each multiprocessor makes at most this many tiles, all at once,
            and only if their stages fit into its shared memory. With descriptors, only for more
            than ``rows`` rows: a TMA load that is mostly beyond a tensor's end takes longer.
        steps: steps of ``_TERMS`` that are loaded at a time.
    """

    rows: int
    columns: int
    threads: int
    stages: int
    described: bool = True
    flatten: bool = False
    specialize: bool = False
    resident: int = 0
    parts: int = 1
    band: int = 8
    speed: float = 1.0
    alone: int = 0
    steps: int = 1

    @property
    def warp_groups(self) -> int:
        """The warp groups that multiply; 0 without ``specialize``."""
        return self.rows // _WARP_GROUP_ROWS if self.specialize else 0

    def as_written(self) -> str:
        """As in a tuning file, without what is the default."""
        fields = [it for it in self._asdict().items() if it not in self._field_defaults.items()]
        return f"{{{', '.join([f'{name}: {str(value).lower()}' for name, value in fields])}}}"


_TERMS = {
    "half": 64,
    "float32": 32,
    "float8": 128,
    "float8 steps": 128,
    "blocks": 64,
    "float32 blocks": 32,
}
"""Terms per step. A single number each, so that no row's result depends on other rows."""
_ANY_STEPS = ("half",)
"""Kinds whose sums do not depend on the number of terms per step."""

_FEWEST_ROWS = 64  # with fewer, other instructions would sum in another order
_ALONE = _Tile(64, 128, 128, 8, speed=0.62, alone=1)
_IN_PAIRS = _Tile(64, 64, 128, 6, described=False, speed=0.61, alone=2)
_SMALL = (
    _Tile(64, 128, 128, 4, described=False, speed=0.6),
    _Tile(64, 64, 128, 5, described=False, speed=0.45),
    _Tile(64, 32, 128, 6, described=False, speed=0.3),
)
_TILES: dict[str, tuple[_Tile, ...]] = {
    "half": (
        _Tile(128, 256, 128, 4, specialize=True, resident=1, band=16, speed=1.02),
        _Tile(192, 128, 128, 5, specialize=True, resident=1, band=16, speed=0.9),
        _Tile(128, 128, 128, 6, specialize=True, resident=1, band=16, speed=0.86),
        _Tile(128, 256, 256, 4, flatten=True, resident=1, parts=2, band=16),
        _Tile(128, 128, 256, 4, flatten=True, resident=1, speed=0.85),
        _ALONE,
        _IN_PAIRS,
        _Tile(64, 64, 128, 6, described=False, speed=0.45, alone=1, steps=2),
        _Tile(64, 32, 128, 8, described=False, speed=0.3, alone=1, steps=2),
        *_SMALL,
    ),
    "float8": (
        _Tile(128, 256, 128, 4, specialize=True, resident=1, parts=2),
        _Tile(192, 128, 128, 5, specialize=True, resident=1, band=16, speed=1.03),
        _Tile(128, 128, 128, 6, specialize=True, resident=1, speed=0.9),
        _Tile(128, 64, 128, 8, specialize=True, resident=1, speed=0.65),
        _Tile(128, 128, 256, 4, flatten=True, resident=1, speed=0.75),
        _ALONE,
        _IN_PAIRS,
        _Tile(64, 64, 128, 8, described=False, speed=0.45, alone=1),
        _Tile(64, 32, 128, 12, described=False, speed=0.3, alone=1),
        *_SMALL,
    ),
    "float8 steps": (
        _Tile(128, 128, 128, 6, specialize=True, resident=1, speed=1.15),
        _Tile(192, 128, 128, 5, specialize=True, resident=1, speed=1.22),
        _Tile(128, 64, 128, 8, specialize=True, resident=1, speed=0.65),
        _Tile(256, 128, 512, 3, flatten=True, resident=1, parts=4),
        _Tile(128, 128, 256, 4, flatten=True, resident=1, speed=0.85),
        _ALONE,
        *_SMALL,
    ),
    "float32": (_Tile(128, 128, 256, 3), _Tile(64, 64, 128, 3, speed=0.6)),
    "blocks": (_Tile(128, 128, 256, 3), _Tile(64, 64, 128, 3, speed=0.6)),
    "float32 blocks": (_Tile(64, 64, 128, 2),),
}
_GROUPS_BAND = 4  # groups have few rows
_INTERPRETED_TILES = (
    _Tile(32, 64, 32, 1, flatten=True, resident=1, parts=2),
    _Tile(32, 64, 32, 1, described=False),
)
_INTERPRETED_FEW = 12  # rows up to which the second tile is used


class Registers(NamedTuple):
    """Registers of a thread of a specialised kernel: at launch, and then by what its warp does."""

    launch: int
    multiplying: int
    loading: int


REGISTERS = {2: Registers(168, 232, 40), 3: Registers(128, 152, 40)}
"""By the number of multiplying warp groups."""
_FINISHED_BYTES = 32768  # of shared memory for the part of a tile in the epilogue
_LARGEST_UNALIGNED = 128 * 128  # elements of a tile: addresses take registers
_FLOAT8_FROM = 89
_WIDEST_DESCRIBED = 4  # bytes of an element
_WORTH_A_COPY = 2**30  # multiplications from which on a copy of operands to describe pays

_SUM_ROWS, _SUM_BLOCK, _SUM_THREADS, _SUM_PROGRAMS = 16, 256, 128, 8


_BY_ESTIMATE = _Tile(0, 0, 0, 0)
"""Stands for the listed tile whose rounds take the least time by estimate, given its speed."""


def _tile_choice(kind: str) -> Choice[_Tile]:
    """The choice of a tile by the size of D."""
    # The speed has no effect on a tile that is chosen.
    specialized = [it._replace(speed=1.0) for it in _TILES[kind] if it.specialize]
    sizes = bounded(
        rows=(_FEWEST_ROWS, 256),
        columns=(16, 256),
        threads=(64, 512),
        stages=range(2, 13),
        resident=range(3),
        parts=(1, 8),
        band=(1, 64),
        alone=range(3),
        steps=range(1, 3 if kind in _ANY_STEPS else 2),
    )

    def wrong(tile: _Tile) -> str | None:
        if tile == _BY_ESTIMATE or tile._replace(speed=1.0) in specialized:
            return None
        if tile.specialize:
            valid = ", ".join(map(_Tile.as_written, specialized)) or "none"
            return f"with specialize, valid tiles: {valid}"
        return sizes(tile)

    return Choice(
        f"gemm_{kind.replace(' ', '_')}",
        _Tile,
        key=("rows", "columns"),
        rounded=("rows", "columns"),
        candidates=lambda rows, columns: _TILES[kind],
        heuristic=lambda device, rows, columns: _BY_ESTIMATE,
        wrong=wrong,
        plans=(_PLANS,),
    )


def _fitted(
    tile: _Tile, kind: str, itemsize: int, epilogue_bytes: int, shared: int
) -> _Tile | None:
    """The tile with fewer stages or more parts, to fit in shared memory; None if it cannot fit.

    An ``alone`` tile keeps its stages.

    Args:
        itemsize: bytes of an element of the operands.
        epilogue_bytes: bytes written and read in the epilogue for each element of D.
        shared: bytes of shared memory.
    """
    # Specialised kernels change the layout of D through shared memory, half a tile at a time.
    finished = tile.rows * tile.columns * (1 if tile.specialize else epilogue_bytes)
    parts = tile.parts
    while not tile.specialize and finished // parts > _FINISHED_BYTES and tile.columns > 32 * parts:
        parts *= 2
    left = shared - OTHER_BYTES - finished // parts
    each = (tile.rows + tile.columns) * _TERMS[kind] * tile.steps * itemsize
    if tile.alone and tile.stages * each > min(left, shared // tile.alone):
        return None
    stages = min(tile.stages, left // each)
    return tile._replace(stages=stages, parts=parts) if stages > 1 else None


def _chosen(
    kind: str,
    ms: Sequence[int],
    n: int,
    itemsize: int,
    epilogue_bytes: int,
    large: bool,
    warp_groups: int,
    device: torch.device,
) -> _Tile:
    """The tile that was measured to be best, or else the best one by estimate.

    Args:
        epilogue_bytes: bytes written and read in the epilogue for each element of D.
        large: whether large tiles are allowed.
        warp_groups: most multiplying warp groups of a ``specialize`` tile; 0: none is allowed.
    """
    configured = _CHOICES[kind](device, sum(ms), n)
    if _launch.INTERPRETED:
        return _INTERPRETED_TILES[sum(ms) <= _INTERPRETED_FEW]
    offered = _launch.limits(device)
    for among in ((configured,) if configured != _BY_ESTIMATE else (), _TILES[kind]):
        best: tuple[float, _Tile] | None = None
        for it in among:
            tile = _fitted(it, kind, itemsize, epilogue_bytes, offered.shared_bytes)
            if tile is None or (not large and tile.rows * tile.columns > _LARGEST_UNALIGNED):
                continue
            if tile.warp_groups > warp_groups:
                continue
            tiles = sum([-(-m // tile.rows) for m in ms]) * -(-n // tile.columns)
            rounds = -(-tiles // offered.multiprocessors)
            if tile.alone:
                if rounds > tile.alone or (tile.described and max(ms) <= tile.rows):
                    continue
                rounds = tile.alone  # tiles that are made at once take as long as in turn
            cost = rounds * tile.rows * tile.columns / tile.speed
            if best is None or cost < best[0]:
                best = cost, tile
        if best is not None:
            return best[1]
    raise NotSupportedError(
        f"no GEMM tile fits in the {offered.shared_bytes} bytes of shared memory"
    )


# ----------------------------------------------------------------------------- operands


class _Operand(NamedTuple):
    """A matrix as it is multiplied.

    Attributes:
        data: as it is stored, with dense columns.
        stride: the distance between rows.
        k_major: whether its columns are terms.
        scale: None without scales; for float8_e8m0fnu the bytes.
        scales: "none", "whole", "steps" (blocks of 128 columns) or "blocks" (of 32).
        height, width: rows and columns of the blocks that have one scale each.
        scale_row, scale_column: the strides of the scales.
    """

    data: Tensor
    stride: int
    k_major: bool
    scale: Tensor | None = None
    scales: str = "none"
    height: int = 1
    width: int = 1
    scale_row: int = 0
    scale_column: int = 0


class _Piece(NamedTuple):
    """Some rows of an operand.

    Attributes:
        operand: the operand.
        start: the first row.
        rows: the number of rows.
    """

    operand: _Operand
    start: int
    rows: int


class _Way(NamedTuple):
    """How two operands are multiplied; see the kernels.

    Attributes:
        kind: the key of its tiles in ``_TILES``.
        a_scales, b_scales: when scales are applied.
        stepwise, dot, precision: the constants of the kernels.
    """

    kind: str
    a_scales: str
    b_scales: str
    stepwise: bool
    dot: Any
    precision: str = "ieee"


def _can_flip(tensor: Tensor, scale: Tensor | None) -> bool:
    """Whether a tensor is better treated as the transpose of a dense matrix."""
    return bool(
        tensor.dim() == 2
        and tensor.stride(0) == 1
        and tensor.stride(1) >= tensor.shape[0]
        and tensor.stride(1) > 1
        and (scale is None or scale.dim() == 1)
    )


def _operand(
    op: str,
    name: str,
    tensor: Tensor,
    scale: Tensor | None,
    k_major: bool,
    flip: bool,
    transpose: bool,
) -> _Operand:
    """An operand as it is multiplied.

    Args:
        flip: treat it as its transpose.
        transpose: copy float8 whose terms are not along the rows into the layout that the
            instructions require.
    """
    data, stride = by_rows(tensor.t() if flip else tensor)
    k_major ^= flip
    if scale is None:
        return _Operand(data, stride, k_major)
    scale = plain(op, f"{name}_scale_inv", scale)
    rows, columns = math.prod(data.shape[:-1]), data.shape[-1]
    if scale.dim() == 1:
        scales, height, width = "whole", 1, 1
    elif scale.itemsize == 1:
        scale, scales, height, width = scale.view(torch.uint8), "blocks", 1, contracts.MX_BLOCK
    else:
        scales, width = "steps", contracts.BLOCK
        height = 1 if scale.shape[0] == rows else contracts.BLOCK
    # Square blocks only: others would lie across the rows of the transposed copy.
    if transpose and not k_major and height == width:
        as_bytes = data.view(torch.uint8).as_strided((rows, columns), (stride, 1))
        data = as_bytes.t().contiguous().view(data.dtype)
        stride, k_major = rows, True
        scale = scale.t() if scale.dim() == 2 else scale
    steps = scale.stride() if scale.dim() == 2 else (0, 0)
    return _Operand(data, stride, k_major, scale, scales, height, width, *steps)


def _operands(
    op: str,
    name: str,
    tensors: Sequence[Tensor],
    scales: Sequence[Tensor] | None,
    k_major: bool,
    whole: bool,
) -> list[_Operand]:
    """Operands with equal layouts; they are flipped only if each is multiplied as a ``whole``."""
    given = [plain(op, name, it) for it in tensors]
    some = [None] * len(given) if scales is None else scales
    flip = whole and all(map(_can_flip, given, some))
    return [
        _operand(op, name, it, scale, k_major, flip, whole)
        for it, scale in zip(given, some, strict=True)
    ]


def _way(op: str, a: _Operand, b: _Operand) -> _Way:
    """How products of such operands are computed."""
    capability = _launch.limits(b.data.device).capability
    precision = float32_precision(b.data.device)
    scales = (a.scales, b.scales)
    if b.scale is None:
        if b.data.dtype == torch.float32:
            way = _Way("float32", "none", "none", True, None, precision)
        else:
            way = _Way("half", "none", "none", False, None)
    elif 0 < capability < _FLOAT8_FROM:
        raise NotSupportedError(
            f"{op}: float8 needs compute capability {_FLOAT8_FROM / 10}, "
            f"{b.data.device} has {capability / 10}"
        )
    elif a.k_major and b.k_major and "blocks" not in scales:
        kind = "float8 steps" if "steps" in scales else "float8"
        way = _Way(kind, *scales, True, None)
    else:
        a_scales, b_scales = ("whole" if it == "whole" else "blocks" for it in scales)
        if "steps" in scales:
            way = _Way("float32 blocks", a_scales, b_scales, True, tl.float32, precision)
        else:  # float8 times a power of two is exact in bfloat16
            way = _Way("blocks", a_scales, b_scales, False, tl.bfloat16)
    if _launch.INTERPRETED:
        # The interpreter has no bfloat16, and sums in an order that depends on the row, which makes
        # no difference in float64.
        return way._replace(stepwise=True, dot=tl.float64)
    return way


# -------------------------------------------------------------------------------- plans


class _Epilogue(NamedTuple):
    """The parts of the epilogue that a kernel's code depends on.

    Attributes:
        gelu: whether it applies GELU, or multiplies by its slope.
        accumulate: whether D's previous contents are added.
        d, pre, gelu_input, bias: the dtypes of what is written and read; None if absent.
    """

    gelu: bool
    accumulate: bool
    d: torch.dtype
    pre: torch.dtype | None
    gelu_input: torch.dtype | None
    bias: torch.dtype | None


def _is_for_hopper(
    way: _Way, a: _Operand, after: _Epilogue, at_origin: bool, device: torch.device
) -> bool:
    """Whether ``_products_hopper`` supports products of this kind, and the GPU is a Hopper.

    Args:
        at_origin: whether a's first row is the first row of a scale block.
    """
    return (
        _launch.has_gluon()
        and _launch.limits(device).capability == HOPPER
        and way.kind in ("half", "float8", "float8 steps")
        and (way.a_scales != "steps" or (at_origin and a.height == contracts.BLOCK))
        and after.gelu_input is None
    )


class _Kernel(NamedTuple):
    """A kernel, the tile that it makes and the units in which it takes sizes and strides."""

    launch: _launch.Launch
    tile: _Tile
    unit: int
    unit_m: int
    unit_n: int
    unit_k: int


_KERNELS: dict[object, _Kernel] = {}


def _kernel(
    way: _Way,
    a: _Operand,
    b: _Operand,
    after: _Epilogue,
    ms: Sequence[int],
    n: int,
    ks: Sequence[int],
    *,
    strides: Sequence[int],
    d_strides: Sequence[int],
    described: bool,
    d_described: bool,
    groups: int,
    at_origin: tuple[bool, bool],
) -> _Kernel:
    """The kernel for products of such sizes.

    Args:
        strides: the strides of every operand, and the offsets of groups in them.
        d_strides: the strides of D, and the offsets of groups in it.
        described: whether the operands are aligned for tensor descriptors.
        d_described: whether D is.
        groups: 0 for a plain product, else an upper bound of the number of groups.
        at_origin: whether a's and b's first rows are the first rows of scale blocks.
    """
    device = b.data.device
    itemsize = b.data.itemsize
    dtypes = (after.d, after.d if after.accumulate else None, after.pre, after.gelu_input)
    epilogue_bytes = sum(it.itemsize for it in dtypes if it is not None)
    able = _launch.limits(device).capability >= DESCRIPTORS_FROM
    vector = 16 // itemsize

    def unit(*sizes: int, of: int = vector) -> int:
        return 1 if functools.reduce(operator.or_, sizes, 0) % of else of

    unit_n = unit(n, *d_strides, of=8)
    large = described and able and unit_n > 1
    d_described = d_described and able and not groups
    adds_only = after.accumulate and not after.gelu and after.bias is None
    staged = d_described and adds_only and after.d == torch.float32 and way.kind == "half"
    warp_groups = 0
    if large and _is_for_hopper(way, a, after, at_origin[0], device):
        warp_groups = 2 if staged else 3
    tile = _chosen(way.kind, ms, n, itemsize, epilogue_bytes, large, warp_groups, device)
    band = min(tile.band, _GROUPS_BAND) if groups and tile.specialize else tile.band
    described = described and able and tile.described
    d_described = d_described and tile.described
    units = (
        unit(*strides),
        1 if described or b.k_major else unit(*ms),
        unit_n,
        1 if described or not (a.k_major or b.k_major) else unit(*ks),
    )
    uniform = tuple(
        origin and operand.height % size == 0
        for origin, operand, size in zip(at_origin, (a, b), (tile.columns, tile.rows), strict=True)
    )
    layouts = tuple(
        (it.data.dtype, it.k_major, it.height, it.width, it.scale is None) for it in (a, b)
    )
    key = (way, layouts, uniform, after, tile, units, described, d_described, groups, device)
    found = _KERNELS.get(key)
    if found is not None:
        return found
    offered = _launch.limits(device)
    options: dict[str, Any] = {"num_stages": tile.stages}
    if not offered.capability and not _launch.INTERPRETED:
        # The same matrix instruction for all tiles, so that all sum in one order.
        options = {"num_stages": 2, "matrix_instr_nonkdim": 16}
    variant_constants: dict[str, Any] = {"GROUPS": groups}
    if not groups:
        flatten = described and tile.flatten
        variant_constants = {"D_DESCRIBED": d_described, "FLATTEN": flatten}
    kernel = grouped_product if groups else product
    if tile.specialize:
        from transformer_engine_fl.backends.flagos import _products_hopper as hopper

        kernel = hopper.grouped_product if groups else hopper.product
        registers = REGISTERS[tile.warp_groups]
        options = {"maxnreg": registers.launch}
        variant_constants |= {
            "STAGES": tile.stages,
            "MULTIPLYING": registers.multiplying,
            "LOADING": registers.loading,
            "STAGED": staged,
        }
    launch = _launch.Launch(
        kernel,
        device,
        threads=tile.threads,
        options=options,
        A_K_MAJOR=a.k_major,
        A_SCALES=way.a_scales,
        A_HEIGHT=a.height,
        A_WIDTH=a.width,
        A_UNIFORM=uniform[0],
        B_K_MAJOR=b.k_major,
        B_SCALES=way.b_scales,
        B_HEIGHT=b.height,
        B_WIDTH=b.width,
        B_UNIFORM=uniform[1],
        STEPWISE=way.stepwise,
        DOT=way.dot,
        PRECISION=way.precision,
        GELU=after.gelu,
        ACCUMULATE=after.accumulate,
        PTX=_launch.has_ptx(),
        UNIT=units[0],
        UNIT_M=units[1],
        UNIT_N=units[2],
        UNIT_K=units[3],
        DESCRIBED=described,
        SUPER=band,
        PARTS=tile.parts,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        TERMS=_TERMS[way.kind] * tile.steps,
        **variant_constants,
    )
    return add_to_cache(_KERNELS, key, _Kernel(launch, tile, *units))


def _programs(tile: _Tile, tiles: int, device: torch.device) -> int:
    most = tile.resident * _launch.limits(device).multiprocessors
    return min(tiles, most) if most else tiles


def _describable(address: int, itemsize: int, stride: int, columns: int) -> bool:
    """Whether a tensor descriptor can describe rows of so many columns at this address."""
    return (
        not (address | stride * itemsize) % DESCRIBED_ALIGNMENT
        and stride >= columns
        and itemsize <= _WIDEST_DESCRIBED
    )


def _described(op: str, it: _Operand, outer: int, k: int, worth: bool) -> tuple[_Operand, bool]:
    """The operand, copied if that is ``worth`` it, and whether a descriptor can describe it."""
    rows, columns = (outer, k) if it.k_major else (k, outer)
    size = it.data.itemsize
    if _describable(address_of(op, it.data), size, it.stride, columns):
        return it, True
    if not worth:
        return it, False
    unit = DESCRIBED_ALIGNMENT // size
    stride = -(-columns // unit) * unit
    data = it.data.new_empty((rows, stride))[:, :columns]
    data.copy_(it.data.as_strided((rows, columns), (it.stride, 1)))
    return it._replace(data=data, stride=stride), True


# -------------------------------------------------------------------------- bias gradient


class _SumPlan(NamedTuple):
    """How to sum the rows of matrices.

    Attributes:
        launch: the kernel, for one matrix.
        total: the sum over its programs, for all matrices.
        unit: see the kernel.
        blocks: the number of blocks of columns.
        most: most programs for each block of columns.
    """

    launch: _launch.Launch
    total: SumOfPrograms
    unit: int
    blocks: int
    most: int


_SUM_PLANS: dict[object, _SumPlan] = {}


def _sums_of_rows(op: str, matrices: Sequence[_Piece], dtype: torch.dtype) -> Tensor:
    """The sum over the rows of each matrix, ``[matrices, columns]``."""
    first = matrices[0].operand
    columns, device = first.data.shape[-1], first.data.device
    out = torch.empty((len(matrices), columns), dtype=dtype, device=device)
    rows = max(it.rows for it in matrices)
    if not (rows and columns):
        return out.zero_()
    unit = math.gcd(columns, 16 // first.data.itemsize, *(it.operand.stride for it in matrices))
    scales = "blocks" if first.scales == "steps" else first.scales
    key = (
        columns, unit, scales, first.height, first.width, first.data.dtype,
        None if first.scale is None else first.scale.dtype, dtype, device,
    )  # fmt: skip
    plan = _SUM_PLANS.get(key)
    if plan is None:
        launch = _launch.Launch(
            sum_of_rows,
            device,
            threads=_SUM_THREADS,
            SCALES=scales,
            HEIGHT=first.height,
            WIDTH=first.width,
            UNIT=unit,
            ROWS=_SUM_ROWS,
            BLOCK=_SUM_BLOCK,
        )
        blocks = -(-columns // _SUM_BLOCK)
        check_across(op, blocks)
        most = max(1, _SUM_PROGRAMS * _launch.limits(device).multiprocessors // blocks)
        total = SumOfPrograms(columns, unit, device)
        plan = add_to_cache(_SUM_PLANS, key, _SumPlan(launch, total, unit, blocks, most))
    programs = min(-(-rows // _SUM_ROWS), plan.most)
    size = (len(matrices), programs, columns)
    partial = torch.empty(size, dtype=torch.float32, device=device)
    for it, sums in zip(matrices, partial, strict=True):
        data, stride, scale = it.operand.data, it.operand.stride, it.operand.scale
        if not it.rows:
            sums.zero_()
            continue
        rows_of_it = data.as_strided(
            (it.rows, columns), (stride, 1), data.storage_offset() + it.start * stride
        )
        plan.launch(
            (programs, plan.blocks),
            (rows_of_it, scale, sums),
            (
                *(it.rows, columns // unit, stride // unit, it.start),
                *(it.operand.scale_row, it.operand.scale_column),
            ),
        )
    plan.total(partial, out, None, programs)
    return out


# ------------------------------------------------------------------------------ product


class _Plan(NamedTuple):
    """The plan of a plain product.

    Attributes:
        launch: the kernel; None if D is empty.
        programs: the number of programs.
        numbers: the kernel's numbers, without alpha and beta.
        shape, dtype: those of D.
    """

    launch: _launch.Launch | None
    programs: int
    numbers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


_PLANS: dict[object, _Plan] = {}
_CHOICES = {kind: _tile_choice(kind) for kind in _TILES}
_Tensors = tuple[Tensor | None, ...]


def _key(
    tensors: _Tensors, flags: tuple[bool, ...], alpha: float, beta: float, dtype: object
) -> object:
    """The key of a call's plan; None if an argument is unusual."""
    # The types are tested because True equals 1 but must be refused.
    for number in (alpha, beta):
        if type(number) is not float and not (type(number) is int and abs(number) < 2**63):
            return None
        if not abs(number) <= LARGEST_FLOAT32:
            return None
    if not all(it is True or it is False for it in flags):
        return None
    if dtype is not None and type(dtype) is not torch.dtype:
        return None
    kinds: list[object] = [flags, beta != 0, dtype]
    try:
        for it in tensors:
            if it is None:
                kinds.append(None)
            elif type(it) in PLAIN and not it.is_neg():
                place = it.data_ptr() % DESCRIBED_ALIGNMENT
                kinds += (it.dtype, it.shape, it.stride(), it.device, place)
            else:
                return None
    except NOT_A_TENSOR:
        return None
    return tuple(kinds)


def _as_numbers(op: str, alpha: Any, beta: Any) -> tuple[float, float]:
    if not (isinstance(alpha, int | float) and isinstance(beta, int | float)):
        raise NotSupportedError(f"{op}: alpha and beta are symbolic, not concrete numbers")
    for number in (alpha, beta):
        if LARGEST_FLOAT32 < abs(number) < math.inf:
            raise NotSupportedError(f"{op}: alpha and beta must fit in float32, got {number}")
    return float(alpha), float(beta)


def _decline_float64(op: str, B: Tensor) -> None:
    if B.dtype == torch.float64:
        raise NotSupportedError(f"{op}: there are no float64 kernels")


def _listed(value: Tensor | None) -> list[Tensor] | None:
    return None if value is None else [value]


def _planned(
    tensors: _Tensors,
    transa: bool,
    transb: bool,
    gelu: bool,
    grad: bool,
    beta: float,
    out_dtype: torch.dtype | None,
) -> tuple[_Plan, _Tensors]:
    """The plan for a checked call, and its tensors as the kernel takes them."""
    op = contracts.generic_gemm.name
    A, B, A_scale_inv, B_scale_inv, into, gelu_input, bias = tensors
    assert A is not None
    assert B is not None
    shape = contracts._gemm_shape(op, A, B, transa, transb)
    m, n = contracts._product(
        op, contracts._rows_and_columns(A), contracts._rows_and_columns(B), transa, transb
    )
    k = A.shape[-1] if transa else math.prod(A.shape[:-1])
    for what, size in (("rows of D", m), ("columns of D", n), ("terms", k)):
        check_size(op, what, size)
    (a,) = _operands(op, "A", [A], _listed(A_scale_inv), transa, True)
    (b,) = _operands(op, "B", [B], _listed(B_scale_inv), not transb, True)
    if bias is not None:
        bias = plain(op, "bias", bias).contiguous()
    if gelu_input is not None:
        gelu_input = plain(op, "gelu_input", gelu_input).contiguous()
    dtype = contracts._default_dtype(B, out_dtype)
    d_stride = n
    if into is not None:
        into, d_stride = by_rows(plain(op, "accumulate_into", into))
    after = _Epilogue(
        gelu,
        into is not None and beta != 0,
        dtype if into is None else into.dtype,
        dtype if gelu and not grad else None,
        None if gelu_input is None else gelu_input.dtype,
        None if bias is None else bias.dtype,
    )
    if not (m and n):
        return _Plan(None, 0, (), shape, dtype), (None, None, None, None, into, None, None)
    if not k:  # the kernel reads nothing, but Triton needs an address
        a, b = (it._replace(data=it.data.new_empty((1,))) for it in (a, b))
    described = bool(k) and _launch.limits(B.device).capability >= DESCRIPTORS_FROM
    if described:
        worth = m * n * k >= _WORTH_A_COPY
        a, a_is = _described(op, a, n, k, worth)
        b, b_is = _described(op, b, m, k, worth)
        described = a_is and b_is
    kernel = _kernel(
        _way(op, a, b),
        a,
        b,
        after,
        (m,),
        n,
        (k,),
        strides=(a.stride, b.stride),
        d_strides=(d_stride,),
        described=described,
        d_described=_describable(
            0 if into is None else address_of(op, into), after.d.itemsize, d_stride, n
        )
        and (after.pre is None or _describable(0, after.pre.itemsize, n, n)),
        groups=0,
        at_origin=(True, True),
    )
    across = -(-n // kernel.tile.columns)
    tiles = -(-m // kernel.tile.rows) * across
    check_size(op, "tiles", max(tiles, kernel.tile.band * across))  # of a band, there or not
    numbers = (
        m // kernel.unit_m,
        n // kernel.unit_n,
        k // kernel.unit_k,
        a.stride // kernel.unit,
        b.stride // kernel.unit,
        d_stride // kernel.unit_n,
        a.scale_row,
        a.scale_column,
        b.scale_row,
        b.scale_column,
    )
    programs = _programs(kernel.tile, tiles, B.device)
    plan = _Plan(kernel.launch, programs, numbers, shape, dtype)
    return plan, (a.data, b.data, a.scale, b.scale, into, gelu_input, bias)


@_repeats.repeating
def generic_gemm(
    A: Tensor,
    B: Tensor,
    *,
    transa: bool = True,
    transb: bool = False,
    bias: Tensor | None = None,
    gelu: bool = False,
    gelu_input: Tensor | None = None,
    grad: bool = False,
    bias_grad: bool = False,
    alpha: float = 1.0,
    beta: float = 1.0,
    accumulate_into: Tensor | None = None,
    A_scale_inv: Tensor | None = None,
    B_scale_inv: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``generic_gemm`` of the contract."""
    op = contracts.generic_gemm.name
    given: _Tensors = (A, B, A_scale_inv, B_scale_inv, accumulate_into, gelu_input, bias)
    flags = (transa, transb, gelu, grad, bias_grad)
    key = None if is_frozen(accumulate_into) else _key(given, flags, alpha, beta, out_dtype)
    plan = None if key is None else _PLANS.get(key)
    prepared = given
    if plan is None:
        contracts.generic_gemm.check(
            A,
            B,
            transa=transa,
            transb=transb,
            bias=bias,
            gelu=gelu,
            gelu_input=gelu_input,
            grad=grad,
            bias_grad=bias_grad,
            alpha=alpha,
            beta=beta,
            accumulate_into=accumulate_into,
            A_scale_inv=A_scale_inv,
            B_scale_inv=B_scale_inv,
            out_dtype=out_dtype,
        )
        _decline_float64(op, B)
        alpha, beta = _as_numbers(op, alpha, beta)
        plan, prepared = _planned(given, transa, transb, gelu, grad, beta, out_dtype)
        if key is not None and all(map(_is_same, given, prepared)):
            add_to_cache(_PLANS, key, plan)
    a, b, a_scale, b_scale, into, fwd_input, added = prepared
    launch, programs, numbers, shape, dtype = plan
    D = torch.empty(shape, dtype=dtype, device=B.device) if into is None else into
    check_fresh(op, D)
    pre_gelu = torch.empty(shape, dtype=dtype, device=B.device) if gelu and not grad else None
    sums = None
    if bias_grad:
        (it,) = _operands(op, "B", [B], _listed(B_scale_inv), True, False)
        sums = _sums_of_rows(op, [_Piece(it, 0, math.prod(B.shape[:-1]))], dtype).squeeze(0)
    if launch is not None:
        launch(
            (programs, 1),
            (a, a_scale, b, b_scale, D, pre_gelu, fwd_input, added),
            (*numbers, float(alpha), float(beta)),
        )
    if accumulate_into is None:
        return D, sums, pre_gelu
    if address_of(op, D) != address_of(op, accumulate_into):
        accumulate_into.detach().copy_(D.reshape(accumulate_into.shape))
    else:
        _repeats.written(accumulate_into)
    return None, sums, pre_gelu


def _is_same(given: Tensor | None, prepared: Tensor | None) -> bool:
    """Whether a kernel may be given ``given`` in place of ``prepared``."""
    return prepared is given or (
        prepared is not None
        and given is not None
        and prepared.data_ptr() == given.data_ptr()
        and prepared.dtype == given.dtype
    )


# --------------------------------------------------------------------- products of groups


class _BaseAndOffsets(NamedTuple):
    """Tensors of one dtype, addressed relative to one of them.

    Attributes:
        base: that tensor.
        offsets: where each tensor begins, in elements from ``base``.
    """

    base: Tensor
    offsets: list[int]


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors' rows in one tensor; ``out`` is given because autocast refuses some dtypes."""
    rows = sum(len(it) for it in tensors)
    return torch.cat(list(tensors), out=tensors[0].new_empty((rows, *tensors[0].shape[1:])))


def _base_and_offsets(op: str, tensors: Sequence[Tensor]) -> _BaseAndOffsets:
    first = tensors[0]
    if len(tensors) == 1:
        return _BaseAndOffsets(first, [0])
    if _launch.INTERPRETED and first.dtype == torch.bfloat16:
        # The interpreter gets a float32 copy of each bfloat16 tensor, with no memory beyond it. The
        # tensors are dense, but may be stored by columns: elements are copied in memory order.
        sizes = [it.numel() for it in tensors]
        lying = [it.as_strided((size,), (1,)) for it, size in zip(tensors, sizes, strict=True)]
        return _BaseAndOffsets(_end_to_end(lying), _begins(sizes))
    places = [address_of(op, it) for it in tensors]
    # Tensors without elements have no address; nothing is read of them.
    start, base = min(
        ((place, i) for i, place in enumerate(places) if tensors[i].numel()), default=(0, 0)
    )
    offsets = [(it - start) // first.itemsize if it else 0 for it in places]
    return _BaseAndOffsets(tensors[base], offsets)


class _GroupedOperand(NamedTuple):
    """One operand of all groups.

    Attributes:
        like: one group's operand, for the properties that all have in common.
        data: the memory of all tensors.
        kept: the tensors; keeps copies among them alive.
        places: the offsets of the groups' rows.
        starts: the first row of each group in its tensor.
        columns, strides: of each group's tensor.
        scale: the scales of all tensors; None without scales.
        scale_places: the offset of each group's scales.
        scale_rows, scale_columns: the strides of each group's scales.
    """

    like: _Operand
    data: Tensor
    kept: list[Tensor]
    places: list[int]
    starts: list[int]
    columns: list[int]
    strides: list[int]
    scale: Tensor | None
    scale_places: list[int]
    scale_rows: list[int]
    scale_columns: list[int]

    def without_memory(self) -> _GroupedOperand:
        """The same without holding memory."""
        nothing = self.data.new_empty((0,))
        return self._replace(like=self.like._replace(data=nothing), data=nothing, kept=[])

    def of(self, op: str, tensors: Sequence[Tensor], splits: Sequence[int]) -> _GroupedOperand:
        """The same for other tensors with the same layout.

        Args:
            tensors: one for each group, or one whose rows are split.
        """
        data, offsets = _base_and_offsets(op, tensors)
        if len(tensors) == len(self.strides):
            return self._replace(data=data, places=offsets)
        starts = _begins(splits)
        stride = self.strides[0]
        return self._replace(data=data, starts=starts, places=[it * stride for it in starts])


def _same_kind(op: str, name: str, operands: list[_Operand]) -> list[_Operand]:
    """The operands, if one kernel can take them."""
    # The height of a block cannot be told from a tensor with one row, nor does it matter there.
    tall = [it.height for it in operands if math.prod(it.data.shape[:-1]) > 1]
    height = tall[0] if tall else operands[0].height
    alike = [it._replace(height=height) for it in operands]
    kinds = {(it.data.dtype, it.k_major, it.scales, it.width) for it in operands}
    if len(kinds) > 1 or any(it != height for it in tall):
        raise NotSupportedError(f"{op}: the tensors of {name!r} differ in dtype or kind of scale")
    if _launch.INTERPRETED:  # see _base_and_offsets
        alike = [it._replace(data=it.data.contiguous(), stride=it.data.shape[-1]) for it in alike]
    return alike


def _pieces(
    op: str,
    name: str,
    tensors: Sequence[Tensor],
    scales: Sequence[Tensor] | None,
    k_major: bool,
    splits: Sequence[int] | None,
    whole: bool = True,
) -> list[_Piece]:
    """One operand of each group; its tensors are made ready to be multiplied if ``whole``."""
    shared = splits is not None and len(tensors) != len(splits)
    operands = _operands(op, name, tensors, scales, k_major, whole and not shared)
    operands = _same_kind(op, name, operands)
    rows = [it for it, _ in contracts._pieces(list(tensors), splits)]
    if shared:
        return [_Piece(operands[0], *it) for it in zip(_begins(rows), rows, strict=True)]
    return [_Piece(it, 0, height) for it, height in zip(operands, rows, strict=True)]


def _begins(sizes: Sequence[int]) -> list[int]:
    """The offset of each item in a sequence of items of these sizes."""
    return list(itertools.accumulate(sizes, initial=0))[:-1]


def _grouped_operand(op: str, pieces: list[_Piece]) -> _GroupedOperand:
    """The pieces as the kernel takes them."""
    operands = [it.operand for it in pieces]
    first = operands[0]
    shared = all(it is first for it in operands)
    kept = [first.data] if shared else [it.data for it in operands]
    data, offsets = _base_and_offsets(op, kept)
    offsets = offsets * len(pieces) if shared else offsets
    scale, scale_places = first.scale, [0] * len(pieces)
    if scale is not None and not shared:
        parts = [it.scale for it in operands if it.scale is not None]
        operands = [_with_dense_scales(it) for it in operands]
        scale, scale_places = (
            _end_to_end([it.reshape(-1) for it in parts]),
            _begins([it.numel() for it in parts]),
        )
    strides = [it.stride for it in operands]
    starts = [it.start for it in pieces]
    return _GroupedOperand(
        first,
        data,
        kept,
        [offset + it * step for offset, it, step in zip(offsets, starts, strides, strict=True)],
        starts,
        [it.data.shape[-1] for it in operands],
        strides,
        scale,
        scale_places,
        [it.scale_row for it in operands],
        [it.scale_column for it in operands],
    )


def _with_dense_scales(operand: _Operand) -> _Operand:
    """The operand with the strides of its scales in a dense concatenation of all scales."""
    if operand.scale_row == operand.scale_column == 0:
        return operand
    assert operand.scale is not None
    return operand._replace(scale_row=operand.scale.shape[1], scale_column=1)


def _splits_target(
    op: str, given: Sequence[Tensor], rows: Sequence[int], strides: list[int] | None
) -> tuple[_BaseAndOffsets, list[int], list[int], bool]:
    """Where the groups' results are accumulated.

    Args:
        strides: the row strides of tensors that are written in place; None if that is unknown.

    Returns:
        the memory; the offset and row stride of each group in it; whether it is a copy that
        must be written back to the given tensors.
    """
    if strides is not None:
        target = _base_and_offsets(op, given)
        if len(given) == 1:
            return target, [it * strides[0] for it in _begins(rows)], strides, False
        return target, target.offsets, strides, False
    tensors = [plain(op, "accumulate_into", it) for it in given]
    dense = [by_rows(it) for it in tensors]
    one_memory = len(tensors) == 1 or not _launch.INTERPRETED
    same = all(
        it.dtype == tensors[0].dtype and address_of(op, prepared) == address_of(op, it)
        for it, (prepared, _) in zip(tensors, dense, strict=True)
    )
    copied = not (same and one_memory)
    if copied:
        kind = (
            tensors[0].dtype
            if all(it.dtype == tensors[0].dtype for it in tensors)
            else torch.float32
        )
        whole = _end_to_end([it.to(kind) for it in tensors])
        dense = [(whole, whole.shape[1])]
    target = _base_and_offsets(op, [it for it, _ in dense])
    if len(dense) == 1:
        stride = dense[0][1]
        return target, [it * stride for it in _begins(rows)], [stride] * len(rows), copied
    return target, target.offsets, [it for _, it in dense], copied


class _Found(NamedTuple):
    """The result of inspecting a grouped call, valid for all similar calls.

    Attributes:
        ms, n, ks: rows and columns of each group's D, and terms; None for what the split gives.
        a, b: the operands, without memory.
        into: the row stride of each group's D.
    """

    ms: Sequence[int] | None
    n: int
    ks: Sequence[int] | None
    a: _GroupedOperand
    b: _GroupedOperand
    into: list[int]

    def sizes(self, call: GroupedCall) -> tuple[Sequence[int], int, Sequence[int]]:
        """Rows and columns of each group's D, and terms."""
        ms = call.splits if self.ms is None else self.ms
        return ms, self.n, call.splits if self.ks is None else self.ks


_FOUND: KnownGroups[_Found] = KnownGroups()


def _keep_found(
    call: GroupedCall,
    ms: Sequence[int],
    n: int,
    ks: Sequence[int],
    a: _GroupedOperand,
    b: _GroupedOperand,
    into: list[int],
) -> None:
    """Keep the result of inspection, if the tensors are multiplied in place."""
    if [it.data_ptr() for it in (*a.kept, *b.kept)] == [it.data_ptr() for it in call.operands]:
        free = call.free()
        sizes = (None if free == "rows" else ms, n, None if free == "terms" else ks)
        _FOUND.add(call, _Found(*sizes, a.without_memory(), b.without_memory(), into))


def te_general_grouped_gemm(
    A: list[Tensor],
    B: list[Tensor],
    m_splits: list[int] | None = None,
    *,
    transa: bool = True,
    transb: bool = False,
    bias: list[Tensor] | None = None,
    gelu: bool = False,
    gelu_input: Tensor | None = None,
    grad: bool = False,
    bias_grad: bool = False,
    alpha: float = 1.0,
    beta: float = 1.0,
    accumulate_into: list[Tensor] | None = None,
    A_scale_inv: list[Tensor] | None = None,
    B_scale_inv: list[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``te_general_grouped_gemm`` of the contract."""
    contract = contracts.te_general_grouped_gemm
    op = contract.name
    others = (bias, A_scale_inv, B_scale_inv)
    flags, numbers = (transa, transb, gelu, grad, bias_grad), (alpha, beta)
    call = GroupedCall.of(
        A, B, m_splits, gelu_input, accumulate_into, others, flags, numbers, out_dtype
    )
    found = _FOUND.get(call)
    if call is not None and found is not None:
        ms, n, ks = found.sizes(call)
        a, b = found.a.of(op, A, call.splits), found.b.of(op, B, call.splits)
    else:
        contract.check(
            A,
            B,
            m_splits,
            transa=transa,
            transb=transb,
            bias=bias,
            gelu=gelu,
            gelu_input=gelu_input,
            grad=grad,
            bias_grad=bias_grad,
            alpha=alpha,
            beta=beta,
            accumulate_into=accumulate_into,
            A_scale_inv=A_scale_inv,
            B_scale_inv=B_scale_inv,
            out_dtype=out_dtype,
        )
        _decline_float64(op, B[0])
        ms, n = contracts._grouped_shape(op, A, B, m_splits, transa, transb)
        ks = [size[transa] for size in contracts._pieces(A, m_splits)]
        a = _grouped_operand(op, _pieces(op, "A", A, A_scale_inv, transa, m_splits))
        b = _grouped_operand(op, _pieces(op, "B", B, B_scale_inv, not transb, m_splits))
    alpha, beta = _as_numbers(op, alpha, beta)
    for what, size in (("rows of D", sum(ms)), ("columns of D", n), ("terms", max(ks))):
        check_size(op, what, size)
    device, dtype = B[0].device, contracts._default_dtype(B[0], out_dtype)
    if gelu_input is not None:
        gelu_input = plain(op, "gelu_input", gelu_input).contiguous()
    biases = None
    if bias is not None:
        given = [plain(op, "bias", it) for it in bias]
        alike = all(it.dtype == given[0].dtype for it in given)
        biases = _end_to_end(given if alike else [it.float() for it in given])
        biases = biases.view(len(given), n)
    shape = (sum(ms), n)
    d_rows = _begins(ms)
    d_places, d_strides, copied = [it * n for it in d_rows], [n] * len(ms), False
    if accumulate_into is None:
        D = torch.empty(shape, dtype=dtype, device=device)
    else:
        known_strides = None if found is None else found.into
        (D, _), d_places, d_strides, copied = _splits_target(op, accumulate_into, ms, known_strides)
    check_fresh(op, D)
    pre_gelu = torch.empty(shape, dtype=dtype, device=device) if gelu and not grad else None
    sums = None
    if bias_grad:
        stored = _pieces(op, "B", B, B_scale_inv, True, m_splits, whole=False)
        sums = _sums_of_rows(op, stored, dtype)
    after = _Epilogue(
        gelu,
        accumulate_into is not None and beta != 0,
        D.dtype,
        None if pre_gelu is None else pre_gelu.dtype,
        None if gelu_input is None else gelu_input.dtype,
        None if biases is None else biases.dtype,
    )
    if sum(ms) and n:
        _launch_groups(
            op, a, b, after, ms, n, ks, d_places, d_strides, d_rows,
            (D, pre_gelu, gelu_input, biases), (alpha, beta),
        )  # fmt: skip
        if call is not None and found is None and not copied:
            _keep_found(call, ms, n, ks, a, b, d_strides)
    if accumulate_into is None:
        return D, sums, pre_gelu
    if copied:
        parts = torch.split(D, [it.shape[0] for it in accumulate_into])
        for place, part in zip(accumulate_into, parts, strict=True):
            place.detach().copy_(part)
    else:
        torch.autograd.graph.increment_version(accumulate_into)
    return None, sums, pre_gelu


def _are_describable(op: str, operand: _GroupedOperand) -> bool:
    """Whether descriptors can describe each group's rows."""
    size = operand.like.data.itemsize
    bits = functools.reduce(operator.or_, (*operand.places, *operand.strides), 0)
    return _describable(address_of(op, operand.data) | bits * size, size, 0, 0) and all(
        map(operator.ge, operand.strides, operand.columns)
    )


def _launch_groups(
    op: str,
    a: _GroupedOperand,
    b: _GroupedOperand,
    after: _Epilogue,
    ms: Sequence[int],
    n: int,
    ks: Sequence[int],
    d_places: Sequence[int],
    d_strides: Sequence[int],
    d_rows: Sequence[int],
    tensors: _Tensors,
    factors: tuple[float, float],
) -> None:
    """Launch the kernel for all groups.

    Args:
        tensors: D, the output for GELU's input, the input of GELU's gradient, the biases.
        factors: alpha and beta.
    """
    groups = triton.next_power_of_2(len(ms))
    kernel = _kernel(
        _way(op, a.like, b.like),
        a.like,
        b.like,
        after,
        ms,
        n,
        ks,
        strides=(*a.strides, *b.strides, *a.places, *b.places),
        d_strides=(*d_strides, *d_places),
        described=_are_describable(op, a) and _are_describable(op, b),
        d_described=False,
        groups=groups,
        at_origin=(not any(a.starts), not any(b.starts)),
    )
    tile = kernel.tile
    across = -(-n // tile.columns)
    tiles = [-(-m // tile.rows) * across for m in ms]
    check_size(op, "tiles", max(sum(tiles), kernel.tile.band * across))

    def of_operand(operand: _GroupedOperand) -> tuple[Sequence[int], ...]:
        return (
            [it // kernel.unit for it in operand.places],
            [it // kernel.unit for it in operand.strides],
            operand.starts,
            operand.scale_places,
            operand.scale_rows,
            operand.scale_columns,
        )

    fields: tuple[Sequence[int], ...] = (
        _begins(tiles),
        [it // kernel.unit_m for it in ms],
        [it // kernel.unit_k for it in ks],
        *of_operand(a),
        *of_operand(b),
        [it // kernel.unit_n for it in d_places],
        [it // kernel.unit_n for it in d_strides],
        d_rows,
    )
    beyond = [sum(tiles)] * (groups - len(ms))  # tiles never fall into padding groups
    numbers = [it for field in fields for it in (*field, *beyond)]
    device = b.data.device
    D, pre_gelu, gelu_input, biases = tensors
    kernel.launch(
        (_programs(tile, sum(tiles), device), 1),
        (
            a.data, a.scale, b.data, b.scale, D, pre_gelu, gelu_input, biases,
            numbers_on_device(numbers, device),
        ),
        (sum(tiles), n // kernel.unit_n, *factors),
    )  # fmt: skip
