"""How the columns of a row are spread over threads, for the families that work by rows.

Which threads hold which columns follows from the columns and the dtypes alone, so a row's
result does not depend on how many rows there are, nor on where they lie. The kernels' side
of it is ``include/rows.cuh``.
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
    "LARGEST_CLUSTERS",
    "SHARED_PER_BLOCK",
    "STREWN_FOURS",
    "WARPS",
    "WAYS",
    "Piece",
    "Pieces",
    "Team",
    "Tile",
    "UnderWay",
    "exchange_bytes",
    "groups_of",
    "is_strewn",
    "pieces_for",
    "require_clusters",
    "room_for_pieces",
    "runs_clusters",
    "strewn_tile",
    "team_tile",
    "under_way",
    "warp_tile",
    "with_blocks",
]

STREWN: Final = 8
"""Elements of a vector of rows that begin anywhere, of half precision, if they are strewn."""

STREWN_FOURS: Final = 8193
"""Columns from which they are also where the row lies in vectors of four, if nothing else is known:
narrower ones were faster by those."""

SHARED_PER_BLOCK: Final = 1024
"""Bytes of shared memory that the system takes for each block."""

COUNTER_BYTES: Final = 16
"""Shared memory of a block that counts what other blocks send it
(``include/cluster_exchange.cuh``).
"""

LARGEST_CLUSTERS: Final = (16, 8)
"""Blocks of the largest cluster: of most devices, and of every one that has clusters."""

Team = tuple[int, int]
"""(threads of a block that share a row, blocks that share it)."""

WARPS: Final[tuple[Team, ...]] = tuple((lanes, 1) for lanes in range(32, 513, 32))
"""Blocks of whole warps, of up to 512 threads."""

CLUSTERS: Final[tuple[Team, ...]] = ((256, 2), (256, 4), (256, 8), (256, 16), (512, 8))
"""Clusters of such blocks, for wider rows that begin anywhere; the last is for the widest where
there can be none of 16 blocks."""

WAYS: Final = ((LARGEST_CLUSTERS[0], True), *((blocks, False) for blocks in LARGEST_CLUSTERS))
"""The most blocks of a cluster, and whether blocks that are none may exchange sums through
memory: what a plan tries, one after the other.
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
        strewn: whether the elements of a vector are 32 columns apart, so that those of a warp
            are neighbours.
    """

    vec: int
    vecs: int
    lanes: int
    rows: int = 1
    cluster: int = 1
    blocks: int = 1
    strewn: bool = False

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
            "STREWN": int(self.strewn),
        }
        if self.strewn:  # one kernel, wherever the rows lie
            found["ACCESS"] = 1
        return found

    @property
    def room(self) -> int:
        """Columns for which the row's threads have vectors."""
        return self.held * self.lanes * self.cluster

    def kept(self, *sizes: int) -> int:
        """Bytes of shared memory for what a block has of a row of several tensors.

        Args:
            sizes: bytes of an element of each.
        """
        beside = 16 * (self.threads // 32) * self.vecs if self.strewn else 0
        return sum(self.threads * self.held * size + beside for size in sizes)


def is_strewn(columns: int, *sizes: int, fours: int = STREWN_FOURS) -> bool:
    """Whether the elements of a vector are strewn, of rows of so many columns.

    They are not where whole warps would leave more than a third of their vectors empty.

    Args:
        columns: of a row.
        sizes: bytes of an element of each tensor.
        fours: columns from which rows in vectors of four are among them.
    """
    if set(sizes) != {2} or columns % STREWN == 0 or (columns % 4 == 0 and columns < fours):
        return False
    of_warp = 32 * STREWN
    return 2 * -(-columns // of_warp) * of_warp <= 3 * columns


def warp_tile(vectors: int, vec: int, most: int) -> Tile | None:
    """Rows within a warp: as many lanes as the row has vectors, several rows per block.

    Args:
        vectors: of the row.
        vec: elements of each.
        most: vectors that a thread may hold.
    """
    if vectors > 32 * most:
        return None
    lanes = min(32, 1 << (vectors - 1).bit_length())
    vecs = -(-vectors // lanes)
    return Tile(vec, vecs, lanes, (256 if vecs == 1 else 128) // lanes)


def team_tile(vectors: int, vec: int, most: int, teams: tuple[Team, ...]) -> Tile | None:
    """Rows over several warps: the first team that holds the row serves."""
    for lanes, cluster in teams:
        if vectors <= lanes * cluster * most:
            return Tile(vec, -(-vectors // (lanes * cluster)), lanes, 1, cluster)
    return None


def _strewn_cost(tile: Tile) -> float:
    """What a tile costs a row that begins anywhere: threads without columns, and few vectors of
    each, as measured with forward norms of 14 widths (docs/measured/cuda.md).
    """
    return float(tile.room**0.7 * (1 + 0.5 / tile.vecs))


def strewn_tile(
    columns: int, most: int, teams: Iterable[Team], cost: Callable[[Tile], float] = _strewn_cost
) -> Tile | None:
    """Rows that begin anywhere, over whole warps: of the teams that hold the row the cheapest.

    Args:
        columns: of a row.
        most: vectors that a thread may hold.
        teams: those that are asked; of single warps a block has several.
        cost: by which they are compared.
    """
    vectors = -(-columns // STREWN)
    found = (team_tile(vectors, STREWN, most, (team,)) for team in teams)
    tile = min((it for it in found if it), key=cost, default=None)
    if tile is None:
        return None
    alone = tile.lanes * tile.cluster == 32
    return replace(tile, rows=4 if alone else 1, strewn=True)


def with_blocks(tile: Tile, threads: int) -> Tile:
    """The tile with as many blocks as make that many threads on a multiprocessor."""
    return replace(tile, blocks=max(1, threads // tile.threads))


def exchange_bytes(tile: Tile, values: int, size: int) -> int:
    """Shared memory of a block in which the warps of a row exchange what they have summed up.

    Args:
        tile: how the row is spread.
        values: how many numbers that are.
        size: bytes of an element of the input.
    """
    warps = max(1, tile.lanes // 32) * tile.cluster
    return 2 * values * warps * max(4, size) if warps > 1 else 0


class UnderWay(NamedTuple):
    """How a kernel that goes from row to row works on several at a time.

    Attributes:
        stages: rows under way in shared memory; 0 if not even one fits.
        st_async: whether the blocks of a cluster exchange sums without a barrier, which
            would wait for the row that is being written.
    """

    stages: int
    st_async: bool


def under_way(
    tile: Tile,
    stage_bytes: int,
    kept_bytes: int,
    device: _launch.Limits,
    most: int,
    st_async: bool,
) -> UnderWay:
    """How many rows may be under way; what their exchange costs must not make them fewer.

    Args:
        tile: how the row is spread.
        stage_bytes: a block's share of a row.
        kept_bytes: what else the block keeps in shared memory.
        device: where it runs.
        most: rows that gain something.
        st_async: whether an exchange without a barrier gains something.
    """
    shared = device.shared_per_multiprocessor // tile.blocks - SHARED_PER_BLOCK

    def depth(kept: int) -> int:
        fitting = (min(shared, device.shared_per_block) - kept) // stage_bytes
        if fitting < 1:  # fewer blocks per multiprocessor then
            fitting = max(0, min(1, (device.shared_per_block - kept) // stage_bytes))
        return min(most, fitting)

    found = depth(kept_bytes)
    st_async = st_async and tile.cluster > 1
    return UnderWay(found, st_async and depth(kept_bytes + COUNTER_BYTES) == found)


class Piece(NamedTuple):
    """What a block has of a row of half precision whose blocks are no cluster, but exchange sums
    through global memory (``include/memory_exchange.cuh``).

    Attributes:
        lanes: threads of a block.
        vecs: vectors that a thread holds.
        blocks: of a multiprocessor.
        stages: rows under way; where there is no room for them, rows are those of clusters.
        holds: whether gamma and beta are in registers, and not in shared memory.
    """

    lanes: int
    vecs: int
    blocks: int
    stages: int = 3
    holds: bool = True

    def tile(self, columns: int) -> Tile:
        """How a row is spread: over as many blocks as hold it."""
        share = self.vecs * self.lanes * 8
        strewn = is_strewn(columns, 2)
        return Tile(8, self.vecs, self.lanes, 1, -(-columns // share), self.blocks, strewn)


Pieces = tuple[tuple[range, Piece], ...]
"""How wide rows are that a piece is for."""


def pieces_for(pieces: Pieces, columns: int) -> list[tuple[Tile, Piece]]:
    """Those that are for rows of so many columns, with how each spreads them."""
    return [(piece.tile(columns), piece) for widths, piece in pieces if columns in widths]


def room_for_pieces(
    tile: Tile,
    sizes: tuple[int, ...],
    sums: int,
    device: _launch.Limits,
    stages: int,
    kept: int = 0,
) -> int | None:
    """Bytes of the rows that are under way in a block of a row whose blocks exchange sums through
    memory, and of what is kept beside them; None where there is no room.

    Args:
        tile: how the row is spread.
        sizes: bytes of an element of each tensor of which rows are under way.
        sums: how many there are of a row.
        device: where it runs.
        stages: rows under way.
        kept: bytes that are.
    """
    if not device.has_clusters or tile.cluster > tile.blocks * device.multiprocessors:
        return None
    exchanged = exchange_bytes(replace(tile, cluster=1), sums, 2)
    stage_bytes = tile.kept(*sizes)
    depth = under_way(tile, stage_bytes, kept + exchanged, device, stages, False).stages
    return stages * stage_bytes + kept if depth == stages else None


def groups_of(teams: int, resident: int) -> int:
    """How many groups of blocks share so many rows, or sets of them, of which as many as are
    resident run at once: no more than finish together.
    """
    return -(-teams // -(-teams // resident))


def runs_clusters(source: Specialisation, geometry: _launch.Geometry, device: int) -> bool:
    """Whether a device has room for a kernel's groups of blocks, if they are no usual clusters."""
    if geometry.cluster <= LARGEST_CLUSTERS[-1] and geometry.together == 1:
        return True
    try:
        return _launch.load(source, geometry, device).resident_groups() > 0
    except _launch.LaunchError:
        return False


def require_clusters(kernel: _launch.Kernel, columns: int) -> int:
    """How many groups of blocks run at once; at least one, or the set declines."""
    groups = kernel.resident_groups()
    if groups < 1:
        raise NotSupportedError(
            f"vendor.cuda: this device cannot run clusters of {kernel.cluster} blocks, "
            f"as rows of {columns} columns need"
        )
    return groups
