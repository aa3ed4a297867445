"""``flag_gems.runtime``: a folder's device, tuning and heuristics, for its kernels."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer_engine_fl.vendors.flaggems.folder import FlagGemsFolder

__all__ = ["Runtime", "vendors"]


class _Vendors(type):
    def __getattr__(cls, name: str) -> str:
        if name.isupper():
            return name
        raise AttributeError(name)


class vendors(metaclass=_Vendors):  # noqa: N801 - FlagGems' name
    """Vendors by upper-case name; kernels only compare them with the folder's vendor."""


class Runtime:
    """The device, tuning and heuristics that a folder's kernels ask for.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: FlagGemsFolder) -> None:
        self._folder = folder
        info = folder.info
        self.device = SimpleNamespace(
            name=info.device,
            vendor_name=info.vendor,
            vendor=info.vendor.upper(),
            dispatch_key=info.dispatch_key,
            support_fp64=True,
            support_bf16=True,
            support_int64=True,
        )

    @property
    def torch_device_fn(self) -> Any:
        """torch's module of the device."""
        return _Device(self._folder.info.device)

    def get_tuned_config(self, op_name: str) -> list[Any]:
        """The configurations of an operator, as ``triton.Config``.

        Raises:
            KeyError: tune_configs.yaml has none for it.
        """
        import triton

        configs = self._folder.configs
        if op_name not in configs:
            path = self._folder.path / "tune_configs.yaml"
            raise KeyError(f"{path} has no configurations of {op_name!r}")
        found = configs[op_name]
        if os.environ.get("TRITON_INTERPRET") == "1":
            found = found[:1]  # measuring is meaningless in the interpreter
        asked = ("num_warps", "num_stages", "num_ctas")
        return [
            triton.Config(
                dict(it.meta), **{key: it.launch[key] for key in asked if key in it.launch}
            )
            for it in found
        ]

    def get_heuristic_config(self, op_name: str) -> Mapping[str, Any]:
        """The heuristics of an operator, by constant.

        Raises:
            KeyError: heuristics_config_utils.py has none for it.
        """
        found = self._folder.heuristics
        if op_name not in found:
            path = self._folder.path / "heuristics_config_utils.py"
            raise KeyError(f"{path} has no heuristics of {op_name!r}")
        made: Mapping[str, Any] = found[op_name]
        return made

    def modules(self) -> dict[str, ModuleType]:
        """``flag_gems.runtime``, its submodule and ``flag_gems.config``, by name."""
        runtime, common, config = (
            ModuleType(name)
            for name in ("flag_gems.runtime", "flag_gems.runtime.common", "flag_gems.config")
        )
        common.vendors = vendors  # type: ignore[attr-defined]
        config.use_c_extension = False  # type: ignore[attr-defined]
        runtime.device = self.device  # type: ignore[attr-defined]
        runtime.torch_device_fn = self.torch_device_fn  # type: ignore[attr-defined]
        runtime.get_tuned_config = self.get_tuned_config  # type: ignore[attr-defined]
        runtime.get_heuristic_config = self.get_heuristic_config  # type: ignore[attr-defined]
        return {it.__name__: it for it in (runtime, common, config)}


class _Device:
    """torch's module for a device type; switching does nothing if that has no current device.

    Args:
        name: torch's device type.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def device(self, device: Any) -> contextlib.AbstractContextManager[Any]:
        """A context in which ``device`` is the current device of its type."""
        switch = None if self._name == "cpu" else getattr(self._module(), "device", None)
        return contextlib.nullcontext() if switch is None else switch(device)

    def current_device(self) -> int:
        """The index of the current device; 0 for a CPU."""
        return 0 if self._name == "cpu" else int(self._module().current_device())

    def _module(self) -> Any:
        import torch

        return getattr(torch, self._name, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module(), name)
