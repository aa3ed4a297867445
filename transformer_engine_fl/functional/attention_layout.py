"""The layouts around attention, differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer_engine_fl.functional._differentiable import apply

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "bshd_to_thd",
    "fa_prepare",
    "thd_to_bshd",
]


def fa_prepare(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values out of an interleaved projection, batch first; differentiable.

    See :func:`transformer_engine_fl.ops.fa_prepare_fwd`.

    Args:
        qkv: ``[s, b, n, 3 * h]``.

    Returns:
        Three tensors ``[b, s, n, h]``, contiguous. They are views of one tensor, so do not write
        them in place.
    """
    q, k, v = apply("fa_prepare_fwd", {}, qkv)
    return q, k, v


def thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, max_seq_len: int) -> Tensor:
    """Puts sequences that follow one another into a row each; differentiable.

    See :func:`transformer_engine_fl.ops.convert_thd_to_bshd`.
    """
    options = {"cu_seqlens": cu_seqlens, "max_seq_len": max_seq_len}
    return apply("convert_thd_to_bshd", options, tensor)[0]


def bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, total_tokens: int) -> Tensor:
    """Puts sequences that have a row each one after another; differentiable.

    See :func:`transformer_engine_fl.ops.convert_bshd_to_thd`.
    """
    options = {"cu_seqlens": cu_seqlens, "total_tokens": total_tokens}
    return apply("convert_bshd_to_thd", options, tensor)[0]
