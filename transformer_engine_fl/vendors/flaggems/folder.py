"""Loads a folder in FlagGems' style, and registers its functions.

A function in ``ops`` that implements an ATen operator is registered under that name,
``aten::gelu``; other functions, and those in ``fused``, as ``flag_gems::silu_and_mul``. Functions
with a bridge (``adapters``) also serve contracts. The folder's tuning is applied to the Triton
kernels of this project (``tuning``).
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from transformer_engine_fl.core.errors import PluginError, RegistrationError
from transformer_engine_fl.core.late import installed
from transformer_engine_fl.core.locks import LOADING
from transformer_engine_fl.core.log import logger
from transformer_engine_fl.core.manager import get_default_manager
from transformer_engine_fl.core.registry import OpRegistry
from transformer_engine_fl.core.types import OP_NAME, OpImpl
from transformer_engine_fl.vendors import detection
from transformer_engine_fl.vendors.flaggems import adapters, configs, names, shim, tuning
from transformer_engine_fl.vendors.info import VendorInfo
from transformer_engine_fl.vendors.packages.bridge import Bridge
from transformer_engine_fl.vendors.packages.package import DTYPES, LOADED, Package, keep, where
from transformer_engine_fl.vendors.packages.source import (
    exports,
    import_folder,
    no_folder,
    package_error,
    parsed,
)
from transformer_engine_fl.vendors.registry import described

__all__ = ["ROOTS", "FlagGemsFolder", "Kernel", "declares", "is_folder", "load", "unused_ops"]

ROOTS: Final = (shim.FLAG_GEMS, shim.UTILS)
"""The modules that a folder of this style imports."""

_HEURISTICS: Final = "heuristics_config_utils"
_UNUSED: Final = "CUSTOMIZED_UNUSED_OPS"
_OPS: Final = "get_specific_ops"


class Kernel(NamedTuple):
    """A function that a folder has.

    Attributes:
        function: its name in FlagGems.
        op_name: the operator that it is registered as.
        module: the module that has it: ``ops`` or ``fused``.
        aten: the ATen operator that it implements, or None.
        differentiable: whether it is declared to be differentiable.
        place: its index in the result of ``get_specific_ops``; None if the module has it by name.
    """

    function: str
    op_name: str
    module: str
    aten: str | None = None
    differentiable: bool = False
    place: int | None = None

    @property
    def attribute(self) -> str:
        """The name that :func:`where` gives its implementation."""
        return re.sub(r"\W+", "_", self.op_name)


@dataclass(frozen=True)
class FlagGemsFolder(Package):
    """A folder of a vendor.

    Attributes:
        path: of the folder.
        info: the vendor and its device.
        kernels: its functions that are not marked as unused, by name.
        unused: functions, or ATen operators, that the vendor does not want to be used.
        configs: the content of ``tune_configs.yaml``; empty if that is invalid.
        problems: errors in optional parts, such as its tuning.
    """

    path: Path
    info: VendorInfo
    kernels: Mapping[str, Kernel]
    unused: frozenset[str]
    configs: Mapping[str, list[configs.Config]]
    problems: tuple[str, ...]

    @property
    def package(self) -> str:
        """The folder's module name."""
        return self.module_path.rpartition(".")[0]

    def serving(self) -> contextlib.AbstractContextManager[None]:
        """FlagGems' modules."""
        return shim.modules(self)

    def live_names(self) -> Mapping[str, str]:
        """Its functions."""
        return {name: it.op_name for name, it in self.kernels.items()}

    def exported(self, name: str) -> Any:
        """A function of the folder, by name."""
        kernel = self.kernels[name]
        module = self.imported(f"{self.package}.{kernel.module}")
        if kernel.place is None:
            return self.found_in(module, name)
        specific = self._specific(module)
        found = next((it[1] for it in specific if it[0] == kernel.aten), None)
        if not callable(found):
            raise PluginError(
                f"{self.name!r}: {module.__file__}: {_OPS}() gives {found!r} for "
                f"{kernel.aten!r}, which is not callable"
            )
        return found

    def _specific(self, module: ModuleType) -> Any:
        try:
            return getattr(module, _OPS)()
        except (Exception, SystemExit) as error:
            raise package_error(error, f"{self.name!r}: {_OPS}() failed") from error

    def implementation(self, name: str) -> Callable[..., Any]:
        """The callable for a contract, or for an operator of its own."""
        kernel = next((it for it in self.kernels.values() if it.attribute == name), None)
        if kernel is not None:
            function = self.exported(kernel.function)
            return function if kernel.aten is None else names.as_kernel(kernel.aten, function)
        bridge = self.bridge(name)
        if bridge is None:
            raise AttributeError(name)
        return self.bridged(bridge)

    def bridge(self, op_name: str) -> Bridge | None:
        """How it serves a contract; None if it does not."""
        return next((it for it in adapters.BRIDGES.get(op_name, ()) if self._has(it)), None)

    def _has(self, bridge: Bridge) -> bool:
        found = [self.kernels.get(name) for name in bridge.needs]
        return all(found) and (
            not bridge.differentiates or (found[0] is not None and found[0].differentiable)
        )

    @functools.cached_property
    def heuristics(self) -> Mapping[str, Mapping[str, Callable[..., Any]]]:
        """``HEURISTICS_CONFIGS`` of its ``heuristics_config_utils.py``; imported on first use.

        Raises:
            PluginError: the file cannot be imported, or it is not a mapping.
        """
        if not (self.path / f"{_HEURISTICS}.py").is_file():
            return {}
        module = self.imported(f"{self.package}.{_HEURISTICS}")
        found = getattr(module, "HEURISTICS_CONFIGS", {})
        if not isinstance(found, Mapping):
            raise PluginError(
                f"{self.name!r}: {module.__file__}: HEURISTICS_CONFIGS must be a mapping, "
                f"got {type(found).__name__}"
            )
        return found

    def tuning_not_used(self) -> Mapping[str, str]:
        """The parts of its tuning that the kernels here do not use, with the reasons."""
        return tuning.not_used(self)

    def impls(self) -> Iterator[OpImpl]:
        """Its implementations."""
        common = self.fields(f"flaggems.{self.name.lower()}", (self.info.device,))
        common["is_available"] = lambda: detection.missing(self.info) or True
        for kernel in self.kernels.values():
            yield OpImpl(
                op_name=kernel.op_name,
                fn=where(self.key, kernel.attribute),
                mutates=None if kernel.aten is None else names.mutates(kernel.aten),
                **common,
            )
        for op_name in adapters.BRIDGES:
            if self.bridge(op_name) is not None:
                fn = where(self.key, op_name)
                yield OpImpl(op_name=op_name, fn=fn, supported_dtypes=DTYPES, **common)


# --------------------------------------------------------------------------- loading


def load(folder: str | Path, registry: OpRegistry | None = None) -> FlagGemsFolder:
    """Load a vendor's folder in FlagGems' style, unchanged, and register what it has.

    Args:
        folder: its path, or the name of a module.
        registry: where to; the default manager's registry unless given.

    Raises:
        PluginError: it cannot be loaded, or describes no vendor; names the file and the line.
        RegistrationError: its vendor has another description already.
    """
    with LOADING:
        if registry is None:
            # First the sets that it is ranked with, and the vendors that describe themselves.
            get_default_manager().ensure_initialized()
        loaded = _loaded(folder)
        into = get_default_manager().registry if registry is None else registry
        impls = list(loaded.impls())
        there = impls and any(
            str(it.fn) == str(impls[0].fn) for it in into.get_implementations(impls[0].op_name)
        )
        if not there:
            into.register_many(impls)
    return loaded


def is_folder(path: Path) -> bool:
    """Whether a folder looks like this style, by its files or its ``VendorInfoBase``."""
    if any((path / name).is_file() for name in (configs.FILE, f"{_HEURISTICS}.py")):
        return True
    try:
        return "VendorInfoBase" in (path / "__init__.py").read_text(encoding="utf-8")
    except (OSError, ValueError):  # loading it reports what is wrong
        return False


def declares(module: ModuleType) -> bool:
    """Whether a module that was imported describes a vendor."""
    return all(hasattr(getattr(module, "vendor_info", None), it) for it in _FIELDS)


def unused_ops(device: str) -> frozenset[str]:
    """Functions or ATen operators that the present vendors of a device do not want to be used."""
    here = (it for it in LOADED.of(FlagGemsFolder) if it.info.device == device)
    return frozenset().union(*(it.unused for it in here if detection.missing(it.info) is None))


_FIELDS: Final = ("vendor_name", "device_name", "device_query_cmd")


def _loaded(folder: str | Path) -> FlagGemsFolder:
    what = f"folder {str(folder)!r}"
    named: tuple[str, ...] = ()
    try:
        with shim.modules():
            module = _module(folder)
        bare = _bare(folder, module)
        named = (bare.name,)
        with shim.modules(bare):
            kernels, more = _kernels(module.__name__)
    except (Exception, SystemExit) as error:
        if isinstance(error, PluginError | RegistrationError):
            raise
        place = Path(folder).expanduser().absolute()
        raise package_error(error, f"{what} cannot be loaded", place, named) from error
    for known in LOADED.of(FlagGemsFolder):
        if known.package == bare.package:
            return known
        if known.info.key == bare.info.key:
            raise RegistrationError(
                f"{bare.name!r} is the vendor of {str(known.path)!r} and of {str(bare.path)!r}; "
                "a vendor's name must be unique"
            )
    described(bare.info)
    unused = bare.unused | more
    used = {it.function: it for it in kernels if not {it.function, it.aten} & unused}
    loaded = keep(lambda key: dataclasses.replace(bare, key=key, kernels=used, unused=unused))
    tuning.register(loaded)
    return loaded


def _bare(folder: str | Path, module: ModuleType) -> FlagGemsFolder:
    """The folder before its functions are known."""
    info, path = _info(module), Path(str(module.__file__)).parent
    found, problems = _configs(path)
    return FlagGemsFolder(
        name=info.vendor,
        devices=(info.device,),
        module_path=f"{module.__name__}.ops",
        origin=str(folder),
        key="",
        path=path,
        info=info,
        kernels={},
        unused=_stated_unused(module),
        configs=found,
        problems=problems,
    )


def _module(folder: str | Path) -> ModuleType:
    if isinstance(folder, str) and "/" not in folder:
        return importlib.import_module(folder)
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise no_folder(folder)
    name = path.name if path.name.startswith("_") else f"_{path.name}"
    if not name.isidentifier():
        raise PluginError(f"folder {str(folder)!r}: {path.name!r} is not a valid module name")
    return import_folder(path, f"{shim.BACKENDS}.{name}")


def _info(module: ModuleType) -> VendorInfo:
    where = f"{module.__file__}: vendor_info"
    found = getattr(module, "vendor_info", None)
    if not declares(module):
        has = "" if found is None else f", got {type(found).__name__}"
        raise PluginError(f"{where} must be a VendorInfoBase(vendor_name=..., ...){has}")
    for name in (*_FIELDS, "dispatch_key"):
        value = getattr(found, name, None)
        if not isinstance(value, str) and not (value is None and name not in _FIELDS[:2]):
            raise PluginError(f"{where}: {name} must be a string, got {value!r}")
    try:
        return VendorInfo(
            found.vendor_name,  # type: ignore[union-attr]
            found.device_name,  # type: ignore[union-attr]
            found.device_query_cmd or None,  # type: ignore[union-attr]
            getattr(found, "dispatch_key", None) or "",
        )
    except RegistrationError as error:
        raise PluginError(f"{where}: {error}") from None


def _stated_unused(module: ModuleType) -> frozenset[str]:
    return _as_names(getattr(module, _UNUSED, ()), f"{module.__file__}: {_UNUSED}")


def _as_names(value: Any, where: str) -> frozenset[str]:
    named = isinstance(value, tuple | list | set | frozenset)
    if not named or not all(isinstance(it, str) for it in value):
        raise PluginError(f"{where} must be a tuple of names, got {value!r}")
    return frozenset(value)


def _configs(path: Path) -> tuple[Mapping[str, list[configs.Config]], tuple[str, ...]]:
    """(its tuning, errors in it); an invalid file does not prevent loading the folder."""
    file = path / configs.FILE
    if not file.is_file():
        return {}, ()
    try:
        return configs.read(file, f"folder {path.name!r}"), ()
    except PluginError as error:
        logger.warning("%s; the whole file is skipped", error)
        return {}, (str(error),)


# --------------------------------------------------------------------------- functions


def _kernels(package: str) -> tuple[list[Kernel], frozenset[str]]:
    """(the functions of a folder's modules, read from source; the names marked as unused)."""
    found: dict[str, Kernel] = {}
    unused: frozenset[str] = frozenset()
    for module in ("ops", "fused"):
        path = f"{package}.{module}"
        if not installed(path):
            continue
        tree = parsed(path)
        defined = (
            {it.name: it for it in tree.body if isinstance(it, ast.FunctionDef)} if tree else {}
        )
        if _OPS in defined:
            made = _specific_kernels(path, defined[_OPS])
            unused |= _specific_unused(path, defined.get("get_unused_ops"))
        else:
            made = [_named(name, module) for name in exports(path)]
        found |= {it.function: it for it in made}
    return list(found.values()), unused


def _named(function: str, module: str) -> Kernel:
    aten = names.aten_of(function) if module == "ops" else None
    own = f"flag_gems::{function}" if aten is None else f"aten::{aten}"
    return Kernel(function, own, module, aten)


def _specific_kernels(path: str, source: ast.FunctionDef) -> list[Kernel]:
    """The functions that ``get_specific_ops`` returns, from its source or else by calling it."""
    stated = _returned(source)
    read = [_stated_row(it) for it in stated.elts] if isinstance(stated, ast.Tuple) else [None]
    rows = [it for it in read if it is not None]
    if len(rows) < len(read):
        module = importlib.import_module(path)
        rows = [_given_row(it, module) for it in getattr(module, _OPS)()]
    return [
        Kernel(
            names.FUNCTIONS.get(aten, aten.replace(".", "_")), f"aten::{aten}", "ops", aten, own, at
        )
        for at, (aten, own) in enumerate(rows)
    ]


def _returned(source: ast.FunctionDef) -> ast.expr | None:
    body = [it for it in source.body if not isinstance(it, ast.Expr)]
    only = body[0] if len(body) == 1 else None
    return only.value if isinstance(only, ast.Return) else None


def _stated_row(row: ast.expr) -> tuple[str, bool] | None:
    """(name, whether it is differentiable), of ``("add.Tensor", add.add, Autograd.disable)``."""
    if not (isinstance(row, ast.Tuple) and len(row.elts) in (2, 3)):
        return None
    name, gradient = row.elts[0], row.elts[2] if len(row.elts) == 3 else None
    if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
        return None
    if gradient is not None and not isinstance(gradient, ast.Attribute):
        return None
    if not re.fullmatch(OP_NAME, f"aten::{name.value}"):
        return None
    return name.value, gradient is not None and gradient.attr == "enable"


def _given_row(row: Any, module: ModuleType) -> tuple[str, bool]:
    wrong = not isinstance(row, tuple | list) or len(row) not in (2, 3)
    name = None if wrong else row[0]
    if not isinstance(name, str) or not re.fullmatch(OP_NAME, f"aten::{name}"):
        raise PluginError(
            f"{module.__file__}: {_OPS}() must give (ATen operator, function, Autograd.enable "
            f"or Autograd.disable), got {row!r}"
        )
    return name, len(row) == 3 and getattr(row[2], "name", "") == "enable"


def _specific_unused(path: str, source: ast.FunctionDef | None) -> frozenset[str]:
    if source is None:
        return frozenset()
    with contextlib.suppress(TypeError, ValueError):  # not a literal: it must be called
        return _as_names(ast.literal_eval(_returned(source)), f"{path}: get_unused_ops()")  # type: ignore[arg-type]
    module = importlib.import_module(path)
    return _as_names(module.get_unused_ops(), f"{module.__file__}: get_unused_ops()")
