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
    existing = next(it for it in (folder.absolute(), *folder.absolute().parents) if it.exists())
    if not existing.is_dir():
        raise NotADirectoryError(f"{existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"{existing} is not writable")
