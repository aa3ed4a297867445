"""Which devices this machine has: torch is asked, and where it does not know, a command.

Nothing is asked when this is imported, and to look for a device never starts it. Who the
vendors are is told from above.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
from collections.abc import Iterable
from typing import Any, Final

from transformer_engine_fl.core.blame import worded
from transformer_engine_fl.core.log import logger
from transformer_engine_fl.vendors.info import VendorInfo

__all__ = ["absent", "answers", "device_of", "missing", "torch_sees"]

QUERY_SECONDS: Final = 2.0
"""How long a query command may take."""

_OF_TORCH: Final = ("cuda", "xpu", "mtia", "mps", "hpu")


def torch_sees(device: str) -> bool:
    """Whether torch has such a device here; it is not started by that."""
    import torch

    module: Any = getattr(torch, device, None)
    if device == "cpu" or module is None:
        return device == "cpu"
    # Counting comes first: torch.cuda.is_available() starts the driver, after which no
    # forked child can use it, while the count is read from outside of it.
    for ask in ("device_count", "is_available"):
        if callable(question := getattr(module, ask, None)):
            try:
                return bool(question())
            except Exception as error:  # noqa: BLE001 - a vendor's module; its device counts as absent
                logger.warning("torch.%s.%s() failed: %s", device, ask, worded(error))
                return False
    return False


def absent(devices: Iterable[str]) -> str | None:
    """Why none of these devices is here; None if one is."""
    names = sorted(devices)
    if any(torch_sees(name) for name in names):
        return None
    return f"torch sees no {' or '.join(map(repr, names))} device here"


def missing(info: VendorInfo) -> str | None:
    """Why a vendor's device is not here; None if it is.

    Of types that makers share, such as "cuda", the vendor's command says whose it is.
    """
    said = absent({info.device})
    command = info.device_query_cmd if info.device in (*_OF_TORCH, "cpu") else None
    if said is not None or command is None or answers(info):
        return said
    return f"{info.vendor}'s query command {' '.join(command)!r} does not succeed here"


def device_of(vendors: Iterable[VendorInfo]) -> str:
    """The device of this machine: what torch has, else what a vendor's command finds, or cpu."""
    import torch

    vendors = tuple(vendors)
    own = torch._C._get_privateuse1_backend_name()  # torch, too, lets one that is there go first
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
            "vendor %r: its query command %r has not answered in %g s and was ended; "
            "its device counts as absent",
            vendor,
            " ".join(command),
            QUERY_SECONDS,
        )
        return False
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started goes with it
            process.wait()
