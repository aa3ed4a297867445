"""Types of the scripts' command-line arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from transformer_engine_fl.cli._folders import check_writable
from transformer_engine_fl.core.late import installed

__all__ = ["at_least", "picture_file", "result_file", "result_folder"]


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument that is an integer of at least ``least``."""

    def parsed(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
        return int(text)

    return parsed


def result_file(text: str) -> Path:
    """The type of an argument that names an output file, checked before the measurements."""
    path = Path(text)
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file")
    result_folder(str(path.parent))
    return path


def result_folder(text: str) -> Path:
    """The type of an argument that names an output folder, which exists or can be created."""
    try:
        check_writable(Path(text))
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def picture_file(text: str) -> Path:
    """The type of an argument that names a plot's file, which is written after all measurements."""
    if not text.endswith((".png", ".svg", ".pdf")):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png, .svg or .pdf")
    if not installed("matplotlib"):
        install = "pip install 'transformer_engine_fl[plot]'"
        raise argparse.ArgumentTypeError(f"plots need matplotlib, not installed here: {install}")
    return result_file(text)
