"""Choosing the experts of each token, and the load-balancing loss, in CUDA C++ (``router.cu``).

The threads of a warp, or of a block if there are many experts, share a row and keep it in
registers. The loss is summed in two stages and a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends.vendor.cuda import _launch
from transformer_engine_fl.backends.vendor.cuda._arguments import (
    NAMES,
    by_rows,
    check_integers,
    check_numbers,
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

# ------------------------------------------------------------------------------- tiles

LANES: Final = (32, 128, 512, 1024)
"""Threads that may share a row; the smallest number that can hold it is used."""
HELD: Final = 16
"""The most values of a row that a thread holds; half as many of float64."""
ROWS: Final = 4
"""Rows of a block, if each has one warp."""
LOSS_THREADS: Final = 256
LOSS_AHEAD: Final = 4
LOSS_BLOCKS: Final = 1024
MOST: Final = 2**31 - 2**14
"""Kernels count rows and experts in 32 bits."""
EXCHANGED: Final = 2048
"""The most bytes of shared memory in which the threads of a row exchange values."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How the experts of a row are distributed over threads.

    Attributes:
        vec: experts of a vector.
        vecs: vectors of a thread.
        lanes: threads that share a row.
    """

    vec: int
    vecs: int
    lanes: int

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return ROWS if self.lanes == 32 else 1

    @property
    def defines(self) -> dict[str, str | int]:
        """As macros."""
        return {"LANES": self.lanes, "TEAMS": self.rows, "VEC": self.vec, "VECS": self.vecs}


def most_experts(dtype: torch.dtype) -> int:
    """The most experts that a row may have."""
    return LANES[-1] * (HELD // 2 if dtype == torch.float64 else HELD)


def tile_of(experts: int, dtype: torch.dtype) -> Tile:
    """The tile for a row of up to :func:`most_experts` experts."""
    held = HELD // 2 if dtype == torch.float64 else HELD
    lanes = next(it for it in LANES if experts <= it * held)
    each = -(-experts // lanes)
    vec = min(vector_width(experts, dtype.itemsize), 1 << (each - 1).bit_length())
    return Tile(vec, -(-experts // (vec * lanes)), lanes)


# ------------------------------------------------------------------------------ kernels

_COUNT_NAMES: Final = NAMES | {torch.int32: "int32", torch.int64: "int64"}


class Groups(NamedTuple):
    """Experts in groups.

    Attributes:
        number: how many groups there are, 0 if experts are not in groups.
        size: experts of a group.
        chosen: how many groups are chosen.
        counted: how many of a group's highest scores are summed to compare groups.
    """

    number: int = 0
    size: int = 0
    chosen: int = 0
    counted: int = 0

    @staticmethod
    def of(experts: int, topk: int, num_groups: int | None, group_topk: int | None) -> Groups:
        """From the options."""
        if num_groups is None or group_topk is None:
            return Groups()
        return Groups(num_groups, experts // num_groups, group_topk, topk // group_topk)


def choosing(
    experts: int,
    access: int,
    logits: torch.dtype,
    bias: torch.dtype | None,
    function: str,
    groups: int,
    afterwards: bool,
    normalized: bool,
    of_all: bool,
    device: _launch.Limits,
) -> Source:
    """The kernel that computes scores, chooses experts and writes probs.

    Args:
        experts: experts of a row.
        access: experts that one access may cover.
        logits: dtype of the logits.
        bias: dtype of the bias; None without.
        function: the score function.
        groups: how many groups there are; 0 if experts are not in groups.
        afterwards: whether logits are compared, and the softmax is over the chosen experts.
        normalized: whether probs are divided by their sum.
        of_all: whether to write the probs of all experts.
        device: limits of the device.
    """
    tile = tile_of(experts, logits)
    share = 1 << (min(32, tile.lanes // groups) or 1).bit_length() - 1 if groups else 1
    defines = tile.defines | {
        "ACCESS": min(access, tile.vec),
        "TX": NAMES[logits],
        "TB": NAMES[bias or logits],
        "BIASED": int(bias is not None),
        "FUNCTION": function.upper(),
        "ALL": int(of_all),
        "AFTERWARDS": int(afterwards),
        "NORMALIZED": int(normalized),
        "GROUPED": int(groups > 0),
        "SHARE": share,
    }
    key = math_dtype(logits).itemsize
    shared = tile.rows * (experts + groups * (share + 1)) * key if groups else 0
    if shared and shared + EXCHANGED > device.shared_per_block:
        raise NotSupportedError(
            f"vendor.cuda: {experts} experts in {groups} groups need {shared + EXCHANGED} bytes of "
            f"shared memory; a block has at most {device.shared_per_block}"
        )
    geometry = _launch.Geometry(tile.lanes * tile.rows, "PPPPPiiqiiiiid", shared)
    return Specialisation("router", "choose", tuple(defines.items())), geometry, tile.rows


def choosing_backward(
    experts: int,
    access: int,
    grad: torch.dtype,
    scores: torch.dtype,
    function: str,
    normalized: bool,
    routed: bool,
    device: _launch.Limits,
) -> Source:
    """The kernel for the gradient of the logits; ``routed``: there is a routing map."""
    tile = tile_of(experts, grad)
    defines = tile.defines | {
        "ACCESS": min(access, tile.vec),
        "TX": NAMES[grad],
        "TS": NAMES[scores],
        "FUNCTION": function.upper(),
        "NORMALIZED": int(normalized),
        "ROUTED": int(routed),
    }
    geometry = _launch.Geometry(tile.lanes * tile.rows, "PPPPiiqqqd")
    return Specialisation("router", "choose_backward", tuple(defines.items())), geometry, tile.rows


def _loss_tile(experts: int, dtype: torch.dtype) -> tuple[int, int]:
    """Experts of a vector, and threads that share a row."""
    vec = vector_width(experts or 1, dtype.itemsize)
    return vec, min(LOSS_THREADS, 1 << max(0, experts // vec - 1).bit_length())


def summing(
    experts: int, access: int, probs: torch.dtype, counts: torch.dtype, device: _launch.Limits
) -> Source:
    """The kernel for the first stage of the loss."""
    vec, lanes = _loss_tile(experts, probs)
    defines: dict[str, str | int] = {
        "LANES": lanes,
        "VEC": vec,
        "ACCESS": access,
        "TX": NAMES[probs],
        "TC": _COUNT_NAMES[counts],
    }
    geometry = _launch.Geometry(LOSS_THREADS, "PPPiiq")
    found = Specialisation("router", "sum_loads", tuple(defines.items()))
    return found, geometry, LOSS_THREADS // lanes


def finishing(probs: torch.dtype, device: _launch.Limits) -> Source:
    """The kernel for the second stage of the loss."""
    defines = (("LANES", LOSS_THREADS), ("TX", NAMES[probs]))
    geometry = _launch.Geometry(LOSS_THREADS, "PPPid", dependent=device.has_clusters)
    return Specialisation("router", "finish_loss", defines), geometry, 1


def spreading_loss(
    experts: int,
    grad: torch.dtype,
    constant: torch.dtype,
    counts: torch.dtype,
    device: _launch.Limits,
) -> Source:
    """The kernel for the gradient of the loss."""
    vec, lanes = _loss_tile(experts, grad)
    defines: dict[str, str | int] = {
        "LANES": lanes,
        "VEC": vec,
        "TX": NAMES[grad],
        "TA": NAMES[constant],
        "TC": _COUNT_NAMES[counts],
    }
    geometry = _launch.Geometry(LOSS_THREADS, "PPPPii")
    found = Specialisation("router", "loss_backward", tuple(defines.items()))
    return found, geometry, LOSS_THREADS // lanes


_kernels = LoadedKernels()


def representative_sources(
    device: _launch.Limits,
) -> Iterator[tuple[Specialisation, _launch.Geometry]]:
    """A selection of the operators' kernels for a device: every kind, type and shape."""
    low, full, double, half = torch.bfloat16, torch.float32, torch.float64, torch.float16
    found: list[Source] = []
    for x, access in ((full, 4), (low, 8), (half, 1), (double, 2)):
        for experts, function in ((128, "softmax"), (256, "sigmoid"), (4096, "sqrtsoftplus")):
            soft = function == "softmax"
            groups = 8 if experts == 256 else 0
            bias = None if soft else full
            key = (experts, access, x, bias, function, groups)
            found.append(choosing(*key, soft, not soft, False, device))
            back = (experts, access, x, math_dtype(x), function, not soft)
            found.append(choosing_backward(*back, not groups, device))
        found.append(choosing(19, 1, x, None, "softmax", 19, False, False, True, device))
        found.append(choosing_backward(19, 1, x, double, "sigmoid", False, True, device))
        for experts, counts in ((128, torch.int32), (19, x)):
            found.append(summing(experts, 1, x, counts, device))
            found.append(spreading_loss(experts, x, full, counts, device))
        found.append(finishing(x, device))
    found.append(summing(8192, 4, full, torch.int64, device))
    for source, geometry, _ in found:
        yield source, geometry


# --------------------------------------------------------------------------- launching


def _check_experts(op: str, experts: int, dtype: torch.dtype) -> None:
    most = most_experts(dtype)
    if experts > most:
        raise NotSupportedError(
            f"vendor.cuda: {op} keeps at most {most} experts in registers, got {experts}"
        )


def _chosen(
    op: str,
    logits: Tensor,
    topk: int,
    bias: Tensor | None,
    groups: Groups,
    scale: float,
    function: str,
    *,
    afterwards: bool,
    of_all: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Probs, routing map and scores."""
    logits = plain(op, "logits", logits)
    rows, experts = logits.shape
    _check_experts(op, experts, logits.dtype)
    check_size(op, "tokens", rows, MOST)
    probs = fresh(op, logits, logits.shape)
    routing_map = fresh(op, logits, logits.shape, torch.bool)
    scores = fresh(op, logits, logits.shape, math_dtype(logits.dtype))
    if bias is not None:
        bias = plain(op, "expert_bias", bias).contiguous()
    if not rows:
        return probs, routing_map, scores
    logits, step = by_rows(logits)
    kernel = _kernels.of(
        logits,
        choosing,
        experts,
        common_access(experts, (logits, step)),
        logits.dtype,
        None if bias is None else bias.dtype,
        function,
        groups.number,
        afterwards,
        function != "softmax" and topk > 1,
        of_all,
    )
    kernel(
        rows,
        logits.data_ptr(),
        pointer(bias),
        probs.data_ptr(),
        routing_map.data_ptr(),
        scores.data_ptr(),
        rows,
        experts,
        step,
        topk,
        *groups,
        scale,
    )
    return probs, routing_map, scores


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
    scores = plain(op, "intermediate", scores)
    rows, experts = grad.shape
    _check_experts(op, experts, grad.dtype)
    check_size(op, "tokens", rows, MOST)
    dx = fresh(op, grad, grad.shape)
    if routing_map is not None:
        routing_map = plain(op, "routing_map", routing_map)
    if not dx.numel():
        return dx
    grad, grad_step = by_rows(grad)
    scores, scores_step = by_rows(scores)
    read = [(grad, grad_step), (scores, scores_step)]
    routing_step = 0
    if routing_map is not None:
        routing_map, routing_step = by_rows(routing_map)
        read.append((routing_map, routing_step))
    kernel = _kernels.of(
        grad,
        choosing_backward,
        experts,
        common_access(experts, *read),
        grad.dtype,
        scores.dtype,
        function,
        function != "softmax" and topk > 1,
        routing_map is not None,
    )
    kernel(
        rows,
        grad.data_ptr(),
        pointer(routing_map),
        scores.data_ptr(),
        dx.data_ptr(),
        rows,
        experts,
        grad_step,
        routing_step,
        scores_step,
        scale,
    )
    return dx


# ---------------------------------------------------------------------------- operators


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
    return _chosen(
        op,
        logits,
        topk,
        expert_bias,
        Groups.of(logits.shape[1], topk, num_groups, group_topk),
        scaling_factor,
        score_function,
        afterwards=score_function == "softmax" and not use_pre_softmax,
        of_all=False,
    )


@repeating
def fused_score_for_moe_aux_loss_fwd(
    logits: Tensor, topk: int, *, score_function: str = "softmax"
) -> tuple[Tensor, Tensor, Tensor]:
    """``fused_score_for_moe_aux_loss_fwd`` of the contract."""
    op = "fused_score_for_moe_aux_loss_fwd"
    contracts.fused_score_for_moe_aux_loss_fwd.check(logits, topk, score_function=score_function)
    check_integers(op, topk)
    return _chosen(
        op, logits, topk, None, Groups(), 1.0, score_function, afterwards=False, of_all=True
    )


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
    rows, experts = probs.shape
    check_size(op, "tokens", rows, MOST)
    check_size(op, "experts", experts, MOST)
    loss = fresh(op, probs, ())
    constant = fresh(op, probs, (), math_dtype(probs.dtype))
    probs, step = by_rows(probs)
    access = common_access(experts, (probs, step))
    kernel = _kernels.of(probs, summing, experts, access, probs.dtype, counts.dtype)
    blocks = max(1, min(LOSS_BLOCKS, -(-rows // (kernel.each * LOSS_AHEAD))))
    partial = fresh(op, constant, (blocks,))
    kernel(
        blocks * kernel.each,
        probs.data_ptr(),
        counts.data_ptr(),
        partial.data_ptr(),
        rows,
        experts,
        step,
    )
    factor = experts * coeff / (topk * total_num_tokens**2)
    _kernels.of(probs, finishing, probs.dtype)(
        1, partial.data_ptr(), loss.data_ptr(), constant.data_ptr(), blocks, factor
    )
    return loss, constant


@repeating
def fused_moe_aux_loss_bwd(
    grad_aux_loss: Tensor, const_buf: Tensor, tokens_per_expert: Tensor, num_rows: int
) -> Tensor:
    """``fused_moe_aux_loss_bwd`` of the contract."""
    op = contracts.fused_moe_aux_loss_bwd
    op.check(grad_aux_loss, const_buf, tokens_per_expert, num_rows)
    check_integers(op.name, num_rows)
    grad = plain(op.name, "grad_aux_loss", grad_aux_loss)
    constant = plain(op.name, "const_buf", const_buf)
    counts = plain(op.name, "tokens_per_expert", tokens_per_expert).contiguous()
    experts = counts.shape[0]
    check_size(op.name, "tokens", num_rows, MOST)
    check_size(op.name, "experts", experts, MOST)
    grad_probs = fresh(op.name, grad, (num_rows, experts))
    if not grad_probs.numel():
        return grad_probs
    kernel = _kernels.of(grad, spreading_loss, experts, grad.dtype, constant.dtype, counts.dtype)
    kernel(
        min(LOSS_BLOCKS * kernel.each, num_rows),
        grad.data_ptr(),
        constant.data_ptr(),
        counts.data_ptr(),
        grad_probs.data_ptr(),
        num_rows,
        experts,
    )
    return grad_probs
