"""The layouts around attention in plain PyTorch: the definitions, which only move values."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends.reference._sequences import Packed, Padded, as_bytes, rows_at
from transformer_engine_fl.backends.reference._values import as_written

__all__ = [
    "convert_bshd_to_thd",
    "convert_thd_to_bshd",
    "copy_to_kv_cache",
    "fa_prepare_bwd",
    "fa_prepare_fwd",
]


@as_written
def fa_prepare_fwd(qkv: Tensor) -> Tensor:
    """Queries, keys and values, batch first."""
    ops.fa_prepare_fwd.check(qkv)
    parts = [it.transpose(0, 1) for it in qkv.chunk(3, -1)]
    return torch.stack(parts).contiguous()


@as_written
def fa_prepare_bwd(q_grad: Tensor, k_grad: Tensor, v_grad: Tensor) -> Tensor:
    """The three gradients, interleaved, sequence first."""
    ops.fa_prepare_bwd.check(q_grad, k_grad, v_grad)
    return torch.cat([it.transpose(0, 1) for it in (q_grad, k_grad, v_grad)], -1).contiguous()


@as_written
def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, max_seq_len: int) -> Tensor:
    """Puts sequences that follow one another into a row each."""
    ops.convert_thd_to_bshd.check(tensor, cu_seqlens, max_seq_len)
    offsets = cu_seqlens.long()
    wanted = Padded(offsets, max_seq_len).tokens()
    rows = Packed(offsets, tensor.shape[0]).row(wanted.sequence, wanted.place)
    found = rows_at(tensor, torch.where(wanted.inside, rows, -1))
    return found.view(offsets.shape[0] - 1, max_seq_len, *tensor.shape[1:])


@as_written
def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, total_tokens: int) -> Tensor:
    """Puts sequences that have a row each one after another."""
    ops.convert_bshd_to_thd.check(tensor, cu_seqlens, total_tokens)
    offsets = cu_seqlens.long()
    wanted = Packed(offsets, total_tokens).tokens()
    rows = Padded(offsets, tensor.shape[1]).row(wanted.sequence, wanted.place)
    # Not flatten: torch has no batching rule for it, as is_grads_batched needs.
    row_by_row = tensor.reshape(tensor.shape[0] * tensor.shape[1], *tensor.shape[2:])
    return rows_at(row_by_row, torch.where(wanted.inside, rows, -1))


@as_written
def copy_to_kv_cache(
    new_k: Tensor,
    new_v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_new_lens: Tensor,
    cu_cached_lens: Tensor,
    *,
    page_table: Tensor | None = None,
    batch_indices: Tensor | None = None,
    qkv_format: str = "thd",
) -> None:
    """Appends the new keys and values of each sequence to the caches."""
    ops.copy_to_kv_cache.check(
        new_k,
        new_v,
        k_cache,
        v_cache,
        cu_new_lens,
        cu_cached_lens,
        page_table=page_table,
        batch_indices=batch_indices,
        qkv_format=qkv_format,
    )
    offsets = cu_new_lens.long()
    before = cu_cached_lens.long().diff() - offsets.diff()
    if qkv_format == "sbhd":
        new_k, new_v = new_k.transpose(0, 1), new_v.transpose(0, 1)
    if qkv_format == "thd":
        tokens = Packed(offsets, new_k.shape[0]).tokens()
    else:
        tokens = Padded(offsets, new_k.shape[1]).tokens()
        new_k, new_v = new_k.flatten(0, 1), new_v.flatten(0, 1)
    page, place, inside = _positions(
        tokens.sequence, before[tokens.sequence] + tokens.place, k_cache, page_table
    )
    inside &= tokens.inside
    for new, cache in ((new_k, k_cache), (new_v, v_cache)):
        if batch_indices is not None:
            _move(cache, batch_indices, before)
        _write(cache, page, place, new, inside)


def _positions(
    sequence: Tensor, position: Tensor, cache: Tensor, page_table: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(the page of each token, its place in the page, whether these exist)."""
    pages, page_size = cache.shape[:2]
    page, place = sequence, position
    inside = position >= 0
    if page_table is not None:
        listed = page_table.shape[1]
        # A missing table entry counts as 0, and an empty page as one of size 1; 'inside' is
        # False for both, so neither is used.
        number, place = position // max(page_size, 1), position % max(page_size, 1)
        inside &= number < listed
        flat = torch.cat([page_table.flatten(), page_table.new_zeros(1)])
        page = flat[torch.where(inside, sequence * listed + number, flat.shape[0] - 1)].long()
    return page, place, inside & (page >= 0) & (page < pages) & (place < page_size)


def _move(cache: Tensor, batch_indices: Tensor, lengths: Tensor) -> None:
    """Move the first tokens of cache rows to the rows of their sequences."""
    cache = as_bytes(cache)
    rows, width = cache.shape[:2]
    source = batch_indices.long()
    known = (source >= 0) & (source < rows)
    place = torch.arange(width, device=cache.device)
    moved = (known[:, None] & (place < lengths[:, None]))[..., None, None]
    own = cache[: source.shape[0]]
    own.copy_(torch.where(moved, cache[source.clamp(0, rows - 1)], own))


def _write(cache: Tensor, page: Tensor, place: Tensor, new: Tensor, inside: Tensor) -> None:
    """``cache[page, place] = new`` where ``inside``.

    Only the device knows how many tokens are inside, so all are written. A token that is not
    inside repeats the write of one that is. If none is inside, the first place of the cache is
    overwritten by its own value.
    """
    cache, new = as_bytes(cache), as_bytes(new)
    if not inside.numel() or not cache.shape[0] or not cache.shape[1]:
        return
    one = inside.int().argmax(0, keepdim=True)
    found = inside[one]
    page = torch.where(inside, page, torch.where(found, page[one], 0))
    place = torch.where(inside, place, torch.where(found, place[one], 0))
    value = torch.where(found[:, None, None], new[one], cache[:1, 0])
    cache.index_put_((page, place), torch.where(inside[:, None, None], new, value))
