"""This machine: the devices to run on, and the software and devices behind a result."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import transformer_engine_fl
from transformer_engine_fl.core.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

__all__ = [
    "Circumstances",
    "circumstances",
    "device_types",
    "devices",
    "threads_each",
    "torch_build",
    "usable_device",
    "versions",
]


class Circumstances(NamedTuple):
    """How a report was obtained: the date in UTC, the versions, and the devices."""

    date: str
    versions: dict[str, str | None]
    devices: list[dict[str, Any]]


def circumstances(places: Iterable[str]) -> Circumstances:
    """The circumstances now, with the devices of the types that ``places`` names."""
    kinds = {place.partition(":")[0] for place in places}
    return Circumstances(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=versions(("torch", "triton")) | {"torch built for": torch_build()},
        devices=[it for it in devices() if it["device"].partition(":")[0] in kinds],
    )


def threads_each(processes: int) -> int:
    """How many threads each of several processes gets that share this machine's CPU cores."""
    return max(1, (os.cpu_count() or 1) // processes)


def device_types() -> tuple[str, ...]:
    """The types of device here: the CPU, and the accelerator if there is one."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu", *((accelerator.type,) if accelerator else ()))


def usable_device(name: str, setting: str) -> torch.device:
    """The device of a name.

    Raises:
        ConfigurationError: it is not there, or cannot compute; names ``setting``.
    """
    import torch

    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        said = str(error).partition("\n")[0][:100]
        raise ConfigurationError(
            f"{setting}: {name!r} cannot be used ({said}); "
            f"this machine has: {', '.join(device_types())}"
        ) from None
    if device.type == "meta":
        raise ConfigurationError(f"{setting}: 'meta' computes nothing; name another device")
    return device


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Python, the platform, this package, then others by name; None for one that is not there."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "transformer_engine_fl": transformer_engine_fl.__version__,
    }
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def torch_build() -> str:
    """What the installed torch was built for."""
    import torch

    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"


def devices() -> list[dict[str, Any]]:
    """The CPU, and every accelerator that torch finds."""
    import torch

    from transformer_engine_fl.ops._tensors import TorchTensors

    name = platform.processor() or platform.machine()
    found = [{"device": "cpu", "name": name, "arch": None, "memory_bytes": None}]
    kind = device_types()[-1]
    if kind == "cpu":
        return found
    module = torch.get_device_module(kind)
    for index in range(torch.accelerator.device_count()):
        device = f"{kind}:{index}"
        properties = getattr(module, "get_device_properties", lambda _: None)(index)
        found.append(
            {
                "device": device,
                "name": getattr(properties, "name", None),
                "arch": TorchTensors().facts(torch.empty(0, device=device)).arch,
                "memory_bytes": getattr(properties, "total_memory", None),
            }
        )
    return found
