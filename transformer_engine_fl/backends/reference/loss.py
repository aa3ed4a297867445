"""Cross entropy in plain PyTorch: the definitions, in float32 (float64 for float64)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends.reference._values import as_output, as_written
from transformer_engine_fl.ops._dtypes import math_dtype

__all__ = [
    "cross_entropy_bwd",
    "cross_entropy_fwd",
    "cross_entropy_fwd_bwd",
    "cross_entropy_merge",
    "cross_entropy_partial_fwd",
    "fused_linear_cross_entropy_bwd",
    "fused_linear_cross_entropy_fwd",
    "fused_linear_cross_entropy_fwd_bwd",
]


def _scores(input: Tensor, target: Tensor, ignore_index: int, softcap: float | None) -> Tensor:
    """The scores, zero in the rows that are ignored."""
    ignored = (target == ignore_index).unsqueeze(-1)
    logits = input.to(math_dtype(input.dtype)).masked_fill(ignored, 0)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _column(target: Tensor, columns: int, vocab_start: int) -> tuple[Tensor, Tensor]:
    """(a valid column for each row, whether it is the target's), with a last dimension of 1."""
    column = (target - vocab_start).unsqueeze(-1)
    inside = (column >= 0) & (column < columns)
    return column.clamp(0, columns - 1), inside


def _finite(highest: Tensor) -> Tensor:
    """The shift of scores before exp: the highest, or 0 if that is ``-inf``, as all are hidden."""
    return highest.masked_fill(highest == -torch.inf, 0)


def _partial(
    input: Tensor,
    target: Tensor,
    vocab_start: int,
    ignore_index: int,
    softcap: float | None,
    whole: bool = False,
) -> Tensor:
    """The contract's statistics; with ``whole``, the sum is of the scores minus the highest.

    A large value common to all scores would otherwise round away their differences.
    """
    scores = _scores(input, target, ignore_index, softcap)
    highest = scores.amax(-1, keepdim=True)
    below = scores - _finite(highest)
    total = below.exp().sum(-1, keepdim=True)
    column, inside = _column(target, input.shape[-1], vocab_start)
    at_target = scores.gather(-1, column).masked_fill(~inside, 0)
    summed = (below if whole else scores).sum(-1, keepdim=True)
    stats = torch.cat((highest, total, at_target, summed), -1)
    return stats.masked_fill((target == ignore_index).unsqueeze(-1), 0).contiguous()


def _merge(
    stats: Tensor,
    target: Tensor,
    vocab_size: int,
    label_smoothing: float,
    ignore_index: int,
    z_loss: float,
    whole: bool = False,
) -> tuple[Tensor, Tensor]:
    highest, total, at_target, summed = stats.unbind(-1)
    shift = _finite(highest.amax(0))
    log_total = (total * (highest - shift).exp()).sum(0).log()
    lse = shift + log_total
    # Not computed from lse, in which a large shift would round away digits of log_total.
    loss = log_total - (at_target.sum(0) - shift)
    if label_smoothing:
        mean = summed.sum(0) / vocab_size
        uniform = log_total - (mean if whole else mean - shift)
        loss = (1 - label_smoothing) * loss + label_smoothing * uniform
    if z_loss:
        loss = loss + z_loss * lse.square()
    loss = loss.masked_fill((target < 0) | (target >= vocab_size), torch.nan)
    ignored = target == ignore_index
    return loss.masked_fill(ignored, 0).contiguous(), lse.masked_fill(ignored, 0).contiguous()


def _losses(
    input: Tensor,
    target: Tensor,
    label_smoothing: float,
    ignore_index: int,
    z_loss: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Loss and lse of a whole vocabulary."""
    stats = _partial(input, target, 0, ignore_index, softcap, whole=True).unsqueeze(0)
    words = input.shape[-1]
    return _merge(stats, target, words, label_smoothing, ignore_index, z_loss, whole=True)


def _gradient(
    grad_loss: Tensor,
    input: Tensor,
    target: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None,
    label_smoothing: float,
    ignore_index: int,
    z_loss: float,
    softcap: float | None,
    vocab_start: int,
    vocab_size: int,
) -> Tensor:
    """The gradient of the logits, in the math dtype."""
    scores = _scores(input, target, ignore_index, softcap)
    factor = grad_loss if grad_lse is None else grad_loss + grad_lse
    if z_loss:
        factor = factor + 2 * z_loss * lse * grad_loss
    gradient = factor.unsqueeze(-1) * (scores - lse.unsqueeze(-1)).exp()
    column, inside = _column(target, input.shape[-1], vocab_start)
    at_target = (label_smoothing - 1) * grad_loss.unsqueeze(-1)
    gradient.scatter_add_(-1, column, at_target.masked_fill(~inside, 0))
    if label_smoothing:
        gradient -= (label_smoothing / vocab_size * grad_loss).unsqueeze(-1)
    if softcap is not None:
        gradient *= 1 - (scores / softcap).square()
    outside = (target < 0) | (target >= vocab_size)
    gradient.masked_fill_(outside.unsqueeze(-1), torch.nan)
    return gradient.masked_fill_((target == ignore_index).unsqueeze(-1), 0)


@as_written
def cross_entropy_fwd(
    input: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross entropy, computed as a vocabulary of one shard."""
    ops.cross_entropy_fwd.check(
        input,
        target,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        z_loss=z_loss,
        softcap=softcap,
    )
    return _losses(input, target, label_smoothing, ignore_index, z_loss, softcap)


@as_written
def cross_entropy_bwd(
    grad_loss: Tensor,
    input: Tensor,
    target: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> Tensor:
    """Gradient of :func:`cross_entropy_fwd`."""
    ops.cross_entropy_bwd.check(
        grad_loss,
        input,
        target,
        lse,
        grad_lse,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        z_loss=z_loss,
        softcap=softcap,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
    )
    size = vocab_start + input.shape[-1] if vocab_size is None else vocab_size
    gradient = _gradient(
        grad_loss,
        input,
        target,
        lse,
        grad_lse,
        label_smoothing,
        ignore_index,
        z_loss,
        softcap,
        vocab_start,
        size,
    )
    return as_output(gradient, input.dtype)


@as_written
def cross_entropy_fwd_bwd(
    input: Tensor,
    target: Tensor,
    grad_loss: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy and its gradient, one after the other."""
    ops.cross_entropy_fwd_bwd.check(
        input,
        target,
        grad_loss,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        z_loss=z_loss,
        softcap=softcap,
    )
    loss, lse = _losses(input, target, label_smoothing, ignore_index, z_loss, softcap)
    gradient = _gradient(
        grad_loss,
        input,
        target,
        lse,
        None,
        label_smoothing,
        ignore_index,
        z_loss,
        softcap,
        0,
        input.shape[-1],
    )
    return loss, lse, as_output(gradient, input.dtype)


@as_written
def cross_entropy_partial_fwd(
    input: Tensor,
    target: Tensor,
    *,
    vocab_start: int = 0,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> Tensor:
    """The four numbers of a shard of the vocabulary."""
    ops.cross_entropy_partial_fwd.check(
        input, target, vocab_start=vocab_start, ignore_index=ignore_index, softcap=softcap
    )
    return _partial(input, target, vocab_start, ignore_index, softcap)


@as_written
def cross_entropy_merge(
    stats: Tensor,
    target: Tensor,
    *,
    vocab_size: int,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Loss and lse from the numbers of all shards."""
    ops.cross_entropy_merge.check(
        stats,
        target,
        vocab_size=vocab_size,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        z_loss=z_loss,
    )
    return _merge(stats, target, vocab_size, label_smoothing, ignore_index, z_loss)


def _chunk_rows(input: Tensor, weight: Tensor) -> int:
    """The number of rows to process at a time: their logits are no larger than ``input``."""
    return max(1, input.numel() // weight.shape[0])


@as_written
def fused_linear_cross_entropy_fwd(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of a linear layer's outputs, some rows at a time."""
    ops.fused_linear_cross_entropy_fwd.check(
        input,
        weight,
        target,
        bias,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        z_loss=z_loss,
        softcap=softcap,
    )
    wide = math_dtype(input.dtype)
    matrix, rows = weight.to(wide), _chunk_rows(input, weight)
    offset = None if bias is None else bias.to(wide)
    targets = target.reshape(-1)
    hidden = input.reshape(len(targets), input.shape[-1])
    losses = []
    for x, chosen in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
        logits = torch.nn.functional.linear(x.to(wide), matrix, offset)
        losses.append(_losses(logits, chosen, label_smoothing, ignore_index, z_loss, softcap))
    loss, lse = (torch.cat(parts).view(target.shape) for parts in zip(*losses, strict=True))
    return loss, lse


@as_written
def fused_linear_cross_entropy_bwd(
    grad_loss: Tensor,
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    lse: Tensor,
    bias: Tensor | None = None,
    grad_lse: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of :func:`fused_linear_cross_entropy_fwd`; calculates the logits again."""
    ops.fused_linear_cross_entropy_bwd.check(
        grad_loss,
        input,
        weight,
        target,
        lse,
        bias,
        grad_lse,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        z_loss=z_loss,
        softcap=softcap,
    )
    wide = math_dtype(input.dtype)
    matrix, rows = weight.to(wide), _chunk_rows(input, weight)
    offset = None if bias is None else bias.to(wide)
    others = torch.zeros_like(grad_loss) if grad_lse is None else grad_lse
    hidden = input.reshape(target.numel(), input.shape[-1])
    given = grad_loss + others  # may be batched, by is_grads_batched
    grad_input = given.new_empty(hidden.shape)
    grad_weight = given.new_zeros(matrix.shape)
    grad_bias = given.new_zeros(len(weight))
    per_row = (torch.split(it.reshape(-1), rows) for it in (target, grad_loss, lse, others))
    parts = zip(torch.split(hidden, rows), torch.split(grad_input, rows), *per_row, strict=True)
    for x, dx, chosen, dloss, normalizer, dlse in parts:
        x = x.to(wide)
        gradient = _gradient(
            dloss,
            torch.nn.functional.linear(x, matrix, offset),
            chosen,
            normalizer,
            dlse,
            label_smoothing,
            ignore_index,
            z_loss,
            softcap,
            0,
            len(weight),
        )
        dx.copy_(gradient @ matrix)
        grad_weight.addmm_(gradient.t(), x)
        grad_bias += gradient.sum(0)
    return (
        as_output(grad_input, input.dtype).view(input.shape),
        as_output(grad_weight, weight.dtype),
        None if bias is None else as_output(grad_bias, bias.dtype),
    )


@as_written
def fused_linear_cross_entropy_fwd_bwd(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    grad_loss: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The forward and the backward, one after the other."""
    options: Any = {
        "label_smoothing": label_smoothing,
        "ignore_index": ignore_index,
        "z_loss": z_loss,
        "softcap": softcap,
    }
    ops.fused_linear_cross_entropy_fwd_bwd.check(input, weight, target, grad_loss, bias, **options)
    loss, lse = fused_linear_cross_entropy_fwd(input, weight, target, bias, **options)
    gradients = fused_linear_cross_entropy_bwd(
        grad_loss, input, weight, target, lse, bias, **options
    )
    return loss, lse, *gradients
