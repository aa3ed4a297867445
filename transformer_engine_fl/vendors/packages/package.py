"""A package that was written for another project, and its operators.

The modules with its operators are imported when one of these is first chosen. If that fails, the
failure is logged once, and raised to a caller that asked for the vendor by name.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, TypeVar

from transformer_engine_fl.core.blame import out_of_stack
from transformer_engine_fl.core.errors import PluginError
from transformer_engine_fl.core.log import logger
from transformer_engine_fl.core.registry import OpRegistry
from transformer_engine_fl.core.types import DEFAULT_PRIORITY, BackendImplKind
from transformer_engine_fl.vendors.packages.bridge import Bridge, misfit
from transformer_engine_fl.vendors.packages.source import package_error

__all__ = ["LOADED", "Package", "keep", "where"]

P = TypeVar("P", bound="Package")

FAILURES: Final[dict[tuple[str, str], str]] = {}
"""Messages about modules that could not be imported and functions that cannot be called, by
(package key, module or complaint)."""

DTYPES: Final = frozenset({"float32", "bfloat16", "float16"})
"""The dtypes for which bridged kernels are candidates."""


@dataclass(frozen=True)
class Package:
    """A loaded package.

    Attributes:
        name: the vendor's name, which policies use.
        devices: types of the devices that it supports.
        module_path: the module with its operators.
        origin: the package that declares it.
        key: its name in :data:`LOADED`.
    """

    name: str
    devices: tuple[str, ...]
    module_path: str
    origin: str
    key: str

    def serving(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which its imports from the project it was written for are found."""
        raise NotImplementedError

    def implementation(self, name: str) -> Callable[..., Any]:
        """The callable for an operator of this package, by the name given to :func:`where`."""
        raise NotImplementedError

    def live_names(self) -> Mapping[str, str]:
        """The operators that it adds, by their names in the project it was written for."""
        raise NotImplementedError

    def imported(self, module: str) -> ModuleType:
        """A module of the package.

        Raises:
            PluginError: it cannot be imported; names the file and the line.
        """
        failed = FAILURES.get((self.key, module))
        if failed is not None:
            raise PluginError(failed)
        try:
            with self.serving():
                return importlib.import_module(module)
        except (Exception, SystemExit) as error:
            if out_of_stack(error):
                raise
            said = package_error(error, f"{self.name!r}: its operators cannot be imported")
            raise self._reported(module, said) from error

    @property
    def ops(self) -> ModuleType:
        """The module with its operators."""
        return self.imported(self.module_path)

    def exported(self, name: str) -> Any:
        """The object that the package exports under a name.

        Raises:
            PluginError: there is none, or it is not callable.
        """
        return self.found_in(self.ops, name)

    def found_in(self, module: ModuleType, name: str) -> Any:
        """The object that one of its modules has under a name.

        Raises:
            PluginError: there is none, or it is not callable.
        """
        found = getattr(module, name, None)
        if not callable(found):
            kind = type(found).__name__
            was = "is missing" if found is None else f"is not callable but of type {kind}"
            raise PluginError(f"{self.name!r}: {module.__file__} exports {name!r}, which {was}")
        return found

    def bridged(self, bridge: Bridge) -> Callable[..., Any]:
        """The function that serves a contract.

        Raises:
            PluginError: the package's function does not take the arguments of its style.
        """
        found = [self.exported(name) for name in bridge.needs]
        wrong = misfit(self.as_function(found[0]), bridge.call)
        if wrong is not None:
            raise self._reported(wrong, PluginError(f"{self.name!r}: {wrong}"))
        return bridge.make(*found)

    def as_function(self, exported: Any) -> Callable[..., Any]:
        """The function that a call of an export runs."""
        function: Callable[..., Any] = exported
        return function

    def _reported(self, what: str, error: PluginError) -> PluginError:
        """The error; logged once for each ``what``."""
        if (self.key, what) not in FAILURES:
            FAILURES[self.key, what] = str(error)
            logger.warning("%s", error)
        return error

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.implementation(name)

    def fields(self, impl_id: str, devices: Iterable[str]) -> dict[str, Any]:
        """The fields that all its implementations have in common."""
        return {
            "impl_id": impl_id,
            "kind": BackendImplKind.VENDOR,
            "vendor": self.name,
            "priority": DEFAULT_PRIORITY[BackendImplKind.VENDOR],
            "devices": tuple(devices),
        }

    def is_registered(self, registry: OpRegistry, op_name: str, name: str) -> bool:
        """Whether its implementation of an operator is in a registry already."""
        fns = (str(impl.fn) for impl in registry.get_implementations(op_name))
        return where(self.key, name) in fns


class _Loaded:
    """The loaded packages; the ``fn`` string of an :class:`OpImpl` is resolved through it."""

    def __init__(self) -> None:
        self.packages: dict[str, Package] = {}

    def __getattr__(self, key: str) -> Package:
        try:
            return self.packages[key]
        except KeyError:
            raise AttributeError(key) from None

    def of(self, kind: type[P]) -> tuple[P, ...]:
        """The packages of one style."""
        return tuple(it for it in self.packages.values() if isinstance(it, kind))


LOADED: Final = _Loaded()


def where(key: str, name: str) -> str:
    """The ``fn`` string of an :class:`OpImpl` for an operator of a package."""
    return f"{__name__}:LOADED.{key}.{name}"


def keep(make: Callable[[str], P]) -> P:
    """Make a package with a new key, and keep it in :data:`LOADED`."""
    package = make(f"p{len(LOADED.packages)}")
    LOADED.packages[package.key] = package
    return package
