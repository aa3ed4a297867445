"""How the columns of a row are spread over threads, for the families that work by rows.

Which threads hold which columns follows from the columns and the dtypes alone, so a row's result
does not depend on the number of rows or their addresses. ``include/rows.cuh`` is the kernels' side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from transformer_engine_fl.backends.vendor.cuda import _launch
from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.core.errors import NotSupportedError

__all__ = [
    "CLUSTERS",
    "COUNTER_BYTES",
    "EXCHANGE_OPTIONS",
    "LARGEST_CLUSTERS",
    "SHARED_PER_BLOCK",
    "STRIPED_FOURS",
    "WARPS",
    "Piece",
    "Pieces",
    "Pipelining",
    "Team",
    "Tile",
    "exchange_bytes",
    "groups_of",
    "is_striped",
    "pieces_for",
    "pipelining",
    "require_clusters",
    "room_for_pieces",
    "runs_clusters",
    "striped_tile",
    "team_tile",
    "warp_tile",
    "with_blocks",
]

STRIPED: Final = 8
"""Elements of a striped vector, of rows of half precision that may begin at any address."""

STRIPED_FOURS: Final = 8193
"""Columns from which rows that divide into vectors of four are striped too, by default: narrower
rows were faster in vectors of four."""

SHARED_PER_BLOCK: Final = 1024
"""Bytes of shared memory that the system reserves for each block."""

COUNTER_BYTES: Final = 16
"""Bytes of a block's mbarriers, which count what other blocks send (``cluster_exchange.cuh``)."""

LARGEST_CLUSTERS: Final = (16, 8)
"""Blocks of the largest cluster: that most devices support, and that all with clusters do."""

Team = tuple[int, int]
"""(threads of a block that share a row, blocks that share it)."""

WARPS: Final[tuple[Team, ...]] = tuple((lanes, 1) for lanes in range(32, 513, 32))
"""Single blocks of whole warps, of up to 512 threads."""

CLUSTERS: Final[tuple[Team, ...]] = ((256, 2), (256, 4), (256, 8), (256, 16), (512, 8))
"""Clusters for wider striped rows; the last is for the widest where clusters of 16 blocks are not
supported."""

EXCHANGE_OPTIONS: Final = (
    (LARGEST_CLUSTERS[0], True),
    *((blocks, False) for blocks in LARGEST_CLUSTERS),
)
"""(blocks of a cluster at most, whether blocks may exchange sums through memory instead): what a
plan tries, in this order.
"""


@dataclass(frozen=True, slots=True)
class Tile:
    """How the columns of a row are spread over threads.

    Attributes:
        vec: elements per vector.
        vecs: vectors per thread.
        lanes: threads of a block that share a row.
        rows: rows that a block works on at once.
        cluster: blocks that share a row.
        blocks: blocks that should fit on a multiprocessor; bounds the registers.
        striped: whether the elements of a vector are 32 columns apart, so that the lanes of a
            warp hold neighbours.
    """

    vec: int
    vecs: int
    lanes: int
    rows: int = 1
    cluster: int = 1
    blocks: int = 1
    striped: bool = False

    @property
    def threads(self) -> int:
        """Threads per block."""
        return self.lanes * self.rows

    @property
    def held(self) -> int:
        """Elements that a thread holds."""
        return self.vec * self.vecs

    def fills(self, columns: int) -> bool:
        """Whether a row of that many columns fills the vectors of all its threads."""
        return columns == self.room

    def defines(self, columns: int) -> dict[str, str | int]:
        """The tile as macros, for rows of that many columns."""
        found: dict[str, str | int] = {
            "FULL": int(self.fills(columns)),
            "VEC": self.vec,
            "VECS": self.vecs,
            "LANES": self.lanes,
            "ROWS": self.rows,
            "CLUSTER": self.cluster,
            "BLOCKS": self.blocks,
            "STRIPED": int(self.striped),
        }
        if self.striped:  # one kernel, wherever the rows lie
            found["ACCESS"] = 1
        return found

    @property
    def room(self) -> int:
        """Columns that the vectors of the row's threads hold."""
        return self.held * self.lanes * self.cluster

    def kept(self, *sizes: int) -> int:
        """Bytes of shared memory for a block's part of a row of several tensors.

        Args:
            sizes: bytes of an element of each tensor.
        """
        beside = 16 * (self.threads // 32) * self.vecs if self.striped else 0
        return sum(self.threads * self.held * size + beside for size in sizes)


def is_striped(columns: int, *sizes: int, fours: int = STRIPED_FOURS) -> bool:
    """Whether rows of so many columns are striped: see :class:`Tile`.

    They are not where whole warps would leave more than a third of their vectors empty.

    Args:
        columns: columns of a row.
        sizes: bytes of an element of each tensor.
        fours: columns from which rows that divide into vectors of four are striped.
    """
    if set(sizes) != {2} or columns % STRIPED == 0 or (columns % 4 == 0 and columns < fours):
        return False
    per_warp = 32 * STRIPED
    return 2 * -(-columns // per_warp) * per_warp <= 3 * columns


def warp_tile(vectors: int, vec: int, most: int) -> Tile | None:
    """Rows within a warp: as many lanes as the row has vectors, several rows per block.

    Args:
        vectors: vectors of the row.
        vec: elements of each.
        most: vectors that a thread may hold.
    """
    if vectors > 32 * most:
        return None
    lanes = min(32, 1 << (vectors - 1).bit_length())
    vecs = -(-vectors // lanes)
    return Tile(vec, vecs, lanes, (256 if vecs == 1 else 128) // lanes)


def team_tile(vectors: int, vec: int, most: int, teams: tuple[Team, ...]) -> Tile | None:
    """Rows over several warps: the tile of the first team that holds the row."""
    for lanes, cluster in teams:
        if vectors <= lanes * cluster * most:
            return Tile(vec, -(-vectors // (lanes * cluster)), lanes, 1, cluster)
    return None


def _striped_cost(tile: Tile) -> float:
    """The cost of a tile for striped rows: idle threads and few vectors per thread, as measured
    with forward norms of 14 widths (docs/measured/cuda.md).
    """
    return float(tile.room**0.7 * (1 + 0.5 / tile.vecs))


def striped_tile(
    columns: int, most: int, teams: Iterable[Team], cost: Callable[[Tile], float] = _striped_cost
) -> Tile | None:
    """Striped rows, over whole warps: the cheapest tile of the teams that hold the row.

    Args:
        columns: columns of a row.
        most: vectors that a thread may hold.
        teams: the teams to compare; a block has several teams of a single warp.
        cost: the cost by which tiles are compared.
    """
    vectors = -(-columns // STRIPED)
    found = (team_tile(vectors, STRIPED, most, (team,)) for team in teams)
    tile = min((it for it in found if it), key=cost, default=None)
    if tile is None:
        return None
    alone = tile.lanes * tile.cluster == 32
    return replace(tile, rows=4 if alone else 1, striped=True)


def with_blocks(tile: Tile, threads: int) -> Tile:
    """The tile with so many blocks on a multiprocessor that they have ``threads`` threads."""
    return replace(tile, blocks=max(1, threads // tile.threads))


def exchange_bytes(tile: Tile, values: int, size: int) -> int:
    """Bytes of a block's shared memory through which a row's warps exchange sums.

    Args:
        tile: how the row is spread.
        values: numbers that are exchanged together.
        size: bytes of an element of the input.
    """
    warps = max(1, tile.lanes // 32) * tile.cluster
    return 2 * values * warps * max(4, size) if warps > 1 else 0


class Pipelining(NamedTuple):
    """How a kernel that loops over rows pipelines them.

    Attributes:
        stages: rows in flight in shared memory; 0 if not even one fits.
        st_async: whether the blocks of a cluster exchange sums by st.async, without a barrier,
            which would wait for the row that is being written.
    """

    stages: int
    st_async: bool


def pipelining(
    tile: Tile,
    stage_bytes: int,
    kept_bytes: int,
    device: _launch.Limits,
    most: int,
    st_async: bool,
) -> Pipelining:
    """How many rows may be in flight; the mbarriers of an exchange must not reduce their number.

    Args:
        tile: how the row is spread.
        stage_bytes: bytes of a block's part of a row.
        kept_bytes: other bytes that the block keeps in shared memory.
        device: where it runs.
        most: rows in flight beyond which more gain nothing.
        st_async: whether an exchange without a barrier is faster.
    """
    shared = device.shared_per_multiprocessor // tile.blocks - SHARED_PER_BLOCK

    def depth(kept: int) -> int:
        fitting = (min(shared, device.shared_per_block) - kept) // stage_bytes
        if fitting < 1:  # fewer blocks per multiprocessor then
            fitting = max(0, min(1, (device.shared_per_block - kept) // stage_bytes))
        return min(most, fitting)

    found = depth(kept_bytes)
    st_async = st_async and tile.cluster > 1
    return Pipelining(found, st_async and depth(kept_bytes + COUNTER_BYTES) == found)


class Piece(NamedTuple):
    """A block's piece of a row of half precision whose blocks form no cluster, but exchange sums
    through global memory (``include/memory_exchange.cuh``).

    Attributes:
        lanes: threads of a block.
        vecs: vectors that a thread holds.
        blocks: blocks on a multiprocessor.
        stages: rows in flight; if they do not fit, rows are given to clusters.
        holds: whether gamma and beta are in registers, not in shared memory.
    """

    lanes: int
    vecs: int
    blocks: int
    stages: int = 3
    holds: bool = True

    def tile(self, columns: int) -> Tile:
        """How a row is spread, over as many blocks as it needs."""
        share = self.vecs * self.lanes * 8
        striped = is_striped(columns, 2)
        return Tile(8, self.vecs, self.lanes, 1, -(-columns // share), self.blocks, striped)


Pieces = tuple[tuple[range, Piece], ...]
"""(widths of rows, the piece for them)."""


def pieces_for(pieces: Pieces, columns: int) -> list[tuple[Tile, Piece]]:
    """The pieces for rows of so many columns, each with its tile."""
    return [(piece.tile(columns), piece) for widths, piece in pieces if columns in widths]


def room_for_pieces(
    tile: Tile,
    sizes: tuple[int, ...],
    sums: int,
    device: _launch.Limits,
    stages: int,
    kept: int = 0,
) -> int | None:
    """Bytes of dynamic shared memory of a block, where blocks exchange sums through memory: for the
    rows in flight and ``kept``. None if they do not fit.

    Args:
        tile: how the row is spread.
        sizes: bytes of an element of each tensor of which rows are in flight.
        sums: sums of a row.
        device: where it runs.
        stages: rows in flight.
        kept: bytes kept beside them.
    """
    if not device.has_clusters or tile.cluster > tile.blocks * device.multiprocessors:
        return None
    exchanged = exchange_bytes(replace(tile, cluster=1), sums, 2)
    stage_bytes = tile.kept(*sizes)
    depth = pipelining(tile, stage_bytes, kept + exchanged, device, stages, False).stages
    return stages * stage_bytes + kept if depth == stages else None


def groups_of(teams: int, resident: int) -> int:
    """How many groups of blocks to launch for so many rows, or sets of rows, if ``resident`` groups
    run at once: as few as finish in the same number of iterations.
    """
    return -(-teams // -(-teams // resident))


def runs_clusters(source: Specialisation, geometry: _launch.Geometry, device: int) -> bool:
    """Whether a device can run a kernel's groups of blocks; usual clusters always can."""
    if geometry.cluster <= LARGEST_CLUSTERS[-1] and geometry.together == 1:
        return True
    try:
        return _launch.load(source, geometry, device).resident_groups() > 0
    except _launch.LaunchError:
        return False


def require_clusters(kernel: _launch.Kernel, columns: int) -> int:
    """How many groups of blocks run at once; declines if not even one does."""
    groups = kernel.resident_groups()
    if groups < 1:
        raise NotSupportedError(
            f"vendor.cuda: this device cannot run clusters of {kernel.cluster} blocks, "
            f"as rows of {columns} columns need"
        )
    return groups
