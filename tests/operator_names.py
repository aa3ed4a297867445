"""The operators that must be there, by name, written down apart from the catalogue.

The names are those of Transformer Engine's ``transformer_engine_torch``, section by section,
and of what this project adds to them. A name may be an alias.
"""

from __future__ import annotations

LISTED: dict[str, tuple[str, ...]] = {
    "gemm": ("generic_gemm", "te_general_grouped_gemm"),
    "quantization": (
        "bgrad_quantize",
        "compute_amax",
        "dequantize",
        "fp8_block_scaling_compute_partial_amax",
        "fp8_block_scaling_partial_cast",
        "fp8_transpose",
        "fused_amax_and_scale_update_after_reduction",
        "group_quantize",
        "multi_tensor_quantize",
        "quantize",
        "split_quantize",
        "swap_first_dims",
    ),
    "activation, forward": (
        "clamped_swiglu",
        "geglu",
        "gelu",
        "glu",
        "qgeglu",
        "qgelu",
        "reglu",
        "relu",
        "silu",
        "sreglu",
        "srelu",
        "swiglu",
    ),
    "activation, backward": (
        "clamped_dswiglu",
        "dgeglu",
        "dgelu",
        "dglu",
        "dqgeglu",
        "dqgelu",
        "dreglu",
        "drelu",
        "dsilu",
        "dsreglu",
        "dsrelu",
        "dswiglu",
    ),
    "activation, backward and bias gradient": (
        "dbias_dgelu",
        "dbias_dqgelu",
        "dbias_drelu",
        "dbias_dsilu",
        "dbias_dsrelu",
    ),
    "normalization": (
        "layernorm_bwd",
        "layernorm_fwd",
        "rmsnorm_bwd",
        "rmsnorm_bwd_add",
        "rmsnorm_fwd",
        "rmsnorm_fwd_add",
    ),
    "softmax": (
        "scaled_aligned_causal_masked_softmax_backward",
        "scaled_aligned_causal_masked_softmax_forward",
        "scaled_masked_softmax_backward",
        "scaled_masked_softmax_forward",
        "scaled_softmax_backward",
        "scaled_softmax_forward",
        "scaled_upper_triang_masked_softmax_backward",
        "scaled_upper_triang_masked_softmax_forward",
    ),
    "dropout": ("dropout_bwd", "dropout_fwd"),
    "loss": (
        "cross_entropy_bwd",
        "cross_entropy_fwd",
        "cross_entropy_fwd_bwd",
        "fused_linear_cross_entropy",
    ),
    "mixture of experts: permutation and padding": (
        "fused_multi_row_padding",
        "fused_multi_row_unpadding",
        "moe_permute_bwd",
        "moe_permute_fwd",
        "moe_unpermute_bwd",
        "moe_unpermute_fwd",
    ),
    "mixture of experts: router": (
        "fused_moe_aux_loss_bwd",
        "fused_moe_aux_loss_fwd",
        "fused_score_for_moe_aux_loss_bwd",
        "fused_score_for_moe_aux_loss_fwd",
        "fused_topk_with_score_function_bwd",
        "fused_topk_with_score_function_fwd",
    ),
    "attention": (
        "convert_bshd_to_thd",
        "convert_thd_to_bshd",
        "copy_to_kv_cache",
        "fa_prepare_bwd",
        "fa_prepare_fwd",
        "fused_attn_bwd",
        "fused_attn_fwd",
    ),
    "rotary embedding": (
        "fused_qkv_rope_backward",
        "fused_qkv_rope_forward",
        "fused_rope_backward",
        "fused_rope_forward",
    ),
    "sequences of several lengths, context parallelism": (
        "thd_get_partitioned_indices",
        "thd_grad_correction",
        "thd_out_correction",
        "thd_read_half_tensor",
        "thd_read_second_half_lse",
        "thd_second_half_lse_correction",
    ),
    "optimizer": (
        "multi_tensor_adam",
        "multi_tensor_adam_capturable",
        "multi_tensor_adam_capturable_master",
        "multi_tensor_adam_fp8",
        "multi_tensor_adam_param_remainder",
        "multi_tensor_compute_scale_and_scale_inv",
        "multi_tensor_compute_scale_inv_e8m0",
        "multi_tensor_l2norm",
        "multi_tensor_scale",
        "multi_tensor_scale_tensor",
        "multi_tensor_sgd",
        "multi_tensor_unscale_l2norm",
    ),
}

_NVSHMEM = "moves tensors between processes; no operator on the tensors of one call"
_OVERLAP = "makes or drives buffers that overlap communication with a GEMM"
_QUERY = "asks a library or makes an object; nothing is computed"

OUT_OF_SCOPE: dict[str, str] = {
    "bulk_overlap_ag_with_external_gemm": _OVERLAP,
    "create_comm_overlap": _OVERLAP,
    "create_comm_overlap_helper": _OVERLAP,
    "create_comm_overlap_p2p": _OVERLAP,
    "create_fp8_tensor_meta": _QUERY,
    "create_nvshmem_tensor": _NVSHMEM,
    "get_cublasLt_version": _QUERY,
    "get_cudnn_version": _QUERY,
    "get_flash_attention_class": "a class; who serves attention is what dispatch decides",
    "get_fused_attn_backend": "chooses among cuDNN's kernels; here that is what dispatch does",
    "get_num_cublas_streams": _QUERY,
    "init_nvshmem_backend": _NVSHMEM,
    "nvshmem_finalize": _NVSHMEM,
    "nvshmem_send_on_current_stream": _NVSHMEM,
    "nvshmem_wait_on_current_stream": _NVSHMEM,
}

ALL = frozenset(name for section in LISTED.values() for name in section)

EPILOGUES_OF_EACH_KIND = (
    "rmsnorm_fwd_quantize",
    "rmsnorm_fwd_add_quantize",
    "swiglu_quantize",
    "dbias_dgelu_quantize",
)
"""Where kernels run slowly, the other epilogues get fewer cases: all consist of parts that the
tests of activations, norms and casts cover."""
