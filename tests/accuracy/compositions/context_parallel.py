"""The corrections between the steps of a ring in eager torch, one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["COMPOSITIONS"]


def _sequences(cu_seqlens: Tensor) -> Iterator[tuple[int, slice, slice, slice]]:
    """(number, first half, second half, the half's slice in a tensor of halves)."""
    for number, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        middle = (begin + end) // 2
        halves = slice(begin // 2, end // 2)
        yield number, slice(begin, middle), slice(middle, end), halves


def _complete(cu_seqlens: Tensor, lse: Tensor, lse_packed: bool, tokens: int) -> bool:
    """Whether the tensors hold all tokens of the sequences; slices would be cut short otherwise."""
    longest = int(cu_seqlens.diff().max())
    return int(cu_seqlens[-1]) <= tokens and (lse_packed or longest <= lse.shape[-1])


def thd_second_half_lse_correction(
    lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, *, lse_packed: bool = False
) -> tuple[Tensor | None]:
    if not _complete(cu_seqlens, lse, lse_packed, lse.shape[-1] if lse_packed else 2**31):
        return (None,)
    lse = lse.clone()
    for number, first, second, halves in _sequences(cu_seqlens):
        if lse_packed:
            here, step = lse[:, second], lse_per_step[:, halves]
        else:
            half = first.stop - first.start
            here, step = lse[number, :, half : 2 * half], lse_per_step[number, :, :half]
        here.copy_(torch.logaddexp(here, step))
    return (lse,)


def thd_out_correction(
    out: Tensor,
    out_per_step: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    *,
    only_second_half: bool = False,
    lse_packed: bool = False,
) -> tuple[Tensor | None]:
    if not _complete(cu_seqlens, lse, lse_packed, out.shape[0]):
        return (None,)
    out = out.clone()
    for number, first, second, halves in _sequences(cu_seqlens):
        here = second if only_second_half else slice(first.start, second.stop)
        there = halves if only_second_half else here
        if lse_packed:
            merged, step = lse[:, here], lse_per_step[:, there]
        else:
            count, end = here.stop - here.start, second.stop - first.start
            merged, step = lse[number, :, end - count : end], lse_per_step[number, :, :count]
        share = (step - merged).exp().T[..., None].to(out.dtype)
        seen = ((step > -torch.inf) & (merged > -torch.inf)).T[..., None]
        out[here] = torch.where(seen, out[here] + share * out_per_step[there], out[here])
    return (out,)


def thd_grad_correction(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, *, first_half: str, second_half: str
) -> tuple[Tensor | None]:
    if int(cu_seqlens[-1]) > grad.shape[-3]:
        return (None,)
    grad = grad.clone()
    for _, first, second, halves in _sequences(cu_seqlens):
        for change, here in ((first_half, first), (second_half, second)):
            there = halves if "none" in (first_half, second_half) else here
            if change == "add":
                grad[..., here, :, :] += grad_per_step[..., there, :, :]
            elif change == "copy":
                grad[..., here, :, :] = grad_per_step[..., there, :, :]
    return (grad,)


COMPOSITIONS: dict[str, Callable[..., Any]] = {
    "thd_grad_correction": thd_grad_correction,
    "thd_out_correction": thd_out_correction,
    "thd_second_half_lse_correction": thd_second_half_lse_correction,
}
