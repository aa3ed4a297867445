"""Differentiable functions over the operators.

Operators compute values and are not differentiable; this package connects them to autograd. The
implementation of a backward is chosen when the forward runs. A ``with`` block may therefore end
between the two, and autograd may run the backward in another thread.
"""

from transformer_engine_fl.functional.activation import (
    clamped_swiglu,
    geglu,
    gelu,
    glu,
    qgeglu,
    qgelu,
    reglu,
    relu,
    silu,
    sreglu,
    srelu,
    swiglu,
)
from transformer_engine_fl.functional.attention import (
    attention,
)
from transformer_engine_fl.functional.attention_layout import (
    bshd_to_thd,
    fa_prepare,
    thd_to_bshd,
)
from transformer_engine_fl.functional.dropout import (
    dropout,
)
from transformer_engine_fl.functional.gemm import (
    grouped_linear,
    linear,
)
from transformer_engine_fl.functional.loss import (
    cross_entropy,
    fused_linear_cross_entropy,
)
from transformer_engine_fl.functional.moe import (
    moe_permute,
    moe_permute_with_probs,
    moe_unpermute,
)
from transformer_engine_fl.functional.normalization import (
    layer_norm,
    rms_norm,
    rms_norm_add,
)
from transformer_engine_fl.functional.padding import (
    multi_row_padding,
    multi_row_unpadding,
)
from transformer_engine_fl.functional.rope import (
    qkv_rope,
    rope,
)
from transformer_engine_fl.functional.router import (
    moe_aux_loss,
    score_for_moe_aux_loss,
    topk_router,
)
from transformer_engine_fl.functional.softmax import (
    scaled_aligned_causal_masked_softmax,
    scaled_masked_softmax,
    scaled_softmax,
    scaled_upper_triang_masked_softmax,
)

__all__ = [
    "attention",
    "bshd_to_thd",
    "clamped_swiglu",
    "cross_entropy",
    "dropout",
    "fa_prepare",
    "fused_linear_cross_entropy",
    "geglu",
    "gelu",
    "glu",
    "grouped_linear",
    "layer_norm",
    "linear",
    "moe_aux_loss",
    "moe_permute",
    "moe_permute_with_probs",
    "moe_unpermute",
    "multi_row_padding",
    "multi_row_unpadding",
    "qgeglu",
    "qgelu",
    "qkv_rope",
    "reglu",
    "relu",
    "rms_norm",
    "rms_norm_add",
    "rope",
    "scaled_aligned_causal_masked_softmax",
    "scaled_masked_softmax",
    "scaled_softmax",
    "scaled_upper_triang_masked_softmax",
    "score_for_moe_aux_loss",
    "silu",
    "sreglu",
    "srelu",
    "swiglu",
    "thd_to_bshd",
    "topk_router",
]
