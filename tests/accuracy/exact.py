"""The operators that do not round: what they return is the float64 value in the output's dtype.

For these there is no composition to be compared with. That they are exact is tested.
"""

from __future__ import annotations

MOVES = "moves elements, and puts zeros beside them"
SELECTS = "returns one of its inputs' elements"
COUNTS = "returns positions, counts or a mask"

EXACT: dict[str, str] = {
    "compute_amax": SELECTS,
    "convert_bshd_to_thd": MOVES,
    "convert_thd_to_bshd": MOVES,
    "copy_to_kv_cache": MOVES,
    "fa_prepare_bwd": MOVES,
    "fa_prepare_fwd": MOVES,
    "fp8_block_scaling_compute_partial_amax": SELECTS,
    "fp8_transpose": MOVES,
    "fused_multi_row_padding": MOVES,
    "fused_multi_row_unpadding": MOVES,
    "moe_permute_fwd": MOVES,
    "swap_first_dims": MOVES,
    "thd_get_partitioned_indices": COUNTS,
    "thd_read_half_tensor": MOVES,
    "thd_read_second_half_lse": MOVES,
}
