"""The catalogue: one contract per operator, one file per family.

Loads without torch. Each name is the operator's contract, and calling it dispatches
through the default manager: ``ops.rmsnorm_fwd(x, w)``.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from transformer_engine_fl.core.contract import Contract
from transformer_engine_fl.ops.activation import (
    clamped_dswiglu,
    clamped_swiglu,
    dbias_dgelu,
    dbias_dqgelu,
    dbias_drelu,
    dbias_dsilu,
    dbias_dsrelu,
    dgeglu,
    dgelu,
    dglu,
    dqgeglu,
    dqgelu,
    dreglu,
    drelu,
    dsilu,
    dsreglu,
    dsrelu,
    dswiglu,
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
from transformer_engine_fl.ops.attention import (
    fused_attn_bwd,
    fused_attn_fwd,
)
from transformer_engine_fl.ops.attention_layout import (
    convert_bshd_to_thd,
    convert_thd_to_bshd,
    copy_to_kv_cache,
    fa_prepare_bwd,
    fa_prepare_fwd,
)
from transformer_engine_fl.ops.context_parallel import (
    thd_get_partitioned_indices,
    thd_grad_correction,
    thd_out_correction,
    thd_read_half_tensor,
    thd_read_second_half_lse,
    thd_second_half_lse_correction,
)
from transformer_engine_fl.ops.dropout import (
    dropout_bwd,
    dropout_fwd,
)
from transformer_engine_fl.ops.gemm import (
    generic_gemm,
    te_general_grouped_gemm,
)
from transformer_engine_fl.ops.loss import (
    cross_entropy_bwd,
    cross_entropy_fwd,
    cross_entropy_merge,
    cross_entropy_partial_fwd,
    fused_linear_cross_entropy_bwd,
    fused_linear_cross_entropy_fwd,
)
from transformer_engine_fl.ops.normalization import (
    layernorm_bwd,
    layernorm_fwd,
    rmsnorm_bwd,
    rmsnorm_bwd_add,
    rmsnorm_fwd,
    rmsnorm_fwd_add,
)
from transformer_engine_fl.ops.quantization import (
    bgrad_quantize,
    compute_amax,
    dequantize,
    fp8_block_scaling_compute_partial_amax,
    fp8_block_scaling_partial_cast,
    fp8_transpose,
    fused_amax_and_scale_update_after_reduction,
    group_quantize,
    multi_tensor_quantize,
    quantize,
    split_quantize,
    swap_first_dims,
)
from transformer_engine_fl.ops.rope import (
    fused_qkv_rope_backward,
    fused_qkv_rope_forward,
    fused_rope_backward,
    fused_rope_forward,
)
from transformer_engine_fl.ops.softmax import (
    scaled_aligned_causal_masked_softmax_backward,
    scaled_aligned_causal_masked_softmax_forward,
    scaled_masked_softmax_backward,
    scaled_masked_softmax_forward,
    scaled_softmax_backward,
    scaled_softmax_forward,
    scaled_upper_triang_masked_softmax_backward,
    scaled_upper_triang_masked_softmax_forward,
)

__all__ = [
    "CATALOGUE",
    "bgrad_quantize",
    "clamped_dswiglu",
    "clamped_swiglu",
    "compute_amax",
    "convert_bshd_to_thd",
    "convert_thd_to_bshd",
    "copy_to_kv_cache",
    "cross_entropy_bwd",
    "cross_entropy_fwd",
    "cross_entropy_merge",
    "cross_entropy_partial_fwd",
    "dbias_dgelu",
    "dbias_dqgelu",
    "dbias_drelu",
    "dbias_dsilu",
    "dbias_dsrelu",
    "dequantize",
    "dgeglu",
    "dgelu",
    "dglu",
    "dqgeglu",
    "dqgelu",
    "dreglu",
    "drelu",
    "dropout_bwd",
    "dropout_fwd",
    "dsilu",
    "dsreglu",
    "dsrelu",
    "dswiglu",
    "fa_prepare_bwd",
    "fa_prepare_fwd",
    "fp8_block_scaling_compute_partial_amax",
    "fp8_block_scaling_partial_cast",
    "fp8_transpose",
    "fused_amax_and_scale_update_after_reduction",
    "fused_attn_bwd",
    "fused_attn_fwd",
    "fused_linear_cross_entropy_bwd",
    "fused_linear_cross_entropy_fwd",
    "fused_qkv_rope_backward",
    "fused_qkv_rope_forward",
    "fused_rope_backward",
    "fused_rope_forward",
    "geglu",
    "gelu",
    "generic_gemm",
    "glu",
    "group_quantize",
    "layernorm_bwd",
    "layernorm_fwd",
    "multi_tensor_quantize",
    "qgeglu",
    "qgelu",
    "quantize",
    "reglu",
    "relu",
    "rmsnorm_bwd",
    "rmsnorm_bwd_add",
    "rmsnorm_fwd",
    "rmsnorm_fwd_add",
    "scaled_aligned_causal_masked_softmax_backward",
    "scaled_aligned_causal_masked_softmax_forward",
    "scaled_masked_softmax_backward",
    "scaled_masked_softmax_forward",
    "scaled_softmax_backward",
    "scaled_softmax_forward",
    "scaled_upper_triang_masked_softmax_backward",
    "scaled_upper_triang_masked_softmax_forward",
    "silu",
    "split_quantize",
    "sreglu",
    "srelu",
    "swap_first_dims",
    "swiglu",
    "te_general_grouped_gemm",
    "thd_get_partitioned_indices",
    "thd_grad_correction",
    "thd_out_correction",
    "thd_read_half_tensor",
    "thd_read_second_half_lse",
    "thd_second_half_lse_correction",
]


def _index(values: Iterable[object]) -> Mapping[str, Contract[..., Any]]:
    contracts = (value for value in values if isinstance(value, Contract))
    return MappingProxyType({contract.name: contract for contract in contracts})


CATALOGUE: Final = _index(tuple(globals().values()))
"""Every contract by its operator's name (aliases are on the contracts)."""
