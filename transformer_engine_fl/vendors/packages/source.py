"""Reads what a package exports from its source, and locates errors in it.

A module is run only if its source does not show what it exports.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from transformer_engine_fl.core.blame import error_text, raised_at
from transformer_engine_fl.core.errors import PluginError, RegistrationError
from transformer_engine_fl.vendors.packages.shim import lacking

__all__ = ["exports", "import_folder", "no_folder", "package_error", "parsed", "stated"]


def package_error(
    error: BaseException, what: str, folder: Path | None = None, vendors: Iterable[str] = ()
) -> PluginError:
    """A PluginError for an error in a package, with the line that raised it.

    Args:
        error: what was raised.
        what: what failed, for the message.
        folder: the package's folder.
        vendors: the vendors that the package has declared so far.
    """
    where = raised_at(error, folder)
    project = lacking(error)
    hint = f"; {project} is not installed, and its stand-in here lacks that" if project else ""
    made = PluginError(f"{what}: {where + ': ' if where else ''}{error_text(error)}{hint}")
    made.vendors = tuple(vendors)
    return made


def no_folder(path: str | Path) -> PluginError:
    """The error for a path that is not a folder."""
    if Path(path).expanduser().is_file():
        return PluginError(
            f"{str(path)!r} is a file; add its folder to PYTHONPATH and name the module: "
            f"{Path(path).stem!r}"
        )
    return PluginError(f"no such folder: {str(path)!r}")


def import_folder(folder: Path, name: str) -> ModuleType:
    """Import a folder as the package ``name``; it stays in ``sys.modules``.

    Raises:
        PluginError: it is not a package.
        RegistrationError: another folder was imported under that name.
    """
    init = folder / "__init__.py"
    if not init.is_file():
        if folder.is_dir():
            raise PluginError(f"package {str(folder)!r} has no __init__.py")
        raise no_folder(folder)
    known = sys.modules.get(name)
    if known is not None:
        if Path(str(known.__file__)).resolve() != init.resolve():
            raise RegistrationError(
                f"{str(folder)!r} and {str(Path(str(known.__file__)).parent)!r} are both named "
                f"{folder.name!r}; rename one of the folders"
            )
        return known
    spec = importlib.util.spec_from_file_location(name, init)
    assert spec is not None  # invariant: a file that ends in .py has a spec
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for loaded in [it for it in sys.modules if f"{it}.".startswith(f"{name}.")]:
            del sys.modules[loaded]
        raise
    return module


def parsed(module_path: str) -> ast.Module | None:
    """A module's parsed source; None if it has no Python source.

    Raises:
        ModuleNotFoundError: there is no such module.
    """
    spec = importlib.util.find_spec(module_path)
    if spec is None:
        raise ModuleNotFoundError(f"no module named {module_path!r}", name=module_path)
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return ast.parse(Path(spec.origin).read_bytes(), spec.origin)  # bytes: ast reads the encoding


def exports(module_path: str) -> tuple[str, ...]:
    """The names that a module exports, from its source, or by importing it if necessary.

    These are the names in ``__all__``, or without it every public name.
    """
    tree = parsed(module_path)
    names = None if tree is None else stated(tree)
    if names is not None:
        return names
    module = importlib.import_module(module_path)
    public = [name for name in vars(module) if not name.startswith("_")]
    return tuple(dict.fromkeys(getattr(module, "__all__", public)))


def stated(tree: ast.Module) -> tuple[str, ...] | None:
    """The names that a source exports; None if only running it would show them."""
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
