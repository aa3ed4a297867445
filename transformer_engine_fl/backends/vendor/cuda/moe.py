"""Moving tokens to their experts and back in CUDA C++ (``row_maps.cu`` and ``moe.cu``).

A permutation takes two launches. The first counts pairs of tokens and experts in consecutive
groups. The second, a dependent launch, overlaps with it: each team of threads loads a token,
then computes the rows of the token's pairs from the counts, and copies the token to them. The
other operators get a row id map as an argument, and take one launch, or two if rows that no pair
has must be zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends._row_map import RowMap
from transformer_engine_fl.backends.vendor.cuda import _launch
from transformer_engine_fl.backends.vendor.cuda._arguments import (
    MOST_COLUMNS,
    NAMES,
    by_rows,
    check_integers,
    check_size,
    fresh,
    plain,
    pointer,
    vector_width,
)
from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda._sources import (
    LoadedKernels,
    Source,
    common_access,
)
from transformer_engine_fl.ops import moe as contracts
from transformer_engine_fl.ops._dtypes import math_dtype
from transformer_engine_fl.ops.moe import rows_of_indices

__all__ = [
    "moe_permute_bwd",
    "moe_permute_fwd",
    "moe_permute_mask_bwd",
    "moe_permute_mask_fwd",
    "moe_unpermute_bwd",
    "moe_unpermute_fwd",
    "moe_unpermute_mask_bwd",
    "moe_unpermute_mask_fwd",
]

# ------------------------------------------------------------------------------ groups

BUCKETS: Final = 1024
"""Buckets for experts given by index: ``kBuckets`` of ``include/row_maps.cuh``."""
MOST_GROUPS: Final = 64
"""For each pair a warp sums the counts of its expert over all groups: two for each lane."""
COUNT_THREADS: Final = 256
MASK_THREADS: Final = 1024
MOST: Final = 2**30
"""Pairs, rows and entries of a map are 32-bit numbers in the kernels."""


def groups_of(size: int, least: int) -> tuple[int, int]:
    """(size of a group, number of groups); the size is a multiple of ``least``."""
    each = -(-size // (MOST_GROUPS * least)) * least
    return each, -(-size // each)


# ------------------------------------------------------------------------------- tiles

PAIRS: Final = 1
"""Rows of a token that ``spread_weighted`` has in flight at once; two and four took longer."""
RESIDENT: Final = 768
"""Threads of a multiprocessor; leaves each the registers for the row in flight."""
SUMMING: Final = 896
"""The same for kernels that sum rows: a thread has four vectors of one row in flight."""


@dataclass(frozen=True, slots=True)
class Team:
    """The threads that share a token.

    Attributes:
        lanes: the number of threads.
        vecs: vectors of a row that each thread has at once.
        whole: whether the team holds a whole row at once.
    """

    lanes: int
    vecs: int
    whole: bool

    @property
    def teams(self) -> int:
        """Teams of a block."""
        return 4 if self.lanes == 32 else 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.teams

    @property
    def defines(self) -> dict[str, str | int]:
        """As macros."""
        return {
            "LANES": self.lanes,
            "TEAMS": self.teams,
            "VECS": self.vecs,
            "WHOLE": int(self.whole),
        }


def team_of(vectors: int, usual: int, lanes: int, *, halved: bool = False) -> Team:
    """The team for a row.

    Args:
        vectors: vectors of the row.
        usual: vectors of a thread, as long as the team may grow.
        lanes: the most threads.
        halved: whether to use a power of two of threads, for a reduction that halves them.
    """
    wanted = max(32, -(-vectors // (usual * 32)) * 32)
    if halved:
        wanted = 1 << (wanted - 1).bit_length()
    lanes = min(lanes, wanted)
    vecs = max(1, min(4, -(-vectors // lanes)))
    return Team(lanes, vecs, vectors <= lanes * vecs)


def _blocks(team: Team, *dtypes: torch.dtype) -> int:
    """Blocks that give RESIDENT threads on a multiprocessor; 1 unless all values have 2 bytes."""
    small = all(dtype.itemsize == 2 for dtype in dtypes)
    return max(1, RESIDENT // team.threads) if small else 1


# ------------------------------------------------------------------------------ kernels

_INDEX_NAMES: Final = {torch.int32: "int32", torch.int64: "int64"}


def counting(kind: torch.dtype | int, device: _launch.Limits) -> Source:
    """The kernel that counts pairs; ``kind``: the indices' dtype, or a mask's number of experts."""
    if isinstance(kind, torch.dtype):
        found = Specialisation("row_maps", "count_indices", (("TI", _INDEX_NAMES[kind]),))
        return found, _launch.Geometry(COUNT_THREADS, "PPPPiiiqq"), 1
    lanes = min(MASK_THREADS, max(32, 1 << (kind - 1).bit_length()))
    found = Specialisation("row_maps", "count_mask", (("LANES", lanes),))
    return found, _launch.Geometry(MASK_THREADS, "PPPiiiqq"), 1


def permuting(
    unit: int, units: int, indices: torch.dtype | None, moved: int, device: _launch.Limits
) -> Source:
    """The kernel that computes rows from counts, and copies tokens to them.

    Args:
        unit: bytes of an access.
        units: accesses of a row.
        indices: dtype of the experts' indices; None for a mask.
        moved: bytes of a prob; 0 without probs.
        device: limits of the device.
    """
    team = team_of(units, 4, 256)
    defines = team.defines | {"UNIT": unit}
    if indices is None:
        kernel, arguments = "permute_mask", "PPPPPPPPiiiiiiqqqqq"
        defines["MOVED"] = moved
    else:
        kernel, arguments = "permute_indices", "PPPPPPPiiiiiiqqq"
        defines["TI"] = _INDEX_NAMES[indices]
    found = Specialisation("moe", kernel, tuple(defines.items()))
    return (
        found,
        _launch.Geometry(team.threads, arguments, dependent=device.has_clusters),
        team.teams,
    )


def spreading(unit: int, units: int, mask: bool, device: _launch.Limits) -> Source:
    """The kernel that copies tokens to rows by a map."""
    team = team_of(units, 4, 256)
    defines = team.defines | {"UNIT": unit, "MASK": int(mask)}
    found = Specialisation("moe", "spread", tuple(defines.items()))
    return found, _launch.Geometry(team.threads, "PPPPiiiiqqq"), team.teams


def zeroing(unit: int, mask: bool, device: _launch.Limits) -> Source:
    """The kernel that fills rows that no pair has with zeros."""
    team = Team(32, 1, True)
    defines = team.defines | {"UNIT": unit, "MASK": int(mask)}
    found = Specialisation("moe", "zero_unused", tuple(defines.items()))
    geometry = _launch.Geometry(team.threads, "PPPiiiiqq", dependent=device.has_clusters)
    return found, geometry, team.threads


def collecting(
    columns: int,
    access: int,
    x: torch.dtype,
    probs: torch.dtype | None,
    moved: int,
    mask: bool,
    device: _launch.Limits,
) -> Source:
    """The kernel that sums the rows of each token.

    Args:
        columns: columns of a row.
        access: elements that one access may cover.
        x: dtype of the rows.
        probs: dtype of the probs; None without.
        moved: bytes of a number that is copied from each row to its pair; 0 for none.
        mask: whether the map is that of a mask.
        device: limits of the device.
    """
    vec = vector_width(columns or 1, x.itemsize)
    team = team_of(columns // vec, 4, 512)
    defines = team.defines | {
        "VEC": vec,
        "ACCESS": access,
        "BLOCKS": max(1, SUMMING // team.threads),
        "MASK": int(mask),
        "TX": NAMES[x],
        "TP": NAMES[probs or x],
        "PROBS": int(probs is not None),
        "MOVED": moved,
    }
    found = Specialisation("moe", "collect", tuple(defines.items()))
    return found, _launch.Geometry(team.threads, "PPPPPPiiiiqqqqq"), team.teams


def weighting(
    columns: int,
    access: int,
    dy: torch.dtype,
    x: torch.dtype,
    probs: torch.dtype,
    mask: bool,
    device: _launch.Limits,
) -> Source:
    """The kernel ``spread_weighted``; the arguments are as in :func:`collecting`."""
    vec = vector_width(columns, dy.itemsize)
    team = team_of(columns // vec, 4, 512, halved=True)
    defines = team.defines | {
        "VEC": vec,
        "ACCESS": access,
        "PAIRS": PAIRS,
        "BLOCKS": _blocks(team, dy, x),
        "MASK": int(mask),
        "TDY": NAMES[dy],
        "TX": NAMES[x],
        "TP": NAMES[probs],
    }
    found = Specialisation("moe", "spread_weighted", tuple(defines.items()))
    return found, _launch.Geometry(team.threads, "PPPPPPPiiiiqqqqqq"), team.teams


_kernels = LoadedKernels()


def representative_sources(
    device: _launch.Limits,
) -> Iterator[tuple[Specialisation, _launch.Geometry]]:
    """A selection of the operators' kernels for a device: every kind, type and shape."""
    low, full, double, half = torch.bfloat16, torch.float32, torch.float64, torch.float16
    found: list[Source] = [counting(kind, device) for kind in (torch.int32, torch.int64)]
    found += [counting(experts, device) for experts in (1, 2000)]
    for unit, units, mask in ((16, 512, False), (16, 4096, True), (8, 5, True), (1, 9, False)):
        found += [permuting(unit, units, torch.int64, 0, device), zeroing(unit, mask, device)]
        found += [permuting(unit, units, None, 4, device), spreading(unit, units, mask, device)]
    found += [permuting(2, 300, torch.int32, 0, device), permuting(4, 300, None, 0, device)]
    found += [permuting(16, 512, None, moved, device) for moved in (2, 8)]
    for x, access in ((low, 8), (half, 2), (full, 4), (double, 2)):
        for columns, mask in ((64, False), (7168, True), (32768, False)):
            found.append(collecting(columns, access, x, full, 0, mask, device))
            found.append(weighting(columns, access, x, x, full, mask, device))
        found.append(weighting(37, 1, x, low, double, True, device))
    found += [collecting(37, 1, low, None, moved, True, device) for moved in (0, 2, 4, 8)]
    for source, geometry, _ in found:
        yield source, geometry


# --------------------------------------------------------------------------- launching


def _map(op: str, row_id_map: Tensor, mask: bool) -> RowMap:
    entries = plain(op, "row_id_map", row_id_map)
    check_size(op, "entries of row_id_map", entries.numel(), MOST)
    return RowMap.of(entries, mask)


def _in_units(op: str, x: Tensor) -> tuple[Tensor, int, int, int]:
    """Rows to copy: (rows, bytes of an access, accesses of a row, accesses of a row stride)."""
    x, step = by_rows(x)
    size = x.itemsize
    width, step = x.shape[1] * size, step * size
    unit = math.gcd(width, step, x.data_ptr(), 16)
    check_size(op, "accesses of a row", width // unit, MOST_COLUMNS)
    return x, unit, width // unit, step // unit


def _collected(
    op: str,
    rows: Tensor,
    pairs: RowMap,
    probs: Tensor | None = None,
    moved: Tensor | None = None,
    to: Tensor | None = None,
) -> Tensor:
    """``[T, C]``, the sum of each token's rows; copies ``moved`` to its pairs in ``to``."""
    columns = rows.shape[1]
    y = fresh(op, rows, (pairs.tokens, columns))
    if not pairs.tokens or not (columns or moved is not None):
        return y
    check_size(op, "columns", columns, MOST_COLUMNS)
    check_size(op, "rows", rows.shape[0], MOST)
    x, step = by_rows(rows)
    kernel = _kernels.of(
        x,
        collecting,
        columns,
        common_access(columns, (x, step)),
        x.dtype,
        None if probs is None else probs.dtype,
        0 if moved is None else moved.itemsize,
        pairs.mask,
    )
    kernel(
        pairs.tokens,
        x.data_ptr(),
        y.data_ptr(),
        pairs.entries.data_ptr(),
        pointer(probs),
        pointer(moved),
        pointer(to),
        pairs.tokens,
        pairs.slots,
        x.shape[0],
        columns,
        step,
        *pairs.steps,
        *((0, 0) if probs is None else probs.stride()),
    )
    return y


def _zero_unused(op: str, dx: Tensor, pairs: RowMap, owner: Tensor) -> None:
    """Fill the rows of ``dx`` that no pair has with zeros; ``owner`` has the other rows' pairs."""
    _, unit, units, _ = _in_units(op, dx)
    have = dx.shape[0]
    _kernels.of(dx, zeroing, unit, pairs.mask)(
        have,
        dx.data_ptr(),
        pairs.entries.data_ptr(),
        owner.data_ptr(),
        pairs.tokens,
        pairs.slots,
        have,
        units,
        *pairs.steps,
    )


def _spread(op: str, dy: Tensor, pairs: RowMap, dx: Tensor) -> None:
    """Write each token of ``dy`` to its rows of ``dx``, and zeros to the other rows."""
    dy, unit, units, step = _in_units(op, dy)
    have = dx.shape[0]
    owner = fresh(op, pairs.entries, (have,))
    _kernels.of(dy, spreading, unit, units, pairs.mask)(
        pairs.tokens,
        dy.data_ptr(),
        dx.data_ptr(),
        pairs.entries.data_ptr(),
        owner.data_ptr(),
        pairs.tokens,
        pairs.slots,
        have,
        units,
        step,
        *pairs.steps,
    )
    _zero_unused(op, dx, pairs, owner)


def _spread_weighted(
    op: str, dy: Tensor, pairs: RowMap, x: Tensor, probs: Tensor, dx: Tensor, dprobs: Tensor
) -> None:
    """Write each token times its probs to its rows of ``dx``, zeros elsewhere; and ``dprobs``."""
    have, columns = dx.shape
    check_size(op, "columns", columns, MOST_COLUMNS)
    dy, dy_step = by_rows(dy)
    x, x_step = by_rows(x)
    owner = fresh(op, pairs.entries, (have,))
    access = common_access(columns, (dy, dy_step), (x, x_step))
    kernel = _kernels.of(dy, weighting, columns, access, dy.dtype, x.dtype, probs.dtype, pairs.mask)
    kernel(
        pairs.tokens,
        dy.data_ptr(),
        x.data_ptr(),
        probs.data_ptr(),
        pairs.entries.data_ptr(),
        owner.data_ptr(),
        dx.data_ptr(),
        dprobs.data_ptr(),
        pairs.tokens,
        pairs.slots,
        have,
        columns,
        dy_step,
        x_step,
        *pairs.steps,
        *probs.stride(),
    )
    _zero_unused(op, dx, pairs, owner)


# ---------------------------------------------------------------------------- operators


@repeating
def moe_permute_fwd(
    input: Tensor, indices: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor]:
    """``moe_permute_fwd`` of the contract."""
    op = "moe_permute_fwd"
    contracts.moe_permute_fwd.check(input, indices, num_out_tokens)
    check_integers(op, num_out_tokens)
    input, indices = plain(op, "input", input), plain(op, "indices", indices)
    tokens, topk = indices.shape
    pairs = tokens * topk
    have = rows_of_indices(indices, num_out_tokens)
    check_size(op, "rows", have, MOST)
    check_size(op, "pairs", pairs, MOST)
    output = fresh(op, input, (have, input.shape[1]))
    row_id_map = fresh(op, indices, (topk, tokens), torch.int32)
    if not tokens:
        return output.zero_(), row_id_map
    x, unit, units, step = _in_units(op, input)
    each, groups = groups_of(pairs, 2 * COUNT_THREADS)
    places = fresh(op, row_id_map, (pairs, 2))
    counts = fresh(op, row_id_map, (BUCKETS, groups, 2))
    extremes = fresh(op, indices, (4, groups), torch.int64)
    steps = indices.stride()
    _kernels.of(x, counting, indices.dtype)(
        groups,
        indices.data_ptr(),
        places.data_ptr(),
        counts.data_ptr(),
        extremes.data_ptr(),
        pairs,
        topk,
        each,
        *steps,
    )
    _kernels.of(x, permuting, unit, units, indices.dtype, 0)(
        tokens,
        x.data_ptr(),
        output.data_ptr(),
        places.data_ptr(),
        counts.data_ptr(),
        extremes.data_ptr(),
        indices.data_ptr(),
        row_id_map.data_ptr(),
        tokens,
        topk,
        have,
        each,
        groups,
        units,
        step,
        *steps,
    )
    return output, row_id_map


@repeating
def moe_permute_bwd(grad_output: Tensor, row_id_map: Tensor) -> Tensor:
    """``moe_permute_bwd`` of the contract."""
    op = "moe_permute_bwd"
    contracts.moe_permute_bwd.check(grad_output, row_id_map)
    return _collected(op, plain(op, "grad_output", grad_output), _map(op, row_id_map, False))


def _unpermuted(
    op: str, input: Tensor, row_id_map: Tensor, probs: Tensor | None, *, mask: bool
) -> Tensor:
    input = plain(op, "input", input)
    probs = None if probs is None else plain(op, "probs", probs)
    return _collected(op, input, _map(op, row_id_map, mask), probs)


@repeating
def moe_unpermute_fwd(input: Tensor, row_id_map: Tensor, probs: Tensor | None = None) -> Tensor:
    """``moe_unpermute_fwd`` of the contract."""
    contracts.moe_unpermute_fwd.check(input, row_id_map, probs)
    return _unpermuted("moe_unpermute_fwd", input, row_id_map, probs, mask=False)


def _unpermute_gradients(
    op: str,
    grad_output: Tensor,
    row_id_map: Tensor,
    input: Tensor | None,
    probs: Tensor | None,
    num_rows: int,
    *,
    mask: bool,
) -> tuple[Tensor, Tensor | None]:
    check_integers(op, num_rows)
    check_size(op, "rows", num_rows, MOST)
    dy = plain(op, "grad_output", grad_output)
    pairs = _map(op, row_id_map, mask)
    dx = fresh(op, dy, (num_rows, dy.shape[1]))
    moves = dx.numel() > 0 and pairs.tokens > 0
    if input is None or probs is None:
        if moves:
            _spread(op, dy, pairs, dx)
        else:
            dx.zero_()
        return dx, None
    x, probs = plain(op, "input", input), plain(op, "probs", probs)
    dprobs = fresh(op, probs, probs.shape, math_dtype(probs.dtype))
    if moves:
        _spread_weighted(op, dy, pairs, x, probs, dx, dprobs)
    else:
        dx.zero_()
        dprobs.zero_()
    return dx, dprobs


@repeating
def moe_unpermute_bwd(
    grad_output: Tensor,
    row_id_map: Tensor,
    input: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    num_rows: int,
) -> tuple[Tensor, Tensor | None]:
    """``moe_unpermute_bwd`` of the contract."""
    op = contracts.moe_unpermute_bwd
    op.check(grad_output, row_id_map, input, probs, num_rows=num_rows)
    return _unpermute_gradients(
        op.name, grad_output, row_id_map, input, probs, num_rows, mask=False
    )


@repeating
def moe_permute_mask_fwd(
    input: Tensor, routing_map: Tensor, probs: Tensor | None = None, *, num_out_tokens: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """``moe_permute_mask_fwd`` of the contract."""
    op = "moe_permute_mask_fwd"
    contracts.moe_permute_mask_fwd.check(input, routing_map, probs, num_out_tokens=num_out_tokens)
    check_integers(op, num_out_tokens)
    input, routed = plain(op, "input", input), plain(op, "routing_map", routing_map)
    tokens, experts = routed.shape
    have = num_out_tokens
    check_size(op, "rows", have, MOST)
    check_size(op, "entries of row_id_map", tokens * (2 * experts + 1), MOST)
    output = fresh(op, input, (have, input.shape[1]))
    row_id_map = fresh(op, routed, (tokens, 2 * experts + 1), torch.int32)
    permuted = None
    if probs is not None:
        probs = plain(op, "probs", probs)
        permuted = fresh(op, probs, (have,))
    if not tokens:
        if permuted is not None:
            permuted.zero_()
        return output.zero_(), permuted, row_id_map
    x, unit, units, step = _in_units(op, input)
    each, groups = groups_of(tokens, 32)
    ranks = fresh(op, row_id_map, (tokens, experts))
    counts = fresh(op, row_id_map, (experts + 1, groups, 2))
    steps = routed.stride()
    _kernels.of(x, counting, experts)(
        groups,
        routed.data_ptr(),
        ranks.data_ptr(),
        counts.data_ptr(),
        tokens,
        experts,
        each,
        *steps,
    )
    _kernels.of(x, permuting, unit, units, None, 0 if probs is None else probs.itemsize)(
        tokens,
        x.data_ptr(),
        output.data_ptr(),
        ranks.data_ptr(),
        counts.data_ptr(),
        routed.data_ptr(),
        row_id_map.data_ptr(),
        pointer(probs),
        pointer(permuted),
        tokens,
        experts,
        have,
        each,
        groups,
        units,
        step,
        *steps,
        *((0, 0) if probs is None else probs.stride()),
    )
    return output, permuted, row_id_map


@repeating
def moe_permute_mask_bwd(
    grad_output: Tensor, row_id_map: Tensor, grad_permuted_probs: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """``moe_permute_mask_bwd`` of the contract."""
    op = "moe_permute_mask_bwd"
    contracts.moe_permute_mask_bwd.check(grad_output, row_id_map, grad_permuted_probs)
    rows = plain(op, "grad_output", grad_output)
    pairs = _map(op, row_id_map, True)
    if grad_permuted_probs is None:
        return _collected(op, rows, pairs), None
    moved = plain(op, "grad_permuted_probs", grad_permuted_probs).contiguous()
    grad_probs = fresh(op, moved, (pairs.tokens, pairs.slots))
    return _collected(op, rows, pairs, None, moved, grad_probs), grad_probs


@repeating
def moe_unpermute_mask_fwd(
    input: Tensor, row_id_map: Tensor, probs: Tensor | None = None
) -> Tensor:
    """``moe_unpermute_mask_fwd`` of the contract."""
    contracts.moe_unpermute_mask_fwd.check(input, row_id_map, probs)
    return _unpermuted("moe_unpermute_mask_fwd", input, row_id_map, probs, mask=True)


@repeating
def moe_unpermute_mask_bwd(
    grad_output: Tensor,
    row_id_map: Tensor,
    input: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    num_rows: int,
) -> tuple[Tensor, Tensor | None]:
    """``moe_unpermute_mask_bwd`` of the contract."""
    op = contracts.moe_unpermute_mask_bwd
    op.check(grad_output, row_id_map, input, probs, num_rows=num_rows)
    return _unpermute_gradients(op.name, grad_output, row_id_map, input, probs, num_rows, mask=True)
