"""``liger_kernel.ops.backends.registry``: where packages declare their implementations.

It has both forms: ``register_impl(ImplInfo(...))``, and the older
``register_vendor(VendorInfo(...))`` for one device.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

__all__ = [
    "IMPL_REGISTRY",
    "LIGER_KERNEL_IMPL_ENV",
    "VENDOR_REGISTRY",
    "ImplInfo",
    "VendorInfo",
    "get_vendor_for_device",
    "register_impl",
    "register_vendor",
    "select_impl",
]

LIGER_KERNEL_IMPL_ENV = "LIGER_KERNEL_IMPL"


@dataclass(frozen=True)
class ImplInfo:
    """A named set of kernels.

    Args:
        name: the name by which users select it.
        devices: types of the devices that it supports.
        default_devices: the devices on which it is used by default.
        module_path: the module with its operators.
    """

    name: str
    devices: tuple[str, ...]
    default_devices: tuple[str, ...] = ()
    module_path: str = ""

    def __post_init__(self) -> None:
        for field in ("devices", "default_devices"):
            if isinstance(getattr(self, field), str):
                raise ValueError(f"{self.name!r}: {field} must be a tuple of names")
        if not self.devices:
            raise ValueError(f"{self.name!r}: devices is empty; name at least one")
        if not self.module_path:
            raise ValueError(f"{self.name!r}: module_path is missing; name the operators' module")
        extra = sorted(set(self.default_devices) - set(self.devices))
        if extra:
            raise ValueError(
                f"{self.name!r}: default_devices has {extra}, which are not in devices"
            )


@dataclass
class VendorInfo:
    """A vendor of kernels for one device, on which they are used by default."""

    vendor: str
    device: str
    module_path: str = ""

    def __post_init__(self) -> None:
        for field in ("vendor", "device"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise ValueError(f"VendorInfo: {field} must be a name, got {value!r}")


IMPL_REGISTRY: dict[str, ImplInfo] = {}
VENDOR_REGISTRY: dict[str, VendorInfo] = {}


def register_impl(info: ImplInfo) -> None:
    """Declare an implementation."""
    IMPL_REGISTRY[info.name] = info


def register_vendor(info: VendorInfo) -> None:
    """Declare a vendor; its operators are in the ``ops`` module of the calling package."""
    info.module_path = f"{sys._getframe(1).f_globals['__name__']}.ops"
    VENDOR_REGISTRY[info.device] = info
    register_impl(ImplInfo(info.vendor, (info.device,), (info.device,), info.module_path))


def get_vendor_for_device(device: str) -> VendorInfo | None:
    """The vendor that was declared for a device."""
    return VENDOR_REGISTRY.get(device)


def select_impl(device: str, explicit: str | None = None) -> ImplInfo | None:
    """The implementation for a device: the one named, or the first that is its default.

    Raises:
        RuntimeError: the one named is unknown, or is not for that device.
    """
    if explicit:
        info = IMPL_REGISTRY.get(explicit)
        if info is None or device not in info.devices:
            asked = f"{LIGER_KERNEL_IMPL_ENV}={explicit!r}"
            raise RuntimeError(f"{asked}: no implementation of that name supports {device!r}")
        return info
    return next((it for it in IMPL_REGISTRY.values() if device in it.default_devices), None)
