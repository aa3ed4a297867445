"""Differentiable functions over the operators.

Operators compute values; gradients live here. Which implementation runs a backward is
settled when the forward runs, so that a ``with`` block may end, and autograd may use a
thread of its own, in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_engine_fl.core.manager import get_default_manager
from transformer_engine_fl.ops import CATALOGUE

__all__ = ["dropout", "layer_norm", "qkv_rope", "rms_norm", "rms_norm_add", "rope"]


class _Differentiable(torch.autograd.Function):
    """Any operator whose contract names its backward; returns the differentiable outputs.

    ``places`` says which of ``tensors`` each argument is. Two arguments may be one tensor,
    which torch.compile takes only once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        op_name: str,
        options: dict[str, Any],
        places: dict[str, int],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        backward = CATALOGUE[op_name].backward
        assert backward is not None  # an invariant of ours: only such operators come here
        known = {name: tensors[place] for name, place in places.items()}
        args, keywords = _arranged(op_name, known)
        manager = get_default_manager()
        outputs = _as_tuple(manager.call(op_name, *args, **keywords, **options))
        known |= {f"output[{place}]": output for place, output in enumerate(outputs)}
        ctx.save_for_backward(*(known.get(source) for source in backward.saves.values()))
        ctx.options = {name: options[name] for name in backward.options if name in options}
        ctx.run = manager.pin(backward.op)
        ctx.op_name = op_name
        ctx.places = places
        ctx.count = len(tensors)
        grads = backward.output_grads or (next(iter(CATALOGUE[backward.op].signature.parameters)),)
        ctx.given = (*grads, *backward.saves)
        return tuple(outputs[: len(grads)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        backward = CATALOGUE[ctx.op_name].backward
        assert backward is not None
        given = dict(zip(ctx.given, (*grads, *ctx.saved_tensors), strict=True))
        args, keywords = _arranged(backward.op, given)
        gradients = _as_tuple(ctx.run(*args, **keywords, **ctx.options))
        returned: list[Tensor | None] = [None] * ctx.count
        for owners, gradient in zip(backward.gradients, gradients, strict=True):
            for owner in (owners,) if isinstance(owners, str) else owners:
                place = ctx.places[owner]
                if ctx.needs_input_grad[3 + place]:
                    before = returned[place]
                    returned[place] = gradient if before is None else before + gradient
        return None, None, None, *returned


def _apply(op_name: str, options: dict[str, Any], *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The operator's outputs, those that have a gradient first.

    Args:
        options: the other arguments by name, tensors among them.
        tensors: the operator's first arguments.
    """
    contract = CATALOGUE[op_name]
    keywords, plain = {}, {}
    for name, value in options.items():
        if isinstance(value, Tensor):
            keywords[name] = value
        elif name not in contract.options or value != contract.options[name]:
            # What has its default is not passed on: an implementation need not know
            # every option.
            plain[name] = value
    wanted = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if not (wanted and torch.is_grad_enabled()):
        return _as_tuple(get_default_manager().call(op_name, *tensors, **keywords, **plain))
    given = {**dict(zip(contract.signature.parameters, tensors, strict=False)), **keywords}
    places: dict[str, int] = {}
    different: list[Tensor | None] = []
    for name, tensor in given.items():
        same = [place for place, other in enumerate(different) if other is tensor]
        places[name] = same[0] if same else len(different)
        if not same:
            different.append(tensor)
    result: tuple[Tensor, ...] = _Differentiable.apply(op_name, plain, places, *different)  # type: ignore[no-untyped-call]
    return result


def _arranged(
    op_name: str, given: dict[str, Tensor | None]
) -> tuple[list[Tensor | None], dict[str, Tensor]]:
    """Tensors by position as far as the signature goes, the others by name."""
    args, rest = [], dict(given)
    for name, parameter in CATALOGUE[op_name].signature.parameters.items():
        if name not in rest or parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            break
        args.append(rest.pop(name))
    return args, {name: tensor for name, tensor in rest.items() if tensor is not None}


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def rms_norm(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Root mean square normalization over the last dimension, differentiable.

    See :func:`transformer_engine_fl.ops.rmsnorm_fwd` for the formula and the arguments.

    Returns:
        ``[..., H]``, ``out_dtype`` or the input's dtype.
    """
    options = {"eps": eps, "zero_centered_gamma": zero_centered_gamma, "out_dtype": out_dtype}
    return _apply("rmsnorm_fwd", options, input, weight)[0]


def rms_norm_add(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Root mean square normalization of ``input + residual``, differentiable.

    See :func:`transformer_engine_fl.ops.rmsnorm_fwd_add` for the formula and the arguments.

    Returns:
        output: ``[..., H]``, ``out_dtype`` or the input's dtype.
        sum: ``[..., H]``, the input's dtype; the residual of the next block.
    """
    options = {"eps": eps, "zero_centered_gamma": zero_centered_gamma, "out_dtype": out_dtype}
    output, total, *_ = _apply("rmsnorm_fwd_add", options, input, residual, weight)
    return output, total


def layer_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Layer normalization over the last dimension, differentiable.

    See :func:`transformer_engine_fl.ops.layernorm_fwd` for the formula and the arguments.

    Returns:
        ``[..., H]``, ``out_dtype`` or the input's dtype.
    """
    options = {"eps": eps, "zero_centered_gamma": zero_centered_gamma, "out_dtype": out_dtype}
    return _apply("layernorm_fwd", options, input, weight, bias)[0]


def rope(
    input: Tensor,
    freqs: Tensor,
    *,
    start_positions: Tensor | None = None,
    qkv_format: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Rotary position embedding, differentiable with respect to ``input``.

    See :func:`transformer_engine_fl.ops.fused_rope_forward` for the formula and the
    arguments. ``freqs`` is a constant, and gets no gradient.

    Returns:
        Shape and dtype of ``input``.
    """
    options = {
        "start_positions": start_positions,
        "qkv_format": qkv_format,
        "interleaved": interleaved,
        "cu_seqlens": cu_seqlens,
        "cp_size": cp_size,
        "cp_rank": cp_rank,
    }
    return _apply("fused_rope_forward", options, input, freqs)[0]


def qkv_rope(
    qkv_input: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    *,
    qkv_split: Sequence[int],
    start_positions: Tensor | None = None,
    qkv_format: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values out of a packed tensor, the first two with rotary embedding.

    Differentiable with respect to ``qkv_input``. See
    :func:`transformer_engine_fl.ops.fused_qkv_rope_forward` for the formula and the
    arguments. The freqs are constants, and get no gradient.

    Returns:
        q: ``[..., h * dq / dk, dk]``, the input's dtype.
        k: ``[..., h, dk]``, likewise.
        v: ``[..., h, dv]``, likewise.
    """
    options = {
        "qkv_split": qkv_split,
        "start_positions": start_positions,
        "qkv_format": qkv_format,
        "interleaved": interleaved,
        "cu_seqlens": cu_seqlens,
        "cp_size": cp_size,
        "cp_rank": cp_rank,
    }
    q, k, v = _apply("fused_qkv_rope_forward", options, qkv_input, q_freqs, k_freqs)
    return q, k, v


def dropout(input: Tensor, dropout_probability: float, *, seed: int, offset: int = 0) -> Tensor:
    """Dropout whose mask follows from ``seed`` and ``offset``, differentiable.

    See :func:`transformer_engine_fl.ops.dropout_fwd` for how. The mask is kept for the
    backward at one bit for each element.

    Returns:
        Shape and dtype of ``input``.
    """
    options = {"dropout_probability": dropout_probability, "seed": seed, "offset": offset}
    return _apply("dropout_fwd", options, input)[0]
