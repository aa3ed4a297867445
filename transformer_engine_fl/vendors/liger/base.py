"""Liger's default names, implemented by this project's operators for calls that no vendor serves.

Each function has the signature of Liger's and is differentiable. Options that the operators
here lack are declined, so that a vendor's implementation that has them can serve the call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.core.registry import OpRegistry
from transformer_engine_fl.core.types import DEFAULT_PRIORITY, BackendImplKind, OpImpl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BASE", "MUTATES", "register"]


def LigerRMSNormFunction(  # noqa: N802 - Liger's name
    X: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = True,
    row_mode: bool | None = None,
) -> Tensor:
    """Root mean square norm. Calculated in float32 whatever ``casting_mode`` says."""
    from transformer_engine_fl import functional

    if W is None or offset not in (0.0, 1.0):
        raise NotSupportedError("LigerRMSNormFunction: a weight, and an offset of 0 or 1, only")
    return functional.rms_norm(X, W, eps, zero_centered_gamma=bool(offset))


def LigerLayerNormFunction(X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:  # noqa: N802
    """Layer norm."""
    from transformer_engine_fl import functional

    return functional.layer_norm(X, W, B, eps)


def LigerGELUMulFunction(a: Tensor, b: Tensor) -> Tensor:  # noqa: N802
    """``gelu(a) * b``, tanh form."""
    import torch

    from transformer_engine_fl import functional

    return functional.geglu(torch.cat([a, b], -1))


def LigerSiLUMulFunction(  # noqa: N802
    a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> Tensor:
    """``silu(a * gate_multiplier) * b * down_multiplier``."""
    import torch

    from transformer_engine_fl import functional

    scaled = a if gate_multiplier == 1.0 else a * gate_multiplier
    output = functional.swiglu(torch.cat([scaled, b], -1))
    return output if down_multiplier == 1.0 else output * down_multiplier


def LigerSoftmaxFunction(input_: Tensor) -> Tensor:  # noqa: N802
    """Softmax over the last dimension."""
    import torch

    return torch.softmax(input_, -1)


def LigerRopeFunction(  # noqa: N802
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotary embedding of ``[b, h, s, d]``: features ``i`` and ``i + r / 2`` share one angle.

    ``cos`` and ``sin`` are ``[s, r]`` or ``[b or 1, s, r]``; only their first half is used.
    """
    import torch

    if cos.dim() not in (2, 3):
        raise NotSupportedError("LigerRopeFunction: cos and sin of two or three dimensions only")
    rotated = min(cos.shape[-1], q.shape[-1]) if rotary_dim is None else rotary_dim
    half = rotated // 2
    c, s = (it[..., :half].float().unsqueeze(-3) for it in (cos, sin))

    def rotate(x: Tensor) -> Tensor:
        a, b = x[..., :half].float(), x[..., half:rotated].float()
        parts = [(a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype), x[..., rotated:]]
        return torch.cat(parts, -1)

    return rotate(q), rotate(k)


def LigerCrossEntropyFunction(  # noqa: N802
    _input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> tuple[Tensor, Tensor | None, None, None]:
    """Cross entropy: (loss, z loss or None, None, None)."""
    from transformer_engine_fl import functional

    if weight is not None or return_token_accuracy or return_predicted_tokens:
        raise NotSupportedError(
            "LigerCrossEntropyFunction: no weights of classes, accuracy or predictions"
        )
    loss, z_loss = functional.cross_entropy(
        _input,
        target,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        z_loss=lse_square_scale,
        softcap=softcap,
        reduction=reduction,
        return_z_loss=True,
    )
    return loss, z_loss if return_z_loss else None, None, None


BASE: Final[dict[str, tuple[Callable[..., Any], str | None]]] = {
    "LigerCrossEntropyFunction": (LigerCrossEntropyFunction, "cross_entropy_fwd"),
    "LigerGELUMulFunction": (LigerGELUMulFunction, "geglu"),
    "LigerLayerNormFunction": (LigerLayerNormFunction, "layernorm_fwd"),
    "LigerRMSNormFunction": (LigerRMSNormFunction, "rmsnorm_fwd"),
    "LigerRopeFunction": (LigerRopeFunction, None),
    "LigerSiLUMulFunction": (LigerSiLUMulFunction, "swiglu"),
    "LigerSoftmaxFunction": (LigerSoftmaxFunction, None),
}
"""Name -> (function, the operator that it calls; None if it is plain torch)."""

MUTATES: Final[dict[str, tuple[str, ...]]] = dict.fromkeys(BASE, ()) | {
    "LigerCrossEntropyFunction": ("_input",)  # overwritten by the gradient
}
"""The arguments that Liger's functions write; unknown for other names."""


def register(registry: OpRegistry) -> None:
    """Register Liger's default names in a registry that has the operators, unless done already."""
    for name, (fn, op_name) in BASE.items():
        if all(impl.fn is not fn for impl in registry.get_implementations(name)):
            registry.register_many(_impls(registry, name, fn, op_name))


def _impls(
    registry: OpRegistry, name: str, fn: Callable[..., Any], op_name: str | None
) -> list[OpImpl]:
    """An implementation for each one of the operator, with the same conditions, so that policies
    rank both in the same way.
    """
    reference = BackendImplKind.REFERENCE
    if op_name is None:
        return [
            OpImpl(
                name,
                "reference.torch",
                reference,
                fn,
                priority=DEFAULT_PRIORITY[reference],
                mutates=(),
            )
        ]
    return [
        dataclasses.replace(
            impl, op_name=name, fn=fn, supports=None, traits=frozenset(), mutates=()
        )
        for impl in registry.get_implementations(op_name)
        if ":LOADED." not in str(impl.fn)
    ]
