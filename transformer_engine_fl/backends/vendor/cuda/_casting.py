"""Casting a matrix to a scaling format: what quantization and epilogues share (``casting.cu``).

The kernels that cast also compute what they cast: a :class:`Source` describes it. One kernel
casts along rows; another casts tiles, for square blocks or to write the transposed tensor too.
A scale that depends on all values takes a pass over them first, in which each block of threads
writes a partial amax, and a launch that reduces these to the scale. The kernel that casts is a
dependent launch, which starts at the end of the data, where the pass before it finished.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from transformer_engine_fl.backends._recipes import Quantized, Recipe, outputs_of
from transformer_engine_fl.backends.vendor.cuda import _launch
from transformer_engine_fl.backends.vendor.cuda._arguments import (
    NAMES,
    Plans,
    access_width,
    check_fresh,
    check_size,
    plain,
    pointer,
    vector_width,
)
from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda._sums import SumOfGroups, sum_source
from transformer_engine_fl.backends.vendor.cuda.activation import CLAMPED
from transformer_engine_fl.ops._formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Source",
    "amax_of_all",
    "cast",
    "cast_with_sums",
    "dense_scale",
    "representative_sources",
    "row_way",
    "rows_ahead",
    "write_largest",
]

PIECE: Final = 16
"""Neighbouring columns that a thread has."""
THREADS: Final = 256
SIDE: Final = 128
"""Rows of a tile, and columns of it."""
TILE_ROWS: Final = THREADS * PIECE // SIDE
"""Rows of a tile that a block works on at once."""
FLAT_COLUMNS: Final = 512
"""A tensor whose rows do not matter is cast as rows of this many columns."""
MOST: Final = 2**31 - 2**14
"""The most rows, columns, and blocks of threads that kernels can count."""
WAVES: Final = 4
"""Waves of blocks that add up columns, if one wave would leave more than an eighth of the device
idle."""
STAGED_SCALES_TILES: Final = 2048
"""From this many tiles on, a tile writes its blocks' scales contiguously (``STAGED_SCALES``), to be
ordered later: it has only 4 or 8 bytes of them for each row and column, of which each write would
cost a sector of 32 bytes in L2. Fewer tiles were not measured."""
BYTES_AHEAD: Final = 128
"""Bytes that a thread has in flight at once, if the source is a tensor itself."""
LARGEST_THREADS: Final = 1024


class Source(NamedTuple):
    """The matrix that is cast, and how kernels compute it.

    Attributes:
        kind: ``"identity"``, a type of ``activations.cuh``, or ``"norm"``.
        shape: the output's shape.
        x: the tensor, with contiguous rows.
        x_stride: its row stride.
        grad: the gradient of the output, for a backward.
        grad_stride: its row stride.
        gated: whether a row of x has two halves.
        weight, bias, mu, rsigma: a norm's; ``mu`` if it is centred.
        zero_centred: whether the weight is stored minus 1.
        limit, alpha: a clamped activation's.
        amaxes: partial amaxes that cover all values, if they are known.
    """

    kind: str
    shape: tuple[int, ...]
    x: Tensor
    x_stride: int
    grad: Tensor | None = None
    grad_stride: int = 0
    gated: bool = False
    weight: Tensor | None = None
    bias: Tensor | None = None
    mu: Tensor | None = None
    rsigma: Tensor | None = None
    zero_centred: bool = False
    limit: float = 0.0
    alpha: float = 0.0
    amaxes: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors, in the order of the kernels' arguments."""
        return (self.x, self.grad, self.weight, self.bias, self.mu, self.rsigma)

    @property
    def halves(self) -> int:
        """The number of gradients side by side in a row: 2 for a gated backward."""
        return 2 if self.gated and self.grad is not None else 1

    def matrix(self, width: int, whole: bool) -> Matrix:
        """The rows and columns that the kernels work on.

        Args:
            width: the width of blocks along a row, 0 if there are none.
            whole: keep the rows; else a dense tensor may be cut into rows of another length.
        """
        columns = self.shape[-1]
        rows = math.prod(self.shape[:-1])
        x_stride, grad_stride = self.x_stride, self.grad_stride
        dense = x_stride == columns and (self.grad is None or grad_stride == columns)
        total = rows * columns
        if (
            dense
            and not whole
            and self.kind != "norm"
            and not self.gated
            and not (width and columns % width)
        ):
            if total % FLAT_COLUMNS == 0 and total:
                rows, columns = total // FLAT_COLUMNS, FLAT_COLUMNS
                x_stride = grad_stride = columns
            elif columns % PIECE and total <= MOST:
                rows, columns = 1, total
                x_stride = grad_stride = columns
        return Matrix(rows, columns, columns // self.halves, x_stride, grad_stride)

    def kernel(self, matrix: Matrix, both: bool) -> SourceKey:
        """What kernels depend on; ``both``: a thread may compute both halves."""
        parts = []
        for tensor, step in ((self.x, matrix.x_stride), (self.grad, matrix.grad_stride)):
            if tensor is not None:
                size = tensor.element_size()
                parts += [(tensor.data_ptr(), size), (step * size, size)]
        if self.gated:
            size = self.x.element_size()
            parts.append((matrix.part * size, size))
        parts += [
            (it.data_ptr(), it.element_size()) for it in (self.weight, self.bias) if it is not None
        ]
        x, dtype = self.x, self.x.dtype
        pair = both and self.halves == 2 and matrix.part % PIECE == 0
        weight = dtype if self.weight is None else self.weight.dtype
        return SourceKey(
            self.kind,
            dtype,
            dtype if self.grad is None else self.grad.dtype,
            weight,
            weight if self.bias is None else self.bias.dtype,
            self.mu is not None,
            self.zero_centred,
            self.gated,
            self.grad is not None,
            pair,
            self.halves == 2 and not pair,
            access_width(PIECE, *parts) if x.numel() else PIECE,
            matrix.part % PIECE == 0,
        )


class Matrix(NamedTuple):
    """The sizes that kernels work on; ``part`` is the number of columns of one half."""

    rows: int
    columns: int
    part: int
    x_stride: int
    grad_stride: int


class SourceKey(NamedTuple):
    """The properties of a source that a kernel depends on: see ``casting.cu``."""

    kind: str
    x: torch.dtype
    grad: torch.dtype
    weight: torch.dtype
    bias: torch.dtype
    centred: bool
    zero_centred: bool
    gated: bool
    backward: bool
    both: bool
    halves: bool
    access: int
    whole: bool

    def defines(self) -> dict[str, str | int]:
        """As macros."""
        code = {"identity": 0, "norm": 2}.get(self.kind, 1)
        return {
            "SOURCE": code,
            "TX": NAMES[self.x],
            "TDY": NAMES[self.grad],
            "TW": NAMES[self.weight],
            "TB": NAMES[self.bias],
            "CENTRED": int(self.centred),
            "ZERO_CENTRED": int(self.zero_centred),
            "FUNCTION": self.kind if code == 1 else "Relu",
            "GATED": int(self.gated),
            "CLAMPED": int(self.kind == CLAMPED),
            "BACKWARD": int(self.backward),
            "BOTH": int(self.both),
            "HALVES": int(self.halves),
            "ACCESS": self.access,
            "WHOLE": int(self.whole),
        }


class CastKey(NamedTuple):
    """What a kernel that casts depends on, besides the device.

    Attributes:
        source: what is cast.
        recipe: how it is cast, without the operator and the epsilon of amaxes.
        store: bytes of one access to the codes.
        aligned_t: whether every row of transposed codes begins at a multiple of 16 bytes.
        owned: whether rows belong to groups.
        amax, sums: whether partial amaxes, and partial sums of columns, are written.
        transposed: whether the transposed tensor is written.
        backwards: whether to start at the end.
        dependent: whether the previous launch computes the scale.
        lanes, rows: threads along the columns, and along the rows.
        inside: whether no tile goes beyond the rows or the columns.
        ahead: rows of a thread that are in flight at once, in the kernel that casts along rows.
        staged: whether the kernel of :func:`transpose_scales_source` orders the scales of blocks.
    """

    source: SourceKey
    recipe: Recipe
    store: int
    aligned_t: bool
    owned: bool
    amax: bool
    sums: bool
    transposed: bool
    backwards: bool
    dependent: bool
    lanes: int
    rows: int
    inside: bool
    ahead: int = 1
    staged: bool = False

    def defines(self) -> dict[str, str | int]:
        """As macros."""
        constants = self.recipe.constants()
        return {
            **self.source.defines(),
            "KIND": constants["KIND"],
            "WIDTH": constants["WIDTH"],
            "SCALES": constants["SCALES"],
            "POW2": int(constants["POW2"]),
            "SQUARE": int(self.recipe.square),
            "STORE": self.store,
            "ALIGNED_T": int(self.aligned_t),
            "OWNED": int(self.owned),
            "AMAX": int(self.amax),
            "SUMS": int(self.sums),
            "TRANSPOSED": int(self.transposed),
            "BACKWARDS": int(self.backwards),
            "DEPENDENT": int(self.dependent),
            "LANES": self.lanes,
            "ROWS": self.rows,
            "INSIDE": int(self.inside),
            "STAGED_SCALES": int(self.staged),
        }


# -------------------------------------------------------------------------------- kernels


def _source(kernel: str, defines: dict[str, str | int]) -> Specialisation:
    return Specialisation("casting", kernel, tuple(defines.items()))


def rows_ahead(key: SourceKey) -> int:
    """Rows, or tiles, that a thread has in flight at once."""
    return BYTES_AHEAD // (PIECE * key.x.itemsize) if key.kind == "identity" else 1


# For activations of 2-byte dtypes, by (gated, backward): rows that a thread has in flight at once,
# and blocks of threads that must fit on a multiprocessor, in the kernel that casts along rows.
_ACTIVATED: Final = {
    (False, False): (2, 5),
    (False, True): (1, 6),
    (True, False): (1, 2),
    (True, True): (1, 4),
}
_LIGHT: Final = ("Relu", "SquaredRelu")
"""Activations of few instructions, which a second row in flight would slow down."""


def row_way(key: SourceKey, recipe: Recipe) -> tuple[int, int]:
    """The tuning of the kernel that casts along rows, without sums of columns.

    Returns:
        Rows that a thread has in flight at once, and how many blocks must fit on a
        multiprocessor, which bounds the registers. Codes of four bits need some more registers.
    """
    if key.kind == "identity":
        return rows_ahead(key), 4
    if key.kind in ("norm", *_LIGHT) or key.x.itemsize > 2 or key.grad.itemsize > 2:
        return 1, 2
    ahead, blocks = _ACTIVATED[key.gated, key.backward]
    return ahead, blocks - (ahead > 1 and recipe.form.values_per_byte > 1)


def rows_source(key: CastKey, device: _launch.Limits) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel that casts along rows."""
    blocks = row_way(key.source, key.recipe)[1]
    if key.sums:  # with scales of blocks, the registers of three blocks would spill
        blocks = 2 if key.recipe.width else 3
    defines = {**key.defines(), "AHEAD": key.ahead, "BLOCKS": blocks}
    geometry = _launch.Geometry(
        key.lanes * key.rows,
        "P" * 13 + "qqiiiifff",
        dependent=key.dependent and device.has_clusters,
    )
    return _source("cast_rows", defines), geometry


def tiles_source(key: CastKey, device: _launch.Limits) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel that casts tiles."""
    stored = key.source.kind == "identity"
    same = not key.recipe.width
    size = 1 if same else key.source.x.itemsize if stored else 4
    shared = SIDE * SIDE * size if key.transposed else 0
    small = stored and key.source.whole and key.source.x.itemsize == 2
    defines = {**key.defines(), "BLOCKS": 4 if small and not (key.owned or key.sums) else 2}
    geometry = _launch.Geometry(
        THREADS, "P" * 15 + "qqiiifff", shared, dependent=key.dependent and device.has_clusters
    )
    return _source("cast_tiles", defines), geometry


def may_stage_scales(recipe: Recipe) -> bool:
    """Whether whole tiles may leave the ordering of blocks' scales to another launch.

    Codes of four bits have more scales: with this launch a cast took 211 microseconds, without 209.
    """
    return recipe.columnwise and recipe.width > 0 and recipe.form.values_per_byte == 1


def transpose_scales_source(
    size: int, device: _launch.Limits
) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel that orders the scales that tiles staged, ``size`` bytes for a tile's row."""
    word = {4: "unsigned", 8: "uint2"}[size]
    geometry = _launch.Geometry(THREADS, "PPPPiiiii", dependent=device.has_clusters)
    return _source("transpose_scales", {"WORD": word}), geometry


def amax_source(
    key: SourceKey, lanes: int, rows: int, device: _launch.Limits
) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel that finds the amax of many tiles."""
    defines = {
        **key.defines(),
        "LANES": lanes,
        "ROWS": rows,
        "AHEAD": rows_ahead(key),
        "BLOCKS": 2,
    }
    return _source("amax_tiles", defines), _launch.Geometry(lanes * rows, "P" * 7 + "qqiiiff")


def largest_source(
    power_of_2: bool, device: _launch.Limits
) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel that reduces partial amaxes to one, and computes its scale."""
    geometry = _launch.Geometry(LARGEST_THREADS, "PPPqff", dependent=device.has_clusters)
    return _source("largest", {"POW2": int(power_of_2)}), geometry


def amax_rows_source(
    dtype: torch.dtype, vec: int, access: int
) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel that finds the amax of each row."""
    defines: dict[str, str | int] = {"TX": NAMES[dtype], "VEC": vec, "ACCESS": access}
    return _source("amax_rows", defines), _launch.Geometry(256, "PPqii")


def own_rows_source(
    sizes: torch.dtype, scaled: bool, power_of_2: bool
) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel that finds the group of each row."""
    defines: dict[str, str | int] = {
        "TSIZE": "int" if sizes == torch.int32 else "long long",
        "SCALED": int(scaled),
        "POW2": int(power_of_2),
    }
    return _source("own_rows", defines), _launch.Geometry(256, "P" * 8 + "iiiff")


_kernels: Plans[_launch.Kernel] = Plans()
_totals: Plans[SumOfGroups] = Plans()


def _lanes(matrix: Matrix, columns: int, width: int) -> tuple[int, int]:
    """Threads of a block along the columns, and along the rows.

    Few lanes if many would have no column; many if there are few rows.
    """
    pieces = max(1, -(-columns // PIECE))
    least = max(1, width // PIECE)
    lanes = 32
    while lanes > least and -(-pieces // lanes) * lanes > pieces + pieces // 16:
        lanes //= 2
    lanes = max(lanes, least)
    rows = min(THREADS // lanes, 1 << (max(1, matrix.rows) - 1).bit_length())
    wanted = 1 << (pieces - 1).bit_length()
    lanes = max(lanes, min(THREADS // rows, wanted))
    return lanes, max(rows, -(-32 // lanes))


@functools.lru_cache(maxsize=1024)
def _resident(kernel: _launch.Kernel) -> int:
    """How many blocks of a kernel the device runs at once."""
    return kernel.resident_groups()


def _strips(across: int, resident: int) -> int:
    """Into how many strips the rows are cut; ``across`` blocks add up the columns of each."""
    if resident % max(1, across) > resident // 8:
        resident *= WAVES
    return max(1, resident // max(1, across))


def _power(*sizes: int) -> int:
    """The largest power of two, up to 16, that divides all sizes."""
    return math.gcd(16, *sizes)


# ------------------------------------------------------------------------------------ runs


def dense_scale(op: str, scale: Tensor | None) -> Tensor | None:
    """The scale that the caller gives, as a dense tensor."""
    return None if scale is None else plain(op, "scale", scale).contiguous()


def _empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=like.device)


def _amaxes(op: str, source: Source) -> Tensor:
    """Partial amaxes that cover all values, one from each block of threads."""
    matrix = source.matrix(0, whole=False)
    key = source.kernel(matrix, both=True)
    columns = matrix.part if key.both else matrix.columns
    lanes, rows = _lanes(matrix, columns, 0)
    device = source.x.get_device()
    limits = _launch.limits(device)
    plan_key = ("amax", device, key, lanes, rows)
    kernel = _kernels.get(plan_key) or _kernels.get_or_create(
        plan_key, lambda: _launch.load(*amax_source(key, lanes, rows, limits), device)
    )
    tiles = -(-matrix.rows // rows) * -(-columns // (lanes * PIECE))
    check_size(op, "rows", matrix.rows, MOST)
    check_size(op, "columns", matrix.columns, MOST)
    check_size(op, "tiles", tiles, MOST)
    blocks = max(1, -(-tiles // rows_ahead(key)))
    amaxes = _empty(source.x, (blocks,))
    kernel.launch(
        blocks,
        1,
        *map(pointer, source.tensors),
        amaxes.data_ptr(),
        matrix.x_stride,
        matrix.grad_stride,
        matrix.rows,
        matrix.part,
        matrix.columns,
        source.limit,
        source.alpha,
    )
    return amaxes


def write_largest(
    amaxes: Tensor, amax: Tensor, scale: Tensor | None = None, recipe: Recipe | None = None
) -> None:
    """Write the largest of ``amaxes`` and, with a recipe, the scale that follows from it."""
    most, power, epsilon = (
        (1.0, False, 0.0)
        if recipe is None
        else (recipe.shared_largest, recipe.force_pow_2_scales, recipe.amax_epsilon)
    )
    device = amaxes.get_device()
    key = ("largest", device, power)
    kernel = _kernels.get(key) or _kernels.get_or_create(
        key, lambda: _launch.load(*largest_source(power, _launch.limits(device)), device)
    )
    pointers = (amaxes.data_ptr(), amax.data_ptr(), pointer(scale))
    kernel.launch(1, 1, *pointers, amaxes.numel(), most, epsilon)


def amax_of_all(op: str, source: Source) -> Tensor:
    """The amax of all values, ``[1]``."""
    amax = _empty(source.x, (1,))
    check_fresh(op, amax)
    write_largest(_amaxes(op, source), amax)
    return amax


def _own_rows(
    recipe: Recipe,
    source: Source,
    sizes: Tensor,
    given: Tensor | None,
    amax: Tensor | None,
    inverses: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """The group of each row, and the groups' scales; also writes their amaxes and inverses."""
    matrix = source.matrix(0, whole=True)
    x, device = source.x, source.x.get_device()
    owner = _empty(x, (matrix.rows,), torch.int32)
    amaxes = scales = None
    if amax is not None:
        amaxes = _empty(x, (matrix.rows,))
        size = x.element_size()
        vec = vector_width(matrix.columns, size) if matrix.columns else 1
        access = access_width(vec, (x.data_ptr(), size), (matrix.x_stride * size, size))
        key = ("amax_rows", device, x.dtype, vec, access)
        kernel = _kernels.get(key) or _kernels.get_or_create(
            key, lambda: _launch.load(*amax_rows_source(x.dtype, vec, access), device)
        )
        if matrix.rows:
            kernel.launch(
                -(-matrix.rows // 8),
                1,
                x.data_ptr(),
                amaxes.data_ptr(),
                matrix.x_stride,
                matrix.rows,
                matrix.columns,
            )
        scales = _empty(x, (sizes.numel(),))
    scaled, power = amax is not None, recipe.force_pow_2_scales
    key = ("own_rows", device, sizes.dtype, scaled, power)
    kernel = _kernels.get(key) or _kernels.get_or_create(
        key, lambda: _launch.load(*own_rows_source(sizes.dtype, scaled, power), device)
    )
    kernel.launch(
        sizes.numel(),
        1,
        *map(pointer, (sizes, amaxes, given, owner, amax, scales, *inverses)),
        matrix.rows,
        sizes.numel(),
        math.prod(source.shape[1:-1]),
        recipe.shared_largest,
        recipe.amax_epsilon,
    )
    return owner, scales


def _transpose_scales(size: int, device: int) -> _launch.Kernel:
    key = ("transpose_scales", device, size)
    return _kernels.get(key) or _kernels.get_or_create(
        key, lambda: _launch.load(*transpose_scales_source(size, _launch.limits(device)), device)
    )


class _Run(NamedTuple):
    """One cast.

    Attributes:
        recipe: how to cast.
        source: what to cast.
        scale: the scale of all values, or of each group.
        owner: the group of each row.
        outputs: the tensors to write.
        leaves_amax, sums: whether to compute the amax, and the columns' sums.
        computed: whether the previous launch computes the scale.
        backwards: whether to start at the end.
    """

    recipe: Recipe
    source: Source
    scale: Tensor | None
    owner: Tensor | None
    outputs: Quantized
    leaves_amax: bool
    sums: bool
    computed: bool
    backwards: bool

    def along_rows(self) -> Tensor | None:
        """Cast along the rows only; returns the partial sums of columns, if wanted."""
        recipe, source = self.recipe, self.source
        whole = self.sums or self.owner is not None
        matrix = source.matrix(recipe.width, whole)
        both = not (recipe.width and matrix.part % recipe.width)
        key = source.kernel(matrix, both)
        columns = matrix.part if key.both else matrix.columns
        lanes, rows = _lanes(matrix, columns, recipe.width)
        across = -(-columns // (lanes * PIECE))
        limits = _launch.limits(source.x.get_device())
        ahead = 1
        if not self.sums:  # few rows in flight where there are few rows, for more blocks
            ahead = row_way(key, recipe)[0]
            while ahead > 1 and matrix.rows * across <= ahead * rows * limits.multiprocessors:
                ahead //= 2
        kernel = self._kernel(key, matrix, lanes, rows, rows_source, ahead=ahead)
        shares = -(-matrix.rows // (rows * ahead))
        if self.sums:
            shares = min(shares, _strips(across, _resident(kernel)))
        blocks = max(1, shares * across)
        self._check(matrix, blocks)
        data, scale_inv, _, global_scale_inv, _, _ = self.outputs
        sums, partial = self._left(shares, blocks, matrix)
        kernel.launch(
            blocks,
            1,
            *map(pointer, (*source.tensors, self.scale, self.owner, data, scale_inv)),
            *map(pointer, (self._global(global_scale_inv), partial, sums)),
            matrix.x_stride,
            matrix.grad_stride,
            matrix.rows,
            matrix.part,
            matrix.columns,
            shares,
            source.limit,
            source.alpha,
            recipe.amax_epsilon,
        )
        self._finish(partial)
        return sums

    def by_tiles(self) -> Tensor | None:
        """Cast tiles, also along their columns; returns the partial sums of columns, if wanted."""
        recipe, source = self.recipe, self.source
        matrix = source.matrix(recipe.width, whole=True)
        key = source.kernel(matrix, both=False)
        whole = not (matrix.rows % SIDE or matrix.columns % SIDE)
        inside = whole and matrix.rows > 0 and matrix.columns > 0
        down, across = -(-matrix.rows // SIDE), -(-matrix.columns // SIDE)
        blocks = max(1, down * across)
        self._check(matrix, blocks)
        data, scale_inv, _, global_scale_inv, data_t, scale_inv_t = self.outputs
        staged = (
            inside
            and self.owner is None
            and may_stage_scales(recipe)
            and blocks >= STAGED_SCALES_TILES
        )
        ordered = scale_inv, scale_inv_t
        if staged:
            assert scale_inv_t is not None
            scale_inv, scale_inv_t = (
                _empty(it, it.shape, it.dtype) for it in (scale_inv, scale_inv_t)
            )
        kernel = self._kernel(
            key, matrix, SIDE // PIECE, TILE_ROWS, tiles_source, inside, staged=staged
        )
        sums, partial = self._left(down, blocks, matrix)
        kernel.launch(
            blocks,
            1,
            *map(pointer, (*source.tensors, self.scale, self.owner, data, scale_inv)),
            *map(pointer, (self._global(global_scale_inv), data_t, scale_inv_t, partial, sums)),
            matrix.x_stride,
            matrix.grad_stride,
            matrix.rows,
            matrix.part,
            matrix.columns,
            source.limit,
            source.alpha,
            recipe.amax_epsilon,
        )
        if staged:
            size = SIDE // recipe.width * scale_inv.element_size()
            of_rows = -(-matrix.rows // 64) * -(-across // 64)
            of_columns = -(-matrix.columns // 64) * -(-down // 64)
            transpose_kernel = _transpose_scales(size, source.x.get_device())
            transpose_kernel.launch(
                of_rows + of_columns,
                1,
                pointer(scale_inv),
                pointer(ordered[0]),
                pointer(scale_inv_t),
                pointer(ordered[1]),
                matrix.rows,
                across,
                matrix.columns,
                down,
                of_rows,
            )
        self._finish(partial)
        return sums

    def _kernel(
        self,
        key: SourceKey,
        matrix: Matrix,
        lanes: int,
        rows: int,
        make: Callable[..., tuple[Specialisation, _launch.Geometry]],
        inside: bool = False,
        ahead: int = 1,
        staged: bool = False,
    ) -> _launch.Kernel:
        recipe, device = self.recipe, self.source.x.get_device()
        packed = recipe.form.values_per_byte
        found = CastKey(
            key,
            recipe._replace(op="", amax_epsilon=0.0),
            _power(matrix.columns // packed, matrix.part // packed),
            not recipe.columnwise or matrix.rows // packed % 16 == 0,
            self.owner is not None,
            self.leaves_amax,
            self.sums,
            recipe.columnwise,
            self.backwards,
            self.computed,
            lanes,
            rows,
            inside,
            ahead,
            staged,
        )
        plan_key = (device, make, found)
        return _kernels.get(plan_key) or _kernels.get_or_create(
            plan_key, lambda: _launch.load(*make(found, _launch.limits(device)), device)
        )

    def _check(self, matrix: Matrix, blocks: int) -> None:
        op = self.recipe.op
        check_size(op, "rows", matrix.rows, MOST)
        check_size(op, "columns", matrix.columns, MOST)
        check_size(op, "blocks of threads", blocks, MOST)

    def _left(self, parts: int, blocks: int, matrix: Matrix) -> tuple[Tensor | None, Tensor | None]:
        x = self.source.x
        sums = _empty(x, (parts, matrix.columns)) if self.sums else None
        return sums, _empty(x, (blocks,)) if self.leaves_amax else None

    def _global(self, global_scale_inv: Tensor | None) -> Tensor | None:
        return None if self.owner is not None else global_scale_inv

    def _finish(self, partial: Tensor | None) -> None:
        amax = self.outputs[2]
        if partial is not None and amax is not None:
            write_largest(partial, amax)


def _run(
    recipe: Recipe,
    source: Source,
    scale: Tensor | None,
    group_sizes: Tensor | None,
    with_sums: bool,
) -> tuple[Quantized, Tensor | None]:
    given = scale
    groups = 1 if group_sizes is None else group_sizes.numel()
    outputs = outputs_of(recipe, source.x, source.shape, groups)
    _, scale_inv, amax, global_scale_inv, _, scale_inv_t = outputs
    rows, columns = math.prod(source.shape[:-1]), source.shape[-1]
    check_size(recipe.op, "rows", rows, MOST)
    owner = None
    if group_sizes is not None:
        inverses = (
            (scale_inv, scale_inv_t) if recipe.form.block is None else (global_scale_inv, None)
        )
        owner, scale = _own_rows(recipe, source, group_sizes, scale, amax, inverses)
    elif amax is not None and scale is None:
        scale = _empty(source.x, (1,))
        amaxes = source.amaxes if source.amaxes is not None else _amaxes(recipe.op, source)
        write_largest(amaxes, amax, scale, recipe)
    if not rows * columns and not (recipe.form.by_tensor and owner is None):
        return outputs, _empty(source.x, (0, columns)) if with_sums else None
    computed = owner is None and amax is not None and given is None
    run = _Run(
        recipe,
        source,
        scale,
        owner,
        outputs,
        amax is not None and given is not None and owner is None,
        with_sums,
        computed,
        computed or source.kind == "norm" or owner is not None,
    )
    tiles = recipe.columnwise or recipe.square
    return outputs, run.by_tiles() if tiles else run.along_rows()


def cast(
    recipe: Recipe,
    source: Source,
    scale: Tensor | None = None,
    group_sizes: Tensor | None = None,
) -> Quantized:
    """The outputs of ``quantize``, or with ``group_sizes`` those of ``group_quantize``."""
    if group_sizes is not None:
        group_sizes = plain(recipe.op, "group_sizes", group_sizes).contiguous()
    return _run(recipe, source, dense_scale(recipe.op, scale), group_sizes, False)[0]


def cast_with_sums(
    recipe: Recipe, source: Source, dtype: torch.dtype, scale: Tensor | None = None
) -> tuple[Tensor, Quantized]:
    """The sum over the rows, in ``dtype``, and the outputs of ``quantize``."""
    outputs, sums = _run(recipe, source, dense_scale(recipe.op, scale), None, True)
    columns = source.shape[-1]
    assert sums is not None  # an invariant of this module
    if not math.prod(source.shape):
        return torch.zeros((columns,), dtype=dtype, device=source.x.device), outputs
    total = _empty(source.x, (columns,), dtype)
    device = source.x.get_device()
    key = (device, columns, dtype)
    adding = _totals.get(key) or _totals.get_or_create(
        key, lambda: SumOfGroups(columns, torch.float32, dtype, device)
    )
    adding(sums.data_ptr(), total.data_ptr(), 0, sums.shape[0])
    return total, outputs


# ----------------------------------------------------------------------- compiling ahead


def recipes() -> Iterator[Recipe]:
    """A recipe of each format, along rows and both ways."""
    for form in FORMATS.values():
        for columnwise in (False, True):
            yield Recipe("", form, getattr(torch, form.dtypes[0]), columnwise, False, 0.0)


def identity_key(dtype: torch.dtype, access: int = PIECE, whole: bool = True) -> SourceKey:
    """The key of a source that is a tensor itself."""
    same = (dtype,) * 4
    return SourceKey("identity", *same, *(False,) * 6, access, whole)


def cast_source(
    source: SourceKey,
    recipe: Recipe,
    device: _launch.Limits,
    *,
    store: int = 16,
    lanes: int = 32,
    owned: bool = False,
    amax: bool = False,
    sums: bool = False,
    dependent: bool = False,
    inside: bool = False,
    ahead: int = 1,
) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel that casts along rows, or by tiles, whichever the recipe needs."""
    tiles = recipe.columnwise or recipe.square
    if tiles:
        lanes = SIDE // PIECE
    key = CastKey(
        source,
        recipe,
        store,
        store == 16,
        owned,
        amax,
        sums,
        recipe.columnwise,
        dependent,
        dependent,
        lanes,
        THREADS // lanes,
        inside,
        ahead,
        inside and not owned and may_stage_scales(recipe),
    )
    return (tiles_source if tiles else rows_source)(key, device)


def representative_sources(
    device: _launch.Limits,
) -> Iterator[tuple[Specialisation, _launch.Geometry]]:
    """A selection of quantization's kernels for a device: every kind, type and shape."""
    low, full, half = torch.bfloat16, torch.float32, torch.float16
    for recipe in recipes():
        by_tensor = recipe.form.by_tensor
        for dtype in (low, full):
            key = identity_key(dtype)
            yield cast_source(
                key, recipe, device, dependent=by_tensor, inside=True, ahead=rows_ahead(key)
            )
            yield cast_source(key, recipe, device, amax=by_tensor, sums=True)
        yield cast_source(identity_key(half, 1, False), recipe, device, store=1, lanes=8)
        yield cast_source(identity_key(low, 4, False), recipe, device, store=2, owned=True)
        if recipe.width != 16:
            other = recipe._replace(dtype=torch.float8_e5m2)
            power = recipe.form.scale_dtype == "float32"
            yield cast_source(identity_key(low), other._replace(force_pow_2_scales=power), device)
    for dtype, access, whole in ((low, 16, True), (full, 2, False)):
        yield amax_source(identity_key(dtype, access, whole), 32, 8, device)
    for power in (False, True):
        yield largest_source(power, device)
        for scaled in (False, True):
            yield own_rows_source(torch.int32 if power else torch.int64, scaled, power)
    for dtype, vec in ((low, 8), (full, 4), (half, 1)):
        yield amax_rows_source(dtype, vec, vec)
    for size in (4, 8):
        yield transpose_scales_source(size, device)
    yield sum_source(4096, full, low, device)
