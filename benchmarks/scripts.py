"""What the scripts have in common: what they take as arguments, and files written as a whole."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from transformer_engine_fl.cli._folders import check_writable
from transformer_engine_fl.core.late import installed

__all__ = ["at_least", "picture_file", "replaced", "result_file", "result_folder"]


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number from ``least`` on."""

    def parsed(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return parsed


def result_file(text: str) -> Path:
    """The type of an argument that names a file to be written, hours later perhaps."""
    path = Path(text)
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is no file")
    try:
        check_writable(path.parent)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def result_folder(text: str) -> Path:
    """The type of an argument that names a folder for results, which is there or can be made."""
    try:
        check_writable(Path(text))
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def picture_file(text: str) -> Path:
    """The same of a picture, which is drawn at the very end."""
    if not text.endswith((".png", ".svg", ".pdf")):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png, .svg or .pdf")
    if not installed("matplotlib"):
        install = "pip install 'transformer_engine_fl[plot]'"
        raise argparse.ArgumentTypeError(f"matplotlib, which draws it, is not installed: {install}")
    return result_file(text)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file to be written in the block, which then takes the place of ``path``.

    If it cannot be written, what was there stays; so does a link.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield written
        os.replace(written, path)
    finally:
        written.unlink(missing_ok=True)
