"""``flag_gems.utils.triton_lang_extension``: functions for kernels."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from transformer_engine_fl.vendors.flaggems.served import utils

__all__ = ["div_rn", "div_rz", "fmod", "num_programs", "program_id", "promote_to_tensor", "trunc"]

div_rn, div_rz = utils.tl_extra_shim.div_rn, utils.tl_extra_shim.div_rz
fmod, trunc = utils.tl_extra_shim.fmod, utils.tl_extra_shim.trunc


@triton.jit  # type: ignore[untyped-decorator]
def program_id(axis: tl.constexpr) -> Any:
    """The program's index, as int64 so that offsets do not overflow."""
    return tl.program_id(axis).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def num_programs(axis: tl.constexpr) -> Any:
    """The number of programs."""
    return tl.num_programs(axis).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def promote_to_tensor(x: Any) -> Any:
    """A scalar as a tensor of one element."""
    return x + tl.zeros((1,), tl.int1)
