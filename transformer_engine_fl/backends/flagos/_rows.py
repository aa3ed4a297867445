"""How rows are tiled: whole rows to a program, or a wide row split into pieces over several.

A tile's width is a power of two. A forward holds a whole row of another width in up to three parts
of such widths. Numbers of 2 bytes may be kept in their storage format until their sum is known.

A program that has a piece of a row holds it in registers and posts its share (partial sum) of the
row's sums. Before it waits for the other programs' shares, it reads its piece of the next row and
posts that share too, so that by then the shares of the first row have arrived. So each number is
read once, however wide the row. All programs of the grid must be resident at once: the grid is as
large as the device holds, and the launch is cooperative, which fails where that is not so. Where
there are no cooperative launches the kernel runs twice: for the sums, and then, reading the rows
again, for the rest.

Shares are added up in the order of the pieces, so a row's result depends on its width and dtype
alone. What is summed and what is computed from the sums is up to each kernel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import triton
import triton.language as tl

from transformer_engine_fl.backends._exchange import EPOCHS
from transformer_engine_fl.backends._memory import is_captured
from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import MOST, block_of, listed, rows_of_tile
from transformer_engine_fl.backends.flagos._tiles import bounded
from transformer_engine_fl.backends.flagos.tuning import Choice

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Cut",
    "SharedRows",
    "WholeRows",
    "as_stored",
    "begin_epochs",
    "by_lane",
    "columns_before",
    "cut",
    "cut_choice",
    "existing",
    "part_of_row",
    "parts_of",
    "per_column",
    "per_row",
    "post",
    "rows_of",
    "two_sums",
    "wait_for",
    "within",
]


class Cut(NamedTuple):
    """How rows are tiled.

    Attributes:
        threads: threads of a program.
        width: columns of a tile or of a piece; columns of float64 count double. Several rows
            share a tile if they are narrower; a forward of whole rows takes wider ones in
            parts, see :func:`parts_of`.
        programs: programs that a multiprocessor holds at once, each of which loops over many
            tiles or pieces; 0 for a program per tile.
        stages: tiles in flight in a program that loops; of pieces, those beside the two rows in
            its registers.
        shared: whether a row is split into pieces, a program for each.
        resident: programs of one tile each for which a multiprocessor's registers must suffice;
            0 leaves that to the compiler.
    """

    threads: int
    width: int
    programs: int = 0
    stages: int = 1
    shared: bool = False
    resident: int = 0


def cut_choice(
    name: str,
    plans: dict[Any, Any],
    usual: Mapping[int, Cut],
    whole: Iterable[tuple[int, int]],
    most_elements: int,
    half: Mapping[int, Cut] | None = None,
    singly: Mapping[int, Cut] | None = None,
    parts: bool = False,
    stages: int = 3,
) -> Choice[Cut]:
    """The choice of a :class:`Cut` by a row's columns, their bytes, and if they are read singly.

    Rows of an odd number of 2-byte columns are read singly: they are not aligned, so each number
    has an address of its own, and none is prefetched to shared memory.

    Args:
        name: name of the choice.
        plans: plans made with its answers.
        usual: the cut where nothing was measured, by the widest row that it is for.
        whole: pairs of ``programs`` and ``stages`` to try for whole rows.
        most_elements: elements of a thread, at most, in the cuts of whole rows to try.
        half: as ``usual`` for elements of 2 bytes, if their cuts differ.
        singly: as ``half`` for rows that are read singly, up to its widest.
        parts: whether to try whole rows in parts.
        stages: ``stages`` of the cuts in pieces to try.
    """
    whole = tuple(whole)

    def rule(columns: int, itemsize: int, one_by_one: int) -> Cut:
        table = half if half is not None and itemsize == 2 else usual
        found: Cut | None = listed(singly or {}, columns) if one_by_one else None
        return found or cast(Cut, listed(table, columns * (itemsize // 8 + 1)))

    def candidates(columns: int, itemsize: int, one_by_one: int) -> Iterator[Cut]:
        yield (first := rule(columns, itemsize, one_by_one))
        row = columns * (itemsize // 8 + 1)
        if row <= _WIDEST_WHOLE:
            width = block_of(row) if first.shared else max(block_of(row), first.width)
            for threads, (programs, ahead) in itertools.product((128, 256, 512, 1024), whole):
                if 8 <= width // threads <= most_elements and threads * programs <= MOST_THREADS:
                    yield Cut(threads, width, programs, ahead)
        if parts and itemsize == 2 and _NARROWEST_IN_PARTS < row <= _WIDEST_IN_PARTS:
            yield from _cuts_in_parts(row)
        if row > (_NARROWEST_SHARED_SINGLY if one_by_one else _NARROWEST_SHARED):
            for threads, width, programs in _PIECES:
                if -(-row // width) <= _MOST_PIECES:
                    yield Cut(threads, width, programs, stages, shared=True)

    runs = sorted({programs for programs, _ in whole})

    def wrong(cut: Cut) -> str | None:
        said = bounded(
            threads=(32, 1024),
            width=(16, _WIDEST_WHOLE),
            stages=range(1, 9),
            resident=range(MOST_THREADS // 32 + 1),
        )(cut)
        if said is not None:
            return said
        if cut.resident and (cut.shared or cut.programs):
            return "resident must be 0 where programs have many tiles or pieces"
        if cut.resident * cut.threads > MOST_THREADS:
            return f"resident must be at most {MOST_THREADS // cut.threads} with these threads"
        least = 1 if cut.shared else runs[0]
        most = 0 if not cut.shared and runs[-1] == 0 else MOST_THREADS // cut.threads
        if not least <= cut.programs <= most:
            allowed = f"from {least} to {most} with these threads" if most else "0 for whole rows"
            return f"programs must be {allowed}"
        return None

    return Choice(
        name,
        Cut,
        key=("columns", "itemsize", "singly"),
        rounded={"columns": 4},
        candidates=candidates,
        heuristic=lambda device, *key: rule(*key),
        wrong=wrong,
        plans=(plans,),
    )


def _cuts_in_parts(row: int) -> Iterator[Cut]:
    """The cuts to try for a whole row in parts."""
    power = block_of(row) if row == block_of(row) else block_of(row) // 2
    for width, threads in itertools.product((power // 2, power), (128, 256, 512, 1024)):
        if width >= row or width > _WIDEST_WHOLE or not 8 <= row // threads <= _MOST_IN_PARTS:
            continue
        for resident in sorted({together // threads for together in _RESIDENT_THREADS}):
            yield Cut(threads, width, resident=resident)  # 0 among them


# Threads of programs that are resident at once: every multiprocessor has room for as many.
MOST_THREADS = 1536
_WIDEST_WHOLE, _NARROWEST_SHARED, _NARROWEST_SHARED_SINGLY = 32768, 8192, 2048
_NARROWEST_IN_PARTS, _WIDEST_IN_PARTS, _MOST_IN_PARTS = 2048, 65536, 128
# Threads of a multiprocessor for which its registers must suffice.
_RESIDENT_THREADS = (0, 512, 768, 1024, 1536)
# Threads, width and programs to try for rows in pieces, and the most pieces.
_PIECES = (
    (32, 512, 16),
    (32, 512, 24),
    (32, 1024, 8),
    (32, 1024, 12),
    (32, 1024, 16),
    (32, 2048, 8),
    (32, 2048, 12),
    (64, 1024, 8),
    (64, 1024, 12),
    (64, 2048, 4),
    (64, 2048, 6),
    (64, 2048, 8),
    (64, 4096, 6),
    (128, 2048, 3),
    (128, 2048, 4),
    (128, 2048, 6),
    (128, 2048, 8),
    (128, 4096, 2),
    (128, 4096, 3),
    (128, 4096, 4),
    (128, 8192, 3),
    (256, 4096, 2),
    (256, 4096, 3),
    (256, 4096, 4),
    (256, 8192, 1),
    (256, 8192, 2),
)
_MOST_PIECES = 128


# -------------------------------------------------------------- in a kernel of whole rows


def parts_of(columns: int, widest: int, least: int) -> tuple[int, ...]:
    """The parts of a row of so many columns: at most three widths, each a power of two.

    One tile of 32,768 columns for a row of 20,480 would waste a third of its threads' registers.
    Only the last part may be wider than what is left of the row. All but a third part are at most
    ``widest`` wide, but none is narrower than ``least``, a power of two.
    """
    parts: list[int] = []
    left = columns
    while left > 0:
        whole = max(block_of(left), least)
        if len(parts) < 2 and (whole > widest or whole - left > whole // 8):
            whole = max(min(widest, whole // 2), least)
        parts.append(whole)
        left -= whole
    return tuple(parts)


# With ROWS = 1 a row is a vector and its sums are scalars: the sums of several tiles [1, columns]
# of different layouts would need layout conversions to be combined. A row that is cast is a tile,
# in which blocks of columns are found without a conversion.


@triton.jit  # type: ignore[untyped-decorator]
def rows_of(tile: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """The rows of a tile."""
    return tile if ROWS == 1 else tile * ROWS + tl.arange(0, ROWS)


@triton.jit  # type: ignore[untyped-decorator]
def existing(row: tl.tensor, rows: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Which rows of a tile exist. A tile of one row always does, so nothing is compared."""
    return tl.full((), True, tl.int1) if ROWS == 1 else row < rows


@triton.jit  # type: ignore[untyped-decorator]
def per_row(values: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Values per row, broadcast over columns."""
    return values if ROWS == 1 else values[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def per_column(values: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Values per column, broadcast over rows."""
    return values if ROWS == 1 else values[None, :]


@triton.constexpr_function  # type: ignore[untyped-decorator]
def columns_before(parts: tuple[int, ...], index: int) -> int:
    """Columns of a row in the parts before part ``index``; of all parts for ``len(parts)``."""
    return sum(parts[:index])


@triton.jit  # type: ignore[untyped-decorator]
def within(column: tl.tensor, columns: tl.tensor, EXACT: tl.constexpr) -> tl.tensor:
    """Which columns are in the row. EXACT: all are."""
    return tl.full(column.shape, True, tl.int1) if EXACT else column < columns


@triton.jit  # type: ignore[untyped-decorator]
def part_of_row(
    PARTS: tl.constexpr, INDEX: tl.constexpr, columns: tl.tensor, EXACT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The columns of a part, and which of them are in the row.

    EXACT: no part has columns beyond the row; otherwise only the last part may.
    """
    column = columns_before(PARTS, INDEX) + tl.arange(0, PARTS[INDEX])
    return column, within(column, columns, EXACT or len(PARTS) > INDEX + 1)


@triton.jit  # type: ignore[untyped-decorator]
def as_stored(x: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """``x`` in its storage format: the compiler cannot keep a converted copy across a wait."""
    if PTX and x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
        )
    else:
        return x


@triton.jit  # type: ignore[untyped-decorator]
def by_lane(x: tl.tensor, LANES: tl.constexpr, VECTOR: tl.constexpr) -> tl.tensor:
    """A part of one row as ``[iterations, LANES, elements]``: a thread's elements are axes 0 and 2.

    That holds where threads read VECTOR elements at a time, or all of theirs. If the parts of a row
    are first summed along these axes, then together, there is one reduction across warps, not one
    for each part.
    """
    HELD: tl.constexpr = x.numel // LANES
    ELEMENTS: tl.constexpr = min(HELD, VECTOR)
    return tl.reshape(x, (HELD // ELEMENTS, LANES, ELEMENTS))


# ------------------------------------------------------------ in a kernel of shared rows
#
# STEP is "together" in a cooperative launch, or "sums" and then "rest" in two launches. A row has
# one or two SUMS. ``shares`` is [rows, SUMS, PIECES] in two launches, else [groups, EPOCHS, PIECES,
# SUMS] of 8-byte slots, see ``backends/_exchange.py``: the bits of a sum, and the epoch in which
# they were posted. A slot is written and read in one access, so no memory ordering is needed. Each
# row of a program is an epoch.

_EPOCHS = tl.constexpr(EPOCHS)
assert EPOCHS & (EPOCHS - 1) == 0, "a power of two"


@triton.jit  # type: ignore[untyped-decorator]
def _place_of(epoch: tl.tensor, piece: tl.tensor, PIECES: tl.constexpr) -> tl.tensor:
    """The place of a piece's slots in an epoch; a place has SUMS slots."""
    return (tl.program_id(1) * _EPOCHS + (epoch & (_EPOCHS - 1))) * PIECES + piece


@triton.jit  # type: ignore[untyped-decorator]
def begin_epochs(
    shares_ptr: tl.tensor, PIECES: tl.constexpr, SUMS: tl.constexpr, STEP: tl.constexpr
) -> None:
    """Prefetch this program's slots to L2: the first posts would wait for DRAM."""
    if STEP == "together":
        piece = tl.program_id(0)
        place = shares_ptr + _place_of(tl.arange(0, _EPOCHS), piece, PIECES) * SUMS
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [place.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit  # type: ignore[untyped-decorator]
def post(
    shares_ptr: tl.tensor,
    row: tl.tensor,
    epoch: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    PIECES: tl.constexpr,
    SUMS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Post this piece's shares of a row's sums; with one sum ``second`` is ignored."""
    if STEP == "together":
        place = shares_ptr + _place_of(epoch, tl.program_id(0), PIECES) * SUMS
        tl.atomic_xchg(place, _slot_of(first, epoch), sem="relaxed")
        if SUMS == 2:
            tl.atomic_xchg(place + 1, _slot_of(second, epoch), sem="relaxed")
    else:
        place = row * PIECES + tl.program_id(0)
        place += row * ((SUMS - 1) * PIECES)
        tl.store(shares_ptr + place, first)
        if SUMS == 2:
            tl.store(shares_ptr + place + PIECES, second)


@triton.jit  # type: ignore[untyped-decorator]
def _slot_of(share: tl.tensor, epoch: tl.tensor) -> tl.tensor:
    bits = share.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (epoch.to(tl.int64) << 32) | bits


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _wait_in_ptx(places: int, sums: int) -> str:
    """PTX that waits until each lane of a warp has read the slots at so many places."""
    every = range(places * sums)
    first_place = len(every)
    epoch = f"${first_place + places}"
    names = [", ".join(f"slot{at + places * k}" for k in range(sums)) for at in range(places)]
    kind, many = ("v2.b64", "{%s}") if sums == 2 else ("b64", "%s")
    looks = [f"setp.ne.b32 missing, epoch0, {epoch};"]
    looks += [f"setp.ne.or.b32 missing, epoch{at}, {epoch}, missing;" for at in every[1:]]
    return "\n".join(
        [
            "{",
            ".reg .pred missing;",
            f".reg .b64 slot<{len(every)}>;",
            f".reg .b32 epoch<{len(every)}>;",
            "again:",
            *(
                f"ld.relaxed.gpu.global.{kind} {many % names[at]}, [${first_place + at}];"
                for at in range(places)
            ),
            *(f"mov.b64 {{${at}, epoch{at}}}, slot{at};" for at in every),
            *looks,
            "vote.sync.any.pred missing, missing, 0xffffffff;",
            "@missing bra again;",
            "}",
        ]
    )


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _registers(places: int, sums: int) -> str:
    """Its operands: the slots' values, and for each place the address and the epoch."""
    return ",".join(["=&r"] * (places * sums) + ["l"] * places + ["r"] * places)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _slots_of_lane(pieces: int, warps: int) -> int:
    return max(1, pieces // (32 * warps))


@triton.jit  # type: ignore[untyped-decorator]
def _wait_for_slots(
    place: tl.tensor, epoch: tl.tensor, SUMS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Wait until the slots at these places are of the epoch; returns their values.

    With one sum its values are returned twice. The lanes of a warp leave the loop together:
    otherwise they would run the code behind it diverged, which takes more registers.
    """
    SLOTS: tl.constexpr = _slots_of_lane(place.shape[0], tl.extra.cuda.num_warps())
    slots = tl.inline_asm_elementwise(
        _wait_in_ptx(SLOTS, SUMS),
        _registers(SLOTS, SUMS),
        [place, epoch],
        dtype=(tl.int32, tl.int32) if SUMS == 2 else (tl.int32,),
        is_pure=False,
        pack=SLOTS,
    )
    return slots[0], slots[SUMS - 1]


@triton.jit  # type: ignore[untyped-decorator]
def wait_for(
    shares_ptr: tl.tensor,
    row: tl.tensor,
    epoch: tl.tensor,
    other: tl.tensor,
    PIECES: tl.constexpr,
    SUMS: tl.constexpr,
    STEP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Wait for all pieces' shares of a row's sums, and return them.

    Lanes beyond the last piece get ``other`` and 0. With one sum it is returned twice.
    """
    piece = tl.arange(0, triton.next_power_of_2(PIECES))
    exists = piece < PIECES
    piece = tl.minimum(piece, PIECES - 1)
    if STEP == "together":
        place = shares_ptr + _place_of(epoch, piece, PIECES) * SUMS
        one, two = _wait_for_slots(place.to(tl.int64), epoch, SUMS)
        first = one.to(tl.float32, bitcast=True)
        second = two.to(tl.float32, bitcast=True)
    else:
        place = shares_ptr + row * PIECES + piece
        place += row * ((SUMS - 1) * PIECES)
        first = tl.load(place)
        second = first
        if SUMS == 2:
            second = tl.load(place + PIECES)
    return tl.where(exists, first, other), tl.where(exists, second, 0)


_INTERPRETED = tl.constexpr(_launch.INTERPRETED)


@triton.jit  # type: ignore[untyped-decorator]
def _added(
    first: tl.tensor, second: tl.tensor, other_first: tl.tensor, other_second: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    return first + other_first, second + other_second


@triton.jit  # type: ignore[untyped-decorator]
def two_sums(first: tl.tensor, second: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The sums of two vectors, in one reduction across the warps of a program."""
    if _INTERPRETED:  # which would call the function for each pair of numbers
        return tl.sum(first, axis=0), tl.sum(second, axis=0)
    else:
        one, other = tl.reduce((first, second), 0, _added)
        return one, other


# ---------------------------------------------------------------------------- on the host


# Bytes of shared memory of a program beside its stages: for reductions, and for the system.
_SUMS_BYTES = 2048
_LEAST_OF_PART = 4
"""Elements of a thread in the narrowest part of a row."""
_WIDEST_LOW_OCCUPANCY = 16384
"""Columns of the widest rows that are faster where a program gets all the registers it can use."""
_MOST_WIDE = 16
"""Elements of a row in parts, or of one of a program's many rows, that a thread may hold in the
computing format."""


def _stages(way: Cut, stage_bytes: int, device: torch.device, stages_in_use: int = 0) -> int:
    """As many stages as wanted, or as fit into shared memory beside ``stages_in_use`` more."""
    share = _launch.limits(device).shared_bytes // max(1, way.programs) - _SUMS_BYTES
    return max(1, min(way.stages, 1 + share // stage_bytes - stages_in_use))


def _even(work: int, most: int) -> int:
    """As few programs, of at most ``most``, as finish the work in the fewest iterations."""
    iterations = max(1, -(-work // most))
    return -(-work // iterations)


class WholeRows:
    """A kernel of whole rows, in tiles, with a one-dimensional grid.

    Args:
        kernel: the jitted function. If it has PARTS it takes wide rows in parts.
        device: where it runs.
        tiles: how rows are tiled.
        columns: columns of a row.
        dtype: dtype of the sums.
        column_bytes: bytes read of a row, per column.
        least: columns of the narrowest part, a power of two.
        constants: the kernel's constants beside ROWS, BLOCK or PARTS, STAGES, EXACT, LOW_OCCUPANCY
            (a multiprocessor has at most one program), LANES (the threads among which
            :func:`by_lane` divides a part) and NARROW (in the computing format a thread's
            elements would take too many registers).
    """

    __slots__ = ("_device", "_launch", "_low_occupancy", "_most", "_multiprocessors", "_rows")

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        tiles: Cut,
        columns: int,
        dtype: torch.dtype,
        column_bytes: int,
        *,
        least: int = 1,
        **constants: Any,
    ) -> None:
        size = 2 if dtype == torch.float64 else 1
        parts: tuple[int, ...] = (max(block_of(columns), least),)
        if "PARTS" in kernel.arg_names and columns * size > tiles.width:
            least = max(least, _LEAST_OF_PART * tiles.threads)
            parts = parts_of(columns, tiles.width // size, least)
        block = sum(parts)
        self._rows = rows_of_tile(tiles.width, block * size)
        self._device = device
        offered = _launch.limits(device)
        self._multiprocessors = offered.multiprocessors
        self._most = tiles.programs * self._multiprocessors or MOST
        held = self._rows * block // tiles.threads
        # A pipelined tile in shared memory would be read there again at each use.
        kept = len(parts) > 1 or tiles.programs > 0
        make = functools.partial(
            _launch.Launch,
            kernel,
            device,
            threads=tiles.threads,
            ROWS=self._rows,
            BLOCK=block,
            PARTS=parts,
            EXACT=columns == block,
            LANES=min(max(tiles.threads, offered.warp_size), *parts),
            NARROW=kept and held > _MOST_WIDE and _launch.has_ptx(),
            STAGES=_stages(tiles, self._rows * block * column_bytes, device),
            **constants,
        )
        self._launch = make(resident=tiles.programs or tiles.resident, LOW_OCCUPANCY=False)
        # The one program of a multiprocessor may use all its registers.
        wants_them = "LOW_OCCUPANCY" in kernel.arg_names and block <= _WIDEST_LOW_OCCUPANCY
        self._low_occupancy = make(LOW_OCCUPANCY=True) if wants_them else self._launch

    def groups(self, rows: int) -> int:
        """The number of programs for so many rows."""
        return _even(-(-rows // self._rows), self._most)

    def __call__(
        self, rows: int, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]
    ) -> None:
        """Start the kernel."""
        groups = self.groups(rows)
        launch, other = self._launch, self._low_occupancy
        if groups <= self._multiprocessors:
            launch, other = other, launch
        # No kernel is loaded during graph capture; both kernels give the same bits.
        if not launch.loaded_before and other.loaded_before:
            captured = self._device.type == "cuda" and is_captured(self._device)
            launch = other if captured else launch
        launch((groups, 1), tensors, numbers)


class SharedRows:
    """A kernel of rows split into pieces.

    Its last pointer is that of the shares, and its last number the first epoch. Its grid is
    ``(pieces, groups)``: the programs of a group share rows, different ones from other groups.

    Args:
        kernel: the jitted function.
        device: where it runs.
        pieces: how rows are tiled.
        columns: columns of a row.
        sums: sums of a row.
        dtype: dtype of the sums.
        column_bytes: bytes read of a row, per column.
        stages_in_use: stages that are still in use when the next ones are asked for.
        constants: the kernel's constants beside PIECES, BLOCK, STAGES, EXACT and STEP.
    """

    __slots__ = ("_launches", "_make_shares", "_most", "_shares", "pieces")

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        pieces: Cut,
        columns: int,
        sums: int,
        dtype: torch.dtype,
        column_bytes: int,
        stages_in_use: int = 0,
        **constants: Any,
    ) -> None:
        double = dtype == torch.float64
        width = pieces.width // (2 if double else 1)
        self.pieces = -(-columns // width)
        offered = _launch.limits(device)
        running = min(pieces.programs, offered.programs) * offered.multiprocessors
        self._most = max(1, running // self.pieces)
        shared: dict[str, Any] = dict(
            threads=pieces.threads,
            resident=pieces.programs,
            PIECES=self.pieces,
            BLOCK=width,
            EXACT=columns % width == 0,
            **constants,
        )
        self._launches: tuple[_launch.Launch, ...]
        self._make_shares: Callable[[int], Tensor] | None = None
        self._shares = self.pieces * sums
        if _launch.has_ptx() and not double and self.pieces <= running:
            stages = _stages(pieces, width * column_bytes, device, stages_in_use)
            cooperative = {"launch_cooperative_grid": True}
            together = {"STEP": "together", "STAGES": stages, "options": cooperative}
            self._launches = (_launch.ExchangingLaunch(kernel, device, **together, **shared),)
        else:
            self._launches = tuple(
                _launch.Launch(kernel, device, STEP=step, STAGES=1, **shared)
                for step in ("sums", "rest")
            )
            self._make_shares = functools.partial(torch.empty, dtype=dtype, device=device)

    def groups(self, rows: int) -> int:
        """The number of groups of programs for so many rows."""
        return _even(rows, self._most)

    def __call__(
        self, rows: int, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]
    ) -> None:
        """Start the kernel; ``tensors`` lacks the shares, ``numbers`` the first epoch."""
        groups = self.groups(rows)
        # A group may also post one row beyond its last, for which no program waits.
        if self._make_shares is None:
            numbers = (*numbers, -(-rows // groups) + 1)  # the epochs of the launch
        else:
            tensors = (*tensors, self._make_shares((rows + groups) * self._shares))
            numbers = (*numbers, 0)
        for launch in self._launches:
            launch((self.pieces, groups), tensors, numbers)


def cut(
    choice: Choice[Cut],
    kernels: tuple[Any, Any],
    device: torch.device,
    columns: int,
    sums: int,
    dtype: torch.dtype,
    itemsize: int,
    column_bytes: int,
    *,
    has_looped: bool = False,
    stages_in_use: int = 0,
    **constants: Any,
) -> WholeRows | SharedRows:
    """The kernel of whole rows or that of rows in pieces, as chosen for the columns.

    Args:
        choice: the choice of how rows are tiled.
        kernels: the kernels of whole rows and of rows in pieces.
        device: where they run.
        columns: columns of a row.
        sums: sums of a row.
        dtype: dtype of the sums.
        itemsize: bytes of an element, for the choice.
        column_bytes: bytes read of a row, per column.
        has_looped: whether the kernel of whole rows has the constant LOOPED: a program has
            several tiles.
        stages_in_use: see :class:`SharedRows`.
        constants: constants of either kernel.
    """
    way = choice(device, columns, itemsize, int(itemsize == 2 and columns % 2 > 0))
    if not way.shared:
        if has_looped:
            constants["LOOPED"] = way.programs > 0
        return WholeRows(kernels[0], device, way, columns, dtype, column_bytes, **constants)
    return SharedRows(
        kernels[1], device, way, columns, sums, dtype, column_bytes, stages_in_use, **constants
    )
