"""The kernels of the router that the benchmarks launch, without those that move few bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda._launch import Limits
from transformer_engine_fl.backends.vendor.cuda.router import choosing, choosing_backward


def sources(device: Limits) -> Iterator[Specialisation]:
    """The kernels for 128 experts in float32, and for 256 in bfloat16."""
    for experts, dtype, access in ((128, torch.float32, 4), (256, torch.bfloat16, 8)):
        key = (experts, access, dtype)
        full = torch.float32
        yield choosing(*key, None, "softmax", 0, True, False, False, device)[0]
        yield choosing(*key, None, "softmax", 0, False, False, True, device)[0]
        yield choosing(*key, full, "sigmoid", experts // 32, False, True, False, device)[0]
        for function in ("softmax", "sigmoid"):
            normalized = function == "sigmoid"
            yield choosing_backward(*key, full, function, normalized, True, device)[0]
        yield choosing_backward(*key, full, "softmax", False, False, device)[0]
