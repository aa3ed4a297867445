"""Where an error came from: the line of code to name in messages, and whether the code that
we called is at fault at all."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

__all__ = [
    "INTERMEDIATE_FILES",
    "INTERNAL_PATHS",
    "caused_by_caller",
    "error_details",
    "error_text",
    "exception_chain",
    "located_signature",
    "out_of_stack",
    "raised_at",
]

_ROOT: Final = Path(__file__).parents[1]
INTERNAL_PATHS: Final = (
    str(_ROOT / "core"),
    str(_ROOT / "backends" / "_register.py"),
    str(_ROOT / "vendors"),
)
"""Our code that registers and calls functions of other packages."""

INTERMEDIATE_FILES: Final[set[str]] = set()
"""Other packages' files through which our code calls functions; such code adds them here."""

_IGNORED_PATHS: Final = (
    *INTERNAL_PATHS,
    str(_ROOT / "integrations" / "aten"),
    str(_ROOT / "functional" / "_differentiable.py"),
    "<",
    importlib.__file__,
    contextlib.__file__,
)


def error_details(error: BaseException, most: int | None = None) -> str:
    """The error, and the line of code that it came from.

    Args:
        error: what was raised.
        most: characters of the error's own text.
    """
    where = raised_at(error)
    return error_text(error)[:most] + (f" (at {where})" if where else "")


def error_text(error: BaseException) -> str:
    """The error's class and text, or its class and that its ``str()`` raises."""
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except Exception as broken:  # noqa: BLE001 - a foreign class; the text says what went wrong
        return f"{kind}, whose str() raised {type(broken).__name__}"


def raised_at(error: BaseException, folder: Path | None = None) -> str | None:
    """``file:line`` in the code that we called: its own last line that ran, not its callees'.

    Args:
        error: what was raised.
        folder: where that code is; if none is given, or nothing in it ran, the package of the
            first line that is neither ours nor in a file of :data:`INTERMEDIATE_FILES`.

    Returns:
        None where no code but ours ran.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_IGNORED_PATHS)
    ]
    if not frames:
        return None
    others = [frame for frame in frames if frame.filename not in INTERMEDIATE_FILES]
    home = _home((others or frames)[0].filename)
    own = [frame for frame in frames if folder and frame.filename.startswith(f"{folder}/")]
    last = (own or [frame for frame in frames if frame.filename.startswith(home)])[-1]
    return f"{last.filename}:{last.lineno}"


def located_signature(function: Callable[..., Any], signature: inspect.Signature) -> str:
    """``file:line: name(a, b)`` of a function; for one in C without the place."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno}: " if code else ""
    return f"{where}{getattr(function, '__name__', type(function).__name__)}{signature}"


def out_of_stack(error: BaseException) -> bool:
    """Whether the code that we called ran out of stack because our callers had used most of it.

    That is the callers' fault. Code that recurses without end has used most of the stack
    itself.
    """
    if not any(isinstance(it, RecursionError) for it in exception_chain(error)):
        return False
    depth, frame = 0, sys._getframe(1)
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    return depth > sys.getrecursionlimit() // 2


def caused_by_caller(error: BaseException) -> bool:
    """Whether our callers caused an error, and not the code that we called.

    They interrupted it, or had used up the stack. What ends the program or skips a test counts
    as an error of the code that raised it.
    """
    return isinstance(error, KeyboardInterrupt) or out_of_stack(error)


def exception_chain(error: BaseException) -> Iterator[BaseException]:
    """The error, the errors that led to it in the code that we called, and those of its groups.

    An error that our caller is handling is in its ``__context__`` too, but with other frames.
    """
    left = [error]
    seen: set[int] = set()  # an error may be its own cause
    while left:
        found = left.pop()
        if id(found) in seen:
            continue
        yield found
        seen.add(id(found))
        if isinstance(found, BaseExceptionGroup):
            left += found.exceptions[::-1]
        if found.__cause__ is not None:  # raised ``from`` it
            left.append(found.__cause__)
        elif found.__context__ is not None:
            frames = [frame for frame, _ in traceback.walk_tb(found.__traceback__)]
            caught = found.__context__.__traceback__
            if caught is not None and caught.tb_frame in frames:
                left.append(found.__context__)


def _home(file: str) -> str:
    """The outermost package that a file belongs to, or the file itself."""
    folder = Path(file).parent
    found = None
    while (folder / "__init__.py").is_file():
        found, folder = folder, folder.parent
    return file if found is None else f"{found}/"
