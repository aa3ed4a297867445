"""The operators: each is a function of ``transformer_engine_torch`` behind its adapter.

Imported when one of them is first chosen. If the installed release lacks a function, this module
lacks the attribute, and the operator is reported as unavailable for that reason.
"""

from __future__ import annotations

import functools
import importlib
from importlib.machinery import EXTENSION_SUFFIXES
from types import ModuleType
from typing import Any

import torch

from transformer_engine_fl import PluginError
from transformer_engine_fl.integrations.tex import adapted

EXTENSION = "transformer_engine_torch"


@functools.cache
def extension() -> ModuleType:
    """NVIDIA's extension module.

    Raises:
        PluginError: the module of that name is not NVIDIA's, and might call back into dispatch.
    """
    importlib.import_module("transformer_engine.pytorch")  # loads the libraries it needs
    module = importlib.import_module(EXTENSION)
    origin = str(getattr(module, "__file__", None))
    if not origin.endswith(tuple(EXTENSION_SUFFIXES)):
        raise PluginError(
            f"{EXTENSION} is {origin}, not NVIDIA's extension module: it is not called"
        )
    return module


def named(dtype: torch.dtype) -> Any:
    """The extension's value for a dtype."""
    names = {
        torch.float32: "kFloat32",
        torch.float16: "kFloat16",
        torch.bfloat16: "kBFloat16",
    }
    return getattr(extension().DType, names[dtype])


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    function = getattr(extension(), name, None)
    if function is None:
        raise AttributeError(f"the installed Transformer Engine has no {name!r}")
    return adapted(name, function, named)
