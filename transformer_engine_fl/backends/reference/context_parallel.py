"""The operators of context-parallel attention in plain PyTorch: the definitions."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends.reference._sequences import Packed, Padded, has_row, rows_at
from transformer_engine_fl.backends.reference._values import as_written
from transformer_engine_fl.ops._dtypes import math_dtype

__all__ = [
    "thd_get_partitioned_indices",
    "thd_grad_correction",
    "thd_out_correction",
    "thd_read_half_tensor",
    "thd_read_second_half_lse",
    "thd_second_half_lse_correction",
]


def _layout(lse: Tensor, offsets: Tensor, lse_packed: bool) -> Packed | Padded:
    """The layout of the rows of :func:`_by_token`."""
    return (Packed if lse_packed else Padded)(offsets, lse.shape[-1])


def _by_token(lse: Tensor, lse_packed: bool) -> Tensor:
    """``[h, t]`` or ``[b, h, s]`` -> ``[t, h]`` or ``[b * s, h]``."""
    return lse.t() if lse_packed else lse.transpose(1, 2).flatten(0, 1)


def _by_head(values: Tensor, sequences: int, lse_packed: bool) -> Tensor:
    """The inverse of :func:`_by_token`."""
    if lse_packed:
        return values.t()
    rows, heads = values.shape
    return values.view(sequences, rows // sequences, heads).transpose(1, 2)


@as_written
def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    """One half of every sequence."""
    ops.thd_read_half_tensor.check(tensor, cu_seqlens, half_idx)
    offsets, total = cu_seqlens.long(), tensor.shape[-3]
    wanted = Packed(offsets // 2, total // 2).tokens()
    place = wanted.place + half_idx * wanted.length
    rows = Packed(offsets, total).row(wanted.sequence, place)
    rows = torch.where(wanted.inside, rows, -1)
    return rows_at(tensor.movedim(-3, 0), rows).movedim(0, -3).contiguous()


@as_written
def thd_second_half_lse_correction(
    lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, *, lse_packed: bool = False
) -> None:
    """Merges a step's lse into the lse of every second half."""
    ops.thd_second_half_lse_correction.check(lse, lse_per_step, cu_seqlens, lse_packed=lse_packed)
    offsets = cu_seqlens.long()
    held = _layout(lse, offsets, lse_packed).tokens()
    place = held.place - held.length // 2
    rows = _layout(lse_per_step, offsets // 2, lse_packed).row(held.sequence, place)
    before, step = _by_token(lse, lse_packed), _by_token(lse_per_step, lse_packed)
    changed = held.inside & (place >= 0) & has_row(step, rows)
    after = torch.where(changed[:, None], before.logaddexp(rows_at(step, rows)), before)
    lse.copy_(_by_head(after, lse.shape[0], lse_packed))


@as_written
def thd_read_second_half_lse(
    lse: Tensor, cu_seqlens: Tensor, second_half_lse_seqlen: int, *, lse_packed: bool = False
) -> Tensor:
    """The lse of the second half of every sequence."""
    ops.thd_read_second_half_lse.check(
        lse, cu_seqlens, second_half_lse_seqlen, lse_packed=lse_packed
    )
    offsets = cu_seqlens.long()
    wanted = (Packed if lse_packed else Padded)(offsets // 2, second_half_lse_seqlen).tokens()
    rows = _layout(lse, offsets, lse_packed).row(wanted.sequence, wanted.place + wanted.length)
    found = rows_at(_by_token(lse, lse_packed), torch.where(wanted.inside, rows, -1))
    return _by_head(found, lse.shape[0], lse_packed).contiguous()


@as_written
def thd_out_correction(
    out: Tensor,
    out_per_step: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    *,
    only_second_half: bool = False,
    lse_packed: bool = False,
) -> None:
    """Adds a step's contribution to the output of attention."""
    ops.thd_out_correction.check(
        out,
        out_per_step,
        lse,
        lse_per_step,
        cu_seqlens,
        only_second_half=only_second_half,
        lse_packed=lse_packed,
    )
    offsets = cu_seqlens.long()
    held = Packed(offsets, out.shape[0]).tokens()
    of_step = offsets // 2 if only_second_half else offsets
    place = held.place - held.length // 2 if only_second_half else held.place
    step_rows = Packed(of_step, out_per_step.shape[0]).row(held.sequence, place)
    dtype = torch.promote_types(math_dtype(out.dtype), lse.dtype)

    def lse_at(values: Tensor, offsets: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """The lse of tokens, ``[t, h, 1]``, and which of the tokens exist."""
        by_token = _by_token(values, lse_packed)
        rows = _layout(values, offsets, lse_packed).row(held.sequence, place)
        return rows_at(by_token, rows)[..., None].to(dtype), has_row(by_token, rows)

    all_keys, known = lse_at(lse, offsets, held.place)
    some_keys, also_known = lse_at(lse_per_step, of_step, place)
    known = held.inside & (place >= 0) & has_row(out_per_step, step_rows) & known & also_known
    seen = (some_keys > -torch.inf) & (all_keys > -torch.inf)
    changed = known[:, None, None] & seen
    step = rows_at(out_per_step, step_rows).to(dtype)
    after = (out.to(dtype) + (some_keys - all_keys).exp() * step).to(out.dtype)
    out.copy_(torch.where(changed, after, out))


@as_written
def thd_grad_correction(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, *, first_half: str, second_half: str
) -> None:
    """Adds or copies a step's gradient into the sum, half by half."""
    ops.thd_grad_correction.check(
        grad, grad_per_step, cu_seqlens, first_half=first_half, second_half=second_half
    )
    offsets = cu_seqlens.long()
    before, step = grad.movedim(-3, 0), grad_per_step.movedim(-3, 0)
    held = Packed(offsets, before.shape[0]).tokens()
    half = held.length // 2
    second = held.place >= half
    if "none" in (first_half, second_half):
        place = torch.where(second, held.place - half, held.place)
        rows = Packed(offsets // 2, step.shape[0]).row(held.sequence, place)
    else:
        rows = Packed(offsets, step.shape[0]).row(held.sequence, held.place)
    known = held.inside & has_row(step, rows)
    copied = rows_at(step, rows)
    dtype = math_dtype(grad.dtype)
    added = (before.to(dtype) + copied.to(dtype)).to(grad.dtype)
    for change, chosen in ((first_half, ~second), (second_half, second)):
        if change != "none":
            changed = (known & chosen).view(-1, *[1] * (grad.ndim - 1))
            before.copy_(torch.where(changed, copied if change == "copy" else added, before))


@as_written
def thd_get_partitioned_indices(
    cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int
) -> Tensor:
    """Which tokens a rank holds."""
    ops.thd_get_partitioned_indices.check(cu_seqlens, total_tokens, world_size, rank)
    offsets = torch.cat([cu_seqlens.long(), cu_seqlens.new_full((1,), total_tokens).long()])
    held = Packed(offsets // world_size, total_tokens // world_size).tokens()
    chunk = held.length // 2
    before = torch.where(held.place < chunk, rank, 2 * world_size - 2 - rank) * chunk
    indices = Packed(offsets, total_tokens).row(held.sequence, held.place) + before
    return indices.clamp(0, max(total_tokens - 1, 0)).int()
