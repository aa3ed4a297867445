"""Measured choices for norms: how rows are spread over threads, and which kernel takes them.

They are looked up by the width of the rows and by whether a mean is subtracted or a tensor added.
``normalization`` has the rules for other rows.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from transformer_engine_fl.backends.vendor.cuda._tiles import Piece, Pieces, Team, Tile

__all__ = [
    "BACKWARD_PIECES",
    "CAST_AS",
    "CAST_NARROWEST",
    "EXCHANGE_THROUGH_MEMORY",
    "FEW_ROWS",
    "FORWARD_PIECES",
    "IN_REGISTERS",
    "IN_SHARED_MEMORY",
    "CastAs",
    "InRegisters",
    "InSharedMemory",
]


class InSharedMemory(NamedTuple):
    """Rows of half precision that wait for their sums in the shared memory of small blocks.

    Several blocks, or clusters, are on a multiprocessor, each with a row of its own: while one
    stores, the others load. Gamma and beta are read from caches, unless shared memory has room.

    Attributes:
        centred: whether there is a mean to subtract.
        columns: widths of the rows.
        team: threads of a block that share a row, and blocks that do.
        vecs: vectors that a thread holds, at most.
        blocks: blocks on a multiprocessor.
    """

    centred: bool
    columns: range
    team: Team
    vecs: int
    blocks: int


# Without a residual and without a cast. Measured with bfloat16 and 25 widths from 5,120 to 262,144
# columns, with 1,024 to 2,048, 4,096 and 8,192, and with 50 since (docs/measured/cuda.md).
IN_SHARED_MEMORY: Final = (
    InSharedMemory(False, range(3585, 4097), (256, 1), 2, 3),
    InSharedMemory(False, range(7169, 8193), (512, 1), 2, 4),
    InSharedMemory(False, range(8193, 12289), (256, 1), 8, 5),
    InSharedMemory(False, range(12289, 14337), (512, 1), 4, 4),
    InSharedMemory(False, range(16384, 16385), (256, 1), 8, 4),
    InSharedMemory(False, range(16385, 20481), (512, 1), 8, 2),
    InSharedMemory(False, range(20481, 24577), (256, 1), 16, 3),
    InSharedMemory(False, range(24577, 28673), (256, 1), 16, 3),
    InSharedMemory(False, range(28673, 32769), (512, 1), 8, 2),
    InSharedMemory(False, range(32769, 40961), (512, 1), 16, 2),
    InSharedMemory(False, range(40961, 65537), (256, 2), 16, 3),
    InSharedMemory(False, range(65537, 131073), (256, 4), 16, 3),
    InSharedMemory(True, range(897, 1025), (64, 1), 2, 24),
    InSharedMemory(True, range(1025, 2049), (64, 1), 4, 20),
    InSharedMemory(True, range(4097, 6145), (128, 1), 8, 8),
    InSharedMemory(True, range(7168, 7169), (128, 1), 8, 8),
    InSharedMemory(True, range(6145, 8192), (256, 1), 4, 6),
    InSharedMemory(True, range(8193, 14337), (256, 1), 8, 5),
    InSharedMemory(True, range(18432, 18433), (256, 1), 9, 4),
    InSharedMemory(True, range(22528, 22529), (256, 1), 11, 3),
    InSharedMemory(True, range(26624, 26625), (256, 1), 13, 3),
    InSharedMemory(True, range(14337, 32769), (512, 1), 8, 3),
)


class InRegisters(NamedTuple):
    """Rows of half precision that a backward keeps in registers.

    Attributes:
        centred: whether there is a mean to subtract.
        added: whether a gradient is added to the input's gradient.
        columns: widths of the rows.
        lanes: threads of a block, which share a row.
        blocks: blocks on a multiprocessor.
        batch: rows that a block processes at a time.
        stages: batches in flight, at most.
        kernel: the kernel's name; in ``backward_pairs`` the two blocks of a cluster add up their
            partial gradients of the parameters.
    """

    centred: bool
    added: bool
    columns: range
    lanes: int
    blocks: int
    batch: int
    stages: int
    kernel: str = "backward_registers"


# Each was measured with the widest of its rows. A number of warps that is no multiple of four can
# be slower than more warps, some of which are idle: 7,168 columns of a root mean square take 117.5
# us in 448 threads and 105.0 in 512.
IN_REGISTERS: Final = (
    InRegisters(False, False, range(769, 1025), 128, 4, 2, 4),
    InRegisters(False, False, range(1025, 2049), 128, 4, 1, 2),
    InRegisters(False, False, range(2049, 2561), 320, 2, 1, 2),
    InRegisters(False, False, range(2561, 3073), 384, 2, 1, 2),
    InRegisters(False, False, range(3073, 3585), 224, 2, 1, 2),
    InRegisters(False, False, range(3585, 4097), 512, 2, 1, 2),
    InRegisters(False, False, range(4097, 5121), 320, 1, 2, 6),
    InRegisters(False, False, range(7169, 8193), 512, 1, 1, 2),
    InRegisters(False, True, range(2049, 2561), 256, 2, 1, 6),
    InRegisters(False, True, range(2561, 3073), 384, 2, 1, 2),
    InRegisters(False, True, range(3073, 3585), 256, 2, 1, 6),
    InRegisters(False, True, range(3585, 4097), 512, 2, 1, 2),
    InRegisters(False, True, range(4097, 5121), 320, 1, 2, 2),
    InRegisters(False, True, range(5121, 8193), 512, 1, 1, 3),
    InRegisters(True, False, range(769, 1025), 128, 4, 4, 3),
    InRegisters(True, False, range(2049, 2561), 160, 3, 1, 4, "backward_pairs"),
    InRegisters(True, False, range(2561, 3073), 192, 3, 1, 4, "backward_pairs"),
    InRegisters(True, False, range(3073, 3585), 512, 1, 4, 3),
    InRegisters(True, False, range(3585, 4097), 256, 2, 1, 2, "backward_pairs"),
    InRegisters(True, False, range(4097, 5121), 320, 2, 1, 2, "backward_pairs"),
    InRegisters(True, False, range(5121, 6145), 384, 1, 2, 2),
    InRegisters(True, False, range(6145, 8193), 512, 1, 1, 2, "backward_pairs"),
)


# With at most so many rows each block has one row, and blocks are not paired, so that none waits
# for another. A row's gradient has the same bits either way.
FEW_ROWS: Final = 64


# For backwards, by (whether there is a mean, whether a gradient is added, whether rows are
# striped). Of the pieces for a width the first of those that leave the fewest threads idle is
# taken. Measured with 40 widths from 5,632 to 262,144 columns, and with seven striped ones
# (docs/measured/cuda.md).
_WIDE, _WIDER, _WIDEST = range(8193, 131_073), range(131_073, 196_609), range(196_609, 262_145)
BACKWARD_PIECES: Final[dict[tuple[bool, bool, bool], Pieces]] = {
    (False, False, False): (
        (range(5121, 7169), Piece(32, 4, 10)),
        (_WIDE, Piece(32, 4, 10)),
        (_WIDER, Piece(32, 6, 6)),
        (range(131_073, 262_145), Piece(128, 4, 4)),
    ),
    (False, True, False): (
        (_WIDE, Piece(32, 4, 10)),
        (_WIDER, Piece(32, 6, 6)),
        (_WIDEST, Piece(128, 4, 3)),
    ),
    (True, False, False): (
        (_WIDE, Piece(32, 4, 10)),
        (_WIDER, Piece(32, 6, 6)),
        # With numbers of blocks that are no power of two the compiler spills registers.
        (range(262_144, 262_145), Piece(64, 4, 5)),
        (_WIDEST, Piece(256, 3, 2)),
        (_WIDEST, Piece(64, 6, 3)),
    ),
    (False, False, True): (
        (range(8193, 196_609), Piece(64, 3, 10)),
        (range(8193, 262_145), Piece(256, 3, 2)),
    ),
    (False, True, True): (
        (_WIDE, Piece(64, 2, 5)),
        (range(8193, 262_145), Piece(128, 4, 3)),
    ),
    (True, False, True): (
        (range(8193, 98_305), Piece(32, 3, 8)),
        (range(8193, 262_145), Piece(256, 3, 2)),
    ),
}
_GAPS: Final = [range(width + 1, width + 2048) for width in range(14_336, 28_672, 2048)]
# For forwards, by (whether there is a mean to subtract, whether a residual is added). Of the pieces
# for a width the first that rows fill exactly is taken, or the last.
FORWARD_PIECES: Final[dict[tuple[bool, bool], Pieces]] = {
    (False, False): (
        # The widths between the gaps fill the vectors of 256 threads: they are in IN_SHARED_MEMORY.
        *((gap, Piece(32, 8, 12, 4)) for gap in _GAPS if gap.start > 20_480),
        (range(28673, 131073), Piece(32, 8, 12, 4)),
        (range(131073, 262145), Piece(128, 8, 3)),
    ),
    (False, True): ((range(32769, 262145), Piece(32, 8, 8)),),
    (True, False): (
        # As above.
        *((gap, Piece(32, 6, 16, 2, holds=False)) for gap in _GAPS),
        (range(28_673, 32_768), Piece(32, 6, 16, 2, holds=False)),
        (range(131_072, 131_073), Piece(128, 8, 3, 2, holds=False)),
        (range(262_144, 262_145), Piece(128, 8, 3, 2, holds=False)),
        (range(32_769, 262_145), Piece(32, 8, 12, 2, holds=False)),
        (range(32_769, 131_073), Piece(32, 6, 16, 2, holds=False)),
    ),
}
EXCHANGE_THROUGH_MEMORY: Final = 2


class CastAs(NamedTuple):
    """Rows of half precision, without a residual, that are cast.

    Attributes:
        widest: the widest row that it is for. A row takes the first entry that is wide enough.
        lanes: threads of a block, which share a row.
        vecs: vectors of 16 bytes of a thread.
        blocks: blocks on a multiprocessor.
        one_row: whether a block has one row, rather than looping over rows.
    """

    widest: int
    lanes: int
    vecs: int
    blocks: int
    one_row: bool

    @property
    def tile(self) -> Tile:
        """How a row is spread."""
        return Tile(8, self.vecs, self.lanes, blocks=self.blocks)


CAST_NARROWEST: Final = 1025
"""The narrowest row that :data:`CAST_AS` is for."""
# By (whether there is a mean, whether blocks have scales), as measured with the widest row of each
# entry and others (docs/measured/cuda.md). It is faster if a row fills all vectors of a power of
# two of threads: no column is compared with the row's end then, and a layer norm's threads have
# parts of equal size.
_STREAM, _ROW = False, True
CAST_AS: Final[dict[tuple[bool, bool], tuple[CastAs, ...]]] = {
    (False, False): (
        CastAs(1280, 32, 5, 12, _STREAM),
        CastAs(1536, 32, 6, 12, _STREAM),
        CastAs(1792, 32, 7, 12, _STREAM),
        CastAs(2048, 64, 4, 8, _STREAM),
        CastAs(2560, 64, 5, 6, _STREAM),
        CastAs(3072, 64, 6, 4, _STREAM),
        CastAs(3584, 64, 7, 4, _STREAM),
        CastAs(4096, 128, 4, 12, _ROW),
        CastAs(5120, 128, 5, 3, _STREAM),
        CastAs(6144, 256, 3, 1, _STREAM),
        CastAs(7168, 128, 7, 2, _STREAM),
        CastAs(8192, 256, 4, 6, _ROW),
        CastAs(10240, 256, 5, 1, _STREAM),
        CastAs(12288, 256, 6, 1, _STREAM),
        CastAs(14336, 256, 7, 1, _STREAM),
        CastAs(16384, 512, 4, 1, _STREAM),
        CastAs(20480, 512, 5, 1, _STREAM),
        CastAs(24576, 384, 8, 1, _STREAM),
    ),
    (False, True): (
        CastAs(1280, 32, 5, 16, _ROW),
        CastAs(1536, 32, 6, 16, _ROW),
        CastAs(1792, 32, 7, 16, _ROW),
        CastAs(2048, 128, 2, 12, _ROW),
        CastAs(2304, 96, 3, 10, _ROW),
        CastAs(2560, 64, 5, 16, _ROW),
        CastAs(3072, 96, 4, 16, _ROW),
        CastAs(3328, 64, 7, 8, _ROW),
        CastAs(3584, 128, 4, 12, _ROW),
        CastAs(4096, 128, 4, 12, _ROW),
        CastAs(4608, 96, 6, 10, _ROW),
        CastAs(5120, 128, 5, 8, _ROW),
        CastAs(6144, 128, 6, 8, _ROW),
        CastAs(7168, 224, 4, 6, _ROW),
        CastAs(8192, 256, 4, 6, _ROW),
        CastAs(8960, 224, 5, 4, _ROW),
        CastAs(10240, 256, 5, 4, _ROW),
        CastAs(12288, 256, 6, 1, _STREAM),
        CastAs(16384, 512, 4, 1, _STREAM),
        CastAs(18432, 384, 6, 1, _STREAM),
        CastAs(20480, 512, 5, 1, _STREAM),
        CastAs(24576, 384, 8, 1, _STREAM),
    ),
    (True, False): (
        CastAs(1280, 32, 5, 12, _STREAM),
        CastAs(1536, 32, 6, 8, _STREAM),
        CastAs(1792, 32, 7, 8, _STREAM),
        CastAs(2048, 64, 4, 8, _STREAM),
        CastAs(2560, 64, 5, 4, _STREAM),
        CastAs(2944, 128, 3, 4, _STREAM),
        CastAs(3072, 64, 6, 4, _STREAM),
        CastAs(3584, 64, 7, 4, _STREAM),
        CastAs(4096, 64, 8, 4, _STREAM),
        CastAs(5120, 128, 5, 2, _STREAM),
        CastAs(5376, 192, 4, 2, _STREAM),
        CastAs(6144, 128, 6, 2, _STREAM),
        CastAs(7168, 128, 7, 2, _STREAM),
        CastAs(8192, 128, 8, 2, _STREAM),
        CastAs(8960, 224, 5, 4, _ROW),
        CastAs(10240, 256, 5, 1, _STREAM),
        CastAs(11264, 512, 3, 1, _STREAM),
        CastAs(12288, 256, 6, 1, _STREAM),
        CastAs(13824, 384, 5, 1, _STREAM),
        CastAs(14336, 256, 7, 1, _STREAM),
        CastAs(16384, 256, 8, 1, _STREAM),
        CastAs(18432, 384, 6, 2, _ROW),
        CastAs(20480, 512, 5, 2, _ROW),
    ),
    (True, True): (
        CastAs(1280, 32, 5, 12, _STREAM),
        CastAs(1536, 32, 6, 24, _ROW),
        CastAs(1792, 32, 7, 24, _ROW),
        CastAs(2048, 64, 4, 8, _STREAM),
        CastAs(2304, 96, 3, 5, _STREAM),
        CastAs(2560, 64, 5, 8, _ROW),
        CastAs(2944, 96, 4, 5, _STREAM),
        CastAs(3072, 64, 6, 4, _STREAM),
        CastAs(3584, 64, 7, 12, _ROW),
        CastAs(4096, 128, 4, 4, _STREAM),
        CastAs(4608, 96, 6, 5, _ROW),
        CastAs(5120, 128, 5, 4, _ROW),
        CastAs(5376, 192, 4, 2, _STREAM),
        CastAs(6144, 128, 6, 2, _STREAM),
        CastAs(7168, 128, 7, 4, _ROW),
        CastAs(8192, 256, 4, 2, _STREAM),
        CastAs(8960, 160, 7, 6, _ROW),
        CastAs(10240, 160, 8, 4, _ROW),
        CastAs(11264, 256, 6, 5, _ROW),
        CastAs(12288, 256, 6, 2, _ROW),
        CastAs(14336, 256, 7, 4, _ROW),
        CastAs(16384, 512, 4, 1, _STREAM),
        CastAs(18432, 384, 6, 3, _ROW),
        CastAs(20480, 512, 5, 3, _ROW),
        CastAs(24576, 512, 6, 3, _ROW),
    ),
}
