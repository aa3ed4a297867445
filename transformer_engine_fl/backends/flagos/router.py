"""Choosing the experts of each token, and the load-balancing loss, in Triton.

The scores of a token stay in registers from the logits to the probs. Experts are chosen one after
another by integer keys that are ordered like the scores; one integer is the key of no score, and
marks an expert that is taken or not available.

The loss is summed in two stages, in a fixed order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos._arguments import (
    TRITON_TYPES,
    WIDEST_UNIT,
    add_to_cache,
    block_of,
    by_rows,
    check_across,
    check_integers,
    check_numbers,
    check_size,
    fresh,
    launch_of,
    listed,
    plain,
    rows_of_tile,
    rows_to_sum,
)
from transformer_engine_fl.backends.flagos._dependent import (
    dependent_launch,
    has_dependent_launches,
    release_dependents,
    wait_for_predecessor,
)
from transformer_engine_fl.backends.flagos._fetch import fetch
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.ops import router as contracts
from transformer_engine_fl.ops._dtypes import math_dtype

__all__ = [
    "fused_moe_aux_loss_bwd",
    "fused_moe_aux_loss_fwd",
    "fused_score_for_moe_aux_loss_bwd",
    "fused_score_for_moe_aux_loss_fwd",
    "fused_topk_with_score_function_bwd",
    "fused_topk_with_score_function_fwd",
]

# ------------------------------------------------------------------------------ kernels
#
# A program has ROWS tokens. Row strides of tensors, and experts, count units of UNIT elements.

_EPSILON = tl.constexpr(contracts.EPSILON)


@triton.jit  # type: ignore[untyped-decorator]
def _sortable_bits(bits: tl.tensor) -> tl.tensor:
    """Map the bits of floats to integers of the same order, and back."""
    if bits.dtype == tl.int64:
        return bits ^ ((bits >> 63) & ((1 << 63) - 1))
    else:
        return bits ^ ((bits >> 31) & ((1 << 31) - 1))


@triton.jit  # type: ignore[untyped-decorator]
def _lowest(key: tl.tensor) -> tl.tensor:
    """The integer that is the key of no number."""
    if key.dtype == tl.int64:
        return tl.full((), -(1 << 63), tl.int64)
    else:
        return tl.full((), -(1 << 31), tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _key(x: tl.tensor) -> tl.tensor:
    """Integer keys of the same order; all NaN have the highest key."""
    if x.dtype == tl.float64:
        key = _sortable_bits(x.to(tl.int64, bitcast=True))
    else:
        key = _sortable_bits(x.to(tl.int32, bitcast=True))
    key = tl.where(x == 0, 0, key)  # both zeros
    return tl.where(x != x, -1 - _lowest(key), key)


@triton.jit  # type: ignore[untyped-decorator]
def _without_highest(key: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The keys of each row without its highest (the first if several are equal), and that key."""
    place = tl.arange(0, key.shape[1])[None, :]
    best = tl.max(key, axis=1)
    first = tl.min(tl.where(key == best[:, None], place, key.shape[1]), axis=1)
    return tl.where(place == first[:, None], _lowest(key), key), best


@triton.jit  # type: ignore[untyped-decorator]
def _highest(key: tl.tensor, count: tl.tensor) -> tl.tensor:
    """Whether each key is among the ``count`` highest of its row."""
    rest = key
    for _ in tl.range(0, count):
        rest, _best = _without_highest(rest)
    return rest != key


@triton.jit  # type: ignore[untyped-decorator]
def _in_best_groups(
    key: tl.tensor,
    groups: tl.tensor,
    group_topk: tl.tensor,
    of_group: tl.tensor,
    ACC: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tensor:
    """The keys of experts in the groups with the highest sums of their ``of_group`` best scores."""
    ROWS: tl.constexpr = key.shape[0]
    SIZE: tl.constexpr = key.shape[1] // GROUPS
    rest = tl.reshape(key, (ROWS * GROUPS, SIZE))
    total = tl.zeros((ROWS * GROUPS,), ACC)
    for _ in tl.range(0, of_group):
        rest, best = _without_highest(rest)
        total += _sortable_bits(best).to(ACC, bitcast=True)
    group = tl.arange(0, GROUPS)[None, :]
    group_key = _key(tl.reshape(total, (ROWS, GROUPS)))
    group_key = tl.where(group < groups, group_key, _lowest(group_key))
    chosen = _highest(group_key, group_topk)
    chosen = tl.broadcast_to(chosen[:, :, None], (ROWS, GROUPS, SIZE))
    return tl.where(tl.reshape(chosen, (ROWS, GROUPS * SIZE)), key, _lowest(key))


@triton.jit  # type: ignore[untyped-decorator]
def _softmax(x: tl.tensor, some: tl.tensor) -> tl.tensor:
    """The softmax over some elements of each row; 0 for the others."""
    x = tl.where(some, x, float("-inf"))
    weights = tl.where(some, tl.exp(x - tl.max(x, axis=1)[:, None]), 0)
    return weights / tl.sum(weights, axis=1)[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _softplus(x: tl.tensor) -> tl.tensor:
    """``log(1 + exp(x))``, accurate even where it is tiny."""
    small = tl.exp(-tl.abs(x))
    above = 1 + small
    # The logarithm of the rounded sum, corrected by the part of ``small`` that rounding has kept.
    more = tl.where(above == 1, small, tl.log(above) * (small / (above - 1)))
    return tl.maximum(x, 0) + more


@triton.jit  # type: ignore[untyped-decorator]
def _scores(x: tl.tensor, inside: tl.tensor, FUNCTION: tl.constexpr) -> tl.tensor:
    if FUNCTION == "softmax":
        return _softmax(x, inside)
    elif FUNCTION == "sigmoid":
        return 1 / (1 + tl.exp(-x))
    else:
        return tl.sqrt(_softplus(x))


@triton.jit  # type: ignore[untyped-decorator]
def _slope(scores: tl.tensor, ACC: tl.constexpr, FUNCTION: tl.constexpr) -> tl.tensor:
    """The derivative of a score by its logit, computed from the score."""
    if FUNCTION == "sigmoid":
        return scores * (1 - scores)
    else:
        # (1 - exp(-square)) / (2 * score), in a series where the square is small.
        square = scores * scores
        TERMS: tl.constexpr = 14 if scores.dtype == tl.float64 else 7
        series = tl.zeros(scores.shape, ACC) + 1
        for term in tl.static_range(TERMS, 1, -1):
            series = 1 - square * series / term
        slope = (1 - tl.exp(-square)) / (2 * scores)
        return tl.where(square < 0.25, scores / 2 * series, slope)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "rows", "experts", "x_row", "topk", "groups", "size", "group_topk", "of_group", "scale",
    ]
)  # fmt: skip
def _choose(
    x_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    probs_ptr: tl.tensor,
    routing_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    rows: tl.int32,
    experts: tl.int32,
    x_row: tl.int64,
    topk: tl.int32,
    groups: tl.int32,
    size: tl.int32,
    group_topk: tl.int32,
    of_group: tl.int32,
    scale: tl.float64,
    FUNCTION: tl.constexpr,
    ALL: tl.constexpr,
    AFTERWARDS: tl.constexpr,
    NORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr,
    FILLED: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute the scores, the choice and the probs.

    ALL: probs are those of all experts, not of the chosen ones. AFTERWARDS: experts are chosen by
    logits, and the softmax is over the chosen ones. The tile has room for GROUPS groups, of which
    ``groups`` exist, with ``size`` experts each; FILLED: every group fills its room.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = experts * UNIT
    expert = tl.arange(0, BLOCK)
    if FILLED:
        known = expert < columns
    else:
        group, member = expert // (BLOCK // GROUPS), expert % (BLOCK // GROUPS)
        known = (group < groups) & (member < size)
        expert = group * size + member
    inside = (row < rows)[:, None] & known[None, :]
    start = row.to(tl.int64)[:, None]
    x = fetch(x_ptr + start * (x_row * UNIT) + expert[None, :], inside).to(ACC)
    scores = x
    if not AFTERWARDS:
        scores = _scores(x, known[None, :], FUNCTION)
    compared = scores
    if bias_ptr is not None:
        compared += tl.load(bias_ptr + expert, mask=known, other=0).to(ACC)[None, :]
    key = _key(compared)
    key = tl.where(known[None, :], key, _lowest(key))
    if GROUPS > 0:
        key = _in_best_groups(key, groups, group_topk, of_group, ACC, GROUPS)
    chosen = _highest(key, topk)
    if AFTERWARDS:
        scores = _softmax(x, chosen)
    probs = tl.where(known[None, :] if ALL else chosen, scores, 0)
    if NORMALIZED:
        probs = probs / (tl.sum(probs, axis=1)[:, None] + _EPSILON)
    if not ALL:
        probs *= tl.full((), scale, ACC)
    out = start * columns + expert[None, :]
    tl.store(probs_ptr + out, probs.to(probs_ptr.dtype.element_ty), mask=inside)
    tl.store(routing_ptr + out, chosen.to(tl.uint8), mask=inside)
    tl.store(scores_ptr + out, scores, mask=inside)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["rows", "experts", "grad_row", "routing_row", "scores_row", "scale"]
)
def _choose_backward(
    grad_ptr: tl.tensor,
    routing_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    rows: tl.int32,
    experts: tl.int32,
    grad_row: tl.int64,
    routing_row: tl.int64,
    scores_row: tl.int64,
    scale: tl.float64,
    FUNCTION: tl.constexpr,
    NORMALIZED: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The gradient of the logits; without a routing map all experts count as chosen."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = experts * UNIT
    expert = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (expert < columns)
    start = row.to(tl.int64)[:, None]
    grad = fetch(grad_ptr + start * (grad_row * UNIT) + expert, inside).to(ACC)
    scores_ptr += start * (scores_row * UNIT) + expert
    scores = fetch(scores_ptr, inside).to(ACC)
    grad *= tl.full((), scale, ACC)
    chosen = inside
    if routing_ptr is not None:
        routing_ptr += start * (routing_row * UNIT) + expert
        chosen = tl.load(routing_ptr, mask=inside, other=0) != 0
        grad = tl.where(chosen, grad, 0)
    counted = tl.where(chosen, scores, 0)
    product = tl.sum(grad * counted, axis=1)[:, None]
    if FUNCTION == "softmax":
        dx = scores * (grad - product)
    else:
        if NORMALIZED:
            total = tl.sum(counted, axis=1)[:, None] + _EPSILON
            grad = (grad - product / total) / total
        dx = tl.where(chosen, grad * _slope(scores, ACC, FUNCTION), 0)
    tl.store(dx_ptr + start * columns + expert, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "experts", "probs_row"])  # type: ignore[untyped-decorator]
def _sum_loads(
    probs_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    rows: tl.int32,
    experts: tl.int32,
    probs_row: tl.int64,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """One partial sum: the probs of some rows and columns, times the counts."""
    release_dependents(DEPENDENT)
    columns = experts * UNIT
    expert = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = expert < columns
    total = tl.zeros((ROWS, BLOCK), ACC)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        where = row.to(tl.int64)[:, None] * (probs_row * UNIT) + expert[None, :]
        inside = (row < rows)[:, None] & known[None, :]
        total += tl.load(probs_ptr + where, mask=inside, other=0).to(ACC)
    counts = tl.load(counts_ptr + expert, mask=known, other=0).to(ACC)
    loads = tl.where(known, tl.sum(total, axis=0) * counts, 0)
    place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(partial_ptr + place, tl.sum(loads, axis=0))


@triton.jit(do_not_specialize=["count", "factor"])  # type: ignore[untyped-decorator]
def _finish_loss(
    partial_ptr: tl.tensor,
    loss_ptr: tl.tensor,
    const_ptr: tl.tensor,
    count: tl.int32,
    factor: tl.float64,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """The sum of the programs' partial sums, times a factor, and the factor."""
    wait_for_predecessor(DEPENDENT)
    total = tl.zeros((BLOCK,), ACC)
    for first in tl.range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        total += tl.load(partial_ptr + place, mask=place < count, other=0)
    const = tl.full((), factor, ACC)
    tl.store(loss_ptr, (tl.sum(total, axis=0) * const).to(loss_ptr.dtype.element_ty))
    tl.store(const_ptr, const)


@triton.jit(do_not_specialize=["rows", "experts"])  # type: ignore[untyped-decorator]
def _loss_backward(
    grad_ptr: tl.tensor,
    const_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    dprobs_ptr: tl.tensor,
    rows: tl.int32,
    experts: tl.int32,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the same row of gradients for every token."""
    columns = experts * UNIT
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = expert < columns
    counts = tl.load(counts_ptr + expert, mask=known, other=0).to(ACC)
    dprobs = tl.load(const_ptr).to(ACC) * counts * tl.load(grad_ptr).to(ACC)
    tile = tl.broadcast_to(dprobs.to(dprobs_ptr.dtype.element_ty)[None, :], (ROWS, BLOCK))
    out = dprobs_ptr + row.to(tl.int64)[:, None] * columns + expert[None, :]
    tl.store(out, tile, mask=(row < rows)[:, None] & known[None, :])


# -------------------------------------------------------------------------------- plans

# (threads of a program, width of its tile), by width as in `_rows.Cut`.
_TILES = {
    1024: (128, 1024),
    2048: (128, 2048),
    4096: (256, 4096),
    8192: (512, 8192),
    16384: (1024, 16384),
}
_BACKWARD_TILES = {1024: (128, 1024), **{2 * most: tile for most, tile in _TILES.items()}}
_LOSS_THREADS, _LOSS_BLOCK = 128, 1024
_LOSS_TILE, _LOSS_BACKWARD_TILE = 8192, 4096
_LOSS_PROGRAMS = 528


class _Plan(NamedTuple):
    """How to run a kernel.

    Attributes:
        launch: the kernel.
        rows: rows of a program.
        columns: columns of a program.
    """

    launch: _launch.Launch
    rows: int
    columns: int


_PLANS: dict[object, _Plan] = {}


def _tiled(
    op: str,
    kernel: Any,
    like: Tensor,
    dtypes: tuple[Any, ...],
    tiles: dict[int, tuple[int, int]],
    block: int,
    **constants: Any,
) -> _Plan:
    """The plan for rows that fit in registers."""
    key = (kernel.fn, like.device, like.dtype, dtypes, block, *constants.values())
    plan = _PLANS.get(key)
    if plan is None:
        accumulated = math_dtype(like.dtype)
        width = block * (2 if accumulated == torch.float64 else 1)
        tile = listed(tiles, width)
        if tile is None:
            raise NotSupportedError(
                f"{op}: a program keeps at most {max(tiles)} experts in registers, half as many "
                f"in float64; got {block}, rounded up to a power of two"
            )
        threads, elements = tile
        rows = rows_of_tile(elements, width)
        constants.update(ACC=TRITON_TYPES[accumulated], ROWS=rows, BLOCK=block)
        launch = _launch.Launch(kernel, like.device, threads=threads, **constants)
        plan = add_to_cache(_PLANS, key, _Plan(launch, rows, block))
    return plan


def _loss_plan(
    kernel: Any,
    like: Tensor,
    dtypes: tuple[Any, ...],
    experts: int,
    unit: int,
    elements: int,
    **options: Any,
) -> _Plan:
    """The plan for tiles of ``elements`` elements of a matrix with a column for each expert.

    The options are the launch's.
    """
    block = min(block_of(experts), _LOSS_BLOCK)
    rows = rows_of_tile(elements, block)
    launch = launch_of(
        kernel,
        like.device,
        (like.dtype, *dtypes),
        threads=_LOSS_THREADS,
        ACC=TRITON_TYPES[math_dtype(like.dtype)],
        UNIT=unit,
        ROWS=rows,
        BLOCK=block,
        **options,
    )
    return _Plan(launch, rows, block)


# ---------------------------------------------------------------------------- operators


class _Groups(NamedTuple):
    """Experts in groups, and their layout in a tile.

    Attributes:
        number: the number of groups, 0 if experts are not in groups.
        size: experts of a group.
        chosen: the number of groups that are chosen.
        counted: the number of best experts whose scores rank a group.
        room: groups that the tile has room for, a power of two.
        block: the width of the tile.
    """

    number: int = 0
    size: int = 0
    chosen: int = 0
    counted: int = 0
    room: int = 0
    block: int = 0

    @staticmethod
    def of(experts: int, topk: int, num_groups: int | None, group_topk: int | None) -> _Groups:
        """The groups for an operator's options."""
        if num_groups is None or group_topk is None:
            return _Groups(block=block_of(experts))
        size = experts // num_groups
        room = triton.next_power_of_2(num_groups)
        block = room * triton.next_power_of_2(size)
        return _Groups(num_groups, size, group_topk, topk // group_topk, room, block)

    @property
    def filled(self) -> bool:
        """Whether every group fills its room in the tile."""
        return not self.room or self.size * self.room == self.block


def _chosen(
    op: str,
    logits: Tensor,
    topk: int,
    bias: Tensor | None,
    groups: _Groups,
    scale: float,
    function: str,
    **constants: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Probs, routing map and scores."""
    logits = plain(op, "logits", logits)
    rows, experts = logits.shape
    probs = fresh(op, logits, logits.shape)
    routing_map = fresh(op, logits, logits.shape, torch.bool)
    scores = fresh(op, logits, logits.shape, math_dtype(logits.dtype))
    if not rows:
        return probs, routing_map, scores
    check_size(op, "tokens", rows)
    logits, step = rows_to_sum(op, logits)
    if bias is not None:
        bias = plain(op, "expert_bias", bias).contiguous()
    unit = math.gcd(experts, step, WIDEST_UNIT)
    plan = _tiled(
        op,
        _choose,
        logits,
        (None if bias is None else bias.dtype,),
        _TILES,
        groups.block,
        FUNCTION=function,
        NORMALIZED=function != "softmax" and topk > 1,
        GROUPS=groups.room,
        FILLED=groups.filled,
        UNIT=unit,
        **constants,
    )
    plan.launch(
        (-(-rows // plan.rows), 1),
        (logits, bias, probs, routing_map.view(torch.uint8), scores),
        (rows, experts // unit, step // unit, topk, *groups[:4], float(scale)),
    )
    return probs, routing_map, scores


@repeating
def fused_topk_with_score_function_fwd(
    logits: Tensor,
    topk: int,
    expert_bias: Tensor | None = None,
    *,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float = 1.0,
    score_function: str = "softmax",
) -> tuple[Tensor, Tensor, Tensor]:
    """``fused_topk_with_score_function_fwd`` of the contract."""
    op = "fused_topk_with_score_function_fwd"
    contracts.fused_topk_with_score_function_fwd.check(
        logits,
        topk,
        expert_bias,
        use_pre_softmax=use_pre_softmax,
        num_groups=num_groups,
        group_topk=group_topk,
        scaling_factor=scaling_factor,
        score_function=score_function,
    )
    check_integers(op, topk, num_groups or 0, group_topk or 0)
    check_numbers(op, scaling_factor)
    groups = _Groups.of(logits.shape[1], topk, num_groups, group_topk)
    afterwards = score_function == "softmax" and not use_pre_softmax
    return _chosen(
        op,
        logits,
        topk,
        expert_bias,
        groups,
        scaling_factor,
        score_function,
        ALL=False,
        AFTERWARDS=afterwards,
    )


@repeating
def fused_score_for_moe_aux_loss_fwd(
    logits: Tensor, topk: int, *, score_function: str = "softmax"
) -> tuple[Tensor, Tensor, Tensor]:
    """``fused_score_for_moe_aux_loss_fwd`` of the contract."""
    op = "fused_score_for_moe_aux_loss_fwd"
    contracts.fused_score_for_moe_aux_loss_fwd.check(logits, topk, score_function=score_function)
    check_integers(op, topk)
    groups = _Groups.of(logits.shape[1], topk, None, None)
    return _chosen(op, logits, topk, None, groups, 1.0, score_function, ALL=True, AFTERWARDS=False)


def _logits_gradient(
    op: str,
    name: str,
    grad: Tensor,
    routing_map: Tensor | None,
    scores: Tensor,
    topk: int,
    scale: float,
    function: str,
) -> Tensor:
    grad = plain(op, name, grad)
    dx = fresh(op, grad, grad.shape)
    if not dx.numel():
        return dx
    rows, experts = dx.shape
    check_size(op, "tokens", rows)
    grad, grad_step = rows_to_sum(op, grad)
    scores, scores_step = rows_to_sum(op, plain(op, "intermediate", scores))
    routing_step = 0
    if routing_map is not None:
        routing_map, routing_step = rows_to_sum(op, plain(op, "routing_map", routing_map))
        routing_map = routing_map.view(torch.uint8)
    unit = math.gcd(experts, grad_step, scores_step, routing_step, WIDEST_UNIT)
    plan = _tiled(
        op,
        _choose_backward,
        grad,
        (scores.dtype, routing_map is None),
        _BACKWARD_TILES,
        block_of(experts),
        FUNCTION=function,
        NORMALIZED=function != "softmax" and topk > 1,
        UNIT=unit,
    )
    steps = (it // unit for it in (experts, grad_step, routing_step, scores_step))
    plan.launch(
        (-(-rows // plan.rows), 1), (grad, routing_map, scores, dx), (rows, *steps, float(scale))
    )
    return dx


@repeating
def fused_topk_with_score_function_bwd(
    grad_probs: Tensor,
    routing_map: Tensor,
    intermediate: Tensor,
    topk: int,
    *,
    use_pre_softmax: bool = False,
    scaling_factor: float = 1.0,
    score_function: str = "softmax",
) -> Tensor:
    """``fused_topk_with_score_function_bwd`` of the contract."""
    op = contracts.fused_topk_with_score_function_bwd
    op.check(
        grad_probs,
        routing_map,
        intermediate,
        topk,
        use_pre_softmax=use_pre_softmax,
        scaling_factor=scaling_factor,
        score_function=score_function,
    )
    check_integers(op.name, topk)
    check_numbers(op.name, scaling_factor)
    return _logits_gradient(
        op.name,
        "grad_probs",
        grad_probs,
        routing_map,
        intermediate,
        topk,
        scaling_factor,
        score_function,
    )


@repeating
def fused_score_for_moe_aux_loss_bwd(
    grad_scores: Tensor, intermediate: Tensor, topk: int, *, score_function: str = "softmax"
) -> Tensor:
    """``fused_score_for_moe_aux_loss_bwd`` of the contract."""
    op = contracts.fused_score_for_moe_aux_loss_bwd
    op.check(grad_scores, intermediate, topk, score_function=score_function)
    check_integers(op.name, topk)
    return _logits_gradient(
        op.name, "grad_scores", grad_scores, None, intermediate, topk, 1.0, score_function
    )


@repeating
def fused_moe_aux_loss_fwd(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int, topk: int, coeff: float
) -> tuple[Tensor, Tensor]:
    """``fused_moe_aux_loss_fwd`` of the contract."""
    op = "fused_moe_aux_loss_fwd"
    contracts.fused_moe_aux_loss_fwd.check(probs, tokens_per_expert, total_num_tokens, topk, coeff)
    check_integers(op, total_num_tokens, topk)
    check_numbers(op, coeff)
    probs = plain(op, "probs", probs)
    counts = plain(op, "tokens_per_expert", tokens_per_expert).contiguous()
    loss = fresh(op, probs, ())
    const = fresh(op, probs, (), math_dtype(probs.dtype))
    rows, experts = probs.shape
    check_size(op, "tokens", rows)
    probs, step = by_rows(probs)
    unit = math.gcd(experts, step, WIDEST_UNIT)
    after = has_dependent_launches(probs.device)
    plan = _loss_plan(
        _sum_loads, probs, (counts.dtype,), experts, unit, _LOSS_TILE, DEPENDENT=after
    )
    blocks = -(-experts // plan.columns)
    check_across(op, blocks)
    programs = min(-(-rows // plan.rows), max(1, _LOSS_PROGRAMS // max(1, blocks)))
    # A program adds the stride of its loop once more before it sees that no row is left.
    check_size(op, "tokens, padded to whole tiles,", rows + programs * plan.rows)
    left = programs * blocks
    partial = fresh(op, probs, (left,), const.dtype)
    if left:
        grid = (programs, blocks)
        plan.launch(grid, (probs, counts, partial), (rows, experts // unit, step // unit))
    factor = experts * coeff / (topk * total_num_tokens**2)
    finish = _loss_plan(
        _finish_loss, probs, (), _LOSS_BLOCK, 1, _LOSS_BLOCK, **dependent_launch(after and left > 0)
    )
    finish.launch((1, 1), (partial, loss, const), (left, float(factor)))
    return loss, const


@repeating
def fused_moe_aux_loss_bwd(
    grad_aux_loss: Tensor, const_buf: Tensor, tokens_per_expert: Tensor, num_rows: int
) -> Tensor:
    """``fused_moe_aux_loss_bwd`` of the contract."""
    op = contracts.fused_moe_aux_loss_bwd
    op.check(grad_aux_loss, const_buf, tokens_per_expert, num_rows)
    check_integers(op.name, num_rows)
    grad = plain(op.name, "grad_aux_loss", grad_aux_loss)
    const = plain(op.name, "const_buf", const_buf)
    counts = plain(op.name, "tokens_per_expert", tokens_per_expert).contiguous()
    experts = counts.shape[0]
    grad_probs = fresh(op.name, grad, (num_rows, experts))
    if not grad_probs.numel():
        return grad_probs
    check_size(op.name, "tokens", num_rows)
    unit = math.gcd(experts, WIDEST_UNIT)
    dtypes = (const.dtype, counts.dtype)
    plan = _loss_plan(_loss_backward, grad, dtypes, experts, unit, _LOSS_BACKWARD_TILE)
    grid = (-(-num_rows // plan.rows), -(-experts // plan.columns))
    check_across(op.name, grid[1])
    plan.launch(grid, (grad, const, counts, grad_probs), (num_rows, experts // unit))
    return grad_probs
