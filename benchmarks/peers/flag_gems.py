"""flag_gems' Triton kernels, called without autograd where possible."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from peers.eager import unpacked
from peers.liger import halves
from peers.peer import Peer, Table, Work
from peers.torch_library import (
    ATTENTION_VARIANTS,
    attention_backward_work,
    attention_work,
    grouped,
)

EPS = 1e-5


def _ops(module: str) -> Any:
    return importlib.import_module(f"flag_gems.ops.{module}")


def _fused(module: str) -> Any:
    return importlib.import_module(f"flag_gems.fused.{module}")


def _rmsnorm_fwd(x: Tensor, weight: Tensor) -> Work:
    rms_norm = _ops("rms_norm")
    return Work(lambda: rms_norm.rms_norm_forward(x, weight.shape, weight, EPS)[:1])


def _rmsnorm_bwd(dy: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor) -> Work:
    rms_norm = _ops("rms_norm")
    return Work(lambda: rms_norm.rms_norm_backward(dy, x, rsigma, gamma.shape, gamma, EPS))


def _rmsnorm_fwd_add(x: Tensor, residual: Tensor, weight: Tensor) -> Work:
    module, x, residual = _fused("fused_add_rms_norm"), x.clone(), residual.clone()
    return Work(lambda: module.fused_add_rms_norm(x, residual, weight.shape, weight, EPS))


def _layernorm_fwd(x: Tensor, weight: Tensor, bias: Tensor) -> Work:
    layernorm = _ops("layernorm")
    return Work(lambda: layernorm.layer_norm(x, weight.shape, weight, bias, EPS)[:1])


def _layernorm_bwd(dy: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor) -> Work:
    layernorm, bias = _ops("layernorm"), torch.zeros_like(gamma)
    return Work(
        lambda: layernorm.layer_norm_backward(
            dy, x, gamma.shape, mu, rsigma, gamma, bias, [True, True, True]
        )
    )


def _softmax(x: Tensor) -> Work:
    softmax = _ops("softmax")
    return Work(lambda: softmax.softmax(x, -1))


def _softmax_backward(grad: Tensor, output: Tensor) -> Work:
    softmax = _ops("softmax")
    return Work(lambda: softmax.softmax_backward(grad, output, -1, output.dtype))


def _gelu(x: Tensor) -> Work:
    gelu = _ops("gelu")
    return Work(lambda: gelu.gelu(x, approximate="tanh"))


def _dgelu(grad: Tensor, x: Tensor) -> Work:
    gelu = _ops("gelu")
    return Work(lambda: gelu.gelu_backward(grad, x, approximate="tanh"))


def _silu(x: Tensor) -> Work:
    silu = _ops("silu")
    return Work(lambda: silu.silu(x))


def _dsilu(grad: Tensor, x: Tensor) -> Work:
    silu = _ops("silu")
    return Work(lambda: silu.silu_backward(grad, x))


def _gated(module: str, function: str) -> Callable[..., Work]:
    """A function of a module of ``flag_gems.fused`` that takes the operator's own arguments."""

    def make(*args: Tensor) -> Work:
        run = getattr(_fused(module), function)
        return Work(lambda: run(*args))

    return make


def _silu_and_mul(x: Tensor) -> Work:
    module, (a, b) = _fused("silu_and_mul"), halves(x)
    return Work(lambda: module.silu_and_mul(a, b))


def _rope(tokens: Tensor, freqs: Tensor) -> Work:
    rotary = _fused("rotary_embedding")
    held = tokens.transpose(0, 1).contiguous()
    key = torch.zeros_like(held[:, :, :1])
    half = freqs[:, 0, 0, : freqs.shape[-1] // 2]
    cos, sin = half.cos(), half.sin()
    return Work(
        lambda: rotary.apply_rotary_pos_emb(held, key, cos, sin),
        lambda results: results[0].transpose(0, 1),
    )


def _dropout(x: Tensor, probability: float, *, seed: int) -> Work:
    dropout = _ops("dropout")
    return Work(lambda: dropout.dropout(x, probability), lambda _: ())


def _dropout_backward(grad: Tensor, mask: Tensor, probability: float) -> Work:
    dropout, kept = _ops("dropout"), unpacked(mask, grad)
    return Work(lambda: dropout.dropout_backward(grad, kept, 1 / (1 - probability)))


def _cross_entropy(logits: Tensor, target: Tensor) -> Work:
    module = _fused("cross_entropy_loss")
    leaf = logits.detach().requires_grad_()

    def both() -> Any:
        with torch.enable_grad():
            return torch.autograd.grad(module.cross_entropy_loss(leaf, target), leaf)

    return Work(both)


def _block_quantize(x: Tensor, *, format: str) -> Work:
    module = _ops("per_token_group_quant_fp8")
    return Work(lambda: module.per_token_group_quant_fp8(x, 128))


def _mm(weight: Tensor, input: Tensor) -> Work:
    mm = _ops("mm")
    return Work(lambda: mm.mm(input, weight.t()))


def _group_mm(weights: list[Tensor], inputs: list[Tensor], splits: list[int]) -> Work:
    module, (rows, stacked, ends) = _ops("group_gemm"), grouped(weights, inputs, splits)
    stacked = stacked.contiguous()
    return Work(lambda: module.group_mm(rows, stacked, ends))


def _attention(mask: str) -> Callable[..., Any]:
    attention = _ops("attention")

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = attention.scaled_dot_product_attention(
            q, k, v, is_causal=mask == "causal", enable_gqa=q.shape[1] != k.shape[1]
        )
        return result

    return function


def _attention_forward(q: Tensor, k: Tensor, v: Tensor, *, attn_mask_type: str) -> Work:
    return attention_work(_attention(attn_mask_type), q, k, v)


def _attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    attn_mask_type: str,
) -> Work:
    return attention_backward_work(_attention(attn_mask_type), dout, q, k, v)


def _topk_softmax(logits: Tensor, topk: int) -> Work:
    module = _fused("topk_softmax")
    weights = logits.new_empty(len(logits), topk)
    chosen, sources = (torch.empty_like(weights, dtype=torch.int32) for _ in range(2))
    run = functools.partial(module.topk_softmax, weights, chosen, sources, logits, True)
    return Work(run, lambda _: (torch.zeros_like(logits).scatter(1, chosen.long(), weights),))


_BYTES = "a mask of one byte for each element"
_ROPE = (
    "takes cosines and sines, on [batch, tokens, heads, features], and a key tensor of one head "
    "as well"
)

FLAG_GEMS: dict[str, Table] = {
    "flag_gems": {
        "rmsnorm_fwd": Peer(_rmsnorm_fwd),
        "rmsnorm_bwd": Peer(_rmsnorm_bwd),
        "rmsnorm_fwd_add": Peer(_rmsnorm_fwd_add, "in place"),
        "layernorm_fwd": Peer(_layernorm_fwd),
        "layernorm_bwd": Peer(_layernorm_bwd),
        "scaled_softmax_forward": Peer(_softmax),
        "scaled_softmax_backward": Peer(_softmax_backward),
        "gelu": Peer(_gelu),
        "dgelu": Peer(_dgelu),
        "silu": Peer(_silu),
        "dsilu": Peer(_dsilu),
        "swiglu": Peer(_gated("swiglu", "swiglu")),
        "dswiglu": Peer(_gated("swiglu", "dswiglu")),
        "geglu": Peer(_gated("geglu", "geglu")),
        "dgeglu": Peer(_gated("geglu", "dgeglu")),
        "reglu": Peer(_gated("reglu", "reglu")),
        "dreglu": Peer(_gated("reglu", "dreglu")),
        "fused_rope_forward": Peer(_rope, _ROPE),
        "dropout_fwd": Peer(
            _dropout, f"{_BYTES}; it draws other numbers, so that values are not compared"
        ),
        "dropout_bwd": Peer(_dropout_backward, _BYTES),
        "cross_entropy fwd+bwd": Peer(_cross_entropy, "gradient of the mean loss, by autograd"),
        "quantize 1x128": Peer(_block_quantize),
        "generic_gemm": Peer(_mm),
        "te_general_grouped_gemm": Peer(_group_mm, "the weights are one tensor, K x N"),
        "te_general_grouped_gemm weights of one tensor": Peer(_group_mm, "the weights are K x N"),
        "fused_topk_with_score_function_fwd": Peer(
            _topk_softmax, "returns topk weights and indices, not the probs of every expert"
        ),
        **{
            f"{op} {variant}": Peer(make)
            for op, make in (
                ("fused_attn_fwd", _attention_forward),
                ("fused_attn_bwd", _attention_backward),
            )
            for variant in ATTENTION_VARIANTS
        },
    },
    "flag_gems silu_and_mul": {"swiglu": Peer(_silu_and_mul, "the halves are two tensors")},
}
