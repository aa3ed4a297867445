"""Ascend's set: Triton for NPUs, as a worked example of a set for another vendor's chip.

An NPU's vector cores compute in an on-chip buffer of a fixed size, and the kernels here are
tiled so that a program's values fit into it. The set needs torch_npu, which adds the device type
``npu`` to torch, and Triton for Ascend.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from transformer_engine_fl.backends._register import register_set
from transformer_engine_fl.core.types import BackendImplKind
from transformer_engine_fl.ops import CATALOGUE
from transformer_engine_fl.vendors.detection import absent
from transformer_engine_fl.vendors.info import BackendInfo, VendorInfo
from transformer_engine_fl.vendors.registry import register_vendor

if TYPE_CHECKING:
    from transformer_engine_fl.core.registry import OpRegistry

__all__ = ["INFO", "AscendBackend", "is_available", "register"]

INFO = VendorInfo("ascend", "npu", "npu-smi info", "PrivateUse1")


class AscendBackend(BackendInfo):
    """Properties of an NPU that kernels need.

    ``extra_config`` has ``buffer_bytes``: the size of a vector core's on-chip buffer.
    """

    def __init__(self, info: VendorInfo) -> None:
        super().__init__(info, extra_config={"buffer_bytes": 192 * 1024})

    @property
    def multiprocessor_count(self) -> int:
        """The number of vector cores."""
        import triton

        properties = triton.runtime.driver.active.utils.get_device_properties(0)
        return int(properties["num_vectorcore"])


def is_available() -> bool | str:
    """True if kernels can run here, else the reason why not."""
    for package in ("torch_npu", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return absent({INFO.device}) or True


def register(registry: OpRegistry) -> None:
    """Register the set; its module and Triton are imported on first use."""
    register_vendor(INFO, backend=AscendBackend)
    family = {it.name for it in CATALOGUE.values() if it.family == "activation"}
    register_set(
        registry,
        __name__,
        families=("activation",),
        omit=family - {"geglu", "dgeglu"},
        impl_id="vendor.ascend",
        kind=BackendImplKind.VENDOR,
        vendor=INFO.vendor,
        devices=frozenset({INFO.device}),
        supported_dtypes=frozenset({"float32", "bfloat16", "float16"}),
        is_available=is_available,
        traits=frozenset({"deterministic", "batch_invariant"}),
    )
