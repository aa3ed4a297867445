"""Where an error came from: the line of somebody's code, for messages that name it, and
whether it is that code's at all."""

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
    "BETWEEN",
    "ON_BEHALF",
    "behind",
    "of_the_caller",
    "out_of_stack",
    "raised_at",
    "said",
    "signed",
    "worded",
]

_ROOT: Final = Path(__file__).parents[1]
ON_BEHALF: Final = (
    str(_ROOT / "core"),
    str(_ROOT / "backends" / "_register.py"),
    str(_ROOT / "vendors"),
)
"""Our code that registers and calls what others give it."""

BETWEEN: Final[set[str]] = set()
"""Files of others through which what we call is run. Who calls through one adds it."""

_NOBODY: Final = (
    *ON_BEHALF,
    str(_ROOT / "integrations" / "aten"),
    str(_ROOT / "functional" / "_differentiable.py"),
    "<",
    importlib.__file__,
    contextlib.__file__,
)


def said(error: BaseException, most: int | None = None) -> str:
    """The error, and the line of code that it came from.

    Args:
        error: what was raised.
        most: characters of the error's own text.
    """
    where = raised_at(error)
    return worded(error)[:most] + (f" (at {where})" if where else "")


def worded(error: BaseException) -> str:
    """The error's class and text; the class alone is told of one whose text raises."""
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except Exception as broken:  # noqa: BLE001 - somebody's class; what went wrong is in the text
        return f"{kind}, whose str() raised {type(broken).__name__}"


def raised_at(error: BaseException, folder: Path | None = None) -> str | None:
    """``file:line`` of what we called: the last line that ran of it, not of what it called.

    Args:
        error: what was raised.
        folder: where its code is; unless given, or if none of that ran, it is the package of
            the first line that is neither ours nor of a file in :data:`BETWEEN`.

    Returns:
        None where no code but ours ran.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_NOBODY)
    ]
    if not frames:
        return None
    others = [frame for frame in frames if frame.filename not in BETWEEN]
    home = _home((others or frames)[0].filename)
    own = [frame for frame in frames if folder and frame.filename.startswith(f"{folder}/")]
    last = (own or [frame for frame in frames if frame.filename.startswith(home)])[-1]
    return f"{last.filename}:{last.lineno}"


def signed(function: Callable[..., Any], signature: inspect.Signature) -> str:
    """``file:line: name(a, b)`` of a function; without the place of one in C."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno}: " if code else ""
    return f"{where}{getattr(function, '__name__', type(function).__name__)}{signature}"


def out_of_stack(error: BaseException) -> bool:
    """Whether what we called ran out of stack, most of which those who called us had used.

    That is theirs to mend, and says nothing of what we called: one that recurses without
    end, called by anyone, has used the most itself.
    """
    if not any(isinstance(it, RecursionError) for it in behind(error)):
        return False
    depth, frame = 0, sys._getframe(1)
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    return depth > sys.getrecursionlimit() // 2


def of_the_caller(error: BaseException) -> bool:
    """Whether it is those who called us that an error came from, and not what we called.

    They have interrupted it, or run out of stack. What ends a program or skips a test is an
    answer like another error, of whoever raises it.
    """
    return isinstance(error, KeyboardInterrupt) or out_of_stack(error)


def behind(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that what we called has caught and raised it for.

    An error that our caller is handling meanwhile is behind it too, but came by other frames.
    """
    found: BaseException | None = error
    seen: set[int] = set()  # one may be given as its own cause
    while found is not None and id(found) not in seen:
        yield found
        seen.add(id(found))
        if found.__cause__ is not None:  # whoever raised it says so
            found = found.__cause__
            continue
        frames = [frame for frame, _ in traceback.walk_tb(found.__traceback__)]
        found = found.__context__
        caught = None if found is None else found.__traceback__
        if caught is None or caught.tb_frame not in frames:
            return


def _home(file: str) -> str:
    """The outermost package that a file belongs to, or the file itself."""
    folder = Path(file).parent
    found = None
    while (folder / "__init__.py").is_file():
        found, folder = folder, folder.parent
    return file if found is None else f"{found}/"
