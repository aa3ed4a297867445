"""What others offer for a workload, where it is installed.

A package is imported when its peer is made ready for a call; what fails then is reported.
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
"""By the peer's name, in the order of a report."""

DESCRIPTIONS = {
    "torch.matmul": "cuBLAS, without an epilogue",
    "F.linear": "cuBLAS, the bias in its epilogue",
    "torch._scaled_mm": "cuBLAS, float8 with a scale for each tensor",
    "torch._grouped_mm": "torch's grouped product",
    "torch._fused_adamw_": "the kernel of `torch.optim.AdamW(fused=True)`",
    "torch._fused_sgd_": "the kernel of `torch.optim.SGD(fused=True)`",
    "torch._foreach_norm": "torch's norms over lists",
    "torch._foreach_mul": "torch's product over lists",
    "SDPA cuDNN": "`F.scaled_dot_product_attention`, of cuDNN; backward by `torch.autograd.grad`",
    "SDPA flash": "`F.scaled_dot_product_attention`, of the flash attention in torch",
    "torch.eager": "torch's own functions, as a user writes them; backward by "
    "`torch.autograd.grad` of a forward that has run",
    COMPILER: "formulas of the same, compiled for each shape",
    "liger-kernel": "its Triton kernels, called without autograd",
    "quack": "its CuTe kernels, called without autograd",
    "quack, one kernel": "its cross entropy that writes the gradient in the forward",
    "flag_gems": "its Triton kernels, called without autograd where they can be",
    "flag_gems silu_and_mul": "its product of two tensors, one of them activated",
}


def peers_of(workload: str) -> dict[str, Peer]:
    """The peers of a workload, by name."""
    return {name: table[workload] for name, table in PEERS.items() if workload in table}
