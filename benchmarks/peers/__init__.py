"""Peers: other libraries' functions that do the work of a workload.

A library is imported when the work of one of its peers is made; a failure is then reported.
"""

from __future__ import annotations

from peers.eager import COMPILE, EAGER
from peers.flag_gems import FLAG_GEMS
from peers.liger import LIGER
from peers.peer import Peer, Table, Work
from peers.quack import QUACK
from peers.torch_library import TORCH

__all__ = ["COMPILER", "DESCRIPTIONS", "PEERS", "Peer", "Work", "peers_of"]

COMPILER = "torch.compile"

PEERS: dict[str, Table] = {
    **TORCH,
    "torch.eager": EAGER,
    COMPILER: COMPILE,
    "liger-kernel": LIGER,
    **QUACK,
    **FLAG_GEMS,
}
"""The tables by peer name, in the order of a report."""

DESCRIPTIONS = {
    "torch.matmul": "cuBLAS, without an epilogue",
    "F.linear": "cuBLAS, the bias in its epilogue",
    "torch._scaled_mm": "cuBLAS, float8 with a scale for each tensor",
    "torch._grouped_mm": "torch's grouped matrix product",
    "torch._fused_adamw_": "the kernel of `torch.optim.AdamW(fused=True)`",
    "torch._fused_sgd_": "the kernel of `torch.optim.SGD(fused=True)`",
    "torch._foreach_norm": "torch's norms of a list of tensors",
    "torch._foreach_mul": "torch's scaling of a list of tensors",
    "SDPA cuDNN": "`F.scaled_dot_product_attention` with the cuDNN backend; backward by "
    "`torch.autograd.grad`",
    "SDPA flash": "`F.scaled_dot_product_attention` with torch's flash attention backend; "
    "backward by `torch.autograd.grad`",
    "torch.eager": "torch's own functions, as a user writes them; backward by "
    "`torch.autograd.grad` after the forward, which is not timed",
    COMPILER: "the formulas of `torch.eager`, or equivalent ones, compiled for each shape",
    "liger-kernel": "its Triton kernels, called without autograd",
    "quack": "its CuTe kernels, called without autograd",
    "quack, one kernel": "its cross entropy that computes the gradient in the forward",
    "flag_gems": "its Triton kernels, called without autograd where possible",
    "flag_gems silu_and_mul": "its product of two tensors, the first through SiLU",
}


def peers_of(workload: str) -> dict[str, Peer]:
    """The peers of a workload, by name."""
    return {name: table[workload] for name, table in PEERS.items() if workload in table}
