"""Finds the devices of this machine: asks torch, and where torch does not know, runs a command.

Nothing is queried on import, and looking for a device never initialises it. Callers pass in the
vendors.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
from collections.abc import Iterable
from typing import Any, Final

from transformer_engine_fl.core.blame import error_text
from transformer_engine_fl.core.log import logger
from transformer_engine_fl.vendors.info import VendorInfo

__all__ = ["absent", "answers", "device_of", "missing", "torch_sees"]

QUERY_SECONDS: Final = 2.0
"""The time limit of a query command."""

_OF_TORCH: Final = ("cuda", "xpu", "mtia", "mps", "hpu")


def torch_sees(device: str) -> bool:
    """Whether torch has such a device here; does not initialise it."""
    import torch

    module: Any = getattr(torch, device, None)
    if device == "cpu" or module is None:
        return device == "cpu"
    # Count first: torch.cuda.is_available() initialises the driver, after which no forked child
    # can use it, while the device count is read without the driver.
    for ask in ("device_count", "is_available"):
        if callable(question := getattr(module, ask, None)):
            try:
                return bool(question())
            except Exception as error:  # noqa: BLE001 - a vendor's module; its device counts as absent
                logger.warning("torch.%s.%s() failed: %s", device, ask, error_text(error))
                return False
    return False


def absent(devices: Iterable[str]) -> str | None:
    """Why this machine has none of these devices; None if it has one."""
    names = sorted(devices)
    if any(torch_sees(name) for name in names):
        return None
    return f"torch sees no {' or '.join(map(repr, names))} device here"


def missing(info: VendorInfo) -> str | None:
    """Why this machine does not have a vendor's device; None if it has.

    For device types that several vendors use, such as "cuda", the vendor's query command decides
    whether the device is this vendor's.
    """
    said = absent({info.device})
    command = info.device_query_cmd if info.device in (*_OF_TORCH, "cpu") else None
    if said is not None or command is None or answers(info):
        return said
    return f"{info.vendor}'s query command {' '.join(command)!r} fails here"


def device_of(vendors: Iterable[VendorInfo]) -> str:
    """This machine's device type: one that torch has, else one that a command finds, or cpu."""
    import torch

    vendors = tuple(vendors)
    own = torch._C._get_privateuse1_backend_name()  # comes first, as in torch
    known = dict.fromkeys((own, *_OF_TORCH, *(info.device for info in vendors)))
    for device in known:
        if device != "cpu" and torch_sees(device):
            return device
    for info in vendors:
        if not hasattr(torch, info.device) and answers(info):
            return info.device
    return "cpu"


def answers(info: VendorInfo) -> bool:
    """Whether the vendor's query command succeeds; run once."""
    return info.device_query_cmd is not None and _succeeds(
        info.vendor, tuple(info.device_query_cmd)
    )


@functools.cache
def _succeeds(vendor: str, command: tuple[str, ...]) -> bool:
    nothing = subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
        )
    except (OSError, ValueError):  # no such program, or one that cannot be run
        return False
    try:
        return process.wait(QUERY_SECONDS) == 0
    except subprocess.TimeoutExpired:
        logger.warning(
            "vendor %r: its query command %r did not finish in %g s and was killed; "
            "its device counts as absent",
            vendor,
            " ".join(command),
            QUERY_SECONDS,
        )
        return False
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children as well
            process.wait()
