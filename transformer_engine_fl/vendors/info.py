"""What is known of a chip: whose it is, what torch calls it, and what kernels ask of it.

Plain descriptions. Who has registered one, and whether the device is here, are elsewhere.
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
        vendor: the name that policies go by; compared without case.
        device: torch's device type, ``"cuda"``; several vendors may have the same one.
        device_query_cmd: a command that succeeds where the device is, ``"nvidia-smi -L"``, or
            its words as a tuple. It is run without a shell, and not for long. Where torch
            does not know the device, or several vendors share its type, it tells.
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
                hint = "; an index is no part of it" if name == "device" else ""
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
        """The command's words; a string is cut as a shell would, but nothing in it expanded."""
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
    """What kernels ask of a vendor's device; a vendor overrides what differs.

    Each can be given as an argument, or overridden in a subclass.

    Args:
        info: whose device it is.
        multiprocessor_count: how many independent cores run programs.
        calculate_settings: ``n -> (block, warps)``.
        extra_config: whatever else the vendor's kernels want to know.
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
        """How many there are; asks torch, which starts the device for that.

        Raises:
            NotSupportedError: torch cannot tell, and the vendor does not.
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
                f"{self.info.device!r} has ({error}); its BackendInfo must say it"
            ) from None

    def calculate_settings(self, n: int) -> tuple[int, int]:
        """(width, warps) of a block that holds a row of ``n`` elements at once.

        Raises:
            NotSupportedError: no block is that wide.
        """
        if self._settings is not None:
            return self._settings(n)
        block = 1 << max(0, n - 1).bit_length()
        if block > _WIDEST_BLOCK:
            raise NotSupportedError(f"{self.info.vendor}: no block holds {n} elements")
        return block, next((warps for least, warps in _WARPS if block >= least), 4)

    @property
    def extra_config(self) -> Mapping[str, Any]:
        """Whatever else the vendor's kernels want to know."""
        return self._extra

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.info.vendor!r}, {self.info.device!r})"
