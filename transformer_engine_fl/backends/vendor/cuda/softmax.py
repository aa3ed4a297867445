"""The scaled softmax forms in CUDA C++ (``softmax.cu``).

One kernel serves all four forwards, another all four backwards, for rows that fit on the chip: in a
warp, a block, or a cluster of blocks. Wide rows without hidden scores are split over blocks that
form no cluster, and rows that do not fit on the chip have kernels of their own. For rows that fit,
the forwards' kernel also computes losses and gradients of cross entropy (:func:`run_with_losses`):
its gradients are a softmax minus one at the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from transformer_engine_fl.backends._cross_entropy import Losses
from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends.vendor.cuda import _launch
from transformer_engine_fl.backends.vendor.cuda._arguments import (
    MOST_COLUMNS,
    NAMES,
    PLAIN,
    SIZES,
    Plans,
    access_width,
    address_of,
    broadcast_mask,
    check_size,
    decline,
    dense_rows,
    fresh,
    is_number,
    is_plain,
    on_device,
    plain,
    vector_width,
)
from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda._tiles import (
    CLUSTERS,
    COUNTER_BYTES,
    EXCHANGE_OPTIONS,
    LARGEST_CLUSTERS,
    SHARED_PER_BLOCK,
    WARPS,
    Piece,
    Team,
    Tile,
    exchange_bytes,
    groups_of,
    is_striped,
    pieces_for,
    require_clusters,
    room_for_pieces,
    runs_clusters,
    striped_tile,
    team_tile,
    warp_tile,
    with_blocks,
)
from transformer_engine_fl.ops import softmax as contracts

if TYPE_CHECKING:
    from transformer_engine_fl.core.contract import Contract

__all__ = [
    "scaled_aligned_causal_masked_softmax_backward",
    "scaled_aligned_causal_masked_softmax_forward",
    "scaled_masked_softmax_backward",
    "scaled_masked_softmax_forward",
    "scaled_softmax_backward",
    "scaled_softmax_forward",
    "scaled_upper_triang_masked_softmax_backward",
    "scaled_upper_triang_masked_softmax_forward",
]

# ------------------------------------------------------------------------------- tiles

TEAMS: Final[tuple[Team, ...]] = ((128, 1), (256, 1), (512, 1), (1024, 1))
FORWARD_CLUSTERS: Final[tuple[Team, ...]] = ((512, 4), (512, 8), (1024, 8))
BACKWARD_CLUSTERS: Final[tuple[Team, ...]] = (
    (512, 2),
    (512, 4),
    (512, 8),
    (512, 16),
    (1024, 8),
)
LONG_TEAMS: Final[tuple[Team, ...]] = ((512, 4), (512, 8))
"""Teams of a backward in half precision that hold up to 8 vectors a thread.

If a thread holds more than HELD elements, its last vectors of both tensors are in registers, which
leaves shared memory for a second block on a multiprocessor.
"""
USUAL: Final = 4
"""Vectors of a thread, at most, if they are of 16 bytes."""
WARP_VECTORS: Final = 8
"""The same for a forward within a warp, which waits for no other warp."""
WIDE_LANES: Final = 1024
RESIDENT: Final = 1024
"""Threads of a multiprocessor; so many leave each enough registers for its part of a row."""
BACKWARD_RESIDENT: Final = 1536
"""The same where blocks of a backward share a row, which waits in shared memory."""
HELD: Final = 32
"""Elements of a thread for which those registers suffice; with more there are fewer threads."""
LOOPED_FROM: Final = 2**14 + 1
"""Columns from which a forward is persistent: it has no more groups than run at once.

Each group loops over rows and prefetches the next one: a multiprocessor holds too few rows of this
width at once for blocks to hide each other's latency.
"""
SPREAD: Final = range(4097, 8193)
"""Columns of rows of which each thread of a forward has two vectors instead of four."""
SPREAD_RESIDENT: Final = 2048
"""Threads of a multiprocessor for such rows."""
STAGES: Final = 2
"""Rows in flight to shared memory in a group that loops over rows."""
IN_SHARED_MEMORY: Final = (range(4097, 8192), range(8193, 262145))
"""Columns of plain forwards in half precision whose rows wait for their sum in shared memory.

Not in registers, so that several small blocks are on a multiprocessor, each with its own row or
part of a row: while one stores, the others load. Measured with bfloat16 and 24 widths; with 8,192
columns, or with 4,096 and fewer, nothing was gained, and causal rows got slower.
"""
FORWARD_PIECES: Final = (
    (range(57_345, 163_840), Piece(32, 8, 12)),
    (range(163_840, 262_145), Piece(64, 8, 6, 2)),
)
"""The piece of a block, by columns, for plain forwards in half precision whose rows are split over
blocks that form no cluster, where cooperative launches are available. Measured with bfloat16 and 13
widths.
"""
BACKWARD_PIECES: Final = ((range(40_961, 262_145), Piece(32, 8, 8)),)
"""The same for backwards; measured with eight widths."""
SHARED_MEMORY_TEAMS: Final[tuple[Team, ...]] = (
    (128, 1),
    (256, 1),
    (512, 1),
    (128, 8),
    (128, 16),
    (256, 8),
)
LOSS_TEAMS: Final[tuple[Team, ...]] = ((128, 1), (512, 1), (256, 2), (128, 8), (256, 8))
"""The same for losses and gradients of such rows."""
SHARED_MEMORY_VECTORS: Final = 16
"""Vectors of a thread, at most, of rows in shared memory."""
SHARED_MEMORY_RESIDENT: Final = 1536
"""Threads of a multiprocessor, at most, for rows in shared memory; in at least two blocks."""
STRIPED_VECTORS: Final = 6
"""Vectors of a thread, within a block, of striped rows."""
STRIPED_FOURS_BACKWARD: Final = 513
"""Columns from which rows of a backward are striped if they divide into vectors of four."""
STRIPED_SHARED_MEMORY_FROM: Final = 13_825
"""Columns from which striped rows of a forward wait, also under a mask."""
STRIPED_SHARED_MEMORY: Final = (9, 13)
"""Vectors of a thread of striped rows that wait, within a block and in a cluster."""
MOST_ROWS: Final = 2**31 - 2**14


def row_tile(
    columns: int,
    sizes: tuple[int, ...],
    device: _launch.Limits,
    most_blocks: int = LARGEST_CLUSTERS[0],
    striped: bool = False,
) -> Tile | None:
    """The tile of rows that are read once; None if a row does not fit on the chip.

    Args:
        columns: columns of a row.
        sizes: bytes of an element of each tensor that is kept, the scores or output first.
        device: where it runs.
        most_blocks: blocks of a cluster, at most.
        striped: whether rows are striped.
    """
    forward = len(sizes) == 1
    if striped:
        those = _striped_tiles(columns, forward, device, most_blocks)
        return next((it for it in those if _fits(it, sizes, device)), None)
    vec = vector_width(columns, sizes[0])
    vectors, whole = columns // vec, vec * sizes[0] == 16
    most = USUAL if whole else 9 if vec == max(sizes) == 2 else 8
    teams = TEAMS
    if device.has_clusters:
        clusters = FORWARD_CLUSTERS if forward else BACKWARD_CLUSTERS
        teams += tuple(team for team in clusters if team[1] <= most_blocks)
    tiles = [warp_tile(vectors, vec, WARP_VECTORS if forward else most)]
    long = LONG_TEAMS if sizes == (2, 2) else ()
    tiles += [team_tile(vectors, vec, 8 if team in long else most, (team,)) for team in teams]
    tiles += [team_tile(vectors, vec, 8, teams[-1:])]
    tile = next((it for it in tiles if it and _fits(it, sizes, device)), None)
    if tile is None:
        return None
    if max(sizes) > 2:
        return tile
    if forward and vec == 8 and columns in SPREAD:
        return with_blocks(team_tile(vectors, vec, 2, TEAMS) or tile, SPREAD_RESIDENT)
    if forward or tile.cluster == 1:
        return with_blocks(tile, RESIDENT if tile.held <= HELD else RESIDENT // 2)
    return with_blocks(tile, BACKWARD_RESIDENT if tile.held <= HELD else RESIDENT)


def _striped_tiles(
    columns: int, forward: bool, device: _launch.Limits, most_blocks: int
) -> Iterator[Tile]:
    """Tiles of striped rows; the first that fits is taken."""
    tile = striped_tile(columns, STRIPED_VECTORS, WARPS)
    if tile is not None:  # in a forward in registers; wider ones wait if they can
        wide = forward and columns >= STRIPED_SHARED_MEMORY_FROM
        resident = RESIDENT if forward else BACKWARD_RESIDENT
        yield with_blocks(tile, RESIDENT // 2 if wide else resident)
    clusters = (team for team in CLUSTERS if team[1] <= most_blocks)
    tile = striped_tile(columns, 8, clusters if device.has_clusters else [(1024, 1)])
    if tile is not None:
        yield with_blocks(tile, RESIDENT // 2 if forward else RESIDENT)


def shared_memory_tile(
    columns: int,
    size: int,
    device: _launch.Limits,
    most_blocks: int = LARGEST_CLUSTERS[0],
    losses: bool = False,
    striped: bool = False,
) -> Tile | None:
    """The tile of :data:`IN_SHARED_MEMORY` rows; None for other rows, and devices without clusters.

    ``most_blocks``: blocks of a cluster, at most. ``losses``: whether rows have targets.
    ``striped``: whether rows are striped.
    """
    if size != 2 or not device.has_clusters:
        return None
    wanted = CLUSTERS if striped else LOSS_TEAMS if losses else SHARED_MEMORY_TEAMS
    teams = [team for team in wanted if team[1] <= most_blocks]
    tiles: list[Tile | None] = []
    if striped and columns >= STRIPED_SHARED_MEMORY_FROM:
        within, across = STRIPED_SHARED_MEMORY
        tiles = [striped_tile(columns, within, WARPS), striped_tile(columns, across, teams)]
    elif columns % 8 == 0 and any(columns in those for those in IN_SHARED_MEMORY):
        tiles = [team_tile(columns // 8, 8, SHARED_MEMORY_VECTORS, (team,)) for team in teams]
    for tile in tiles:
        if tile is not None:
            block = _shared_bytes(tile, (size,)) + _exchanged(tile, (size,)) + SHARED_PER_BLOCK
            room = device.shared_per_multiprocessor // block
            blocks = min(room, SHARED_MEMORY_RESIDENT // tile.threads)
            if blocks > 1:
                return replace(tile, blocks=blocks)
    return None


def in_registers(tile: Tile, sizes: tuple[int, ...]) -> bool:
    """Whether threads keep their last vectors of both tensors in registers."""
    team = tile.lanes, tile.cluster
    return sizes == (2, 2) and team in LONG_TEAMS and tile.held > HELD


def stages(tile: Tile, sizes: tuple[int, ...], device: _launch.Limits) -> int:
    """STAGES, or as many as fit into shared memory."""
    blocks = max(1, RESIDENT // tile.threads)
    room = device.shared_per_multiprocessor // blocks - SHARED_PER_BLOCK
    room = min(room, device.shared_per_block) - _exchanged(tile, sizes)
    return max(1, min(STAGES, room // _shared_bytes(tile, sizes)))


def _fits(tile: Tile, sizes: tuple[int, ...], device: _launch.Limits) -> bool:
    """Whether a block's part of a row fits into shared memory."""
    return _shared_bytes(tile, sizes) + _exchanged(tile, sizes) <= device.shared_per_block


def _shared_bytes(tile: Tile, sizes: tuple[int, ...]) -> int:
    """Bytes of shared memory for a block's part of a row."""
    return replace(tile, vecs=tile.vecs - in_registers(tile, sizes)).kept(*sizes)


def _exchanged(tile: Tile, sizes: tuple[int, ...]) -> int:
    """Bytes through which warps exchange a forward's maximum and sum, or a backward's sum."""
    forward = len(sizes) == 1
    counters = COUNTER_BYTES if forward and tile.cluster > 1 else 0
    return exchange_bytes(tile, 2 if forward else 1, sizes[0]) + counters


# -------------------------------------------------------------------------------- plans


@dataclass(frozen=True, slots=True)
class Key:
    """What a kernel depends on, beside the device.

    Attributes:
        columns: columns of a row.
        access: elements that one access may cover.
        x: dtype of the scores, or of the output.
        dy: dtype of the output's gradient; None in a forward.
        causal: whether later keys are hidden.
        mask_step: bytes between the columns of the mask; None without one.
        mask_access: whether a vector of the mask may be read in one access.
        gradients: dtype of the logits' gradients, if the forward writes cross entropy and its
            gradients.
    """

    columns: int
    access: int
    x: torch.dtype
    dy: torch.dtype | None = None
    causal: bool = False
    mask_step: int | None = None
    mask_access: bool = False
    gradients: torch.dtype | None = None

    @property
    def plain(self) -> bool:
        """Whether no score is hidden."""
        return self.mask_step is None and not self.causal

    @property
    def striped(self) -> bool:
        """Whether rows are striped: see :class:`Tile`."""
        size = SIZES[self.x]
        if self.dy is not None:
            return is_striped(self.columns, size, SIZES[self.dy], fours=STRIPED_FOURS_BACKWARD)
        if self.gradients is not None:
            return is_striped(self.columns, size, fours=0)
        # With an even number of columns a mask is read several bytes at a time, unless striped.
        return is_striped(self.columns, size) and (self.mask_step is None or self.columns % 2 > 0)


def pieces(key: Key, device: _launch.Limits) -> tuple[Tile, int, int] | None:
    """The tile of rows whose blocks form no cluster, the rows in flight, and the bytes of shared
    memory of a block; None for other rows, and if they do not fit.
    """
    sizes = [SIZES[it] for it in (key.x, key.dy) if it is not None]
    if not key.plain or key.gradients is not None or set(sizes) != {2} or key.columns % 8:
        return None
    found = pieces_for(FORWARD_PIECES if key.dy is None else BACKWARD_PIECES, key.columns)
    if not found:
        return None
    tile, piece = found[0]
    sums = 2 if key.dy is None else 1  # of a row, also exchanged by the warps of a block
    shared = room_for_pieces(tile, tuple(sizes), sums, device, piece.stages)
    return None if shared is None else (tile, piece.stages, shared)


def source(
    key: Key,
    device: _launch.Limits,
    most_blocks: int = LARGEST_CLUSTERS[0],
    through_memory: bool = True,
) -> tuple[Specialisation, _launch.Geometry, Tile | None]:
    """The kernel, and its tile unless the row is too wide for one.

    ``most_blocks``: blocks of a cluster, at most. ``through_memory``: whether blocks that form no
    cluster may exchange sums.
    """
    defines: dict[str, str | int] = {
        "TX": NAMES[key.x],
        "ACCESS": key.access,
        "CAUSAL": int(key.causal),
    }
    sizes: tuple[int, ...] = (SIZES[key.x],)
    losses = key.gradients is not None
    if key.dy is None:
        kernel, arguments = "forward", "PPPqqiiiiqqqd"
        defines["MASKED"] = int(key.mask_step is not None)
        defines["MASK_STEP"] = key.mask_step or 0
        defines["MASK_ACCESS"] = int(key.mask_access)
        defines["LOSS"] = int(losses)
        arguments += "PPPPqd" * losses
    else:
        kernel, arguments = "backward", "PPPqqqiiid"
        defines["TDY"] = NAMES[key.dy]
        sizes += (SIZES[key.dy],)
    if through_memory and (found := pieces(key, device)):
        cut, depth, shared = found
        defines |= cut.defines(key.columns) | {"STAGES": depth}
        if key.dy is None:
            defines["TY"] = NAMES[key.x]
        geometry = _launch.Geometry(
            cut.threads, arguments + "QP", shared, carveout=100, together=cut.cluster
        )
        kernel += "_pieces"
        return Specialisation("softmax", kernel, tuple(defines.items())), geometry, cut
    in_shared_memory, striped = None, key.striped
    if key.dy is None and (key.plain or striped):
        in_shared_memory = shared_memory_tile(
            key.columns, sizes[0], device, most_blocks, losses, striped
        )
    tile = in_shared_memory or row_tile(key.columns, sizes, device, most_blocks, striped)
    if tile is None:
        kernel += "_wide"
        defines |= {"VEC": vector_width(key.columns, sizes[0]), "LANES": WIDE_LANES}
        geometry = _launch.Geometry(WIDE_LANES, arguments)
    else:
        defines |= tile.defines(key.columns)
        looped = key.dy is None and in_shared_memory is None and key.columns >= LOOPED_FROM
        depth = stages(tile, sizes, device) if looped else 1
        if key.dy is None:
            waits = int(in_shared_memory is not None)
            defines |= {"LOOPED": int(looped), "STAGES": depth, "IN_SHARED_MEMORY": waits}
            defines["TY"] = NAMES[key.gradients or key.x]
        else:
            defines["IN_REGISTERS"] = int(in_registers(tile, sizes))
        geometry = _launch.Geometry(
            tile.threads, arguments, depth * _shared_bytes(tile, sizes), tile.cluster, carveout=100
        )
    return Specialisation("softmax", kernel, tuple(defines.items())), geometry, tile


class Plan:
    """A kernel on a device.

    Attributes:
        whole: whether a row fits on the chip. Otherwise there is no kernel for losses.
    """

    __slots__ = ("_cluster", "_kernel", "_most", "_rows", "_through_memory", "whole")

    def __init__(self, key: Key, device: int) -> None:
        limits = _launch.limits(device)
        for way in EXCHANGE_OPTIONS:
            found, geometry, tile = source(key, limits, *way)
            if (key.gradients and tile is None) or runs_clusters(found, geometry, device):
                break
        self.whole = tile is not None
        if key.gradients and not self.whole:
            return
        self._kernel = _launch.load(found, geometry, device)
        self._rows, self._cluster = (tile.rows, tile.cluster) if tile else (1, 1)
        self._through_memory = geometry.together > 1
        looped = self._through_memory or dict(found.defines).get("LOOPED")
        resident = MOST_ROWS
        if self._cluster > 1 or looped:
            resident = require_clusters(self._kernel, key.columns)
        self._most = resident if looped else MOST_ROWS

    def __call__(self, rows: int, *values: Any) -> None:
        """Launch; ``values`` are the kernel's arguments."""
        teams = -(-rows // self._rows)
        groups = groups_of(teams, self._most) if self._through_memory else min(teams, self._most)
        epochs = (-(-rows // groups),) if self._through_memory else ()
        self._kernel.launch(groups * self._cluster, 1, *values, *epochs)


_plans: Plans[Plan] = Plans()


def representative_sources(
    device: _launch.Limits,
) -> Iterator[tuple[Specialisation, _launch.Geometry]]:
    """Kernels of every kind, type and shape that the operators use on such a device."""
    low, full, double, half = torch.bfloat16, torch.float32, torch.float64, torch.float16
    keys = []
    narrow, wide = (1, 129, 1024, 2052, 4096, 5003, 5120, 8192), (32768, 50_257, 65536, 151_936)
    for columns in (*narrow, *wide, 262144, 2**21):
        vec = vector_width(columns, 2)
        keys += [Key(columns, vec, low, dy) for dy in (None, low)]
    for columns in (96, 4096, 5003, 20480, 2**21):
        keys += [Key(columns, 8, low, dy, True) for dy in (None, low)]
        keys += [Key(columns, 8, low, None, False, step, step == 1) for step in (0, 1)]
    for columns in (64, 2048, 4096, 5003, 8192, 32000, 50_257, 128_256, 151_936, 262144):
        keys.append(Key(columns, 8, low, gradients=low))
    for x, dx in ((half, half), (full, full), (full, low)):
        vec = 16 // SIZES[x]
        keys += [Key(columns, vec, x, gradients=dx) for columns in (512, 32000, 128_256)]
    for x, dy in ((full, full), (full, low), (half, full), (double, half)):
        vec = 16 // SIZES[x]
        for columns in (512, 200_000, 262144):
            keys += [Key(columns, vec, x), Key(columns, vec, x, dy), Key(columns, 1, x, dy)]
    for key in keys:
        yield source(key, device)[:2]
        if pieces(key, device):
            yield source(key, device, through_memory=False)[:2]


# ---------------------------------------------------------------------------- operators


def _accepts(*tensors: Tensor) -> bool:
    """Whether this set takes these tensors as scores."""
    return all(
        (type(tensor) in PLAIN or is_plain(tensor))
        and on_device(tensor)
        and tensor.dtype in NAMES
        and tensor.dim() > 0
        for tensor in tensors
    )


def _sizes(op: str, x: Tensor) -> tuple[int, int, int, int]:
    """(rows, columns, queries, heads)."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    check_size(op, "columns", columns, MOST_COLUMNS)
    check_size(op, "rows", rows, MOST_ROWS)
    dim = x.dim()
    return rows, columns, x.shape[-2] if dim > 1 else 1, x.shape[-3] if dim > 2 else 1


def _planned(device: int, *key: Any) -> Plan:
    full = (device, *key)
    return _plans.get(full) or _plans.get_or_create(full, lambda: Plan(Key(*key), device))


def _forward(
    op: Contract[..., Any], input: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> Tensor:
    arguments = (input, scale) if mask is None else (input, mask, scale)
    if not (_accepts(input) and is_number(scale)):
        decline(op, *arguments)
    if mask is not None or causal:
        op.check(*arguments)
    name = op.name
    output = fresh(name, input, input.shape)
    if not input.numel():
        return output
    rows, columns, queries, heads = _sizes(name, input)
    strides = (0, 0, 0)
    mask_step, mask_address, mask_access = None, 0, False
    size = SIZES[input.dtype]
    vec = vector_width(columns, size)
    if mask is not None:
        mask, strides = broadcast_mask(plain(name, "mask", mask), input.shape)
        mask_step, mask_address = mask.stride(-1) if columns > 1 else 1, mask.data_ptr()
        mask_access = mask_step == 1 and not any(at % vec for at in (mask_address, *strides))
    input, stride = dense_rows(input)
    address = input.data_ptr()
    access = vec
    if (address | stride * size) & 15:
        access = access_width(vec, (address, size), (stride * size, size))
    plan = _planned(
        input.get_device(), columns, access, input.dtype, None, causal, mask_step, mask_access
    )
    plan(
        rows,
        address,
        mask_address,
        output.data_ptr(),
        rows,
        stride,
        columns,
        queries,
        heads,
        1 + columns - queries,
        *strides,
        scale,
    )
    return output


def run_with_losses(op: str, logits: Tensor, step: int, losses: Losses, out: Tensor) -> bool:
    """Write losses and dense gradients of rows that lie ``step`` apart, which are read once.

    Returns:
        Whether that was done: a row must fit on the chip and, unless it is striped, be whole
        vectors. Not in place: the target's score is read while the row is written.
    """
    columns, dtype, address = logits.shape[-1], logits.dtype, address_of(op, logits)
    size = SIZES[dtype]
    key = (columns, 16 // size, dtype, None, False, None, False, out.dtype)
    if (columns * size | step * size | address) & 15 and not Key(*key).striped:
        return False
    plan = _planned(logits.get_device(), *key)
    if not plan.whole:
        return False
    check_size(op, "columns", columns, MOST_COLUMNS)
    rows = losses.target.numel()
    check_size(op, "rows", rows, MOST_ROWS)
    *tensors, ignore, z = losses
    shape = (rows, step, columns, 1, 1, columns, 0, 0, 0, 1.0)
    plan(rows, address, 0, out.data_ptr(), *shape, *(it.data_ptr() for it in tensors), ignore, z)
    return True


def _backward(
    op: Contract[..., Any], output_grad: Tensor, softmax_output: Tensor, scale: float, causal: bool
) -> Tensor:
    dy, y = output_grad, softmax_output
    if not (
        _accepts(dy, y)
        and dy.shape == y.shape
        and dy.get_device() == y.get_device()
        and is_number(scale)
    ):
        decline(op, dy, y, scale)
    if causal:
        op.check(dy, y, scale)
    name = op.name
    dx = fresh(name, y, y.shape)
    if not y.numel():
        return dx
    rows, columns, queries, _ = _sizes(name, y)
    y, y_stride = dense_rows(y)
    dy, dy_stride = dense_rows(dy)
    size, dy_size = SIZES[y.dtype], SIZES[dy.dtype]
    y_address, dy_address = y.data_ptr(), dy.data_ptr()
    access = vector_width(columns, size)
    if (y_address | dy_address | y_stride * size | dy_stride * dy_size) & 15:
        access = access_width(
            access,
            (y_address, size),
            (y_stride * size, size),
            (dy_address, dy_size),
            (dy_stride * dy_size, dy_size),
        )
    plan = _planned(y.get_device(), columns, access, y.dtype, dy.dtype, causal)
    plan(
        rows,
        dy_address,
        y_address,
        dx.data_ptr(),
        rows,
        dy_stride,
        y_stride,
        columns,
        queries,
        1 + columns - queries,
        scale,
    )
    return dx


@repeating
def scaled_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
    """``scaled_softmax_forward`` of the contract."""
    return _forward(contracts.scaled_softmax_forward, input, None, scale, False)


@repeating
def scaled_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """``scaled_softmax_backward`` of the contract."""
    return _backward(contracts.scaled_softmax_backward, output_grad, softmax_output, scale, False)


@repeating
def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
    """``scaled_masked_softmax_forward`` of the contract."""
    if mask is None:
        decline(contracts.scaled_masked_softmax_forward, input, mask, scale)
    return _forward(contracts.scaled_masked_softmax_forward, input, mask, scale, False)


@repeating
def scaled_masked_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """``scaled_masked_softmax_backward`` of the contract."""
    return _backward(
        contracts.scaled_masked_softmax_backward, output_grad, softmax_output, scale, False
    )


@repeating
def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
    """``scaled_upper_triang_masked_softmax_forward`` of the contract."""
    return _forward(contracts.scaled_upper_triang_masked_softmax_forward, input, None, scale, True)


@repeating
def scaled_upper_triang_masked_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """``scaled_upper_triang_masked_softmax_backward`` of the contract."""
    return _backward(
        contracts.scaled_upper_triang_masked_softmax_backward,
        output_grad,
        softmax_output,
        scale,
        True,
    )


@repeating
def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
    """``scaled_aligned_causal_masked_softmax_forward`` of the contract."""
    return _forward(
        contracts.scaled_aligned_causal_masked_softmax_forward, input, None, scale, True
    )


@repeating
def scaled_aligned_causal_masked_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """``scaled_aligned_causal_masked_softmax_backward`` of the contract."""
    return _backward(
        contracts.scaled_aligned_causal_masked_softmax_backward,
        output_grad,
        softmax_output,
        scale,
        True,
    )
