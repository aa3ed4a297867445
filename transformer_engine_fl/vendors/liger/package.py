"""Loads a package in the style of Liger-Kernel, and registers its functions.

Each name in ``__all__`` of its ``ops`` module becomes an operator of that name; some of Liger's
functions are bridged to contracts as well (``adapters``).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from transformer_engine_fl.core.blame import INTERMEDIATE_FILES
from transformer_engine_fl.core.discovery import is_plugin
from transformer_engine_fl.core.errors import PluginError, RegistrationError
from transformer_engine_fl.core.locks import LOADING
from transformer_engine_fl.core.log import logger
from transformer_engine_fl.core.manager import get_default_manager
from transformer_engine_fl.core.registry import OpRegistry
from transformer_engine_fl.core.types import OpImpl
from transformer_engine_fl.vendors import detection
from transformer_engine_fl.vendors.liger import adapters, base, shim
from transformer_engine_fl.vendors.packages.package import DTYPES, LOADED, Package, keep, where
from transformer_engine_fl.vendors.packages.source import exports, import_folder, package_error

__all__ = ["ROOTS", "LigerPackage", "declares", "load", "load_liger_package"]

ROOTS: Final = (shim.LIGER,)
"""The modules that a package of this style imports."""

_CALLERS: Final = ("torch.autograd.function", f"{shim.LIGER}.ops.utils")
"""Modules whose frames are between a call and a class's forward (``apply``,
``ensure_contiguous``)."""


@dataclass(frozen=True)
class LigerPackage(Package):
    """An implementation that a package declares.

    Attributes:
        default_devices: the devices on which it is a candidate by default.
        exports: names in ``__all__`` of its operators' module.
    """

    default_devices: tuple[str, ...]
    exports: tuple[str, ...]

    def serving(self) -> contextlib.AbstractContextManager[Any]:
        """Liger's modules."""
        return shim.modules()

    def live_names(self) -> Mapping[str, str]:
        """Each export is an operator of its name."""
        return {name: name for name in self.exports}

    def implementation(self, name: str) -> Callable[..., Any]:
        """The callable for a contract, or for an operator of its own."""
        bridge = adapters.BRIDGES.get(name)
        made = as_function(self.exported(name)) if bridge is None else self.bridged(bridge)
        modules = (sys.modules.get(it) for it in _CALLERS)  # imported by now, if used
        INTERMEDIATE_FILES.update(file for it in modules if (file := getattr(it, "__file__", None)))
        return made

    def as_function(self, exported: Any) -> Callable[..., Any]:
        """The ``apply`` of an ``autograd.Function``, or the function itself."""
        return as_function(exported)

    def impls(self, exports: Iterable[str]) -> Iterator[OpImpl]:
        """Its implementations: enabled on its default devices, and opt-in on the others.

        Args:
            exports: the exports to register as operators of their own.
        """
        others = tuple(it for it in self.devices if it not in self.default_devices)
        for suffix, devices in (("", self.default_devices), (".opt_in", others)):
            if devices:
                yield from self._impls(exports, suffix, devices)

    def _impls(
        self, exports: Iterable[str], suffix: str, devices: tuple[str, ...]
    ) -> Iterator[OpImpl]:
        common = self.fields(f"liger.{self.name.lower()}{suffix}", devices)
        common |= {
            "is_available": lambda: detection.absent(devices) or True,
            "opt_in": bool(suffix),
        }
        for op_name, bridge in adapters.BRIDGES.items():
            if set(bridge.needs) <= set(self.exports):
                fn = where(self.key, op_name)
                yield OpImpl(op_name=op_name, fn=fn, supported_dtypes=DTYPES, **common)
        for name in exports:
            mutates = base.MUTATES.get(name)
            yield OpImpl(op_name=name, fn=where(self.key, name), mutates=mutates, **common)


def as_function(exported: Any) -> Callable[..., Any]:
    """A function, or an ``autograd.Function``'s ``apply`` with the parameters of its forward."""
    import torch

    kind: Any = exported
    if not (inspect.isclass(exported) and issubclass(exported, torch.autograd.Function)):
        function: Callable[..., Any] = exported
        return function
    parameters = list(inspect.signature(exported.forward).parameters.values())
    if exported.setup_context is torch.autograd.Function.setup_context:
        del parameters[0]  # the context, a parameter of forward if there is no setup_context
    signature = inspect.Signature(parameters)

    def apply(*args: Any, **kwargs: Any) -> Any:
        if kwargs:  # autograd.Function.apply takes none
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args
        return kind.apply(*args)

    apply.__name__ = exported.__name__
    apply.__doc__ = exported.__doc__
    apply.__signature__ = signature  # type: ignore[attr-defined]
    apply.__wrapped__ = exported.forward  # type: ignore[attr-defined]
    return apply


# --------------------------------------------------------------------------- loading


def load_liger_package(
    package: str | Path, registry: OpRegistry | None = None
) -> tuple[LigerPackage, ...]:
    """Load a package in Liger-Kernel's style, unchanged, and register what it has.

    Args:
        package: a module's name; or a folder, which is imported where it would be inside
            Liger-Kernel: ``_name`` as a hardware backend, ``name`` as another implementation.
        registry: where to; the default manager's registry unless given.

    Returns:
        The implementations it declares.

    Raises:
        PluginError: it cannot be loaded, or declares nothing; names the file and the line.
        RegistrationError: a name it declares is taken by another package.
    """
    with LOADING:
        declared = _load(package)
        if registry is None:
            get_default_manager().ensure_initialized()  # first the sets that it is ranked with
        into = get_default_manager().registry if registry is None else registry
        for one in declared:
            _register(one, into)
    return declared


load = load_liger_package


def declares(module: ModuleType) -> bool:
    """Whether an imported module has declared an implementation."""
    return bool(_declared(module.__name__, _declarations(sys.modules.get(shim.REGISTRY))))


def _load(package: str | Path) -> tuple[LigerPackage, ...]:
    folder = Path(package)
    is_folder = isinstance(package, Path) or "/" in package
    what = f"package {str(package)!r}"
    name = ""
    found: list[Any] = []
    elsewhere: list[Any] = []
    try:
        with shim.modules() as registry:
            before = _declarations(registry)
            name = _module_of(folder) if is_folder else str(package)
            importlib.import_module(name)
            every = _declarations(registry)
            found = _declared(name, every)
            elsewhere = [it for it in every if it not in before and it not in found]
            exported = {info.name: exports(info.module_path) for info in found}
    except (Exception, SystemExit) as error:
        if isinstance(error, PluginError):
            raise
        names = (info.name for info in found)
        raise package_error(error, f"{what} cannot be loaded", vendors=names) from error
    if not found and elsewhere:
        raise PluginError(
            f"{what} declares {elsewhere[0].name!r} with the module path "
            f"{elsewhere[0].module_path!r}, which must be {name!r} or a module inside it"
        )
    if not found:
        hint = ""
        if is_plugin(sys.modules[name]):
            hint = f"; it is a plugin of this project, which is loaded by name: {folder.name!r}"
        raise PluginError(
            f"{what} declares nothing: its __init__ must call register_impl(ImplInfo(...)) or "
            f"register_vendor(VendorInfo(...)) of {shim.REGISTRY}{hint}"
        )
    return tuple(_kept(info, name, exported[info.name]) for info in found)


def _module_of(folder: Path) -> str:
    """Import a folder under the name it would have inside Liger-Kernel; returns that name."""
    parent = "ops.backends" if folder.name.startswith("_") else "ops"
    return import_folder(folder, f"{shim.LIGER}.{parent}.{folder.name}").__name__


def _declared(name: str, declarations: Iterable[Any]) -> list[Any]:
    """The declarations whose operators are in a module or inside it."""
    return [it for it in declarations if f"{it.module_path}.".startswith(f"{name}.")]


def _declarations(registry: Any) -> list[Any]:
    """What modules have declared, in Liger's registry or in the stand-in for it."""
    ours = sys.modules.get(f"{__package__}.served.registry")
    found = [getattr(it, "IMPL_REGISTRY", {}) for it in (registry, ours)]
    return list({id(info): info for one in found for info in one.values()}.values())


def _kept(info: Any, origin: str, exported: tuple[str, ...]) -> LigerPackage:
    """The package for a declaration; the same object each time that it is loaded."""
    for known in LOADED.of(LigerPackage):
        if known.name.lower() == info.name.lower():
            if known.module_path == info.module_path:
                return known
            raise RegistrationError(
                f"{info.name!r} is declared by {known.origin!r} ({known.module_path}) and by "
                f"{origin!r} ({info.module_path}); an implementation's name must be unique"
            )
    return keep(
        lambda key: LigerPackage(
            info.name,
            tuple(info.devices),
            info.module_path,
            origin,
            key,
            tuple(info.default_devices),
            exported,
        )
    )


def _register(package: LigerPackage, registry: OpRegistry) -> None:
    taken = [it for it in package.exports if registry.canonical(it) in registry.contracts]
    own = [it for it in package.exports if it not in taken]
    if own and package.is_registered(registry, own[0], own[0]):
        return
    if taken:
        logger.warning(
            "%r exports %s, which are names of other operators here; these exports are skipped",
            package.name,
            ", ".join(map(repr, taken)),
        )
    base.register(registry)
    registry.register_many(package.impls(own))
