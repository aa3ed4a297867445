"""Files of the user's in which a part is put anew: whole before it, whole after it."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

__all__ = ["replace"]


def replace(path: Path, text: str) -> None:
    """Write a file in one step, so that nobody finds half of it and an error leaves what was there.

    A link stays one, and the file keeps its mode.

    Raises:
        OSError: nothing can be written in its folder.
    """
    path = Path(os.path.realpath(path))
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
