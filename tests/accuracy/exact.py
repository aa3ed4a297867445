"""The operators that do not round: they return the float64 value in the output's dtype.

A test checks that they are exact; they need no composition to compare with.
"""

from __future__ import annotations

from transformer_engine_fl.ops.epilogue import EPILOGUES

MOVES = "moves elements, and puts zeros beside them"
SELECTS = "returns one of its inputs' elements"
COUNTS = "returns positions, counts or a mask"

LAID_DOWN = "rounds as its contract lays down, bit by bit"

EXACT: dict[str, str] = {
    "compute_amax": SELECTS,
    "convert_bshd_to_thd": MOVES,
    "convert_thd_to_bshd": MOVES,
    "copy_to_kv_cache": MOVES,
    "dequantize": LAID_DOWN,
    "fa_prepare_bwd": MOVES,
    "fa_prepare_fwd": MOVES,
    "fp8_block_scaling_compute_partial_amax": SELECTS,
    "fp8_block_scaling_partial_cast": LAID_DOWN,
    "fp8_transpose": MOVES,
    "fused_amax_and_scale_update_after_reduction": LAID_DOWN,
    "fused_multi_row_padding": MOVES,
    "fused_multi_row_unpadding": MOVES,
    "group_quantize": LAID_DOWN,
    "moe_permute_fwd": MOVES,
    "moe_permute_mask_fwd": MOVES,
    "multi_tensor_compute_scale_inv_e8m0": LAID_DOWN,
    "multi_tensor_quantize": LAID_DOWN,
    "quantize": LAID_DOWN,
    "split_quantize": LAID_DOWN,
    "swap_first_dims": MOVES,
    "thd_get_partitioned_indices": COUNTS,
    "thd_read_half_tensor": MOVES,
    "thd_read_second_half_lse": MOVES,
}

BOUNDED = {name: epilogue.base.name for name, epilogue in EPILOGUES.items()} | {
    "cross_entropy_fwd_bwd": "cross_entropy_bwd"
}
"""For an operator whose oracle gives bounds, the operator whose error is compared instead.

The bounds admit what a result within the other operator's tolerance may become, quantised or not.
"""
