"""liger-kernel's Triton kernels, called without autograd."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from workloads.loss import LINEAR_CROSS_ENTROPY

from peers.peer import Peer, Table, Work

EPS = 1e-5


def _ops(module: str) -> Any:
    return importlib.import_module(f"liger_kernel.ops.{module}")


# Arguments of its RMS norm: no offset, sums in float32, rounding before the product with gamma.
_RMS = (0.0, "llama")


def _rmsnorm_fwd(x: Tensor, weight: Tensor) -> Work:
    rms_norm = _ops("rms_norm")
    return Work(lambda: rms_norm.rms_norm_forward(x, weight, EPS, *_RMS, None)[:1])


def _rmsnorm_bwd(dy: Tensor, x: Tensor, _: Tensor, gamma: Tensor) -> Work:
    rms_norm = _ops("rms_norm")
    _, saved, rstd, block, warps, mode = rms_norm.rms_norm_forward(x, gamma, EPS, *_RMS, None)
    return Work(
        lambda: rms_norm.rms_norm_backward(
            dy, saved, gamma, rstd, 0.0, mode, block, warps, False, None
        )
    )


def _rmsnorm_fwd_add(x: Tensor, residual: Tensor, weight: Tensor) -> Work:
    fused = _ops("fused_add_rms_norm")
    return Work(lambda: fused.fused_add_rms_norm_forward(x, residual, weight, EPS, *_RMS)[:2])


def _layernorm_fwd(x: Tensor, weight: Tensor, bias: Tensor) -> Work:
    layer_norm = _ops("layer_norm")
    return Work(lambda: layer_norm.layer_norm_forward(x, weight, bias, EPS)[:1])


def _layernorm_bwd(dy: Tensor, x: Tensor, mu: Tensor, _: Tensor, gamma: Tensor) -> Work:
    layer_norm = _ops("layer_norm")
    bias = torch.zeros_like(gamma)
    _, saved, mean, rstd, *_ = layer_norm.layer_norm_forward(x, gamma, bias, EPS)
    return Work(lambda: layer_norm.layer_norm_backward(dy, saved, gamma, bias, mean, rstd))


def _softmax(x: Tensor) -> Work:
    softmax = _ops("softmax")
    return Work(lambda: softmax._softmax_forward(x)[0])


def _softmax_backward(grad: Tensor, output: Tensor) -> Work:
    softmax = _ops("softmax")
    settings = softmax._softmax_forward(output)[1:]
    return Work(lambda: softmax._softmax_backward(grad, output, *settings))


def _swiglu(x: Tensor) -> Work:
    swiglu = _ops("swiglu")
    return Work(lambda: swiglu.swiglu_fused_gate_up_forward(x)[1])


def _dswiglu(grad: Tensor, x: Tensor) -> Work:
    swiglu = _ops("swiglu")
    return Work(lambda: swiglu.swiglu_fused_gate_up_backward(x, grad))


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of a gated input, contiguous."""
    a, b = x.chunk(2, -1)
    return a.contiguous(), b.contiguous()


def _geglu(x: Tensor) -> Work:
    geglu, (a, b) = _ops("geglu"), halves(x)
    return Work(lambda: geglu.geglu_forward(a, b)[2])


def _dgeglu(grad: Tensor, x: Tensor) -> Work:
    geglu, (a, b) = _ops("geglu"), halves(x)
    return Work(
        lambda: geglu.geglu_backward(a.clone(), b.clone(), grad),
        lambda grads: torch.cat(grads, -1),
    )


def _srelu(x: Tensor) -> Work:
    relu_squared = _ops("relu_squared")
    return Work(lambda: relu_squared.relu_squared_forward(x))


def _dsrelu(grad: Tensor, x: Tensor) -> Work:
    relu_squared = _ops("relu_squared")
    return Work(lambda: relu_squared.relu_squared_backward(x, grad))


def _rope(function: str) -> Any:
    def make(tokens: Tensor, freqs: Tensor) -> Work:
        rotate = getattr(_ops("rope"), function)
        # Stored as [batch, tokens, heads, features], passed as a view with the heads first.
        held = tokens.transpose(0, 1).contiguous()
        key = torch.zeros_like(held[:, :, :1])
        angles = freqs[:, 0, 0]
        cos, sin = angles.cos().to(tokens.dtype), angles.sin().to(tokens.dtype)
        return Work(
            lambda: rotate(held.transpose(1, 2), key.transpose(1, 2), cos, sin),
            lambda results: results[0].permute(2, 0, 1, 3),
        )

    return make


def _cross_entropy(logits: Tensor, target: Tensor) -> Work:
    cross_entropy = _ops("cross_entropy")
    held = logits.clone().requires_grad_()  # liger computes a gradient only if logits require one
    one = torch.ones((), device=logits.device)

    @torch.no_grad()
    def both() -> Any:
        gradient = cross_entropy.cross_entropy_forward(
            held, target, None, -100, 0.0, 0.0, "mean", None, False
        )[4]
        return cross_entropy.cross_entropy_backward(gradient, one)

    return Work(both)


def _linear_cross_entropy(input: Tensor, weight: Tensor, target: Tensor) -> Work:
    fused = _ops("fused_linear_cross_entropy")

    @torch.no_grad()
    def both() -> Any:
        return fused.fused_linear_cross_entropy_forward(
            input, weight, target, compute_gradients=True, weight_requires_grad=True
        )[4:6]

    return Work(both)


_ROPE = (
    "in place on [batch, tokens, heads, features], with cosines and sines given and a key tensor "
    "of one head as well"
)
_MEAN = "gradient of the mean loss"

LIGER: Table = {
    "rmsnorm_fwd": Peer(_rmsnorm_fwd),
    "rmsnorm_bwd": Peer(_rmsnorm_bwd),
    "rmsnorm_fwd_add": Peer(_rmsnorm_fwd_add),
    "layernorm_fwd": Peer(_layernorm_fwd),
    "layernorm_bwd": Peer(_layernorm_bwd),
    "scaled_softmax_forward": Peer(_softmax),
    "scaled_softmax_backward": Peer(_softmax_backward),
    "swiglu": Peer(_swiglu),
    "dswiglu": Peer(_dswiglu),
    "geglu": Peer(_geglu, "the halves are two tensors"),
    "dgeglu": Peer(
        _dgeglu, "the halves are two tensors; includes copying them, as it works in place"
    ),
    "srelu": Peer(_srelu),
    "dsrelu": Peer(_dsrelu),
    "fused_rope_forward": Peer(_rope("rope_forward"), _ROPE),
    "fused_rope_backward": Peer(_rope("rope_backward"), _ROPE),
    "cross_entropy fwd+bwd": Peer(
        _cross_entropy, f"{_MEAN}; its forward writes the gradient over the logits"
    ),
    **dict.fromkeys(LINEAR_CROSS_ENTROPY, Peer(_linear_cross_entropy, _MEAN)),
}
