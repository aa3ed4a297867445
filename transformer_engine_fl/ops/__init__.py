"""The catalogue: one contract per operator, one file per family.

Loads without torch. Each name is the operator's contract, and calling it dispatches
through the default manager: ``ops.rmsnorm_fwd(x, w)``.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from transformer_engine_fl.core.contract import Contract
from transformer_engine_fl.ops.dropout import dropout_bwd, dropout_fwd
from transformer_engine_fl.ops.normalization import (
    layernorm_bwd,
    layernorm_fwd,
    rmsnorm_bwd,
    rmsnorm_bwd_add,
    rmsnorm_fwd,
    rmsnorm_fwd_add,
)
from transformer_engine_fl.ops.rope import (
    fused_qkv_rope_backward,
    fused_qkv_rope_forward,
    fused_rope_backward,
    fused_rope_forward,
)

__all__ = [
    "CATALOGUE",
    "dropout_bwd",
    "dropout_fwd",
    "fused_qkv_rope_backward",
    "fused_qkv_rope_forward",
    "fused_rope_backward",
    "fused_rope_forward",
    "layernorm_bwd",
    "layernorm_fwd",
    "rmsnorm_bwd",
    "rmsnorm_bwd_add",
    "rmsnorm_fwd",
    "rmsnorm_fwd_add",
]


def _index(values: Iterable[object]) -> Mapping[str, Contract[..., Any]]:
    contracts = (value for value in values if isinstance(value, Contract))
    return MappingProxyType({contract.name: contract for contract in contracts})


CATALOGUE: Final = _index(tuple(globals().values()))
"""Every contract by its operator's name (aliases are on the contracts)."""
