"""Describes a device: its vendor, torch's name for it, and the properties that kernels ask for.

These are plain descriptions. ``registry`` keeps them; ``detection`` finds whether the device is
present.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from transformer_engine_fl.core.errors import NotSupportedError, RegistrationError
from transformer_engine_fl.core.types import NAME, mistaken_device

__all__ = ["BackendInfo", "VendorInfo"]

_DISPATCH_KEYS: Final = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS", "hpu": "HPU"}
_WIDEST_BLOCK: Final = 65536
_WARPS: Final = ((32768, 32), (8192, 16), (2048, 8))


@dataclass(frozen=True, slots=True)
class VendorInfo:
    """A vendor, and the device it makes kernels for.

    Args:
        vendor: the name that policies use; compared without case.
        device: torch's device type, such as ``"cuda"``; several vendors may have the same type.
        device_query_cmd: a command that succeeds where the device is present, such as
            ``"nvidia-smi -L"``, or its words as a tuple. It is run without a shell and with a
            time limit, and decides where torch does not know the device or several vendors
            share its type.
        dispatch_key: torch's dispatch key of the device; follows from ``device`` unless given.

    Raises:
        RegistrationError: a field is malformed; names it.
    """

    vendor: str
    device: str
    device_query_cmd: str | tuple[str, ...] | None = None
    dispatch_key: str = ""

    def __post_init__(self) -> None:
        for name, pattern in (("vendor", NAME), ("device", r"[a-z][a-z0-9_]*")):
            value = getattr(self, name)
            if not isinstance(value, str) or not re.fullmatch(pattern, value):
                hint = " (a device type, without an index)" if name == "device" else ""
                raise RegistrationError(f"VendorInfo.{name} must be a name, got {value!r}{hint}")
        if mistaken := mistaken_device(self.device):
            raise RegistrationError(f"VendorInfo({self.vendor!r}).device: {mistaken}")
        if not isinstance(self.dispatch_key, str):
            raise RegistrationError(
                f"VendorInfo({self.vendor!r}).dispatch_key must be a string, "
                f"got {self.dispatch_key!r}"
            )
        object.__setattr__(self, "device_query_cmd", self._words())
        if not self.dispatch_key:
            key = _DISPATCH_KEYS.get(self.device, "PrivateUse1")
            object.__setattr__(self, "dispatch_key", key)

    def _words(self) -> tuple[str, ...] | None:
        """The command's words; a string is split as a shell would, but without expansion."""
        command = self.device_query_cmd
        if command is None:
            return None
        try:
            words = tuple(shlex.split(command) if isinstance(command, str) else command)
        except (TypeError, ValueError) as error:  # no sequence; an open quotation mark
            words, said = (), f": {error}"
        else:
            said = ""
        if not words or not all(isinstance(word, str) for word in words):
            raise RegistrationError(
                f"VendorInfo({self.vendor!r}).device_query_cmd must be a command, "
                f"got {command!r}{said}"
            )
        return words

    @property
    def key(self) -> str:
        """The name by which it is looked up."""
        return self.vendor.lower()


class BackendInfo:
    """The properties of a vendor's device that kernels ask for.

    A vendor changes a default by an argument, or by overriding it in a subclass.

    Args:
        info: the vendor and its device.
        multiprocessor_count: the number of multiprocessors, which run programs independently.
        calculate_settings: ``n -> (block, warps)``.
        extra_config: further settings for the vendor's kernels.
    """

    def __init__(
        self,
        info: VendorInfo,
        *,
        multiprocessor_count: int | None = None,
        calculate_settings: Callable[[int], tuple[int, int]] | None = None,
        extra_config: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.info = info
        self._count = multiprocessor_count
        self._settings = calculate_settings
        self._extra = MappingProxyType(dict(extra_config))

    @property
    def multiprocessor_count(self) -> int:
        """The number of multiprocessors; asks torch, which initialises the device, unless given.

        Raises:
            NotSupportedError: neither torch nor the vendor gives the number.
        """
        if self._count is not None:
            return self._count
        import torch

        try:
            properties = torch.get_device_module(self.info.device).get_device_properties(0)
            return int(properties.multi_processor_count)
        except (AttributeError, RuntimeError, AssertionError, ImportError) as error:
            raise NotSupportedError(
                f"{self.info.vendor}: torch cannot tell how many multiprocessors "
                f"{self.info.device!r} has ({error}); its BackendInfo must provide the number"
            ) from None

    def calculate_settings(self, n: int) -> tuple[int, int]:
        """(block size, warps) of a program that holds a row of ``n`` elements at once.

        Raises:
            NotSupportedError: no block is that wide.
        """
        if self._settings is not None:
            return self._settings(n)
        block = 1 << max(0, n - 1).bit_length()
        if block > _WIDEST_BLOCK:
            raise NotSupportedError(
                f"{self.info.vendor}: no block is large enough for {n} elements"
            )
        return block, next((warps for least, warps in _WARPS if block >= least), 4)

    @property
    def extra_config(self) -> Mapping[str, Any]:
        """Further settings for the vendor's kernels."""
        return self._extra

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.info.vendor!r}, {self.info.device!r})"
