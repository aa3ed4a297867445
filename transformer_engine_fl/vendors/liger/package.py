"""One package in the style of Liger-Kernel: loading it, and registering what it has.

What a package has is read from the source of its ``ops`` module, which is imported when one
of its operators is first chosen. Each name in ``__all__`` becomes an operator of that name;
names that Liger has defaults for are bridged to contracts as well (``adapters``).
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from transformer_engine_fl.core.errors import PluginError, RegistrationError
from transformer_engine_fl.core.locks import LOADING
from transformer_engine_fl.core.log import logger
from transformer_engine_fl.core.manager import get_default_manager
from transformer_engine_fl.core.registry import OpRegistry
from transformer_engine_fl.core.types import DEFAULT_PRIORITY, BackendImplKind, OpImpl
from transformer_engine_fl.vendors import detection
from transformer_engine_fl.vendors.liger import adapters, base, shim

__all__ = ["LOADED", "LigerPackage", "load_liger_package", "register_function"]

_failures: Final[dict[str, str]] = {}
"""What was said of packages whose operators could not be imported, by key."""

_DTYPES: Final = frozenset({"float32", "bfloat16", "float16"})


@dataclass(frozen=True)
class LigerPackage:
    """An implementation that a package declares.

    Attributes:
        name: the vendor's name, by which policies go.
        devices: types of the devices that it supports.
        default_devices: those on which it is a candidate unasked.
        module_path: the module with its operators.
        origin: the package it is declared in.
        key: names it in :data:`LOADED`.
        exports: names in ``__all__`` of its operators' module.
    """

    name: str
    devices: tuple[str, ...]
    default_devices: tuple[str, ...]
    module_path: str
    origin: str
    key: str
    exports: tuple[str, ...]

    @functools.cached_property
    def ops(self) -> ModuleType:
        """The module with its operators; imported when first asked.

        Raises:
            PluginError: it cannot be imported; names the file and the line.
        """
        if self.key in _failures:
            raise PluginError(_failures[self.key])
        try:
            with shim.modules():
                return importlib.import_module(self.module_path)
        except (Exception, SystemExit) as error:
            blamed = _blamed(error, f"{self.name!r}: its operators cannot be imported")
            _failures[self.key] = str(blamed)
            logger.warning("%s", blamed)
            raise blamed from error

    def exported(self, name: str) -> Any:
        """What ``ops`` has under an exported name.

        Raises:
            PluginError: nothing, or nothing to call.
        """
        found = getattr(self.ops, name, None)
        if not callable(found):
            was = "nothing" if found is None else f"{type(found).__name__}, which is no operator,"
            raise PluginError(
                f"{self.name!r}: {self.ops.__file__} exports {name!r}, and has {was} under it"
            )
        return found

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """An operator's implementation: of a contract, or one of its own under its own name."""
        if name.startswith("__"):
            raise AttributeError(name)
        bridge = adapters.BRIDGES.get(name)
        if bridge is not None:
            return bridge.make(*(self.exported(it) for it in bridge.needs))
        return as_function(self.exported(name))

    def impls(self, exports: Iterable[str]) -> Iterator[OpImpl]:
        """Its implementations, by default where it is one and opt-in elsewhere.

        Args:
            exports: those that become operators of their own.
        """
        others = tuple(it for it in self.devices if it not in self.default_devices)
        for suffix, devices in (("", self.default_devices), (".opt_in", others)):
            if devices:
                yield from self._impls(exports, suffix, devices)

    def _impls(
        self, exports: Iterable[str], suffix: str, devices: tuple[str, ...]
    ) -> Iterator[OpImpl]:
        common: dict[str, Any] = {
            "impl_id": f"liger.{self.name.lower()}{suffix}",
            "kind": BackendImplKind.VENDOR,
            "vendor": self.name,
            "priority": DEFAULT_PRIORITY[BackendImplKind.VENDOR],
            "devices": devices,
            "is_available": lambda: detection.absent(devices) or True,
            "opt_in": bool(suffix),
        }
        where = f"{__name__}:LOADED.{self.key}"
        for op_name, bridge in adapters.BRIDGES.items():
            if set(bridge.needs) <= set(self.exports):
                fn = f"{where}.{op_name}"
                yield OpImpl(op_name=op_name, fn=fn, supported_dtypes=_DTYPES, **common)
        for name in exports:
            mutates = base.MUTATES.get(name)
            yield OpImpl(op_name=name, fn=f"{where}.{name}", mutates=mutates, **common)


def as_function(exported: Any) -> Callable[..., Any]:
    """A function, or an ``autograd.Function``'s ``apply`` with the parameters of its forward."""
    import torch

    kind: Any = exported
    if not (inspect.isclass(exported) and issubclass(exported, torch.autograd.Function)):
        function: Callable[..., Any] = exported
        return function
    parameters = list(inspect.signature(exported.forward).parameters.values())
    if exported.setup_context is torch.autograd.Function.setup_context:
        del parameters[0]  # the context, which comes first where it is not set up apart
    signature = inspect.Signature(parameters)

    def apply(*args: Any, **kwargs: Any) -> Any:
        if kwargs:  # which autograd does not take
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args
        return kind.apply(*args)

    apply.__name__ = exported.__name__
    apply.__doc__ = exported.__doc__
    apply.__signature__ = signature  # type: ignore[attr-defined]
    return apply


class _Loaded:
    """The packages that are loaded: what an :class:`OpImpl` names is looked up here."""

    def __init__(self) -> None:
        self.packages: dict[str, LigerPackage] = {}

    def __getattr__(self, key: str) -> LigerPackage:
        try:
            return self.packages[key]
        except KeyError:
            raise AttributeError(key) from None


LOADED: Final = _Loaded()


# --------------------------------------------------------------------------- loading


def load_liger_package(
    package: str | Path, registry: OpRegistry | None = None
) -> tuple[LigerPackage, ...]:
    """Load a package in Liger-Kernel's style, unchanged, and register what it has.

    Args:
        package: a module's name; or its folder, which is then what it would be inside
            Liger-Kernel: ``_name`` a hardware backend, ``name`` another implementation.
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
            get_default_manager().ensure_initialized()  # what is to be ranked beside it
        into = get_default_manager().registry if registry is None else registry
        for one in declared:
            _register(one, into)
    return declared


def register_function(
    name: str, missing: ImportError | None
) -> Callable[[OpRegistry], None] | None:
    """What registers a module that is no plugin of ours; None if it is no such package either.

    Args:
        name: the module's.
        missing: what could not be found when it was imported, if that failed.
    """
    if missing is not None:
        if (missing.name or "").partition(".")[0] != shim.LIGER:
            raise missing
    elif not _declared(name, sys.modules.get(shim.REGISTRY)):
        return None

    def register(registry: OpRegistry) -> None:
        load_liger_package(name, registry)

    return register


def _load(package: str | Path) -> tuple[LigerPackage, ...]:
    folder = Path(package)
    is_folder = isinstance(package, Path) or "/" in package
    what = f"package {str(package)!r}"
    try:
        with shim.modules() as registry:
            name = _module_of(folder) if is_folder else str(package)
            importlib.import_module(name)
            found = _declared(name, registry)
            exports = {info.name: _exports(info.module_path) for info in found}
    except (Exception, SystemExit) as error:
        if isinstance(error, PluginError):
            raise
        raise _blamed(error, f"{what} cannot be loaded") from error
    if not found:
        raise PluginError(
            f"{what} declares nothing: its __init__ calls register_impl(ImplInfo(...)) or "
            f"register_vendor(VendorInfo(...)) of {shim.REGISTRY}"
        )
    return tuple(_kept(info, name, exports[info.name]) for info in found)


def _module_of(folder: Path) -> str:
    """Make a folder importable where it would be inside Liger-Kernel; the module's name."""
    if not (folder / "__init__.py").is_file():
        raise PluginError(f"package {str(folder)!r} has no __init__.py")
    parent = "ops.backends" if folder.name.startswith("_") else "ops"
    name = f"{shim.LIGER}.{parent}.{folder.name}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
        assert spec is not None  # an invariant: of a file that ends in .py
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return name


def _declared(name: str, registry: Any) -> list[Any]:
    """What a module has declared, in Liger's registry or in ours that stands for it."""
    ours = sys.modules.get(f"{__package__}.served.registry")
    found = [getattr(it, "IMPL_REGISTRY", {}) for it in (registry, ours)]
    every = {id(info): info for one in found for info in one.values()}
    return [it for it in every.values() if f"{it.module_path}.".startswith(f"{name}.")]


def _kept(info: Any, origin: str, exports: tuple[str, ...]) -> LigerPackage:
    """What stands for a declaration; the same each time that it is loaded."""
    for known in LOADED.packages.values():
        if known.name.lower() == info.name.lower():
            if known.module_path == info.module_path:
                return known
            raise RegistrationError(
                f"{info.name!r} is declared by {known.origin!r} ({known.module_path}) and by "
                f"{origin!r} ({info.module_path}); a name stands for one implementation"
            )
    key = f"p{len(LOADED.packages)}"
    package = LigerPackage(
        info.name,
        tuple(info.devices),
        tuple(info.default_devices),
        info.module_path,
        origin,
        key,
        exports,
    )
    LOADED.packages[key] = package
    return package


def _register(package: LigerPackage, registry: OpRegistry) -> None:
    taken = [it for it in package.exports if registry.canonical(it) in registry.contracts]
    own = [it for it in package.exports if it not in taken]
    if own and _is_there(package, own[0], registry):
        return
    if taken:
        logger.warning(
            "%r exports %s, which the contracts here have for operators of their own; left out",
            package.name,
            ", ".join(map(repr, taken)),
        )
    base.register(registry)
    registry.register_many(package.impls(own))


def _is_there(package: LigerPackage, name: str, registry: OpRegistry) -> bool:
    fns = (str(impl.fn) for impl in registry.get_implementations(name))
    return f"{__name__}:LOADED.{package.key}.{name}" in fns


# ------------------------------------------------------------------ reading the source


def _exports(module_path: str) -> tuple[str, ...]:
    """The names that a module exports, from its source, or by importing it if need be.

    They are those in ``__all__``, and without that every public one.
    """
    spec = importlib.util.find_spec(module_path)
    if spec is None:
        raise ModuleNotFoundError(f"there is no module {module_path!r}", name=module_path)
    if spec.origin is not None and spec.origin.endswith(".py"):
        names = _stated(ast.parse(Path(spec.origin).read_text(encoding="utf-8"), spec.origin))
        if names is not None:
            return names
    module = importlib.import_module(module_path)
    public = [name for name in vars(module) if not name.startswith("_")]
    return tuple(dict.fromkeys(getattr(module, "__all__", public)))


def _stated(tree: ast.Module) -> tuple[str, ...] | None:
    """What a source says that it exports; None where only running it tells."""
    named = [it for it in ast.walk(tree) if isinstance(it, ast.Name) and it.id == "__all__"]
    if named:
        made = next((it for it in tree.body if named[0] in _targets(it)), None)
        return _literal(made) if len(named) == 1 and made is not None else None
    defined: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            defined += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.append(node.name)
        elif not isinstance(node, ast.Expr | ast.Import | ast.ImportFrom):
            return None
    if "*" in defined:
        return None
    return tuple(dict.fromkeys(name for name in defined if not name.startswith("_")))


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _literal(node: ast.Assign | ast.AnnAssign | ast.stmt) -> tuple[str, ...] | None:
    try:
        names = ast.literal_eval(getattr(node, "value", None))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return tuple(dict.fromkeys(names)) if all(isinstance(it, str) for it in names) else None


def _blamed(error: BaseException, what: str) -> PluginError:
    """The error with the line that it came from: the last one that is neither ours nor Python's."""
    others = (str(Path(__file__).parent), "<", importlib.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    own = [it for it in frames if not it.filename.startswith(others)]
    where = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename}:{error.lineno}: "
    return PluginError(f"{what}: {where}{type(error).__name__}: {error}")
