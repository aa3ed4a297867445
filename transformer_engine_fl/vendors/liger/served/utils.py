"""``liger_kernel.utils``: detects this machine's device."""

from __future__ import annotations

from transformer_engine_fl.vendors import detection
from transformer_engine_fl.vendors.registry import infer_device

__all__ = ["infer_device", "infer_device_arch", "is_npu_available", "is_peft_available"]


def is_npu_available() -> bool:
    """Whether torch sees an Ascend NPU here."""
    return detection.torch_sees("npu")


def is_peft_available() -> bool:
    """Whether peft is installed."""
    import importlib.util

    return importlib.util.find_spec("peft") is not None


_FAMILIES = {"7": "volta_turing", "8": "ampere_ada", "9": "hopper", "10": "blackwell"}
_NAMED = {"103": "blackwell_ultra", "120": "blackwell_consumer"}


def infer_device_arch(device_id: int = 0) -> str:
    """A coarse name of the device's generation, or its type if it has none."""
    import torch

    from transformer_engine_fl.ops._tensors import facts_of

    device = infer_device()
    arch = facts_of(torch.device(device, device_id), None).arch if device == "cuda" else None
    if arch is None:
        return device
    version = arch.removeprefix("sm_")
    return _NAMED.get(version) or _FAMILIES.get(version[:-1], arch)
