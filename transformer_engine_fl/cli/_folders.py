"""Where results go: checked before the work, which may take hours."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["check_writable"]


def check_writable(folder: Path) -> None:
    """Check that files can be written in a folder, which exists or can be made.

    Raises:
        OSError: they cannot.
    """
    there = next(it for it in (folder.absolute(), *folder.absolute().parents) if it.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{there} is not writable")
