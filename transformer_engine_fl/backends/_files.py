"""The user's files, replaced in one step: readers find the old file or the new one, whole."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["replaced"]


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file to write in the block; it then replaces ``path``.

    No reader finds half a file, and if the block raises, the old file stays. A symbolic link
    stays one, and the file keeps its mode. The file to write has the same suffix.

    Raises:
        OSError: nothing can be written in its folder, which is made if it is missing.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    written = Path(name)
    try:
        yield written
        written.chmod(mode)
        os.replace(written, path)
    finally:
        written.unlink(missing_ok=True)
