"""``backend_utils``: how a folder describes its vendor."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Autograd", "VendorInfoBase"]


@dataclass
class VendorInfoBase:
    """A vendor and its device.

    Args:
        vendor_name: the vendor.
        device_name: torch's device type.
        device_query_cmd: a command that succeeds where the device is present.
        dispatch_key: torch's dispatch key, if it is not the device's name in capitals.
        triton_extra_name: the Triton module with the device's library functions.
    """

    vendor_name: str
    device_name: str
    device_query_cmd: str
    dispatch_key: str | None = None
    triton_extra_name: str | None = None


class Autograd(enum.Enum):
    """Whether an operator is differentiable by itself."""

    enable = True
    disable = False

    @classmethod
    def get_optional_value(cls) -> list[str]:
        """The names of the members."""
        return [member.name for member in cls]
