"""Attention by cuDNN, called through torch: dense batches, with or without a causal mask.

cuDNN returns the log of the softmax denominators (lse) as the contract defines it, so that its
forward and its backward can be combined with those of any other implementation. Calls are
declined if torch does not pass an argument on to cuDNN (lengths, windows, offsets of softmax), or
if cuDNN's results differ from the contract's (random numbers, the gradient of a bias, a query that
sees no key).

torch caches cuDNN's plans by the sizes and strides of queries, keys and values, but not by those
of the output and its gradient. These are therefore always passed in one layout, that of the
format, and queries, keys and values must have the dimensions of the format in order in memory.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends._memory import extent
from transformer_engine_fl.backends.vendor.cuda._arguments import KnownCalls, as_plain, refuse

__all__ = ["fused_attn_bwd", "fused_attn_fwd"]

_DTYPES: Final = (torch.bfloat16, torch.float16)
_WIDEST: Final = 128
"""The widest head for which cuDNN has forward and backward on every GPU of the set."""
_LEAST_CUDNN: Final = 90000
_ALIGNMENT: Final = 16
"""Bytes. torch tells cuDNN that tensors are so aligned, even if they are not; cuDNN then reads
memory before their addresses."""
_MOST_ELEMENTS: Final = 2**31
"""Its kernels compute offsets in 32 bits; beyond that they give wrong values without an error."""

_forward: Any = getattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", None)
_backward: Any = getattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", None)


def _cudnn_version() -> int:
    cudnn: Any = torch.backends.cudnn
    return (cudnn.version() or 0) if cudnn.is_available() else 0


# ------------------------------------------------------------------- what is declined


def _declined(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    qkv_format: str,
    attn_mask_type: str,
    window_size_left: int,
    window_size_right: int,
    softmax_type: str,
    dropout_p: float,
    scale: float | None,
) -> str | None:
    """Why cuDNN does not serve a call; None if it does."""
    if _forward is None or _backward is None or _cudnn_version() < _LEAST_CUDNN:
        return "this torch has no cuDNN 9 attention"
    if q.dtype not in _DTYPES:
        return f"cuDNN has no attention for {q.dtype}"
    if qkv_format == "thd" or "padding" in attn_mask_type:
        return "torch does not pass sequence lengths to cuDNN"
    if bias is not None or softmax_type != "vanilla":
        return "torch's cuDNN attention has neither bias gradients nor softmax offsets"
    if dropout_p:
        return "cuDNN's dropout does not use the contract's random generator"
    if scale is not None and not scale >= 0:
        # Scores behind the last key are -inf before they are scaled, and +inf afterwards.
        return "cuDNN's gradients are NaN for a negative scale"
    causal = attn_mask_type != "no_mask"
    if window_size_left != -1 or (window_size_right != -1 and not causal):
        return "torch does not pass a window to cuDNN"
    length = qkv_format.index("s")
    sq, skv = q.shape[length], k.shape[length]
    if causal and sq != skv:
        return "a causal mask needs as many queries as keys"
    if not q.numel() or skv < 2:
        return "cuDNN needs at least one query and two keys"
    width = q.shape[-1]
    if v.shape[-1] != width or width % 8 or width > _WIDEST:
        return f"the width of heads, also of values, must be one of 8, 16, ... {_WIDEST}"
    widest = max(map(extent, (q, k, v)))
    if widest > _MOST_ELEMENTS:
        return f"a tensor spans {widest} elements; cuDNN's limit is {_MOST_ELEMENTS}"
    return None


def _gradients_declined(sq: int, skv: int, attn_mask_type: str) -> str | None:
    """Why cuDNN's backward does not serve these lengths; None if it does.

    Without a mask some of its kernels for Hopper (in 9.20, 9.26 and 9.30 among others) treat
    positions behind the last query or key as scores of 0, which gives NaN where lse is below
    about -88: NVIDIA/cudnn-frontend, pull request 628 and issue 1072; pytorch/pytorch, issue
    196678. The values of lse are not checked here.
    """
    if attn_mask_type == "no_mask" and (sq == 1 or skv % 128 == 64):
        return "without a mask, cuDNN's gradients can be NaN for 1 query or 64, 192, ... keys"
    return None


def _in_order(tensor: Tensor) -> bool:
    """Whether the dimensions are in order in memory, with aligned strides, gaps allowed."""
    least = 0
    for size, stride in zip(tensor.shape[::-1], tensor.stride()[::-1], strict=True):
        if size == 1:
            continue
        if stride < max(least, 1) or (least and stride * tensor.element_size() % _ALIGNMENT):
            return False
        least = size * stride
    return tensor.stride(-1) == 1


# ---------------------------------------------------------------------------- operators

_TO_HEADS: Final = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}
"""The dimensions in cuDNN's order: b, h, s, d."""
_FROM_HEADS: Final = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}

_known = KnownCalls()


def _checked(op: Any, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> list[Tensor]:
    """The tensors as plain ones; raises for an invalid call, or one that cuDNN does not serve."""
    name = op.name
    *before, bias, _ = tensors
    call = _known.like((name, *tensors), tuple(options.values()))
    known = call in _known
    if not known:
        op.check(*tensors, **options)
    given = zip(op.signature.parameters, before, strict=False)
    plains = [as_plain(name, parameter, it, known) for parameter, it in given]
    if not known:
        looked_at = {
            option: options[option]
            for option in (
                "qkv_format",
                "attn_mask_type",
                "window_size_left",
                "window_size_right",
                "softmax_type",
                "dropout_p",
                "scale",
            )
        }
        q, k, v = plains[1:4] if name == "fused_attn_bwd" else plains
        refuse(name, _declined(q, k, v, bias, **looked_at))
        if not all(map(_in_order, (q, k, v))):
            refuse(
                name,
                "torch's cuDNN plans need dimensions in memory order, dense heads, and strides "
                f"of multiples of {_ALIGNMENT} bytes",
            )
        if name == "fused_attn_bwd":
            length, mask = options["qkv_format"].index("s"), options["attn_mask_type"]
            refuse(name, _gradients_declined(q.shape[length], k.shape[length], mask))
        _known.add(call)
    if any(it.data_ptr() % _ALIGNMENT for it in plains):
        refuse(name, f"torch's cuDNN plans need tensors that are aligned to {_ALIGNMENT} bytes")
    return plains


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5 if scale is None else scale)


def fused_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    softmax_offset: Tensor | None = None,
    *,
    scale: float | None = None,
    qkv_format: str = "bshd",
    attn_mask_type: str = "no_mask",
    window_size_left: int = -1,
    window_size_right: int = -1,
    softmax_type: str = "vanilla",
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``fused_attn_fwd`` of the contract."""
    options = {
        "scale": scale,
        "qkv_format": qkv_format,
        "attn_mask_type": attn_mask_type,
        "window_size_left": window_size_left,
        "window_size_right": window_size_right,
        "softmax_type": softmax_type,
        "dropout_p": dropout_p,
        "seed": seed,
        "offset": offset,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
        "cu_seqlens_q_padded": cu_seqlens_q_padded,
        "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_kv": max_seqlen_kv,
    }
    tensors = (q, k, v, bias, softmax_offset)
    q, k, v = _checked(ops.fused_attn_fwd, tensors, options)  # type: ignore[arg-type]
    order = _TO_HEADS[qkv_format]
    found = _forward(
        q.permute(order),
        k.permute(order),
        v.permute(order),
        None,
        True,
        0.0,
        attn_mask_type != "no_mask",
        False,
        scale=_scale(q, scale),
    )
    out: Tensor = found[0].permute(_FROM_HEADS[qkv_format])
    lse: Tensor = found[1]
    return out.contiguous(), lse.view(lse.shape[:3]).contiguous()


def fused_attn_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    bias: Tensor | None = None,
    softmax_offset: Tensor | None = None,
    *,
    scale: float | None = None,
    qkv_format: str = "bshd",
    attn_mask_type: str = "no_mask",
    window_size_left: int = -1,
    window_size_right: int = -1,
    softmax_type: str = "vanilla",
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, None, None]:
    """``fused_attn_bwd`` of the contract."""
    options = {
        "scale": scale,
        "qkv_format": qkv_format,
        "attn_mask_type": attn_mask_type,
        "window_size_left": window_size_left,
        "window_size_right": window_size_right,
        "softmax_type": softmax_type,
        "dropout_p": dropout_p,
        "seed": seed,
        "offset": offset,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
        "cu_seqlens_q_padded": cu_seqlens_q_padded,
        "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_kv": max_seqlen_kv,
    }
    tensors = (dout, q, k, v, out, softmax_lse, bias, softmax_offset)
    checked = _checked(ops.fused_attn_bwd, tensors, options)  # type: ignore[arg-type]
    dout, q, k, v, out, lse = checked
    order = _TO_HEADS[qkv_format]
    nothing = torch.empty((), dtype=torch.int64, device=q.device)  # for the unused seed and offset
    lse = lse.contiguous()
    length = qkv_format.index("s")
    found = _backward(
        dout.contiguous().permute(order),
        q.permute(order),
        k.permute(order),
        v.permute(order),
        out.contiguous().permute(order),
        lse.unsqueeze(-1),
        nothing,
        nothing,
        None,
        None,
        None,
        q.shape[length],
        k.shape[length],
        0.0,
        attn_mask_type != "no_mask",
        scale=_scale(q, scale),
    )
    dq, dk, dv = (it.permute(_FROM_HEADS[qkv_format]).contiguous() for it in found)
    return dq, dk, dv, None, None
