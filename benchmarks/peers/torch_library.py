"""Torch's fused functions, and its matrix products and attention by cuBLAS and cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from peers.peer import Peer, Table, Work, autograd

# ------------------------------------------------------------------------------ products


def _matmul(weight: Tensor, input: Tensor, **_: Any) -> Callable[[], Any]:
    return lambda: input @ weight.t()


def _matmul_dgrad(weight: Tensor, output_grad: Tensor, **_: Any) -> Callable[[], Any]:
    return lambda: output_grad @ weight


def _linear(weight: Tensor, input: Tensor, *, bias: Tensor) -> Callable[[], Any]:
    return lambda: F.linear(input, weight, bias)


def _scaled_mm(
    weight: Tensor, input: Tensor, *, A_scale_inv: Tensor, B_scale_inv: Tensor
) -> Callable[[], Any]:
    scales = {"scale_a": B_scale_inv.reshape(()), "scale_b": A_scale_inv.reshape(())}
    return lambda: torch._scaled_mm(input, weight.t(), out_dtype=torch.bfloat16, **scales)


def grouped(weights: list[Tensor], inputs: list[Tensor], splits: list[int]) -> tuple[Tensor, ...]:
    """The rows, the weights as ``[groups, K, N]``, and the end of each group's rows in int32."""
    ends = torch.tensor(splits).cumsum(0).to(inputs[0].device, torch.int32)
    return inputs[0], torch.stack(weights).transpose(1, 2), ends


def _grouped_mm(
    weights: list[Tensor], inputs: list[Tensor], splits: list[int]
) -> Callable[[], Any]:
    rows, stacked, ends = grouped(weights, inputs, splits)
    return lambda: torch._grouped_mm(rows, stacked, offs=ends)


# ----------------------------------------------------------------------------- optimizer


def _fused_adamw(
    grads: list[Tensor],
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    lr: float,
    step: int,
    *,
    weight_decay: float,
) -> Work:
    steps = [torch.tensor(float(step), device=params[0].device)] * len(params)

    def update() -> None:
        torch._fused_adamw_(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            lr=lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=weight_decay,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    return Work(update, lambda _: (params, exp_avgs, exp_avg_sqs))


def _fused_sgd(
    grads: list[Tensor],
    params: list[Tensor],
    buffers: list[Tensor],
    lr: float,
    weight_decay: float,
    momentum: float,
) -> Work:
    def update() -> None:
        torch._fused_sgd_(
            params,
            grads,
            buffers,
            weight_decay=weight_decay,
            momentum=momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    return Work(update, lambda _: (params, buffers))


def _foreach_norm(inputs: list[Tensor]) -> Callable[[], Any]:
    return lambda: torch.stack(torch._foreach_norm(inputs)).norm().reshape(1)


def _foreach_mul(inputs: list[Tensor], outputs: list[Tensor], scale: float) -> Work:
    return Work(lambda: torch._foreach_mul(inputs, scale), lambda results: (list(results),))


# ----------------------------------------------------------------------------- attention


def heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Views as ``[batch, heads, tokens, features]``."""
    return tuple(it.transpose(1, 2) for it in tensors)


def _sdpa(backend: SDPBackend, mask: str) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=mask == "causal", enable_gqa=q.shape[1] != k.shape[1]
            )

    return attention


def attention_work(attention: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> Work:
    """The forward of an attention function that takes tensors with the heads first."""
    views = heads_first(q, k, v)
    return Work(lambda: attention(*views), lambda out: heads_first(out))


def attention_backward_work(
    attention: Callable[..., Any], dout: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> Work:
    """The backward of such a function; its forward is not timed."""
    (grad,) = heads_first(dout)
    return Work(autograd(attention, heads_first(q, k, v), grad), lambda grads: heads_first(*grads))


def _attention(backend: SDPBackend) -> Peer:
    return Peer(
        lambda q, k, v, *, attn_mask_type: attention_work(_sdpa(backend, attn_mask_type), q, k, v)
    )


def _attention_backward(backend: SDPBackend) -> Peer:
    return Peer(
        lambda dout, q, k, v, out, lse, *, attn_mask_type: attention_backward_work(
            _sdpa(backend, attn_mask_type), dout, q, k, v
        )
    )


ATTENTION_VARIANTS = ("causal", "causal, 4 query heads for each key head", "without a mask")


def _attention_table(backend: SDPBackend) -> Table:
    return {
        f"{op} {variant}": peer(backend)
        for op, peer in (("fused_attn_fwd", _attention), ("fused_attn_bwd", _attention_backward))
        for variant in ATTENTION_VARIANTS
    }


TORCH: dict[str, Table] = {
    "torch.matmul": {"generic_gemm": Peer(_matmul), "generic_gemm dgrad": Peer(_matmul_dgrad)},
    "F.linear": {"generic_gemm bias": Peer(_linear)},
    "torch._scaled_mm": {"generic_gemm float8": Peer(_scaled_mm)},
    "torch._grouped_mm": {
        "te_general_grouped_gemm": Peer(_grouped_mm, "the weights are one tensor"),
        "te_general_grouped_gemm weights of one tensor": Peer(_grouped_mm),
    },
    "torch._fused_adamw_": {"multi_tensor_adam": Peer(_fused_adamw)},
    "torch._fused_sgd_": {"multi_tensor_sgd": Peer(_fused_sgd)},
    "torch._foreach_norm": {
        "multi_tensor_l2norm": Peer(_foreach_norm, "a norm of each tensor, then the norm of these")
    },
    "torch._foreach_mul": {
        "multi_tensor_scale": Peer(
            _foreach_mul, "returns new tensors; reports no infinities or NaNs"
        )
    },
    "SDPA cuDNN": _attention_table(SDPBackend.CUDNN_ATTENTION),
    "SDPA flash": _attention_table(SDPBackend.FLASH_ATTENTION),
}
