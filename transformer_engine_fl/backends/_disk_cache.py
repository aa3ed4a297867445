"""A cache on the user's disk for what a set can make again, such as compiled kernels.

Each set has a folder of its own in ``transformer_engine_fl`` of ``XDG_CACHE_HOME``, or of
``~/.cache``. Its entries may be deleted at any time, for example by ``te-fl doctor --clear-cache``:
what is read is verified, and a damaged entry counts as missing. Problems with the disk are no
errors; where nothing can be kept, the first attempt warns.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from transformer_engine_fl.core.log import logger

__all__ = ["DiskCache", "Folder", "check_writable", "clear", "folders", "root"]

_MAGIC = b"TE-FL entry 1\n"
_HEAD = len(_MAGIC) + hashlib.sha256().digest_size


class Folder(NamedTuple):
    """A set's cached entries: their number and total bytes."""

    name: str
    entries: int
    bytes: int


def root() -> Path:
    """The folder of the sets' folders; it need not exist.

    Raises:
        RuntimeError: the user's home is unknown, as for a container's user without an entry in
            its list of users.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "transformer_engine_fl"


def check_writable() -> None:
    """Check that a process could write entries, also in folders that sets have already.

    Raises:
        OSError: it could not.
        RuntimeError: as for :func:`root`.
    """
    nearest = next(it for it in (root(), *root().parents) if it.exists())
    sets = root().iterdir() if root().is_dir() else ()
    for place in (nearest, *(it for it in sets if not it.name.startswith("."))):
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(f"{place} is not a writable folder")


def folders() -> list[Folder]:
    """The folders with entries, sorted by name.

    Raises:
        OSError: one cannot be read.
        RuntimeError: as for :func:`root`.
    """
    found = []
    for path in sorted(_folders()):
        sizes: list[int] = []
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            sizes.extend(it.stat().st_size for it in path.iterdir() if it.name[0] != ".")
        if sizes:
            found.append(Folder(path.name, len(sizes), sum(sizes)))
    return found


def clear() -> int:
    """Delete every entry, and leftovers of interrupted processes; returns the number of entries.

    Raises:
        OSError: one cannot be deleted; the others are.
        RuntimeError: as for :func:`root`.
    """
    deleted = 0
    failed: OSError | None = None
    for path in _folders():
        for entry in path.iterdir():
            try:
                entry.unlink(missing_ok=True)
            except OSError as error:
                failed = error
            else:
                deleted += not entry.name.startswith(".")
    if failed is not None:
        raise failed
    return deleted


def _folders() -> list[Path]:
    return [it for it in root().iterdir() if it.is_dir()] if root().is_dir() else []


class DiskCache:
    """The entries of one set, by name.

    Args:
        name: the name of the set's folder.
        what: the entries, as warnings call them.
    """

    def __init__(self, name: str, what: str) -> None:
        self._name = name
        self._what = what
        self._warned = False

    @property
    def folder(self) -> Path:
        """The folder of the entries; it need not exist. Raises as :func:`root` does."""
        return root() / self._name

    def read(self, name: str) -> bytes | None:
        """An entry's content; None if there is none or it is damaged."""
        try:
            path = self.folder / name
            content = path.read_bytes()
        except (OSError, RuntimeError):
            return None
        if content[:_HEAD] != _head(content[_HEAD:]):
            logger.info("%s is damaged and will be rebuilt", path)
            return None
        return content[_HEAD:]

    def write(self, name: str, content: bytes) -> None:
        """Write an entry in one step, also while others write or read it."""
        try:
            folder = self.folder
            folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_head(content) + content)
                os.replace(temporary, folder / name)
            except FileNotFoundError:  # what is here may be deleted at any time
                pass
            except BaseException:
                os.unlink(temporary)
                raise
        except (OSError, RuntimeError) as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s cannot be cached (%s): each process makes its own; "
                    "set XDG_CACHE_HOME to another folder",
                    self._what,
                    error,
                )


def _head(content: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(content).digest()
