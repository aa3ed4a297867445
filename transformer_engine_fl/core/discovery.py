"""Finding implementation sets and plugins, and registering each completely or not at all.

Three places are searched, in this order: the sets and vendor folders of this package,
the entry points of the group ``te_fl.plugin``, and the modules that
``TE_FL_PLUGIN_MODULES`` names. Modules of this package that it names come before the entry
points, as they set up what plugins need. A plugin that fails is reported with its traceback
and does not affect the others.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from transformer_engine_fl.core.blame import (
    error_details,
    error_text,
    located_signature,
    out_of_stack,
    raised_at,
)
from transformer_engine_fl.core.contract import signature_of
from transformer_engine_fl.core.errors import PluginError, nearest
from transformer_engine_fl.core.late import load_attribute
from transformer_engine_fl.core.log import logger
from transformer_engine_fl.core.policy import get_environment
from transformer_engine_fl.core.registry import Entry, OpRegistry
from transformer_engine_fl.core.types import OpImpl

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

__all__ = [
    "ENTRY_POINT_GROUP",
    "PLUGIN_API",
    "Source",
    "SourceReport",
    "broken_vendors",
    "find_sources",
    "install",
    "is_plugin",
]

ENTRY_POINT_GROUP: Final = "te_fl.plugin"
PLUGIN_API: Final = 1
"""Version of the plugin protocol; a plugin may state its own as ``TE_FL_PLUGIN_API``."""

_UNSTATED_API: Final = 1
"""The version of a plugin that states none: the first, whichever is current."""

PACKAGES: Final = "transformer_engine_fl.vendors.packages:register_function"
"""The function that loads packages written for other projects (a module or a folder): named,
not imported, as it builds on core."""

_SETS: Final = "transformer_engine_fl.backends"
_VENDORS: Final = f"{_SETS}.vendor"

_OURS: Final = f"{__name__.partition('.')[0]}."

_REGISTER_FUNCTIONS: Final = ("register", "te_fl_register")

Register = Callable[[OpRegistry], Any]


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What became of a set or plugin.

    Attributes:
        name: what it is known by, e.g. ``"entry point acme"``.
        origin: the module or the distribution it comes from.
        registered: labels ``operator/impl_id`` of what it registered.
        error: why it could not be registered, and at which line; None if it could.
        traceback: the error's traceback, as text.
        vendors: the vendors it would have registered, in lower case, where the error names them.
    """

    name: str
    origin: str
    registered: tuple[str, ...] = ()
    error: str | None = None
    traceback: str | None = None
    vendors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """A set or plugin that has been found and not yet loaded."""

    name: str
    origin: str
    load: Callable[[], Any]

    @property
    def key(self) -> str:
        """Unique, while two distributions may choose the same name."""
        return f"{self.name} ({self.origin})"


def find_sources(*, builtins: bool = True, plugins: bool = True) -> Iterator[Source]:
    """Every set and plugin there is to register; finding them does not import them."""
    if builtins:
        for package in (_SETS, _VENDORS):
            yield from _folders(package)
    if plugins:
        points = find_entry_points()
        named = get_environment().plugin_modules
        ours = [name for name in named if name.startswith(_OURS)]
        yield from map(_named, ours)
        for point in points:
            yield Source(f"entry point {point.name}", _distribution(point), _point_loader(point))
        modules = {_module_of(point) for point in points}
        for name in named:
            # A module that is an entry point too is one plugin, named twice.
            if name not in ours and name not in modules:
                yield _named(name)


def _named(name: str) -> Source:
    """A module or a folder that the environment names."""
    what = "folder" if "/" in name else "module"
    return Source(f"{what} {name}", "TE_FL_PLUGIN_MODULES", _plugin_importer(name))


def find_entry_points() -> tuple[EntryPoint, ...]:
    """The installed entry points of plugins, without loading them.

    A distribution whose entry points cannot be read is passed over, with a warning.
    """
    from importlib.metadata import distributions, entry_points  # slow to load; the only use

    try:
        return tuple(entry_points(group=ENTRY_POINT_GROUP))
    except Exception:  # noqa: BLE001 - some distribution is broken, most likely not a plugin's
        return tuple(point for it in distributions() for point in _points_of(it))


def _points_of(distribution: Distribution) -> Iterable[EntryPoint]:
    try:
        return distribution.entry_points.select(group=ENTRY_POINT_GROUP)
    except Exception as error:  # noqa: BLE001 - as above
        where = getattr(distribution, "_path", distribution)
        logger.warning("%s: its entry points cannot be read: %s", where, error_text(error))
        return ()


def _distribution(point: EntryPoint) -> str:
    """The name of an entry point's distribution; the point's value if its metadata is broken."""
    try:
        return (point.dist and point.dist.name) or point.value
    except Exception:  # noqa: BLE001 - half an installation; the module itself may be intact
        return point.value


def _module_of(point: EntryPoint) -> str | None:
    """The module that an entry point names; None if its value is malformed."""
    try:
        return point.module
    except (AttributeError, AssertionError, ValueError):  # which one depends on Python's version
        return None


def _point_loader(point: EntryPoint) -> Callable[[], Any]:
    """A function that loads what an entry point names.

    It raises a PluginError if the entry point's value is malformed.
    """

    def load() -> Any:
        module = _module_of(point)
        if module is None:
            raise PluginError(
                f"its entry point is {point.value!r}; it must be 'module' or 'module:function', "
                "in Python's names"
            )
        return point.load() if point.attr else _plugin_importer(module)()

    return load


def install(registry: OpRegistry, source: Source) -> SourceReport:
    """Register a source completely, or not at all; once for each registry."""
    done: SourceReport | None = registry.snapshot().sources.get(source.key)
    if done is not None:
        return done
    before = registry.snapshot().operators
    try:
        register = _register_function(source.load(), source)
        with registry.transaction(source.key) as staged:
            returned = register(staged)
            added = tuple(entry.impl.label for entry in staged.added)
            if not added and isinstance(returned, OpImpl | Iterable | Awaitable):
                raise PluginError(
                    f"{source.name}: its register(registry) returned a "
                    f"{type(returned).__name__} and registered nothing; pass each OpImpl to "
                    "registry.register_impl"
                )
            staged.state = report = SourceReport(source.name, source.origin, added)
            return report
    except KeyboardInterrupt as error:  # the user waits, and cannot see for which plugin
        where = raised_at(error)
        logger.warning(
            "interrupted while loading %s (%s)%s",
            source.name,
            source.origin,
            f" (at {where})" if where else "",
        )
        raise
    except BaseException as error:  # also what skips a test or ends the program
        if out_of_stack(error):  # it may load later, with more stack
            raise
        named = error.vendors if isinstance(error, PluginError) else ()
        report = SourceReport(
            source.name,
            source.origin,
            error=error_details(error) + _direct_registrations(registry, before),
            traceback="".join(traceback.format_exception(error)),
            vendors=tuple(it.lower() for it in named),
        )
    registry.record_source(source.key, report)
    logger.warning(
        "%s (%s) is left out: %s; `te-fl doctor` has the traceback",
        report.name,
        report.origin,
        report.error,
    )
    return report


def _direct_registrations(registry: OpRegistry, before: Mapping[str, tuple[Entry, ...]]) -> str:
    """A note on what a failed source registered in the registry itself, where it stays."""
    now = registry.snapshot().operators.items()
    new = [it.impl.label for op_name, its in now for it in its if it not in before.get(op_name, ())]
    kept = f"; registered directly, outside register(registry), and kept: {', '.join(new)}"
    return kept if new else ""


def broken_vendors(registry: OpRegistry) -> dict[str, str]:
    """Vendors whose package is left out, in lower case, each with the reason."""
    reports: Iterable[SourceReport] = registry.snapshot().sources.values()
    return {name: str(it.error) for it in reports for name in it.vendors}


def _folders(package: str) -> Iterator[Source]:
    """The sub-packages of a package that register something."""
    folder = importlib.import_module(package)
    for module in pkgutil.iter_modules(folder.__path__, f"{package}."):
        if module.ispkg and module.name != _VENDORS:
            name = module.name.removeprefix(f"{_SETS}.")
            yield Source(f"set {name}", module.name, _importer(module.name))


def _importer(name: str) -> Callable[[], ModuleType]:
    return lambda: importlib.import_module(name)


def is_plugin(module: ModuleType) -> bool:
    """Whether a module has a function that registers."""
    return any(hasattr(module, it) for it in _REGISTER_FUNCTIONS)


def _plugin_importer(name: str) -> Callable[[], Any]:
    """A function that imports a plugin module. For a package written for another project, or
    its folder, it returns a function that registers the package."""

    def load() -> Any:
        if "/" in name:
            return load_attribute(PACKAGES)(name, None)
        try:
            module = importlib.import_module(name)
        except ImportError as error:  # of a module, or of a name in one
            if error.name is None or error.name.partition(".")[0] == name.partition(".")[0]:
                if error.name is not None and f"{name}.".startswith(f"{error.name}."):
                    error.msg += "; searched sys.path, which includes the folders of PYTHONPATH"
                raise
            missing: ImportError | None = error
        else:
            if is_plugin(module):
                return module
            missing = None
        register = load_attribute(PACKAGES)(name, missing)
        return module if register is None else register

    return load


def _version(plugin: Any) -> Any:
    """The API version that a plugin states; of a function, the one that its module states."""
    module = sys.modules.get(getattr(plugin, "__module__", ""), plugin)
    stated = plugin if isinstance(plugin, ModuleType) else module
    return getattr(stated, "TE_FL_PLUGIN_API", _UNSTATED_API)


def _register_function(plugin: Any, source: Source) -> Register:
    """A plugin's register function: one of a module, or the plugin itself.

    Raises:
        PluginError: it has another API version, or no such function.
    """
    version = _version(plugin)
    if not isinstance(version, int):
        raise PluginError(
            f"{source.name}: TE_FL_PLUGIN_API is {version!r}, not an integer; "
            f"this version has plugin API {PLUGIN_API}"
        )
    if version != PLUGIN_API:
        raise PluginError(
            f"{source.name}: written for plugin API {version!r}, this version has {PLUGIN_API}; "
            "install a matching release of the plugin"
        )
    for name in _REGISTER_FUNCTIONS:
        register = getattr(plugin, name, None)
        if isinstance(plugin, ModuleType) and callable(register):
            return _of_a_registry(register, source)
    if callable(plugin):
        return _of_a_registry(plugin, source)
    file = getattr(plugin, "__file__", None)
    raise PluginError(
        f"{source.name}: {f'{file}: ' if file else ''}has neither register(registry) nor "
        f"te_fl_register(registry){_name_hint(plugin)}"
    )


def _of_a_registry(register: Register, source: Source) -> Register:
    """``register``, if it can be called with a registry alone.

    Raises:
        PluginError: it cannot.
    """
    signature = signature_of(register)
    if signature is not None:
        try:
            signature.bind(None)
        except TypeError:
            raise PluginError(
                f"{source.name}: {located_signature(register, signature)} must accept the registry "
                "as its only argument"
            ) from None
    return register


def _name_hint(plugin: Any) -> str:
    """A hint at a function of the module that may be meant as ``register``, or nothing."""
    own = (it for it in getattr(plugin, "__dict__", {}).values() if isinstance(it, FunctionType))
    names = [it.__name__ for it in own if it.__module__ == getattr(plugin, "__name__", None)]
    close = nearest("register", names)
    return f"; did you mean its {close!r}?" if close else ""
