"""Root mean square and layer normalization in CUDA C++ (``normalization.cu``).

The operators check their arguments, allocate the outputs, choose the kernel and its shape, and
launch it. ``_compile`` compiles kernels, ``_launch`` launches them.

Which threads hold which columns follows from H and the dtypes alone (:class:`Tile`), so a row's
result does not depend on the number of rows or their addresses: tensors or rows with less alignment
are read in narrower accesses by the same threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends._allocation import allocator
from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends.vendor.cuda import _launch
from transformer_engine_fl.backends.vendor.cuda._arguments import (
    MOST_COLUMNS,
    NAMES,
    PLAIN,
    SIZES,
    Plans,
    access_width,
    contiguous,
    decline,
    dense_rows,
    is_number,
    is_plain,
    no_memory,
    on_device,
    real,
    vector_width,
)
from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda._norm_ways import (
    BACKWARD_PIECES,
    CAST_AS,
    CAST_NARROWEST,
    EXCHANGE_THROUGH_MEMORY,
    FEW_ROWS,
    FORWARD_PIECES,
    IN_REGISTERS,
    IN_SHARED_MEMORY,
    CastAs,
)
from transformer_engine_fl.backends.vendor.cuda._sums import SumOfGroups, sum_source
from transformer_engine_fl.backends.vendor.cuda._tiles import (
    CLUSTERS,
    EXCHANGE_OPTIONS,
    LARGEST_CLUSTERS,
    SHARED_PER_BLOCK,
    STRIPED_FOURS,
    WARPS,
    Piece,
    Pipelining,
    Team,
    Tile,
    exchange_bytes,
    groups_of,
    is_striped,
    pieces_for,
    pipelining,
    require_clusters,
    room_for_pieces,
    runs_clusters,
    striped_tile,
    team_tile,
    warp_tile,
    with_blocks,
)
from transformer_engine_fl.ops._dtypes import math_dtype

if TYPE_CHECKING:
    from transformer_engine_fl.backends._recipes import Recipe
    from transformer_engine_fl.core.contract import Contract

__all__ = [
    "layernorm_bwd",
    "layernorm_fwd",
    "rmsnorm_bwd",
    "rmsnorm_bwd_add",
    "rmsnorm_fwd",
    "rmsnorm_fwd_add",
]

# ------------------------------------------------------------------------------- tiles


# (threads per row and block, blocks per row) from narrow to wide: the first that holds the row is
# taken. Narrower rows are within a warp; wider ones go to the wide kernels.
FORWARD_TEAMS: Final = ((128, 1), (256, 1), (512, 1), (256, 4), (256, 8), (512, 8), (1024, 8))
FORWARD_TEAMS_NO_CLUSTERS: Final = ((128, 1), (256, 1), (512, 1), (1024, 1))
# For a root mean square without a cast, where little else needs the registers.
FORWARD_TEAMS_LARGE_BLOCK: Final = ((128, 1), (256, 1), (512, 1), (1024, 1), *FORWARD_TEAMS[4:])
RMS_BACKWARD_TEAMS: Final = ((128, 1), (256, 1), (512, 1), (512, 2), (512, 4), (512, 8))
LAYER_BACKWARD_TEAMS: Final = ((128, 1), (256, 1), (256, 2), (256, 4), (256, 8), (512, 8))
# With one vector per thread: dgamma and dbeta leave no registers for two, and a cluster costs more
# than the barrier of a large block.
LAYER_BACKWARD_SINGLE: Final = ((256, 1), (512, 1), (1024, 1))
WIDE_BACKWARD_TEAMS: Final = ((1024, 8), (1024, 16))
BACKWARD_TEAMS_NO_CLUSTERS: Final = ((128, 1), (256, 1), (512, 1))
# For long rows, where a group of blocks keeps gamma and beta in registers from row to row.
STREAM_TEAMS: Final = ((512, 1), (512, 2), (512, 4), (512, 8), (1024, 8))
# For rows twice as long, of which with a residual a cluster of 8 has room for two at most.
LARGE_STREAM_TEAM: Final = (1024, 16)
# For layer norms of more vectors than this: four vectors a thread, and half as many threads, which
# have the registers for them and for beta.
LONG_LAYER: Final = 4096
LONG_LAYER_TEAMS: Final = ((256, 8), (512, 8), (512, 16))
# For rows that are cast and not in CAST_AS: narrow or very wide ones, with a residual, or of other
# types than half precision. A thread has up to four vectors and 128 registers at any width, so that
# the number of threads on a multiprocessor (CAST_RESIDENT) is always the same.
CAST_CLUSTERS: Final = ((512, 2), (512, 4), (512, 8))
CAST_TEAMS: Final = ((32, 1), (64, 1), (128, 1), (256, 1), (512, 1), *CAST_CLUSTERS)
# For those whose blocks have scales, or that have a mean: any number of warps, of which rows leave
# fewer idle.
CAST_WARPS: Final = (*((lanes, 1) for lanes in range(32, 513, 32)), *CAST_CLUSTERS)
# For those with a mean or a residual; others are faster in clusters of eight blocks of 1,024.
LARGE_CAST_TEAM: Final = (512, 16)
CAST_RESIDENT: Final = 512
# Rows of more vectors than this go to forward_stream, unless they are in IN_SHARED_MEMORY: with
# a cast it pays first, with a residual last. With gamma and beta the limit is where one block no
# longer holds the row; with gamma alone one block holds it with four vectors a thread.
STREAM_VECTORS: Final = 2048
STREAM_VECTORS_CAST: Final = 31
STREAM_VECTORS_GAMMA_ALONE: Final = 4096
STREAM_VECTORS_ADDED: Final = 8192
# For rows of more bytes within a block, gamma and beta are read from L1 after the sums: in shared
# memory they would leave L1 too small to keep them for the next block. Measured on compute
# capability 9.0; for devices without clusters nothing was changed.
MOST_AHEAD: Final = 8192
STREAM_STAGES: Final = 4
# Vectors of a thread of a forward with striped rows, within a block; and with a residual, where
# blocks may be larger.
STRIPED_VECTORS: Final = 6
STRIPED_ADDED: Final = 4
# Columns from which rows with a residual are striped if they divide into vectors of four.
STRIPED_FOURS_ADDED: Final = 12_289
LARGER_BLOCKS: Final[tuple[Team, ...]] = tuple((lanes, 1) for lanes in range(544, 1025, 32))
WIDE_LANES: Final = 1024
COLUMN_LANES: Final = 128
MOST_STAGES: Final = 6
# Rows, by their vectors, for which the blocks of a cluster exchange sums without a barrier
# (``include/cluster_exchange.cuh``), as measured in half precision. Elsewhere that took up to an
# eighth longer, or nothing was measured.
ASYNC_RMS_FORWARD: Final = range(4097, MOST_COLUMNS)
ASYNC_LAYER_FORWARD: Final = range(4097, MOST_COLUMNS)
ASYNC_RMS_BACKWARD: Final = range(8193, MOST_COLUMNS)
ASYNC_LAYER_BACKWARD: Final = range(1025, 4097)


def forward_tile(
    columns: int,
    x_size: int,
    other_size: int,
    clusters: bool,
    large_block: bool = False,
    resident: int = 1280,
) -> Tile | None:
    """The tile of a forward; None if the row has to be read more than once.

    Args:
        columns: H.
        x_size: bytes of an element of the input.
        other_size: bytes of the widest element of the others.
        clusters: whether the device has thread block clusters.
        large_block: whether a block of 1,024 threads is preferred to clusters.
        resident: threads of a multiprocessor that share its registers, in half precision.
    """
    teams = FORWARD_TEAMS_LARGE_BLOCK if large_block else FORWARD_TEAMS
    vec = vector_width(columns, x_size)
    vectors = columns // vec
    most = 4 if vec * x_size == 16 else 8
    tile = warp_tile(vectors, vec, most) or team_tile(
        vectors, vec, most, teams if clusters else FORWARD_TEAMS_NO_CLUSTERS
    )
    if tile is None or x_size != 2 or other_size != 2:
        return tile
    return with_blocks(tile, resident)


def striped_forward_tiles(
    columns: int, added: bool, clusters: bool, most_blocks: int = LARGEST_CLUSTERS[0]
) -> Iterator[Tile]:
    """Tiles of a forward of half precision with striped rows; the first that fits is taken.

    Args:
        columns: H.
        added: whether there is a residual.
        clusters: whether the device has thread block clusters.
        most_blocks: blocks of a cluster, at most.
    """
    within = WARPS + LARGER_BLOCKS if added else WARPS
    across = CLUSTERS if clusters else ((1024, 1),)
    for most, teams in ((STRIPED_ADDED if added else STRIPED_VECTORS, within), (8, across)):
        tile = striped_tile(columns, most, (it for it in teams if it[1] <= most_blocks))
        if tile is not None:
            yield with_blocks(tile, 1280)


def striped_backward_tiles(
    columns: int, centred: bool, clusters: bool, most_blocks: int = LARGEST_CLUSTERS[0]
) -> Iterator[Tile]:
    """Tiles of a backward of half precision with striped rows; the first that fits is taken.

    The arguments of :func:`striped_forward_tiles`, with ``centred``, whether there is a mean, in
    place of ``added``.
    """

    def cost(tile: Tile) -> float:
        alone = tile.cluster == 1
        spills = tile.lanes > 768 and alone if centred else tile.lanes > (384 if alone else 512)
        share = {1: 1.2, 2: 1.0, 3: 1.04}[tile.vecs] * (1.0 if alone else 1.3)
        if spills and tile.vecs == (2 if centred else 3):
            share *= 2
        # Of equal tiles that of the smaller blocks, and of a cluster of at most 8.
        return tile.room * share * (1 + tile.lanes / 2**20 + (tile.cluster > 8) / 2**8)

    across: tuple[Team, ...] = ()
    if clusters:
        wide = ((lanes, blocks) for blocks in (2, 4, 8, 16) for lanes in (128, 256, 512, 1024))
        across = tuple(team for team in wide if team[1] <= most_blocks)
    for teams in (WARPS + LARGER_BLOCKS + across, across):
        tile = striped_tile(columns, 2 if centred else 3, teams, cost)
        if tile is not None:
            yield with_blocks(tile, 640 if centred else 1024 if tile.lanes >= 512 else 768)


def stream_tile(
    columns: int,
    x_size: int,
    other_size: int,
    longer: int,
    resident: int,
    teams: tuple[Team, ...],
    most: int,
) -> Tile | None:
    """The tile of a forward that keeps the parameters; None if the row is not long enough.

    The arguments of :func:`forward_tile`, for a device with clusters; ``longer``: the row must
    have more vectors than this; ``teams``, and ``most``: vectors that a thread of theirs may hold.
    """
    vec = vector_width(columns, x_size)
    vectors = columns // vec
    if vectors <= longer or vec * x_size != 16 or x_size == 8 or other_size > x_size:
        return None
    tile = team_tile(vectors, vec, most, teams) or team_tile(vectors, vec, 4, ((1024, 8),))
    return None if tile is None else with_blocks(tile, resident)


def backward_tile(
    columns: int,
    x_size: int,
    other_size: int,
    centred: bool,
    clusters: bool,
    most_blocks: int = LARGEST_CLUSTERS[0],
) -> Tile | None:
    """The tile of a backward; None if the row has to be read more than once.

    The arguments of :func:`forward_tile`, whether there is a mean to subtract, and the most
    blocks of a cluster.
    """
    vec = vector_width(columns, x_size)
    vectors = columns // vec
    most = (8 if x_size == 8 else 16) // vec  # gradients of gamma that a thread can accumulate
    teams = LAYER_BACKWARD_TEAMS if centred else RMS_BACKWARD_TEAMS
    tile = warp_tile(vectors, vec, 4 if vec * x_size == 16 else 8)
    if tile is None and clusters and x_size == 2 and vec == 8:
        tile = team_tile(vectors, vec, 1, LAYER_BACKWARD_SINGLE) if centred else None
        if tile is None:
            tile = team_tile(vectors, vec, most, teams)
        if tile is None:
            wide = tuple(team for team in WIDE_BACKWARD_TEAMS if team[1] <= most_blocks)
            tile = team_tile(vectors, vec, most, wide)
        if tile is not None and (tile.lanes >= 512 or (centred and tile.vecs == 1)):
            return with_blocks(tile, 1024) if other_size == 2 else tile
    elif tile is None:
        tile = team_tile(vectors, vec, most, teams if clusters else BACKWARD_TEAMS_NO_CLUSTERS)
    if tile is None or x_size != 2 or other_size != 2:
        return tile
    if tile.lanes <= 32:
        return with_blocks(tile, 1024 if tile.held <= 8 else 384 if centred else 512)
    if vec < 8:  # many short vectors: more addresses
        return with_blocks(tile, 512)
    return with_blocks(tile, 768 if centred or tile.lanes < 512 else 1024)


# -------------------------------------------------------------------------------- plans


def _source(kernel: str, defines: dict[str, str | int]) -> Specialisation:
    return Specialisation("normalization", kernel, tuple(defines.items()))


Planned = tuple[Specialisation, _launch.Geometry]
"""A kernel and how it is launched."""


class Cast(NamedTuple):
    """What a forward writes in place of its output.

    Attributes:
        recipe: how the output is cast; None if it is not written at all.
        amax: whether the amax of each row, or of a group's rows, is written.
    """

    recipe: Recipe | None
    amax: bool

    def defines(self) -> dict[str, str | int]:
        """As macros."""
        defines: dict[str, str | int] = {"CAST": 2, "AMAX": int(self.amax)}
        if self.recipe is not None:
            constants = self.recipe.constants()
            defines |= {name: constants[name] for name in ("KIND", "WIDTH", "SCALES")}
            defines |= {"CAST": 1, "POW2": int(constants["POW2"])}
        return defines


STATISTICS: Final = Cast(None, False)


@dataclass(frozen=True, slots=True)
class ForwardKey:
    """What a forward's kernel depends on, beside the device."""

    columns: int
    access: int
    x: torch.dtype
    weight: torch.dtype
    bias: torch.dtype
    output: torch.dtype
    centred: bool
    zero_centred: bool
    added: bool = False
    cast: Cast | None = None
    biased: bool = True
    """Whether there is a beta; a root mean square has none either way."""

    @property
    def striped(self) -> bool:
        """Whether rows are striped: see :class:`Tile`."""
        sizes = (SIZES[it] for it in (self.x, self.weight, self.bias, self.output))
        fours = STRIPED_FOURS_ADDED if self.added else STRIPED_FOURS
        return self.cast is None and is_striped(self.columns, *sizes, fours=fours)

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Bytes of an element of each tensor whose rows are kept."""
        return (SIZES[self.x],) * (1 + self.added)

    @property
    def sums(self) -> int:
        """How many numbers blocks exchange per row where they form no cluster."""
        return 2 if self.centred else 1

    def tile(self, device: _launch.Limits, most_blocks: int = LARGEST_CLUSTERS[0]) -> Tile | None:
        """How rows are spread; None if they have to be read more than once.

        ``most_blocks``: the most blocks of a cluster.
        """
        return self.spread(device, most_blocks)[0]

    def spread(
        self, device: _launch.Limits, most_blocks: int = LARGEST_CLUSTERS[0]
    ) -> tuple[Tile | None, Pipelining | None]:
        """The same, and how rows are pipelined where a group of blocks loops over them."""
        if way := self._cast_as(device):
            st_async = False  # nothing to exchange: a block has all of a row
            return way.tile, None if way.one_row else self._pipelining(way.tile, device, st_async)
        if self.striped:
            clusters = device.has_clusters
            tiles = striped_forward_tiles(self.columns, self.added, clusters, most_blocks)
            return next((it for it in tiles if self._has_room(it, device)), None), None
        if tile := self._shared_memory_tile(device):
            return tile, None
        if found := self._stream(device, most_blocks):
            return found
        if not self.centred and self.cast is None:
            tile = self._row_tile(device, large_block=True)
        return tile or self._row_tile(device), None

    def _shared_memory_tile(self, device: _launch.Limits) -> Tile | None:
        """How the rows of :data:`IN_SHARED_MEMORY` are spread; None for other rows."""
        sizes = {SIZES[it] for it in (self.x, self.weight, self.bias, self.output)}
        vec = vector_width(self.columns, SIZES[self.x])
        plain = not self.added and self.cast is None and sizes == {2} and vec == 8
        if not (plain and device.has_clusters):
            return None
        for centred, columns, team, vecs, blocks in IN_SHARED_MEMORY:
            if self.centred is not centred or self.columns not in columns:
                continue
            tile = team_tile(self.columns // vec, vec, vecs, (team,))
            if tile is not None:
                block = tile.kept(2) + self.exchanged(tile) + SHARED_PER_BLOCK
                fits = blocks * block <= device.shared_per_multiprocessor
                return replace(tile, blocks=blocks) if fits else None
        return None

    def _row_tile(self, device: _launch.Limits, large_block: bool = False) -> Tile | None:
        """How rows are spread where a group has one each; None if they do not fit."""
        others = max(SIZES[self.weight], SIZES[self.bias], SIZES[self.output])
        clusters = device.has_clusters
        resident = 1280 if self.cast is None else 1536
        tile = forward_tile(self.columns, SIZES[self.x], others, clusters, large_block, resident)
        return tile if tile and self._has_room(tile, device) else None

    def _has_room(self, tile: Tile, device: _launch.Limits) -> bool:
        """Whether a block's part of a row fits into shared memory."""
        return tile.kept(*self.row_sizes) + self.exchanged(tile) <= device.shared_per_block

    @property
    def casts_blocks(self) -> bool:
        """Whether a row is cast in blocks with a scale each."""
        recipe = None if self.cast is None else self.cast.recipe
        return recipe is not None and recipe.width > 0

    def span(self, tile: Tile) -> int:
        """How many neighbouring columns a thread casts of a row in shared memory.

        Two vectors if blocks have scales, so that fewer threads share a scale, provided that rows
        have an even number of vectors and a block has several warps and one row at a time.
        """
        sizes = {SIZES[self.x], SIZES[self.weight], SIZES[self.bias]}
        even = tile.vecs % 2 == 0 and self.columns % (2 * tile.vec) == 0
        whole = {tile.vec * size for size in sizes} == {16}
        alone = tile.lanes > 32 and tile.cluster == 1
        return 2 * tile.vec if self.casts_blocks and even and whole and alone else tile.vec

    def _cast_as(self, device: _launch.Limits) -> CastAs | None:
        """The entry of :data:`CAST_AS` for these rows; None for other rows."""
        sizes = {SIZES[it] for it in (self.x, self.weight, self.bias)}
        half = sizes == {2} and self.columns % 8 == 0 and self.columns >= CAST_NARROWEST
        if self.cast in (None, STATISTICS) or self.added or not half or not device.has_clusters:
            return None
        ways = CAST_AS[self.centred, self.casts_blocks]
        return next((it for it in ways if self.columns <= it.widest), None)

    def _casts_one_row(self, device: _launch.Limits) -> bool:
        """Whether a block casts one row and ends, where that was faster than looping over rows with
        the parameters in registers.
        """
        tile = self._row_tile(device)
        if tile is None or tile.cluster > 1:
            return False
        if self.cast == STATISTICS:
            return True
        if self.added:
            return tile.lanes > 32 or self.casts_blocks
        if self.centred or tile.lanes > 256 or not tile.fills(self.columns):
            return False
        return (
            tile.held * tile.lanes > 512
            if self.casts_blocks
            else tile.lanes > 32 and tile.vecs == 4
        )

    def exchanged(self, tile: Tile) -> int:
        """Bytes through which warps exchange a row's statistics, and separately its amax."""
        values = 3 if self.centred else 1
        if self.cast is not None and self.cast.amax:
            values *= 2
        return exchange_bytes(tile, values, SIZES[self.x])

    def pieces(self, device: _launch.Limits) -> tuple[Tile, Piece, int] | None:
        """The tile of a row whose blocks exchange sums through memory, its piece, and the bytes of
        shared memory of a block; None for other rows, and if they do not fit.
        """
        sizes = {SIZES[it] for it in (self.x, self.weight, self.bias, self.output)}
        found = pieces_for(FORWARD_PIECES.get((self.centred, self.added), ()), self.columns)
        if not found or self.cast is not None or sizes != {2} or self.columns % 8:
            return None
        tile, piece = next((it for it in found if it[0].fills(self.columns)), found[-1])
        parameters = SIZES[self.weight] + (SIZES[self.bias] if self.centred else 0)
        kept = 0 if piece.holds else tile.kept(parameters)
        shared = room_for_pieces(tile, self.row_sizes, self.sums, device, piece.stages, kept)
        return None if shared is None else (tile, piece, shared)

    def _stream(self, device: _launch.Limits, most_blocks: int) -> tuple[Tile, Pipelining] | None:
        """How long rows are spread and pipelined in forward_stream; None for other rows."""
        if not device.has_clusters:
            return None
        x_size = SIZES[self.x]
        others = max(SIZES[self.weight], SIZES[self.bias], SIZES[self.output])
        longer = STREAM_VECTORS_ADDED if self.added else STREAM_VECTORS_GAMMA_ALONE
        if self.centred:
            longer = STREAM_VECTORS
        teams: tuple[Team, ...] = STREAM_TEAMS
        most, resident = 2, 1024
        if self.cast is not None:
            if self._casts_one_row(device):
                return None
            longer, most, resident = STREAM_VECTORS_CAST, 4, CAST_RESIDENT
            teams = CAST_WARPS if self.centred or self.casts_blocks else CAST_TEAMS
            if self.centred or self.added:
                teams = (*teams, LARGE_CAST_TEAM)
        elif self.centred and self.columns // vector_width(self.columns, x_size) > LONG_LAYER:
            teams, most, resident = LONG_LAYER_TEAMS, 4, 512
        elif self.added:
            teams = (*teams, LARGE_STREAM_TEAM)
        teams = tuple(team for team in teams if team[1] <= most_blocks)
        tile = stream_tile(self.columns, x_size, others, longer, resident, teams, most)
        if tile is None:
            return None
        widths = ASYNC_LAYER_FORWARD if self.centred else ASYNC_RMS_FORWARD
        st_async = self.columns // tile.vec in widths
        if self.cast is not None:
            st_async = self.centred or self.added or self.casts_blocks
            if not st_async and tile.cluster > 1:  # the wait outweighs the work: twice the blocks
                tile = with_blocks(tile, 1024)
                st_async = tile.blocks == 1  # of 1,024 threads
        found = self._pipelining(tile, device, st_async)
        return (tile, found) if found else None

    def _pipelining(self, tile: Tile, device: _launch.Limits, st_async: bool) -> Pipelining | None:
        """How rows are pipelined where blocks loop over them; None if not even two fit."""
        stage_bytes = tile.kept(*self.row_sizes)
        kept = self.exchanged(tile)
        found = pipelining(tile, stage_bytes, kept, device, STREAM_STAGES, st_async)
        return found if found.stages > 1 else None


@dataclass(frozen=True, slots=True)
class BackwardKey:
    """What a backward's kernels depend on, beside the device.

    ``add`` is the dtype of the gradient that is added to the input's gradient, if any; ``few``:
    whether there are no more rows than FEW_ROWS.
    """

    columns: int
    access: int
    x: torch.dtype
    dy: torch.dtype
    gamma: torch.dtype
    centred: bool
    zero_centred: bool
    add: torch.dtype | None = None
    few: bool = False

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Bytes of an element of each tensor of rows; the added gradient's last."""
        tensors = (self.x, self.dy) if self.add is None else (self.x, self.dy, self.add)
        return tuple(SIZES[it] for it in tensors)

    @property
    def striped(self) -> bool:
        """Whether rows are striped: see :class:`Tile`."""
        return is_striped(self.columns, SIZES[self.gamma], *self.row_sizes)

    @property
    def other_size(self) -> int:
        """Bytes of the widest element of the tensors other than the input."""
        return max(SIZES[self.gamma], *self.row_sizes[1:])

    @property
    def sums(self) -> int:
        """How many sums over a row the gradient needs."""
        return 2 if self.centred else 1

    def defines(self) -> dict[str, str | int]:
        """As macros."""
        return {
            "TX": NAMES[self.x],
            "TDY": NAMES[self.dy],
            "TW": NAMES[self.gamma],
            "TADD": NAMES[self.add or self.x],
            "CENTRED": int(self.centred),
            "ADDED": int(self.add is not None),
            "ACCESS": self.access,
        }


def forward_source(
    key: ForwardKey,
    device: _launch.Limits,
    most_blocks: int = LARGEST_CLUSTERS[0],
    through_memory: bool = True,
) -> tuple[Specialisation, _launch.Geometry, int, int]:
    """The kernel of a forward, its geometry, the rows that a group of blocks has at a time, and
    the blocks of a group.

    ``most_blocks``: the most blocks of a cluster. ``through_memory``: whether blocks that form no
    cluster may exchange sums.
    """
    tile, way = key.spread(device, most_blocks)
    defines: dict[str, str | int] = {
        "TX": NAMES[key.x],
        "TY": NAMES[key.output] if key.cast is None else "unsigned char",
        "TW": NAMES[key.weight],
        "TB": NAMES[key.bias],
        "CENTRED": int(key.centred),
        "ZERO_CENTRED": int(key.zero_centred),
        "BIASED": int(key.centred and key.biased and key.cast != STATISTICS),
        "ADDED": int(key.added),
        "ACCESS": key.access,
        **({"CAST": 0, "AMAX": 0} if key.cast is None else key.cast.defines()),
    }
    arguments = "PPPPPPPPqqqi" + 2 * real(key.x)
    if through_memory and (found := key.pieces(device)):
        tile, piece, shared = found
        geometry = _launch.Geometry(
            tile.threads, arguments + "QP", shared, carveout=100, together=tile.cluster
        )
        main = {**defines, **tile.defines(key.columns)}
        main |= {"STAGES": piece.stages, "HOLD_GAMMA": int(piece.holds)}
        return _source("forward_pieces", main), geometry, tile.rows, tile.cluster
    if key.cast is not None:
        arguments += "P" if key.cast.recipe is None else "PPPPf"
    if tile is None:
        wide = {"VEC": vector_width(key.columns, SIZES[key.x]), "LANES": WIDE_LANES}
        geometry = _launch.Geometry(WIDE_LANES, arguments)
        return _source("forward_wide", {**defines, **wide}), geometry, 1, 1
    shared = tile.kept(*key.row_sizes)
    if way is not None:
        depth, st_async = way
        main = {**defines, **tile.defines(key.columns), "STAGES": depth, "EXCHANGE": int(st_async)}
        # With two rows in flight, a row that other threads read too is free too late for the next.
        main["SPAN"] = key.span(tile) if depth > 2 else tile.vec
        geometry = _launch.Geometry(
            tile.threads, arguments, depth * shared, tile.cluster, carveout=100
        )
        return _source("forward_stream", main), geometry, tile.rows, tile.cluster
    # With room for beta even if there is none, so that rows are spread alike.
    parameters = tile.kept(SIZES[key.weight], *([SIZES[key.bias]] if key.centred else []))
    ahead = (shared + parameters) * 1024 <= device.shared_per_multiprocessor * tile.threads
    ahead = ahead and shared + parameters + key.exchanged(tile) <= device.shared_per_block
    ahead = ahead and key.cast != STATISTICS  # needs no parameters
    ahead = ahead and not tile.striped  # the copies would reach beyond gamma and beta
    if key.centred and key.cast is None and device.has_clusters and tile.cluster == 1:
        ahead = ahead and key.columns * SIZES[key.x] <= MOST_AHEAD
    span = key.span(tile) if ahead and SIZES[key.x] == 2 else tile.vec
    main = {**defines, **tile.defines(key.columns), "AHEAD": int(ahead), "SPAN": span}
    shared += parameters if ahead else 0
    # As much shared memory as a multiprocessor's blocks use; the rest is L1.
    resident = (2048 if tile.held * SIZES[key.x] <= 32 else 1280) // tile.threads
    filled = max(tile.blocks, resident) * (shared + SHARED_PER_BLOCK)
    carveout = min(100, -(-100 * filled // device.shared_per_multiprocessor))
    geometry = _launch.Geometry(tile.threads, arguments, shared, tile.cluster, carveout=carveout)
    return _source("forward", main), geometry, tile.rows, tile.cluster


class Forward:
    """A forward's kernel on a device."""

    __slots__ = ("_resident", "cluster", "kernel", "rows", "share", "through_memory")

    def __init__(self, key: ForwardKey, device: int) -> None:
        for way in EXCHANGE_OPTIONS:
            source, geometry, self.rows, self.cluster = forward_source(
                key, _launch.limits(device), *way
            )
            if runs_clusters(source, geometry, device):
                break
        self.through_memory = geometry.together > 1
        self.kernel = _launch.load(source, geometry, device)
        self.share = 1.0 / key.columns
        self._resident = 0
        persistent = source.kernel in ("forward_stream", "forward_pieces")
        if self.cluster > 1 or persistent:
            resident = require_clusters(self.kernel, key.columns)
            self._resident = resident if persistent else 0

    def amaxes(self, rows: int) -> int:
        """How many amaxes are written: one for each row, or for a group's rows."""
        return self._groups(rows) if self._resident else rows

    def _groups(self, rows: int) -> int:
        teams = -(-rows // self.rows)
        return groups_of(teams, self._resident) if self._resident else teams

    def __call__(self, rows: int, *values: Any) -> None:
        """Launch; ``values`` are the kernel's arguments up to mu and rsigma, then the rest."""
        groups = self._groups(rows)
        epochs = (-(-rows // groups),) if self.through_memory else ()
        self.kernel.launch(groups * self.cluster, 1, *values, *epochs)


def forward_of(key: ForwardKey, device: int) -> Forward:
    """The kernel; made by the first call."""
    plan_key = (device, key)
    return _forwards.get(plan_key) or _forwards.get_or_create(
        plan_key, lambda: Forward(key, device)
    )


def _planned(
    kernel: str, key: BackwardKey, tile: Tile, shared_bytes: int, own: dict[str, str | int]
) -> Planned:
    """A backward's kernel with a tile; ``own``: the kernel's own macros."""
    defines = {**key.defines(), "ZERO_CENTRED": int(key.zero_centred), **tile.defines(key.columns)}
    arguments = "PPPPPPPPqqqqi" + real(key.x)
    geometry = _launch.Geometry(tile.threads, arguments, shared_bytes, tile.cluster, carveout=100)
    return _source(kernel, {**defines, **own}), geometry


def memory_source(key: BackwardKey, device: _launch.Limits) -> tuple[Planned, Tile] | None:
    """The kernel of rows whose blocks exchange sums through memory, and their tile; None for other
    rows, and if they do not fit.
    """
    whole = key.striped or key.columns % 8 == 0
    if SIZES[key.x] != 2 or key.other_size != 2 or not whole:
        return None
    pieces = BACKWARD_PIECES[key.centred, key.add is not None, key.striped]
    found = pieces_for(pieces, key.columns)
    if not found:
        return None
    tile, piece = min(found, key=lambda it: it[0].room)
    shared = room_for_pieces(tile, key.row_sizes, key.sums, device, piece.stages)
    if shared is None:
        return None
    own: dict[str, str | int] = {
        "STAGES": piece.stages,
        "EXCHANGE": EXCHANGE_THROUGH_MEMORY,
        "SHARED_DBETA": 0,
        "OVERLAP": 1,
        "LATE_ADD": 0,
        "HOLD_GAMMA": 1,
    }
    source, geometry = _planned("backward", key, tile, shared, own)
    arguments = geometry.arguments + "QP"
    return (source, replace(geometry, cluster=1, together=tile.cluster, arguments=arguments)), tile


def registers_source(key: BackwardKey, device: _launch.Limits) -> tuple[Planned, Tile] | None:
    """The kernel of rows that are kept in registers, and their tile; None for other rows."""
    size = SIZES[key.x]
    vec = vector_width(key.columns, size)
    if not device.has_clusters or vec < 8 or size != 2 or key.other_size != 2:
        return None
    sort = (key.centred, key.add is not None)
    rows = (it for it in IN_REGISTERS if it[:2] == sort and key.columns in it.columns)
    found = next(rows, None)
    if found is None:
        return None
    if key.few and found.kernel == "backward_pairs":
        found = found._replace(kernel="backward_registers", stages=1)
    vecs = -(-key.columns // (vec * found.lanes))
    tile = Tile(vec, vecs, found.lanes, blocks=found.blocks)
    stage_bytes = found.batch * tile.kept(*key.row_sizes)
    kept = exchange_bytes(tile, found.batch * key.sums, size)
    depth = pipelining(tile, stage_bytes, kept, device, found.stages, False).stages
    pairs = found.kernel == "backward_pairs"
    if depth < 1 + pairs:  # a pair exchanges its sums in two stages
        return None
    own: dict[str, str | int] = (
        {"STAGES": depth} if pairs else {"STAGES": depth, "BATCH": found.batch}
    )
    source, geometry = _planned(found.kernel, key, tile, depth * stage_bytes, own)
    return (source, replace(geometry, cluster=1 + pairs)), tile


def shared_source(
    key: BackwardKey, device: _launch.Limits, most_blocks: int
) -> tuple[Planned, Tile] | None:
    """The kernel of rows that are kept in shared memory, and their tile; None if none fits."""
    clusters = device.has_clusters
    tiles: Iterable[Tile | None]
    if key.striped:
        tiles = striped_backward_tiles(key.columns, key.centred, clusters, most_blocks)
    else:
        size = SIZES[key.x]
        tiles = [
            backward_tile(key.columns, size, key.other_size, key.centred, clusters, most_blocks)
        ]
    found = ((_shared_source(key, device, tile), tile) for tile in tiles if tile)
    return next(((planned, tile) for planned, tile in found if planned), None)


def _shared_source(key: BackwardKey, device: _launch.Limits, tile: Tile) -> Planned | None:
    """The kernel of rows that are spread by a tile; None if there is no room for one."""
    size = SIZES[key.x]
    # dbeta is kept out of the registers in clusters with 512 threads a block, of which two then fit
    # on a multiprocessor, and with 1,024. With 4 blocks of 512 the compiler would spill.
    long = tile.vec == 8 and tile.lanes * tile.cluster > 2048
    shared_dbeta = key.centred and long
    # With the added gradient in shared memory too, one row less would be in flight.
    late_add = key.add is not None and long and key.other_size == 2 and tile.cluster <= 8
    # Where shared memory is short, gamma is kept in registers if there are some left.
    hold_gamma = shared_dbeta or (tile.threads > 512 and not late_add)
    stage_bytes = tile.kept(*key.row_sizes[: 2 if late_add else None])
    gamma_bytes = 0 if hold_gamma else tile.kept(SIZES[key.gamma])
    if shared_dbeta:
        gamma_bytes = replace(tile, striped=False).kept(max(4, size))
    st_async = key.columns // tile.vec in (
        ASYNC_LAYER_BACKWARD if key.centred else ASYNC_RMS_BACKWARD
    )
    kept = gamma_bytes + exchange_bytes(tile, key.sums, size)
    depth, st_async = pipelining(tile, stage_bytes, kept, device, MOST_STAGES, st_async)
    if not depth:
        return None
    # A single sum behind a block barrier is not worth one row less in flight.
    overlap = depth > 2 and (tile.cluster > 1 or key.centred)
    own: dict[str, str | int] = {
        "STAGES": depth,
        "EXCHANGE": int(st_async and overlap),  # without overlap it takes half as long again
        "SHARED_DBETA": int(shared_dbeta),
        "OVERLAP": int(overlap),
        "LATE_ADD": int(late_add),
        "HOLD_GAMMA": int(hold_gamma),
    }
    return _planned("backward", key, tile, depth * stage_bytes + gamma_bytes, own)


def backward_sources(
    key: BackwardKey,
    device: _launch.Limits,
    most_blocks: int = LARGEST_CLUSTERS[0],
    through_memory: bool = True,
) -> tuple[list[Planned], Tile | None]:
    """The kernels that read the rows, in their order; and the tile, unless the row is too wide.

    ``most_blocks``: the most blocks of a cluster. ``through_memory``: whether blocks that form no
    cluster may exchange sums.
    """
    found = memory_source(key, device) if through_memory else None
    found = found or registers_source(key, device) or shared_source(key, device, most_blocks)
    if found is not None:
        return [found[0]], found[1]
    columns = {**key.defines(), "VEC": vector_width(key.columns, SIZES[key.x])}
    rows = {**columns, "ZERO_CENTRED": int(key.zero_centred), "LANES": WIDE_LANES}
    columns["LANES"] = COLUMN_LANES
    return [
        (
            _source("backward_rows", rows),
            _launch.Geometry(WIDE_LANES, "PPPPPPPqqqqi" + real(key.x)),
        ),
        (_source("backward_columns", columns), _launch.Geometry(COLUMN_LANES, "PPPPPqqqi")),
    ], None


class Backward:
    """A backward's kernels on a device."""

    __slots__ = (
        "_at_once",
        "_blocks",
        "_columns",
        "_kernels",
        "_resident",
        "_share",
        "_tile",
        "_total",
        "_vec",
        "_wide_blocks",
        "through_memory",
    )

    def __init__(self, key: BackwardKey, device: int) -> None:
        limits = _launch.limits(device)
        for way in EXCHANGE_OPTIONS:
            sources, self._tile = backward_sources(key, limits, *way)
            if runs_clusters(*sources[0], device):
                break
        self.through_memory = sources[0][1].together > 1
        self._kernels = [_launch.load(*source, device) for source in sources]
        self._total = SumOfGroups(
            key.columns, math_dtype(key.x), key.gamma, device, results=1 + key.centred
        )
        self._columns = key.columns
        self._share = 1.0 / key.columns
        self._vec = vector_width(key.columns, SIZES[key.x])
        self._wide_blocks = limits.multiprocessors
        self._resident = self._at_once = self._blocks = 0
        if self._tile is not None:
            source, geometry = sources[0]
            # Of a group, which writes one partial sum; the blocks of a pair have a row each.
            self._blocks = max(self._tile.cluster, geometry.cluster)
            rows = self._tile.rows * self._blocks // self._tile.cluster
            self._at_once = rows * int(dict(source.defines).get("BATCH", 1))
            self._resident = require_clusters(self._kernels[0], key.columns)

    def groups(self, rows: int) -> int:
        """How many partial sums of each parameter's gradient there are."""
        if self._tile is not None:
            return groups_of(-(-rows // self._at_once), self._resident)
        column_blocks = -(-self._columns // (COLUMN_LANES * self._vec))
        return max(1, min(rows, 65535, 8 * self._wide_blocks // column_blocks))

    def __call__(
        self,
        pointers: tuple[int, int, int, int, int, int, int],
        partial: int,
        gradients: tuple[int, int],
        rows: int,
        strides: tuple[int, int, int],
        groups: int,
    ) -> None:
        """Launch.

        Args:
            pointers: of dy, x, the added gradient (or 0), mu, rsigma, gamma and dx.
            partial: pointer to the workspace.
            gradients: pointers of dgamma and dbeta.
            rows: N.
            strides: elements between rows of dy, of x and of the added gradient.
            groups: what :meth:`groups` returns.
        """
        columns = self._columns
        if self._tile is not None:
            epochs = (-(-rows // groups),) if self.through_memory else ()
            self._kernels[0].launch(
                groups * self._blocks,
                1,
                *pointers,
                partial,
                rows,
                *strides,
                columns,
                self._share,
                *epochs,
            )
        else:
            self._kernels[0].launch(rows, 1, *pointers, rows, *strides, columns, self._share)
            blocks = -(-columns // (COLUMN_LANES * self._vec))
            read = (*pointers[:2], *pointers[3:5])
            self._kernels[1].launch(blocks, groups, *read, partial, rows, *strides[:2], columns)
        self._total(partial, *gradients, groups)


_forwards: Plans[Forward] = Plans()
_backwards: Plans[Backward] = Plans()


def representative_sources(
    device: _launch.Limits,
) -> Iterator[tuple[Specialisation, _launch.Geometry]]:
    """Kernels of every kind, type and shape that the operators use on such a device.

    For compiling ahead, and for the test that each of them compiles.
    """
    widths = (1, 129, 1024, 2052, 4096, 5003, 8192, 32768, 50_257, 65536, 262144, 2**21)
    low, full, double, half = torch.bfloat16, torch.float32, torch.float64, torch.float16
    dtypes = {width: [(low, low, low)] for width in widths}
    dtypes[4096] += [(full, full, full), (low, full, full), (full, low, low), (half, half, half)]
    dtypes[1024] += [(double, double, double), (half, full, double), (double, low, half)]
    for columns, combinations in dtypes.items():
        for x, other, weight in combinations:
            access = vector_width(columns, SIZES[x])
            for centred in (False, True):
                forward = ForwardKey(columns, access, x, weight, weight, other, centred, False)
                yield forward_source(forward, device)[:2]
                backward = BackwardKey(columns, access, x, other, weight, centred, False)
                yield from backward_sources(backward, device)[0]
                for few in (False, True):
                    yield sum_source(columns, math_dtype(x), weight, device, 1 + centred, few)
            added = ForwardKey(columns, access, x, weight, weight, other, False, False, True)
            yield forward_source(added, device)[:2]
            added_back = BackwardKey(columns, access, x, other, weight, False, False, weight)
            yield from backward_sources(added_back, device)[0]
    for columns in (2560, 3072, 5120, 7168, 9216, 20480, 33000, 40960, 151_936):
        yield forward_source(ForwardKey(columns, 8, low, low, low, low, True, False), device)[:2]
        for centred, add, few in (
            (False, None, False),
            (False, low, False),
            (True, None, False),
            (True, None, True),
        ):
            backward = BackwardKey(columns, 8, low, low, low, centred, False, add, few)
            yield from backward_sources(backward, device)[0]
    for columns in (4096, 65536, 131_072, 2**21):
        plain = ForwardKey(columns, 8, low, low, low, low, True, False, biased=False)
        yield forward_source(plain, device)[:2]
    for columns in (20480, 65536):  # of four bytes, in a cluster
        yield forward_source(ForwardKey(columns, 4, *(full,) * 4, True, False), device)[:2]
    for gamma, centred in ((low, False), (low, True), (full, True)):  # blocks of a cluster
        backward = BackwardKey(65536, 8, low, low, gamma, centred, False, low)
        yield from backward_sources(backward, device, through_memory=False)[0]
    for access in (1, 2, 4):  # misaligned memory
        yield forward_source(ForwardKey(64, access, low, full, low, low, True, True), device)[:2]
        yield from backward_sources(BackwardKey(64, access, low, low, full, True, True), device)[0]


# --------------------------------------------------------------------------- operators


def _forward(
    op: Contract[..., Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: Any,
    zero_centered_gamma: Any,
    out_dtype: Any,
    centred: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """(output, mu, rsigma), or with a residual (output, sum, rsigma); None if this set does not
    take the arguments.
    """
    if not (
        (type(input) in PLAIN or is_plain(input))
        and (type(weight) in PLAIN or is_plain(weight))
        and on_device(input)
        and (dtype := input.dtype) in NAMES
        and (weight_dtype := weight.dtype) in NAMES
        and (shape := input.shape)
        and 0 < (columns := shape[-1]) <= MOST_COLUMNS
        and weight.shape == (columns,)
        and weight.get_device() == (device := input.get_device())
        and (type(eps) is float or is_number(eps))
        and eps >= 0
        and (zero_centered_gamma is False or zero_centered_gamma is True)
        and (out_dtype is None or (type(out_dtype) is torch.dtype and out_dtype in NAMES))
    ):
        return None
    bias_dtype = weight_dtype
    if bias is not None and not (
        (type(bias) in PLAIN or is_plain(bias))
        and (bias_dtype := bias.dtype) in NAMES
        and bias.shape == (columns,)
        and bias.get_device() == device
    ):
        return None
    added = residual is not None
    if residual is not None and not (
        (type(residual) in PLAIN or is_plain(residual))
        and residual.dtype == dtype
        and residual.shape == shape
        and residual.get_device() == device
    ):
        return None
    other = other_stride = 0
    try:
        input, stride = dense_rows(input)
        weight = contiguous(weight)
        x, gamma, beta = input.data_ptr(), weight.data_ptr(), 0
        if bias is not None:
            bias = contiguous(bias)
            beta = bias.data_ptr()
        if residual is not None:
            residual, other_stride = dense_rows(residual)
            other = residual.data_ptr()
    except RuntimeError as error:
        raise no_memory(op, error) from None

    size = SIZES[dtype]
    access = vector_width(columns, size)
    if (x | gamma | beta | other | (stride | other_stride) * size) & 15:
        parts = (x, stride * size, other, other_stride * size)
        others = ((gamma, SIZES[weight_dtype]), (beta, SIZES[bias_dtype]))
        access = access_width(access, *((part, size) for part in parts), *others)
    out = out_dtype or dtype
    key = (
        device,
        columns,
        access,
        dtype,
        weight_dtype,
        bias_dtype,
        out,
        centred,
        zero_centered_gamma,
        added,
        None,
        bias is not None,
    )
    plan = _forwards.get(key) or _forwards.get_or_create(
        key, lambda: Forward(ForwardKey(*key[1:]), device)
    )

    place = input.device
    statistics = torch.float64 if size == 8 else torch.float32
    rows = input.numel() // columns
    empty = allocator(place)
    if out == dtype and stride == columns and type(input) is Tensor and input.is_contiguous():
        output = empty(tuple(shape), input.stride(), out)
    else:
        output = torch.empty(shape, dtype=out, device=place)
    rsigma = empty((rows,), (1,), statistics)
    mu = empty((rows,), (1,), statistics) if centred else None
    total = torch.empty(shape, dtype=dtype, device=place) if added else None
    if rows:
        if type(output) is not Tensor:
            raise no_memory(op, None)
        plan(
            rows,
            x,
            other,
            gamma,
            beta,
            output.data_ptr(),
            0 if total is None else total.data_ptr(),
            0 if mu is None else mu.data_ptr(),
            rsigma.data_ptr(),
            rows,
            stride,
            other_stride,
            columns,
            plan.share,
            eps,
        )
    return output, mu if total is None else total, rsigma


def _backward(
    op: Contract[..., Any],
    dy: Tensor,
    x: Tensor,
    mu: Tensor | None,
    rsigma: Tensor,
    gamma: Tensor,
    zero_centered_gamma: Any,
    add: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """(dx, dgamma, dbeta); None if this set does not take the arguments."""
    if not (
        (type(x) in PLAIN or is_plain(x))
        and (type(dy) in PLAIN or is_plain(dy))
        and (type(gamma) in PLAIN or is_plain(gamma))
        and on_device(x)
        and (dtype := x.dtype) in NAMES
        and (dy_dtype := dy.dtype) in NAMES
        and (gamma_dtype := gamma.dtype) in NAMES
        and (shape := x.shape)
        and 0 < (columns := shape[-1]) <= MOST_COLUMNS
        and dy.shape == shape
        and gamma.shape == (columns,)
        and gamma.get_device() == (device := x.get_device())
        and dy.get_device() == device
        and (zero_centered_gamma is False or zero_centered_gamma is True)
    ):
        return None
    size = SIZES[dtype]
    statistics = torch.float64 if size == 8 else torch.float32
    rows = x.numel() // columns
    saved = (rsigma,) if mu is None else (rsigma, mu)
    for value in saved:
        if not (
            (type(value) in PLAIN or is_plain(value))
            and value.dtype == statistics
            and value.shape == (rows,)
            and value.get_device() == device
        ):
            return None
    add_dtype = None
    add_address = add_stride = 0
    if add is not None and not (
        (type(add) in PLAIN or is_plain(add))
        and (add_dtype := add.dtype) in NAMES
        and add.shape == shape
        and add.get_device() == device
    ):
        return None
    try:
        x, x_stride = dense_rows(x)
        dy, dy_stride = dense_rows(dy)
        if add is not None:
            add, add_stride = dense_rows(add)
            add_address = add.data_ptr()
        gamma = contiguous(gamma)
        rsigma = contiguous(rsigma)
        addresses = (dy.data_ptr(), x.data_ptr(), gamma.data_ptr(), rsigma.data_ptr())
        mu_address = 0
        if mu is not None:
            mu = contiguous(mu)
            mu_address = mu.data_ptr()
    except RuntimeError as error:
        raise no_memory(op, error) from None

    dy_size = SIZES[dy_dtype]
    x_row, dy_row = x_stride * size, dy_stride * dy_size
    access = vector_width(columns, size)
    add_size = 0 if add_dtype is None else SIZES[add_dtype]
    add_row = add_stride * add_size
    read = addresses[0] | addresses[1] | addresses[2] | add_address
    if (read | x_row | dy_row | add_row) & 15:
        access = access_width(
            access,
            (add_address, add_size or 1),
            (add_row, add_size or 1),
            (addresses[0], dy_size),
            (dy_row, dy_size),
            (addresses[1], size),
            (x_row, size),
            (addresses[2], SIZES[gamma_dtype]),
        )
    place = x.device
    centred = mu is not None
    dx = torch.empty(shape, dtype=dtype, device=place)
    empty = allocator(place)
    dgamma = empty((columns,), (1,), gamma_dtype)
    dbeta = empty((columns,), (1,), gamma_dtype) if centred else None
    if not rows:
        dgamma.zero_()
        if dbeta is not None:
            dbeta.zero_()
    else:
        if type(dx) is not Tensor:
            raise no_memory(op, None)
        key = (
            device,
            columns,
            access,
            dtype,
            dy_dtype,
            gamma_dtype,
            centred,
            zero_centered_gamma,
            add_dtype,
            rows <= FEW_ROWS,
        )
        plan = _backwards.get(key) or _backwards.get_or_create(
            key, lambda: Backward(BackwardKey(*key[1:]), device)
        )
        groups = plan.groups(rows)
        outputs = 2 if centred else 1
        partial = empty((outputs * groups * columns,), (1,), statistics)
        plan(
            (
                *addresses[:2],
                add_address,
                mu_address,
                addresses[3],
                addresses[2],
                dx.data_ptr(),
            ),
            partial.data_ptr(),
            (dgamma.data_ptr(), 0 if dbeta is None else dbeta.data_ptr()),
            rows,
            (dy_stride, x_stride, add_stride),
            groups,
        )
    return dx, dgamma, dbeta


@repeating
def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``ops.rmsnorm_fwd``: (output, rsigma)."""
    found = _forward(
        ops.rmsnorm_fwd, input, weight, None, eps, zero_centered_gamma, out_dtype, False
    )
    if found is None:
        decline(
            ops.rmsnorm_fwd,
            input,
            weight,
            eps,
            zero_centered_gamma=zero_centered_gamma,
            out_dtype=out_dtype,
        )
    return found[0], found[2]


@repeating
def rmsnorm_fwd_add(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``ops.rmsnorm_fwd_add``: (output, sum, rsigma)."""
    options = (eps, zero_centered_gamma, out_dtype)
    found = None
    if is_plain(residual):
        found = _forward(ops.rmsnorm_fwd_add, input, weight, None, *options, False, residual)
    if found is None or found[1] is None:
        decline(
            ops.rmsnorm_fwd_add,
            input,
            residual,
            weight,
            eps,
            zero_centered_gamma=zero_centered_gamma,
            out_dtype=out_dtype,
        )
    return found[0], found[1], found[2]


@repeating
def rmsnorm_bwd(
    dy: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """``ops.rmsnorm_bwd``: (dx, dgamma)."""
    found = _backward(ops.rmsnorm_bwd, dy, x, None, rsigma, gamma, zero_centered_gamma)
    if found is None:
        decline(ops.rmsnorm_bwd, dy, x, rsigma, gamma, zero_centered_gamma=zero_centered_gamma)
    return found[0], found[1]


@repeating
def rmsnorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """``ops.rmsnorm_bwd_add``: (dx, dgamma)."""
    found = None
    if is_plain(add):
        found = _backward(ops.rmsnorm_bwd_add, dz, x, None, rsigma, gamma, zero_centered_gamma, add)
    if found is None:
        decline(
            ops.rmsnorm_bwd_add,
            dz,
            x,
            add,
            rsigma,
            gamma,
            zero_centered_gamma=zero_centered_gamma,
        )
    return found[0], found[1]


@repeating
def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``ops.layernorm_fwd``: (output, mu, rsigma)."""
    found = _forward(
        ops.layernorm_fwd, input, weight, bias, eps, zero_centered_gamma, out_dtype, True
    )
    if found is None or found[1] is None:
        decline(
            ops.layernorm_fwd,
            input,
            weight,
            bias,
            eps,
            zero_centered_gamma=zero_centered_gamma,
            out_dtype=out_dtype,
        )
    return found[0], found[1], found[2]


@repeating
def layernorm_bwd(
    dy: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``ops.layernorm_bwd``: (dx, dgamma, dbeta)."""
    found = _backward(ops.layernorm_bwd, dy, x, mu, rsigma, gamma, zero_centered_gamma)
    if found is None or found[2] is None:
        decline(
            ops.layernorm_bwd, dy, x, mu, rsigma, gamma, zero_centered_gamma=zero_centered_gamma
        )
    return found[0], found[1], found[2]
